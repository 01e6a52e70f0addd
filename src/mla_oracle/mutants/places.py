# SPDX-License-Identifier: Apache-2.0
"""Wrong places of a list: positions for slots, pages of another size, indices outside, lists cut or of another row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from .list_edits import (
    by_position,
    by_slot,
    first_of,
    list_of,
    lists,
    of_case,
    outside,
    relist,
    selected,
    two_rows,
    two_tokens,
)
from .list_steps import extra_keys, joined, relisted, taken
from .listed import Listed, Selection
from .mutant import Edit, Maker, Mutant
from .needs import Need
from .plan import Plan
from .problem import Problem

UNITS, ROWS = "positions and slots", "selection row"


def _lies(where: Callable[[Listed, int, Array], Array]) -> Edit:
    """The keys of the list lie at the slots where(problem, request, place)."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and plan.keys is not None
        main = taken(plan, plan.keys.source == 0)
        slot = where(problem, int(problem.request[problem.row(plan)]), main.place)
        keys = problem.keys_of(plan, main.place, slot)
        return relisted(plan, joined(keys, extra_keys(plan)))

    return edit


def _page(size: Callable[[Listed], int]) -> Edit:
    return _lies(lambda p, b, place: p.slots(b, place, block=size(p)))


def _whole(tile: int) -> Edit:
    """The list is cut to whole tiles, where it has one."""

    def of(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
        count = int(chosen.within.sum())
        most = count // tile * tile or count
        return chosen.entries, chosen.valid & (np.arange(len(chosen.entries)) < most)

    return relist(of)


def _causal_by_place(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
    return chosen.entries, chosen.valid & (np.arange(len(chosen.entries)) <= problem.position(problem.row(plan)))


def whole_tiles(tile: int) -> Mutant:
    return _mutant(
        f"whole-tiles-{tile}",
        "list cut",
        f"n <- {tile} floor(n / {tile}) entries of a list, where it has so many",
        Need(f"a list of {tile} entries and more, no multiple", lists(lambda _, s: _rest(s, tile))),
        edit=_whole(tile),
        tile=tile,
    )


def _rest(chosen: Selection, tile: int) -> bool:
    count = int(chosen.within.sum())
    return count > tile and bool(chosen.valid[count // tile * tile : count].any())


def _late(problem: Listed) -> bool:
    for n in range(problem.rows):
        chosen = problem.selection(n)
        if chosen is not None and chosen.valid[max(problem.position(n) + 1, 0) :].any():
            return True
    return False


_mutant = Maker("topk.", (selected,))
_PAGES = "sgl-project/sglang#25556 sgl-project/sglang-jax#1074"
other_page = of_case("pages that have not 64 rows", lambda p: p.block != 64)
pages_of_two = of_case("pages of two rows and more", lambda p: p.block >= 2)

MUTANTS = (
    _mutant(
        "positions-as-slots",
        UNITS,
        "slot = index, a position taken for one",
        by_position,
        edit=_lies(lambda p, b, place: p.slots(b, place, by_slot=True)),
        refs="vllm-project/vllm#55692",
    ),
    _mutant(
        "slots-as-pages",
        UNITS,
        "slot = index block, a slot taken for a page",
        by_slot,
        pages_of_two,
        edit=_lies(lambda p, b, place: p.slots(b, place * p.block)),
        refs=_PAGES,
    ),
    _mutant(
        "offsets-lost",
        UNITS,
        "slot = block floor(index / block), the page's first row",
        pages_of_two,
        edit=_lies(lambda p, b, place: p.slots(b, place // p.block * p.block)),
    ),
    _mutant(
        "page-size-64",
        "page-size semantics",
        "slot = table[index / 64] 64 + index mod 64",
        by_position,
        other_page,
        edit=_page(lambda p: 64),
        refs=_PAGES,
    ),
    _mutant(
        "page-size-halved",
        "page-size semantics",
        "pages of half the rows",
        by_position,
        pages_of_two,
        edit=_page(lambda p: p.block // 2),
        refs=_PAGES,
    ),
    _mutant(
        "page-size-1",
        "page-size semantics",
        "slot = table[index]",
        by_position,
        pages_of_two,
        edit=_page(lambda p: 1),
        refs=_PAGES,
    ),
    _mutant(
        "outside-clamped",
        "OOB index",
        "an index at or above the capacity -> the last row",
        outside,
        edit=relist(lambda p, plan, s: (np.minimum(s.entries, s.capacity - 1), s.within & (s.entries >= 0))),
        refs="deepseek-ai/FlashMLA#184",
    ),
    _mutant(
        "outside-read",
        "OOB index",
        "an index at or above the capacity is read, whatever lies there",
        outside,
        edit=relist(lambda p, plan, s: (s.entries, s.within & (s.entries >= 0))),
        refs="deepseek-ai/FlashMLA#184",
    ),
    _mutant(
        "outside-as-first",
        "OOB index",
        "an index at or above the capacity -> 0",
        outside,
        edit=relist(lambda p, plan, s: (np.where(s.entries < s.capacity, s.entries, 0), s.within & (s.entries >= 0))),
    ),
    _mutant(
        "causal-by-place",
        "causal by place",
        "place k of the list is seen where k <= L - T + t",
        of_case("causal", lambda p: p.case.causal),
        Need("a list longer than the position of its query", lambda p: isinstance(p, Listed) and _late(p)),
        edit=relist(_causal_by_place),
    ),
    _mutant(
        "of-first-token", ROWS, "the list of query token 0 for all of a request", two_tokens, edit=list_of(first_of)
    ),
    _mutant("of-row-0", ROWS, "the list of the first query row for all", two_rows, edit=list_of(lambda p, n: 0)),
    _mutant(
        "of-row-before", ROWS, "the list of the query row before", two_rows, edit=list_of(lambda p, n: max(n - 1, 0))
    ),
    whole_tiles(64),
    whole_tiles(32),
    whole_tiles(8),
    whole_tiles(4),
)
