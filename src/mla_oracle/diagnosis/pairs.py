# SPDX-License-Identifier: Apache-2.0
"""Compositions of two: of what explains most and what is common, and of anything on top of what explains most.

Of two mutants that do not commute both orders are made: a kernel with both bugs makes one of them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import combinations

import numpy as np

from ..mutants import Mutant, compose, find
from ..mutants.plan import Plan
from .both import truncated
from .constants import factors, of_samples
from .curves import curves
from .samples import samples
from .score import WITHIN, Evidence, Fit, ranked
from .suspects import Suspects

PARTS = 8
BASES = 3  # of different classes, that everything is tried on top of
BASE = 0.2  # of the error: on top of what explains less nothing is tried
FEW = 2  # requests that say at once of most compositions that they are wrong
SCREENED = 0.9  # of the error in these: below, the others are not computed
# What is composed with, beside what explains most.
COMMON = ("rope.pairing", "rope.dropped", "causal.none", "temperature.row-width", "temperature.no-mscale", "lse.base-2")
PAIRS_WORK = 4e9  # multiply-adds of each step after the bank
ON_TOP_WORK = 2e10  # of everything on top of one, in few requests; where it is more, it is done of the best alone


def pairs(evidence: Evidence, fits: list[Fit]) -> Iterator[Mutant]:
    """Compositions of what explains most, whole or of one result, and of what is common."""
    if evidence.suspects.problem is None:
        return
    single = [fit for fit in fits if " + " not in fit.mutant.name]
    best = ranked(single)[:PARTS]
    for name in evidence.actual:
        best += sorted(single, key=lambda fit: -fit.shares.get(name, 0.0))[: PARTS // 2]
    parts = {fit.mutant.name: fit.mutant for fit in best if fit.share > 0.02 or max(fit.shares.values()) > 0.02}
    parts |= {name: find(name) for name in COMMON if evidence.suspects.applies(find(name))}
    yield from _possible(evidence, truncated(samples(evidence)))
    room = int(max(12, min(400, PAIRS_WORK / work(evidence))))
    for part in list(parts.values())[: max(4, room // 8)]:
        constants = (*curves(samples(evidence, part)), *factors(evidence, part))
        yield from _possible(evidence, (compose(part, constant) for constant in constants))
    for a, b in list(combinations(parts.values(), 2))[:room]:
        yield from _possible(evidence, orders(evidence, a, b))


def on_top(evidence: Evidence, fits: list[Fit], turn: int) -> Iterator[Mutant]:
    """Every single mutant, and constants read off anew, on top of what explains most: of its class the best.

    What the smaller of two bugs explains alone may be nothing. `turn`: whether of the best class, the second best ...
    """
    problem = evidence.suspects.problem
    if problem is None:
        return
    best: dict[str, Mutant] = {}
    for fit in ranked([fit for fit in fits if " + " not in fit.mutant.name and fit.share > BASE]):
        best.setdefault(fit.mutant.family, fit.mutant)
    asked = evidence.suspects.applicable()
    if turn >= len(best):
        return
    base = list(best.values())[turn]
    few = _few(evidence, base)
    if turn and len(asked) * work(few) > ON_TOP_WORK:
        return
    with np.errstate(all="ignore"):
        constants = [*of_samples(samples(evidence, base), evidence), *factors(evidence, base)]
    for other in (*constants, *asked):
        if other.name == base.name:
            continue
        first = evidence if base.finish or other.finish else few  # what is done to results may mix requests
        for made in _possible(first, orders(evidence, base, other)):
            if first is evidence or first.fits([made])[0].share >= SCREENED:
                yield from _possible(evidence, (made,))


def _few(evidence: Evidence, base: Mutant) -> Evidence:
    """The evidence of the shortest requests that `base` leaves something of, where requests can be had alone."""
    problem = evidence.suspects.problem
    assert problem is not None
    if problem.listed or not problem.paged or problem.shards > 1:
        return evidence
    requests = evidence.suspects.requests or list(range(problem.B))
    given = evidence.suspects.results(base)
    left = np.zeros(len(requests), bool)
    for name, actual in evidence.actual.items():
        units = evidence.measure.units(name, actual, given[name], evidence.rows[name])
        left |= (units > WITHIN).reshape(len(requests), -1).any(1)
    wrong = sorted((b for b, is_left in zip(requests, left, strict=True) if is_left), key=lambda b: problem.lens[b])
    few = [b for b in wrong if problem.lens[b] > 1][:FEW]
    if not few or len(few) == len(requests):
        return evidence
    return Evidence(Suspects(problem.case, evidence.suspects.truth, few), evidence.measure, evidence.whole)


def work(evidence: Evidence) -> float:
    """Multiply-adds of one mutant."""
    problem = evidence.suspects.problem
    if problem is None:
        return 1.0
    requests = evidence.suspects.requests or list(range(problem.B))
    return float(problem.lens[requests].sum()) * problem.T * problem.H * (problem.D + problem.V)


def orders(evidence: Evidence, a: Mutant, b: Mutant) -> Iterator[Mutant]:
    """a + b, and b + a where that is another function."""
    yield compose(a, b)
    try:
        same = _commute(evidence, a, b)
    except (ValueError, IndexError, AssertionError):
        same = False
    if not same:
        yield compose(b, a)


def _commute(evidence: Evidence, a: Mutant, b: Mutant) -> bool:
    """Whether both change the plan of the longest request to the same in either order, and one at most the results."""
    problem = evidence.suspects.problem
    assert problem is not None
    right = problem.plan(int(problem.lens.argmax()))

    def changed(mutant: Mutant) -> set[str]:
        made = {f.name for plan in mutant.plans(problem, right) for f in fields(plan)
                if getattr(plan, f.name) is not getattr(right, f.name)}
        return made if mutant.finish is None else made | {"finish"}

    if changed(a) & changed(b):
        return False
    one, two = (compose(*both).plans(problem, right) for both in ((a, b), (b, a)))
    return len(one) == len(two) and all(_same(*plans) for plans in zip(one, two, strict=True))


def _same(a: Plan, b: Plan) -> bool:
    """Numbers alike; functions are of the one mutant that changes them."""
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, (int, float, np.ndarray)) and not np.array_equal(x, y, equal_nan=True):
            return False
    return True


def _possible(evidence: Evidence, mutants: Iterable[Mutant]) -> Iterator[Mutant]:
    """The compositions whose parts can be had at once: not, where both change what the other counts on."""
    for mutant in mutants:
        try:
            if evidence.suspects.applies(mutant) and evidence.suspects.results(mutant):
                yield mutant
        except (ValueError, IndexError, AssertionError):
            continue
