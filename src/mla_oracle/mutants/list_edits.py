# SPDX-License-Identifier: Apache-2.0
"""What lists of keys a case has, as needs of mutants, and how a mutant changes the list of a row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from .list_steps import extra_keys, joined, relisted
from .listed import Listed, Selection
from .mutant import Edit
from .needs import Need
from .plan import Plan
from .problem import Problem


def lists(test: Callable[[Listed, Selection], Array | bool], extra: bool = False) -> Callable[[Problem], bool]:
    """Whether a row's selection has what test(problem, selection) says."""

    def met(problem: Problem) -> bool:
        if not isinstance(problem, Listed):
            return False
        found = (problem.selection(n, int(extra)) for n in range(problem.rows))
        return any(bool(np.any(test(problem, chosen))) for chosen in found if chosen is not None)

    return met


def of_case(words: str, test: Callable[[Listed], bool]) -> Need:
    return Need(words, lambda p: isinstance(p, Listed) and test(p))


selected = of_case("a selection", lambda p: p.case.topk_indices is not None)
by_position = of_case("no selection by slot", lambda p: not p.by_slot)
by_slot = of_case("a selection by slot", lambda p: p.by_slot)
holes = Need("a -1 within a list", lists(lambda _, s: s.within & (s.entries < 0)))
inner_holes = Need(
    "a key after a -1 in a list", lists(lambda _, s: s.valid & np.logical_or.accumulate(s.within & ~s.valid))
)
lengths = of_case("a topk_length below the width of its list", lambda p: p.case.topk_length is not None)
outside = Need("an index at or above the capacity", lists(lambda _, s: s.within & (s.entries >= s.capacity)))
twice = Need("an index twice in a list", lists(lambda _, s: len(np.unique(s.entries[s.valid])) < int(s.valid.sum())))
empty_list = Need(
    "a list without keys of a request with some", lists(lambda _, s: not s.valid.any() and s.capacity > 0)
)
second = of_case("a second cache", lambda p: p.case.extra_kv_cache is not None)
two_tokens = of_case("two query tokens of one request", lambda p: bool((np.diff(p.starts) > 1).any()))
two_rows = of_case("two query rows", lambda p: p.rows > 1)


def relist(of: Callable[[Listed, Plan, Selection], tuple[Array, Array]]) -> Edit:
    """The main cache's keys are the places [K] of `of` where its mask [K] holds and the row may see them."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        n = problem.row(plan)
        chosen = problem.selection(n)
        if chosen is None:
            return plan
        place, live = of(problem, plan, chosen)
        place = place[live & problem.sight(n, place)]
        return relisted(plan, joined(problem.main_keys(plan, place), extra_keys(plan)))

    return edit


def list_of(other: Callable[[Listed, int], int]) -> Edit:
    """The list of row other(problem, n); a place past the request's own is not known."""

    def of(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
        found = problem.selection(other(problem, problem.row(plan)))
        assert found is not None
        return found.entries, found.valid

    return relist(of)


def first_of(problem: Listed, n: int) -> int:
    return int(problem.starts[problem.request[n]])
