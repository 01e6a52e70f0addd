# SPDX-License-Identifier: Apache-2.0
"""ggml_flash_attn_ext of llama.cpp, and of ik_llama.cpp, whose rows have the rope first.

Read from ggml-org/llama.cpp, one stored version (2026): ggml/include/ggml.h, src/models/deepseek2.cpp (changes 18986,
19067); ikawrakow/ik_llama.cpp, one stored version (2026). An array's axes are ggml's ne from the last to the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..arrays import Array, dtype_name
from ..cases import PagedCase
from ..errors import InputError
from ..spellings.selections import from_dense, from_mask
from . import spelling
from .arguments import Given, tensor, value
from .dense_rows import dense
from .dialect import Dialect


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
    packed: ClassVar[Mapping[str, int]] = {"q8_0": 34}  # format -> bytes of 32 columns

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
        dense = dtype_name("k", given.k) != "u8"
        blocks = given.sizes["d"] // 32
        fitting = (name for name, size in self.packed.items() if row == blocks * size and not row_v % size)
        form = None if dense else next(fitting, None)
        if form is None and not dense:
            known = " or ".join(f"{name}, {size}" for name, size in self.packed.items())
            raise InputError(f"k has {row} bytes a row and v {row_v}, expected {known} for each 32 columns of q")
        start = self._bytes(form, self.first)
        if given.v.tobytes() != given.k[..., start : start + row_v].tobytes():
            raise InputError(f"v is not k[..., {start}:{start + row_v}], of which it is a view")
        width = row_v if form is None else row_v // self.packed[form] * 32
        return {"head_dim_v": width, "value_offset": self.first, "cache_format": form}

    def _bytes(self, form: str | None, columns: int) -> int:
        """How many elements of a row of k so many columns are."""
        return columns if form is None else columns // 32 * self.packed[form]

    def spell(self, case: PagedCase) -> dict[str, Any]:
        form = case.cache_format
        if form is not None and form not in self.packed:
            raise InputError(f"cache_format is {form!r}, expected {' or '.join(self.packed)} or dense rows")
        rows, mask = dense(case, spelling.joined(case) if form is None else case.kv_cache)
        keys = rows[:, None]
        start, width = self._bytes(form, self.first), self._bytes(form, case.head_dim_v)
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
    """The same call on rows of rope, then latent; V is a view from element 64 on. K may be of q6_0 as well."""

    name = "ik_llama.cpp"
    source = "ikawrakow/ik_llama.cpp ggml/include/ggml.h"
    itself = "rope first"
    first = 64
    packed = {**FlashAttnExt.packed, "q6_0": 26}


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
