# SPDX-License-Identifier: Apache-2.0
"""The dense forms on a machine: what the strict kernels take, and the same outputs.

Bounds, with eps = 2^-23 and tiny = 2^-126. For a query and head that sees n rows, of weights p: |k_nope| and |v| are
k_nope and v with every number of the products that make them taken by its size, size = max over rows of
(|q_nope| . |k_nope| + |q_pe| . |k_pe|) * |scale| (which must be finite in f32, and no product that makes it below
tiny, but 0). The result differs from strict f64's by at most

    naive:     relative = eps * ((L/32 + (P + R)/32 + 24) * size + n + L/32 + 40)
    absorbed:  relative = eps * ((P + (L + R)/32 + 24) * size + n + L/32 + 40)
    out:       relative * (sum p |v| / sum p) + n * tiny * (1 + max |v| + (1 + max |c|) * sum |w_uv[j]|)

/32: a lane's products, the sum over the lanes being in the constants; P: absorb_query adds in sequence; n: the sums
over rows; L/32: the values of naive, the projection of absorbed. Dtypes are widened exactly, and add nothing.
"""

from __future__ import annotations

import numpy as np

from mla_oracle.errors import InputError
from mla_oracle.gpu.layout import THREADS, few, name_of, narrow, packed, strides
from mla_oracle.gpu.machine import Buffer, Machine

ABSORBED = ("f32", "bf16")


def attend_naive(
    machine: Machine,
    q_nope: Buffer,
    q_pe: Buffer,
    c_kv: Buffer,
    k_pe: Buffer,
    w_uk: Buffer,
    w_uv: Buffer,
    scale: float,
    out: Buffer,
) -> None:
    """Fill `out` [t_q, H, V]; the queries are the last t_q rows of the cache. All f32.

    q_nope [t_q, H, P], q_pe [t_q, H, R], c_kv [t_kv, L], k_pe [t_kv, R], w_uk [H, P, L], w_uv [H, V, L], any outer
    strides of whole elements. Scratch: H x t_kv x (P + V) numbers. Raises InputError, UnsupportedError.
    """
    t_q, H, P, R, V, t_kv, L = _sizes(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, out)
    narrow(qk_head_dim=P + R, v_head_dim=V)
    q_strides = strides("q_nope", q_nope, "f32") + strides("q_pe", q_pe, "f32")
    c_strides, k_strides = strides("c_kv", c_kv, "f32"), strides("k_pe", k_pe, "f32")
    if 0 in out.shape:
        return

    halves = []
    for name, w, width in (("w_uk", w_uk, P), ("w_uv", w_uv, V)):
        half = machine.empty((H, t_kv, width), np.float32)
        machine.launch(
            machine.kernel("naive.cu", "naive_decompress_f32"),
            (t_kv, H, 1),
            (THREADS, 1, 1),
            0,
            c_kv,
            w,
            half,
            np.int32(width),
            np.int32(L),
            *c_strides,
            *strides(name, w, "f32"),
        )
        halves.append(half)
    k_nope, v = halves
    machine.launch(
        machine.kernel("naive.cu", "naive_attend_f32"),
        (t_q, H, 1),
        (THREADS, 1, 1),
        4 * (P + R + V),
        q_nope,
        q_pe,
        k_nope,
        k_pe,
        v,
        np.float32(scale),
        out,
        *map(np.int32, (t_kv, P, R, V)),
        *q_strides,
        *k_strides,
    )


