# SPDX-License-Identifier: Apache-2.0
"""Mutants whose constant is read off the actual: temperatures, caps, lengths, windows, lost keys, pads, factors.

Most come from the lse: with the scores known, one number per row that is wrong says how far, how many or which. Where
there is no lse a temperature or a cap is fitted to out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..arrays import Array
from ..mutants import Mutant, Problem, causal, columns, lengths, tail
from ..verdict.metrics import of_rows
from . import made
from .curves import curves
from .floors import floors, stale
from .samples import NAMES, Sample, count, samples
from .score import WITHIN, Evidence
from .sources import matches, permutation

FITTED = 1e8  # multiply-adds of a dense case whose temperature is fitted
ROLLED = 16  # rows that a shift of the columns is looked for in


def estimated(evidence: Evidence) -> Iterator[Mutant]:
    """Mutants with a constant of their own; each is judged like any other."""
    with np.errstate(all="ignore"):
        yield from not_computed(evidence)
        yield from _temperature(evidence)
        yield from of_samples(samples(evidence), evidence)
        yield from floors(evidence)
        yield from stale(evidence)
        yield from factors(evidence)
        yield from moved(evidence)


def of_samples(known: list[Sample], evidence: Evidence) -> Iterator[Mutant]:
    """Those that are read off rows with known scores, the truth's or a mutant's."""
    if known:
        yield from curves(known)
        yield from _visible(known)
        yield from _runs(known)
        yield from _periods(known, evidence)
        yield from _denominator(known)


def not_computed(evidence: Evidence) -> Iterator[Mutant]:
    """Results, or rows of them, that hold one number."""
    yield from _unwritten(evidence)
    yield from _held(evidence)


def _unwritten(evidence: Evidence) -> Iterator[Mutant]:
    """The same number in every element of a result: one that was never written."""
    values = {}
    for name, array in evidence.actual.items():
        same = array.size > 1 and np.array_equal(array, np.full_like(array, array.flat[0]), equal_nan=True)
        if name in NAMES and same:
            values[name] = float(array.flat[0])
    yield from (made.unwritten({name: value}) for name, value in values.items())
    if len(values) > 1:
        yield made.unwritten(values)


def _temperature(evidence: Evidence) -> Iterator[Mutant]:
    """Of forms whose values are projected up, the temperature that gives the nearest out."""
    problem = evidence.suspects.problem
    if problem is None or problem.up is None:
        return
    if int(problem.lens.sum()) * problem.T * problem.H * (problem.D + problem.V) > FITTED:
        return
    given = evidence.actual["out"].astype(np.float64)

    def misfit(x: float) -> float:
        return float(np.nanmean(np.abs(evidence.suspects.results(made.temperature(x))["out"] - given)))

    best, least, grid, start = 1.0, np.inf, np.geomspace(1 / 32, 64, 23), misfit(1.0)
    for _ in range(4):
        errors = [misfit(float(x)) for x in grid]
        at = int(np.argmin(errors))
        if not 0 < at < len(grid) - 1:
            return
        best, least, grid = float(grid[at]), errors[at], np.linspace(grid[at - 1], grid[at + 1], 11)
    if least < 0.9 * start:  # not before: a grid may be too coarse for what is near
        yield made.temperature(best)


def _visible(known: list[Sample]) -> Iterator[Mutant]:
    """As many first keys, or last keys, as the lse says."""
    first, last = [], []
    for k in known:
        if k.lse is None or not np.isfinite(k.lse).all():
            return
        first.append(count(k.s, k.lse))
        last.append(count(k.s[:, ::-1], k.lse) - (k.s.shape[1] - k.seen))
    shift = np.concatenate([n - k.seen for n, k in zip(first, known, strict=True)])
    for by in _modes(shift):
        if by < 0:
            yield lengths.shift(by)
    yield from (lengths.at_most(n) for n in _modes(np.concatenate(first)) if n > 0)
    yield from (causal.window(n) for n in _modes(np.concatenate(last)) if n > 0)
    yield from (
        made.skipped(n)
        for n in _modes(np.concatenate([k.seen - n for n, k in zip(last, known, strict=True)]))
        if n > 0
    )


def _modes(numbers: Array) -> list[int]:
    """The two commonest numbers, as far as they are common."""
    values, counts = np.unique(numbers, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:2]
    return [int(values[i]) for i in order if counts[i] >= 0.3 * len(numbers)]


def _runs(known: list[Sample]) -> Iterator[Mutant]:
    """One key, or one aligned run of keys, lost or counted twice."""
    for k in known[-1:]:
        if k.lse is None or not np.isfinite(k.lse).all():
            return
        e = np.exp(k.s - k.right[:, None])  # weights [R, n]
        change = np.expm1(k.lse - k.right)  # [R] of their sum
        for sign in (-1, 1):
            if np.median(sign * change) <= 1e-6:
                continue
            sums = np.concatenate([np.zeros((len(e), 1)), np.cumsum(e, -1)], -1)
            best = (np.inf, 0, 0)
            for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
                starts = np.arange(0, e.shape[1], size)
                ends = np.minimum(starts + size, e.shape[1])
                error = np.abs(sums[:, ends] - sums[:, starts] - (sign * change)[:, None]).mean(0)
                at = int(error.argmin())
                best = min(best, (float(error[at]) * (1 + 1e-6 * size), int(starts[at]), int(ends[at])))
            yield made.run(best[1], best[2], twice=sign > 0)


def _periods(known: list[Sample], evidence: Evidence) -> Iterator[Mutant]:
    """Every so many-th key, or page, lost or counted twice."""
    assert evidence.suspects.problem is not None
    if any(k.lse is None or not np.isfinite(k.lse).all() for k in known):
        return
    weights = [np.exp(k.s - k.right[:, None]) for k in known]
    more = [np.expm1(np.asarray(k.lse) - k.right) for k in known]  # [R] of their sum
    best: tuple[float, int, int, int, bool] = (np.inf, 0, 0, 0, False)
    for unit in sorted({1, evidence.suspects.problem.block}):
        for m in range(2, 17):
            for r in range(m):
                parts = [e[:, (np.arange(e.shape[1]) // unit) % m == r].sum(-1) for e in weights]
                for sign in (-1, 1):
                    error = sum(float(np.abs(p - sign * x).mean()) for p, x in zip(parts, more, strict=True))
                    best = min(best, (error, unit, m, r, sign > 0))
    yield made.period(*best[1:4], twice=best[4])
    last = []
    for k, e, x in zip(known, weights, more, strict=True):
        unseen = e.shape[1] - k.seen  # masked keys at the end of each row
        counts = np.abs(np.cumsum(e[:, ::-1], -1) - x[:, None]).argmin(-1) + 1
        last.append(counts - unseen)
    yield from (made.last_twice(n) for n in _modes(np.concatenate(last)) if n > 1)


def _denominator(known: list[Sample]) -> Iterator[Mutant]:
    """The same number e^(lse') - e^lse in every row of a request: lanes of score 0 that count, or a sink."""
    found = []
    for k in known:
        lse = _shrunk(k) if k.lse is None else k.lse
        if lse is None or not np.isfinite(lse).all():
            return
        more = np.exp(lse) - np.exp(k.right)
        if not np.median(more) > 0 or np.abs(more - np.median(more)).max() > 0.05 * np.median(more):
            return
        found.append((k.length, float(np.median(more))))
    if all(abs(n - round(n)) < 0.02 * n for _, n in found):
        lanes = [(length, round(n)) for length, n in found]
        for tile in [*(1 << p for p in range(1, 13)), *range(3, 1025)]:
            if all(-length % tile == n for length, n in lanes):
                yield tail.pads(tile)
                break
    numbers = [n for _, n in found]
    if max(numbers) - min(numbers) <= 0.02 * max(numbers):
        yield made.sink(float(np.log(np.mean(numbers))))


def _shrunk(k: Sample) -> Array | None:
    """The lse [R] of rows of out that are the right ones shrunk by a denominator that is too large; None: not so."""
    if k.out is None:
        return None
    p = np.exp(k.s - k.right[:, None]) @ np.nan_to_num(k.values)  # [R, V]
    _, cosine, ratio = of_rows(np.nan_to_num(k.out), p)
    lse: Array = k.right - np.log(ratio)
    return lse if cosine.min() > 0.9999 and ratio.max() < 1 else None


def _held(evidence: Evidence) -> Iterator[Mutant]:
    """Wrong rows of out, and their lse, that hold the same number."""
    problem = evidence.suspects.problem
    if problem is None or problem.up is not None or evidence.suspects.requests is not None:
        return
    if "out" not in evidence.actual:
        return
    shape = _shape(problem)
    bad = (evidence.error["out"] > WITHIN).reshape(shape)
    rows = evidence.actual["out"].astype(np.float64).reshape(*shape, -1)[bad]
    if rows.size and np.array_equal(rows, np.full_like(rows, held := rows.flat[0]), equal_nan=True):
        yield made.rows_held(np.argwhere(bad), float(held) + 0.0, ("out",))
        if "lse" in evidence.actual:
            lse = evidence.actual["lse"].astype(np.float64).reshape(shape)[bad]
            if np.array_equal(lse, np.full_like(lse, held), equal_nan=True):
                yield made.rows_held(np.argwhere(bad), float(held) + 0.0, ("out", "lse"))


def _shape(problem: Problem) -> tuple[int, int, int]:
    return problem.B, problem.T, problem.H


def moved(evidence: Evidence) -> Iterator[Mutant]:
    """Rows that are right ones of another place, as they were found, with their lse or without."""
    problem = evidence.suspects.problem
    if problem is None or problem.up is not None or evidence.suspects.requests is not None:
        return
    if "out" not in evidence.actual:
        return
    shape = _shape(problem)
    g, w = (x.astype(np.float64).reshape(*shape, -1) for x in (evidence.actual["out"], evidence.suspects.truth["out"]))
    found = matches(g, w, (evidence.error["out"] > WITHIN).reshape(shape))
    bad = (evidence.error["out"] > WITHIN).reshape(shape)
    rows = bad & np.isfinite(g).all(-1) & np.isfinite(w).all(-1)
    if rows.any():
        few, right = g[rows][:ROLLED], w[rows][:ROLLED]
        by = min(range(g.shape[-1]), key=lambda by: float(np.abs(np.roll(right, by, -1) - few).sum()))
        yield from (made.rolled(by),) if by else ()
    if rows.sum() > 1 and (order := permutation(g[rows][:ROLLED], w[rows][:ROLLED])) is not None:
        yield made.columns_moved(order)
    if found is not None and found.rule and found.wrong <= len(found.to) + 2:
        yield made.rows_moved(found.to, found.source, found.rule, ("out",))
        yield made.rows_moved(found.to, found.source, found.rule, ("out", "lse"))


def factors(evidence: Evidence, mutant: Mutant | None = None) -> Iterator[Mutant]:
    """Constants of what is stored, by a right kernel or by a mutant: out times one, lse plus one or times one."""
    given_by = None if mutant is None else evidence.suspects.results(mutant)
    for name, array in evidence.actual.items():
        if name not in NAMES or evidence.suspects.problem is None:
            continue
        bad = evidence.error[name] > WITHIN
        stored = evidence.suspects.truth[name][evidence.rows[name]] if given_by is None else given_by[name]
        right = stored[bad].astype(np.float64)
        given = array[bad].astype(np.float64)
        good = np.isfinite(right) & np.isfinite(given)
        if not good.any() or np.allclose(given[good], right[good], rtol=1e-3):
            continue
        g, w = given[good], right[good]
        if name == "out":
            value = float((g * w).sum() / (w * w).sum()) if (w * w).sum() else 0.0
            if np.isfinite(value) and value > 0:
                yield columns.factor(float(f"{value:.4g}"))
                yield columns.row_factor(float(f"{value:.4g}"))
            continue
        yield made.lse_plus(float(f"{np.median(g - w):.6g}"))
        with np.errstate(all="ignore"):
            ratio = np.median(g / w)
        if np.isfinite(ratio) and ratio != 0:
            yield made.lse_times(float(f"{ratio:.6g}"))
