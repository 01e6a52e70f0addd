# SPDX-License-Identifier: Apache-2.0
"""The emulated kernels: their roundings are the formats' own, and what they compute is attention."""

import numpy as np
import pytest

from mla_oracle import dtypes
from mla_oracle.cases.inputs import generate
from mla_oracle.oracle import expected
from mla_oracle.verdict.budget import emulate
from mla_oracle.verdict.emulate import choose
from mla_oracle.verdict.numerics import resolve
from mla_oracle.verdict.roundings import accumulate, narrow

ID = "paged:heads=3,row=40,value=32,lens=0+1+17+150,block=16,tokens=2,scale=0.2"


@pytest.mark.parametrize("name", ["bf16", "f16", "e4m3"])
def test_narrow_rounds_as_the_format_does(name: str) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(20000) * 2.0 ** rng.integers(-20, 9, 20000)).astype(np.float32)
    ties = dtypes.round_to(x[:500], name).astype(np.float32)
    x[:250] = (ties[:250] + ties[250:500]) / 2
    wanted = dtypes.round_to(x, name, saturate=name == "e4m3").astype(np.float32)
    np.testing.assert_array_equal(narrow(x, name), wanted)
    if name != "e4m3":
        np.testing.assert_array_equal(narrow(np.float32([np.inf, -np.inf, -0.0]), name), [np.inf, -np.inf, 0])
    assert np.isnan(narrow(np.float32([np.nan, 1]), name)[0])


def test_tf32_keeps_ten_bits() -> None:
    x = np.float32([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-12, -1 - 2**-10])
    np.testing.assert_array_equal(narrow(x, "tf32"), np.float32([1 + 2**-10, 1, 1 + 2**-9, 1, -1 - 2**-10]))


def test_tensor_cores_truncate_and_never_exceed_a_sum_of_one_sign() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.random((4, 4096), np.float32), rng.random((4096, 8), np.float32)
    exact = a.astype(np.float64) @ b
    drift = (accumulate(None, a, b, 16, "mma") - exact) / exact
    assert (drift < 0).all() and (drift > -256 * 2.0**-23).all() and drift.mean() < -64 * 2.0**-25
    nearest = (accumulate(None, a, b, 16, "f32") - exact) / exact
    assert np.abs(nearest).max() < np.abs(drift).max() / 4


def test_an_f16_accumulator_stops_where_its_spacing_is_two() -> None:
    ones = np.ones((1, 3000), np.float32), np.ones((3000, 1), np.float32)
    assert accumulate(None, *ones, 1, "f16")[0, 0] == 2048
    assert accumulate(None, *ones, 16, "mma-f16")[0, 0] == 3000 - 3000 % 16 + 8


@pytest.mark.parametrize("spec", [None, "p=bf16,row_sum=p,splits=3", "p_base=normalised", "p_base=stale,tile=16"])
@pytest.mark.parametrize("inputs", ["normal", "peaked", "rising"])
@pytest.mark.parametrize("fine", [False, True])
def test_every_choice_is_attention(spec, inputs: str, fine: bool) -> None:
    case = generate(f"{ID},inputs={inputs}")
    truth = expected(case)
    numerics = resolve(spec, case, {"out": "f32", "lse": "f32"})
    loose = 2.0**-6 if numerics.p == "bf16" else 2.0**-14
    for seed in range(6):
        found = emulate(case, numerics, np.random.default_rng(seed), fine=fine)
        np.testing.assert_allclose(found["out"], truth["out"], rtol=0, atol=loose * np.abs(truth["out"]).max())
        np.testing.assert_allclose(found["lse"], truth["lse"], rtol=loose, atol=loose)


def test_equal_scores_give_the_mean_and_the_log_of_their_number() -> None:
    case = generate(f"{ID},inputs=flat,lse_base=2,causal=false")
    found = emulate(case, resolve(None, case, {"out": "f64"}), np.random.default_rng(1))
    np.testing.assert_allclose(found["lse"][2:], np.log2([17.0, 150])[:, None, None] * np.ones((2, 2, 3)), rtol=1e-6)
    rows = case.kv_cache.reshape(-1, 40)[:, :32]
    j = np.arange(17)
    mean = rows[case.block_table[2, j // 16] * 16 + j % 16].mean(0, dtype=np.float64)
    np.testing.assert_allclose(found["out"][2, 0, 0], mean, atol=1e-6)


def test_ranks_of_a_sharded_case_are_its_splits() -> None:
    case = generate(f"{ID},shards=3,shard_layout=interleaved")
    truth = expected(case)
    found = emulate(case, resolve("partials=f32", case, {"out": "f32"}), np.random.default_rng(2))
    np.testing.assert_allclose(found["out"], truth["out"], atol=1e-5)
    coarse = emulate(case, resolve("partials=bf16", case, {"out": "f32"}), np.random.default_rng(2))
    assert np.abs(coarse["out"] - truth["out"]).max() > 2.0**-10 * np.abs(truth["out"]).max()


def test_what_is_declared_is_not_drawn() -> None:
    case = generate(ID)
    fixed = resolve("splits=2,tile=48,p_base=max,row_sum=p,exp=exp2", case, {"out": "f32"})
    free = resolve(None, case, {"out": "f32"})
    drawn = [choose(fixed, 150, np.random.default_rng(seed)) for seed in range(30)]
    assert {(c.splits, c.tile, c.base, c.sum_rounded, c.exp) for c in drawn} == {(2, 48, "max", True, "exp2")}
    drawn = [choose(free, 150, np.random.default_rng(0), turn=turn) for turn in range(6)]
    assert {c.base for c in drawn} == {"max", "stale", "normalised"}
    assert {c.sum_rounded for c in drawn if c.base == "max"} == {True, False}
