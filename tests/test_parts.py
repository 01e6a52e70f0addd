# SPDX-License-Identifier: Apache-2.0
"""A case in parts: where each row goes, and what a dense part rounds in either form."""

import dataclasses

import numpy as np
import pytest

from mla_oracle import dtypes
from mla_oracle.cases.inputs import generate
from mla_oracle.errors import InputError
from mla_oracle.verdict.emulate import choose
from mla_oracle.verdict.numerics import resolve
from mla_oracle.verdict.parts import parts_of

DENSE = "absorbed:heads=3,nope=8,rope=4,value=16,rank=16,queries=2,cached=9,dtype=bf16"


def is_bf16(x):
    return np.array_equal(x, dtypes.round_to(np.asarray(x, np.float64), "bf16").astype(np.float64))


def test_split_and_join_are_inverse() -> None:
    for case_id, shape in [(DENSE, (2, 3)), ("paged:heads=3,row=24,value=16,lens=5+9,tokens=2,scale=0.2", (2, 2, 3))]:
        case = generate(case_id)
        parts = parts_of(case, resolve(None, case, {"out": "f32"}))
        rows = np.arange(np.prod(shape) * 5).reshape(*shape, 5)
        assert parts.split(rows).shape == (parts.count, parts.rows, 5)
        np.testing.assert_array_equal(parts.join(parts.split(rows)), rows)


def test_a_dense_part_is_a_head_and_sees_its_prefix() -> None:
    case = generate(DENSE)
    part = parts_of(case, resolve(None, case, {"out": "f32"})).open(2)
    np.testing.assert_array_equal(part.naive.visible, [8, 9])
    assert part.naive.q.shape == (2, 12) and part.absorbed.q.shape == (2, 20)
    exact = case.c_kv.astype(np.float64) @ case.w_uk[2].astype(np.float64).T
    np.testing.assert_allclose(part.naive.keys[:, :8], exact, rtol=2.0**-8, atol=1e-2)
    assert is_bf16(part.naive.keys) and is_bf16(part.naive.values) and is_bf16(part.absorbed.q)
    assert not is_bf16(exact)


@pytest.mark.parametrize("query", ["bf16", "f32"])
def test_an_absorbed_part_rounds_its_latent_output(query: str) -> None:
    case = generate(DENSE)
    case = dataclasses.replace(case, w_uv=np.broadcast_to(np.eye(16), (3, 16, 16)).astype(case.w_uv.dtype))
    numerics = resolve(f"query={query},p=f32", case, {"out": "f64"})
    kernel = dataclasses.replace(choose(numerics, 9, np.random.default_rng(1)), naive=False)
    out, _ = parts_of(case, numerics).open(1).run(np.arange(2), kernel, np.random.default_rng(1))
    assert is_bf16(out) == (query == "bf16")


def test_a_case_of_another_kind_has_no_parts() -> None:
    case = generate(DENSE)
    with pytest.raises(InputError, match="a merge case has no numerics"):
        parts_of(generate("merge:"), resolve(None, case, {}))
