# SPDX-License-Identifier: Apache-2.0
"""ggml_flash_attn_ext of llama.cpp, and of ik_llama.cpp, whose rows have the rope first.

Read from ggml-org/llama.cpp, one stored version (2026): ggml/include/ggml.h, src/models/deepseek2.cpp (changes 18986,
19067); ikawrakow/ik_llama.cpp, one stored version (2026). An array's axes are ggml's ne from the last to the first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, dtype_name
from ..cases import PagedCase
from ..errors import InputError
from ..selections import from_dense, from_mask
from . import spelling
from .arguments import Given, tensor, value
from .dense_rows import dense
from .dialect import Dialect

Q8_0 = {576: 612, 320: 340}  # columns -> bytes of a row: 34 for each 32


class FlashAttnExt(Dialect):
    """Query f32 {d, n_tok, n_head}, K {d, n_kv, 1} of f16, f32, bf16 or q8_0, V a view of its first columns.

    A mask f16 {n_kv, n_tok} says all that is seen, and may have other numbers; there are no pages and no lengths. It
    may have rows beyond n_tok, which nobody reads: older versions and ik_llama.cpp ask for a multiple of 64. Its
    streams and heads need only divide those of q: stream s has mask s modulo their count, and so has a head. No LSE; a
    row that is masked whole gives 0. Slopes (max_bias) are for heads of positions, not for this.
    """

    name = "llama.cpp"
    call = "ggml_flash_attn_ext"
    source = "ggml-org/llama.cpp ggml/include/ggml.h, src/models/deepseek2.cpp"
    arguments = {
        "q": tensor("stream n_head n_tok d", "f32"),
        "k": tensor("stream 1 n_kv row", "f16 f32 bf16 u8"),
        "v": tensor("stream 1 n_kv d_v", "=k"),
        "mask": tensor("masks mask_heads n_rows n_kv", "f16", None),
        "scale": value(float),
        "logit_softcap": value(float, 0.0),
        "sinks": tensor("n_head", "f32", None),
    }
    fixed = {"max_bias": 0.0}
    called = {"kv_cache": "k", "bias": "mask", "softmax_scale": "scale", "softcap": "logit_softcap"}
    itself = "latent first"
    masks = "mask"
    out, out_axes = "dst", "stream n_tok n_head d_v"
    first = 0  # column of the value

    def canonical(self, given: Given) -> dict[str, Any]:
        keys, table = from_dense(given.k[:, 0])
        return {
            "q": given.q.transpose(0, 2, 1, 3),
            "kv_cache": keys,
            **table._asdict(),
            "bias": None if given.mask is None else _bias(given),
            "softmax_scale": given.scale,
            "softcap": given.logit_softcap or None,
            "sinks": given.sinks,
            "causal": False,
            **self.value(given),
        }

    def value(self, given: Given) -> dict[str, Any]:
        """The format, and which columns are the value."""
        row, row_v = given.sizes["row"], given.sizes["d_v"]
        packed = dtype_name("k", given.k) == "u8"
        start = self.first if not packed else self.first // 32 * 34
        if given.v.tobytes() != given.k[..., start : start + row_v].tobytes():
            raise InputError(f"v is not k[..., {start}:{start + row_v}], of which it is a view")
        if not packed:
            return {"head_dim_v": row_v, "value_offset": self.first}
        if row != Q8_0.get(given.sizes["d"]) or row_v % 34:
            raise InputError(f"k has {row} bytes a row and v {row_v}, expected q8_0, 34 for each 32 columns of q")
        return {"head_dim_v": row_v // 34 * 32, "value_offset": self.first, "cache_format": "q8_0"}

    def spell(self, case: PagedCase) -> dict[str, Any]:
        if case.cache_format not in (None, "q8_0"):
            raise InputError(f"cache_format is {case.cache_format!r}, expected q8_0 or dense rows")
        packed = case.cache_format is not None
        rows, mask = dense(case, case.kv_cache if packed else spelling.joined(case))
        keys = rows[:, None]
        start, width = self.first, case.head_dim_v
        if packed:
            start, width = start // 32 * 34, width // 32 * 34
        return {
            "q": spelling.rows_of(case).transpose(0, 2, 1, 3),
            "k": keys,
            "v": keys[..., start : start + width],
            "mask": mask,
            "scale": case.softmax_scale,
            "logit_softcap": case.softcap,
            "sinks": case.sinks,
        }


class Ik(FlashAttnExt):
    """The same call on rows of rope, then latent; V is a view from element 64 on."""

    name = "ik_llama.cpp"
    source = "ikawrakow/ik_llama.cpp ggml/include/ggml.h"
    itself = "rope first"
    first = 64


def _bias(given: Given) -> Array:
    """The first T rows of a mask [m, 1 or n, T or more, n_kv], for all streams: [s, T, n_kv], or [s, T, H, n_kv]."""
    mask, tokens = given.mask, given.sizes["n_tok"]
    if mask.shape[2] < tokens:
        raise InputError(f"mask is {list(mask.shape)}, expected {tokens} or more on axis 2, a row for each token of q")
    streams, heads = (_each(mask, axis, given.sizes[name]) for axis, name in ((0, "stream"), (1, "n_head")))
    bias = from_mask(mask[:, :, :tokens][streams])
    return bias[:, 0] if mask.shape[1] == 1 else bias[:, heads].transpose(0, 2, 1, 3)


def _each(mask: Array, axis: int, count: int) -> Array:
    """Which of a mask's entries along an axis each of `count` streams or heads of q has."""
    own = mask.shape[axis]
    if not own or count % own:
        raise InputError(f"mask is {list(mask.shape)}, expected a divisor of {count} on axis {axis}, as q has")
    which: Array = np.arange(count) % own
    return which


DIALECTS = (FlashAttnExt(), Ik())
