# SPDX-License-Identifier: Apache-2.0
"""ggml's integers: q8_0 (llama.cpp, ik_llama.cpp, memra), and q6_0 and q8_KV of ik_llama.cpp.

Which columns are the latent is the case's: llama.cpp stores the latent first, so the value of a row of 576 is columns
0 .. 511; ik_llama.cpp the rope first, so it is columns 64 .. 575.
A block with a NaN or an infinity gets a d of NaN, and is NaN as a whole: what ggml makes of it, C leaves open.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InputError
from .format import Array, Format, Parts, Tensors, needed, no_others
from .memory import BYTES, take_rows
from .scales import amax, tiles

F32 = np.float32
BLOCK = 32


class Blocks(Format):
    """A row is blocks of 32 columns, each with a d in f16; d * q is exact in f32."""

    block_bytes: int
    readers = ("f32",)

    def rows(self, tensors: Tensors) -> Array:
        value = needed(self.name, tensors, "kv_cache")
        return take_rows("kv_cache", value, *BYTES, width="bytes", multiple=self.block_bytes)

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        count, size, row_bytes = self.rows(tensors).shape
        return count, size, row_bytes // self.block_bytes * BLOCK

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        data = tiles(self.rows(tensors).view(np.uint8)[blocks, offsets], self.block_bytes)  # [n, G, block_bytes]
        scales = np.ascontiguousarray(data[..., :2]).view("<f2")[..., 0]
        return Parts(self.quants(data[..., 2:]).reshape(len(data), BLOCK * data.shape[1]), "i8", scales)

    def scales_of(self, parts: Parts, reader: str) -> Array:
        return parts.scales.astype(F32)

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        _check_columns(rows)
        tiled = tiles(rows, BLOCK)
        with np.errstate(all="ignore"):
            d, quants = self.quantized(tiled, writer)
            stored = d.astype("<f2")
        data = np.empty((*tiled.shape[:-1], self.block_bytes), np.uint8)
        data[..., :2] = stored[..., None].view(np.uint8)
        data[..., 2:] = quants
        return {"kv_cache": data.reshape(*rows.shape[:2], self.block_bytes * tiled.shape[2])}

    def quants(self, data: Array) -> Array:
        """[n, G, 32] u8, i8 as they are, of the bytes of blocks behind their d."""
        raise NotImplementedError

    def quantized(self, tiled: Array, writer: str) -> tuple[Array, Array]:
        """(d [.., G] f32, the bytes behind it) of f32 columns [.., G, 32]."""
        raise NotImplementedError


class Q80(Blocks):
    """34 bytes for 32 columns, so 612 for a row of 576; any number of blocks.

        [34 k, 34 k + 2)       f16     d of columns 32 k .. 32 k + 31
        [34 k + 2, 34 k + 34)  32 i8   q

    Writers: ggml, d = amax / 127 in f32, q = roundf(x * (1 / d)) with halves away from zero, and d stored as f16 after
    that; ggml_simd, q = x * (127 / amax) with halves to even. d past the largest f16 is stored as infinity.
    Readers: f32.
    """

    name, block_bytes = "q8_0", 34
    writers = ("ggml", "ggml_simd")

    def quants(self, data: Array) -> Array:
        return data

    def quantized(self, tiled: Array, writer: str) -> tuple[Array, Array]:
        top = _largest(tiled)
        d = top / F32(127)
        inverse = F32(127) / top if writer == "ggml_simd" else F32(1) / d
        scaled = np.nan_to_num(tiled * np.where(d > 0, inverse, F32(0))[..., None])
        whole = np.rint(scaled) if writer == "ggml_simd" else _halves_away(scaled)
        return d, np.clip(whole, -128, 127).astype(np.int8).view(np.uint8)


class Q60(Blocks):
    """26 bytes for 32 columns, so 468 for a row of 576; any number of blocks.

        [26 k, 26 k + 2)        f16     d of columns 32 k .. 32 k + 31
        [26 k + 2, 26 k + 10)   8 u8    the high two bits: of byte j bits 0-1 are column j's, 2-3 column j + 16's,
                                        4-5 column j + 8's, 6-7 column j + 24's
        [26 k + 10, 26 k + 26)  16 u8   the low four bits: of byte j the low nibble is column j's, the high j + 16's

    A value is d * (q - 32), q of six bits.
    Writer: ggml, d = x / -32 of the x whose magnitude is the largest, q = min(63, trunc(x * (1 / d) + 32.5)), and d
    stored as f16 after that (`quantize_f32_q6_0_block`). Readers: f32.
    """

    name, block_bytes = "q6_0", 26
    writers = ("ggml",)

    def quants(self, data: Array) -> Array:
        low, high = data[..., 8:], data[..., :8]
        low = np.concatenate([low & 15, low >> 4], axis=-1)
        high = np.concatenate([high & 15, high >> 4], axis=-1)  # [n, G, 16]: of columns j and j + 16
        high = np.concatenate([high & 3, high >> 2], axis=-1)
        q: Array = low | high << 4
        return q - np.uint8(32)

    def quantized(self, tiled: Array, writer: str) -> tuple[Array, Array]:
        at = np.abs(np.nan_to_num(tiled)).argmax(axis=-1)[..., None]
        d = np.take_along_axis(tiled, at, axis=-1)[..., 0] / F32(-32)
        d[np.isnan(_largest(tiled))] = np.nan
        inverse = np.where(np.abs(d) > 0, F32(1) / d, F32(0))
        shifted = np.nan_to_num(tiled * inverse[..., None]) + F32(32.5)
        q = np.clip(np.trunc(shifted), 0, 63).astype(np.uint8)
        low = q[..., :16] & 15 | (q[..., 16:] & 15) << 4
        pairs = q[..., :16] >> 4 | q[..., 16:] >> 4 << 2
        return d, np.concatenate([pairs[..., :8] | pairs[..., 8:] << 4, low], axis=-1)


class Q8KV(Format):
    """8 bytes and a byte a column, so 584 for a row of 576; a multiple of 32 columns.

        [0, 4)  f32   d
        [4, 8)  i32   the sum of q, not read: it is for products with numbers that have an offset
        [8, ..) i8    q

    A value is d * q. Writer: ik, d = amax / 127 of the whole row, q = x * (1 / d) with halves to even
    (`iqk_quantize_row_q8_KV`). Readers: f32.
    """

    name = "q8_KV"
    writers = ("ik",)
    readers = ("f32",)

    def rows(self, tensors: Tensors) -> Array:
        rows = take_rows("kv_cache", needed(self.name, tensors, "kv_cache"), *BYTES, width="bytes")
        if rows.shape[2] <= 8 or (rows.shape[2] - 8) % BLOCK:
            raise InputError(f"kv_cache has {rows.shape[2]} bytes a row, expected 8 and a multiple of {BLOCK}")
        return rows

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        count, size, row_bytes = self.rows(tensors).shape
        return count, size, row_bytes - 8

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        data = self.rows(tensors).view(np.uint8)[blocks, offsets]
        return Parts(data[:, 8:], "i8", np.ascontiguousarray(data[:, :4]).view("<f4"))

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        _check_columns(rows)
        with np.errstate(all="ignore"):
            d = _largest(rows) / F32(127)
            scaled = np.nan_to_num(rows * np.where(d > 0, F32(1) / d, F32(0))[..., None])
        q = np.clip(np.rint(scaled), -128, 127).astype(np.int8)
        data = np.empty((*rows.shape[:2], 8 + rows.shape[2]), np.uint8)
        data[..., :4] = d.astype("<f4")[..., None].view(np.uint8)
        data[..., 4:8] = q.sum(axis=-1, dtype="<i4")[..., None].view(np.uint8)
        data[..., 8:] = q.view(np.uint8)
        return {"kv_cache": data}


def _check_columns(rows: Array) -> None:
    if rows.shape[-1] % BLOCK or rows.shape[-1] == 0:
        raise InputError(f"rows has {rows.shape[-1]} columns, expected a multiple of {BLOCK}")


def _largest(tiled: Array) -> Array:
    """amax [..], NaN where a number is none."""
    top = amax(tiled, True)
    top[~np.isfinite(top)] = np.nan
    return top


def _halves_away(x: Array) -> Array:
    """C's roundf."""
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.copysign(F32(1), x), F32(0))


FORMATS = (Q80(), Q60(), Q8KV())
