# SPDX-License-Identifier: Apache-2.0
"""Cases on which a mutant and its rivals differ: which one to run next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..cases import Case
from ..mutants import Mutant, Problem, find
from ..mutants.effect import effect
from ..mutants.problem import problem_of

if TYPE_CHECKING:
    from .report import Suspicion

RIVALS = 3
APART = 0.02  # of a row, or of an lse: far beyond the roundings of 16 bits


def told_apart(case: Case, suspicion: Suspicion) -> Suspicion:
    """The suspicion with an id for each of its first rivals, where one of the probes tells them apart."""
    from ..errors import InputError

    apart = {}
    for name in suspicion.rivals[:RIVALS]:
        try:
            rival = find(name)
        except InputError:  # of an estimated constant
            continue
        if (found := separating(case, suspicion.mutant, rival)) is not None:
            apart[name] = found
    return replace(suspicion, apart=apart)


def separating(case: Case, one: Mutant, two: Mutant) -> str | None:
    """The id of a small case of the sizes of `case` on which the two differ; None: no probe does."""
    from ..cases.inputs import generate
    from ..suites.probes import probes_like

    for case_id in probes_like(case):
        problem = problem_of(generate(case_id))
        if problem is not None and _differ(problem, one, two):
            return case_id
    return None


def _differ(problem: Problem, one: Mutant, two: Mutant) -> bool:
    if problem.case.kind not in one.kinds or problem.case.kind not in two.kinds:
        return False
    right = problem.shape(problem.evaluate(problem.plan(b) for b in range(problem.B)))
    a, b = (mutant.solve(problem) if mutant.lacks(problem) is None else right for mutant in (one, two))
    seen = effect(a, b)
    return seen.out > APART or seen.lse > APART or seen.nonfinite > 0
