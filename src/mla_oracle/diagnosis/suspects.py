# SPDX-License-Identifier: Apache-2.0
"""What every mutant gives on one case, or on some of its requests where the case is large.

suspects = Suspects(case, truth, requests)
suspects.results(mutant)        # {"out": [b, ...], "lse": [b, ...]} of these requests
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import Case, PagedCase
from ..mutants import Mutant, Problem, bank
from ..mutants.evaluate import evaluate
from ..mutants.problem import Results, problem_of
from .fewer import starts_of

KEPT_BYTES = 1 << 28
LISTED = 8  # requests of a case whose queries have lists: every row is evaluated alone
WORK = 64 * 4096 * 1088  # elements of rows that the query rows of the chosen requests multiply


class Suspects:
    """`requests` None: all of them. Raises InputError for a case that is not valid."""

    def __init__(self, case: Case, truth: Mapping[str, Array], requests: Sequence[int] | None = None) -> None:
        self.case, self.truth = case, dict(truth)
        self.problem = problem_of(case)
        self.requests = None if requests is None else sorted(requests)
        if self.problem is not None and self.requests == list(range(self.problem.B)):
            self.requests = None
        self._kept: dict[str, Results] = {}
        self._room = KEPT_BYTES
        self._last: tuple[str, Results] = ("", {})
        self._lacks: dict[str, bool] = {}

    def applies(self, mutant: Mutant) -> bool:
        """Whether the case has what the mutant needs."""
        if mutant.name not in self._lacks:
            reason = mutant.applies(self.case) if self.problem is None else mutant.lacks(self.problem)
            self._lacks[mutant.name] = reason is not None
        return not self._lacks[mutant.name]

    def applicable(self) -> tuple[Mutant, ...]:
        """The mutants of the bank that the case can show."""
        return tuple(mutant for mutant in bank() if self.applies(mutant))

    def results(self, mutant: Mutant) -> Results:
        """What the mutant gives, of the chosen requests, f64."""
        if mutant.name in self._kept:
            return self._kept[mutant.name]
        if mutant.name == self._last[0]:
            return self._last[1]
        if self.problem is None:
            made = mutant.run(self.case)
        elif self.requests is None:
            made = mutant.solve(self.problem)
        else:
            made = self._some(mutant, self.problem, self.requests)
        size = sum(array.nbytes for array in made.values())
        if size <= self._room:
            self._room -= size
            self._kept[mutant.name] = made
        self._last = (mutant.name, made)
        return made

    def cut(self, name: str) -> Any:
        """The index of what is compared in a whole result."""
        if self.requests is None:
            return ...
        return (slice(None), self.requests) if name.startswith("partial_") else self.requests

    def _some(self, mutant: Mutant, problem: Problem, requests: list[int]) -> Results:
        """Rows of other requests are right, where the mutant's results are made of those of all."""
        whole = {name: _unshaped(problem, name, array) for name, array in self.truth.items()}
        whole = {name: array.copy() for name, array in whole.items()} if mutant.finish is not None else whole
        some = {name: _axis(name, array, requests).copy() for name, array in whole.items()}
        for i, b in enumerate(requests):
            for plan in mutant.plans(problem, problem.plan(b)):
                rows, base = problem.state(plan.b)
                state = evaluate(plan, rows, base)
                some["out"][i, plan.t], some["lse"][i, plan.t] = state.out, state.lse
                if "partial_out" in some:
                    some["partial_out"][:, i, plan.t], some["partial_lse"][:, i, plan.t] = state.partials()
        if mutant.finish is not None:
            for name, array in whole.items():
                array[(slice(None), requests) if name.startswith("partial_") else requests] = some[name]
            with np.errstate(all="ignore"):
                whole = mutant.finish(problem, whole)
            some = {name: _axis(name, array, requests) for name, array in whole.items()}
        return problem.shape(some)


def count_requests(case: Case) -> int:
    """Requests of a paged case; 1 of the others."""
    if not isinstance(case, PagedCase):
        return 1
    return len(starts_of(case)) - 1 if case.extensions() else len(case.seq_lens)


def _keys(case: PagedCase) -> tuple[Array, Array]:
    """How many keys a request has, by their sum over its query rows [B], and heads of a row [B]."""
    if not case.extensions():
        lens = case.seq_lens.astype(np.int64)
        return lens, np.full(len(lens), int(np.prod(case.q.shape[1:-1])))
    from ..canonical import checked

    keys = np.array([int(seen.starts[-1]) for seen in checked(case, "f64").seen], np.int64)
    return keys, np.full(len(keys), case.q.shape[-2])


def choose_requests(case: Case, wrong: Array) -> list[int] | None:
    """Requests that show what is wrong and cost little, and some that are right; None: all. wrong: bool [B]."""
    if not isinstance(case, PagedCase):
        return None
    keys, rows = _keys(case)
    cost = np.maximum(keys, 1) * rows * (case.q.shape[-1] + case.head_dim_v) // 2
    most, room = (LISTED, WORK // 4) if case.extensions() else (24, WORK)
    if cost.sum() <= room:
        return None
    order = np.argsort(cost, kind="stable")
    bad, good = ([int(b) for b in order if wrong[b] == is_wrong] for is_wrong in (True, False))
    # The cheapest wrong ones, one of middle length, two right ones, then as many as there is room for.
    middle = bad[len(bad) // 2 : len(bad) // 2 + 1]
    wanted = [*bad[:2], *middle, *[b for b in good if keys[b] > 1][:1], *good[:1]]
    chosen: list[int] = []
    for b in dict.fromkeys([*wanted, *bad, *good]):
        if not chosen or cost[b] <= room:
            chosen.append(b)
            room -= int(cost[b])
        if len(chosen) >= most:
            break
    return sorted(chosen)


def _unshaped(problem: Problem, name: str, array: Array) -> Array:
    """`array` with the token axis that a case without one leaves out; the case is paged."""
    assert isinstance(problem.case, PagedCase)
    if problem.case.q.ndim == 4:
        return array
    return np.expand_dims(array, 2 if name.startswith("partial_") else 1)


def _axis(name: str, array: Array, requests: list[int]) -> Array:
    found: Array = array[:, requests] if name.startswith("partial_") else array[requests]
    return found
