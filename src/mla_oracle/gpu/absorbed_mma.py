# SPDX-License-Identifier: Apache-2.0
"""The absorbed form on tensor cores: the query absorbed, decoded as one request of paged rows, projected up.

Everything stored is f16 or everything bf16; what lies between is rounded to that, as engines do. Bounds: eps = 2^-23,
u = 2^-8 of bf16 or 2^-11 of f16, for truncating additions too (see gpu.paged).
"""

from __future__ import annotations

import numpy as np

from mla_oracle import dtypes
from mla_oracle.arrays import Array
from mla_oracle.checks import choice
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.gpu import paged, paged_mma
from mla_oracle.gpu.layout import few, name_of, packed, put, strides
from mla_oracle.gpu.machine import Buffer, Machine

FLOATS = ("f16", "bf16")
FILE = "absorbed_mma.cu"
ROWS, COLUMNS, THREADS = 64, 64, 128  # of a block, as in FILE
ALIGNED = 8  # elements of a copy of 16 bytes
BLOCK = 64  # rows of a page of the cache that `attend` lays out
NAMES = ("q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv")


def kernel_of(arrays: tuple[Buffer | Array, ...], arch: str, kernel: str | None = None) -> str:
    """Who attends to these six on `arch`: "absorbed_mma_bf16", `attend` here, or gpu.dense's "absorbed_attend_f32".

    None is tensor cores where they take the problem; numpy arrays stand for their uploads. Raises UnsupportedError for
    a kernel that was named and does not take it, InputError for no such name.
    """
    choice("kernel", kernel or "mma", paged.KERNELS)
    if kernel == "wgmma":
        raise UnsupportedError("kernel 'wgmma' does not take this problem: it is the paged form's alone")
    if kernel != "scalar":
        reason = refusal(arrays, arch)
        if reason is None:
            return f"absorbed_mma_{dtypes.name_of(arrays[0].dtype)}"
        if kernel:
            raise UnsupportedError(f"kernel 'mma' does not take this problem: {reason}")
    alike = all(dtypes.name_of(array.dtype) == "bf16" for array in arrays)
    return f"absorbed_attend_{'bf16' if alike else 'f32'}"


def refusal(arrays: tuple[Buffer | Array, ...], arch: str) -> str | None:
    """Why `attend` does not take these six on `arch`, or None. Numpy arrays stand for their uploads."""
    first = dtypes.name_of(arrays[0].dtype)
    for name, array in zip(NAMES, arrays, strict=True):
        if (stored := dtypes.name_of(array.dtype)) not in FLOATS or stored != first:
            beside = "" if name == "q_nope" else f" and {name} {stored}"
            return f"q_nope is {first}{beside}, expected all f16 or all bf16"
    q_nope, q_pe, c_kv, _, w_uk, w_uv = arrays
    L, R, V = c_kv.shape[1], q_pe.shape[2], w_uv.shape[1]
    for name, size in (("kv_lora_rank", L), ("qk_rope_head_dim", R)):
        if size % (2 * ALIGNED):
            return f"{name} is {size}, expected a multiple of {2 * ALIGNED}"
    if V % 2:
        return f"v_head_dim is {V}, tensor cores take even ones"
    if reason := paged_mma.too_wide(L + R, L, arch):
        return reason
    copied = {"q_nope": q_nope, "q_pe": q_pe, "w_uk": w_uk, "w_uv": w_uv}
    return next(filter(None, (_apart(name, array) for name, array in copied.items())), None)


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

    Rounded to the arrays' dtype, whose unit is u, are the query q = [w_uk^T q_nope | q_pe], the weights of paged decode
    and o_lat; products are exact and sums f32. With size = max over rows of (|q_nope| . |k_nope| + |q_pe| . |k_pe|) *
    |scale|, |c| and |w_uv| taken number by number, and `latent` the bound of out in gpu.paged on tensor cores, for rows
    of L + R elements, the result differs from strict f64's over the same stored numbers by at most

        shift = (u + 1.1 P eps) size + (2^-25 max |c|_1 |scale| if f16)
        o_lat = latent + (expm1(2 shift) + u + 1.1 L eps) (sum p |c| / sum p) + (2^-25 if f16)
        out:    |w_uv| . o_lat

    shift: of a score, by the query's products, sum and rounding, the 2^-25 where that is below f16's normal numbers;
    expm1: what weights, and their sum, then are off by; u, 2^-25 and 1.1 L eps: the rounding of o_lat and the sum of
    its projection. Of f16, q_lat must be finite in it: beyond 65504 its rows are NaN.

    Scratch: t_q x H x (3 L + R) numbers, and the t_kv rows joined. Raises UnsupportedError for a problem with a
    `refusal`, InputError for arrays that do not fit one another.
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
        if reason := _apart(name, array):
            raise UnsupportedError(reason)
        found += outer
    return found


def _apart(name: str, array: Buffer | Array) -> str | None:
    """Why 16-byte copies cannot follow `array`, or None."""
    if 0 in array.shape:
        return None
    outer = (("a stride", stride // array.dtype.itemsize) for stride in array.strides[:-1])
    for what, size in (("a width", array.shape[-1]), *outer):
        if size % ALIGNED:
            return f"{name} has {what} of {size} elements, tensor cores take multiples of {ALIGNED}"
    if isinstance(array, Buffer) and array.pointer % (2 * ALIGNED):
        return f"{name} begins at address {array.pointer:#x}, tensor cores take multiples of {2 * ALIGNED}"
    return None
