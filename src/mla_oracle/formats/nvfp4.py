# SPDX-License-Identifier: Apache-2.0
"""NVFP4 rows, e2m1 with an e4m3 scale for 16 columns: nvfp4_ds_mla (vLLM, FlashMLA) and nvfp4_sglang.

Two columns share a byte, the even one in the low nibble. e2m1 holds 0 .5 1 1.5 2 3 4 6 and their negatives. A product
of an e2m1 and an e4m3 has at most six bits, so it is exact in f16 and in bf16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .codes import decode, encode, nibbles, pack_nibbles
from .format import Array, Format, Parts, Tensors, check_width, needed, no_others, times
from .memory import BYTES, scale_of, take_rows
from .scales import amax, tiles
from .tile_rows import bf16_bytes, bf16_values

F32 = np.float32
LARGEST_CODE = 0x7E  # of a positive finite e4m3
# nvfp4_ds_mla: byte PERMUTED[s] holds the scale of columns 16 s .. 16 s + 15.
PERMUTED = np.array([8 * (s & 3) + (s >> 2) for s in range(32)])


class Nvfp4(Format):
    """The common part: where the scales and the rope are."""

    latent, rope = 512, 64

    def rows(self, tensors: Tensors) -> Array:
        value = needed(self.name, tensors, "kv_cache")
        return take_rows("kv_cache", value, *BYTES, width="the bytes of a row", exact=self.row_bytes or 0)

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        return (*self.rows(tensors).shape[:2], 576)

    def scales_of(self, parts: Parts, reader: str) -> Array:
        return decode(parts.scales, "e4m3")


class Nvfp4DsMla(Nvfp4):
    """352 bytes a token: vLLM `nvfp4_ds_mla` on SM100, FlashMLA `nvfp4.fp8rope`.

        [0, 256)    512 e2m1    latent
        [256, 320)  64 e4m3     rope, without a scale: 448 at most, and NaN where NaN
        [320, 352)  32 e4m3     scale s, of columns 16 s .. 16 s + 15, in byte 8 (s & 3) + (s >> 2)

    Writer: round_up, scale = e4m3 rounded up of max(amax / 6, 2^-9), 448 at most; code = e2m1(x / scale) saturated at
    6, NaN stored as +6 (PTX `cvt.rn.satfinite.e2m1x2`). Reader: f16_bf16, both steps exact.
    """

    name = "nvfp4_ds_mla"
    row_bytes = 352
    writers = ("round_up",)
    readers = ("f16_bf16",)

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        data = self.rows(tensors).view(np.uint8)[blocks, offsets]  # [n, 352]
        rope = decode(data[:, 256:320], "e4m3")
        return Parts(nibbles(data[:, :256]), "e2m1", data[:, 320:][:, PERMUTED], rope)

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        check_width(rows, self.width)
        tiled = tiles(rows[..., :512], 16)
        with np.errstate(all="ignore"):
            wanted = np.minimum(np.maximum(amax(tiled, False) / F32(6), F32(2.0**-9)), F32(448))
            scale_codes = encode(wanted, "e4m3")
            scale_codes += decode(scale_codes, "e4m3") < wanted  # codes of positive numbers are in their order
            scaled = tiled / decode(scale_codes, "e4m3")[..., None]
        data = np.zeros((*rows.shape[:2], 352), np.uint8)
        data[..., :256] = pack_nibbles(encode(scaled, "e2m1").reshape(*rows.shape[:2], 512))
        data[..., 256:320] = encode(rows[..., 512:], "e4m3")
        data[..., 320 + PERMUTED] = scale_codes
        return {"kv_cache": data}


class Nvfp4Sglang(Nvfp4):
    """416 bytes a token: SGLang's NVFP4 cache of DSA models, with `kv_scale`, one f32 for the layer.

        [0, 256)    512 e2m1    latent
        [256, 288)  32 e4m3     scale s, of columns 16 s .. 16 s + 15
        [288, 416)  64 bf16     rope, without a scale

    A value is code * scale * kv_scale, multiplied in this order. A `kv_scale` that is not given is amax / (6 * 448).
    Writers: best_mse, of the five e4m3 codes around the one nearest amax / (6 kv_scale), the one whose tile has the
    smallest sum of squared errors, on a tie the smaller; nearest, that one itself. NaN is stored as 0, infinity as 6.
    Readers: f32_bf16 (the FlashMLA kernel it feeds multiplies in bf16), f32.
    """

    name = "nvfp4_sglang"
    row_bytes = 416
    tensors = ("kv_scale",)
    writers = ("best_mse", "nearest")
    readers = ("f32_bf16", "f32")

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        scale_of("kv_scale", needed(self.name, tensors, "kv_scale"))
        return super().check(tensors, block_size)

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        data = self.rows(tensors).view(np.uint8)[blocks, offsets]  # [n, 416]
        outer = F32(scale_of("kv_scale", needed(self.name, tensors, "kv_scale")))
        return Parts(nibbles(data[:, :256]), "e2m1", data[:, 256:288], bf16_values(data[:, 288:]), outer)

    def values(self, parts: Parts, reader: str) -> Array:
        elements = tiles(decode(parts.codes, parts.element), 16) * self.scales_of(parts, reader)[:, :, None]
        outer = np.asarray(F32(1) if parts.outer is None else parts.outer)
        product = times(elements.reshape(parts.codes.shape), outer, reader)
        assert parts.rope is not None
        return np.concatenate([product, parts.rope], axis=1)

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        check_width(rows, self.width)
        tiled = tiles(rows[..., :512], 16)
        tiled = np.where(np.isnan(tiled), F32(0), tiled)
        given = scales.get("kv_scale")
        if given is None:
            top = np.abs(tiled[np.isfinite(tiled)]).max(initial=F32(0))
            outer = np.asarray(max(F32(top / F32(6 * 448)), F32(2.0**-126)) if top else F32(1))
        else:
            outer = scale_of("kv_scale", given)
        with np.errstate(all="ignore"):
            wanted = np.minimum(amax(tiled, False) / (F32(6) * outer), F32(448))
            nearest = encode(wanted, "e4m3").astype(np.int64)
        if writer == "best_mse":
            around = np.clip(nearest + np.arange(-2, 3).reshape(5, 1, 1, 1), 0, LARGEST_CODE).astype(np.uint8)
            errors = np.stack([_squared_error(tiled, codes, outer) for codes in around])  # [5, blocks, rows, 32]
            best = errors.argmin(axis=0)  # the first of equals is the smallest code
            scale_codes = np.take_along_axis(around, best[None], axis=0)[0]
        else:
            scale_codes = nearest.astype(np.uint8)
        data = np.zeros((*rows.shape[:2], 416), np.uint8)
        data[..., :256] = pack_nibbles(_codes(tiled, scale_codes, outer).reshape(*rows.shape[:2], 512))
        data[..., 256:288] = scale_codes
        data[..., 288:] = bf16_bytes(rows[..., 512:])
        return {"kv_cache": data, "kv_scale": np.atleast_1d(outer)}


def _codes(tiled: Array, scale_codes: Array, outer: Array) -> Array:
    """e2m1 codes of x / (scale * outer); all zero where the scale is."""
    with np.errstate(all="ignore"):
        scale = (decode(scale_codes, "e4m3") * outer)[..., None]
        scaled = np.where(scale > 0, tiled / scale, F32(0))
    return encode(scaled, "e2m1")


def _squared_error(tiled: Array, scale_codes: Array, outer: Array) -> Array:
    """Sum over each tile of (x - stored)^2 in f64, infinities at the largest f32."""
    scale = decode(scale_codes, "e4m3").astype(np.float64)[..., None] * np.float64(outer)
    stored = decode(_codes(tiled, scale_codes, outer), "e2m1") * scale
    error: Array = ((np.nan_to_num(tiled).astype(np.float64) - stored) ** 2).sum(axis=-1)
    return error


FORMATS = (Nvfp4DsMla(), Nvfp4Sglang())
