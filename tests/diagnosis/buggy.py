# SPDX-License-Identifier: Apache-2.0
"""Kernels with a bug: what a mutant gives, with the roundings of an honest kernel on top, stored in its dtypes.

Where many kernels are diagnosed on one case, `Judged` computes its truth, its budgets and its mutants once.
"""

import numpy as np
import pytest

from mla_oracle import dtypes
from mla_oracle.cases import DenseCase, PagedCase
from mla_oracle.diagnosis import report
from mla_oracle.diagnosis.discrimination import usual_kinds
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.diagnosis.suspects import Suspects
from mla_oracle.mutants import bank
from mla_oracle.oracle import expected
from mla_oracle.verdict import budget
from mla_oracle.verdict.numerics import infer


def size(x):
    x = np.where(np.isfinite(x), x, 0)
    return np.sqrt(np.square(x).mean(-1, keepdims=True))


def noise_of(case, kinds, truth, seed):
    """The error of one emulated honest kernel, by result; 0 where there is none."""
    found = {name: np.zeros(array.shape) for name, array in truth.items()}
    if isinstance(case, (PagedCase, DenseCase)):
        with np.errstate(all="ignore"):
            honest = budget.emulate(case, infer(case, kinds), np.random.default_rng(seed))
            for name, array in honest.items():
                found[name] = np.where(np.isfinite(array - truth[name]), array - truth[name], 0)
    return found


def stored(results, kinds, truth, noise):
    """`results` as a kernel of these dtypes stores them, with noise in proportion to the size of each row."""
    made = {}
    with np.errstate(all="ignore"):
        for name, kind in kinds.items():
            grown = 1.0
            if not name.endswith("lse"):
                grown = size(results[name]) / size(truth[name])
                grown = np.where(np.isfinite(grown), grown, 1.0)
            exact = results[name] == np.round(results[name])  # zeros, and what is not computed
            made[name] = dtypes.round_to(np.where(exact, results[name], results[name] + noise[name] * grown), kind)
    return made


def run(case, mutant, *, dtype=None, lse="f32", seed=1):
    """What a kernel for `case` with the bug `mutant` returns."""
    truth = {name: array for name, array in expected(case, precision="f64").items() if not name.startswith("partial_")}
    kinds = usual_kinds(case, truth)
    if dtype is not None:
        kinds |= {"out": dtype}
    results = mutant.run(case)
    return stored({n: results[n] for n in truth}, kinds, truth, noise_of(case, kinds, truth, seed))


class Judged:
    """A case that all requests are compared of; `kinds`: the dtypes of the results."""

    def __init__(self, case, kinds):
        right = expected(case, precision="f64")
        self.case, self.truth = case, {name: right[name] for name in kinds}
        self.measure = Measure(case, self.truth, kinds)
        self.known = {}

    def diagnose(self, actual):
        """What `diagnose` gives, without cases that tell rivals apart."""
        known, named = self.known, {mutant.name for mutant in bank()}

        class Known(Suspects):
            def results(self, mutant):
                if self.requests is not None or not named.issuperset(mutant.name.split(" + ")):
                    return super().results(mutant)
                if mutant.name not in known:
                    known[mutant.name] = super().results(mutant)
                return known[mutant.name]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "Suspects", Known)
            return report.of_measured(self.case, actual, self.truth, self.measure, separate=False)
