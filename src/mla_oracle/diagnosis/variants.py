# SPDX-License-Identifier: Apache-2.0
"""Mutants of the bank with other constants: tiles, splits, shifts, bases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..mutants import Mutant, Problem, bank, keys, rope, tail, values
from ..mutants.plan import Parts, Plan
from ..mutants.splits import cut
from . import made as made_up

TILES = (8, 16, 32, 48, 64, 96, 128, 256, 512)
SPLITS = (2, 3, 5, 6, 7, 8, 12, 16, 32, 64)
SHIFTS = (2, 3, 4, 5, 6, 7, 8, -2, -3, -4, 64, -64)
BASES = (10000.0, 50000.0, 100000.0, 500000.0, 1e6, 8e6, 1e7, 7e4)


def variants(problem: Problem | None, cut_again: Sequence[Mutant]) -> Iterator[Mutant]:
    """Those that are not in the bank; each is judged like any other. `cut_again`: what `recut` is made of."""
    if problem is None:
        return
    known = {mutant.name for mutant in bank()}
    made = [
        *(keys.every(tile, lost) for tile in TILES for lost in (True, False)),
        *(factory(tile) for tile in TILES for factory in (keys.behind, values.behind, values.ahead, tail.pads)),
        *(rope.shifted(by, "q") for by in SHIFTS),
        *(rope.base(value, side) for value in BASES for side in ("both", "k")),
        *(made_up.value_shifted(by) for by in (*range(2, 17), *range(-16, -1), problem.block, -problem.block)),
        *recut(problem, cut_again),
    ]
    yield from (mutant for mutant in made if mutant.name not in known)


def recut(problem: Problem, mutants: Sequence[Mutant]) -> Iterator[Mutant]:
    """Merges of another number of splits, recurrences over other tiles."""
    if problem.shards > 1:
        return
    for mutant in mutants:
        if mutant.edit is None or mutant.family == "composition of two":
            continue
        if mutant.name.startswith("merge.") and "splits" in mutant.parameters:
            yield from (_cut(mutant, splits=n) for n in SPLITS)
        elif mutant.name.startswith("online."):
            yield from (_cut(mutant, tile=n) for n in TILES)


def _cut(mutant: Mutant, *, splits: int = 0, tile: int = 0) -> Mutant:
    def tiles(plan: Plan) -> Parts:
        return Parts(np.arange(len(plan.lanes)) // tile, max(-(-len(plan.lanes) // tile), 1))

    def edit(problem: Problem, plan: Plan) -> list[Plan]:
        parts = cut(splits) if splits else tiles
        return [made if made.parts is None else replace(made, parts=parts) for made in mutant.plans(problem, plan)]

    what = f"{splits} splits" if splits else f"tiles of {tile}"
    parameters = {**mutant.parameters, **({"splits": splits} if splits else {"tile": tile})}
    return replace(
        mutant,
        name=f"{mutant.name}, {what}",
        formula=f"{mutant.formula}, {what}",
        parameters=parameters,
        edit=edit,
        join=None,
    )
