# SPDX-License-Identifier: Apache-2.0
"""How well a mutant explains an actual result: row by row, in budgets.

Judged are the rows of out and lse that are beyond the budget around the truth, and those that would be if the mutant
were what ran. Such a row counts 1 where the actual lies within the budget around the mutant's, else the share of its
error that is gone, 1 - error(mutant) / error(truth), and 0 where it is right and the mutant says it is not. The share
a mutant explains is the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Array
from ..mutants import Mutant
from ..mutants.problem import Results
from .measure import Measure
from .suspects import Suspects

WITHIN = 1.0  # budgets
PREDICTED = 1.5  # a row right by its budget and beyond this by a mutant speaks against it
FAR = 1e3
NEAR = 0.03  # of the error: shares so close are ranked by their distance
BATCH_BYTES = 1 << 24
Sums = tuple[float, float, float, float]  # of one case: explained, judged, squares, compared


@dataclass(frozen=True)
class Fit:
    """One mutant against one actual, or against those of several cases joined."""

    mutant: Mutant
    share: float
    distance: float  # mean squared error of rows against the mutant's, in budgets, each at most FAR
    shares: Mapping[str, float] = field(default_factory=dict)  # of each result alone
    explained: float = 0.0  # the share over the rows that are wrong alone
    absent: Mapping[str, Array] = field(default_factory=dict)  # [*rows] wrong by the mutant, right in fact
    sums: Sums = (0.0, 0.0, 0.0, 0.0)
    where: str = ""  # the rows it holds in, where not in all
    beyond: Mapping[str, Array] = field(default_factory=dict)  # [*rows] not within the mutant's budget

    @property
    def over(self) -> float:
        """The share of rows that it leaves beyond their budgets."""
        left = [np.where(self.absent[n], False, b) if self.where else b for n, b in self.beyond.items()]
        return float(np.concatenate(left).mean()) if left else 0.0


class Evidence:
    """The actual of one case against its truth; `fits` is asked of the suspects."""

    def __init__(self, suspects: Suspects, measure: Measure, actual: Mapping[str, Array]) -> None:
        self.suspects, self.measure, self.whole = suspects, measure, actual
        self.actual = {name: array[suspects.cut(name)] for name, array in actual.items()}
        self.rows = {name: suspects.cut(name) for name in actual}
        self.error = {
            name: measure.units(name, array, suspects.truth[name][self.rows[name]], self.rows[name])
            for name, array in self.actual.items()
        }

    def fits(self, mutants: Iterable[Mutant]) -> list[Fit]:
        """How well each of `mutants` explains the actual."""
        found: list[Fit] = []
        batch: list[tuple[Mutant, Results]] = []
        size = 0
        for mutant in mutants:
            results = self.suspects.results(mutant)
            batch.append((mutant, results))
            size += sum(array.nbytes for array in results.values())
            if size > BATCH_BYTES:
                found += self._batch(batch)
                batch, size = [], 0
        return found + (self._batch(batch) if batch else [])

    def _batch(self, batch: list[tuple[Mutant, Results]]) -> list[Fit]:
        mutants, given = [mutant for mutant, _ in batch], [results for _, results in batch]
        m = len(given)
        shares: list[dict[str, float]] = [{} for _ in given]
        absent: list[dict[str, Array]] = [{} for _ in given]
        beyond: list[dict[str, Array]] = [{} for _ in given]
        total, judged, wrong, squares, count = np.zeros(m), np.zeros(m), 0, np.zeros(m), 0
        for name, actual in self.actual.items():
            other = np.stack([results[name] for results in given])
            raw, growth = self.measure.errors(name, actual, other, self.rows[name])  # [m, *rows]
            error = self.error[name].ravel()  # [n]
            raw, mine = raw.reshape(m, -1), (raw / growth).reshape(m, -1)  # [m, n]
            bad, over = error > WITHIN, mine > WITHIN
            rows = bad | (mine > PREDICTED)
            explained, number = scores(error, raw, mine).sum(-1), rows.sum(-1)  # [m]
            for i in range(m):
                shares[i][name] = float(explained[i] / number[i]) if number[i] else 1.0
                absent[i][name], beyond[i][name] = rows[i] & ~bad, over[i]
            total += explained
            judged += number
            wrong += int(bad.sum())
            squares += np.square(np.minimum(mine, FAR)).sum(-1)
            count += error.size
        sums = np.stack([total, judged, squares, np.full(m, count)], -1).tolist()  # [m, 4]
        return [
            Fit(
                mutant,
                share=sums[i][0] / sums[i][1] if sums[i][1] else 0.0,
                distance=sums[i][2] / max(count, 1),
                shares=shares[i],
                explained=sums[i][0] / wrong if wrong else 0.0,
                absent=absent[i],
                sums=tuple(sums[i]),
                beyond=beyond[i],
            )
            for i, mutant in enumerate(mutants)
        ]

    def distance(self, mutant: Mutant, absent: Mapping[str, Array]) -> float:
        """The distance of a fit that holds but in the rows `absent` [*rows], which are right."""
        given = self.suspects.results(mutant)
        units = [
            np.where(absent[name], self.error[name], self.measure.units(name, actual, given[name], self.rows[name]))
            for name, actual in self.actual.items()
        ]
        squares = [np.square(np.minimum(u, FAR)).ravel() for u in units]
        return float(np.concatenate(squares).mean())

    def same(self, one: Mutant, two: Mutant) -> bool:
        """Whether no row tells one mutant from the other on this case."""
        a, b = self.suspects.results(one), self.suspects.results(two)
        return all(
            bool((self.measure.units(name, a[name], b[name], self.rows[name]) <= WITHIN).all()) for name in self.actual
        )


def scores(error: Array, raw: Array, mine: Array) -> Array:
    """The score of each row [*rows]: its error against the truth, against the mutant, and that in its own budget."""
    with np.errstate(all="ignore"):
        gone = 1 - raw / error
    gone = np.where(np.isnan(gone) | np.isinf(error), 0, np.maximum(gone, 0))  # of infinity there is no share
    return np.where(error > WITHIN, np.where(mine <= WITHIN, 1.0, gone), 0.0)


def joined(mutant: Mutant, cases: Iterable[Sums]) -> Fit:
    """One mutant's sums on several cases as one fit."""
    total, judged, squares, count = (sum(column) for column in zip(*cases, strict=True))
    share = total / judged if judged else 0.0
    return Fit(mutant, share, squares / max(count, 1), sums=(total, judged, squares, count))


def ranked(fits: list[Fit]) -> list[Fit]:
    """Best first: those whose share is as good as the best by their distance, then by share."""
    if not fits:
        return []
    best = max(fit.share for fit in fits)
    return sorted(fits, key=lambda fit: (max(0.0, best - NEAR - fit.share), fit.distance, -bool(fit.mutant.references)))
