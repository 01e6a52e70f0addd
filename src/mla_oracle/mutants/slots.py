# SPDX-License-Identifier: Apache-2.0
"""Right pages of another size: what a table entry and a place in a page mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Maker
from .needs import Need, one_key, paged
from .plan import Plan, page_address, table_entry
from .problem import Problem

SIZE = "page-size semantics"

even_block = Need("pages of an even number of rows", lambda p: p.block % 2 == 0)


rows_between = Need(
    "pages of two rows or more and two keys", lambda p: p.block >= 2 and int(p.lens.max(initial=0)) >= 2
)


not_64 = Need(
    "pages of other than 64 rows, and more than 64 keys or a page's",
    lambda p: p.block != 64 and int(p.lens.max(initial=0)) > min(64, p.block),
)


def size(block: Callable[[Problem], int]) -> Callable[[Problem, Plan], Plan]:
    """slot(j) = bt[j // P'] P' + j mod P', in rows of the cache: P' rows where a page has P."""
    return slots(
        lambda problem, plan, j: (
            table_entry(plan, j // block(problem), lambda page: page * block(problem) + 0) + j % block(problem)
        )
    )


def slots(of: Callable[[Problem, Plan, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """Token j lies at slot of(j) of the cache: row slot mod P of page slot // P."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        def address(own: Plan, j: Array) -> Array:
            page, row = np.divmod(of(problem, own, j), problem.block)
            start: Array = page * own.page_stride + row * own.row_stride
            return start

        return replace(plan, address=address)

    return edit


def _packed(problem: Problem, plan: Plan, j: Array) -> Array:
    """Requests one after the other, from the first slot of the cache on."""
    return int(problem.lens[: plan.b].sum()) + j


def _token_slots(problem: Problem, plan: Plan, j: Array) -> Array:
    """The slot of token j in the right table."""
    slot: Array = table_entry(plan, j // plan.block, lambda page: page * plan.block) + j % plan.block
    return slot


_mutant = Maker("paging.", (paged,))


MUTANTS = (
    _mutant(
        "half-page-twice",
        SIZE,
        "row j mod P/2 of the page: the second half is the first again",
        even_block,
        one_key,
        edit=slots(
            lambda _, plan, j: (
                table_entry(plan, j // plan.block, lambda page: page * plan.block) + j % plan.block % (plan.block // 2)
            )
        ),
    ),
    _mutant(
        "half-page-lost",
        SIZE,
        "the second half of every page is not seen",
        even_block,
        one_key,
        edit=lambda problem, plan: replace(plan, lanes=plan.lanes[plan.lanes % problem.block < problem.block // 2]),
    ),
    _mutant(
        "size-doubled",
        SIZE,
        "slot(j) = bt[j // 2P] 2P + j mod 2P; P = 1: two rows share a word",
        one_key,
        edit=size(lambda p: 2 * p.block),
        refs="sgl-project/sglang-jax#1074",
    ),
    _mutant(
        "size-halved",
        SIZE,
        "slot(j) = bt[j // (P/2)] P/2 + j mod P/2",
        even_block,
        one_key,
        edit=size(lambda p: p.block // 2),
    ),
    _mutant(
        "size-64", SIZE, "slot(j) = bt[j // 64] 64 + j mod 64, pages having P rows", not_64, edit=size(lambda p: 64)
    ),
    _mutant("size-1", SIZE, "slot(j) = bt[j], page ids read as token slots", rows_between, edit=size(lambda p: 1)),
    _mutant(
        "token-slots",
        SIZE,
        "slot(j) = idx[j // P] P + j mod P, idx holding the slot of each token",
        rows_between,
        edit=slots(lambda problem, plan, j: _token_slots(problem, plan, j // plan.block) * plan.block + j % plan.block),
        refs="sgl-project/sglang#25556",
    ),
    _mutant(
        "page-as-slot",
        SIZE,
        "slot(j) = bt[j // P] + j mod P, the id not multiplied by P",
        Need("pages of two rows or more", lambda p: p.block >= 2),
        one_key,
        edit=slots(lambda _, plan, j: table_entry(plan, j // plan.block, lambda page: page) + j % plan.block),
    ),
    _mutant(
        "packed",
        "table entry",
        "slot(j) = the tokens of the requests before + j: the table not read, requests packed",
        one_key,
        edit=slots(_packed),
        refs="tanishqkumar/ssd#23",
    ),
    _mutant(
        "row-rotated",
        SIZE,
        "token j in row (j + 1) mod P of its page",
        rows_between,
        edit=slots(
            lambda _, plan, j: (
                table_entry(plan, j // plan.block, lambda page: page * plan.block) + (j + 1) % plan.block
            )
        ),
    ),
    _mutant(
        "next-slot",
        SIZE,
        "token j in slot j mod P + 1 of its page",
        one_key,
        edit=lambda problem, plan: replace(plan, address=lambda own, j: page_address(own, j) + own.row_stride),
    ),
)
