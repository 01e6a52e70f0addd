# SPDX-License-Identifier: Apache-2.0
"""Pages of two regions, all data rows and then all scale rows: model1 (DeepSeek V4), v4.1 and v4.1_fp4.

A page of P tokens is

    region A   [0, P * a)              P data rows of a bytes
    region B   [P * a, P * (a + b))    P scale rows of b bytes
    padding    to a multiple of `align`, in bytes; the distance between pages is the array's

An array is [num_blocks, P, a + b] with any page stride, as engines pass it: a + b is the bytes of a token, but no row
of that array is a token. Or it is [num_blocks, page bytes], padding included; then the block size must be told, or
follows where it can.
Sources: FlashMLA tests/quant.py (MODEL1_FP8Sparse, later V4_FP8Sparse, V41_FP8Sparse, V41_FP4); SGLang kv_layout.cuh.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .codes import decode, encode, nibbles, pack_nibbles
from .format import Array, Format, Parts, Tensors, check_width, e8m0_scales, needed, no_others
from .memory import pages_of
from .scales import amax, e8m0_codes, scale_tiles, tiles
from .tile_rows import bf16_bytes, bf16_values

F32 = np.float32


class Pages(Format):
    """The common part; a subclass tells what a data row and a scale row hold."""

    latent, rope = 448, 64
    data_bytes: int
    scale_bytes: int
    align: int

    @property
    def page(self) -> int:
        return self.data_bytes + self.scale_bytes

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        pages, rows = pages_of("kv_cache", needed(self.name, tensors, "kv_cache"), block_size, self.page)
        return len(pages), rows, 512

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        pages, rows = pages_of("kv_cache", needed(self.name, tensors, "kv_cache"), block_size, self.page)
        data = self.region(pages, 0, rows, self.data_bytes)
        scales = self.region(pages, rows * self.data_bytes, rows, self.scale_bytes)
        return self.parts(data[blocks, offsets], scales[blocks, offsets])

    def region(self, pages: Array, start: int, rows: int, row_bytes: int) -> Array:
        """[num_blocks, rows, row_bytes]: a view of the region at byte `start` of each page."""
        inside = pages[:, start : start + rows * row_bytes]
        shape, strides = (len(pages), rows, row_bytes), (pages.strides[0], row_bytes, 1)
        return np.lib.stride_tricks.as_strided(inside, shape, strides, writeable=pages.flags.writeable)

    def parts(self, data: Array, scales: Array) -> Parts:
        """Of copied data rows [n, a] and scale rows [n, b]."""
        raise NotImplementedError

    def rows(self, rows: Array, writer: str) -> tuple[Array, Array]:
        """Data rows [blocks, P, a] and scale rows [blocks, P, b] of f32 rows."""
        raise NotImplementedError

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        check_width(rows, self.width)
        count, size = rows.shape[:2]
        used = size * self.page
        memory = np.zeros((count, used + -used % self.align), np.uint8)
        data, scale_rows = self.rows(rows, writer)
        self.region(memory, 0, size, self.data_bytes)[...] = data
        self.region(memory, size * self.data_bytes, size, self.scale_bytes)[...] = scale_rows
        return {"kv_cache": self.region(memory, 0, size, self.page)}


class Model1(Pages):
    """584 bytes a token: FlashMLA MODEL1 / V4, vLLM and SGLang DeepSeek-V4, LMDeploy, FlashInfer SM120.

        data row, 576 bytes    [0, 448)    448 e4m3    columns 0 .. 447
                               [448, 576)  64 bf16     columns 448 .. 511, the rope, without a scale
        scale row, 8 bytes     [0, 7)      7 e8m0      scale t, of columns 64 t .. 64 t + 63
                               [7]         pad, 0 as written, not read

    Pages are padded to a multiple of 576. The value is the whole row of 512.
    Writers: flashmla (aiter, LMDeploy: at least 2^-13) and vllm (at least 2^-22).
    Readers: bf16 (FlashMLA's and LMDeploy's tests), exp2 (vLLM), guarded (SGLang CPU).
    """

    name = "model1"
    row_bytes = 584
    data_bytes, scale_bytes, align = 576, 8, 576
    writers = ("flashmla", "vllm")
    readers = ("bf16", "exp2", "guarded")

    def parts(self, data: Array, scales: Array) -> Parts:
        return Parts(data[:, :448], "e4m3", scales[:, :7], bf16_values(data[:, 448:]))

    def scales_of(self, parts: Parts, reader: str) -> Array:
        return e8m0_scales(parts.scales, reader)

    def rows(self, rows: Array, writer: str) -> tuple[Array, Array]:
        scaled, powers = scale_tiles(tiles(rows[..., :448], 64), "vllm_pow2" if writer == "vllm" else writer, 448.0)
        codes = encode(scaled, "e4m3").reshape(*rows.shape[:2], 448)
        data = np.concatenate([codes, bf16_bytes(rows[..., 448:])], axis=-1)
        return data, np.concatenate([e8m0_codes(powers), np.zeros((*rows.shape[:2], 1), np.uint8)], axis=-1)


class V41(Pages):
    """528 bytes a token: DeepSeek V4.1, MXFP8; the rope is quantised like the rest.

        data row, 512 bytes    [0, 512)    512 e4m3
        scale row, 16 bytes    [0, 16)     16 e8m0     scale t, of columns 32 t .. 32 t + 31

    Pages are padded to a multiple of 512. Writer: flashmla. Readers: bf16 (FlashMLA's test), exp2.
    """

    name = "v4.1"
    row_bytes = 528
    data_bytes, scale_bytes, align = 512, 16, 512
    writers = ("flashmla",)
    readers = ("bf16", "exp2")

    def parts(self, data: Array, scales: Array) -> Parts:
        return Parts(data, "e4m3", scales)

    def scales_of(self, parts: Parts, reader: str) -> Array:
        return e8m0_scales(parts.scales, reader)

    def rows(self, rows: Array, writer: str) -> tuple[Array, Array]:
        scaled, powers = scale_tiles(tiles(rows, 32), writer, 448.0)
        return encode(scaled, "e4m3").reshape(*rows.shape[:2], 512), e8m0_codes(powers)


class V41Fp4(Pages):
    """288 bytes a token: DeepSeek V4.1's fp4 cache (extra cache only); no scale of the whole tensor.

        data row, 256 bytes    512 e2m1, two a byte, the even column in the low nibble
        scale row, 32 bytes    32 e4m3     scale s, of columns 16 s .. 16 s + 15

    Pages are padded to a multiple of 512 (FlashMLA) or 256 (SGLang); written here to 512.
    Writer: flashmla, scale e4m3(clamp(amax / 6, 2^-9, 448)) to nearest, code e2m1(x / scale). A NaN or an infinity
    makes the scale of its tile NaN. Reader: bf16, in which the product is exact.
    """

    name = "v4.1_fp4"
    row_bytes = 288
    data_bytes, scale_bytes, align = 256, 32, 512
    writers = ("flashmla",)
    readers = ("bf16",)

    def parts(self, data: Array, scales: Array) -> Parts:
        return Parts(nibbles(data), "e2m1", scales)

    def scales_of(self, parts: Parts, reader: str) -> Array:
        return decode(parts.scales, "e4m3")

    def rows(self, rows: Array, writer: str) -> tuple[Array, Array]:
        tiled = tiles(rows, 16)
        top = amax(tiled, True)
        with np.errstate(all="ignore"):
            scale_codes = encode(np.clip(top / F32(6), F32(2.0**-9), F32(448)), "e4m3")
            scale_codes[~np.isfinite(top)] = 0x7F
            scaled = tiled / decode(scale_codes, "e4m3")[..., None]
        codes = encode(np.where(np.isnan(scaled), F32(0), scaled), "e2m1").reshape(rows.shape)
        return pack_nibbles(codes), scale_codes


FORMATS = (Model1(), V41(), V41Fp4())
