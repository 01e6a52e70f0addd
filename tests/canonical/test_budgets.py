# SPDX-License-Identifier: Apache-2.0
"""Budgets of cases that are not plain: honest kernels are accepted, wrong ones are not."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from ids import IDS, made

from mla_oracle import UnsupportedError, check, expected, formats, generate
from mla_oracle.verdict.budget import budget, emulate
from mla_oracle.verdict.locate import in_row_axes
from mla_oracle.verdict.numerics import resolve

BF16 = ml_dtypes.bfloat16


def stored(results, dtype=BF16):
    """Results as a kernel stores them: out in `dtype`, the LSE in f32."""
    return {"out": results["out"].astype(dtype), "lse": results["lse"].astype(np.float32)}


def judged(case, actual, truth=None, **how):
    return check(case, actual, expected(case) if truth is None else truth, **how)


@pytest.mark.parametrize("options", IDS)
def test_honest_kernels_are_accepted(options):
    case = made(options)
    truth = expected(case)
    assert judged(case, stored(truth), truth).passed
    assert judged(case, stored(expected(case, precision="f32"), np.float32), truth).passed
    numerics = resolve(None, case, {"out": "bf16", "lse": "f32"})
    for seed in range(3):
        actual = stored(emulate(case, numerics, np.random.default_rng(seed)))
        plain, turned = in_row_axes(case, truth)
        assert check(plain, actual, turned).passed


@pytest.mark.parametrize("options", IDS)
def test_an_emulated_kernel_computes_the_case_and_its_budget_is_narrow(options):
    case = made(options)
    plain, truth = in_row_axes(case, expected(case))
    numerics = resolve(None, case, {"out": "f32", "lse": "f32"})
    found = emulate(plain, numerics, np.random.default_rng(5))
    most = 0.02 if "dtype" in options and "q_dtype" not in options else 2e-5
    assert np.abs(found["out"] - truth["out"]).max() < most
    seen = np.isfinite(truth["lse"])
    assert np.abs(found["lse"][seen] - truth["lse"][seen]).max() < most and (found["lse"] == truth["lse"])[~seen].all()
    allowed = budget(plain, numerics, truth).allowed(truth)
    assert allowed["out"].max() < 10 * most and allowed["lse"].max() < 10 * most


def test_a_cache_is_multiplied_as_its_reader_rounds_it():
    rows = "paged:heads=2,row=576,value=512,scale=0.06,lens=5,dtype=bf16"
    for name, rounds in (("fp8_ds_mla", "bf16"), ("fp8_e4m3", "f32"), ("fp8_ds_mla,reader=f32", "f32")):
        assert resolve(None, generate(f"{rows},format={name}"), {"out": "bf16"}).cache == rounds


@pytest.mark.parametrize("name", formats.NAMES)
def test_honest_kernels_over_a_format_are_accepted_and_a_wrong_scale_is_not(name):
    row = 512 if name in ("aiter_v4", "model1", "v4.1", "v4.1_fp4") else 576
    case = generate(f"paged:heads=4,row={row},value=512,scale=0.06,block=4,lens=5+40,dtype=bf16,format={name},topk=9")
    truth = expected(case)
    assert judged(case, stored(truth), truth).passed
    numerics = resolve(None, case, {"out": "bf16", "lse": "f32"})
    for seed in range(3):
        assert judged(case, stored(emulate(case, numerics, np.random.default_rng(seed))), truth).passed
    wrong = {"out": truth["out"] * 1.05, "lse": truth["lse"]}
    assert not judged(case, stored(wrong), truth).passed


WRONG = {
    "the window has one token more": ("window=3", {"window_left": 4}),
    "the window is ignored": ("window=3,tokens=2", {"window_left": None}),
    "the first tokens are not kept": ("window=3+0,first=2,tokens=2", {"window_first": 0}),
    "one token more is kept": ("window=3+0,first=2,tokens=2", {"window_first": 3}),
    "the window ends a token early": ("window=2+2,causal=false,tokens=4", {"window_right": 1}),
    "causality is ignored": ("topk=16,invalid=none,tokens=3", {"causal": False}),
    "the bias is ignored": ("bias=normal,tokens=2", {"bias": None}),
    "the lists are ignored": ("topk=6,tokens=2", {"topk_indices": None}),
    "the sinks are ignored": ("sinks=normal", {"sinks": None}),
    "the lse counts the sinks": ("sinks=normal", {"sinks_in_lse": True}),
    "the lse does not count the sinks": ("sinks=normal,sinks_in_lse=true", {"sinks_in_lse": False}),
    "the softcap is ignored": ("softcap=3", {"softcap": None}),
    "the softcap is another": ("softcap=3", {"softcap": 3.1}),
    "the value is the first columns": ("value_offset=4", {"value_offset": 0}),
    "q_scale is ignored": ("q_dtype=e4m3,q_scale=0.03", {"q_scale": None}),
    "output_scale is ignored": ("output_scale=0.5", {"output_scale": None}),
    "the lse is in base 2": ("topk=6", {"lse_base": "2"}),
    "empty rows have another lse": ("topk=8,invalid=rows,tokens=3", {"empty_lse": np.inf}),
}


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_rejected(name, dtype):
    options, change = WRONG[name]
    case = made(options, unread="numbers")
    wrong = expected(dataclasses.replace(case, **change))
    verdict = judged(case, stored(wrong, dtype))
    assert not verdict.passed, verdict.reason


def reversed_last(array):
    return array[..., ::-1]


WRONG_ARRAYS = {
    "an entry beyond topk_length counts": (
        "topk=6,topk_length=query,tokens=2,topk_outside=skip", lambda c: {"topk_length": c.topk_length + 1}
    ),
    "a key named twice counts once": ("topk=8,duplicates=true,invalid=none", lambda c: {
        "topk_indices": np.where(np.arange(8) % 2 == 1, -1, c.topk_indices)
    }),
    "a bias of -inf does not hide": ("bias=mask,tokens=2", lambda c: {"bias": np.maximum(c.bias, -1)}),
    "the sinks of the heads are swapped": ("sinks=normal", lambda c: {"sinks": reversed_last(c.sinks).copy()}),
    "the KV heads are swapped": ("kv_heads=2", lambda c: {"kv_cache": c.kv_cache[:, :, ::-1].copy()}),
    "the second cache is the first one": (
        "topk=4,extra=3+5+9+17+2+40,extra_block=4,topk_by=slot", lambda c: {"extra_topk_indices": c.topk_indices}
    ),
    "the second list is ignored": ("topk=4,extra=3+5+9+17+2+40", lambda c: {
        "extra_topk_indices": np.full_like(c.extra_topk_indices, -1)
    }),
    "the last request starts a query early": ("ragged=2+1+1+3+1+2", lambda c: {
        "qo_indptr": np.array([0, 2, 3, 4, 7, 7, 10], np.int32)
    }),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_a_kernel_that_takes_an_array_wrongly_is_rejected(name):
    options, change = WRONG_ARRAYS[name]
    case = made(options, unread="numbers")
    changed = change(case)
    if "topk_length" in changed:
        changed["topk_length"] = np.minimum(changed["topk_length"], 6).astype(np.int32)
    verdict = judged(case, stored(expected(dataclasses.replace(case, **changed))))
    assert not verdict.passed, verdict.reason


def test_a_sink_that_takes_all_the_weight_leaves_exactly_nothing():
    case = made("sinks=infinite")
    truth = expected(case)
    actual = stored(truth, np.float32)
    actual["out"][5, 2, 0] = 1e-6  # of the head whose sink is infinite
    assert case.sinks[2] == np.inf and not judged(case, actual, truth).passed


def test_numerics_are_declared_as_for_plain_cases():
    case = made("topk=16,tokens=2,dtype=bf16")
    truth = expected(case)
    assert judged(case, stored(truth), truth, numerics="flashmla").passed
    coarse = emulate(case, resolve("p=e4m3", case, {"out": "bf16", "lse": "f32"}), np.random.default_rng(1))
    assert not judged(case, stored(coarse), truth).passed
    assert judged(case, stored(coarse), truth, numerics="p=e4m3").passed


@pytest.mark.parametrize(("options", "numerics"), [("softcap=1e30", "tanh=sigmoid"), ("output_scale=1e300", None)])
def test_a_case_whose_budget_is_not_a_number_is_refused(options, numerics):
    case = made(options)
    truth = expected(case)
    wrong = {name: np.float64(2) * array for name, array in truth.items()}
    for actual in (truth, wrong):
        with pytest.raises(UnsupportedError, match=r"has no budget: its scores or results are beyond what f32 holds$"):
            check(case, actual, truth, numerics=numerics)


@pytest.mark.parametrize("softcap", [2e3, 1e6, 1e12, 1e19, 1e25, 1e30])
def test_a_softcap_beyond_all_scores_changes_no_budget(softcap):
    """tanh is x near 0, so nothing of a score is lost; a kernel that loses it has to be declared."""
    plain, capped = made("seed=7"), made(f"seed=7,softcap={softcap!r}")
    truth = expected(capped)
    units = []
    for case in (plain, capped):
        given = {"out": (1 + 3e-4) * truth["out"], "lse": truth["lse"] + 3e-4}
        figures = check(case, given, truth, numerics="p=f32,row_sum=f32").figures
        units.append([figures[name].units for name in ("out", "lse")])
        assert min(units[-1]) > 5 and figures["out"].rows_blind == 0
    np.testing.assert_allclose(units[1], units[0], rtol=0.3)


def test_a_pass_tells_where_the_budget_is_as_large_as_the_results():
    case = made("softcap=1e9")
    truth = expected(case)
    off = {"out": np.where(truth["out"] == 0, 0, 2 * truth["out"] + 1), "lse": truth["lse"]}
    assert not check(case, off, truth).passed
    verdict = check(case, off, truth, numerics="tanh=sigmoid")
    rows = int((truth["out"] != 0).any(axis=-1).sum())
    assert verdict.passed and verdict.figures["out"].rows_blind == rows
    said = f"the case is blind in {rows} of {truth['lse'].size} rows of out, whose budget is as large as they are"
    assert said in verdict.reason and "rows of lse, whose budget is 1 or more" in verdict.reason
    assert "blind" not in check(case, truth, truth).reason


def test_a_row_that_a_huge_key_makes_unjudgeable_is_not_accepted():
    case = generate("paged:heads=2,row=24,value=16,scale=0.3,lens=9")
    rows = case.kv_cache.copy()
    rows[case.block_table[0, 0], 8, 20] = 3e38
    case = dataclasses.replace(case, kv_cache=rows, id=None)
    truth = expected(case)
    with pytest.raises(UnsupportedError, match="has no budget"):
        check(case, {name: 3 * array + 1 for name, array in truth.items()}, truth)
