# SPDX-License-Identifier: Apache-2.0
"""The absorbed form on the fast tier: `attend` takes what the strict kernel takes, as stored, and how many threads.

The bits depend on the instruction set, never on the threads; they are those of inputs widened beforehand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_oracle import dtypes
from mla_oracle.arrays import bytes_of
from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads as pool

Array = NDArray[Any]


def stored(x: Array) -> tuple[Array, int]:
    """`x` as bytes and its `reference._common.Stored`; a copy only where its last axis is not contiguous."""
    if x.strides[-1] != x.itemsize:
        x = np.ascontiguousarray(x)
    return bytes_of("", x), dtypes.STORED.index(dtypes.name_of(x.dtype))


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
    queries are the last t_q rows of the cache. Arrays are read as they are stored, and widened by tile.

    Memory beyond `out`, whatever t_kv: the queries and outputs in the latent space, t_q x H x (2 L + R + 1) numbers;
    and for each thread the scratch of `paged`, about 128 x (2 D + L) numbers with D = L + R (1 MB in f32 for
    DeepSeek's widths), and a pool of partial states of 2048 x (L + 2) (4 MB), for one thread more than there are.
    An array whose last axis is not contiguous is copied, as stored.
    """
    precision = "f64" if out.dtype == np.float64 else "f32"
    kernels = isas.kernels("absorbed", precision, isa)
    t_q, H, _ = q_nope.shape
    t_kv, L = c_kv.shape
    used = pool.count(threads)

    q = np.empty((t_q, H, L + q_pe.shape[2]), out.dtype)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        q[..., L:] = q_pe
    query, up, down = stored(q_nope), stored(w_uk), stored(w_uv)
    counter = np.zeros(1, np.int64)
    pool.run(lambda: kernels.absorb_query(*query, *up, q[..., :L], counter), min(used, H))

    lens = np.array([t_kv], np.int32)
    tasks, groups, numbers = isas.kernels("paged", precision, isa).plan(t_q, H, L, True, lens)
    o_lat, lse = np.empty((t_q, H, L), out.dtype), np.empty((t_q, H), out.dtype)
    counters = np.zeros(1 + groups, np.int64)
    pools = np.empty((min(used + 1, groups) if numbers else 1, max(numbers, 1)), out.dtype)
    cache = *stored(c_kv), *stored(k_pe)
    pool.run(lambda: kernels.attend(q, *cache, scale, o_lat, lse, counters, pools), min(used, max(tasks, 1)))

    counter = np.zeros(1, np.int64)
    pool.run(lambda: kernels.up_project(o_lat, *down, out, counter), min(used, H))
