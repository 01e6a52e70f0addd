# SPDX-License-Identifier: Apache-2.0
"""The naive form on the fast tier: `attend` takes what the strict kernel takes, as stored, and how many threads.

The bits depend on the instruction set, never on the threads; they are those of inputs widened beforehand.
"""

from __future__ import annotations

import numpy as np

from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads as pool
from mla_oracle.fast.absorbed import Array, stored


def attend(
    q_nope: Array,
    q_pe: Array,
    c_kv: Array,
    k_pe: Array,
    w_uk: Array,
    w_uv: Array,
    scale: float,
    out: Array,
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Fill `out` [t_q, H, V], f32 or f64; the arrays f32, f16 or bf16, each on its own, for an f64 `out` f64 too.

    q_nope [t_q, H, P], q_pe [t_q, H, R], c_kv [t_kv, L], k_pe [t_kv, R], w_uk [H, P, L], w_uv [H, V, L]; the
    queries are the last t_q rows of the cache. Arrays are read as they are stored, and widened by tile; keys and
    values are decompressed a tile at a time. Heads are what threads share out.

    Memory beyond `out`, whatever t_kv: each thread's (L + P + R + V) x 128 numbers or fewer, 7 x L more of weights,
    and 16 x t_q of softmax state: half a MB in f32 for DeepSeek's widths, a whole one in f64. An array whose last
    axis is not contiguous is copied, as stored.
    """
    kernels = isas.kernels("naive", "f64" if out.dtype == np.float64 else "f32", isa)
    arrays = [part for x in (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv) for part in stored(x)]
    counter = np.zeros(1, np.int64)
    pool.run(lambda: kernels.attend(*arrays, scale, out, counter), min(pool.count(threads), max(q_nope.shape[1], 1)))
