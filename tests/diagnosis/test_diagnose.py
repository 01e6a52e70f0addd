# SPDX-License-Identifier: Apache-2.0
"""diagnose: classes and constants that the bank does not hold, compositions, honest doubt, and what is no bug."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from buggy import Judged, run

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import diagnose, made, suspects, variants
from mla_oracle.diagnosis.facts import localise
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.errors import InputError
from mla_oracle.mutants import (
    Problem,
    bank,
    causal,
    columns,
    compose,
    equivalences,
    find,
    lengths,
    rope,
    scores,
    tail,
    temperature,
)
from mla_oracle.mutants.mutant import Mutant
from mla_oracle.oracle import expected

ID = "paged:geometry=deepseek-v3,heads=6,row=96,value=64,lens=65+0+1+131+60,tokens=2,unread=numbers,dtype=bf16,block=32"
CASE = generate(ID)


@cache
def judged():
    return Judged(CASE, {"out": "bf16", "lse": "f32"})


def found(mutant, case=CASE, *, lse=True, separate=True):
    actual = run(case, mutant)
    if case is CASE and lse and not separate:
        return judged().diagnose(actual)
    return diagnose(case, actual["out"], actual["lse"] if lse else None, separate=separate)


CONSTANTS = {
    "uniform temperature": (temperature.factor(0.7371), "factor", 0.7371),
    "unwanted soft cap": (scores.soft_cap(4.4), "cap", 4.4),
    "unwanted bias": (scores.distance_bias(0.013), "slope", 0.013),
    "length metadata": (lengths.shift(-7), "shift", -7),
    "window": (causal.window(37), "width", 37),
    "pad lanes in denominator": (tail.pads(48), "tile", 48),
    "sink multiplicity": (made.sink(3.2), "logit", 3.2),
    "missing V descale": (columns.factor(1.37), "factor", 1.37),
    "LSE value": (made.lse_plus(0.31), "value", 0.31),
    "wrong position": (rope.shifted(5, "q"), "by", 5),
}


@pytest.mark.parametrize("family", CONSTANTS)
def test_a_constant_that_is_not_in_the_bank_is_estimated(family):
    mutant, name, value = CONSTANTS[family]
    diagnosis = found(mutant, separate=False)
    assert diagnosis.named, diagnosis.summary
    best = diagnosis.classes[0]
    assert best.family == family
    assert best.mutant.parameters[name] == pytest.approx(value, rel=0.01)
    assert best.share > 0.97


@pytest.mark.parametrize("start, end, twice", [(19, 20, False), (64, 80, False), (64, 80, True)])
def test_keys_that_are_lost_or_counted_twice_are_named(start, end, twice):
    diagnosis = found(made.run(start, end, twice=twice), separate=False)
    assert diagnosis.classes[0].family == "key lost or repeated"
    assert diagnosis.classes[0].mutant.parameters == {"first": start, "last": end - 1}


@pytest.mark.parametrize("name", ["merge.equal, 7 splits", "online.acc-not-rescaled, tiles of 16"])
def test_other_numbers_of_splits_and_tiles_are_tried(name):
    mutant = next(m for m in variants.recut(Problem(CASE), bank()) if m.name == name)
    best = found(mutant, separate=False).classes[0]
    assert best.mutant.name == name or name in best.rivals + best.variants


@pytest.mark.parametrize(
    "lens, tile, tokens",
    [("65+0+30+131", 48, 1), ("250+11+77", 96, 1), ("500+192+20", 192, 1), ("65+131+60", 37, 1), ("65+96+131", 48, 2)],
)
def test_a_tile_that_lengths_were_cut_to_is_estimated(lens, tile, tokens):
    case = generate(f"paged:heads=2,row=40,value=32,scale=0.3,block=32,dtype=bf16,lens={lens},tokens={tokens}")
    for mutant in (lengths.whole_tiles(tile), lengths.tail_lost(tile))[: 1 + (tokens > 1)]:
        best = found(mutant, case, separate=False).classes[0]
        assert (best.family, best.share) == ("length metadata", pytest.approx(1, abs=0.01))
        assert mutant.name in (best.mutant.name, *best.variants)
        assert best.mutant.parameters["tile"] == tile


def test_a_usual_tile_that_lengths_were_cut_to_is_found_without_an_lse():
    case = generate("paged:heads=2,row=40,value=32,scale=0.3,block=32,dtype=bf16,lens=250+70+331")
    for tile in (48, 96, 192):
        best = found(lengths.whole_tiles(tile), case, lse=False, separate=False).classes[0]
        assert best.mutant.parameters == {"tile": tile}


def test_a_temperature_is_estimated_without_an_lse():
    diagnosis = found(temperature.factor(0.62), lse=False, separate=False)
    assert diagnosis.classes[0].constants["factor"] == pytest.approx(0.62, rel=0.01)


@pytest.mark.parametrize("factor", [0.93, 0.98, 1.03, 1.08])
@pytest.mark.parametrize("case_id", [ID, "naive:heads=4,nope=24,rope=8,value=32,rank=64,queries=3,cached=17"])
def test_a_temperature_near_one_is_a_temperature(factor, case_id):
    case = CASE if case_id is ID else generate(case_id)
    best = found(temperature.factor(factor), case, lse="lse" in case.results, separate=False).classes[0]
    assert best.family == "uniform temperature"
    assert best.constants["factor"] == pytest.approx(factor, rel=2e-3)


@pytest.mark.parametrize("value", [np.nan, 0.0, 3.0])
@pytest.mark.parametrize("names", [("out",), ("out", "lse")])
@pytest.mark.parametrize("where", [np.s_[:, 1], np.s_[2, :2]])
def test_rows_that_hold_one_number_were_not_computed(value, names, where):
    case = generate("paged:heads=3,row=20,value=12,scale=0.3,lens=8+5+71,block=4,dtype=bf16")
    actual = {name: array.astype(np.float32) for name, array in expected(case, precision="f64").items()}
    for name in names:
        actual[name][where] = value
    best = diagnose(case, **{f"actual_{name}": array for name, array in actual.items()}, separate=False).classes[0]
    assert best.family == "rows not computed" and best.share > 0.99


def test_the_factor_of_a_named_temperature_is_told():
    best = found(find("temperature.row-width"), separate=False).classes[0]
    assert best.constants["factor"] == pytest.approx(96**-0.5 / CASE.softmax_scale, rel=0.01)
    assert "factor " in best.text


@pytest.mark.parametrize(
    "one, two",
    [
        (temperature.factor(0.7371), find("rope.pairing")),
        (find("causal.none"), find("value.row-end")),
        (find("lse.base-2"), find("value.halves-swapped")),
        (columns.factor(1.37), find("query.head-shift")),
    ],
)
def test_compositions_of_two_are_found(one, two):
    diagnosis = found(compose(one, two), separate=False)
    assert diagnosis.named, diagnosis.summary
    parts = diagnosis.classes[0].mutant.name.split(" + ")
    families = {find(part).family for part in parts if part in {m.name for m in bank()}}
    assert two.family in families or one.family in families
    assert len(parts) == 2


def test_noise_is_unknown():
    rng = np.random.default_rng(0)
    truth = expected(CASE, precision="f64")
    out = (truth["out"] * (1 + 0.3 * rng.standard_normal(truth["out"].shape))).astype(np.float32)
    diagnosis = diagnose(CASE, out, truth["lse"].astype(np.float32))
    assert not diagnosis.named
    assert diagnosis.summary.startswith("unknown")
    assert diagnosis.tested > 300


@pytest.mark.parametrize("heads, named", [(14, False), (15, True)])
def test_a_class_is_named_if_it_explains_nine_tenths_of_the_error(heads, named):
    case = generate("paged:heads=16,row=20,value=12,lens=9+30,scale=0.3,block=4,unread=numbers")
    truth = expected(case, precision="f64")
    wrong = {name: x.copy() for name, x in find("temperature.half").run(case).items()}
    rng = np.random.default_rng(0)
    for name, x in wrong.items():
        x[:, heads:] = truth[name][:, heads:] + rng.standard_normal(x[:, heads:].shape)  # noise, which nothing explains
    out, lse = (wrong[name].astype(np.float32) for name in ("out", "lse"))
    found = diagnose(case, out, lse, truth=truth, separate=False)
    assert found.classes[0].family == "uniform temperature"
    assert found.classes[0].share == pytest.approx(heads / 16, abs=0.02)
    assert found.named == named


def test_what_is_within_the_budget_is_no_bug():
    for mutant in equivalences():
        if mutant.applies(CASE) is None:
            diagnosis = found(mutant)
            assert (diagnosis.named, diagnosis.facts, diagnosis.classes) == (False, [], []), mutant.name
            assert diagnosis.summary.startswith("nothing is wrong")


def test_rivals_that_give_the_same_are_told_with_a_case_that_tells_them_apart():
    best = found(find("causal.none")).classes[0]  # with two query tokens the same as one key more
    assert best.rivals == ("causal.one-more",)
    other = generate(best.apart["causal.one-more"])
    results = [find(name).run(other)["lse"] for name in ("causal.none", "causal.one-more")]
    assert not np.allclose(*results, equal_nan=True)


def test_a_bug_of_some_heads_is_named_with_the_heads():
    right = expected(CASE, precision="f64")
    wrong = find("temperature.row-width").run(CASE)
    mixed = {name: right[name].copy() for name in right}
    mixed["out"][:, :, 2:4], mixed["lse"][:, :, 2:4] = wrong["out"][:, :, 2:4], wrong["lse"][:, :, 2:4]
    diagnosis = diagnose(CASE, mixed["out"].astype(np.float32), mixed["lse"].astype(np.float32), separate=False)
    assert diagnosis.classes[0].family == "uniform temperature"
    assert diagnosis.classes[0].where == "in heads 2, 3 only"


def test_of_a_large_case_some_requests_are_compared(monkeypatch):
    case = generate("paged:heads=6,row=40,value=32,scale=0.1,lens=90x9+5+70,dtype=bf16")
    monkeypatch.setattr(suspects, "WORK", 3 * 90 * 6 * (40 + 32) // 2)  # three of its longest requests
    truth = expected(case, precision="f64")
    wrong = find("temperature.half").run(case)
    out, lse = (wrong[name].astype(np.float32) for name in ("out", "lse"))
    diagnosis = diagnose(case, out, lse, truth=truth, separate=False)
    assert diagnosis.classes[0].family == "uniform temperature"
    assert diagnosis.requests == [0, 3, 9, 10]
    assert suspects.Suspects(case, truth, diagnosis.requests).results(find("temperature.half"))["out"].shape[0] == 4


def test_how_far_rows_are_off_is_said_where_no_number_of_budgets_says_it():
    truth = expected(CASE, precision="f64")
    measure = Measure(CASE, truth, {"out": "f32", "lse": "f32"})

    def text(name, index, value):
        wrong = {n: x.astype(np.float32) for n, x in truth.items()}
        wrong[name][index] = value
        units = {n: measure.units(n, x, truth[n]) for n, x in wrong.items()}
        return localise(CASE, wrong, truth, units)[name == "lse"].text

    assert text("out", (0, 0, 0, 3), np.nan).endswith(", some not finite where a number is expected")
    assert text("out", (1, 0, 0, 3), 0.5).endswith(", some where nothing is rounded, which must be exact")
    assert text("lse", (1, 0, 0), 0.5).endswith(", some where what is expected is not a finite number")
    assert " budgets" in text("lse", (0, 0, 0), 0.5)


def test_results_of_another_form_are_refused():
    truth = expected(CASE, precision="f64")
    with pytest.raises(InputError, match=r"out is \[4, 2, 6, 64\], expected \[5, 2, 6, 64\]"):
        diagnose(CASE, truth["out"][:4])
    with pytest.raises(InputError, match="lse is i32, expected f64 or"):
        diagnose(CASE, truth["out"], np.zeros(truth["lse"].shape, np.int32))


def test_other_kinds_of_case_are_diagnosed():
    for case_id, name in (
        ("merge:states=4,rows=5", "merge.equal"),
        ("rope:rope=8,heads=2,pairing=neox,base=10000", "rope.reversed"),
        ("append:rank=16,rope=4,tokens=9", "append.next-row"),
        ("absorbed:heads=4,nope=24,rope=8,value=32,rank=64,queries=3,cached=17", "temperature.half"),
    ):
        case = generate(case_id)
        mutant = find(name)
        assert mutant.applies(case) is None, name
        results = {n: a.astype(np.float32) for n, a in mutant.run(case).items()}
        diagnosis = diagnose(case, results[case.results[0]], results.get("lse"))
        names = {mutant.family, *(find(n).family for n in diagnosis.classes[0].rivals)}
        assert diagnosis.named and diagnosis.classes[0].family in names, (case_id, diagnosis.summary)


def edited(change):
    return Mutant(name="unseen", family="", formula="", edit=lambda problem, plan: change(plan))


def finished(change):
    return Mutant(name="unseen", family="", formula="", finish=lambda problem, results: results | change(results))


HEADS = np.arange(6)
UNSEEN = {
    "keys j with j = 1 mod 2 are not seen": edited(lambda p: replace(p, lanes=p.lanes[p.lanes % 2 == 0])),
    "the last 5 keys are counted twice": edited(lambda p: replace(p, lanes=np.concatenate([p.lanes, p.lanes[-5:]]))),
    "L' = min(L, 100)": edited(lambda p: replace(p, lanes=p.lanes[:100])),
    "o = sum w_j v_(j + 3)": edited(lambda p: replace(p, value_lanes=np.clip(p.lanes + 3, 0, max(p.length - 1, 0)))),
    "the latent part of the scores times 0.5": edited(lambda p: replace(p, q_latent=p.q_latent * 0.5)),
    "out and lse of head 0 for head 1": edited(
        lambda p: replace(p, q_latent=p.q_latent[:, HEADS // 2], q_rope=p.q_rope[:, HEADS // 2])
    ),
    "out and lse of request 4 for request 3": finished(
        lambda r: {name: r[name][[0, 1, 2, 4, 3]] for name in ("out", "lse")}
    ),
    "o[c] <- o[c - 7], around the end": finished(lambda r: {"out": np.roll(r["out"], 7, -1)}),
    "o = 0 in 7 rows": finished(lambda r: {"out": r["out"] * (HEADS != 3)[:, None]}),
}


@pytest.mark.parametrize("formula", UNSEEN)
def test_bugs_that_no_mutant_of_the_bank_is_are_told_in_a_formula(formula):
    best = found(UNSEEN[formula], separate=False).classes[0]
    words = best.mutant.formula.replace("0.49998", "0.5").replace("0.50002", "0.5").replace("0.49999", "0.5")
    assert words == formula
    assert best.share > 0.9
