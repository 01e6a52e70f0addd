# SPDX-License-Identifier: Apache-2.0
"""q8_0, ggml's blocks of 32 (llama.cpp, ik_llama.cpp, memra)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InputError
from .format import Array, Format, Parts, Tensors, needed, no_others
from .memory import BYTES, take_rows
from .scales import amax, tiles

F32 = np.float32
BLOCK, BLOCK_BYTES = 32, 34


class Q80(Format):
    """34 bytes for 32 columns, so 612 for a row of 576; any number of blocks.

        [34 k, 34 k + 2)       f16     d of columns 32 k .. 32 k + 31
        [34 k + 2, 34 k + 34)  32 i8   q

    A value is d * q, exact in f32. Which columns are the latent is the case's: llama.cpp stores the latent first, so
    the value is blocks 0 .. 15; ik_llama.cpp the rope first, so it is blocks 2 .. 17.
    Writers: ggml, d = amax / 127 in f32, q = roundf(x * (1 / d)) with halves away from zero, and d stored as f16 after
    that; ggml_simd, q = x * (127 / amax) with halves to even. d past the largest f16 is stored as infinity. A block
    with a NaN or an infinity gets a d of NaN, and is NaN as a whole: what ggml makes of it, C leaves open.
    Readers: f32.
    """

    name = "q8_0"
    writers = ("ggml", "ggml_simd")
    readers = ("f32",)

    def rows(self, tensors: Tensors) -> Array:
        value = needed(self.name, tensors, "kv_cache")
        return take_rows("kv_cache", value, *BYTES, width="bytes", multiple=BLOCK_BYTES)

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        count, size, row_bytes = self.rows(tensors).shape
        return count, size, row_bytes // BLOCK_BYTES * BLOCK

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        data = tiles(self.rows(tensors).view(np.uint8)[blocks, offsets], BLOCK_BYTES)  # [n, G, 34]
        scales = np.ascontiguousarray(data[..., :2]).view("<f2")[..., 0]
        return Parts(data[..., 2:].reshape(len(data), BLOCK * data.shape[1]), "i8", scales)

    def scales_of(self, parts: Parts, reader: str) -> Array:
        return parts.scales.astype(F32)

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        if rows.shape[-1] % BLOCK or rows.shape[-1] == 0:
            raise InputError(f"rows has {rows.shape[-1]} columns, expected a multiple of {BLOCK}")
        tiled = tiles(rows, BLOCK)
        top = amax(tiled, True)
        top[~np.isfinite(top)] = np.nan
        with np.errstate(all="ignore"):
            d = top / F32(127)
            inverse = F32(127) / top if writer == "ggml_simd" else F32(1) / d
            scaled = np.nan_to_num(tiled * np.where(d > 0, inverse, F32(0))[..., None])
            whole = np.rint(scaled) if writer == "ggml_simd" else _halves_away(scaled)
            stored = d.astype("<f2")
        data = np.empty((*tiled.shape[:-1], BLOCK_BYTES), np.uint8)
        data[..., :2] = stored[..., None].view(np.uint8)
        data[..., 2:] = np.clip(whole, -128, 127).astype(np.int8).view(np.uint8)
        return {"kv_cache": data.reshape(*rows.shape[:2], BLOCK_BYTES * tiled.shape[2])}


def _halves_away(x: Array) -> Array:
    """C's roundf."""
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.copysign(F32(1), x), F32(0))


FORMATS = (Q80(),)
