# SPDX-License-Identifier: Apache-2.0
"""The search for what explains an actual: the bank, constants, variants, compositions of two, parts of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from ..mutants import Mutant
from .constants import estimated, not_computed
from .facts import plural, ranges
from .fewer import shape_of
from .made import NOT_COMPUTED
from .pairs import BASES, PAIRS_WORK, PARTS, on_top, pairs, work
from .samples import NAMES
from .score import WITHIN, Evidence, Fit, ranked
from .variants import nested, variants
from .writers import found

SETTLED = 0.97  # of the error: no further search
EXACT = 2.0  # mean squared budgets: no constant can be better
LEAST = 0.9  # of the error: below, no class is named
RECURRENCE = 0.05  # of the error, by one that knows of no splits
RESTRICTION = 0.05  # a class that holds in some rows alone is worth that much less


def search(evidence: Evidence) -> tuple[list[Fit], int]:
    """Fits of everything tried, best first, and how many were."""
    fits = _fits(evidence, evidence.suspects.applicable())

    def held(fits: list[Fit]) -> bool:
        some = (restricted(evidence, fit) for fit in fits)
        return _settled(fits) or any(fit.where and fit.share >= SETTLED - RESTRICTION for fit in some)

    def whole(fits: list[Fit]) -> bool:
        """Whether nothing is left that a second bug may explain."""
        return _exact(fits) or (held(fits) and not _settled(fits))

    steps: tuple[tuple[Callable[[], Iterable[Mutant]], Callable[[list[Fit]], bool]], ...] = (
        (lambda: found(evidence), _exact),
        (lambda: estimated(evidence), _exact),
        (lambda: variants(evidence.suspects.problem, _cut_again(evidence, fits)), _settled),
        (lambda: nested(evidence.suspects.problem, _recurrences(fits)), _settled),
        (lambda: pairs(evidence, fits), whole),
    )
    lost = nothing_but_nan(evidence)
    if lost:
        fits += _fits(evidence, not_computed(evidence))
    for step, enough in steps:
        if enough(fits):
            continue
        fits += _fits(evidence, _new(step(), fits))
    count = len(fits)
    single = list(fits)
    for turn in range(BASES):
        if whole(fits) or (turn and held(fits)):
            break
        # So many are tried that only what explains everything counts.
        tried = _fits(evidence, _new(on_top(evidence, single, turn), fits))
        count += len(tried)
        fits += [fit for fit in tried if fit.share >= SETTLED]
    alone = {fit.mutant.name: fit for fit in fits if " + " not in fit.mutant.name}
    fits = [fit for fit in fits if _is_more(fit, [alone[n] for n in fit.mutant.name.split(" + ") if n in alone])]
    fits = [restricted(evidence, fit) for fit in fits]
    fits = ranked([fit for fit in fits if fit.share > 0])
    if lost:  # many wrong reads say the same, and none of them more than this
        fits.sort(key=lambda fit: fit.mutant.family != NOT_COMPUTED or fit.share < SETTLED)
    return fits, count


def nothing_but_nan(evidence: Evidence) -> bool:
    """Whether out and the lse of every wrong row are NaN."""
    wrong = {name: (error > WITHIN) for name, error in evidence.error.items() if name in NAMES}
    return len(wrong) == len(NAMES) and all(
        bool(bad.any()) and bool(np.isnan(evidence.actual[name].astype(np.float64)[bad]).all())
        for name, bad in wrong.items()
    )


def _fits(evidence: Evidence, mutants: Iterable[Mutant]) -> list[Fit]:
    return evidence.fits(mutant for mutant in mutants if evidence.suspects.applies(mutant))


def _new(mutants: Iterable[Mutant], fits: list[Fit]) -> Iterator[Mutant]:
    """Those that no fit is of, each once."""
    known = {fit.mutant.name for fit in fits}
    for mutant in mutants:
        if mutant.name not in known:
            known.add(mutant.name)
            yield mutant


def _is_more(fit: Fit, parts: list[Fit]) -> bool:
    """Whether a composition says what no part of it says alone; true of a single mutant."""
    others = [part for part in parts if part is not fit]
    exact = fit.distance <= EXACT < min((part.distance for part in others), default=np.inf)
    return exact or all(fit.share > part.share + RESTRICTION for part in others)


def _settled(fits: list[Fit]) -> bool:
    return any(fit.share >= SETTLED for fit in fits)


def _exact(fits: list[Fit]) -> bool:
    return any(fit.share >= SETTLED and fit.distance <= EXACT for fit in fits)


def _cut_again(evidence: Evidence, fits: list[Fit]) -> list[Mutant]:
    """Merges and recurrences that are tried with other splits and tiles: all, of a large case the likeliest."""
    merges = [fit for fit in fits if fit.mutant.name.startswith(("merge.", "online."))]
    room = int(max(4, min(len(merges), PAIRS_WORK / work(evidence) / 10)))
    return [fit.mutant for fit in sorted(merges, key=lambda fit: -fit.share)[:room]]


def _recurrences(fits: list[Fit]) -> list[Mutant]:
    """Those that are right about some rows: of few tiles, maybe."""
    found = [fit for fit in fits if fit.mutant.name.startswith("online.") and fit.share > RECURRENCE]
    return [fit.mutant for fit in ranked(found)[:PARTS]]


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
