# SPDX-License-Identifier: Apache-2.0
"""Wrong pages: another table row, another entry, another page size, a table cut short.

The junk that such a kernel reads is what the case holds there; past the table and outside the cache it is unknown: NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .memory import ZERO
from .mutant import Maker, Mutant
from .needs import Need, one_key, paged, partial_page, three_pages, two_pages, two_requests
from .plan import Plan, table_entry
from .problem import Problem

wide_table = Need(
    "two requests and a table wider than the longest needs",
    lambda p: p.B >= 2 and widest(p) not in (0, p.table.shape[1]),
)


part_page_before = Need(
    "a request whose length is no multiple of the page, and one after it", lambda p: bool(np.any(p.lens[:-1] % p.block))
)


def widest(problem: Problem) -> int:
    """Pages of the longest request."""
    return -(-int(problem.lens.max(initial=0)) // problem.block)


def table(of: Callable[[Problem, Plan], Array]) -> Callable[[Problem, Plan], Plan]:
    return lambda problem, plan: replace(plan, table=of(problem, plan))


def entries(
    index: Callable[[Problem, Plan, Array], Array], zero: Callable[[Array], Array] | None = None
) -> Callable[[Problem, Plan], Plan]:
    """Entry i of the request's used pages is taken from entry index(i), or 0 where `zero`; none: no page has it."""

    def of(problem: Problem, plan: Plan) -> Array:
        at = index(problem, plan, np.arange(problem.used(plan.b)))
        inside = (at >= 0) & (at < len(plan.table))
        entry = np.where(inside, plan.table[np.where(inside, at, 0)], -1)
        return entry if zero is None else np.where(zero(np.arange(len(at))), 0, entry)

    return table(of)


