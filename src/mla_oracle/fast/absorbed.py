# SPDX-License-Identifier: Apache-2.0
"""The absorbed form on the fast tier: `attend` takes what the strict kernel takes, and how many threads.

The bits depend on the instruction set, never on the threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads as pool

Array = NDArray[Any]


def rows(x: Array) -> Array:
    """`x` with its last axis contiguous: a copy only where it is not."""
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


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
    queries are the last t_q rows of the cache. Beyond `out` it keeps t_q x H x (2 L + R) numbers and the
    threads' scratch (see `paged`).
    """
    precision = "f64" if out.dtype == np.float64 else "f32"
    kernels = isas.kernels("absorbed", precision, isa)
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = map(rows, (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv))
    t_q, H, _ = q_nope.shape
    L = c_kv.shape[1]
    used = pool.count(threads)

    q = np.empty((t_q, H, L + q_pe.shape[2]), out.dtype)
    q[..., L:] = q_pe
    counter = np.zeros(1, np.int64)
    pool.run(lambda: kernels.absorb_query(q_nope, w_uk, q[..., :L], counter), min(used, H))

    lens = np.array([len(c_kv)], np.int32)
    tasks, groups, numbers = isas.kernels("paged", precision, isa).plan(t_q, H, L, True, lens)
    o_lat, lse = np.empty((t_q, H, L), out.dtype), np.empty((t_q, H), out.dtype)
    counters = np.zeros(1 + groups, np.int64)
    pools = np.empty((min(used + 1, groups) if numbers else 1, max(numbers, 1)), out.dtype)
    pool.run(
        lambda: kernels.attend(q, c_kv, k_pe, scale, o_lat, lse, counters, pools), min(used, max(tasks, 1))
    )

    counter = np.zeros(1, np.int64)
    pool.run(lambda: kernels.up_project(o_lat, w_uv, out, counter), min(used, H))
