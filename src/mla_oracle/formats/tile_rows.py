# SPDX-License-Identifier: Apache-2.0
"""Rows that hold e4m3 tiles with their scales and a bf16 rope: fp8_ds_mla (DeepSeek V3.2) and aiter_v4.

Each row stands alone, so any strides between rows and pages do. bf16 and f32 fields are little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import dtype
from ..errors import InputError
from .codes import encode
from .format import TILE_READERS, Array, Format, Parts, Tensors, check_width, e8m0_scales, needed, no_others
from .memory import BYTES, take_rows
from .scales import e8m0_codes, scale_tiles, tiles

F32 = np.float32


def bf16_bytes(values: Array) -> Array:
    """[.., R] f32 -> [.., 2R] u8: rounded to bf16."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = np.ascontiguousarray(values.astype(dtype("bf16")))
    return narrow.view(np.uint8)


def bf16_values(data: Array) -> Array:
    """[n, 2R] u8, copied out of a cache -> [n, R] f32."""
    halves = np.ascontiguousarray(data).view("<u2").astype(np.uint32)
    return (halves << np.uint32(16)).view(F32)


class DsMla(Format):
    """656 bytes a token: DeepSeek V3.2 as FlashMLA (V32), vLLM (`fp8_ds_mla`), SGLang (DSA) and LMDeploy store it.

        [0, 512)    512 e4m3    latent, columns 0 .. 511
        [512, 528)  4 f32       scale t, of columns 128 t .. 128 t + 127
        [528, 656)  64 bf16     rope, without a scale

    A value is code * scale. FlashMLA's own test leaves a spare row between pages: the page stride is the array's.
    Writers: flashmla (new vLLM too), vllm (before its change 49435), sglang, lmdeploy, lmdeploy_pow2; see scales.py.
    Readers: f32_bf16 (FlashMLA's test), bf16 (its SM90 kernel), f32, e8m0_rz (its SM100 kernel at 9241ae3), exponent
    (FlashInfer SM120, `pow2_fp32`). The last two are right only for scales that are powers of two.
    """

    name = "fp8_ds_mla"
    latent, rope, row_bytes = 512, 64, 656
    tile = 128
    writers = ("flashmla", "vllm", "sglang", "lmdeploy", "lmdeploy_pow2")
    readers = TILE_READERS

    def cache(self, tensors: Tensors) -> Array:
        value = needed(self.name, tensors, "kv_cache")
        return take_rows("kv_cache", value, *BYTES, "e4m3", width="the bytes of a row", exact=self.row_bytes or 0)

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        return (*self.cache(tensors).shape[:2], 576)

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        data = self.cache(tensors).view(np.uint8)[blocks, offsets]  # [n, 656]
        scales = np.ascontiguousarray(data[:, 512:528]).view("<f4")
        return Parts(data[:, :512], "e4m3", scales, bf16_values(data[:, 528:]))

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        check_width(rows, self.width)
        scaled, tile_scales = scale_tiles(tiles(rows[..., :512], self.tile), writer, 448.0)
        data = np.zeros((*rows.shape[:2], 656), np.uint8)
        data[..., :512] = encode(scaled, "e4m3").reshape(*rows.shape[:2], 512)
        data[..., 512:528] = tile_scales.astype("<f4").view(np.uint8)
        data[..., 528:] = bf16_bytes(rows[..., 512:])
        return {"kv_cache": data}


class AiterV4(Format):
    """aiter `mla_v40_decode_fwd`: DeepSeek V4 in two tensors, `kv_cache` [.., 512] bytes and `kpe_cache` [.., 64] bf16.

        [0, 448)    448 e4m3    latent
        [448, 462)  14 e8m0     scale s, of columns 32 s .. 32 s + 31; tiles are 64 wide, so each byte comes twice
        [462, 512)              not read; 0 as written

    The matrix instruction takes a scale for 32 columns, which is why a tile's byte is doubled; the reader uses each
    byte for its own 32. Rows of 576 bytes (an earlier layout: 16 scale bytes, then zeros) read the same.
    Writer: flashmla. Readers: shift (byte 0 is 0.0, 255 infinity), bf16 (as the matrix instruction).
    """

    name = "aiter_v4"
    latent, rope, row_bytes = 448, 64, 512
    tensors = ("kpe_cache",)
    writers = ("flashmla",)
    readers = ("shift", "bf16")

    def arrays(self, tensors: Tensors) -> tuple[Array, Array]:
        value = needed(self.name, tensors, "kv_cache")
        wide = getattr(value, "shape", (0,))[-1] == 576
        cache = take_rows("kv_cache", value, *BYTES, "e4m3", width="the bytes of a row", exact=576 if wide else 512)
        rope = take_rows("kpe_cache", needed(self.name, tensors, "kpe_cache"), "bf16", width="columns", multiple=1)
        wanted = (*cache.shape[:2], 64)
        if rope.shape != wanted:
            raise InputError(f"kpe_cache is {list(rope.shape)}, expected {list(wanted)}")
        return cache.view(np.uint8), rope

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        return (*self.arrays(tensors)[0].shape[:2], 512)

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        cache, rope = self.arrays(tensors)
        data = cache[blocks, offsets]
        return Parts(data[:, :448], "e4m3", data[:, 448:462], rope[blocks, offsets].astype(F32))

    def scales_of(self, parts: Parts, reader: str) -> Array:
        return e8m0_scales(parts.scales, reader)

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        check_width(rows, self.width)
        scaled, powers = scale_tiles(tiles(rows[..., :448], 64), writer, 448.0)
        data = np.zeros((*rows.shape[:2], 512), np.uint8)
        data[..., :448] = encode(scaled, "e4m3").reshape(*rows.shape[:2], 448)
        data[..., 448:462] = np.repeat(e8m0_codes(powers), 2, axis=-1)
        with np.errstate(over="ignore", invalid="ignore"):
            return {"kv_cache": data, "kpe_cache": rows[..., 448:].astype(dtype("bf16"))}


FORMATS = (DsMla(), AiterV4())
