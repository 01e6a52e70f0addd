# SPDX-License-Identifier: Apache-2.0
"""Page tables as engines spell them, to the canonical block table and back. Selections and masks: selections.py.

    canonical        block_table [B, max_blocks] i32, seq_lens [B] i32
    CSR pages        indptr [B + 1], indices [pages], and last_page_len [B] or kv_lens [B]
    CSR tokens       the same with pages of one token: no lengths, the cache seen through `tokens_as_blocks`
    request map      req_to_token [R, ctx], req_pool_indices [B], seq_lens [B]: one slot a token, too
    block offsets    [B, 2, max_blocks]: a plane for keys, a plane for values
    length_info      [3, B] beside CSR pages: last page, window offset, kept first tokens

A slot is block * block_size + offset. Functions named from_ give a canonical `Table`, those named to_ the engine's.
Table entries past a request's length are -1 in what is made here and may be anything in what is taken. Integers are
i32, i64 or u32. A contradiction is an InputError that names the argument, the index and the value;
`checks.arguments_named` puts an engine's own names in its place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Array, Axes
from ..errors import InputError
from ..geometry import check_integer
from .entries import (
    INTEGERS,
    canonical,
    check_ids,
    check_lens,
    csr,
    empty_table,
    in_use,
    indptr_of,
    rows_of,
    token_slots,
)


class Table(NamedTuple):
    """The canonical spelling."""

    block_table: Array  # [B, max_blocks] i32
    seq_lens: Array  # [B] i32


class CsrPages(NamedTuple):
    """Pages of all requests in a row; request b has those from indptr[b] to indptr[b + 1]."""

    indptr: Array  # [B + 1] i32
    indices: Array  # [pages] i32
    last_page_len: Array  # [B] i32; 0 for a request without pages


class CsrTokens(NamedTuple):
    """The slot of every token of all requests in a row."""

    indptr: Array  # [B + 1] i32
    indices: Array  # [tokens] i32


class RequestTokens(NamedTuple):
    """The slot of token j of request b is req_to_token[req_pool_indices[b], j]."""

    req_to_token: Array  # [R, ctx] i32
    req_pool_indices: Array  # [B] i64
    seq_lens: Array  # [B] i64


class LengthInfo(NamedTuple):
    """CSR pages whose lengths come with a window; see `from_length_info`."""

    indptr: Array  # [B + 1] i32
    indices: Array  # [pages] i32
    length_info: Array  # [3, B] i32


def from_block_table(
    block_table: object, seq_lens: object, *, block_size: int, num_blocks: int | None = None
) -> Table:
    """The canonical table of block_table [B, max_blocks] and seq_lens [B] in any integer type; i32 ones as they are.

    vLLM, FlashMLA and vllm.cpp have i32; LMDeploy (block_offsets, kv_seqlens) and SGLang have i64 as well.
    """
    axes = Axes()
    table = axes.take("block_table", block_table, "B max_blocks", INTEGERS)
    lens = axes.take("seq_lens", seq_lens, "B", INTEGERS)
    used = in_use("seq_lens", "block_table", table, lens, block_size)
    check_ids("block_table", table, used, num_blocks)
    if table.dtype != np.int32:
        table = np.where(used, table, -1).astype(np.int32)
    return Table(table, lens.astype(np.int32, copy=False))


def from_csr_pages(
    indptr: object,
    indices: object,
    *,
    block_size: int,
    last_page_len: object = None,
    kv_lens: object = None,
    num_blocks: int | None = None,
) -> Table:
    """The table of CSR pages: indptr [B + 1] from 0 up to the length of indices [pages].

    Exactly one of last_page_len [B] (1 to block_size; 0 too for a request without pages) and kv_lens [B] (a request may
    own more pages than its length needs) gives the lengths; pages of one token need neither.

    FlashInfer: kv_indptr, kv_indices, kv_len_arr (flashinfer/mla/_core.py). aiter: kv_indptr, kv_indices,
    kv_last_page_lens (aiter/mla.py). MLC/TVM: page_indptr, page_values, length_info [B] = last_page_len (kv_cache.py).
    An engine's buffer that is longer than indptr's end is cut there by the caller.
    """
    block_size = check_integer("block_size", block_size, least=1)
    counts, pages = csr(indptr, indices)
    axes = Axes(B=len(counts))
    if last_page_len is not None and kv_lens is not None:
        raise InputError("last_page_len and kv_lens are both given, expected one of them")
    if last_page_len is not None:
        last = axes.take("last_page_len", last_page_len, "B", INTEGERS)
        for b in np.flatnonzero((last > block_size) | (last < (counts > 0)))[:1]:
            raise InputError(
                f"last_page_len[{b}] is {last[b]}, expected {int(counts[b] > 0)} to {block_size}:"
                f" indptr gives request {b} {counts[b]} pages of {block_size}"
            )
        lens = np.where(counts > 0, (counts - 1) * block_size + last, 0)
    elif kv_lens is not None:
        lens = axes.take("kv_lens", kv_lens, "B", INTEGERS).astype(np.int64)
        for b in np.flatnonzero((lens < 0) | (lens > counts * block_size))[:1]:
            raise InputError(
                f"kv_lens[{b}] is {lens[b]}, expected 0 to {counts[b] * block_size}:"
                f" indptr gives request {b} {counts[b]} pages of {block_size}"
            )
    elif block_size == 1:
        lens = counts
    else:
        raise InputError(f"neither last_page_len nor kv_lens is given, expected one of them for pages of {block_size}")
    check_lens("indptr", lens, block_size)
    needed = -(-lens // block_size)
    owner, rank = rows_of(counts)
    used = rank < needed[owner]
    check_ids("indices", pages, used, num_blocks)
    table = empty_table(needed)
    table[owner[used], rank[used]] = pages[used]
    return Table(table, lens.astype(np.int32))


def to_csr_pages(block_table: object, seq_lens: object, *, block_size: int) -> CsrPages:
    """CSR pages of a canonical table: as many pages a request as its length needs. kv_lens are the seq_lens."""
    table, lens, used = canonical(block_table, seq_lens, block_size)
    counts = used.sum(axis=1)
    last = lens - np.maximum(counts - 1, 0) * block_size
    return CsrPages(indptr_of(counts), table[used], last.astype(np.int32))


def from_csr_tokens(indptr: object, indices: object, *, num_slots: int | None = None) -> Table:
    """The table of CSR tokens, in blocks of one token: indptr [B + 1], indices [tokens] of slots.

    SGLang: kv_indptr, kv_indices (triton_ops/decode_attention.py). aiter with pages of one token.
    """
    return from_csr_pages(indptr, indices, block_size=1, num_blocks=num_slots)


def to_csr_tokens(block_table: object, seq_lens: object, *, block_size: int) -> CsrTokens:
    """The slots of all tokens of a canonical table."""
    slots, lens = token_slots(block_table, seq_lens, block_size)
    return CsrTokens(indptr_of(lens), slots)


def from_request_tokens(
    req_to_token: object, req_pool_indices: object, seq_lens: object, *, num_slots: int | None = None
) -> Table:
    """The table of a request map, in blocks of one token: req_to_token [R, ctx], req_pool_indices [B], seq_lens [B].

    What lies in a row past its request's length may be anything. SGLang: decode_attention_cpu
    (sgl-kernel/csrc/cpu/decode.cpp).
    """
    axes = Axes()
    slots = axes.take("req_to_token", req_to_token, "R ctx", INTEGERS)
    rows = axes.take("req_pool_indices", req_pool_indices, "B", INTEGERS)
    lens = axes.take("seq_lens", seq_lens, "B", INTEGERS).astype(np.int64)
    for b in np.flatnonzero((rows < 0) | (rows >= len(slots)))[:1]:
        raise InputError(f"req_pool_indices[{b}] is {rows[b]}, expected 0 to {len(slots) - 1}, a row of req_to_token")
    for b in np.flatnonzero((lens < 0) | (lens > slots.shape[1]))[:1]:
        raise InputError(
            f"seq_lens[{b}] is {lens[b]}, expected 0 to {slots.shape[1]}, the tokens of a row of req_to_token"
        )
    table = empty_table(lens)
    width = min(table.shape[1], slots.shape[1])
    used = np.arange(width) < lens[:, None]
    check_ids("req_to_token", slots[rows, :width], used, num_slots, rows)
    table[:, :width][used] = slots[rows, :width][used]
    return Table(table, lens.astype(np.int32))


def to_request_tokens(
    block_table: object, seq_lens: object, *, block_size: int, req_pool_indices: object
) -> RequestTokens:
    """A request map of a canonical table, request b in row req_pool_indices[b] [B]; the rows of nobody are -1."""
    slots, lens = token_slots(block_table, seq_lens, block_size)
    rows = Axes(B=len(lens)).take("req_pool_indices", req_pool_indices, "B", INTEGERS).astype(np.int64)
    for b in np.flatnonzero(rows < 0)[:1]:
        raise InputError(f"req_pool_indices[{b}] is {rows[b]}, expected 0 or more")
    order = np.argsort(rows, kind="stable")
    for i in np.flatnonzero(np.diff(rows[order]) == 0)[:1]:
        raise InputError(f"req_pool_indices[{order[i + 1]}] is {rows[order[i]]}, which req_pool_indices[{order[i]}] is")
    filled = np.zeros(int(rows.max(initial=-1)) + 1, np.int64)
    filled[rows] = lens
    table = empty_table(filled)
    owner, token = rows_of(lens)
    table[rows[owner], token] = slots
    return RequestTokens(table, rows, lens)


def from_block_offsets(
    block_offsets: object, seq_lens: object, *, block_size: int, num_blocks: int | None = None
) -> Table:
    """The table of block_offsets [B, 2, max_blocks], whose planes of keys and of values must agree: a latent row is
    both. The table is a view of the first plane where that is i32.

    TensorRT-LLM (tests/unittest/_torch/attention/test_attention_mla.py), FlashInfer's trtllm-gen without
    uses_shared_paged_kv_idx (flashinfer/mla/_core.py).
    """
    axes = Axes()
    planes = axes.take("block_offsets", block_offsets, "B 2 max_blocks", INTEGERS)
    if planes.shape[1] != 2:
        raise InputError(f"block_offsets is {list(planes.shape)}, expected [B, 2, max_blocks]")
    lens = axes.take("seq_lens", seq_lens, "B", INTEGERS)
    used = in_use("seq_lens", "block_offsets", planes[:, 0], lens, block_size)
    check_ids("block_offsets", planes, np.broadcast_to(used[:, None], planes.shape), num_blocks)
    for b, j in np.argwhere(used & (planes[:, 0] != planes[:, 1]))[:1]:
        raise InputError(
            f"block_offsets[{b}, 1, {j}] is {planes[b, 1, j]}, expected {planes[b, 0, j]}, the block of its key"
        )
    return from_block_table(planes[:, 0], lens, block_size=block_size)


def to_block_offsets(block_table: object) -> Array:
    """block_table [B, max_blocks] as both planes of [B, 2, max_blocks]: a view that cannot be written to."""
    table = Axes().take("block_table", block_table, "B max_blocks", ("i32",))
    return np.broadcast_to(table[:, None], (len(table), 2, table.shape[1]))


def from_length_info(
    indptr: object, indices: object, length_info: object, *, block_size: int, num_blocks: int | None = None
) -> Table:
    """The table, in blocks of one token, of CSR pages with length_info [3, B]: last_page_len, window offset, first.

    Of the tokens in a request's pages, those from the window's offset on are attended to, and the `first` ones before
    them. Bottom-right causality counts within these, so their table is that of the tokens alone. MLC/TVM with a sliding
    window (kv_cache.py, _get_kv_chunk_len and _get_seq_offset); its `sink` is a count of tokens, not a logit.
    """
    counts, _ = csr(indptr, indices)
    info = Axes(B=len(counts)).take("length_info", length_info, "3 B", INTEGERS)
    if len(info) != 3:
        raise InputError(f"length_info is {list(info.shape)}, expected [3, B]")
    with_pages = from_csr_pages(
        indptr, indices, block_size=block_size, last_page_len=info[0], num_blocks=num_blocks
    )
    total = with_pages.seq_lens.astype(np.int64)
    offset, first = info[1].astype(np.int64), info[2].astype(np.int64)
    for b in np.flatnonzero((first < 0) | (first > offset))[:1]:
        raise InputError(f"length_info[2, {b}] is {first[b]}, expected 0 to {offset[b]}, the offset of the window")
    for b in np.flatnonzero((offset > total) & (offset != first))[:1]:
        raise InputError(f"length_info[1, {b}] is {offset[b]}, expected at most {total[b]}, the tokens of the request")
    lens = total - offset + first
    slots, _ = token_slots(*with_pages, block_size)
    owner, position = rows_of(total)
    kept = (position < first[owner]) | (position >= offset[owner])
    table = empty_table(lens)
    table[rows_of(lens)] = slots[kept]
    return Table(table, lens.astype(np.int32))


def to_length_info(
    block_table: object, seq_lens: object, *, block_size: int, window_left: int, window_first: int = 0
) -> LengthInfo:
    """CSR pages and length_info of a canonical table whose one query a request sees the window_left tokens before the
    last one, the last one, and the first window_first.
    """
    window_left = check_integer("window_left", window_left, least=0)
    window_first = check_integer("window_first", window_first, least=0)
    pages = to_csr_pages(block_table, seq_lens, block_size=block_size)
    _, lens, _ = canonical(block_table, seq_lens, block_size)
    offset = np.maximum(lens - 1 - window_left, 0)
    first = np.minimum(window_first, offset)
    info = np.stack([pages.last_page_len, offset, first]).astype(np.int32)
    return LengthInfo(pages.indptr, pages.indices, info)
