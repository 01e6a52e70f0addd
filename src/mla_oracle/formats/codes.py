# SPDX-License-Identifier: Apache-2.0
"""Stored codes and their values: tables to read them, casts to write them, and the roundings of a product.

    decode(codes, "e4m3")                 u8 -> f32, by a table of all codes (e2m1: one nibble an element)
    encode(values, "e4m3", "saturate")    f32 -> u8, one rounding to nearest, ties to even
    rounded(values, "bf16")               f32 -> f32, to the values of a narrower float

NaN in is NaN out wherever the element has a NaN; e2m1 has none, see `encode`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..dtypes import LARGEST, dtype

Array = np.ndarray[Any, Any]
F32 = np.float32
SMALLEST_NORMAL = F32(2.0**-126)


@cache
def table(element: str) -> Array:
    """The f32 value of every code of `element`: [256], of e2m1 [16]."""
    count = 16 if element == "e2m1" else 256
    kind = np.dtype(np.int8) if element == "i8" else dtype(element)
    values: Array = np.arange(count, dtype=np.uint8).view(kind).astype(F32)
    values.flags.writeable = False
    return values


def decode(codes: Array, element: str) -> Array:
    """The values of u8 `codes`, as f32 of the same shape."""
    return np.take(table(element), codes, mode="clip")


def encode(values: Array, element: str, beyond: str = "saturate", largest: float | None = None) -> Array:
    """f32 `values` as u8 codes of the float `element`, rounded once to nearest, ties to even.

    `beyond` tells what becomes of a value past the largest: "saturate" gives the largest (or `largest`, where a writer
    clamps lower), infinity included, as `cvt.rn.satfinite` does; "nan" the cast without it: NaN, in e5m2 infinity. NaN
    stays NaN in the 8-bit floats; e2m1 has none, and PTX's `cvt.rn.satfinite.e2m1x2` makes it +6.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if element == "e2m1":
            values = np.where(np.isnan(values), F32(LARGEST["e2m1"]), values)
        if beyond == "saturate":
            limit = F32(LARGEST[element] if largest is None else largest)
            values = np.clip(values, -limit, limit)
        codes: Array = values.astype(dtype(element)).view(np.uint8)
    return codes


def rounded(values: Array, name: str) -> Array:
    """f32 `values` rounded to bf16 or f16 and widened again, or as they are for f32."""
    if name == "f32":
        return values
    if name == "bf16":
        # The upper half of the bits, plus one where the lower half is past the tie or on it next to an odd number.
        bits = values.view(np.uint32)
        up = (bits >> np.uint32(16)) & np.uint32(1)
        up += np.uint32(0x7FFF)
        up += bits
        up &= np.uint32(0xFFFF0000)
        narrow: Array = up.view(F32)
        np.copyto(narrow, F32(np.nan), where=np.isnan(values))
        return narrow
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype(name)).astype(F32)


def exponents(codes: Array, zero: float, top: float) -> Array:
    """e8m0 `codes` as f32: 2^(code - 127), but code 0 is `zero` (2^-127 by the definition) and 255 is `top` (NaN)."""
    values = np.empty(256, F32)
    values[1:255] = np.ldexp(1.0, np.arange(1, 255) - 127)
    values[0], values[255] = zero, top
    return np.take(values, codes, mode="clip")


def exponent_bits(scales: Array) -> Array:
    """The eight exponent bits of f32 `scales`, u8: as an e8m0 code, 2^floor(log2 scale)."""
    return ((np.ascontiguousarray(scales).view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)).astype(np.uint8)


def nibbles(packed: Array) -> Array:
    """[n, k] u8 -> [n, 2k] u8: the low nibble is the even element."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 0xF, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def pack_nibbles(codes: Array) -> Array:
    """[.., 2k] u8 below 16 -> [.., k] u8: the even element in the low nibble."""
    packed: Array = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed
