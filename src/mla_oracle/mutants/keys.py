# SPDX-License-Identifier: Apache-2.0
"""Keys lost or counted twice at the edges of tiles, or taken from the tile before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .memory import ZERO
from .mutant import Maker, Mutant
from .needs import Need, longer_than, two_keys, two_pages
from .plan import Plan
from .problem import Problem

EDGE = "key lost or repeated"


def lanes(of: Callable[[Plan], Array]) -> Callable[[Problem, Plan], Plan]:
    return lambda problem, plan: replace(plan, lanes=of(plan))


def every(tile: int, last: bool) -> Mutant:
    """The last key of each whole tile is lost, or the first one counted again in the tile before."""
    if last:
        return _mutant(
            f"key.tile-edge-lost-{tile}",
            EDGE,
            f"keys {tile - 1}, {2 * tile - 1}, ... are not seen",
            longer_than(tile - 1),
            edit=lanes(lambda p: p.lanes[p.lanes % tile != tile - 1]),
            tile=tile,
        )
    return _mutant(
        f"key.tile-edge-twice-{tile}",
        EDGE,
        f"keys {tile}, {2 * tile}, ... are counted twice",
        longer_than(tile),
        edit=lanes(lambda p: np.concatenate([p.lanes, p.lanes[(p.lanes % tile == 0) & (p.lanes > 0)]])),
        tile=tile,
    )


def zeroed(which: Callable[[Problem, Plan, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """Rows that were never written: zeros."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        inner = plan.address
        return replace(plan, address=lambda own, j: np.where(which(problem, own, j), ZERO, inner(own, j)))

    return edit


def behind(tile: int, split: int | None = None) -> Mutant:
    """Keys and values of the tile before: both buffers swapped too late; the first tile, or each split's, twice."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        inner = plan.address
        return replace(
            plan, address=lambda own, j: inner(own, np.where((j if split is None else j % split) < tile, j, j - tile))
        )

    name, formula = f"key.tile-behind-{tile}", f"key and value j <- j - {tile}, for j"
    if split is None:
        return _mutant(name, "stale tile", f"{formula} >= {tile}", longer_than(tile), edit=edit, tile=tile)
    return _mutant(
        f"{name}-of-{split}",
        "stale tile",
        f"{formula} mod {split} >= {tile}",
        longer_than(tile),
        edit=edit,
        tile=tile,
        split=split,
    )


_mutant = Maker()


MUTANTS = (
    _mutant("key.first-lost", EDGE, "key 0 is not seen", two_keys, edit=lanes(lambda p: p.lanes[1:])),
    _mutant(
        "key.second-lost",
        EDGE,
        "key 1 is not seen",
        two_keys,
        edit=lanes(lambda p: np.delete(p.lanes, [1]) if len(p.lanes) > 1 else p.lanes),
    ),
    _mutant(
        "key.first-twice",
        EDGE,
        "key 0 is counted twice",
        two_keys,
        edit=lanes(lambda p: np.concatenate([p.lanes, p.lanes[:1]])),
    ),
    _mutant(
        "key.last-twice",
        EDGE,
        "key L - 1 is counted twice",
        two_keys,
        edit=lanes(lambda p: np.concatenate([p.lanes, p.lanes[-1:]])),
    ),
    _mutant(
        "key.first-tile-lost", EDGE, "keys 0..63 are not seen", longer_than(64), edit=lanes(lambda p: p.lanes[64:])
    ),
    _mutant(
        "key.whole-tile-lost-64",
        EDGE,
        "the last 64 keys are not seen where 64 divides the length: the rest is 0",
        Need("a length that is a multiple of 64", lambda p: bool(np.any((p.lens > 0) & (p.lens % 64 == 0)))),
        edit=lanes(lambda p: p.lanes[: len(p.lanes) - 64] if len(p.lanes) % 64 == 0 else p.lanes),
        tile=64,
    ),
    _mutant(
        "key.new-as-zero",
        "rows not written",
        "the T new rows are zeros: read before they are written",
        two_keys,
        edit=zeroed(lambda problem, p, j: j >= p.length - p.tokens),
        refs="EfficientMoE/MoE-Infinity#195",
    ),
    _mutant(
        "key.first-page-as-zero",
        "rows not written",
        "the rows of the first page are zeros",
        two_pages,
        edit=zeroed(lambda problem, p, j: j < problem.block),
    ),
    _mutant(
        "key.last-page-as-zero",
        "rows not written",
        "the rows of the last page are zeros",
        two_pages,
        edit=zeroed(lambda problem, p, j: j // problem.block == problem.used(p.b) - 1),
    ),
    every(64, True),
    every(64, False),
    every(128, True),
    behind(64),
)
