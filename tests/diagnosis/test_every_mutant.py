# SPDX-License-Identifier: Apache-2.0
"""Every mutant over a suite: rejected, and its class named. The actuals carry the roundings of an honest kernel."""

import numpy as np
import pytest
from buggy import noise_of, stored

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis.discrimination import usual_kinds
from mla_oracle.diagnosis.joint import sums_of, together
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.diagnosis.score import Evidence
from mla_oracle.diagnosis.suspects import Suspects
from mla_oracle.mutants import bank
from mla_oracle.oracle import expected
from mla_oracle.suites import choose, probes
from mla_oracle.verdict.compare import check

SIZES = "heads=3,row=20,value=12,scale=0.3,dtype=f32"


class Prepared:
    def __init__(self, case_id):
        self.case = generate(case_id)
        self.truth = expected(self.case, precision="f64")
        self.kinds = usual_kinds(self.case, self.truth)
        self.suspects = Suspects(self.case, self.truth)
        self.measure = Measure(self.case, self.truth, self.kinds)
        self.noise = noise_of(self.case, self.kinds, self.truth, seed=3)

    def actual(self, mutant):
        results = self.suspects.results(mutant) if self.suspects.applies(mutant) else self.truth
        return stored(results, self.kinds, self.truth, self.noise)


@pytest.fixture(scope="module")
def suite():
    return choose(probes(SIZES, block=4, max_tokens=300))


@pytest.fixture(scope="module")
def judged(suite):
    """(mutant, rejected, classes best first) of every mutant that applies."""
    prepared = [Prepared(case_id) for case_id in suite.cases]
    known = [m for m in bank() if any(p.suspects.applies(m) for p in prepared)]
    found = []
    for mutant in known:
        rejected, sums = False, []
        for p in prepared:
            evidence = Evidence(p.suspects, p.measure, p.actual(mutant))
            rejected |= any(bool((error > 1).any()) for error in evidence.error.values())
            sums.append(sums_of(evidence))
        families = dict.fromkeys(fit.mutant.family for fit in together(known, sums))
        found.append((mutant, rejected, list(families)))
    return found


def test_the_suite_sees_every_mutant_that_applies(suite):
    assert suite.unseen == []
    assert 4 <= len(suite.cases) <= 12
    assert sum(len(names) for names in suite.seen.values()) > 280


def test_every_mutant_is_rejected(judged):
    assert len(judged) > 280
    assert [mutant.name for mutant, rejected, _ in judged if not rejected] == []


def test_the_right_class_is_first_in_95_percent_and_among_three_in_all(judged):
    place = {mutant.name: families.index(mutant.family) for mutant, _, families in judged}
    later = {name: at for name, at in place.items() if at}
    assert len(later) <= 0.05 * len(place), later
    assert max(place.values()) <= 2, later


def test_a_right_kernel_is_accepted_on_every_case(suite):
    for case_id in suite.cases:
        p = Prepared(case_id)
        for seed in (4, 5):
            actual = stored(p.truth, p.kinds, p.truth, noise_of(p.case, p.kinds, p.truth, seed))
            verdict = check(p.case, {n: a for n, a in actual.items() if not n.startswith("partial_")}, p.truth)
            assert verdict.passed, (case_id, verdict.reason)


def test_the_budget_and_the_measure_agree_on_what_is_rejected(suite):
    p = Prepared(suite.cases[0])
    rng = np.random.default_rng(0)
    for mutant in rng.choice(np.array(p.suspects.applicable()), 40, replace=False):
        actual = p.actual(mutant)
        evidence = Evidence(p.suspects, p.measure, actual)
        rejected = any(bool((error > 1).any()) for error in evidence.error.values())
        assert check(p.case, actual, p.truth).passed != rejected, mutant.name