def _without(dropped: Callable[[Problem, Plan], int]) -> Callable[[Problem, Plan], Plan]:
    """The lanes of one page are left out."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        return replace(plan, lanes=plan.lanes[plan.lanes // problem.block != dropped(problem, plan)])

    return edit


def _twice(problem: Problem, plan: Plan) -> Plan:
    """The lanes of the first page once more."""
    return replace(plan, lanes=np.concatenate([plan.lanes, plan.lanes[plan.lanes < problem.block]]))


def _flat_start(problem: Problem, plan: Plan) -> Array:
    """Pages of all requests one after the other; request b from page floor(tokens before it / P)."""
    used = [problem.table[b, : problem.used(b)] for b in range(problem.B)]
    return np.concatenate(used)[int(problem.lens[: plan.b].sum()) // problem.block :]


def _edge_early(problem: Problem, plan: Plan) -> Plan:
    def address(own: Plan, j: Array) -> Array:
        first = table_entry(own, (j + 1) // own.block, lambda page: page * own.page_stride)
        row: Array = first + j % own.block * own.row_stride
        return row

    return replace(plan, address=address)


def truncated(keep: Callable[[int], int], name: str, words: str) -> Mutant:
    """Entries from keep(used pages) on are 0."""

    def of(problem: Problem, plan: Plan) -> Array:
        used = problem.used(plan.b)
        return np.where(np.arange(len(plan.table)) >= max(keep(used), 1), 0, plan.table)

    return _mutant(
        name,
        "truncated table",
        f"bt[i] <- 0 from {words} on",
        two_pages,
        edit=table(of),
        refs="local-inference-lab/vllm#588",
    )


def last_swapped(page: int, *, zero: bool) -> Mutant:
    """Entry `page` and the last used one exchanged; `zero`: what is past the end of the last page is read as 0."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        last = problem.used(plan.b) - 1
        if last <= page:
            return plan
        order = np.arange(len(plan.table))
        order[[page, last]] = last, page
        rows, inner = (problem.lens[plan.b] - 1) % problem.block + 1, plan.address  # of the last page

        def address(own: Plan, j: Array) -> Array:
            stale = (j // problem.block == page) & (j % problem.block >= rows)
            return np.where(stale, ZERO, inner(own, j))

        swapped = replace(plan, table=plan.table[order])
        return replace(swapped, address=address) if zero else swapped

    return _mutant(
        f"last-swapped-{page}{'-zero' * zero}",
        ENTRY,
        f"bt[{page}] and the last used entry exchanged{', rows past the end 0' * zero}",
        two_pages,
        *((partial_page,) if zero else ()),
        edit=edit,
        page=page,
    )


_mutant = Maker("paging.", (paged,))


ROW, ENTRY, LOST = "table row mapping", "table entry", "page lost or repeated"


MUTANTS = (
    _mutant(
        "table-of-request-0",
        ROW,
        "table row 0 for every request",
        two_requests,
        one_key,
        edit=table(lambda problem, _: problem.table[0]),
    ),
    _mutant(
        "next-table-row",
        ROW,
        "table row b + 1, of the last request row 0",
        two_requests,
        one_key,
        edit=table(lambda problem, plan: problem.table[(plan.b + 1) % problem.B]),
    ),
    _mutant(
        "table-stride",
        ROW,
        "row b starts at entry b ceil(max L / P), the table being wider",
        wide_table,
        one_key,
        edit=table(lambda problem, plan: problem.table.reshape(-1)[plan.b * widest(problem) :]),
    ),
    _mutant(
        "table-transposed",
        ROW,
        "entry i of request b is i B + b of the flat table",
        Need("two requests and a table of two columns", lambda p: p.B >= 2 and p.table.shape[1] >= 2),
        one_key,
        edit=table(lambda problem, plan: problem.table.reshape(-1)[plan.b :: problem.B]),
    ),
    _mutant(
        "start-offset",
        "request start offset",
        "request b starts at page floor(sum L / P), not sum ceil(L / P)",
        two_requests,
        part_page_before,
        edit=table(_flat_start),
        refs="sgl-project/sglang-jax#20",
    ),
    _mutant(
        "identity",
        ENTRY,
        "page i for entry i of every request: the table is not read",
        one_key,
        edit=table(lambda problem, plan: np.arange(len(plan.table))),
    ),
    _mutant(
        "contiguous",
        ENTRY,
        "bt[i] <- bt[0] + i",
        two_pages,
        edit=table(lambda problem, plan: plan.table[0] + np.arange(len(plan.table))),
    ),
    _mutant("first-page", ENTRY, "bt[i] <- bt[0]", two_pages, edit=entries(lambda _, p, i: 0 * i)),
    _mutant("next-entry", ENTRY, "bt[i] <- bt[i+1]", one_key, edit=entries(lambda _, p, i: i + 1)),
    _mutant(
        "entry-before",
        ENTRY,
        "bt[i] <- bt[i-1], bt[0] its own",
        two_pages,
        edit=entries(lambda _, p, i: np.maximum(i - 1, 0)),
    ),
    _mutant(
        "pairs-swapped",
        ENTRY,
        "bt[i] <- bt[i xor 1]",
        two_pages,
        edit=entries(lambda problem, p, i: np.where((i ^ 1) < len(i), i ^ 1, i)),
    ),
    last_swapped(0, zero=False),
    last_swapped(0, zero=True),
    last_swapped(1, zero=False),
    last_swapped(1, zero=True),
    _mutant(
        "edge-early",
        ENTRY,
        "slot(j) = bt[(j + 1) // P] P + j mod P: the last row of a page from the next entry",
        Need("a whole page", lambda p: int(p.lens.max(initial=0)) >= p.block),
        edit=_edge_early,
    ),
    _mutant("next-page-id", ENTRY, "bt[i] <- bt[i] + 1", one_key, edit=table(lambda _, plan: plan.table + 1)),
    _mutant(
        "table-int64",
        ENTRY,
        "i32 entries found as if 64 bits wide: bt[i] <- bt[i/2] for even i, 0 for odd",
        two_pages,
        edit=entries(lambda problem, p, i: i // 2, zero=lambda i: i % 2 == 1),
    ),
    truncated(lambda used: used - 1, "truncated-last", "the last used entry"),
    truncated(lambda used: -(-used // 2), "truncated-half", "half of the used entries"),
    truncated(lambda used: 1, "truncated-first", "entry 1"),
    _mutant(
        "clamped",
        "truncated table",
        "the last used entry is the one before it",
        two_pages,
        edit=entries(lambda _, p, i: np.minimum(i, max(len(i) - 2, 0))),
    ),
    _mutant("first-page-dropped", LOST, "the keys of page 0 are not seen", two_pages, edit=_without(lambda *_: 0)),
    _mutant(
        "middle-page-dropped",
        LOST,
        "the keys of one page in the middle are not seen",
        three_pages,
        edit=_without(lambda problem, plan: max(problem.used(plan.b) // 2, 1)),
    ),
    _mutant(
        "last-page-dropped",
        LOST,
        "the keys of the last page are not seen",
        two_pages,
        edit=_without(lambda problem, plan: max(problem.used(plan.b) - 1, 1)),
    ),
    _mutant("first-page-twice", LOST, "the keys of page 0 are counted twice", two_pages, edit=_twice),
)
