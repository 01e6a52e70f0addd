# SPDX-License-Identifier: Apache-2.0
"""Every mutant of cases that are not plain, over the cases that were chosen for it: rejected, and its class named.

The suite is of all sets at once; a mutant is judged on the case that sees it first and on one more that it applies to.
"""

import numpy as np
import pytest
from buggy import noise_of, stored

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import diagnose
from mla_oracle.diagnosis.discrimination import discrimination, usual_kinds
from mla_oracle.diagnosis.joint import sums_of, together
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.diagnosis.score import Evidence
from mla_oracle.diagnosis.suspects import Suspects
from mla_oracle.mutants import bank, find
from mla_oracle.mutants.lists import NEW, of_lists
from mla_oracle.oracle import expected
from mla_oracle.suites import choose
from mla_oracle.suites.extended import SETS, extended, names_like, names_of
from mla_oracle.verdict import budget
from mla_oracle.verdict.compare import check
from mla_oracle.verdict.locate import in_row_axes

SIZES = "heads=4,row=24,value=16,scale=0.3,dtype=f32"
NOT_GENERATED = {"format.scale-clamped"}  # no id has rows so small: tests/mutants has a case
BY_NAME = {mutant.name: mutant for mutant in bank()}


class Prepared:
    def __init__(self, case_id):
        case = generate(case_id)
        self.case, self.truth = in_row_axes(case, expected(case, precision="f64"))
        self.kinds = usual_kinds(self.case, self.truth)
        self.suspects = Suspects(self.case, self.truth)
        self.measure = Measure(self.case, self.truth, self.kinds)
        self.noise = noise_of(self.case, self.kinds, self.truth, seed=3)

    def actual(self, mutant):
        return stored(self.suspects.results(mutant), self.kinds, self.truth, self.noise)

    def check(self, actual):
        """The verdict of `check`, whose budgets are known: they are of the same case, dtypes and truth."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(budget, "budgets", lambda *asked: self.measure.budgets)
            return check(self.case, actual, self.truth)


@pytest.fixture(scope="module")
def suite():
    return choose(extended(SIZES, names_of("all"), block=4))


@pytest.fixture(scope="module")
def prepared(suite):
    return {case_id: Prepared(case_id) for case_id in suite.cases}


@pytest.fixture(scope="module")
def judged(suite, prepared):
    """name -> (rejected, classes best first)"""
    found = {}
    for case_id, names in suite.seen.items():
        for name in names:
            mutant = BY_NAME[name]
            if name.partition(".")[0] not in NEW:  # the others are judged on plain cases
                continue
            more = [p for other, p in prepared.items() if other != case_id and p.suspects.applies(mutant)]
            rejected, sums = False, []
            for p in [prepared[case_id], *more[:1]]:
                actual = p.actual(mutant)
                rejected |= not p.check(actual).passed
                sums.append(sums_of(Evidence(p.suspects, p.measure, actual)))
            known = [m for m in bank() if any(m.name in of_case for of_case in sums)]
            families = dict.fromkeys(fit.mutant.family for fit in together(known, sums))
            found[name] = rejected, list(families)
    return found


def test_the_suite_sees_every_mutant_that_applies(suite):
    assert suite.unseen == []
    applied = {name for names in suite.seen.values() for name in names}
    new = {name for name in BY_NAME if name.partition(".")[0] in NEW}
    assert new - applied == NOT_GENERATED
    assert len(new) > 150 and len(applied) > 320 and all(of_lists(name) for name in applied)
    assert len(suite.cases) <= 32


def test_every_mutant_is_rejected(judged):
    assert len(judged) > 150
    assert [name for name, (rejected, _) in judged.items() if not rejected] == []


def test_the_right_class_is_first_in_95_percent_and_among_three_in_all(judged):
    place = {name: families.index(BY_NAME[name].family) for name, (_, families) in judged.items()}
    later = {name: at for name, at in place.items() if at}
    assert len(later) <= 0.05 * len(place), later
    assert max(place.values()) <= 2, later


def test_a_right_kernel_is_accepted_on_every_case(prepared):
    for case_id, p in prepared.items():
        for seed in (4, 5):
            actual = stored(p.truth, p.kinds, p.truth, noise_of(p.case, p.kinds, p.truth, seed))
            verdict = p.check(actual)
            assert verdict.passed, (case_id, verdict.reason)


NAMED = {
    "sparse": ("topk.minus-one-as-first", "topk.length-ignored", "temperature.half"),
    "sparse-slot": ("topk.slots-as-pages", "merge.equal"),
    "window": ("sight.window-left-one-more", "value.next-row"),
    "sinks": ("sink.missing", "sink.of-next-head"),
    "bias": ("bias.scaled", "lse.base-2"),
    "model1": ("format.scale-bias", "format.value-scale-ignored"),
}


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, names in NAMED.items() for name in names])
def test_a_kernel_is_diagnosed_on_one_case(of, name):
    p = Prepared(extended(SIZES, (of,), block=4)[0])
    actual = p.actual(find(name))
    found = diagnose(p.case, actual["out"], actual["lse"], truth=p.truth, separate=False)
    assert found.named and find(name).family == found.classes[0].family, found.summary
    assert any(fact.name == "out wrong" or fact.name == "lse wrong" for fact in found.facts)


def test_noise_over_lists_is_unknown():
    p = Prepared(extended(SIZES, ("sparse",), block=4)[0])
    out = p.truth["out"] * (1 + 0.3 * np.random.default_rng(0).standard_normal(p.truth["out"].shape))
    found = diagnose(p.case, out.astype(np.float32), p.truth["lse"].astype(np.float32), truth=p.truth)
    assert not found.named and found.summary.startswith("unknown"), found.summary


def test_a_wrong_query_is_told_with_its_request_and_the_place_of_its_key():
    p = Prepared("paged:heads=8,row=96,value=64,scale=0.1,block=4,lens=30+40,tokens=2,topk=20,invalid=none")
    right, wrong = p.truth, p.suspects.results(find("key.first-lost"))
    out, lse = right["out"].astype(np.float32), right["lse"].astype(np.float32)
    out[1, 0], lse[1, 0] = wrong["out"][1, 0], wrong["lse"][1, 0]
    found = diagnose(p.case, out, lse, truth=right, separate=False)
    facts = {fact.name: fact.text for fact in found.facts}
    assert facts["requests"].startswith("only request 1 of 2") and facts["queries"].startswith("only query 0 of 2")
    assert facts["keys lost"] == "key 0 of the list of request 1, query 0 has no weight"
    best = found.classes[0]
    assert "key.first-lost" in (best.mutant.name, *best.rivals)
    assert best.where == "in query 0 of request 1 only"


def test_of_a_large_case_some_requests_are_compared():
    case = generate("paged:heads=96,row=576,value=512,scale=0.1,lens=300x9+5+70,topk=256,dtype=bf16")
    truth = expected(case, precision="f64")
    wrong = find("temperature.half").run(case)
    out, lse = (wrong[name].astype(np.float32) for name in ("out", "lse"))
    found = diagnose(case, out, lse, truth=truth, separate=False)
    assert found.classes[0].family == "uniform temperature"
    assert found.requests is not None and 1 < len(found.requests) <= 8


def test_what_a_case_cannot_tell_is_told():
    case = generate("paged:heads=4,row=24,value=16,scale=0.3,block=4,lens=1+9,topk=4,invalid=none,dtype=bf16")
    blind = discrimination(case)
    assert "topk.cut-by-capacity" in blind.seen and "topk.minus-one-as-first" not in blind.blind + blind.same
    assert {"seen", "blind", "same"} <= set(blind.as_json())


def test_rivals_on_lists_are_told_apart_by_a_case_like_it():
    p = Prepared("paged:heads=4,row=24,value=16,scale=0.3,block=4,lens=9+30,tokens=2,topk=8,unread=numbers")
    actual = p.actual(find("sight.causal-none"))
    best = diagnose(p.case, actual["out"], actual["lse"], truth=p.truth).classes[0]
    assert "sight.causal-one-more" in best.rivals
    other = generate(best.apart["sight.causal-one-more"])
    results = [find(name).run(other)["lse"] for name in ("sight.causal-none", "sight.causal-one-more")]
    assert not np.allclose(*results, equal_nan=True)


def test_every_set_has_cases_and_the_names_of_its_own():
    for name in SETS:
        ids = extended(SIZES, (name,), block=4)
        assert ids, name
        for case_id in ids:
            assert names_like(generate(case_id)), case_id
