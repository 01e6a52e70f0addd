# SPDX-License-Identifier: Apache-2.0
"""Layouts of rows, queries and LSE as engines have them, to the canonical ones and back. No arithmetic but the unit of
an LSE; views wherever the memory allows one. Layouts of whole caches: cache_layouts.py.

    canonical   q [B, T, H, D], [B, H, D] or [N, H, D] with qo_indptr    lse [B, T, H], [B, H] or [N, H]

A row of D is the latent part and then the rope part ("latent_first") or the other way round ("rope_first"); parts are
named by the order. Every contradiction is an InputError that names the argument.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .. import dtypes
from ..arrays import Array, Axes, address, as_array, dtype_name
from ..checks import choice, number
from ..errors import InputError
from ..geometry import check_integer

ORDERS = ("latent_first", "rope_first")
LSE_AXES = ("BTH", "BHT", "NH", "HN")


def join(latent: object, rope: object, *, order: str = "latent_first") -> Array:
    """One array [..., L + R] of latent [..., L] and rope [..., R]: the array both are slices of, else a new one.

    Queries: q_nope [T, H, 512] and q_pe [T, H, 64] of FlashInfer's BatchMLAPagedAttentionWrapper (flashinfer/mla/
    _core.py); rope_first is ik_llama.cpp and old llama.cpp. Caches: ckv_cache and kpe_cache of the same wrapper, which
    may be slices of one tensor. R may be 0.
    """
    parts = {"latent": as_array("latent", latent), "rope": as_array("rope", rope)}
    names = ("latent", "rope") if choice("order", order, ORDERS) == "latent_first" else ("rope", "latent")
    first, second = (parts[name] for name in names)
    kinds = [dtype_name(name, part) for name, part in parts.items()]
    if kinds[0] != kinds[1]:
        raise InputError(f"rope is {kinds[1]}, expected {kinds[0]} as latent is")
    if first.ndim == 0 or first.shape[:-1] != second.shape[:-1]:
        latent_shape, rope_shape = (list(part.shape) for part in parts.values())
        raise InputError(f"rope is {rope_shape}, expected {[*latent_shape[:-1], 'R']} as latent is {latent_shape}")
    if second.shape[-1] == 0 or first.shape[-1] == 0:
        return first if second.shape[-1] == 0 else second
    if _adjacent(first, second):
        joined = (*first.shape[:-1], first.shape[-1] + second.shape[-1])
        return as_strided(first, joined, (*first.strides[:-1], first.itemsize))
    return np.concatenate([first, second], axis=-1)


def split(rows: object, latent: int, *, order: str = "latent_first") -> tuple[Array, Array]:
    """(latent [..., L], rope [..., D - L]) of rows [..., D]: views. `latent` is L."""
    array = as_array("rows", rows)
    latent = check_integer("latent", latent, least=0)
    if array.ndim == 0 or latent > array.shape[-1]:
        raise InputError(f"latent is {latent}, expected at most the last axis of rows {list(array.shape)}")
    if choice("order", order, ORDERS) == "latent_first":
        return array[..., :latent], array[..., latent:]
    cut = array.shape[-1] - latent
    return array[..., cut:], array[..., :cut]


def unfold_heads(q: object, num_heads: int) -> Array:
    """q [..., H, D] of q [..., H * D]: a view. TensorRT-LLM: fused_q [N, H * 576] (test_attention_mla.py)."""
    array = as_array("q", q)
    num_heads = check_integer("num_heads", num_heads, least=1)
    if array.ndim == 0 or array.shape[-1] % num_heads:
        raise InputError(f"q is {list(array.shape)}, expected a last axis that {num_heads} heads divide")
    return array.reshape(*array.shape[:-1], num_heads, array.shape[-1] // num_heads)


def fold_heads(q: object) -> Array:
    """q [..., H * D] of q [..., H, D], the other way round: a view where the heads of a token are adjacent."""
    array = as_array("q", q)
    if array.ndim < 2:
        raise InputError(f"q is {list(array.shape)}, expected [..., H, D]")
    return array.reshape(*array.shape[:-2], array.shape[-2] * array.shape[-1])


def ragged(q: object) -> tuple[Array, Array]:
    """(q [B * T, H, D], qo_indptr [B + 1] i32) of q [B, T, H, D]: a view where it can be one."""
    array = as_array("q", q)
    if array.ndim != 4:
        raise InputError(f"q has {array.ndim} axes {list(array.shape)}, expected [B, T, H, D]")
    B, T = array.shape[:2]
    return array.reshape(B * T, *array.shape[2:]), np.arange(B + 1, dtype=np.int32) * np.int32(T)


def batched(q: object, qo_indptr: object) -> Array:
    """q [B, T, H, D] of q [N, H, D] with qo_indptr [B + 1] where every request has T tokens: a view.

    FlashInfer: qo_indptr, or cum_seq_lens_q of trtllm-gen. aiter: qo_indptr (aiter/mla.py).
    """
    axes = Axes()
    array = axes.take("q", q, "N H D", tuple(dtypes.TAGS))
    starts = axes.take("qo_indptr", qo_indptr, "B+1", ("i32", "i64")).astype(np.int64)
    B = len(starts) - 1
    T = len(array) // B if B > 0 else 0
    for b in np.flatnonzero(starts != np.arange(B + 1) * T)[:1]:
        raise InputError(f"qo_indptr[{b}] is {starts[b]}, expected {b * T}: {T} tokens for each of {B} requests")
    if B < 1 or len(array) != B * T:
        raise InputError(f"qo_indptr has {B} requests, expected a number that divides the {len(array)} tokens of q")
    return array.reshape(B, T, *array.shape[1:])


def lse_to_canonical(lse: object, axes: str, *, tokens: int | None = None) -> Array:
    """lse as [B, T, H]: from "BTH", from "BHT", or from tokens in a row, "NH" or "HN", T = `tokens` a request (None:
    they stay [N, H], as of ragged queries). A view.

    [B, H, T]: FlashMLA, dense and sparse decode. [N, H]: FlashMLA's sparse prefill (flash_mla_interface.py), FlashInfer
    (flashinfer/mla/_core.py), aiter (aiter/mla.py). [B, T, H]: FlashInfer's cute-dsl.
    """
    array = _lse(lse, axes)
    if axes in ("BTH", "NH") and tokens is None:
        return array
    if axes == "BHT":
        return array.transpose(0, 2, 1)
    rows = array.T if axes == "HN" else array
    if tokens is None or axes == "BTH":
        return rows
    tokens = check_integer("tokens", tokens, least=1)
    if len(rows) % tokens:
        raise InputError(f"lse has {len(rows)} tokens, expected a multiple of {tokens}")
    return rows.reshape(len(rows) // tokens, tokens, rows.shape[1])


def lse_from_canonical(lse: object, axes: str) -> Array:
    """lse [B, T, H], or [N, H] for "NH" and "HN", in the order `axes`: a view where it can be one."""
    array = as_array("lse", lse)
    rows = array.reshape(-1, array.shape[-1]) if axes in ("NH", "HN") and array.ndim == 3 else array
    turned = {"BHT": rows.transpose(0, 2, 1) if rows.ndim == 3 else rows, "HN": rows.T}.get(axes, rows)
    return _lse(turned, axes)


def lse_in_base(lse: object, *, given: str, wanted: str, empty_lse: float = -math.inf) -> Array:
    """lse in base `given` ("e" or "2") in base `wanted`, computed in f64, in its own dtype.

    What is `empty_lse`, a sentinel such as -1e30, stays.
    """
    array = as_array("lse", lse)
    if dtype_name("lse", array) not in ("f32", "f64"):
        raise InputError(f"lse is {array.dtype}, expected f32 or f64")
    empty = array.dtype.type(number("empty_lse", empty_lse))
    if choice("given", given, ("e", "2")) == choice("wanted", wanted, ("e", "2")):
        return array
    unit = math.log2(math.e) if wanted == "2" else math.log(2)
    with np.errstate(over="ignore"):
        return np.where(array == empty, array, (array * np.float64(unit)).astype(array.dtype))


def _lse(lse: object, axes: str) -> Array:
    choice("axes", axes, LSE_AXES)
    return Axes().take("lse", lse, " ".join(axes), ("f64", "f32", "f16", "bf16"))


def _adjacent(first: Array, second: Array) -> bool:
    """Whether the rows of `second` follow those of `first` in the memory of one array."""
    if first.size == 0 or first.strides[:-1] != second.strides[:-1]:
        return False
    if any(a.shape[-1] > 1 and a.strides[-1] != a.itemsize for a in (first, second)):
        return False
    width = first.shape[-1] * first.itemsize
    if address(second) - address(first) != width:
        return False
    return _owner(first) is _owner(second)


def _owner(array: Array) -> object:
    """Who holds the memory of `array`."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if array.base is None else array.base
