# SPDX-License-Identifier: Apache-2.0
"""The search for what explains an actual: the bank, constants, variants, compositions of two, parts of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from itertools import combinations

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from ..mutants import Mutant, compose, find
from .constants import estimated, factors
from .curves import curves
from .facts import plural, ranges
from .fewer import shape_of
from .samples import samples
from .score import Evidence, Fit, ranked
from .variants import nested, variants
from .writers import found

SETTLED = 0.97  # of the error: no further search
EXACT = 2.0  # mean squared budgets: no constant can be better
LEAST = 0.9  # of the error: below, no class is named
PARTS = 8
RECURRENCE = 0.05  # of the error, by one that knows of no splits
# What is composed with, beside what explains most.
COMMON = ("rope.pairing", "rope.dropped", "causal.none", "temperature.row-width", "temperature.no-mscale", "lse.base-2")
RESTRICTION = 0.05  # a class that holds in some rows alone is worth that much less
PAIRS_WORK = 4e9  # multiply-adds of each step after the bank


def search(evidence: Evidence) -> tuple[list[Fit], int]:
    """Fits of everything tried, best first, and how many were."""
    fits = _fits(evidence, evidence.suspects.applicable())
    steps: tuple[tuple[Callable[[], Iterable[Mutant]], Callable[[list[Fit]], bool]], ...] = (
        (lambda: found(evidence), _exact),
        (lambda: estimated(evidence), _exact),
        (lambda: variants(evidence.suspects.problem, _cut_again(evidence, fits)), _settled),
        (lambda: nested(evidence.suspects.problem, _recurrences(fits)), _settled),
        (lambda: _pairs(evidence, fits), _settled),
    )
    for step, enough in steps:
        if enough(fits):
            continue
        known = {fit.mutant.name for fit in fits}
        fits += _fits(evidence, (mutant for mutant in step() if mutant.name not in known))
    count = len(fits)
    alone = {fit.mutant.name: fit.share for fit in fits if " + " not in fit.mutant.name}
    fits = [fit for fit in fits if fit.share > _best_part(fit.mutant, alone) + RESTRICTION]
    fits = [restricted(evidence, fit) for fit in fits]
    return ranked([fit for fit in fits if fit.share > 0]), count


def _fits(evidence: Evidence, mutants: Iterable[Mutant]) -> list[Fit]:
    return evidence.fits(mutant for mutant in mutants if evidence.suspects.applies(mutant))


def _best_part(mutant: Mutant, alone: dict[str, float]) -> float:
    """What one part of a composition explains alone; of a single mutant less than anything."""
    parts = mutant.name.split(" + ")
    return max(alone.get(part, -1.0) for part in parts) if len(parts) > 1 else -1.0


def _settled(fits: list[Fit]) -> bool:
    return any(fit.share >= SETTLED for fit in fits)


def _exact(fits: list[Fit]) -> bool:
    return any(fit.share >= SETTLED and fit.distance <= EXACT for fit in fits)


def _work(evidence: Evidence) -> float:
    """Multiply-adds of one mutant."""
    problem = evidence.suspects.problem
    if problem is None:
        return 1.0
    requests = evidence.suspects.requests or list(range(problem.B))
    return float(problem.lens[requests].sum()) * problem.T * problem.H * (problem.D + problem.V)


def _cut_again(evidence: Evidence, fits: list[Fit]) -> list[Mutant]:
    """Merges and recurrences that are tried with other splits and tiles: all, of a large case the likeliest."""
    merges = [fit for fit in fits if fit.mutant.name.startswith(("merge.", "online."))]
    room = int(max(4, min(len(merges), PAIRS_WORK / _work(evidence) / 10)))
    return [fit.mutant for fit in sorted(merges, key=lambda fit: -fit.share)[:room]]


def _recurrences(fits: list[Fit]) -> list[Mutant]:
    """Those that are right about some rows: of few tiles, maybe."""
    found = [fit for fit in fits if fit.mutant.name.startswith("online.") and fit.share > RECURRENCE]
    return [fit.mutant for fit in ranked(found)[:PARTS]]


def _pairs(evidence: Evidence, fits: list[Fit]) -> Iterator[Mutant]:
    """Compositions of what explains most, whole or of one result, and of what is common."""
    problem = evidence.suspects.problem
    if problem is None or any(restricted(evidence, fit).share >= SETTLED - RESTRICTION for fit in fits):
        return
    single = [fit for fit in fits if "+" not in fit.mutant.name]
    best = ranked(single)[:PARTS]
    for name in evidence.actual:
        best += sorted(single, key=lambda fit: -fit.shares.get(name, 0.0))[: PARTS // 2]
    parts = {fit.mutant.name: fit.mutant for fit in best if fit.share > 0.02 or max(fit.shares.values()) > 0.02}
    parts |= {name: find(name) for name in COMMON if evidence.suspects.applies(find(name))}
    room = int(max(12, min(400, PAIRS_WORK / _work(evidence))))
    for part in list(parts.values())[: max(4, room // 8)]:
        for curve in [*curves(samples(evidence, part)), *factors(evidence, part)]:
            if _fit_together(evidence, made := compose(part, curve)):
                yield made
    for a, b in list(combinations(parts.values(), 2))[:room]:
        orders = ((a, b), (b, a)) if _changes(evidence, a) & _changes(evidence, b) else ((a, b),)
        for pair in orders:
            if _fit_together(evidence, made := compose(*pair)):
                yield made


def _changes(evidence: Evidence, mutant: Mutant) -> set[str]:
    """Which fields of the longest request's plan the mutant changes: two that change the same do not commute."""
    problem = evidence.suspects.problem
    assert problem is not None
    right = problem.plan(int(problem.lens.argmax()))
    return {f.name for made in mutant.plans(problem, right) for f in fields(made)
            if getattr(made, f.name) is not getattr(right, f.name)}


