# SPDX-License-Identifier: Apache-2.0
"""What a stage that is within its budget does not tell: whether the engine took every position for the next one.

Far out angles of f32 have lost the bits that would tell (rotation.py); and where no rotated stage is dumped, attention
depends on the differences of positions alone. A stage is computed with the mistake made, and held to its own limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from ..arrays import Array
from .stages import STAGES
from .state import State

ROTATED = ("q_pe", "k_pe", "kv_cache")
# What depends on them: of a dump without rotated stages the first one tells most.
AFTER = ("scores", "lse", "p", "o_lat", "attn", "out")
INDEX_ROTATED = ("index_q", "index_k")


def told_by(state: State, given: Collection[str], name: str) -> bool:
    """Whether this stage of a dump with the stages `given` is one that should tell a position from the next."""
    config = state.config
    if name in INDEX_ROTATED:
        return config.rotates and state.indexer.pairing is not None
    if not config.rotates or name not in (*ROTATED, *AFTER):
        return False
    if name in ROTATED:
        return name != "kv_cache" or "k_pe" not in given
    return next(stage for stage in (*ROTATED, *AFTER) if stage in given) == name


def at_next_positions(state: State, given: Collection[str], name: str) -> Array:
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
