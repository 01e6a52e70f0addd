# SPDX-License-Identifier: Apache-2.0
"""Which keys a query may see, as engines spell it: lists of positions or slots, and masks, to the canonical spelling.

    topk_indices   [B, T, K], or [B, K] for one query a request, or [N, K] with qo_indptr [B + 1]; i32 or i64
    topk_length    [B] or [B, T], or [N] with qo_indptr: what lies at and beyond it may be anything
    bias           as `PagedCase.bias`: -inf where a query does not see the key

A negative index is no key. A slot is block * block_size + offset, whoever owns the block. Dense rows without pages are
here too: their mask is all that tells lengths.
"""

from __future__ import annotations

import numpy as np

from ..arrays import FLOATS, Array, Axes, as_array, dtype_name
from ..checks import choice
from ..errors import InputError
from ..geometry import check_integer
from .entries import INTEGERS, canonical, counts_of
from .tables import Table

INDICES = ("i32", "i64")


def slots_of_positions(
    topk_indices: object,
    block_table: object,
    seq_lens: object,
    *,
    block_size: int,
    topk_length: object = None,
    qo_indptr: object = None,
    topk_outside: str = "error",
) -> Array:
    """topk_indices of token positions as physical slots, through the canonical table; what is no key becomes -1.

    A position at or above its request's length is refused, or becomes -1 where topk_outside is "skip". Shape and dtype
    stay. LMDeploy (backends/cuda/attention/sparse_mla.py), vLLM and SGLang do this before they call FlashMLA.
    """
    table, lens, _ = canonical(block_table, seq_lens, block_size)
    indices, request, listed = _selection(topk_indices, topk_length, qo_indptr, len(lens))
    outside = listed & (indices >= lens[request][:, None])
    if choice("topk_outside", topk_outside, ("error", "skip")) == "error":
        for r, k in np.argwhere(outside)[:1]:
            raise InputError(
                f"topk_indices{_index(topk_indices, r, k)} is {indices[r, k]},"
                f" expected below {lens[request[r]]}, the tokens of request {request[r]}"
            )
    is_key = listed & ~outside
    position = np.where(is_key, indices, 0)
    block = table[request[:, None], np.minimum(position // block_size, table.shape[1] - 1)] if table.size else position
    slots = np.where(is_key, block.astype(np.int64) * block_size + position % block_size, -1)
    given = as_array("topk_indices", topk_indices)
    for r, k in np.argwhere(slots > np.iinfo(given.dtype).max)[:1]:
        raise InputError(f"topk_indices{_index(given, r, k)} is slot {slots[r, k]}, expected i64 indices to hold it")
    return slots.astype(given.dtype).reshape(given.shape)


def positions_of_slots(
    topk_indices: object,
    block_table: object,
    seq_lens: object,
    *,
    block_size: int,
    topk_length: object = None,
    qo_indptr: object = None,
) -> Array:
    """topk_indices of physical slots as positions in their requests, the other way round; what is no key becomes -1.

    Every slot must be one of its request's, whose table must hold no block twice.
    """
    table, lens, used = canonical(block_table, seq_lens, block_size)
    indices, request, listed = _selection(topk_indices, topk_length, qo_indptr, len(lens))
    owner, entry = np.nonzero(used)
    stride = 1 + max(int(table[used].max(initial=0)), int(indices[listed].max(initial=0)) // block_size)
    codes = owner * stride + table[used]
    order = np.argsort(codes, kind="stable")
    for i in np.flatnonzero(np.diff(codes[order]) == 0)[:1]:
        b, one, other = owner[order[i]], entry[order[i]], entry[order[i + 1]]
        raise InputError(
            f"block_table[{b}, {other}] is {table[b, other]}, as block_table[{b}, {one}] is: slots have two positions"
        )
    wanted = request[:, None] * stride + np.where(listed, indices, 0) // block_size
    found = np.searchsorted(codes, wanted, sorter=order)
    at = order[np.minimum(found, len(order) - 1)] if len(order) else np.zeros_like(found)
    held = codes[at] == wanted if len(order) else np.zeros(wanted.shape, bool)
    position = (entry[at] if len(order) else at) * block_size + np.where(listed, indices, 0) % block_size
    for r, k in np.argwhere(listed & ~(held & (position < lens[request][:, None])))[:1]:
        raise InputError(
            f"topk_indices{_index(topk_indices, r, k)} is {indices[r, k]},"
            f" expected a slot of a token of request {request[r]}"
        )
    given = as_array("topk_indices", topk_indices)
    return np.where(listed, position, -1).astype(given.dtype).reshape(given.shape)


def split_selection(topk_indices: object, topk_length: object, columns: int) -> tuple[Array, Array, Array, Array]:
    """(topk_indices, topk_length, extra_topk_indices, extra_topk_length) of one list whose first `columns` columns
    select from one cache and the others from another; topk_length (any shape) counts both. The indices are views.

    FlashInfer: trtllm_batch_decode_sparse_mla_dsv4, 128 columns of the window's cache (flashinfer/mla/_core.py).
    """
    indices = as_array("topk_indices", topk_indices)
    if dtype_name("topk_indices", indices) not in INDICES or indices.ndim < 2:
        raise InputError(f"topk_indices is {indices.dtype} {list(indices.shape)}, expected i32 or i64 [..., K]")
    columns = check_integer("columns", columns, least=0)
    if columns > indices.shape[-1]:
        raise InputError(f"columns is {columns}, expected at most {indices.shape[-1]}, those of topk_indices")
    lengths = as_array("topk_length", topk_length)
    _check_lengths(lengths, indices.shape[-1])
    main = np.minimum(lengths, columns).astype(np.int32)
    return indices[..., :columns], main, indices[..., columns:], (lengths - main).astype(np.int32)


def join_selection(
    topk_indices: object, extra_topk_indices: object, extra_topk_length: object = None
) -> tuple[Array, Array]:
    """(topk_indices, topk_length) of two lists in one, the other way round: every column of the first is listed."""
    main, extra = as_array("topk_indices", topk_indices), as_array("extra_topk_indices", extra_topk_indices)
    if main.ndim < 2 or main.shape[:-1] != extra.shape[:-1] or main.dtype != extra.dtype:
        raise InputError(
            f"extra_topk_indices is {extra.dtype} {list(extra.shape)}, expected {main.dtype} {[*main.shape[:-1], 'K']}"
        )
    if extra_topk_length is None:
        lengths = np.full(extra.shape[:-1], extra.shape[-1], np.int32)
    else:
        lengths = as_array("extra_topk_length", extra_topk_length)
    return np.concatenate([main, extra], axis=-1), (lengths + main.shape[-1]).astype(np.int32)


def from_mask(mask: object) -> Array:
    """The bias of a dense mask [B, T, N], [B, T, H, N], or [Nq, N] (ragged): where a bool mask is True a query sees the
    key. A float mask is a bias already and stays a view.

    torch's scaled_dot_product_attention (attn_mask), llama.cpp's f16 mask {n_kv, n_tok} = [n_tok, n_kv] of 0 and -inf
    (ggml_flash_attn_ext). NaN and +inf are refused.
    """
    array = as_array("mask", mask)
    kind = dtype_name("mask", array)
    if kind == "bool":
        return np.where(array, np.float32(0), np.float32(-np.inf))
    if kind not in FLOATS:
        raise InputError(f"mask is {kind}, expected bool or {' or '.join(FLOATS)}")
    wide = array.astype(np.float32, copy=False)
    for at in np.argwhere(np.isnan(wide) | (wide == np.inf))[:1]:
        raise InputError(f"mask{at.tolist()} is {wide[tuple(at)]}, expected a number or -inf")
    return array


def to_mask(bias: object) -> Array:
    """The bool mask of a bias of 0 and -inf alone: True where a query sees the key."""
    array = as_array("bias", bias)
    if dtype_name("bias", array) not in FLOATS:
        raise InputError(f"bias is {array.dtype}, expected {' or '.join(FLOATS)}")
    wide = array.astype(np.float32, copy=False)
    for at in np.argwhere((wide != 0) & (wide != -np.inf))[:1]:
        raise InputError(f"bias{at.tolist()} is {wide[tuple(at)]}, expected 0 or -inf: a mask has nothing between")
    seen: Array = wide == 0
    return seen


def from_dense(rows: object) -> tuple[Array, Table]:
    """(kv_cache, table) of dense rows [B, N, ...] or [N, ...]: a block a request, of N tokens each; kv_cache is a view.

    llama.cpp: K {576, n_kv, 1} is rows [n_kv, 576], and its mask (`from_mask`) tells what is visible.
    """
    array = as_array("rows", rows)
    if array.ndim not in (2, 3):
        raise InputError(f"rows has {array.ndim} axes {list(array.shape)}, expected [B, N, D] or [N, D]")
    cache = array if array.ndim == 3 else array[None]
    B, N = cache.shape[:2]
    return cache, Table(np.arange(B, dtype=np.int32)[:, None], np.full(B, N, np.int32))


def _selection(
    topk_indices: object, topk_length: object, qo_indptr: object, requests: int
) -> tuple[Array, Array, Array]:
    """indices [rows, K] i64, the request of each row, and what is listed and not negative [rows, K] bool."""
    axes = Axes(B=requests)
    given = as_array("topk_indices", topk_indices)
    if qo_indptr is None:
        letters = "B K" if given.ndim == 2 else "B T K"
        given = axes.take("topk_indices", given, letters, INDICES)
        per_request = np.full(requests, given.shape[1] if given.ndim == 3 else 1)
    else:
        given = axes.take("topk_indices", given, "N K", INDICES)
        per_request = counts_of("qo_indptr", qo_indptr, len(given), "topk_indices")
        if len(per_request) != requests:
            raise InputError(f"qo_indptr is [{len(per_request) + 1}], expected [{requests + 1}] as for seq_lens")
    K = given.shape[-1]
    request = np.repeat(np.arange(requests), per_request)
    indices = given.reshape(len(request), K).astype(np.int64)
    listed = indices >= 0
    if topk_length is not None:
        lengths = as_array("topk_length", topk_length)
        _check_lengths(lengths, K)
        if lengths.shape == (requests,) and qo_indptr is None:
            lengths = np.repeat(lengths, per_request)
        elif lengths.shape != given.shape[:-1]:
            raise InputError(f"topk_length is {list(lengths.shape)}, expected {list(given.shape[:-1])}")
        listed &= np.arange(K) < lengths.reshape(-1, 1)
    return indices, request, listed


def check_slots(name: str, slots: Array | None, length: Array | None) -> None:
    """Raise InputError for a slot below -1 among those of slots [B, T, K] that are read: FlashMLA's decode takes no
    negative but -1 for none (sparse_fp8/splitkv_mla.cuh). length [B] or None."""
    if slots is None:
        return
    read = np.arange(slots.shape[2]) < (slots.shape[2] if length is None else length[:, None, None])
    for b, t, i in np.argwhere((slots < -1) & read)[:1]:
        raise InputError(f"{name}[{b}, {t}, {i}] is {slots[b, t, i]}, expected -1 or a slot")


def _check_lengths(lengths: Array, most: int) -> None:
    if dtype_name("topk_length", lengths) not in INTEGERS:
        raise InputError(f"topk_length is {lengths.dtype}, expected {' or '.join(INTEGERS)}")
    for at in np.argwhere((lengths < 0) | (lengths > most))[:1]:
        raise InputError(f"topk_length{at.tolist()} is {lengths[tuple(at)]}, expected 0 to {most}")


def _index(topk_indices: object, row: int, column: int) -> list[int]:
    """Where an element of [rows, K] is in the array as given."""
    shape = as_array("topk_indices", topk_indices).shape
    return [int(i) for i in np.unravel_index(row, shape[:-1])] + [int(column)]
