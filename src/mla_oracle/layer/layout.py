# SPDX-License-Identifier: Apache-2.0
"""How an engine stores rotated rows: adjacent pairs where they are, or parted, the even elements and then the odd.

An engine may rotate adjacent pairs by parting them first; q and k then agree as they are, and no output tells. Which it
is, the first rotated stage of the dump says, unless the case does; the others must be alike. So must the cached rows be
that go in, and where nothing tells, the case has to.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..arrays import Array
from ..checks import choice
from ..errors import InputError
from .config import PAIRINGS
from .stages import stages_of
from .state import State

OF_ROPE = {"q_pe": "rope", "k_pe": "rope", "kv_cache": "rope", "index_q": "index_rope", "index_k": "index_rope"}


def settled_layout(
    state: State, given: Mapping[str, Array], known: Mapping[str, bool], rope_layout: str | None
) -> dict[str, bool]:
    """Whether it is known how rotated rows are stored; `known` is what another sequence told of them.

    Raises InputError where rows are cached and nothing tells.
    """
    if rope_layout is not None:
        choice("rope_layout", rope_layout, PAIRINGS)
        state.parted |= dict.fromkeys(state.parted, rope_layout == "neox")
        return dict.fromkeys(state.parted, True)
    state.parted |= known
    for kind, past in (("rope", "past_k_pe"), ("index_rope", "past_index_k")):
        tell = [name for name in stages_of(state.config) if OF_ROPE.get(name) == kind]
        if kind in known or not tell or not may_part(state, tell[0]):
            continue
        if len(state[past]) and given.keys().isdisjoint(tell):
            raise InputError(
                f"rope_layout is not given, expected interleaved or neox: {past} is rotated and the dump, which might"
                f" tell, holds none of {', '.join(tell)}"
            )
    return {kind: kind in known for kind in state.parted}


def may_part(state: State, name: str) -> bool:
    """Whether rows of this stage may have their pairs parted."""
    if name.startswith("index"):
        return state.indexer.pairing == "interleaved"
    return state.geometry.rope_interleave and state.config.rotates


def layout_of(state: State) -> str:
    """How rotated rows of q and k are stored."""
    return "interleaved" if state.geometry.rope_interleave and not state.parted["rope"] else "neox"
