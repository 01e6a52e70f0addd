# SPDX-License-Identifier: Apache-2.0
"""Paged decode on the fast tier where each query has a list of rows: top-k, windows, several caches, packed rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mla_oracle.fast import isa as isas
from mla_oracle.fast import threads as pool
from mla_oracle.fast.paged import on_cache_lines

Array = NDArray[Any]
STORED_BF16 = 2  # reference._common.Stored
CODES = 100  # rest_dtype of a row whose rest is codes too
NONE = np.zeros(1, np.float32)


class Packing(NamedTuple):
    """How a packed row becomes numbers (see _unpack.pxd): codes in groups, each group with a scale, then the rest."""

    numbers: Array  # [256, per_byte] f32: what each byte of codes stands for
    group: int  # numbers that share a scale
    groups: int
    first: int = 0  # byte where the first group's codes start
    step: int = 0  # bytes between two groups
    scales: Array = NONE  # [256] f32: what a scale of one byte stands for
    scale_bytes: int = 0  # 1, 2 (f16), 4 (f32), or 0: there is none
    scale_at: Array = np.zeros(1, np.int32)  # [groups] bytes
    scales_apart: bool = False
    rule: int = 0  # 0 as stored, 1 rounded to bf16, 2 exponent only, 3 to zero
    factor: float = 1.0  # times code * scale
    to_bf16: bool = False  # products are rounded
    rest: int = 0  # byte where the other numbers start
    rest_dtype: int = STORED_BF16  # reference._common.Stored, or CODES
    rest_apart: bool = False
    rest_numbers: Array = NONE  # [256] f32
    rest_factor: float = 1.0  # times a code of the rest
    exact_in_bf16: bool = False  # every number is a bf16: on amx


def decode(
    q: Array,
    q_dtype: int,
    rows: Array,
    apart: Array | None,
    counts: Array,
    row_bytes: int,
    *,
    kv_dtype: int,
    packing: Packing | None,
    first_value: int,
    softmax_scale: float,
    softcap: float = 0.0,
    bias: Array | None = None,
    out: Array,
    lse: Array,
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Fill `out` [N, 1, H, V] and `lse` [N, 1, H]; f32 or f64 as `out` is; -inf and zeros where a query has no key.

    q      [N, 1, H, D] as bytes of the stored dtype, any strides but the innermost
    rows   [N, K] i64: the addresses of the `row_bytes` bytes of each query's keys; `counts` [N] i32 of them count
    apart  [N, K] i64: the addresses of what each row has elsewhere (its rope part, its scales); or None
    softcap  of the scores, 0: none
    bias   [N, K, 1], or [N, K, lanes] with those of the H heads first: what is added to each key's score, after the
           softcap; -inf skips the key. Of the dtype of `out`; lanes is a multiple of 16

    Key = the whole row, value = its V numbers from `first_value` on. Whoever calls keeps the caches alive.
    The bound is that of mla_oracle.fast.paged over the numbers that the rows stand for, with a softcap or a bias that
    of mla_oracle.canonical.decode. A capped score of an infinite row counts: its value makes out what the sums make it.
    """
    if out.size == 0:
        return
    _, _, H, V = out.shape
    if rows.shape[1] == 0:
        out[:], lse[:] = 0, -np.inf
        return
    tiles = kv_dtype == STORED_BF16 if packing is None else packing.exact_in_bf16
    tiles &= first_value % 32 == 0
    kernels = isas.kernels("paged", "f64" if out.dtype == np.float64 else "f32", isa, STORED_BF16 if tiles else None)
    tasks, groups, numbers = kernels.plan(1, H, V, False, counts)
    used = min(pool.count(threads), tasks) if tasks > 1 else 1
    counters = np.zeros(1 + groups, np.int64)
    pools = on_cache_lines(min(used + 1, groups), numbers, out.dtype) if numbers else np.empty((1, 16), out.dtype)
    elsewhere = np.empty((0, 0), np.int64) if apart is None else apart

    def work() -> None:
        kernels.decode_listed(
            q,
            q_dtype,
            rows,
            elsewhere,
            kv_dtype,
            row_bytes,
            packing,
            first_value,
            counts,
            softmax_scale,
            softcap,
            np.empty((0, 0, 0), out.dtype) if bias is None else bias,
            out,
            lse,
            counters,
            pools,
        )

    pool.run(work, used)
