# SPDX-License-Identifier: Apache-2.0
"""fp8 with scales outside the rows: fp8_e4m3, fp8_e4m3fnuz, fp8_e5m2, and FlashInfer's split caches.

    fp8_*                    row [D] of one byte an element, rope included; `kv_scale` f32: one number, or one a token
                             [num_blocks, block_size] (SGLang's CPU kernel). `kpe_scale`, where given, is that of the
                             rope: of `kpe_cache` [num_blocks, block_size, R], or of the last 64 columns of the row.
    flashinfer_fp8           `kv_cache` [.., L] and `kpe_cache` [.., R], `kv_scale` (FlashInfer: ckv_scale) and
                             `kpe_scale`, a number each
    flashinfer_fp8_grouped   the same, but the latent's scale is `ckv_scale` f32 [num_blocks, block_size, L / 128]
                             (FlashInfer: ckv_scale_arr), one a token and 128 columns

The value is code * scale. Writers divide by the scale and round:

    saturate       what is past the largest becomes the largest (448, fnuz 240, e5m2 57344): vLLM, FlashInfer, aiter
    saturate_224   fnuz only: at 224, as vLLM does, which also calibrates for 224
    reciprocal     x * f32(1 / scale) instead of a division, saturated: TensorRT-LLM
    cast           the plain cast: NaN past the largest, in e5m2 infinity
    vllm, lmdeploy, flashmla ...   grouped only: rules for the scale of a group, see scales.py

Scales that are not given are calibrated: amax / largest over all rows, one for latent and rope together.
Sources: vLLM fp8 KV cache and its change 37054; FlashInfer BatchMLAPagedAttentionWrapper.run, repack_fp8_kv_to_bf16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import LARGEST, dtype
from ..errors import InputError
from .codes import decode, encode
from .format import Array, Format, Parts, Tensors, check_width, needed, no_others, times
from .memory import BYTES, scale_of, take_rows
from .scales import RULES, scale_tiles, tiles

F32 = np.float32
GROUP = 128
ROPE = 64  # of a joined row whose rope has a scale of its own


class PerTensor(Format):
    """Joined or split rows of one fp8 dtype, one scale or two."""

    tensors = ("kv_scale", "kpe_scale", "kpe_cache")
    scale_a_token = True
    readers: tuple[str, ...] = ("fold", "f32", "f32_bf16", "f32_f16", "bf16")

    def __init__(self, name: str, element: str) -> None:
        self.name, self.element = name, element
        self.writers = ("saturate", "reciprocal", "cast")
        if element == "e4m3fnuz":
            self.writers += ("saturate_224",)

    def arrays(self, tensors: Tensors) -> tuple[Array, Array | None]:
        """kv_cache [blocks, rows, L or D], kpe_cache [blocks, rows, R] or None, as u8."""
        kinds = (self.element, *BYTES)
        cache = take_rows("kv_cache", needed(self.name, tensors, "kv_cache"), *kinds, width="columns", multiple=1)
        split = tensors.get("kpe_cache")
        if split is None:
            return cache.view(np.uint8), None
        split = take_rows("kpe_cache", split, *kinds, width="columns", multiple=1)
        if split.shape[:2] != cache.shape[:2]:
            raise InputError(
                f"kpe_cache is {list(split.shape)}, expected [{cache.shape[0]}, {cache.shape[1]}, ..] as kv_cache"
            )
        return cache.view(np.uint8), split.view(np.uint8)

    def scales(self, tensors: Tensors, cache: Array) -> tuple[Array, Array | None]:
        """kv_scale and kpe_scale: () or [blocks, rows]; None where one scale is for both."""
        rows = cache.shape[:2] if self.scale_a_token else None
        latent = scale_of("kv_scale", needed(self.name, tensors, "kv_scale"), rows)
        rope = tensors.get("kpe_scale")
        return latent, None if rope is None else scale_of("kpe_scale", rope, rows)

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        cache, split = self.arrays(tensors)
        _, rope = self.scales(tensors, cache)
        if split is None and rope is not None and cache.shape[2] <= ROPE:
            raise InputError(
                f"kpe_scale is given, but kv_cache has {cache.shape[2]} columns, expected more than {ROPE}: "
                "it is the scale of the last 64"
            )
        return (*cache.shape[:2], cache.shape[2] + (0 if split is None else split.shape[2]))

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        cache, split = self.arrays(tensors)
        codes = cache[blocks, offsets]  # [n, L or D]
        latent, rope = (None if s is None else _of_rows(s, blocks, offsets) for s in self.scales(tensors, cache))
        assert latent is not None
        columns = codes.shape[1] if split is not None else codes.shape[1] - ROPE
        if split is not None:
            codes = np.concatenate([codes, split[blocks, offsets]], axis=1)
        if rope is not None:
            widths = [columns, codes.shape[1] - columns]
            pairs = zip(np.broadcast_arrays(latent, rope), widths, strict=True)
            latent = np.concatenate([np.repeat(s, w, axis=1) for s, w in pairs], axis=1)
        return Parts(codes, self.element, latent)

    def largest(self, writer: str) -> float:
        return 224.0 if writer == "saturate_224" else LARGEST[self.element]

    def codes(self, rows: Array, scale: Array, writer: str) -> Array:
        """[.., C] rows and a scale that broadcasts against [.., C]."""
        with np.errstate(all="ignore"):
            scaled = rows * (F32(1) / scale) if writer == "reciprocal" else rows / scale
        codes = encode(scaled, self.element, "nan" if writer == "cast" else "saturate", self.largest(writer))
        return codes.view(dtype(self.element))

    def given(self, name: str, scales: dict[str, Any], rows: Array, writer: str) -> Array:
        """The scale `name`, or one calibrated over `rows`."""
        value = scales.get(name)
        if value is None:
            return calibrated(rows, self.largest(writer))
        return scale_of(name, value, rows.shape[:2] if self.scale_a_token else None)

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        latent = self.given("kv_scale", scales, rows, writer)
        if scales.get("kpe_scale") is None:
            return {"kv_cache": self.codes(rows, latent[..., None], writer), "kv_scale": np.atleast_1d(latent)}
        rope = scale_of("kpe_scale", scales["kpe_scale"], rows.shape[:2])
        if rows.shape[-1] <= ROPE:
            raise InputError(
                f"rows has {rows.shape[-1]} columns, expected more than {ROPE}: kpe_scale is of the last 64"
            )
        parts = [self.codes(rows[..., :-ROPE], latent[..., None], writer)]
        parts.append(self.codes(rows[..., -ROPE:], rope[..., None], writer))
        cache = np.concatenate(parts, axis=-1)
        return {"kv_cache": cache, "kv_scale": np.atleast_1d(latent), "kpe_scale": np.atleast_1d(rope)}


class FlashInfer(PerTensor):
    """Split caches, bf16(code) * bf16(scale) in bf16 for both."""

    latent, rope, row_bytes = 512, 64, 576
    scale_a_token = False
    readers = ("bf16", "f32_bf16", "f32", "fold")

    def __init__(self) -> None:
        super().__init__("flashinfer_fp8", "e4m3")

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        for tensor in ("kpe_cache", "kpe_scale"):
            needed(self.name, tensors, tensor)
        shape = super().check(tensors, block_size)
        _check_split(self, tensors)
        return shape

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        check_width(rows, self.width)
        latent, rope = rows[..., : self.latent], rows[..., self.latent :]
        kv, kpe = self.given("kv_scale", scales, latent, writer), self.given("kpe_scale", scales, rope, writer)
        return {
            "kv_cache": self.codes(latent, kv[..., None], writer),
            "kpe_cache": self.codes(rope, kpe[..., None], writer),
            "kv_scale": np.atleast_1d(kv),
            "kpe_scale": np.atleast_1d(kpe),
        }


class FlashInferGrouped(PerTensor):
    """Split caches, a scale a token and 128 columns: bf16(f32(code * scale)); the rope as in flashinfer_fp8."""

    latent, rope, row_bytes = 512, 64, 576
    tensors = ("kpe_cache", "kpe_scale", "ckv_scale")
    readers = ("f32_bf16", "bf16", "f32", "exponent")

    def __init__(self) -> None:
        super().__init__("flashinfer_fp8_grouped", "e4m3")
        self.writers = tuple(RULES)

    def scales(self, tensors: Tensors, cache: Array) -> tuple[Array, Array | None]:
        return self.groups(tensors, cache), scale_of("kpe_scale", needed(self.name, tensors, "kpe_scale"))

    def groups(self, tensors: Tensors, cache: Array) -> Array:
        value = needed(self.name, tensors, "ckv_scale")
        groups = take_rows("ckv_scale", value, "f32", width="scales", multiple=1)
        wanted = (*cache.shape[:2], cache.shape[2] // GROUP)
        if groups.shape != wanted:
            raise InputError(f"ckv_scale is {list(groups.shape)}, expected {list(wanted)}: one a token and 128 columns")
        return groups

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        needed(self.name, tensors, "kpe_cache")
        no_others(self.name, tensors, self.tensors)
        _check_split(self, tensors)
        cache, split = self.arrays(tensors)
        self.scales(tensors, cache)
        assert split is not None
        return (*cache.shape[:2], cache.shape[2] + split.shape[2])

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        cache, split = self.arrays(tensors)
        groups, kpe = self.scales(tensors, cache)
        assert split is not None and kpe is not None
        rope = times(decode(split[blocks, offsets], self.element), kpe, "bf16")
        return Parts(cache[blocks, offsets], self.element, groups[blocks, offsets], rope)

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        check_width(rows, self.width)
        latent, rope = rows[..., : self.latent], rows[..., self.latent :]
        scaled, groups = scale_tiles(tiles(latent, GROUP), writer, LARGEST[self.element])
        kpe = self.given("kpe_scale", scales, rope, "saturate")
        return {
            "kv_cache": encode(scaled, self.element).reshape(latent.shape).view(dtype(self.element)),
            "kpe_cache": self.codes(rope, kpe[..., None], "saturate"),
            "ckv_scale": groups,
            "kpe_scale": np.atleast_1d(kpe),
        }


def calibrated(rows: Array, largest: float) -> Array:
    """amax / largest of the finite rows as f32 (), 1 where all are zero."""
    magnitude = np.abs(rows[np.isfinite(rows)])
    top = magnitude.max(initial=F32(0))
    return np.asarray(max(F32(top / F32(largest)), F32(2.0**-126)) if top else F32(1))


def _of_rows(scale: Array, blocks: Array, offsets: Array) -> Array:
    """[n, 1], or [1, 1] of one number."""
    return scale.reshape(1, 1) if scale.ndim == 0 else scale[blocks, offsets][:, None]


def _check_split(form: PerTensor, tensors: Tensors) -> None:
    for tensor, width in (("kv_cache", form.latent), ("kpe_cache", form.rope)):
        array = form.arrays(tensors)[tensor == "kpe_cache"]
        if array is not None and array.shape[2] != width:
            raise InputError(f"{tensor} has {array.shape[2]} columns, expected {width}")


FORMATS = (
    *(PerTensor(f"fp8_{element}", element) for element in ("e4m3", "e4m3fnuz", "e5m2")),
    FlashInfer(),
    FlashInferGrouped(),
)
