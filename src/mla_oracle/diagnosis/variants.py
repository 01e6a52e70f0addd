# SPDX-License-Identifier: Apache-2.0
"""Mutants of the bank with other constants: tiles, splits, shifts, bases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..mutants import Mutant, Problem, bank, columns, keys, lengths, newest, paging, rope, tail, values, warps
from ..mutants.joins import exact, inverse, powers
from ..mutants.mutant import Join
from ..mutants.plan import Joined, Parts, Plan
from ..mutants.splits import cut
from . import made as made_up

TILES = (8, 16, 32, 48, 64, 96, 128, 256, 512)
ONLINE_TILES = (1, 2, 4, *TILES)
SPLITS = (2, 3, 5, 6, 7, 8, 12, 16, 32, 64)
SPLIT_KEYS = (32, 64, 128, 256, 512, 1024, 2048)
WARPS = ((4, 2), (2, 4), (16, 2), (32, 2), (8, 4), (16, 4), (32, 4), (8, 8))
SHIFTS = (*range(2, 17), *range(-16, -1), 64, -64)
TILED = (
    keys.behind, values.behind, values.ahead, tail.pads, tail.pads_of_rows,
    lengths.tile_slack, lengths.whole_tiles, lengths.tail_lost,
)  # fmt: skip
PAGES = 34  # entries that may be exchanged with the last one
PERIODS = (4, 32, 64, 128)
BASES = (10000.0, 50000.0, 100000.0, 500000.0, 1e6, 8e6, 1e7, 7e4)


def variants(problem: Problem | None, cut_again: Sequence[Mutant]) -> Iterator[Mutant]:
    """Those that are not in the bank; each is judged like any other. `cut_again`: what `recut` is made of."""
    if problem is None:
        return
    known = {mutant.name for mutant in bank()}
    made = [
        lengths.plus_one_of_all(),
        *(keys.every(tile, lost) for tile in TILES for lost in (True, False)),
        *(factory(tile) for tile in sorted({*TILES, 192, problem.block}) for factory in TILED),
        *(newest.local(n) for n in sorted({*TILES, 2 * problem.block, 4 * problem.block})),
        *(keys.behind(tile, n) for tile in TILES for n in SPLIT_KEYS if tile < n and n % tile == 0),
        *(warps.not_joined(what, *sizes) for sizes in WARPS for what in ("sum", "maximum")),
        *(rope.shifted(by, "q") for by in SHIFTS),
        *(rope.base(value, side) for value in BASES for side in ("both", "k")),
        *(
            paging.last_swapped(page, zero=zero)
            for page in range(2, min(paging.widest(problem) - 1, PAGES))
            for zero in (False, True)
        ),
        *(columns.repeated(period) for period in PERIODS),
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
            yield from (_cut(mutant, cut(n), f"{n} splits", splits=n) for n in SPLITS)
            sizes = [n for n in SPLIT_KEYS if n < problem.lens.max(initial=0)]
            yield from (_cut(mutant, runs(n), f"splits of {n}", split_keys=n) for n in sizes)
        elif mutant.name.startswith("online."):
            yield from (tiled(mutant, n) for n in ONLINE_TILES)


def tiled(mutant: Mutant, size: int) -> Mutant:
    """The recurrence over tiles of `size` keys."""
    return _cut(mutant, runs(size), f"tiles of {size}", tile=size)


def nested(problem: Problem | None, mutants: Sequence[Mutant]) -> Iterator[Mutant]:
    """Recurrences over tiles within splits of as many whole tiles, which are merged rightly."""
    if problem is None or problem.shards > 1:
        return
    for mutant in mutants:
        tile = mutant.parameters.get("tile")
        if tile and mutant.name.startswith("online."):
            sizes = [n for n in SPLIT_KEYS if n % tile == 0 and tile < n < problem.lens.max(initial=0)]
            yield from (_cut(mutant, None, f"in splits of {n}", n // tile, split_keys=n) for n in sizes)


def runs(size: int) -> Callable[[Plan], Parts]:
    """Runs of `size` lanes."""
    return lambda plan: Parts(np.arange(len(plan.lanes)) // size, max(-(-len(plan.lanes) // size), 1))


def _cut(
    mutant: Mutant, parts: Callable[[Plan], Parts] | None, what: str, tiles: int = 0, **parameters: int
) -> Mutant:
    """`parts` in the place of the mutant's, or its own, its join over so many `tiles` at a time."""

    def change(made: Plan) -> Plan:
        if made.parts is None:
            return made
        return replace(made, parts=parts or made.parts, join=_within(made.join, tiles) if tiles else made.join)

    return replace(
        mutant,
        name=f"{mutant.name}, {what}",
        formula=f"{mutant.formula}, {what}",
        parameters={**mutant.parameters, **parameters},
        edit=lambda problem, plan: [change(made) for made in mutant.plans(problem, plan)],
        join=None,
    )


def _within(join: Join, tiles: int) -> Join:
    """`join` of each run of so many tiles, and the right join of what that makes."""

    def joined(m: Array, d: Array) -> Joined:
        T, H, parts = m.shape
        rest = -parts % tiles
        groups = []
        for x, empty in ((m, -np.inf), (d, 0.0)):
            padded = np.concatenate([x, np.full((T, H, rest), empty)], -1)
            groups.append(np.moveaxis(padded.reshape(T, H, -1, tiles), 2, 0))  # [splits, T, H, tiles]
        coef, top, z, _ = join(*groups)
        top, z = (np.moveaxis(x, 0, -1) for x in (top, z))  # [T, H, splits]
        whole = exact(top, z)
        weight = powers(top)[1] * z * inverse(whole.z)[..., None]
        coef = np.moveaxis(coef, 0, 2) * weight[..., None]  # [T, H, splits, tiles]
        return Joined(coef.reshape(T, H, -1)[..., :parts], whole.m, whole.z)

    return joined
