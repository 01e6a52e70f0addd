# SPDX-License-Identifier: Apache-2.0
"""A dump as an engine wrote it: its stages with the axes of STAGES, in the dtypes that hold them.

Heads may be joined, [T, H P] for [T, H, P], and a batch may lead: of one, or of sequences of as many tokens and rows.
Numbers of f32 or f64 that are all numbers of bf16 or of f16 are taken to be those: what an engine stored in 16 bits and
wrote in 32.
"""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..arrays import Array, as_array, dtype_name
from ..checks import WIDE_FLOATS
from ..errors import InputError
from .config import LayerConfig
from .sequences import Sizes
from .stages import STAGES, stages_of


def taken(name: str, value: object, config: LayerConfig, sizes: Sizes, batch: int = 1) -> Array:
    """A stage of the dump with the axes of STAGES, in the dtype that holds it; heads may be joined, `batch` lead."""
    stages = stages_of(config)
    if name not in STAGES:
        raise InputError(f"the dump holds {name}, expected stages: {', '.join(stages)}")
    if name not in stages:
        raise InputError(f"the dump holds {name}, expected {', '.join(stages)}: the layer has no such stage")
    array = as_array(name, value)
    kind = dtype_name(name, array)
    expected = shape_of(config, sizes, name)
    lead = expected[0] // batch
    if name == "topk":
        if kind not in ("i64", "i32"):
            raise InputError(f"{name} is {kind}, expected i64 or i32")
        if array.ndim == 3 and array.shape[:2] == (batch, lead):
            array = array.reshape(expected[0], -1)
        if array.ndim != 2 or len(array) != expected[0]:
            raise InputError(f"{name} is {list(array.shape)}, expected [{expected[0]}, k]")
        return array.astype(np.int64)
    if kind not in WIDE_FLOATS:
        raise InputError(f"{name} is {kind}, expected {' or '.join(WIDE_FLOATS)}")
    joined = (expected[0], int(np.prod(expected[1:])))
    if array.shape not in (expected, joined, (batch, lead, *expected[1:]), (batch, lead, *joined[1:])):
        letters = ", ".join(STAGES[name].axes.split())
        raise InputError(f"{name} is {list(array.shape)}, expected {list(expected)}: [{letters}]")
    return narrowest(np.ascontiguousarray(array).reshape(expected))


def shape_of(config: LayerConfig, sizes: Sizes, name: str) -> tuple[int, ...]:
    """The shape of a stage of these sizes, before anything is computed."""
    g = config.geometry
    n, d = (0, 0) if config.indexer is None else (config.indexer.num_heads, config.indexer.head_dim)
    letters = {
        "T": sizes.tokens, "N": sizes.rows, "keys": sizes.keys, "k": sizes.chosen, "n": n, "d": d,
        "H": g.num_heads, "P": g.qk_nope_head_dim, "R": g.qk_rope_head_dim, "V": g.v_head_dim, "L": g.kv_lora_rank,
        "L+R": g.latent_dim, "P+R": g.qk_head_dim, "C": g.hidden_size, "Q": g.q_lora_rank,
    }  # fmt: skip
    columns = letters | {"N": sizes.row_columns, "keys": sizes.key_columns}
    first, *others = STAGES[name].axes.split()
    return (int(letters[first] or 0), *(int(columns[letter] or 0) for letter in others))


def narrowest(array: Array) -> Array:
    """`array` in the narrowest of its own format, bf16 and f16 that holds every number of it."""
    if dtypes.name_of(array.dtype) in ("bf16", "f16") or not array.size:
        return array
    for name in ("bf16", "f16"):
        narrow = dtypes.round_to(array, name)
        if np.array_equal(narrow.astype(array.dtype), array, equal_nan=True):
            return narrow
    return array
