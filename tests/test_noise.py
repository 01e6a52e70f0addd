# SPDX-License-Identifier: Apache-2.0
"""The noise is what emulated kernels make: near 1 where one rounding decides, of its order where sums do."""

import math

import numpy as np
import pytest

from mla_oracle import dtypes
from mla_oracle.cases.inputs import generate
from mla_oracle.oracle import expected
from mla_oracle.verdict.budget import budget, emulate
from mla_oracle.verdict.noise import RMS, drift, spacing, walk
from mla_oracle.verdict.numerics import resolve


def in_units_of_noise(case_id, spec, out, *, fine=False, kernels=12):
    """(RMS over rows, columns and kernels of error / noise) of out and of the LSE."""
    case = generate(case_id)
    truth = expected(case)
    numerics = resolve(spec, case, {"out": out, "lse": "f32"})
    scale = budget(case, numerics, truth, draws=1)
    found = [emulate(case, numerics, np.random.default_rng(seed), fine=fine) for seed in range(kernels)]
    return tuple(
        float(np.sqrt(np.mean([np.square((f[name] - truth[name]) / noise) for f in found])))
        for name, noise in (("out", scale.out_scale), ("lse", scale.lse_scale))
    )


def test_the_constant_is_the_rms_of_a_rounding() -> None:
    x = 2 ** np.random.default_rng(3).random(200000)
    error = (dtypes.round_to(x, "bf16").astype(np.float64) - x) / x
    assert np.sqrt(np.mean(error**2)) * 2**8 == pytest.approx(RMS, rel=0.01)


def test_a_lone_key_leaves_the_rounding_of_the_output() -> None:
    case_id = "paged:heads=8,row=576,value=512,lens=1,scale=0.0625,dtype=f32"
    assert in_units_of_noise(case_id, "p=f32", "bf16")[0] == pytest.approx(1, abs=0.05)
    assert in_units_of_noise(case_id, "p=f32", "f16")[0] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_weights_of_many_keys_leave_theirs(out: str) -> None:
    case_id = "paged:heads=16,row=72,value=64,lens=900,scale=0.12,dtype=bf16"
    of_out, of_lse = in_units_of_noise(case_id, "p_base=max,row_sum=p,splits=1", out)
    assert of_out == pytest.approx(1, abs=0.1)
    assert of_lse == pytest.approx(1, abs=0.3)


def test_weights_of_two_numbers_of_bf16_leave_what_both_do_not_hold() -> None:
    case_id = "paged:heads=16,row=72,value=64,lens=900,scale=0.12,dtype=bf16"
    sums = "score_accumulator=f32,value_accumulator=f32,p_base=max,row_sum=f32,exp=exp,splits=1"
    # The first number leaves less than it may, most times, and the second then rounds more finely: 0.76 of its unit.
    assert 0.5 < in_units_of_noise(case_id, f"p=bf16x2,{sums}", "f32")[0] < 0.8


@pytest.mark.parametrize("options", ["", ",softcap=50"])
def test_a_query_that_is_scaled_and_rounded_leaves_its_rounding(options: str) -> None:
    case_id = f"paged:heads=16,row=72,value=64,lens=900,scale=0.12,dtype=bf16{options}"
    spec = "scaled=q,p=f32,row_sum=f32,score_accumulator=f32,value_accumulator=f32"
    of_out, of_lse = in_units_of_noise(case_id, spec, "f32")
    assert of_out == pytest.approx(1, abs=0.25)
    assert 0.05 < of_lse < 2
    # A power of two moves no rounding, and what is left is of sums in f32.
    exact = case_id.replace("0.12", "0.125")
    of_out = in_units_of_noise(exact, spec, "f32")[0]
    assert 0.05 < of_out < 2


def test_scores_of_bf16_leave_theirs() -> None:
    case_id = "paged:heads=16,row=72,value=64,lens=900,scale=0.12,dtype=bf16"
    of_out, of_lse = in_units_of_noise(case_id, "scores=bf16,p=f32,row_sum=f32", "f32")
    assert of_out == pytest.approx(1, abs=0.25)
    assert 0.02 < of_lse < 1  # errors of scores are taken to add up, and here they do not


@pytest.mark.parametrize("inputs", ["normal", "peaked", "position"])
def test_sums_in_f32_are_of_its_order(inputs: str) -> None:
    case_id = f"paged:heads=8,row=576,value=512,lens=600,scale=0.0625,inputs={inputs}"
    assert 0.03 < in_units_of_noise(case_id, None, "f32", fine=True, kernels=3)[0] < 1.5


@pytest.mark.parametrize("spec", ["value_accumulator=f16", "value_accumulator=mma-f16"])
def test_sums_in_f16_are_of_its_order(spec: str) -> None:
    case_id = "paged:heads=4,row=72,value=64,lens=300,scale=0.12,dtype=f16"
    assert 0.2 < in_units_of_noise(case_id, f"p=f16,{spec}", "f32", kernels=4)[0] < 1.5


def test_partial_outputs_of_bf16_leave_theirs() -> None:
    case_id = "paged:heads=16,row=72,value=64,lens=300,scale=0.12"
    assert in_units_of_noise(case_id, "partials=bf16,splits=4", "f32")[0] == pytest.approx(1, abs=0.4)


def test_small_weights_of_e4m3_round_by_its_smallest_step() -> None:
    """Relative to the largest of 2000 keys, most weights lie below the normal range."""
    case_id = "paged:heads=16,row=72,value=64,lens=2000,scale=0.25,dtype=bf16"
    of_out = in_units_of_noise(case_id, "p=e4m3,p_base=max,row_sum=f32,splits=1", "f32")[0]
    assert of_out == pytest.approx(1, abs=0.4)


def test_a_sum_walks_and_a_truncated_one_drifts() -> None:
    assert walk("f32", 10000) == walk("mma", 10000) == pytest.approx(100 * RMS * 2.0**-24)
    assert walk("f16", 100) == pytest.approx(RMS * 2.0**-11 * math.sqrt(101))
    assert walk("mma-f16", 160) == pytest.approx(RMS * 2.0**-11 * math.sqrt(11))
    assert drift("mma", 16000) == 500 * 2.0**-24
    assert drift("f32", 16000) == drift("f16", 16000) == 0


def test_scores_that_drift_alike_leave_the_output_and_move_the_lse() -> None:
    """Scores up to 1000, of which tensor cores lose the same share."""
    case = generate("paged:heads=4,row=576,value=512,lens=2000,scale=0.0625,inputs=rising,dtype=bf16")
    truth = expected(case)
    sums = [budget(case, resolve(f"p=f32,score_accumulator={how}", case, {"out": "f32", "lse": "f32"}), truth, draws=1)
            for how in ("f32", "mma")]  # fmt: skip
    assert np.median(sums[1].out_scale / sums[0].out_scale) < 1.1
    assert np.median(sums[1].lse_scale / sums[0].lse_scale) > 1.5


def test_spacing_is_the_distance_of_neighbours() -> None:
    for name in ("f32", "bf16", "f16"):
        x = dtypes.round_to(np.array([1.0, 1.5, 3.75, 1e-3, -700.0]), name)
        bits = x.view(np.int16 if x.itemsize == 2 else np.int32).copy() + 1
        step = np.abs(bits.view(x.dtype).astype(np.float64) - x.astype(np.float64))
        np.testing.assert_array_equal(spacing(x.astype(np.float64), name), step)
    np.testing.assert_array_equal(spacing(np.array([0.0, 1e-9]), "f16"), [2.0**-24, 2.0**-24])