def attend_absorbed(
    machine: Machine,
    q_nope: Buffer,
    q_pe: Buffer,
    c_kv: Buffer,
    k_pe: Buffer,
    w_uk: Buffer,
    w_uv: Buffer,
    scale: float,
    out: Buffer,
) -> None:
    """Fill `out` [t_q, H, V], f32; the arguments as in `attend_naive`, all f32 or all bf16.

    Scratch: 2 x t_q x H x L numbers.
    """
    t_q, H, _, R, _, t_kv, L = _sizes(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, out)
    narrow(latent_dim=L + R)
    dtype = name_of("q_nope", q_nope, *ABSORBED)
    cache_strides = strides("c_kv", c_kv, dtype) + strides("k_pe", k_pe, dtype)
    q_pe_strides = strides("q_pe", q_pe, dtype)
    if 0 in out.shape:
        return

    q_lat = machine.empty((t_q, H, L), np.float32)
    o_lat = machine.empty((t_q, H, L), np.float32)
    absorb_query(machine, q_nope, w_uk, q_lat)
    machine.launch(
        machine.kernel("absorbed.cu", f"absorbed_attend_{dtype}"),
        (t_q, H, 1),
        (THREADS, 1, 1),
        4 * (L + R + L),
        q_lat,
        q_pe,
        c_kv,
        k_pe,
        np.float32(scale),
        o_lat,
        *map(np.int32, (t_kv, L, R)),
        *q_pe_strides,
        *cache_strides,
    )
    up_project(machine, o_lat, w_uv, out)


def absorb_query(machine: Machine, q_nope: Buffer, w_uk: Buffer, q_lat: Buffer) -> None:
    """Fill `q_lat` [T, H, L], f32, of q_nope [T, H, P] and w_uk [H, P, L], both f32 or both bf16.

    Off by at most P eps (sum |q| |w|) + P tiny.
    """
    (T, H, P), L = q_nope.shape, w_uk.shape[2]
    few(H=H)
    dtype = name_of("q_nope", q_nope, *ABSORBED)
    q_strides, w_strides = strides("q_nope", q_nope, dtype), strides("w_uk", w_uk, dtype)
    packed("q_lat", q_lat, (T, H, L), "f32")
    if 0 in q_lat.shape:
        return
    machine.launch(
        machine.kernel("absorbed.cu", f"absorbed_query_{dtype}"),
        (T, H, -(-L // THREADS)),
        (THREADS, 1, 1),
        0,
        q_nope,
        w_uk,
        q_lat,
        np.int32(P),
        np.int32(L),
        *q_strides,
        *w_strides,
    )


def up_project(machine: Machine, o_lat: Buffer, w_uv: Buffer, out: Buffer) -> None:
    """Fill `out` [T, H, V], f32, of o_lat [T, H, L], f32 and contiguous, and w_uv [H, V, L], f32 or bf16.

    Off by at most (L/32 + 6) eps (sum |o| |w|) + L tiny.
    """
    (T, H, L), V = o_lat.shape, w_uv.shape[1]
    few(H=H)
    dtype = name_of("w_uv", w_uv, *ABSORBED)
    w_strides = strides("w_uv", w_uv, dtype)
    packed("o_lat", o_lat, (T, H, L), "f32")
    packed("out", out, (T, H, V), "f32")
    if 0 in out.shape:
        return
    machine.launch(
        machine.kernel("absorbed.cu", f"absorbed_project_{dtype}"),
        (T, H, 1),
        (THREADS, 1, 1),
        0,
        o_lat,
        w_uv,
        out,
        np.int32(L),
        np.int32(V),
        *w_strides,
    )


def _sizes(
    q_nope: Buffer, q_pe: Buffer, c_kv: Buffer, k_pe: Buffer, w_uk: Buffer, w_uv: Buffer, out: Buffer
) -> tuple[int, int, int, int, int, int, int]:
    """t_q, H, P, R, V, t_kv, L. Raises InputError for arrays that do not fit one another."""
    (t_q, H, P), R, (t_kv, L), V = q_nope.shape, q_pe.shape[2], c_kv.shape, w_uv.shape[1]
    for name, array, shape in (
        ("q_pe", q_pe, (t_q, H, R)),
        ("k_pe", k_pe, (t_kv, R)),
        ("w_uk", w_uk, (H, P, L)),
        ("w_uv", w_uv, (H, V, L)),
    ):
        if array.shape != shape:
            raise InputError(f"{name} is {list(array.shape)}, expected {list(shape)}")
    if t_q > t_kv:
        raise InputError(f"q_nope has {t_q} queries and c_kv {t_kv} rows, expected the queries to be its last rows")
    packed("out", out, (t_q, H, V), "f32")
    few(H=H)
    return t_q, H, P, R, V, t_kv, L
