# SPDX-License-Identifier: Apache-2.0
"""Every form on a machine, by the name of its strict kernel; the smaller ones are here.

    decode_paged    attend_naive    attend_absorbed (absorb_query, up_project)    rope    append    merge

Each takes buffers of the machine (layout.put makes one of a numpy array), fills its outputs, and waits for nothing.
The functions' docstrings bound what they miss strict f64 by, eps = 2^-23 and tiny = 2^-126.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mla_oracle.arrays import Array
from mla_oracle.errors import InputError
from mla_oracle.gpu.dense import absorb_query, attend_absorbed, attend_naive, up_project
from mla_oracle.gpu.layout import THREADS, few, name_of, packed, put, strides
from mla_oracle.gpu.machine import Buffer, Machine
from mla_oracle.gpu.paged import FLOATS, check_ids, pages_in_use
from mla_oracle.gpu.paged import decode as decode_paged

__all__ = [
    "absorb_query",
    "append",
    "attend_absorbed",
    "attend_naive",
    "check_ids",
    "decode_paged",
    "fill",
    "merge",
    "pages_in_use",
    "put",
    "rope",
    "rotate",
    "turn",
    "up_project",
]


def fill(
    form: Callable[..., object], machine: Machine, *args: Any, outputs: tuple[Array | Buffer, ...], **options: Any
) -> None:
    """Call `form` with numpy arrays for buffers: what it makes of its arguments is copied to those in `outputs`.

    Buffers are taken as they are; where all outputs are, nothing waits.
    """
    inputs = [put(machine, arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    results = [machine.empty(out.shape, out.dtype) if isinstance(out, np.ndarray) else out for out in outputs]
    form(machine, *inputs, *results, **options)
    for out, result in zip(outputs, results, strict=True):
        if isinstance(out, np.ndarray):
            out[...] = machine.download(result)


def rope(
    machine: Machine,
    x: Buffer,
    positions: Buffer,
    n: int,
    base: float,
    angles: int,
    kept: Buffer,
    factor: float,
    amplitude: float,
    neox: bool,
    out: Buffer,
) -> None:
    """Fill `out` [T, H, R] or [T, R]: `turn`, then `rotate`. Scratch: T x n numbers."""
    cosine, sine = (machine.empty((x.shape[0], n // 2), np.float32) for _ in range(2))
    turn(machine, positions, n, base, angles, kept, factor, amplitude, cosine, sine)
    rotate(machine, x, cosine, sine, neox, out)


def turn(
    machine: Machine,
    positions: Buffer,
    n: int,
    base: float,
    angles: int,
    kept: Buffer,
    factor: float,
    amplitude: float,
    cosine: Buffer,
    sine: Buffer,
) -> None:
    """Fill `cosine` and `sine` [T, n/2], f32, of positions [T] i64 and kept [n/2] f32: see reference/_rope.pyx.

    `angles` is an index of rope.ANGLES, but not of table, which the host makes in f64. For pair j, of the exact
    theta', they are off by at most

        amplitude * (|theta'| * eps * (5 (j + 3) + |ln base|) + 5 eps)

    powf within 4 ulp and a product for each of j steps (the other modes: once), -2/n and base rounded; 5: the mixing
    of YaRN, cosf and sinf within 2 ulp, the product with the amplitude.
    """
    (T,) = positions.shape
    packed("positions", positions, (T,), "i64")
    packed("kept", kept, (n // 2,), "f32")
    packed("cosine", cosine, (T, n // 2), "f32")
    packed("sine", sine, (T, n // 2), "f32")
    if 0 in cosine.shape:
        return
    machine.launch(
        machine.kernel("rope.cu", "rope_turn_f32"),
        (T, -(-(n // 2) // THREADS), 1),
        (THREADS, 1, 1),
        0,
        positions,
        np.int32(n),
        np.float32(base),
        np.int32(angles),
        kept,
        np.float32(factor),
        np.float32(amplitude),
        cosine,
        sine,
    )


def rotate(machine: Machine, x: Buffer, cosine: Buffer, sine: Buffer, neox: bool, out: Buffer) -> None:
    """Fill `out` [T, H, R], f32, with x [T, H, R], f32, f16 or bf16, its pairs turned by cosine and sine [T, n/2].

    Both may be [T, R].
    With a and b the elements of a pair and c the larger error of its cosine and sine (of a table: eps), off by at most
    (|a| + |b|) * (c + 2 eps amplitude) + tiny; an element beyond the pairs is exact.
    """
    (T, *heads, R), pairs = x.shape, cosine.shape[1]
    H = math.prod(heads)
    few(H=H)
    dtype = name_of("x", x, *FLOATS)
    x_strides = [*strides("x", x, dtype), np.int64(0)][:2]
    packed("cosine", cosine, (T, pairs), "f32")
    packed("sine", sine, (T, pairs), "f32")
    packed("out", out, x.shape, "f32")
    if 2 * pairs > R:
        raise InputError(f"cosine is {list(cosine.shape)}, expected at most {R // 2} pairs: x is {R} wide")
    if 0 in out.shape:
        return
    machine.launch(
        machine.kernel("rope.cu", f"rope_rotate_{dtype}"),
        (T, H, 1),
        (THREADS, 1, 1),
        0,
        x,
        cosine,
        sine,
        np.int32(neox),
        out,
        np.int32(pairs),
        np.int32(R),
        *x_strides,
    )


def append(machine: Machine, kv_cache: Buffer, c_kv: Buffer, k_pe: Buffer, slot_mapping: Buffer) -> None:
    """Write rows [c_kv | k_pe] to the slots of kv_cache [num_blocks, block_size, L + R] they map to, bit for bit.

    c_kv [T, L], k_pe [T, R], slot_mapping [n] i64, n <= T; a negative slot skips its row. Slots are taken as they are:
    below num_blocks * block_size, no two alike.
    """
    dtype = name_of("kv_cache", kv_cache, *FLOATS)
    (L, R), (n,), block_size = (c_kv.shape[1], k_pe.shape[1]), slot_mapping.shape, kv_cache.shape[1]
    rows = strides("c_kv", c_kv, dtype) + strides("k_pe", k_pe, dtype) + strides("kv_cache", kv_cache, dtype)
    packed("slot_mapping", slot_mapping, (n,), "i64")
    if kv_cache.shape[2] != L + R:
        raise InputError(f"kv_cache rows are {kv_cache.shape[2]} wide, expected c_kv's {L} + k_pe's {R} elements")
    if n > min(c_kv.shape[0], k_pe.shape[0]):
        raise InputError(f"slot_mapping has {n} entries, expected at most c_kv's {c_kv.shape[0]} rows")
    if n == 0 or L + R == 0:
        return
    machine.launch(
        machine.kernel("append.cu", f"append_rows_{dtype}"),
        (n, 1, 1),
        (THREADS, 1, 1),
        0,
        c_kv,
        k_pe,
        slot_mapping,
        kv_cache,
        *map(np.int32, (L, R, block_size)),
        *rows,
    )


def merge(
    machine: Machine,
    partial_out: Buffer,
    partial_lse: Buffer,
    unit: float,
    marker: float,
    empty_lse: float,
    out: Buffer,
    lse: Buffer,
) -> None:
    """Fill `out` [N, V] and `lse` [N] of partial_out [S, N, V] and partial_lse [S, N]: see reference/_merge.pyx.

    All f32 and contiguous, but partial_out may be f16 or bf16. A state whose lse is infinite or `marker` is empty:
    its out is not touched. With weights w and range = min(unit * max |lse[s] - max lse|, 104), beyond which a weight
    is below tiny, off by at most

        relative = eps * (2 range + S + 12)
        out:  relative * (sum w |out[s]| / sum w) + S * tiny * (1 + max |out[s]|)
        lse:  (relative + 3 eps log S) / unit + 2 eps |max lse|
    """
    S, N, V = partial_out.shape
    dtype = name_of("partial_out", partial_out, *FLOATS)
    packed("partial_out", partial_out, (S, N, V), dtype)
    packed("partial_lse", partial_lse, (S, N), "f32")
    packed("out", out, (N, V), "f32")
    packed("lse", lse, (N,), "f32")
    if N == 0:
        return
    machine.launch(
        machine.kernel("merge.cu", f"merge_states_{dtype}"),
        (N, 1, 1),
        (THREADS, 1, 1),
        0,
        partial_out,
        partial_lse,
        np.float32(unit),
        np.float32(marker),
        np.float32(empty_lse),
        out,
        lse,
        np.int32(S),
        np.int32(V),
    )
