# SPDX-License-Identifier: Apache-2.0
"""The scale of a tile: how writers choose it from the tile's largest magnitude (amax), each rule by name.

    flashmla        2^ceil(log2(max(amax / 448, 1e-4))), so at least 2^-13; NaN and infinity spread over the tile
    vllm_pow2       2^ceil(log2(max(amax, 1e-4) / 448)), so at least 2^-22; a NaN stays alone
    vllm            max(amax / 448, smallest normal f32), any f32; a NaN stays alone
    sglang          amax / 448 and no smallest scale: a tile of zeros has scale 0, and 0 / 0 stores NaN
    lmdeploy        max(amax, 1e-6) / 448, any f32
    lmdeploy_pow2   the same, rounded up to a power of two

Powers of two are rounded up on the bits, which is exact; `2 ** ceil(log2 x)` in f32 may stay below an x that is less
than 2^-22 above a power of two, and the codes then round to 448 all the same.
Sources: FlashMLA tests/quant.py; vLLM's concat_and_cache_ds_mla and its change 49435; SGLang _quantize_k_cache_fast;
LMDeploy blocked_fp8 with `scale_fmt`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .codes import SMALLEST_NORMAL, exponent_bits

Array = np.ndarray[Any, Any]
F32 = np.float32
MARGIN = F32(1e-4)


def tiles(rows: Array, size: int) -> Array:
    """[.., C] -> [.., C / size, size]."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)


def amax(tiled: Array, spread_nan: bool) -> Array:
    """Largest magnitude of each tile, [.., G]; a NaN makes it NaN (torch's max) or is passed over (fmaxf)."""
    magnitude = np.abs(tiled)
    largest: Array = magnitude.max(axis=-1) if spread_nan else np.fmax.reduce(magnitude, axis=-1, initial=F32(0))
    return largest


def power_above(x: Array) -> Array:
    """The smallest power of two not below f32 `x` > 0, exact; infinity and NaN stay, subnormals give 2^-126."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    up = ((bits + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(F32)
    return np.where(np.isnan(x), x, up)


def _flashmla(tiled: Array, largest: F32) -> Array:
    return power_above(np.maximum(amax(tiled, True) / largest, MARGIN))


def _vllm_pow2(tiled: Array, largest: F32) -> Array:
    return power_above(np.maximum(amax(tiled, False), MARGIN) / largest)


def _vllm(tiled: Array, largest: F32) -> Array:
    return np.maximum(amax(tiled, False) / largest, SMALLEST_NORMAL)


def _sglang(tiled: Array, largest: F32) -> Array:
    return amax(tiled, False) / largest


def _lmdeploy(tiled: Array, largest: F32) -> Array:
    return np.maximum(amax(tiled, False), F32(1e-6)) / largest


def _lmdeploy_pow2(tiled: Array, largest: F32) -> Array:
    return power_above(_lmdeploy(tiled, largest))


RULES: dict[str, Callable[[Array, F32], Array]] = {
    "flashmla": _flashmla,
    "vllm_pow2": _vllm_pow2,
    "vllm": _vllm,
    "sglang": _sglang,
    "lmdeploy": _lmdeploy,
    "lmdeploy_pow2": _lmdeploy_pow2,
}


def scale_tiles(tiled: Array, rule: str, largest: float) -> tuple[Array, Array]:
    """(tiles / scale [.., G, k], scale [.., G]) by the rule; f32. A division each, as the writers do."""
    with np.errstate(all="ignore"):
        scale = RULES[rule](tiled, F32(largest)).astype(F32)
        return tiled / scale[..., None], scale


def e8m0_codes(powers: Array) -> Array:
    """f32 powers of two as e8m0 codes; infinity and NaN are 255."""
    return exponent_bits(powers)
