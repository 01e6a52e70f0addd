# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a paged case lie: pages in use, the ids they have, and a sparse cache that holds them there.

A case stores the pages in use densely. `place_pages` decides which page holds which tokens, `dense_table` reads a
block table back to stored pages, `sparse_cache` maps a cache of terabytes that is empty but for those pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import FLOATS, Array, Axes
from ..errors import InputError
from . import PagedCase
from .extensions import require_plain

NOWHERE = 2147480000  # what a table holds past a request's length: an id no cache has
SPARE_PAGES = 3
SPARE_ENTRIES = 2  # of a table whose entries past a request's length exist


@dataclass(frozen=True)
class Pages:
    """The pages of a generated case; page i is the i-th stored."""

    count: int
    pages: Array  # [B, max_blocks] page of each table entry, -1 where no token lies
    row_of_token: Array  # [sum(lens)] row of the flattened cache
    unread_rows: Array  # [count * block] bool

    def table(self, ids: Array | None, spare: int = 0) -> Array:
        """The block table [B, max_blocks + spare] i32, page i having the id ids[i], or i.

        Entries past a request's length are NOWHERE; with `spare`, pages that exist, those of other tokens among them.
        """
        id_of = np.arange(self.count) if ids is None else ids
        pages = np.pad(self.pages, ((0, 0), (0, spare)), constant_values=-1)
        rows, columns = np.indices(pages.shape)
        past = id_of[(rows * 5 + columns * 3 + 1) % self.count] if spare else NOWHERE
        return np.where(pages < 0, past, id_of[np.maximum(pages, 0)]).astype(np.int32)

    def apart(self, page_bytes: int, order: str) -> tuple[Array, int, int] | tuple[None, None, None]:
        """(page_ids [count], num_blocks, block_stride) of pages that are not one after the other, else None of each.

        Strided: a gap of a page between two. Huge: ids at the far end of a cache beyond 32-bit addresses.
        """
        if order == "strided":
            return np.arange(self.count, dtype=np.int64), self.count, 2 * page_bytes
        if order != "huge":
            return None, None, None
        stride = page_bytes + -page_bytes % 256 + 256
        num_blocks = min((1 << 36) // stride + 3 * self.count, 2**31 - 1)
        ids = num_blocks - 1 - np.arange(self.count, dtype=np.int64) * 3
        return ids, num_blocks, stride


def count_pages(lens: Array, block: int, order: str) -> int:
    """Pages stored for requests of `lens` tokens."""
    used = -(-lens.astype(np.int64) // block)  # [B]
    if order == "descending":
        return len(lens) * max(1, int(used.max(initial=0))) + SPARE_PAGES
    return int(used.sum()) + SPARE_PAGES


def place_pages(lens: Array, block: int, order: str, permutation: Callable[[int], Array]) -> Pages:
    """Pages for requests of `lens` tokens: `order` "descending" is the published layout, else shuffled.

    Descending: every request has max_blocks pages, counted down from the last page, and 3 spare pages stay readable.
    """
    B = len(lens)
    used = -(-lens.astype(np.int64) // block)  # [B]
    max_blocks = max(1, int(used.max(initial=0)))
    if B * max_blocks >= 2**28:
        raise InputError(f"lens need a block table of {B} x {max_blocks}, expected fewer than 2^28 entries")
    slot = np.arange(max_blocks)
    count = count_pages(lens, block, order)
    if order == "descending":
        pages = count - 1 - np.arange(B * max_blocks).reshape(B, max_blocks)
    else:
        in_use = slot < used[:, None]
        pages = np.full((B, max_blocks), -1)
        pages[in_use] = permutation(count)[: int(used.sum())]

    token = [np.arange(n) for n in lens]
    rows = [pages[b, token[b] // block] * block + token[b] % block for b in range(B)]
    row_of_token = np.concatenate(rows or [np.arange(0)]).astype(np.int64)
    unread = np.ones(count * block, bool)
    unread[row_of_token] = False
    if order == "descending":
        unread[: SPARE_PAGES * block] = False
    return Pages(count, pages, row_of_token, unread)


def dense_table(case: PagedCase) -> Array:
    """The block table of `case` in stored pages: the id of an entry in use becomes the index of its page.

    Raises InputError for an id that no stored page has.
    """
    if case.page_ids is None:
        return case.block_table
    _check_pages(case)
    axes = Axes()
    axes.take("block_table", case.block_table, "B max_blocks", ("i32",))
    axes.take("seq_lens", case.seq_lens, "B", ("i32",))
    block = max(1, case.kv_cache.shape[1])
    in_use = np.arange(case.block_table.shape[1]) < -(-case.seq_lens.astype(np.int64) // block)[:, None]
    order = np.argsort(case.page_ids, kind="stable")
    found = np.searchsorted(case.page_ids, case.block_table, sorter=order)
    page = order[np.minimum(found, len(order) - 1)] if len(order) else np.full(case.block_table.shape, -1)
    stored = case.page_ids[page] == case.block_table if len(order) else np.zeros(page.shape, bool)
    for b, slot in np.argwhere(in_use & ~stored)[:1]:
        raise InputError(f"block_table[{b}, {slot}] is {case.block_table[b, slot]}, which page_ids does not hold")
    return np.where(in_use, page, -1).astype(np.int32)


def sparse_cache(case: PagedCase) -> Array:
    """The cache [num_blocks, block_size, D] with every stored page at its id and byte stride, zero elsewhere.

    Memory is mapped, not allocated: only the stored pages take room.
    """
    if case.page_ids is None:
        return case.kv_cache
    import mmap

    _check_pages(case)
    no_reserve = 0x4000  # MAP_NORESERVE, which the mmap module names from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    assert case.num_blocks is not None and case.block_stride is not None
    memory = mmap.mmap(-1, case.num_blocks * case.block_stride, flags=flags)
    _, block, D = case.kv_cache.shape
    cache: Array = np.ndarray(
        (case.num_blocks, block, D),
        case.kv_cache.dtype,
        buffer=memory,
        strides=(case.block_stride, *case.kv_cache.strides[1:]),
    )
    cache[case.page_ids] = case.kv_cache
    return cache


def _check_pages(case: PagedCase) -> None:
    require_plain(case, "page_ids")
    ids: Any = case.page_ids
    axes = Axes()
    axes.take("kv_cache", case.kv_cache, "pages block_size D", FLOATS)
    axes.take("page_ids", ids, "pages", ("i64",))
    if case.num_blocks is None or case.block_stride is None:
        missing = "num_blocks" if case.num_blocks is None else "block_stride"
        raise InputError(f"metadata {missing} is missing, expected with page_ids")
    for i in np.flatnonzero((ids < 0) | (ids >= case.num_blocks))[:1]:
        raise InputError(f"page_ids[{i}] is {ids[i]}, expected 0 to {case.num_blocks - 1}")
    order = np.argsort(ids, kind="stable")
    for i in np.flatnonzero(np.diff(ids[order]) == 0)[:1]:
        raise InputError(f"page_ids[{order[i + 1]}] is {ids[order[i + 1]]}, which page_ids[{order[i]}] already is")
    page_bytes = case.kv_cache[0].nbytes if len(ids) else 0
    if case.block_stride < page_bytes:
        raise InputError(f"block_stride is {case.block_stride}, expected at least {page_bytes}, the bytes of a page")
