# SPDX-License-Identifier: Apache-2.0
"""The checker checked: what it must reject, with the right words, and what it must accept."""

import math

import numpy as np
import pytest

from mla_oracle import dtypes
from mla_oracle.cases import PagedCase
from mla_oracle.cases.inputs import generate
from mla_oracle.errors import InputError
from mla_oracle.oracle import expected
from mla_oracle.verdict import compare

ID = "paged:heads=4,row=72,value=64,lens=0+1+17+300,block=16,tokens=2,scale=0.25"
FAMILIES = ("normal", "peaked", "flat", "position", "onehot", "tailed", "rising")


@pytest.fixture(scope="module")
def case() -> PagedCase:
    return generate(ID)


@pytest.fixture
def truth(case: PagedCase) -> dict:
    return expected(case)


def verdict(case, truth, **changes):
    return compare.check(case, {**truth, **changes}, truth)


def test_the_truth_passes_and_says_so(case, truth) -> None:
    v = verdict(case, truth)
    assert v.passed and v.as_json()["verdict"] == "pass"
    assert v.figures["out"].max_abs_error == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("sums_rounded_weights", [False, True])
def test_an_honest_kernel_passes(family: str, dtype: str, sums_rounded_weights: bool) -> None:
    """Two passes in f32, the weights rounded to the cache's dtype, then the output: what tensor cores do."""
    case = generate(f"{ID},inputs={family},dtype={dtype}")
    out = np.zeros((*case.q.shape[:3], 64), np.float32)
    lse = np.full(case.q.shape[:3], -np.inf, np.float32)
    q, kv = case.q.astype(np.float32), case.kv_cache.astype(np.float32)
    for b, length in enumerate(case.seq_lens):
        rows = kv[case.block_table[b, np.arange(length) // 16], np.arange(length) % 16]
        for t in range(2):
            seen = length - 1 + t
            if seen > 0:
                s = q[b, t] @ rows[:seen].T * np.float32(0.25)
                p = np.exp(s - s.max(-1, keepdims=True))
                rounded = dtypes.round_to(p, dtype).astype(np.float32)
                total = (rounded if sums_rounded_weights else p).sum(-1)
                lse[b, t] = s.max(-1) + np.log(total)
                out[b, t] = rounded @ rows[:seen, :64] / total[:, None]
    v = compare.check(case, {"out": dtypes.round_to(out, dtype), "lse": lse}, expected(case))
    assert v.passed, v.reason


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", ["zeros", "ones", "double", "transposed", "next head"])
def test_a_wrong_function_fails(family: str, wrong: str) -> None:
    case = generate(f"{ID},inputs={family},dtype=bf16")
    truth = expected(case)
    out = {
        "zeros": np.zeros_like(truth["out"]),
        "ones": np.ones_like(truth["out"]),
        "double": truth["out"] * 2,
        "transposed": truth["out"].swapaxes(1, 2).reshape(truth["out"].shape),
        "next head": np.roll(truth["out"], 1, axis=2),
    }[wrong]
    blind = family in ("flat", "position", "rising") and wrong == "next head"  # all heads have the same query
    assert compare.check(case, {"out": out}, truth).passed == blind


def test_one_page_dropped_shows_in_the_lse_of_a_bf16_case() -> None:
    case = generate("paged:heads=2,row=72,value=64,lens=4096,scale=0.0625,dtype=bf16,inputs=flat")
    truth = expected(case)
    v = compare.check(case, {**truth, "lse": truth["lse"] + math.log(4032 / 4096)}, truth)
    assert not v.passed and v.reason.startswith("lse is ")


@pytest.mark.parametrize(
    ("value", "said"),
    [(np.nan, "out is nan where"), (np.inf, "out is inf where"), (-np.inf, "out is -inf where")],
)
def test_a_nonfinite_value_fails_before_any_metric(case, truth, value: float, said: str) -> None:
    out = truth["out"].copy()
    out[3, 1, 2, 5] = value
    out[3, 0, 0, 0] = 1e30
    v = verdict(case, truth, out=out)
    assert not v.passed and "out" not in v.figures
    assert v.reason.startswith(said) and "request 3, query 1, head 2, column 5, token 299" in v.reason


def test_a_number_for_nan_fails_and_nan_for_nan_passes() -> None:
    case = generate(ID)
    cache = case.kv_cache.copy()
    cache[case.block_table[2, 0], 3, 70] = np.nan
    case = PagedCase(**{**case.tensors(), **case.conventions(), "kv_cache": cache})
    truth = expected(case)
    assert np.isnan(truth["out"][2]).all() and np.isnan(truth["lse"][2]).all()
    assert np.isfinite(truth["out"][3]).all()
    v = compare.check(case, truth, truth)
    assert v.passed
    assert v.nonfinite_inputs == [
        {"tensor": "request 2 of kv_cache", "index": [3, 70], "value": "nan", "count": 1}
    ]
    assert "out is 0.0 where nan is expected" in verdict(case, truth, out=np.nan_to_num(truth["out"])).reason


def test_the_empty_value_of_the_lse_is_judged(case, truth) -> None:
    lse = truth["lse"].copy()
    lse[0] = np.inf
    assert "lse is inf where -inf is expected, at request 0" in verdict(case, truth, lse=lse).reason


def test_shape_and_dtype_come_first(case, truth) -> None:
    assert verdict(case, truth, out=truth["out"][..., 1:]).reason == "out is [4, 2, 4, 63], expected [4, 2, 4, 64]"
    assert "out is i32, expected f64 or f32" in verdict(case, truth, out=truth["out"].astype(np.int32)).reason


def test_what_is_no_array_is_refused_and_what_is_one_elsewhere_is_taken(case, truth) -> None:
    class Foreign:
        __array_interface__ = truth["out"].__array_interface__

    assert verdict(case, truth, out=Foreign()).passed
    with pytest.raises(InputError, match="out is a list, expected an array"):
        verdict(case, truth, out=truth["out"].tolist())


def test_a_missing_lse_is_named_and_a_missing_out_refused(case, truth) -> None:
    assert compare.check(case, {"out": truth["out"]}, truth).missing == ["lse"]
    with pytest.raises(InputError, match="hold no out, expected out, lse"):
        compare.check(case, {"lse": truth["lse"]}, truth)
    with pytest.raises(InputError, match="hold output, expected out, lse"):
        verdict(case, truth, output=truth["out"])


def test_the_verdict_says_what_it_was_made_for_and_by_how_much(case, truth) -> None:
    good = {"out": truth["out"].astype(np.float32), "lse": truth["lse"].astype(np.float32)}
    v = compare.check(case, good, truth)
    assert v.reason.startswith("within budget of the f64 truth (out 0.") and "inferred from the dtypes" in v.reason
    assert "p=f32" in v.numerics["rounds"] and "emulated kernels" in v.numerics["budget"]
    figures = v.figures["out"]
    assert 0 < figures.units < 1 and figures.rows_over == 0 and figures.rows == 4 * 2 * 4
    assert figures.error < figures.allowed < 1e-4 and figures.tol is None

    v = compare.check(case, {**good, "out": good["out"] * np.float32(0.9)}, truth, numerics="strict")
    figures = v.figures["out"]
    assert not v.passed and figures.rows_over == 20 and figures.units > 100  # 12 rows are empty
    assert figures.error == pytest.approx(0.1, rel=1e-2) and figures.norm_ratio == pytest.approx(0.9)
    assert figures.cosine == pytest.approx(1)
    assert "its row is off by 0.1 of its size, the budget allows " in v.reason
    assert v.reason.endswith("numerics preset strict, the rest inferred from the dtypes")


def test_a_row_that_sees_nothing_is_exact_and_the_words_say_so(case, truth) -> None:
    out = truth["out"].copy()
    out[0, 1, 2, 5] = 1e-30
    v = compare.check(case, {**truth, "out": out}, truth)
    assert not v.passed and v.reason.startswith(
        "out is 1e-30 where 0 is expected at request 0, query 1, head 2, column 5: "
        "nothing is computed in this row, so that it is exact (1 such rows of 32)"
    )
    assert v.as_json()["figures"]["out"]["units"] == math.inf


def test_an_element_alone_can_decide(case, truth) -> None:
    out = truth["out"].astype(np.float32)
    out[3, 1, 2, 5] *= 1 + 1e-4
    v = compare.check(case, {"out": out}, truth)
    assert not v.passed and "request 3, query 1, head 2, column 5" in v.reason
    assert ", the budget of one element allows " in v.reason and "(1 such rows of 32)" in v.reason


def test_tolerances_that_are_asked_for_are_told_beside_and_decide_nothing(case, truth) -> None:
    off = {**truth, "out": truth["out"] + 1e-3}
    size = max(np.abs(truth["out"]).max(), 1)

    def accepts(actual=off, truth=truth, **asked) -> bool:
        told = compare.check(case, actual, truth, **asked).rules
        assert list(told) == ["tol" if "tol" in asked else "allclose"]
        return told.popitem()[1]["accepts"]

    assert not accepts(tol=0.9e-3 / size) and accepts(tol=1.1e-3 / size)
    assert not accepts(atol=0.9e-3) and accepts(atol=1.1e-3)
    assert not accepts(rtol=1e-2)  # elements near zero
    assert accepts({**truth, "out": truth["out"] * 1.01}, rtol=0.02)
    small = {**truth, "out": truth["out"] * 1e-3}
    assert accepts({**small, "out": small["out"] + 1e-4}, small, tol=2e-4)  # max(max |w|, 1)
    assert accepts(truth, tol=0) and accepts(truth, atol=0, rtol=0) and not accepts(tol=0) and not accepts(rtol=0)
    assert list(compare.check(case, off, truth, tol=1, atol=1, rules="nmse").rules) == ["tol", "allclose", "nmse"]

    asked = {"tol": 1, "atol": 1, "rtol": 1}
    assert compare.check(case, off, truth, **asked).reason == compare.check(case, off, truth).reason
    assert not compare.check(case, off, truth, **asked).passed
    good = {"out": truth["out"].astype(np.float32)}
    assert compare.check(case, good, truth, tol=0, atol=0).passed
    assert not compare.check(case, good, truth, tol=0, atol=0).rules["tol"]["accepts"]
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="tol is"):
            compare.check(case, off, truth, tol=bad)


def test_kinds_without_a_budget_are_told_the_same_way() -> None:
    case = generate("append:rank=8,rope=4,dtype=bf16")
    truth = expected(case)
    off = {"kv_cache": (truth["kv_cache"].astype(np.float32) * 1.01).astype(truth["kv_cache"].dtype)}
    v = compare.check(case, off, truth, rtol=0.02)
    assert not v.passed and v.rules["allclose"]["accepts"]


def test_rules_of_others_are_told_and_decide_nothing(case, truth) -> None:
    off = {**truth, "out": truth["out"] * 1.005}
    v = compare.check(case, off, truth, rules="nmse+seed")
    assert not v.passed
    assert v.rules["nmse"]["accepts"] and not v.rules["seed"]["accepts"]
    assert compare.check(case, truth, truth, rules="all").passed
    for wrong in (truth["out"] * np.nan, truth["out"][:1]):  # results that are not measured are judged, too
        told = compare.check(case, {"out": wrong}, truth, rules="all", tol=1e9).rules
        assert len(told) == 9 and not any(rule["accepts"] for rule in told.values())
    with pytest.raises(InputError, match="rule is 'x'"):
        compare.check(case, truth, truth, rules="x")


def test_a_kind_without_numerics_takes_none() -> None:
    case = generate("merge:")
    with pytest.raises(InputError, match="numerics is given for a merge case"):
        compare.check(case, expected(case), expected(case), numerics="strict")


def test_the_default_tolerances_are_their_expressions(case) -> None:
    sums = (72 + 300) * 2.0**-24
    assert compare.rounding(case, "f32").row == compare.rounding(case, "f32").lse == 4 * 2.0**-24 + sums
    assert compare.rounding(case, "f32").lse_floor == 5 * 2.0**-24 + sums
    assert compare.rounding(case, "bf16").row == 4 * 2.0**-8 + sums
    half = compare.rounding(generate(f"{ID},dtype=f16"), "f32")
    assert half.row == 4 * 2.0**-11 + sums
    assert half.lse == 4 * 2.0**-24 + sums
    assert half.lse_floor == 2.0**-11 + 4 * 2.0**-24 + sums
    assert compare.rounding(generate("append:rank=8,rope=4"), "f32") == (0, 0, 0)


def test_an_append_case_is_judged_by_bytes() -> None:
    case = generate("append:rank=8,rope=4,dtype=bf16")
    truth = expected(case)
    assert compare.check(case, truth, truth).passed
    cache = truth["kv_cache"].copy()
    cache.view(np.uint16)[1, 2, 3] ^= 1
    assert "page 1, slot 2, column 3" in compare.check(case, {"kv_cache": cache}, truth).reason
    assert "is f32, expected bf16" in compare.check(
        case, {"kv_cache": cache.astype(np.float32)}, truth
    ).reason


def test_sharded_partials_are_judged_by_rank() -> None:
    case = generate("paged:heads=2,row=40,value=32,lens=7+130,block=16,scale=0.5,shards=3")
    truth = expected(case)
    partial = truth["partial_out"].copy()
    partial[2, 1, 0, 5] += 1
    v = compare.check(case, {**truth, "partial_out": partial}, truth)
    assert "partial_out is " in v.reason and "rank 2, request 1, head 0, column 5" in v.reason
