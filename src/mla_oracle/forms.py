# SPDX-License-Identifier: Apache-2.0
"""The forms of MLA attention: arguments checked here, computed by a backend.

    attend_naive     decompress the cache, then attend
    attend_absorbed  attend in the latent space; its two ends alone: absorb_query, up_project
    decode_paged     an absorbed query over a paged cache, online softmax, with LSE
    merge_states     join partial results by their LSE
    append_kv        write new rows into a paged cache

Precision "f32" is the documents' arithmetic, bit for bit; "f64" accumulates in double over the inputs as
stored and is the truth that errors are measured from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import dtypes
from .arrays import FLOATS, Array, Axes, as_array, bytes_of, dtype_name
from .errors import InputError
from .geometry import Geometry, show

LOG2E = 1.4426950408889634
DENSE_DTYPES = (*FLOATS, "f64")


class Attention(NamedTuple):
    """The output of a paged decode or a merge, and the log-sum-exp of its scaled scores."""

    out: Array
    lse: Array


def attend_naive(
    geometry: Geometry,
    q_nope: object,
    q_pe: object,
    c_kv: object,
    k_pe: object,
    w_uk: object,
    w_uv: object,
    *,
    softmax_scale: float | None = None,
    precision: str = "f32",
) -> Array:
    """Attention over keys and values decompressed from the latent cache.

    q_nope [t_q, H, P] and q_pe [t_q, H, R] (rope applied), c_kv [t_kv, L] (normed) and k_pe [t_kv, R]
    (rope applied), w_uk [H, P, L], w_uv [H, V, L]; f32, f16 or bf16, and f64 in precision "f64". R may be 0.
    The queries are the last t_q rows of the cache: query i sees rows 0 .. t_kv - t_q + i.
    `softmax_scale` None is 1/sqrt(P + R), times the geometry's YaRN mscale squared, in the precision asked for.

    Returns out [t_q, H, V], f32 or f64. Raises InputError.
    """
    from .reference import _naive

    return _attend(_naive.attend, geometry, q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, softmax_scale, precision)


def attend_absorbed(
    geometry: Geometry,
    q_nope: object,
    q_pe: object,
    c_kv: object,
    k_pe: object,
    w_uk: object,
    w_uv: object,
    *,
    softmax_scale: float | None = None,
    precision: str = "f32",
) -> Array:
    """The function of `attend_naive`, computed in the latent space: same arguments, same result up to rounding."""
    from .reference import _absorbed

    return _attend(_absorbed.attend, geometry, q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, softmax_scale, precision)


def _attend(
    kernel: Any,
    geometry: Geometry,
    q_nope: object,
    q_pe: object,
    c_kv: object,
    k_pe: object,
    w_uk: object,
    w_uv: object,
    softmax_scale: float | None,
    precision: str,
) -> Array:
    real, allowed = _precision(precision)
    if not isinstance(geometry, Geometry):
        raise InputError(f"geometry is {show(geometry)}, expected a Geometry")
    axes = Axes(
        H=geometry.num_heads,
        P=geometry.qk_nope_head_dim,
        R=geometry.qk_rope_head_dim,
        V=geometry.v_head_dim,
        L=geometry.kv_lora_rank,
    )
    arrays = [
        axes.take("q_nope", q_nope, "t_q H P", allowed),
        axes.take("q_pe", q_pe, "t_q H R", allowed),
        axes.take("c_kv", c_kv, "t_kv L", allowed),
        axes.take("k_pe", k_pe, "t_kv R", allowed),
        axes.take("w_uk", w_uk, "H P L", allowed),
        axes.take("w_uv", w_uv, "H V L", allowed),
    ]
    if axes["t_q"] > axes["t_kv"]:
        raise InputError(
            f"q_nope has {axes['t_q']} queries and c_kv {axes['t_kv']} rows, expected the queries to be its last rows"
        )
    if softmax_scale is None:
        scale = real(1) / np.sqrt(real(axes["P"] + axes["R"])) * real(geometry.softmax_mscale**2)
    else:
        scale = _scale(softmax_scale, precision)
    out = np.empty((axes["t_q"], axes["H"], axes["V"]), real)
    kernel(*(_widen(a, real) for a in arrays), float(scale), out)
    return out


def absorb_query(q_nope: object, w_uk: object, *, precision: str = "f32") -> Array:
    """q_lat[t, h] = w_uk[h]^T q_nope[t, h]: q_nope [T, H, P], w_uk [H, P, L] -> [T, H, L]."""
    from .reference import _absorbed

    real, allowed = _precision(precision)
    axes = Axes()
    q_nope = axes.take("q_nope", q_nope, "T H P", allowed)
    w_uk = axes.take("w_uk", w_uk, "H P L", allowed)
    q_lat = np.empty((axes["T"], axes["H"], axes["L"]), real)
    _absorbed.absorb_query(_widen(q_nope, real), _widen(w_uk, real), q_lat)
    return q_lat


def up_project(o_lat: object, w_uv: object, *, precision: str = "f32") -> Array:
    """out[t, h] = w_uv[h] o_lat[t, h]: o_lat [T, H, L], w_uv [H, V, L] -> [T, H, V]."""
    from .reference import _absorbed

    real, allowed = _precision(precision)
    axes = Axes()
    o_lat = axes.take("o_lat", o_lat, "T H L", allowed)
    w_uv = axes.take("w_uv", w_uv, "H V L", allowed)
    out = np.empty((axes["T"], axes["H"], axes["V"]), real)
    _absorbed.up_project(_widen(o_lat, real), _widen(w_uv, real), out)
    return out


def decode_paged(
    q: object,
    kv_cache: object,
    block_table: object,
    seq_lens: object,
    *,
    softmax_scale: float,
    head_dim_v: int,
    causal: bool = True,
    precision: str = "f32",
    backend: str = "auto",
    threads: int | None = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out_dtype: str | None = None,
) -> Attention:
    """Decode attention over a paged latent cache: key = the whole row, value = its first `head_dim_v` elements.

    q           [B, T, H, D], or [B, H, D] for T = 1
    kv_cache    [num_blocks, block_size, D]; any outer strides, innermost axis contiguous
    block_table [B, max_blocks] i32: request b's token j is row j % block_size of block block_table[b, j // block_size];
                entries past the request's length may hold anything
    seq_lens    [B] i32, cached tokens of each request, the T new ones included

    q and kv_cache are f32, f16 or bf16 (f64 too in precision "f64"), not necessarily the same.
    `causal` aligns bottom-right: query t of T sees the first seq_len - T + t + 1 tokens; a query that sees none
    is an empty row. An empty row has out 0 and lse `empty_lse`.
    `softmax_scale` has no default: the row's width does not tell the model's scale (see Geometry.softmax_scale).
    `lse_base` is "e" (lse = log sum exp) or "2". Outputs are f32, or f64 in precision "f64", unless `out_dtype`
    ("f32", "f16", "bf16", "f64") asks for a rounding of out.
    `threads` does not change a bit of the result.

    Precision "f64": a score of -inf has weight 0 and its value is not touched, a row of nothing else is an empty
    row, a visible NaN (or a score of +inf) makes out and lse NaN. Precision "f32" keeps the online recurrence's own
    non-finite cases: NaN out with lse `empty_lse`.

    Returns Attention(out [B, T, H, head_dim_v], lse [B, T, H]), without the T axis where q had none.
    Raises InputError for a bad argument.
    """
    from .reference import _paged

    _choice("backend", backend, ("auto", "strict"))
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise InputError(f"threads is {show(threads)}, expected a positive integer or None")
    if not isinstance(causal, (bool, np.bool_)):
        raise InputError(f"causal is {show(causal)}, expected True or False")
    if out_dtype is not None:
        _choice("out_dtype", out_dtype, dtypes.STORED)
    real, allowed = _precision(precision)
    q = as_array("q", q)
    has_tokens = q.ndim != 3
    axes = Axes()
    q = axes.take("q", q, "B T H D" if has_tokens else "B H D", allowed)
    kv_cache = axes.take("kv_cache", kv_cache, "num_blocks block_size D", allowed)
    block_table = axes.take("block_table", block_table, "B max_blocks", ("i32",))
    seq_lens = axes.take("seq_lens", seq_lens, "B", ("i32",))
    scale = _scale(softmax_scale, precision)
    head_dim_v = _head_dim_v(head_dim_v, axes["D"])
    unit = 1.0 if _choice("lse_base", lse_base, ("e", "2")) == "e" else LOG2E
    empty_lse = _number("empty_lse", empty_lse)
    _check_pages(block_table, seq_lens, axes["num_blocks"], axes["block_size"])

    q = q if has_tokens else q[:, None]
    out = np.empty((*q.shape[:3], head_dim_v), real)
    lse = np.empty(q.shape[:3], real)
    if out.size:
        _paged.decode(
            bytes_of("q", q),
            dtypes.STORED.index(dtypes.name_of(q.dtype)),
            bytes_of("kv_cache", kv_cache),
            dtypes.STORED.index(dtypes.name_of(kv_cache.dtype)),
            block_table,
            seq_lens,
            float(scale),
            bool(causal),
            unit,
            empty_lse,
            out,
            lse,
        )
    if out_dtype is not None:
        out = dtypes.round_to(out, out_dtype)
    return Attention(out, lse) if has_tokens else Attention(out[:, 0], lse[:, 0])


def merge_states(
    partial_out: object,
    partial_lse: object,
    *,
    precision: str = "f32",
    lse_base: str = "e",
    empty_lse: float = -math.inf,
) -> Attention:
    """Join S attention states over disjoint keys, in ascending order.

    partial_out [S, ..., V] and partial_lse [S, ...] of the same leading axes (or sequences of S arrays). A state
    is empty where its lse is -inf, +inf or `empty_lse` (as partial_lse's dtype stores it): its out may hold
    anything. Where every state is empty, the result is out 0 and lse `empty_lse`.

    Returns Attention(out [..., V], lse [...]). Raises InputError.
    """
    from .reference import _merge

    real, allowed = _precision(precision)
    partial_out = _stack("partial_out", partial_out)
    partial_lse = _stack("partial_lse", partial_lse)
    if partial_out.ndim < 2 or partial_out.shape[:-1] != partial_lse.shape:
        raise InputError(
            f"partial_lse is {list(partial_lse.shape)}, expected [S, ...] with partial_out [S, ..., V],"
            f" which is {list(partial_out.shape)}"
        )
    for name, array in (("partial_out", partial_out), ("partial_lse", partial_lse)):
        if (kind := dtype_name(name, array)) not in allowed:
            raise InputError(f"{name} is {kind}, expected {' or '.join(allowed)}")
    empty_lse = _number("empty_lse", empty_lse)
    with np.errstate(over="ignore"):
        marker = float(np.array(empty_lse).astype(partial_lse.dtype))
    states, *rows, width = partial_out.shape
    count = math.prod(rows)
    out = np.empty((count, width), real)
    lse = np.empty(count, real)
    _merge.merge(
        _widen(partial_out, real).reshape(states, count, width),
        _widen(partial_lse, real).reshape(states, count),
        math.log(2) if _choice("lse_base", lse_base, ("e", "2")) == "2" else 1.0,
        marker,
        empty_lse,
        out,
        lse,
    )
    return Attention(out.reshape(*rows, width), lse.reshape(rows))


def append_kv(kv_cache: object, c_kv: object, k_pe: object, slot_mapping: object) -> None:
    """Write new rows [c_kv | k_pe] into `kv_cache`, in place, bit for bit.

    kv_cache [num_blocks, block_size, L + R]; c_kv [T, L] and k_pe [T, R] of the same dtype, R may be 0;
    slot_mapping [n] i64 with n <= T: row t goes to slot block * block_size + offset, a negative slot skips the row,
    rows beyond n are padding and are not written. Nothing is written unless everything is valid.
    """
    axes = Axes()
    kv_cache = axes.take("kv_cache", kv_cache, "num_blocks block_size D", FLOATS)
    same = (dtypes.name_of(kv_cache.dtype),)
    c_kv = axes.take("c_kv", c_kv, "T L", same)
    k_pe = axes.take("k_pe", k_pe, "T R", same)
    slots = axes.take("slot_mapping", slot_mapping, "n", ("i64",))
    if axes["L"] + axes["R"] != axes["D"]:
        raise InputError(
            f"kv_cache rows are {axes['D']} wide, expected c_kv's {axes['L']} + k_pe's {axes['R']} elements"
        )
    if axes["n"] > axes["T"]:
        raise InputError(f"slot_mapping has {axes['n']} entries, expected at most c_kv's {axes['T']} rows")
    if not kv_cache.flags.writeable:
        raise InputError("kv_cache is read-only, expected an array to write into")
    capacity = axes["num_blocks"] * axes["block_size"]
    (rows,) = np.nonzero(slots >= 0)
    for t in rows[slots[rows] >= capacity][:1]:
        raise InputError(f"slot_mapping[{t}] is {slots[t]}, expected below {capacity}, the slots of kv_cache")
    order = rows[np.argsort(slots[rows], kind="stable")]
    for t, u in itertools.pairwise(order):
        if slots[t] == slots[u]:
            raise InputError(f"slot_mapping[{u}] is {slots[u]}, which slot_mapping[{t}] already is")
    block, offset = np.divmod(slots[rows], axes["block_size"] or 1)
    kv_cache[block, offset] = np.concatenate([c_kv[rows], k_pe[rows]], axis=1)


def _precision(precision: str) -> tuple[Any, tuple[str, ...]]:
    if _choice("precision", precision, ("f32", "f64")) == "f32":
        return np.float32, FLOATS
    return np.float64, DENSE_DTYPES


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} is {show(value)}, expected {' or '.join(choices)}")
    return value


def _widen(array: Array, real: Any) -> Array:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return array.astype(real, copy=False)


def _number(name: str, value: object) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise InputError(f"{name} is {show(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name} is {show(value)}, expected a number") from None


def _scale(softmax_scale: object, precision: str) -> float:
    scale = _number("softmax_scale", softmax_scale)
    if precision == "f32" and abs(scale) < np.inf:
        with np.errstate(over="ignore"):
            scale = float(np.float32(scale))
    if not 0 < scale < math.inf:
        raise InputError(f"softmax_scale is {softmax_scale}, expected a positive finite number")
    return scale


def _head_dim_v(head_dim_v: object, width: int) -> int:
    if isinstance(head_dim_v, bool) or not isinstance(head_dim_v, (int, np.integer)):
        raise InputError(f"head_dim_v is {show(head_dim_v)}, expected an integer")
    if not 1 <= head_dim_v <= width:
        raise InputError(
            f"head_dim_v is {show(int(head_dim_v))}, expected 1 to {width}, the width of a kv_cache row"
        )
    return int(head_dim_v)


def _stack(name: str, states: object) -> Array:
    if isinstance(states, Sequence):
        arrays = [as_array(f"{name}[{s}]", state) for s, state in enumerate(states)]
        for s, array in enumerate(arrays):
            if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
                raise InputError(
                    f"{name}[{s}] is {array.dtype} {list(array.shape)}, expected {name}[0]'s"
                    f" {arrays[0].dtype} {list(arrays[0].shape)}"
                )
        if not arrays:
            raise InputError(f"{name} has no state, expected one or more")
        return np.stack(arrays)
    return as_array(name, states)


def _check_pages(block_table: Array, seq_lens: Array, num_blocks: int, block_size: int) -> None:
    """Every length is in its table's reach, every block id within a length is in the cache."""
    if block_size == 0:
        raise InputError("kv_cache has block_size 0, expected 1 or more")
    for b in np.flatnonzero(seq_lens < 0)[:1]:
        raise InputError(f"seq_lens[{b}] is {seq_lens[b]}, expected 0 or more")
    max_blocks = block_table.shape[1]
    used = -(-seq_lens.astype(np.int64) // block_size)  # [B] blocks of each request
    for b in np.flatnonzero(used > max_blocks)[:1]:
        raise InputError(
            f"seq_lens[{b}] is {seq_lens[b]}, expected at most {max_blocks * block_size}:"
            f" block_table has {max_blocks} blocks of {block_size} a request"
        )
    bad = (np.arange(max_blocks) < used[:, None]) & ((block_table < 0) | (block_table >= num_blocks))
    for b, slot in np.argwhere(bad)[:1]:
        raise InputError(
            f"block_table[{b}, {slot}] is {block_table[b, slot]}, expected 0 to {num_blocks - 1}:"
            f" seq_lens[{b}] is {seq_lens[b]}, and kv_cache has {num_blocks} blocks"
        )
