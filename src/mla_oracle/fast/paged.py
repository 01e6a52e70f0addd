# SPDX-License-Identifier: Apache-2.0
"""Paged decode on the fast tier: `decode` takes what the strict kernel takes, and how many threads.

The bits depend on the instruction set, never on the threads, on the batch a request stands in, or on where its
pages lie.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads as pool

Array = NDArray[Any]


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

    q [B, T, H, D] and kv_cache [num_blocks, block_size, D] are arrays of bytes of the stored dtypes (the order
    of `reference._common.Stored`); any strides but the innermost. Query t of T sees the first
    seq_len - T + t + 1 keys, or all if not causal; other slots are never touched.
    """
    kernels = isas.kernels("paged", "f64" if out.dtype == np.float64 else "f32", isa)
    _, T, H, V = out.shape
    tasks, groups, numbers = kernels.plan(T, H, V, causal, seq_lens)
    used = min(pool.count(threads), max(tasks, 1))
    counters = np.zeros(1 + groups, np.int64)
    pools = np.empty((min(used + 1, groups) if numbers else 1, max(numbers, 1)), out.dtype)

    def work() -> None:
        kernels.decode(
            q, q_dtype, kv_cache, kv_dtype, block_table, seq_lens, softmax_scale, causal, -math.inf, out, lse,
            counters, pools,
        )

    pool.run(work, used)
    empty = lse == -math.inf
    if lse_unit != 1:
        np.multiply(lse, lse_unit, out=lse, dtype=np.float64, casting="same_kind")
    lse[empty] = empty_lse
