# SPDX-License-Identifier: Apache-2.0
"""The roundings of one honest kernel: numbers in narrower formats, and sums whose accumulator rounds.

    narrow(x, "bf16")                               f32 to the numbers of bf16
    accumulate(None, a, b, 16, "mma")               a @ b as tensor cores add, 16 products at a time
"""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..arrays import Array

F32 = np.float32
STEP = {"f32": 1, "f16": 1, "mma": 16, "mma-f16": 16}  # products between two roundings of an accumulator


def accumulate(total: Array | None, a: Array, b: Array, step: int | None, how: str) -> Array:
    """total [R, N] f32 + a [R, n] @ b [n, N], rounded after every `step` products as the accumulator `how` rounds."""
    n = a.shape[1]
    step = n if step is None else step
    if total is None:
        total = np.zeros((len(a), b.shape[1]), F32)
    for j in range(0, n, max(1, step)):
        part = a[:, j : j + step], b[j : j + step]
        if how == "mma" and step < n:
            total = _truncate(total + part[0].astype(np.float64) @ part[1])
        else:
            total = total + part[0] @ part[1]
        if how in ("f16", "mma-f16"):
            total = narrow(total, "f16")
    return total


def narrow(x: Array, name: str) -> Array:
    """f32 `x` rounded to the format `name`, as f32: to nearest, ties to even; e4m3 saturates."""
    if name in ("f32", "f64"):
        return x
    if name in ("bf16", "tf32"):
        drop = 16 if name == "bf16" else 13
        bits = x.view(np.uint32) if x.flags.c_contiguous else np.ascontiguousarray(x).view(np.uint32)
        half = ((bits >> drop) & 1) + np.uint32((1 << (drop - 1)) - 1)
        rounded: Array = ((bits + half) & np.uint32(0x100000000 - (1 << drop))).view(F32)
        return np.where(np.isnan(x), x, rounded) if np.isnan(rounded).any() else rounded
    if name == "bf16x2":
        high = narrow(x, "bf16")
        return high + narrow(x - high, "bf16")
    with np.errstate(over="ignore", invalid="ignore"):
        return dtypes.round_to(x, name, saturate=name == "e4m3").astype(F32)


def _truncate(x: Array) -> Array:
    """f64 to f32, toward zero."""
    nearest = x.astype(F32)
    bits = nearest.view(np.uint32)
    bits -= np.abs(nearest) > np.abs(x)
    return nearest
