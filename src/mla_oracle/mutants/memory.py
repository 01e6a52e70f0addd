# SPDX-License-Identifier: Apache-2.0
"""A cache as a kernel addresses it: byte offsets in 64 bits, wherever they lead.

A stored page holds what the case holds, a page that is not stored and the gap between two pages hold zeros (as in
`placement.sparse_cache`), and what lies outside the cache is unknown: NaN. ZERO is the address of a row of zeros.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array

ZERO = -(1 << 62)


class Memory:
    """Pages [pages, block, D], page i at byte ids[i] * stride of a cache of num_blocks * stride bytes."""

    def __init__(
        self, cache: Array, ids: Array | None = None, num_blocks: int | None = None, stride: int | None = None
    ):
        cache = np.ascontiguousarray(cache)
        self.flat = cache.reshape(-1)  # [pages * block * D]
        self.pages, self.block, self.width = cache.shape
        self.item = cache.dtype.itemsize
        self.row_bytes = self.width * self.item
        self.page_bytes = self.block * self.row_bytes
        self.stride = self.page_bytes if stride is None else stride
        self.num_blocks = self.pages if num_blocks is None else num_blocks
        self._ids = np.arange(self.pages) if ids is None else ids.astype(np.int64)
        self._order = np.argsort(self._ids, kind="stable")

    def read(self, addresses: Array, width: int | None = None) -> Array:
        """The `width` (None: a row's) elements at each byte address: f64 [n, width]."""
        width = self.width if width is None else width
        out = np.zeros((len(addresses), width))
        if not len(addresses) or not width:
            return out
        first, offset = self._find(addresses)
        last, _ = self._find(addresses + (width * self.item - 1))
        inside = (offset + width * self.item <= self.page_bytes) & (offset % self.item == 0)
        whole = (first >= 0) & inside
        if whole.any():
            start = first[whole] * (self.block * self.width) + offset[whole] // self.item
            out[whole] = np.lib.stride_tricks.sliding_window_view(self.flat, width)[start]
        nothing = (first == last) & (first < 0)
        out[nothing & (first == -2)] = np.nan
        for i in np.flatnonzero(~whole & ~nothing & (addresses != ZERO)):
            out[i] = self._elements(int(addresses[i]), width)
        out[addresses == ZERO] = 0
        return out

    def _find(self, addresses: Array) -> tuple[Array, Array]:
        """The stored page of each address (-1: not stored, -2: outside the cache), and the offset in its page."""
        page = addresses // self.stride
        if len(self._ids):
            at = np.minimum(np.searchsorted(self._ids, page, sorter=self._order), len(self._ids) - 1)
            index = self._order[at]
            stored = self._ids[index] == page
        else:
            index, stored = np.zeros(page.shape, np.int64), np.zeros(page.shape, bool)
        outside = (page < 0) | (page >= self.num_blocks)
        return np.where(outside, -2, np.where(stored, index, -1)), addresses - page * self.stride

    def _elements(self, address: int, width: int) -> Array:
        """`width` elements that cross a page or start between two elements, byte by byte."""
        page, offset = self._find(address + np.arange(width * self.item))
        held = (page >= 0) & (offset < self.page_bytes)
        octets = np.zeros(width * self.item, np.uint8)
        octets[held] = self.flat.view(np.uint8)[(page * self.page_bytes + offset)[held]]
        row: Array = octets.view(self.flat.dtype).astype(np.float64)
        row[(page == -2).reshape(width, self.item).any(1)] = np.nan
        return row


class Rows:
    """The rows of one request's tokens, read once, and others as they are asked for."""

    def __init__(self, memory: Memory, addresses: Array):
        self.memory = memory
        self.addresses = addresses  # [n] bytes
        self.data = memory.read(addresses)  # [n, D]
        self.finite = bool(np.isfinite(self.data).all())
        self._order = np.argsort(addresses, kind="stable")
        self._sorted = addresses[self._order]
        self._strange = addresses[:0], self.data[:0]  # what was read last of other rows

    def lanes(self, addresses: Array) -> Array:
        """The token at each address, -1 where none of the request's own lies there."""
        if not len(self._sorted):
            return np.full(len(addresses), -1)
        at = np.minimum(np.searchsorted(self._sorted, addresses), len(self._sorted) - 1)
        return np.where(self._sorted[at] == addresses, self._order[at], -1)

    def read(self, addresses: Array) -> tuple[Array, bool]:
        """The rows at `addresses` [m]: f64 [m, D], a view where they are the request's first m; known to be finite?"""
        m = len(addresses)
        if m <= len(self.addresses) and np.array_equal(addresses, self.addresses[:m]):
            return self.data[:m], self.finite
        lanes = self.lanes(addresses)
        out = self.data[np.maximum(lanes, 0)] if len(self.data) else np.zeros((m, self.memory.width))
        strange = np.flatnonzero(lanes < 0)
        if not len(strange):
            return out, self.finite
        out[strange] = rows = self.strange(addresses[strange])
        return out, self.finite and bool(np.isfinite(rows).all())

    def strange(self, addresses: Array) -> Array:
        """The rows at addresses that are not the request's own [m, D]."""
        if not np.array_equal(addresses, self._strange[0]):
            self._strange = addresses, self.memory.read(addresses)
        return self._strange[1]
