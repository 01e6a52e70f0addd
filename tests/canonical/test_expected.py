# SPDX-License-Identifier: Apache-2.0
"""Cases with options go through the oracle like all others: expected results, the backend, the checks of shapes."""

import dataclasses

import numpy as np
import pytest

from mla_oracle import InputError, UnsupportedError, decode, expected, generate
from mla_oracle.commands import run
from mla_oracle.files.exchange import write_case
from mla_oracle.oracle import backend_of, check_shapes, kernel_of

PLAIN = "paged:heads=2,row=12,value=8,lens=5+3,block=4,scale=0.5,tokens=2"


def windowed(**changes):
    return dataclasses.replace(generate(PLAIN), id=None, window_left=1, lse_axes="BHT", **changes)


@pytest.mark.parametrize("backend", ["auto", "strict"])
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_expected_is_decode(precision, backend):
    case = windowed()
    found = expected(case, precision=precision, backend=backend)
    conventions = {name: x for name, x in case.conventions().items() if not name.startswith("shard")}
    out, lse = decode(**case.tensors(), **conventions, precision=precision)
    assert list(found) == ["out", "lse"] and found["lse"].shape == (2, 2, 2)
    assert found["out"].tobytes() == out.tobytes() and found["lse"].tobytes() == lse.tobytes()


def test_it_is_computed_by_strict_and_says_so(tmp_path):
    case = windowed()
    assert backend_of(case) == backend_of(case, "strict") == "strict" and kernel_of(case, "strict") is None
    write_case(tmp_path / "case", case)
    assert run(str(tmp_path / "case"))["backend"] == "strict"


def test_the_fast_tier_computes_every_option():
    case = windowed(softcap=3.0, bias=np.ones((2, 2, 13), np.float32))
    fast, strict = (expected(case, precision="f64", backend=backend)["out"] for backend in ("fast", "strict"))
    assert backend_of(case, "fast") == "fast" and np.allclose(fast, strict, rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", ["cuda", "ptx"])
def test_a_backend_that_does_not_know_an_option_is_refused_by_its_name(backend):
    assert backend_of(windowed(), backend) == backend
    with pytest.raises(UnsupportedError, match=rf"^softcap is not supported by backend '{backend}'$"):
        backend_of(windowed(softcap=3.0), backend)


def test_pages_apart_and_shards_are_refused_with_an_option():
    count = len(windowed().kv_cache)
    apart = windowed(page_ids=np.arange(count), num_blocks=count, block_stride=4096)
    for case, who in ((apart, "page_ids"), (windowed(shards=2), "shards")):
        for use in (expected, check_shapes):
            with pytest.raises(UnsupportedError, match=f"^window_left is not supported by {who}$"):
                use(case)


def test_shapes_and_contradictions_are_checked_before_anything_is_computed():
    check_shapes(windowed())
    with pytest.raises(InputError, match=r"^sinks is \[3\], expected \[H\] with H = 2 on axis 0$"):
        check_shapes(windowed(sinks=np.zeros(3, np.float32)))
    with pytest.raises(InputError, match=r"^window_right is 1, expected None or 0 with causal$"):
        check_shapes(windowed(window_right=1))
