# SPDX-License-Identifier: Apache-2.0
"""Which keys each query of a paged case sees, in which order: length, mask, window, selection and bias; no arithmetic.

    found = visible(case, queries, bias, main, extra)
    for b, seen in enumerate(found):
        seen.slot[seen.starts[t] : seen.starts[t + 1]]      the keys of query t of request b, first to last
    found.lists([places]).at[0]                             where the keys of all queries lie, a line each

By position a key is a token of the request and lies where block_table says; by slot it lies at its index. Position p
of n is seen from i = n - T + t, the position of query t of T, if all of these say so:

    causal      p <= i
    window      i - window_left <= p <= i + window_right, or p < window_first
    selection   p is among the first topk_length of topk_indices, as often as it is there
    bias        not -inf for every head

Keys of the extra cache follow the main ones; length and selection alone decide on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from ..checks import widen
from ..errors import InputError
from .caches import Cache
from .paging import Paging, pagings_of, window_of
from .queries import Queries

NO_LENGTH, NO_TABLE, NO_KEPT = np.empty(0, np.int32), np.empty((0, 0), np.int32), np.empty((0, 0), np.uint8)


class Seen(NamedTuple):
    """The keys of n queries, one after the other: those of query t are starts[t] .. starts[t + 1] of the others."""

    starts: Array  # [n + 1] i64
    source: Array  # [M] 0: the main cache, 1: the extra one
    position: Array  # [M] i64 token of the request, the column of its bias; by slot the slot
    slot: Array  # [M] i64 block * block_size + offset in its cache


class Lists(NamedTuple):
    """The keys of N queries, a line each: the first main[n] of line n are in the main cache, up to counts[n] in the
    extra one."""

    at: Array  # [m, N, K] i64: where each key lies, in the m ways that were asked for
    positions: Array  # [N, K] i64, [0, 0] where they were not asked for
    main: Array  # [N] i64
    counts: Array  # [N] i64


class Visible:
    """The keys of every query of a case: of request after request, or all at once."""

    def __init__(
        self,
        case: PagedCase,
        queries: Queries,
        bias: Array | None,
        pagings: list[Paging],
        window: tuple[int | None, int | None, int],
    ) -> None:
        self.case, self.queries, self.bias, self.pagings, self.window = case, queries, bias, pagings, window

    def __iter__(self) -> Iterator[Seen]:
        """The keys of each request in turn. Raises InputError for an index, a block id or a bias."""
        slot = [np.array([[0, paging.cache.block_size, 1]]) for paging in self.pagings]
        for b in range(len(self.queries.starts) - 1):
            found = self._lists(b, b + 1, slot, True)
            entry = np.arange(found.at.shape[2])
            live = entry < found.counts[:, None]
            source = (entry >= found.main[:, None]).astype(np.int64)
            starts = np.concatenate([[0], found.counts.cumsum()])
            yield Seen(starts, source[live], found.positions[live], found.at[0][live])

    def lists(self, places: list[Array]) -> Lists:
        """The keys of all queries, each at start + block * [1] + offset in the block * [2] for each of the m lines of
        its cache's places [m, 3]. Raises InputError."""
        return self._lists(0, len(self.queries.starts) - 1, places, False)

    def pairs(self) -> int:
        """How many keys all queries together see. Raises InputError."""
        return int(self.lists([np.empty((0, 3), np.int64)] * len(self.pagings)).counts.sum())

    def _lists(self, first: int, last: int, places: list[Array], positions: bool) -> Lists:
        """Of requests first .. last - 1."""
        starts = self.queries.starts[first : last + 1]
        request = np.repeat(np.arange(first, last), starts[1:] - starts[:-1])  # [n]
        rows = slice(int(starts[0]), int(starts[-1]))
        limits = [self._limits(paging, request, rows) for paging in self.pagings]  # [n, 4]
        indices = [paging.indices if paging.indices is None else paging.indices[rows] for paging in self.pagings]
        widths = zip(indices, limits, strict=True)
        K = sum(_most(limit, self.window[2]) if one is None else one.shape[1] for one, limit in widths)
        n = len(request)
        found = Lists(
            np.empty((len(places[0]), n, K), np.int64),
            np.empty((n, K) if positions or self.bias is not None else (0, 0), np.int64),
            np.empty(n, np.int64),
            np.zeros(n, np.int64),
        )
        for s, paging in enumerate(self.pagings):
            self._walk(paging, request, rows, indices[s], limits[s], places[s], found)
            if s == 0:
                found.main[:] = found.counts
        if self.bias is not None:
            self._check_bias(rows, found)
        return found

    def _walk(
        self,
        paging: Paging,
        request: Array,
        rows: slice,
        indices: Array | None,
        limits: Array,
        places: Array,
        found: Lists,
    ) -> None:
        """Add the keys in one cache to each line of `found`."""
        from .._keys import walk

        cache, main = paging.cache, not paging.prefix
        kept = NO_KEPT
        if main and self.bias is not None:
            kept = (self.bias[rows] != -np.inf).any(axis=1).view(np.uint8)  # [n, columns]
        t, k, column = walk(
            np.empty((len(request), 0), np.int32) if indices is None else indices,
            indices is not None,
            NO_LENGTH if paging.length is None else paging.length[rows],
            limits,
            self.window[2] if main else 0,
            kept,
            self.case.topk_outside == "skip",
            request,
            NO_TABLE if paging.table is None else paging.table,
            cache.num_blocks,
            cache.block_size,
            places,
            found.counts,
            found.at,
            found.positions,
        )
        if t < 0:
            return
        position, b = k if indices is None else indices[t, k], request[t]
        if column < 0:
            limit = f"the rows of {paging.prefix}kv_cache" if paging.lens is None else f"{paging.prefix}seq_lens[{b}]"
            index = f"{paging.prefix}topk_indices[{self.queries.place(rows.start + t)}, {k}]"
            raise InputError(f"{index} is {position}, expected below {limits[t, 0]}, {limit}")
        assert paging.table is not None
        raise InputError(
            f"{paging.prefix}block_table[{b}, {column}] is {paging.table[b, column]}, expected 0 to"
            f" {cache.num_blocks - 1}: request {b} sees token {position}, and {paging.prefix}kv_cache has"
            f" {cache.num_blocks} blocks"
        )

    def _limits(self, paging: Paging, request: Array, rows: slice) -> Array:
        """[n, 4] i64: how many tokens or slots there are, the window's first and last, the last by causality."""
        limits = np.empty((len(request), 4), np.int64)
        rows_of_cache = paging.cache.num_blocks * paging.cache.block_size
        limits[:, 0] = rows_of_cache if paging.lens is None else paging.lens[request]
        limits[:, 1], limits[:, 2:] = 0, limits[:, :1]
        left, right, _ = self.window
        if paging.prefix or paging.lens is None or (left is None and right is None and not self.case.causal):
            return limits
        at = limits[:, 0] - self.queries.starts[request + 1] + np.arange(rows.start, rows.stop)
        if left is not None:
            limits[:, 1] = at - left
        if right is not None:
            limits[:, 2] = at + right
        if self.case.causal:
            limits[:, 3] = at
        return limits

    def _check_bias(self, rows: slice, found: Lists) -> None:
        assert self.bias is not None
        per_head = self.case.bias is not None and self.case.bias.ndim == len(self.queries.axes.split()) + 2
        for t, row in enumerate(range(rows.start, rows.stop)):
            position = found.positions[t, : found.main[t]]
            values = widen(self.bias[row][:, position], np.float64)  # [H or 1, main]
            for h, k in np.argwhere(~(values < np.inf))[:1]:
                index = f"bias[{self.queries.place(row)}, {f'{h}, ' if per_head else ''}{position[k]}]"
                raise InputError(f"{index} is {values[h, k]}, expected a finite number or -inf")


def _most(limits: Array, window_first: int) -> int:
    """The most keys that a query sees of all positions, by limits [n, 4]."""
    tokens, low, high, last = limits.T
    end = np.minimum(tokens, last + 1)
    windowed = np.minimum(end, window_first) + np.maximum(0, np.minimum(end, high + 1) - np.maximum(0, low))
    return int(np.minimum(end, windowed).max(initial=0))


def visible(case: PagedCase, queries: Queries, bias: Array | None, main: Cache, extra: Cache | None) -> Visible:
    """The keys of all queries. Raises InputError for tensors that contradict each other. bias: [N, H or 1, columns]"""
    window = window_of(case)
    pagings = pagings_of(case, queries, main, extra)
    lens = pagings[0].lens
    if bias is not None and lens is not None and bias.shape[2] < lens.max(initial=0):
        raise InputError(f"bias has {bias.shape[2]} columns, expected at least {lens.max()}, seq_lens[{lens.argmax()}]")
    return Visible(case, queries, bias, pagings, window)