def _fit_together(evidence: Evidence, mutant: Mutant) -> bool:
    """Whether the parts of a composition can be had at once: not, where both change what the other counts on."""
    try:
        return evidence.suspects.applies(mutant) and bool(evidence.suspects.results(mutant))
    except (ValueError, IndexError, AssertionError):
        return False


def restricted(evidence: Evidence, fit: Fit) -> Fit:
    """The fit over the wrong requests, query tokens or heads alone, or pairs of them, where it is right there only."""
    problem = evidence.suspects.problem
    if problem is None or fit.where or fit.explained < LEAST or fit.share >= fit.explained - RESTRICTION:
        return fit
    requests = evidence.suspects.requests or list(range(problem.B))
    shape = (len(requests), problem.T, problem.H)
    if problem.listed:
        assert isinstance(problem.case, PagedCase)
        shape = shape_of(problem.case)
        requests = list(range(shape[0]))
    absent, wrong = np.zeros(shape, bool), np.zeros(shape, bool)
    for name, where in fit.absent.items():
        if not name.startswith("partial_"):
            absent |= where.reshape(shape)
            wrong |= (evidence.error[name] > 1).reshape(shape)
    for axes in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        other = tuple(i for i in range(3) if i not in axes)
        hit, miss = np.asarray(wrong.any(other)), np.asarray(absent.any(other))
        if not (hit & miss).any():
            places = [_place(axis, np.unique(at), requests) for axis, at in zip(axes, np.nonzero(hit), strict=True)]
            rows = {name: where.reshape(evidence.error[name].shape) for name, where in fit.absent.items()}
            share, distance = fit.explained - RESTRICTION * len(axes), evidence.distance(fit.mutant, rows)
            return replace(fit, share=share, distance=distance, where=f"in {' of '.join(reversed(places))} only")
    return fit


def _place(axis: int, at: Array, requests: list[int]) -> str:
    which = [requests[i] if axis == 0 else int(i) for i in at]
    return f"{plural(('request', 'query', 'head')[axis], len(which))} {ranges(which)}"
