# SPDX-License-Identifier: Apache-2.0
"""Wrong lengths: the right keys of a request that is taken for shorter, longer, or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .mutant import Mutant
from .needs import Need, longer_than, one_key, paged, partial_page, two_keys, two_lengths, two_requests, unsharded
from .plan import Plan, bound
from .problem import Problem

FAMILY = "length metadata"
boundary = Need(
    "a request that ends within its table",
    lambda p: p.paged and bool(np.any((p.lens > 0) & (p.lens < p.table.shape[1] * p.block))),
)


def length(of: Callable[[Problem, Plan], int]) -> Callable[[Problem, Plan], Plan]:
    """The request believed to have of(...) tokens: what each query sees moves with it."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        n = max(of(problem, plan), 0)
        return replace(plan, length=n, lanes=np.arange(n))

    return edit


def _mutant(
    name: str,
    formula: str,
    of: Callable[[Problem, Plan], int],
    *needs: Need,
    refs: str = "",
    family: str = FAMILY,
    **parameters: int,
) -> Mutant:
    return Mutant(
        name=f"length.{name}",
        family=family,
        formula=formula,
        references=tuple(refs.split()),
        parameters=parameters,
        conditions=needs,
        edit=length(of),
    )


def shift(by: int) -> Mutant:
    """L' = L + by."""
    needs = (two_keys,) if by < 0 else (one_key, boundary)
    name = {-1: "minus-one", 1: "plus-one"}.get(by, f"shift-{by}")
    return _mutant(
        name,
        f"L' = L {'+-'[by < 0]} {abs(by)}",
        lambda _, p: p.length + by if p.length else 0,
        *needs,
        family="length off by one" if abs(by) == 1 else FAMILY,
        shift=by,
    )


def plus_one_of_all() -> Mutant:
    """L' = L + 1, also of a request that is empty."""
    return _mutant(
        "plus-one-of-all", "L' = L + 1, of empty requests too", lambda _, p: p.length + 1, boundary,
        family="length off by one", shift=1,
    )  # fmt: skip


