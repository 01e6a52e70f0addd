# SPDX-License-Identifier: Apache-2.0
"""A dump as an engine wrote it: its stages with the axes of STAGES, in the dtypes that hold them.

Heads may be joined, [T, H P] for [T, H, P], and a batch of one may lead. Numbers of f32 or f64 that are all numbers of
bf16 or of f16 are taken to be those: what an engine stored in 16 bits and wrote in 32.
"""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..arrays import Array, as_array, dtype_name
from ..checks import WIDE_FLOATS
from ..errors import InputError
from .indexer import width_of
from .stages import STAGES, stages_of
from .state import State


def taken(name: str, value: object, state: State) -> Array:
    """A stage of the dump with the axes of STAGES, in the dtype that holds it; heads may be joined, a 1 lead."""
    stages = stages_of(state.config)
    if name not in STAGES:
        raise InputError(f"the dump holds {name}, expected stages: {', '.join(stages)}")
    if name not in stages:
        raise InputError(f"the dump holds {name}, expected {', '.join(stages)}: the layer has no such stage")
    array = as_array(name, value)
    kind = dtype_name(name, array)
    expected = shape_of(state, name)
    if name == "topk":
        if kind not in ("i64", "i32"):
            raise InputError(f"{name} is {kind}, expected i64 or i32")
        if array.ndim == 3 and len(array) == 1:
            array = array[0]
        if array.ndim != 2 or len(array) != expected[0]:
            raise InputError(f"{name} is {list(array.shape)}, expected [{expected[0]}, k]")
        return array.astype(np.int64)
    if kind not in WIDE_FLOATS:
        raise InputError(f"{name} is {kind}, expected {' or '.join(WIDE_FLOATS)}")
    joined = (expected[0], int(np.prod(expected[1:])))
    if array.shape not in (expected, joined, (1, *expected), (1, *joined)):
        letters = ", ".join(STAGES[name].axes.split())
        raise InputError(f"{name} is {list(array.shape)}, expected {list(expected)}: [{letters}]")
    return narrowest(np.ascontiguousarray(array).reshape(expected))


def shape_of(state: State, name: str) -> tuple[int, ...]:
    """The shape of a stage, before anything is computed."""
    g, c = state.geometry, state.config
    tokens = len(state["past_c_kv"]) + len(state["hidden_states"])
    n, d, keys, k = 0, 0, 0, 0
    if c.indexer is not None:
        n, d, keys = c.indexer.num_heads, c.indexer.head_dim, tokens // (c.indexer.kpool or 1)
        k = width_of(c.indexer, keys)
    sizes = {
        "T": len(state["hidden_states"]), "N": tokens, "H": g.num_heads, "P": g.qk_nope_head_dim, "V": g.v_head_dim,
        "R": g.qk_rope_head_dim, "L": g.kv_lora_rank, "L+R": g.latent_dim, "P+R": g.qk_head_dim, "C": g.hidden_size,
        "Q": g.q_lora_rank, "n": n, "d": d, "keys": keys, "k": k,
    }  # fmt: skip
    return tuple(int(sizes[letter] or 0) for letter in STAGES[name].axes.split())


def narrowest(array: Array) -> Array:
    """`array` in the narrowest of its own format, bf16 and f16 that holds every number of it."""
    if dtypes.name_of(array.dtype) in ("bf16", "f16") or not array.size:
        return array
    for name in ("bf16", "f16"):
        narrow = dtypes.round_to(array, name)
        if np.array_equal(narrow.astype(array.dtype), array, equal_nan=True):
            return narrow
    return array
