# SPDX-License-Identifier: Apache-2.0
"""Paged decode on the fast tier: `decode` takes what the strict kernel takes, and how many threads.

The bits depend on the instruction set, never on the threads, on the batch a request stands in, or on where
its pages lie.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads as pool

Array = NDArray[Any]


def on_cache_lines(n: int, numbers: int, dtype: Any) -> Array:
    """An empty array [n, numbers] whose first number starts a cache line."""
    size = n * numbers * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    lines: Array = memory[start : start + size].view(dtype).reshape(n, numbers)
    return lines


def decode(
    q: Array,
    q_dtype: int,
    kv_cache: Array,
    kv_dtype: int,
    block_table: Array,
    seq_lens: Array,
    softmax_scale: float,
    causal: bool,
    lse_unit: float,
    empty_lse: float,
    out: Array,
    lse: Array,
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Fill `out` [B, T, H, V] and `lse` [B, T, H], times `lse_unit`; f32 or f64 as `out` is.

    q [B, T, H, D] and kv_cache [num_blocks, block_size, D] are arrays of bytes of the stored dtypes (the
    order of `reference._common.Stored`); any strides but the innermost. Query t of T sees the first
    seq_len - T + t + 1 keys, or all if not causal; other slots are never touched. A score of -inf has weight
    0 and its value is not touched; a visible NaN or score of +inf makes out and lse NaN; a row without keys,
    or with scores of -inf alone, is zeros and `empty_lse`.

    For a row with n keys of D numbers and weights p, with size = max over keys of sum_d |q_d| |k_d| * |scale|
    (which must be finite in the precision, before the scale too, and so must sum p |v|), eps and tiny those of the
    precision (2^-23 and 2^-126, 2^-52 and 2^-1022), the result differs from strict f64's over the same stored numbers
    by at most

        relative = eps * ((D + 6) * size + 2 n + 32)
        out:  relative * (sum p |v| / sum p) + n * tiny * max |v|
        lse:  relative + eps * (max |score| + log n)

    D size: the dot products, twice (a weight and the sum of weights); n: the sums over keys; 32 and 6: scale,
    exp (1.01 ULP, where 2 are allowed), rescaling per tile and merging; tiny: weights below it count as 0.
    mla_oracle.canonical.decode says what a softcap, a bias and sinks add.

    On amx (a bf16 cache in f32) a query is the sum of three bf16 terms, exactly, and a weight that of two,
    each rounded to 8 bits: the first is off by at most 2^-8 of the weight, and a number below 2^-8 is rounded to 8
    bits by at most 2^-17. Its tiles take numbers below the normal range for 0, in and out. So, besides,

        relative += 2 * D * tiny * (max |q| + 2 max |k| + 8) * |scale|
        out:  + 2^-17 * (sum p |v| / sum p) + n * tiny * (max |v| + 6)

    max |k| times two: of a query the second and third term; 8 and 6: products and sums, of each term; max |v|:
    the second term of a weight.

    Each thread takes scratch: turned queries, one tile, one state, together about 128 x (D + V) numbers
    (amx: 128 x (2 D + V));
    and a pool of partial states of at most 2048 x (V + 18) numbers (4.3 MB in f32 for V = 512) if a request is
    split.
    """
    if out.size == 0:
        return
    kernels = isas.kernels("paged", "f64" if out.dtype == np.float64 else "f32", isa, kv_dtype)
    _, T, H, V = out.shape
    tasks, groups, numbers = kernels.plan(T, H, V, causal, seq_lens)
    used = min(pool.count(threads), tasks) if tasks > 1 else 1
    counters = np.zeros(1 + groups, np.int64)
    pools = on_cache_lines(min(used + 1, groups), numbers, out.dtype) if numbers else np.empty((1, 16), out.dtype)

    def work() -> None:
        kernels.decode(
            q,
            q_dtype,
            kv_cache,
            kv_dtype,
            block_table,
            seq_lens,
            softmax_scale,
            causal,
            -math.inf,
            out,
            lse,
            counters,
            pools,
        )

    pool.run(work, used)
    if lse_unit != 1:
        np.multiply(lse, lse_unit, out=lse, dtype=np.float64, casting="same_kind")
    if empty_lse != -math.inf:
        lse[lse == -math.inf] = empty_lse
