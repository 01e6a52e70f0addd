# SPDX-License-Identifier: Apache-2.0
"""The absorbed form on tensor cores: the query absorbed, decoded as one request of paged rows, projected up.

Everything stored is f16 or everything bf16; what lies between is rounded to that, as engines do. Bounds: eps = 2^-23,
u = 2^-8 of bf16 or 2^-11 of f16, for truncating additions too (see gpu.paged).
"""

from __future__ import annotations

import numpy as np

from mla_oracle import dtypes
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.gpu import paged
from mla_oracle.gpu.layout import few, name_of, packed, put, strides
from mla_oracle.gpu.machine import Buffer, Machine

FLOATS = ("f16", "bf16")
FILE = "absorbed_mma.cu"
ROWS, COLUMNS, THREADS = 64, 64, 128  # of a block, as in FILE
ALIGNED = 8  # elements of a copy of 16 bytes
BLOCK = 64  # rows of a page of the cache that `attend` lays out


def attend(
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
    """Fill `out` [t_q, H, V], f32; the arguments as in gpu.dense.attend_absorbed, all f16 or all bf16.

    With size = max over rows of (|q_nope| . |k_nope| + |q_pe| . |k_pe|) * |scale|, relative and the bound of out being
    those of gpu.paged on tensor cores for rows of L + R elements, off by at most

        (|w_uv| . (its bound of o_lat)) + (expm1(2 (u + 1.1 P eps) size) + u + 1.1 L eps) * (|w_uv| . sum p |c| / sum p)

    Scratch: t_q x H x (3 L + R) numbers, and the t_kv rows joined. Raises UnsupportedError for widths or strides that
    are no multiples of 8 elements (L of 16), InputError for arrays that do not fit one another.
    """
    (t_q, H, _), R, (t_kv, L) = q_nope.shape, q_pe.shape[2], c_kv.shape
    stored = name_of("c_kv", c_kv, *FLOATS)
    if t_q > t_kv:
        raise InputError(f"q_nope has {t_q} queries and c_kv {t_kv} rows, expected the queries to be its last rows")
    packed("out", out, (t_q, H, w_uv.shape[1]), "f32")
    if 0 in out.shape:
        return
    kind = dtypes.dtype(stored)
    q = machine.empty((1, t_q, H, L + R), kind)
    absorb_query(machine, q_nope, q_pe, w_uk, Buffer(q.pointer, q.shape[1:], kind, q.strides[1:], q))

    from mla_oracle.gpu.forms import append

    pages = -(-t_kv // BLOCK)
    rows = machine.empty((pages, BLOCK, L + R), kind)
    append(machine, rows, c_kv, k_pe, put(machine, np.arange(t_kv, dtype=np.int64)))
    table = put(machine, np.arange(pages, dtype=np.int32)[None])
    lens = put(machine, np.array([t_kv], np.int32))
    o_lat, lse = machine.empty((1, t_q, H, L), np.float32), machine.empty((1, t_q, H), np.float32)
    paged.decode(machine, q, rows, table, lens, scale, True, 1.0, -np.inf, o_lat, lse, longest=t_kv, kernel="mma")
    up_project(machine, Buffer(o_lat.pointer, (t_q, H, L), o_lat.dtype, o_lat.strides[1:], o_lat), w_uv, out)


def absorb_query(machine: Machine, q_nope: Buffer, q_pe: Buffer, w_uk: Buffer, q: Buffer) -> None:
    """Fill q [T, H, L + R] with [w_uk^T q_nope | q_pe] of q_nope [T, H, P], q_pe [T, H, R] and w_uk [H, P, L].

    Off by at most (1.1 P eps + u) (sum |q| |w|). All of one dtype.
    """
    (T, H, P), R, L = q_nope.shape, q_pe.shape[2], w_uk.shape[2]
    few(H=H)
    arrays = {"q_nope": q_nope, "q_pe": q_pe, "w_uk": w_uk, "q": q}
    for name, shape in (("q_pe", (T, H, R)), ("w_uk", (H, P, L)), ("q", (T, H, L + R))):
        _fits(name, arrays[name], shape)
    far = _strides(arrays, name_of("q_nope", q_nope, *FLOATS))
    machine.launch(
        machine.kernel(FILE, f"absorbed_query_mma_{name_of('q', q, *FLOATS)}", ROWS=ROWS),
        (-(-T // ROWS), -(-L // COLUMNS), H),
        (THREADS, 1, 1),
        0,
        q_nope,
        q_pe,
        w_uk,
        q,
        *map(np.int32, (T, P, L, R)),
        *far,
    )


def up_project(machine: Machine, o_lat: Buffer, w_uv: Buffer, out: Buffer) -> None:
    """Fill out [T, H, V] with w_uv o_lat of o_lat [T, H, L] and w_uv [H, V, L].

    o_lat and out are f32 and contiguous. Off by at most (1.1 L eps + u) (sum |o| |w|).
    """
    (T, H, L), V = o_lat.shape, w_uv.shape[1]
    few(H=H)
    _fits("w_uv", w_uv, (H, V, L))
    packed("o_lat", o_lat, (T, H, L), "f32")
    packed("out", out, (T, H, V), "f32")
    far = _strides({"w_uv": w_uv}, name_of("w_uv", w_uv, *FLOATS))
    if V % 2:
        raise UnsupportedError(f"v_head_dim is {V}, tensor cores take even ones")
    machine.launch(
        machine.kernel(FILE, f"absorbed_project_mma_{dtypes.name_of(w_uv.dtype)}", ROWS=ROWS),
        (-(-T // ROWS), -(-V // COLUMNS), H),
        (THREADS, 1, 1),
        0,
        o_lat,
        w_uv,
        out,
        *map(np.int32, (T, H, L, V)),
        *far,
    )


def _fits(name: str, array: Buffer, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise InputError(f"{name} is {list(array.shape)}, expected {list(shape)}")


def _strides(arrays: dict[str, Buffer], dtype: str) -> list[np.int64]:
    """The outer strides of `arrays`, in elements. Raises UnsupportedError for what 16-byte copies cannot follow."""
    found = []
    for name, array in arrays.items():
        outer = strides(name, array, dtype)
        for what, size in (("a width", array.shape[-1]), *(("a stride", int(stride)) for stride in outer)):
            if size % ALIGNED:
                raise UnsupportedError(f"{name} has {what} of {size} elements, tensor cores take multiples of 8")
        if array.pointer % (2 * ALIGNED):
            raise UnsupportedError(f"{name} begins at address {array.pointer:#x}, tensor cores take multiples of 16")
        found += outer
    return found
