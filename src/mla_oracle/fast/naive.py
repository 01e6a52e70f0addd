# SPDX-License-Identifier: Apache-2.0
"""The naive form on the fast tier: `attend` takes what the strict kernel takes, and how many threads.

The bits depend on the instruction set, never on the threads.
"""

from __future__ import annotations

import numpy as np

from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads as pool
from mla_oracle.fast.absorbed import Array, rows


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
    """Fill `out` [t_q, H, V]; all arrays f32 or all f64: `mla_oracle.dense` widens others whole, beforehand.

    q_nope [t_q, H, P], q_pe [t_q, H, R], c_kv [t_kv, L], k_pe [t_kv, R], w_uk [H, P, L], w_uv [H, V, L]; the
    queries are the last t_q rows of the cache. Keys and values are decompressed a tile at a time, by each
    thread into its own (L + P + R + V) x 64 numbers or fewer. Heads are what threads share out.
    """
    kernels = isas.kernels("naive", "f64" if out.dtype == np.float64 else "f32", isa)
    c_kv, k_pe, w_uk, w_uv = map(rows, (c_kv, k_pe, w_uk, w_uv))
    counter = np.zeros(1, np.int64)
    pool.run(
        lambda: kernels.attend(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, scale, out, counter),
        min(pool.count(threads), max(q_nope.shape[1], 1)),
    )
