# SPDX-License-Identifier: Apache-2.0
"""What a stage that is within its budget does not tell: what it would be, had the engine made a mistake before it.

    every position one more    far out, angles of f32 have lost the bits that would tell (rotation.py); and where no
                               rotated stage is dumped, attention depends on the differences of positions alone
    the other index scores     of fp8 where the case has f32, or of f32: where the rows that are multiplied are not
                               dumped, what they may be off by may round them to neighbours in e4m3

A stage is computed with the mistake made, and held to its own limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from ..arrays import Array
from .stages import STAGES
from .state import State

ROTATED = ("q_pe", "k_pe", "kv_cache")
# What depends on them: of a dump without rotated stages the first one tells most.
AFTER = ("scores", "lse", "p", "o_lat", "attn", "out")
INDEX_ROTATED = ("index_q", "index_k")


def mistakes(state: State, given: Collection[str], name: str) -> Iterator[tuple[str, Array]]:
    """Of a stage of a dump with the stages `given`: what might be wrong, in words, and the stage as it would be."""
    if _tells_positions(state, given, name):
        yield "were every position one more", _at_next_positions(state, given, name)
    if name == "index_scores" and state.indexer.kpool is None:
        yield of_other_scores(state)


def of_other_scores(state: State) -> tuple[str, Array]:
    """As `mistakes`: index_scores in the other of f32 and fp8."""
    other = "fp8" if state.indexer.scores == "f32" else "f32"
    config = dataclasses.replace(state.config, indexer=dataclasses.replace(state.indexer, scores=other))
    return f"were index scores in {other}", STAGES["index_scores"].compute(dataclasses.replace(state, config=config))


def _tells_positions(state: State, given: Collection[str], name: str) -> bool:
    """Whether this stage of a dump with the stages `given` is one that should tell a position from the next."""
    config = state.config
    if name in INDEX_ROTATED:
        return config.rotates and state.indexer.pairing is not None
    if not config.rotates or name not in (*ROTATED, *AFTER):
        return False
    if name in ROTATED:
        return name != "kv_cache" or "k_pe" not in given
    return next(stage for stage in (*ROTATED, *AFTER) if stage in given) == name


def _at_next_positions(state: State, given: Collection[str], name: str) -> Array:
    """The stage as it would be were every position the next one, computed from what is dumped of those before it."""
    positions = state["positions"]
    step = 1 if positions.max() < np.iinfo(np.int64).max else -1
    moved = dataclasses.replace(state, values=state.values | {"positions": positions + step})
    for stage in (*ROTATED, "attn"):
        if stage == name:
            break
        if stage not in given and stage in moved.values:
            moved.values[stage] = STAGES[stage].compute(moved)
    return STAGES[name].compute(moved)
