# SPDX-License-Identifier: Apache-2.0
"""Every mutant of attention gives what a kernel in plain loops with its bug gives."""

import math

import numpy as np
import pytest
import wrong_joins
import wrong_keys
import wrong_rows
import wrong_scores
from cases import attention
from loops import Kernel, wrong

from mla_oracle.mutants import Problem, bank
from mla_oracle.mutants.effect import effect
from mla_oracle.mutants.lists import NEW
from mla_oracle.oracle import expected

WRONG = {**wrong_scores.WRONG, **wrong_rows.WRONG, **wrong_keys.WRONG, **wrong_joins.WRONG}
# A window or a bound of many keys is one of few keys; what needs a geometry is tested with one.
ALIKE = {"window.512", "window.1024", "window.4096", "length.at-most-512", "length.at-most-2048", "length.int16"}
GEOMETRIC = {"temperature.nope-width", "temperature.mscale-v2", "rope.no-yarn", "rope.no-yarn-k", "rope.base-10000",
             "rope.base-10000-k", "rope.output-turned"}
# Those of cases that are not plain stand in test_mutants_of_lists.py.
PAGED = [m for m in bank() if "paged" in m.kinds and m.name.partition(".")[0] not in NEW]
TESTED = [m for m in PAGED if m.name not in ALIKE | GEOMETRIC]


@pytest.fixture(scope="module")
def problems():
    return [(name, case, Problem(case), expected(case)) for name, case in attention()]


def agree(got, want):
    with np.errstate(invalid="ignore"):
        close = np.abs(got - want) <= 1e-9 * np.maximum(np.abs(want), 1)
    return close | (got == want) | (np.isnan(got) & np.isnan(want))


def test_every_mutant_of_paged_cases_has_a_kernel_in_loops():
    assert {m.name for m in TESTED} == set(WRONG)


@pytest.mark.parametrize("case", [case for name, case in attention() if len(name) < 90], ids=lambda case: case.name)
def test_the_loops_are_right_without_a_bug(case):
    for name, want in Kernel(case).run().items():
        assert agree(expected(case)[name], want).all()


@pytest.mark.parametrize("mutant", TESTED, ids=lambda m: m.name)
def test_a_mutant_is_the_kernel_with_its_bug(problems, mutant):
    shown = 0
    for name, case, problem, truth in problems:
        if mutant.lacks(problem) is not None:
            continue
        got = mutant.solve(problem)
        seen = effect(got, truth)
        if not seen.differs:
            continue
        shown += 1
        for tensor, want in wrong(case, **WRONG[mutant.name]).run().items():
            good = agree(got[tensor], want)
            where = np.argwhere(~good)
            assert good.all(), (name, tensor, where[0], got[tensor][~good][0], want[~good][0])
        if shown == 2 or not case.name.startswith("a "):
            break
    assert shown, "no case shows it"


def test_the_effect_counts_what_is_not_finite():
    truth = {"out": np.ones((2, 3)), "lse": np.array([0.0, -math.inf])}
    wrong_result = {"out": np.array([[1, 1, math.nan], [1, 1, 1]]), "lse": np.array([0.5, math.inf])}
    seen = effect(wrong_result, truth)
    assert (seen.nonfinite, seen.rows, seen.lse, seen.out) == (2, 0.75, 0.5, 0.0)