def tile_slack(tile: int) -> Mutant:
    """Every query token sees its last tile whole, whatever lies there."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        seen = -(-bound(plan) // tile) * tile  # [T]
        lanes = np.arange(int(seen.max(initial=0)))
        return replace(plan, lanes=lanes, sees=lambda own: own.lanes < seen[:, None, None])

    return Mutant(
        name=f"length.tile-slack-{tile}",
        family=FAMILY,
        formula=f"n <- {tile} ceil(n / {tile}), n the keys that a query token sees: the last tile is not masked",
        parameters={"tile": tile},
        conditions=(one_key, paged, unsharded),
        edit=edit,
    )


def _rest(tile: int) -> Need:
    return Need(f"a length that is no multiple of {tile}", lambda p: bool(np.any(p.lens % tile)))


def whole_tiles(tile: int) -> Mutant:
    """L' = tile floor(L / tile)."""
    name = "whole-tiles" if tile == 64 else f"whole-tiles-{tile}"
    formula = f"L' = {tile} floor(L / {tile}), the last part of a tile lost"
    return _mutant(name, formula, lambda _, p: p.length // tile * tile, _rest(tile), tile=tile)


def tail_lost(tile: int) -> Mutant:
    """The keys after the last whole tile are lost; every query token sees as far as it should."""
    return Mutant(
        name=f"length.tail-lost-{tile}",
        family=FAMILY,
        formula=f"keys j >= {tile} floor(L / {tile}) are in no tile",
        parameters={"tile": tile},
        conditions=(_rest(tile),),
        edit=lambda _, plan: replace(plan, lanes=plan.lanes[: plan.length // tile * tile]),
    )


def at_most(limit: int) -> Mutant:
    """L' = min(L, limit)."""
    return _mutant(
        f"at-most-{limit}", f"L' = min(L, {limit})", lambda _, p: min(p.length, limit), longer_than(limit), limit=limit
    )


def _rest_lost(problem: Problem, plan: Plan) -> Plan:
    return replace(plan, lanes=plan.lanes[: plan.length // SPLITS * SPLITS])


def _slack(problem: Problem, plan: Plan) -> Plan:
    n = -(-plan.length // SPLITS) * SPLITS
    sees = plan.sees
    return replace(plan, lanes=np.arange(n), sees=lambda own: sees(own) | (own.lanes >= own.length))


SPLITS = 4
uneven = Need("a length that is no multiple of 4", lambda p: bool(np.any((p.lens > 1) & (p.lens % SPLITS))))
def _last_of_several(problem: Problem, plan: Plan) -> Plan:
    """A row that sees one key keeps it."""
    sees = plan.sees
    return replace(plan, sees=lambda own: sees(own) & (own.lanes < np.maximum(bound(own) - 1, 1)[:, None])[:, None])


MUTANTS = (
    Mutant(
        name="length.last-of-several",
        family="length off by one",
        formula="a row that sees n keys counts max(n - 1, 1)",
        conditions=(two_keys,),
        edit=_last_of_several,
    ),
    shift(-1),
    shift(1),
    _mutant(
        "without-new",
        "L' = L - T, the T new tokens not counted",
        lambda _, p: p.length - p.tokens,
        Need("more keys than query tokens", lambda p: int(p.lens.max(initial=0)) > p.T),
        refs="EfficientMoE/MoE-Infinity#195",
    ),
    _mutant(
        "new-twice",
        "L' = L + T, the T new tokens counted twice",
        lambda _, p: p.length + p.tokens if p.length else 0,
        one_key,
        boundary,
    ),
    _mutant(
        "whole-pages",
        "L' = P floor(L / P), the last part of a page lost",
        lambda problem, p: p.length // problem.block * problem.block,
        paged,
        partial_page,
    ),
    whole_tiles(64),
    _mutant(
        "page-slack",
        "L' = P ceil(L / P), the rest of the last page counted",
        lambda problem, p: -(-p.length // problem.block) * problem.block,
        paged,
        partial_page,
    ),
    _mutant(
        "twice-less-one",
        "L' = 2 L - 1, last_page_len = L with pages of 1",
        lambda _, p: max(2 * p.length - 1, 0),
        paged,
        Need("pages of 1 row", lambda p: p.block == 1),
        two_keys,
        refs="vllm-project/vllm#31282 vllm-project/vllm#38146",
    ),
    _mutant(
        "longest",
        "L' = the longest of the batch",
        lambda problem, p: int(problem.lens.max(initial=0)),
        two_lengths,
        paged,
    ),
    _mutant(
        "shortest",
        "L' = the shortest of the batch",
        lambda problem, p: int(problem.lens.min(initial=1 << 62)),
        two_lengths,
        paged,
    ),
    _mutant("of-request-0", "L' = L of request 0", lambda problem, p: int(problem.lens[0]), two_lengths, paged),
    _mutant(
        "of-next-request",
        "L' = L of request b + 1",
        lambda problem, p: int(problem.lens[(p.b + 1) % problem.B]),
        two_requests,
        two_lengths,
        paged,
    ),
    _mutant(
        "int64",
        "i32 lengths found as if 64 bits wide: L'_b = L_(b/2) for even b, 0 for odd",
        lambda problem, p: 0 if p.b % 2 else int(problem.lens[p.b // 2]),
        two_requests,
        paged,
    ),
    _mutant("int16", "L' = int16(L)", lambda _, p: (p.length + 32768) % 65536 - 32768, longer_than(32767)),
    _mutant(
        "last-page-len-0",
        "L' = L - P where P divides L: L mod P keys in the last page",
        lambda problem, p: p.length - (problem.block if p.length and p.length % problem.block == 0 else 0),
        paged,
        Need("a length that is a multiple of the page", lambda p: bool(np.any((p.lens > 0) & (p.lens % p.block == 0)))),
    ),
    Mutant(
        name="length.split-rest-lost",
        family="split boundary",
        formula="4 splits of floor(L / 4) keys: the rest is in none",
        parameters={"splits": SPLITS},
        conditions=(paged, uneven),
        edit=_rest_lost,
    ),
    Mutant(
        name="length.split-slack",
        family="split boundary",
        formula="4 splits of ceil(L / 4) keys, the last one not cut at L: what follows is seen",
        parameters={"splits": SPLITS},
        conditions=(paged, uneven),
        edit=_slack,
    ),
    at_most(64),
    at_most(512),
    at_most(2048),
)
