# SPDX-License-Identifier: Apache-2.0
"""Wrong values: another slice of the row, another row, another order of the output. The lse is exact in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .memory import ZERO
from .mutant import Maker, Mutant
from .needs import Need, longer_than, one_key, paged, rope, two_keys, two_pages
from .plan import Plan, page_address
from .problem import Problem

narrower_value = Need("a value narrower than the row", lambda p: p.paged and p.V < p.D)


def lanes(of: Callable[[Problem, Plan], Array]) -> Callable[[Problem, Plan], Plan]:
    """Lane i takes the value of token of(...)[i]; zeros for tokens below 0."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        address = plan.value_address or plan.address

        def or_zero(own: Plan, tokens: Array) -> Array:
            return np.where(tokens < 0, ZERO, address(own, tokens))

        return replace(plan, value_lanes=of(problem, plan), value_address=or_zero)

    return edit


def columns(of: Callable[[Problem], Array]) -> Callable[[Problem, Plan], Plan]:
    return lambda problem, plan: replace(plan, value_columns=of(problem))


def lag(name: str, formula: str, whole: bool) -> Mutant:
    """Keys walk in blocks of D rows, values in blocks of V: n_(j - (D - V) floor(j / D))."""

    def of(problem: Problem, plan: Plan) -> Array:
        j = plan.lanes
        behind = j - (problem.D - problem.V) * (j // problem.D)
        return behind if whole else np.where(j % problem.D < problem.V, behind, -1)

    first = Need("more keys than the row has elements", lambda p: int(p.lens.max(initial=0)) > p.D)
    first = (
        first if whole else Need("more keys than the value has elements", lambda p: int(p.lens.max(initial=0)) > p.V)
    )
    return _mutant(
        name, "K/V step mismatch", formula, narrower_value, first, edit=lanes(of), refs="ikawrakow/ik_llama.cpp#2031"
    )


def behind(size: int) -> Mutant:
    """A second buffer that is not waited for: the value of the same lane one tile earlier."""
    return _mutant(
        f"tile-behind-{size}",
        "stale tile",
        f"v_j <- v_(j - {size}), 0 in the first tile of {size}",
        longer_than(size),
        edit=lanes(lambda _, p: p.lanes - size),
        tile=size,
    )


def ahead(size: int) -> Mutant:
    """Weights that are multiplied one tile too late."""
    return _mutant(
        f"tile-ahead-{size}",
        "stale tile",
        f"v_j <- v_(j + {size}), 0 past the last key",
        longer_than(size),
        edit=lanes(lambda _, p: np.where(p.lanes + size < p.length, p.lanes + size, -1)),
        tile=size,
    )


def _page(of: Callable[[Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """The value of a lane comes from page of(its page)."""
    return lanes(lambda problem, plan: of(plan.lanes // problem.block) * problem.block + plan.lanes % problem.block)


_mutant = Maker("value.")


_STEP = "NVIDIA/TensorRT-LLM#18244 flashinfer-ai/flashinfer#4570"


MUTANTS = (
    _mutant(
        "row-end",
        "wrong V slice",
        "o = sum w_j row_j[R:R+V], 64:576 of a row",
        narrower_value,
        one_key,
        rope,
        edit=columns(lambda p: p.D - p.V + np.arange(p.V)),
        refs="ggml-org/llama.cpp#18986",
    ),
    _mutant(
        "one-element-on",
        "wrong V slice",
        "o = sum w_j row_j[1:V+1]",
        narrower_value,
        one_key,
        edit=columns(lambda p: 1 + np.arange(p.V)),
    ),
    lag("lag", "o = sum w_j n_(j - (D - V) floor(j / D))", True),
    lag("lag-rows-lost", "as lag, and the rows of a block from V on have no value", False),
    _mutant(
        "page-frozen",
        "K/V step mismatch",
        "v from the first page: v_(j mod block)",
        two_pages,
        edit=_page(lambda page: 0 * page),
        refs=_STEP,
    ),
    _mutant(
        "page-skips",
        "K/V step mismatch",
        "v from page 2 floor(j / block), unknown past the table",
        two_pages,
        edit=_page(lambda page: 2 * page),
        refs=_STEP,
    ),
    _mutant(
        "page-behind",
        "stale tile",
        "v from the page before, 0 in the first",
        two_pages,
        edit=_page(lambda page: page - 1),
    ),
    behind(64),
    behind(128),
    ahead(64),
    _mutant(
        "next-row",
        "value row off by one",
        "v_j <- v_(j+1), the last one its own",
        two_keys,
        edit=lanes(lambda _, p: np.minimum(p.lanes + 1, p.length - 1)),
    ),
    _mutant(
        "row-before",
        "value row off by one",
        "v_j <- v_(j-1), 0 for j = 0",
        two_keys,
        edit=lanes(lambda _, p: p.lanes - 1),
    ),
    _mutant(
        "reversed",
        "value rows permuted",
        "v_j <- v_(L-1-j)",
        two_keys,
        edit=lanes(lambda _, p: p.length - 1 - p.lanes),
    ),
    _mutant(
        "slot-of-request-0",
        "table row mapping",
        "values through the table of request 0",
        paged,
        Need("two requests", lambda p: p.B >= 2),
        one_key,
        edit=lambda problem, plan: replace(
            plan, value_address=lambda own, j: page_address(replace(own, table=problem.table[0]), j)
        ),
    ),
)
