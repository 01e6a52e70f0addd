# SPDX-License-Identifier: Apache-2.0
"""Wrong lists of keys: invalid indices, lengths that are another's, indices twice, lists without keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .list_edits import (
    by_position,
    empty_list,
    first_of,
    holes,
    inner_holes,
    lengths,
    of_case,
    relist,
    selected,
    twice,
    two_rows,
    two_tokens,
)
from .list_steps import extra_keys, joined, relisted
from .listed import Listed, Selection
from .memory import ZERO
from .mutant import Edit, Maker
from .plan import MISSING, Keys, Part, Plan
from .problem import Problem

VALID, LENGTH = "-1 treated as valid", "lanes beyond length"


def _zero_keys(problem: Problem, plan: Plan) -> Plan:
    """Every invalid place of the list is a key of zeros."""
    assert isinstance(problem, Listed)
    chosen = problem.selection(problem.row(plan))
    count = 0 if chosen is None else int((chosen.within & ~chosen.valid).sum())
    assert plan.keys is not None
    zeros = np.full(count, ZERO), np.full(count, -1), np.zeros(count, np.int64)
    return relisted(plan, joined(plan.keys, Keys(*zeros, np.zeros((problem.H, count)))))


def _gathered(problem: Problem, plan: Plan) -> Plan:
    """A row before the cache, NaN, is multiplied by the weight 0 where the list has a -1."""
    assert isinstance(problem, Listed) and plan.keys is not None
    chosen = problem.selection(problem.row(plan))
    if chosen is None or not (chosen.within & (chosen.entries < 0)).any():
        return plan
    n, sees = plan.length, plan.sees
    row = Keys(np.array([MISSING]), np.array([-1]), np.zeros(1, np.int64), np.zeros((problem.H, 1)))
    longer = relisted(plan, joined(plan.keys, row))
    return replace(longer, touches_masked=True, sees=lambda own: sees(own) & (own.lanes < n))


def _hole_ends(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
    return chosen.entries, chosen.valid & ~np.logical_or.accumulate(chosen.within & ~chosen.valid)


def _prefix(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
    return chosen.entries, chosen.valid & (np.arange(len(chosen.entries)) < int(chosen.valid.sum()))


def _longer(by: int | None) -> Edit:
    """`by` entries more than topk_length says, None: all."""

    def of(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
        most = len(chosen.entries) if by is None else int(chosen.within.sum()) + by
        known = (chosen.entries >= 0) & (chosen.entries < chosen.capacity)
        return chosen.entries, known & (np.arange(len(chosen.entries)) < most)

    return relist(of)


def _length_of(row: Callable[[Listed, int], int]) -> Edit:
    """topk_length of another row."""

    def of(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
        other = problem.selection(row(problem, problem.row(plan)))
        known = (chosen.entries >= 0) & (chosen.entries < chosen.capacity)
        return chosen.entries, known & (True if other is None else other.within)

    return relist(of)


def _distinct(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
    first = np.zeros(len(chosen.entries), bool)
    keep = np.flatnonzero(chosen.valid)
    first[keep[np.unique(chosen.entries[keep], return_index=True)[1]]] = True
    return chosen.entries, first


def _dense(only_empty: bool) -> Edit:
    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        n = problem.row(plan)
        chosen = problem.selection(n)
        if chosen is None or (only_empty and chosen.valid.any()):
            return plan
        place = np.arange(chosen.capacity)
        place = place[problem.sight(n, place)]
        return relisted(plan, joined(problem.main_keys(plan, place), extra_keys(plan)))

    return edit


def _phantom(problem: Problem, plan: Plan) -> Plan:
    """An empty list leaves a state m = 0, l = 1, acc = 0."""
    assert isinstance(problem, Listed)
    if plan.length or not problem.length(int(problem.request[problem.row(plan)])):
        return plan
    zero = Part(np.zeros((1, problem.H, problem.V)), np.zeros((1, problem.H)))
    return replace(plan, extras=(*plan.extras, zero))


def _valid_as(index: Callable[[Selection], Array]) -> Edit:
    return relist(lambda problem, plan, s: (np.where(s.within & (s.entries < 0), index(s), s.entries), s.within))


_mutant = Maker("topk.", (selected,))
_SPARSE = "vllm-project/vllm#45324"
_LENGTH = "vllm-project/vllm#36616 vllm-project/vllm#36524 flashinfer-ai/flashinfer#5095"

MUTANTS = (
    _mutant(
        "minus-one-as-first",
        VALID,
        "-1 -> 0, row 0 once for each",
        holes,
        edit=_valid_as(lambda s: s.entries * 0),
        refs=_SPARSE,
    ),
    _mutant(
        "minus-one-as-last",
        VALID,
        "-1 -> the last row, as an array from its end",
        holes,
        edit=_valid_as(lambda s: s.entries * 0 + s.capacity - 1),
        refs=_SPARSE,
    ),
    _mutant(
        "minus-one-as-zero-key",
        "-1 treated as zero key",
        "Z <- Z + n_invalid e^0",
        holes,
        edit=_zero_keys,
        refs="hw-native-sys/pypto-lib#1014",
    ),
    _mutant(
        "minus-one-gathered",
        "-1 gather",
        "0 NaN, the row before the cache times the weight 0",
        holes,
        edit=_gathered,
        refs="radixark/miles#2079",
    ),
    _mutant(
        "ends-at-hole",
        "lane prefix",
        "the list ends at its first -1",
        inner_holes,
        edit=relist(_hole_ends),
        refs="vllm-project/vllm#55692",
    ),
    _mutant(
        "prefix-of-valid",
        "lane prefix",
        "S = the first n places, holes among them, n the valid ones",
        inner_holes,
        edit=relist(_prefix),
        refs="vllm-project/vllm#55692",
    ),
    _mutant("length-ignored", LENGTH, "S = all places", lengths, edit=_longer(None), refs=_LENGTH),
    _mutant("length-plus-one", LENGTH, "one place more", lengths, edit=_longer(1), refs=_LENGTH),
    _mutant("length-minus-one", "list cut", "the last place of a list is lost", edit=_longer(-1)),
    _mutant(
        "length-of-first-token",
        "length of another list",
        "topk_length[b, 0] for every query token of b",
        lengths,
        two_tokens,
        of_case(
            "a topk_length of each query", lambda p: p.case.topk_length is not None and p.case.topk_length.ndim == 2
        ),
        edit=_length_of(first_of),
    ),
    _mutant(
        "length-of-request-0",
        "length of another list",
        "topk_length of the first row for all",
        lengths,
        two_rows,
        edit=_length_of(lambda p, n: 0),
    ),
    _mutant(
        "length-by-row",
        "length of another list",
        "topk_length[r] of query row r, though it is of requests",
        lengths,
        two_tokens,
        of_case(
            "a topk_length of each request",
            lambda p: p.case.topk_length is not None and p.case.q.ndim == 4 and p.case.topk_length.ndim == 1,
        ),
        edit=_length_of(lambda p, n: int(p.starts[min(n, len(p.starts) - 2)])),
    ),
    _mutant("duplicates-dropped", "duplicates", "an index counts once", twice, edit=relist(_distinct)),
    _mutant(
        "cut-by-capacity",
        "top-k set",
        "candidates beyond three quarters of a list are dropped",
        edit=relist(lambda p, plan, s: (s.entries, s.valid & (np.arange(len(s.entries)) < len(s.entries) * 3 // 4))),
        refs="sgl-project/sglang#36807 vllm-project/vllm#51782 vllm-project/vllm#55314",
    ),
    _mutant(
        "dense",
        "dense instead of sparse",
        "S = 0 .. L-1, the list is not looked at",
        by_position,
        edit=_dense(False),
        refs="vllm-project/vllm-gaudi#1777",
    ),
    _mutant(
        "empty-as-dense",
        "empty list",
        "a list without keys: all of them",
        by_position,
        empty_list,
        edit=_dense(True),
        refs="vllm-project/vllm#52512",
    ),
    _mutant(
        "empty-as-zero-key",
        "empty list",
        "a list without keys leaves m = 0, l = 1",
        empty_list,
        edit=_phantom,
        refs="vllm-project/vllm#52512",
    ),
)
