# SPDX-License-Identifier: Apache-2.0
"""Launches of cuda/absorbed_mma.cu: the two ends of the absorbed form on tensor cores, contiguous arrays alone.

Depths and widths are multiples of 8, everything is f16 or everything bf16 but o_lat and out, which are f32.
"""

from __future__ import annotations

import numpy as np

from mla_oracle import dtypes
from mla_oracle.gpu.machine import Buffer, Machine

FILE = "absorbed_mma.cu"
ROWS, COLUMNS, THREADS = 64, 64, 128


def query(machine: Machine, q_nope: Buffer, q_pe: Buffer, w_uk: Buffer, q: Buffer) -> None:
    """Fill q [T, H, L + R] with [w_uk^T q_nope | q_pe] of q_nope [T, H, P], q_pe [T, H, R] and w_uk [H, P, L].

    Off by at most 1.1 P eps (sum |q| |w|) and the rounding to q's dtype.
    """
    (T, H, P), R, L = q_nope.shape, q_pe.shape[2], w_uk.shape[2]
    kernel = machine.kernel(FILE, f"absorbed_query_mma_{dtypes.name_of(q.dtype)}")
    strides = (H * P, P, H * R, R, P * L, L, H * (L + R), L + R)
    sizes = map(np.int32, (T, P, L, R))
    grid = (-(-T // ROWS), -(-L // COLUMNS), H)
    machine.launch(kernel, grid, (THREADS, 1, 1), 0, q_nope, q_pe, w_uk, q, *sizes, *map(np.int64, strides))


def project(machine: Machine, o_lat: Buffer, w_uv: Buffer, out: Buffer) -> None:
    """Fill out [T, H, V] with w_uv o_lat of o_lat [T, H, L] and w_uv [H, V, L].

    Off by at most (1.1 L eps + the rounding of o_lat to w_uv's dtype) (sum |o| |w|).
    """
    (T, H, L), V = o_lat.shape, w_uv.shape[1]
    kernel = machine.kernel(FILE, f"absorbed_project_mma_{dtypes.name_of(w_uv.dtype)}")
    grid = (-(-T // ROWS), -(-V // COLUMNS), H)
    sizes = map(np.int32, (T, H, L, V))
    machine.launch(kernel, grid, (THREADS, 1, 1), 0, o_lat, w_uv, out, *sizes, np.int64(V * L), np.int64(L))
