# SPDX-License-Identifier: Apache-2.0
"""Which keys each query of a paged case sees, in which order: length, mask, window, selection and bias; no arithmetic.

    found = visible(case, queries, bias, main, extra)
    for b, seen in enumerate(found):
        seen.slot[seen.starts[t] : seen.starts[t + 1]]      the keys of query t of request b, first to last
    found.runs                                              the same, of many requests in one

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
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .arrays import Array
from .caches import Cache
from .cases import PagedCase
from .checks import choice, widen
from .errors import InputError
from .geometry import check_integer
from .queries import Queries


class Seen(NamedTuple):
    """The keys of n queries, one after the other: those of query t are starts[t] .. starts[t + 1] of the others."""

    starts: Array  # [n + 1] i64
    source: Array  # [M] 0: the main cache, 1: the extra one
    position: Array  # [M] i64 token of the request, the column of its bias; by slot the slot
    slot: Array  # [M] i64 block * block_size + offset in its cache


class Paging(NamedTuple):
    """One cache and what says which of its rows are keys; messages name tensors with `prefix`."""

    prefix: str
    cache: Cache
    table: Array | None  # [B, max_blocks], None by slot, as lens
    lens: Array | None  # [B] i64
    indices: Array | None  # [N, K]
    length: Array | None  # [N]


class Visible:
    """The keys of every query of a case, request after request; `runs` lists them with many requests in one."""

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
        for requests, seen in self._runs():
            rows = self.queries.starts[requests.start : requests.stop + 1]
            for first, last in pairwise(rows - rows[0]):
                starts = seen.starts[first : last + 1]
                keys = slice(starts[0], starts[-1])
                yield Seen(starts - starts[0], seen.source[keys], seen.position[keys], seen.slot[keys])

    @cached_property
    def runs(self) -> list[Seen]:
        """The keys of all queries: of all requests at once where there is a selection. Raises InputError."""
        return [seen for _, seen in self._runs()]

    def _runs(self) -> Iterator[tuple[range, Seen]]:
        B = len(self.queries.starts) - 1
        at_once = max(1, B) if self.pagings[0].indices is not None and self.bias is None else 1
        for b in range(0, B, at_once):
            yield range(b, b + at_once), self._of(range(b, b + at_once))

    def _of(self, requests: range) -> Seen:
        """The keys of some requests; of one, where there is no selection."""
        starts = self.queries.starts[requests.start : requests.stop + 1]
        first, last = int(starts[0]), int(starts[-1])
        request = np.repeat(np.arange(requests.start, requests.stop), np.diff(starts))  # [n]
        places, kept = [], []
        for paging in self.pagings:
            place, live = self._selected(paging, request, first, last)  # [n, K] each
            if not paging.prefix and paging.lens is not None:
                if self.case.causal or self.window[:2] != (None, None):
                    at = paging.lens[request] - self.queries.starts[request + 1] + np.arange(first, last)
                    live &= in_window(place, at, self.case.causal, self.window)
                if self.bias is not None:
                    live = _biased(self.case, self.queries, self.bias[first:last], first, place, live)
            places.append(place)
            kept.append(live)
        if len(places) == 1 and kept[0].all():
            (n, K), position = places[0].shape, places[0].reshape(-1)
            if self.pagings[0].indices is None:
                slot = np.broadcast_to(_first_slots(self.pagings[0], requests.start, K), (n, K)).reshape(-1)
            else:
                slot = _slots(self.pagings[0], np.repeat(request, K), position)
            return Seen(np.arange(n + 1) * K, np.zeros(n * K, np.int64), position, slot)
        live, place = np.concatenate(kept, axis=1), np.concatenate(places, axis=1)
        counts = np.count_nonzero(live, axis=1)
        source = np.broadcast_to(np.repeat([0, 1][: len(places)], [p.shape[1] for p in places]), live.shape)[live]
        position, owner = place[live], np.repeat(request, counts)
        slot = np.empty_like(position)
        for s, paging in enumerate(self.pagings):
            mine = source == s
            slot[mine] = _slots(paging, owner[mine], position[mine])
        return Seen(np.concatenate([[0], counts.cumsum()]), source, position, slot)

    def _selected(self, paging: Paging, request: Array, first: int, last: int) -> tuple[Array, Array]:
        """(positions or slots [n, K] i64, which of them the selection means [n, K]) of the requests of n queries."""
        cache, lens = paging.cache, paging.lens
        if paging.indices is None:
            tokens = int(lens[request[0]]) if lens is not None and len(request) else 0
            place = np.broadcast_to(np.arange(tokens), (last - first, tokens))
            return place, np.ones(place.shape, bool)
        capacity = np.full((1, 1), cache.num_blocks * cache.block_size) if lens is None else lens[request][:, None]
        place = paging.indices[first:last].astype(np.int64)
        live = place >= 0
        if paging.length is not None:
            live &= np.arange(place.shape[1]) < paging.length[first:last, None]
        inside = place < capacity
        live, outside = live & inside, live & ~inside
        if self.case.topk_outside == "error" and outside.any():
            for t, k in np.argwhere(outside)[:1]:
                limit = f"{paging.prefix}seq_lens[{request[t]}]"
                limit = f"the rows of {paging.prefix}kv_cache" if lens is None else limit
                index = f"{paging.prefix}topk_indices[{self.queries.place(first + t)}, {k}]"
                most = np.broadcast_to(capacity, place.shape)[t, k]
                raise InputError(f"{index} is {place[t, k]}, expected below {most}, {limit}")
        return place, live


def visible(case: PagedCase, queries: Queries, bias: Array | None, main: Cache, extra: Cache | None) -> Visible:
    """The keys of all queries. Raises InputError for tensors that contradict each other. bias: [N, H or 1, columns]"""
    window = window_of(case)
    pagings = [_paging(case, queries, "", main)]
    if extra is not None:
        pagings.append(_paging(case, queries, "extra_", extra))
    else:
        for name in ("block_table", "seq_lens", "topk_indices", "topk_length"):
            if getattr(case, f"extra_{name}") is not None:
                raise InputError(f"extra_{name} is given, expected None without extra_kv_cache")
    lens = pagings[0].lens
    if bias is not None and lens is not None and bias.shape[2] < lens.max(initial=0):
        raise InputError(f"bias has {bias.shape[2]} columns, expected at least {lens.max()}, seq_lens[{lens.argmax()}]")
    return Visible(case, queries, bias, pagings, window)


def window_of(case: PagedCase) -> tuple[int | None, int | None, int]:
    """(left, right, first); None: no bound. Raises InputError."""
    by_slot = choice("topk_by", case.topk_by, ("position", "slot")) == "slot"
    choice("topk_outside", case.topk_outside, ("error", "skip"))
    if by_slot and case.causal:
        raise InputError("causal is True, expected False with topk_by 'slot'")
    bounds: list[int | None] = []
    for name in ("window_left", "window_right"):
        value = getattr(case, name)
        bound = -1 if value is None else check_integer(name, value, least=-1)
        if by_slot and bound >= 0:
            raise InputError(f"{name} is {bound}, expected None with topk_by 'slot'")
        bounds.append(None if bound == -1 else bound)
    first = check_integer("window_first", case.window_first, least=0)
    if by_slot and first:
        raise InputError(f"window_first is {first}, expected 0 with topk_by 'slot'")
    if case.causal and bounds[1]:
        raise InputError(f"window_right is {bounds[1]}, expected None or 0 with causal")
    return bounds[0], bounds[1], first


def _paging(case: PagedCase, queries: Queries, prefix: str, cache: Cache) -> Paging:
    """The tables of one cache, checked against each other. Raises InputError."""
    tensors = ("block_table", "seq_lens", "topk_indices", "topk_length")
    table, lens, indices, length = (getattr(case, prefix + name) for name in tensors)
    by_slot = case.topk_by == "slot"
    for name, array in ((f"{prefix}block_table", table), (f"{prefix}seq_lens", lens)):
        if (array is None) != by_slot:
            said = "given, expected None" if by_slot else "missing, expected"
            raise InputError(f"{name} is {said} with topk_by {case.topk_by!r}")
    axes = queries.bound()
    if not by_slot:
        table = np.ascontiguousarray(axes.take(f"{prefix}block_table", table, "B max_blocks", ("i32",)))
        lens = axes.take(f"{prefix}seq_lens", lens, "B", ("i32",)).astype(np.int64)
        max_blocks, block_size = axes["max_blocks"], cache.block_size
        for b in np.flatnonzero((lens < 0) | (lens > max_blocks * block_size))[:1]:
            most = f"at most {max_blocks * block_size}: {prefix}block_table has {max_blocks} blocks of {block_size}"
            said = "0 or more" if lens[b] < 0 else f"{most} a request"
            raise InputError(f"{prefix}seq_lens[{b}] is {lens[b]}, expected {said}")
    if indices is None:
        if by_slot or prefix:
            why = "extra_kv_cache" if prefix else "topk_by 'slot'"
            raise InputError(f"{prefix}topk_indices is missing, expected with {why}")
        if length is not None:
            raise InputError("topk_length is given, expected None without topk_indices")
        return Paging(prefix, cache, table, lens, None, None)
    indices = axes.take(f"{prefix}topk_indices", indices, f"{queries.axes} K", ("i32", "i64"))
    if length is None:
        return Paging(prefix, cache, table, lens, queries.flat(indices), None)
    of_request = queries.axes == "B T" and length.ndim == 1
    length = axes.take(f"{prefix}topk_length", length, "B" if of_request else queries.axes, ("i32",))
    for index in np.argwhere((length < 0) | (length > axes["K"]))[:1]:
        found = f"{prefix}topk_length[{', '.join(map(str, index))}] is {length[tuple(index)]}"
        raise InputError(f"{found}, expected 0 to {axes['K']}, the entries of {prefix}topk_indices")
    of_row = np.repeat(length, axes["T"]) if of_request else length.reshape(-1)
    return Paging(prefix, cache, table, lens, queries.flat(indices), of_row)


def in_window(place: Array, at: Array, causal: bool, window: tuple[int | None, int | None, int]) -> Array:
    """bool [n, K]: which of the positions [n, K] queries at positions [n] see."""
    left, right, first = window
    i = at[:, None]
    if left is None and right is None:
        return place <= i if causal else np.ones(place.shape, bool)
    inside = np.ones(place.shape, bool)
    if left is not None:
        inside &= place >= i - left
    if right is not None:
        inside &= place <= i + right
    inside |= place < first
    return inside & (place <= i) if causal else inside


def _biased(case: PagedCase, queries: Queries, bias: Array, first: int, place: Array, live: Array) -> Array:
    """bool [T, K]: what is left of `live` where a bias [T, H or 1, columns] of -inf skips keys."""
    if not live.any():
        return live
    found = np.take_along_axis(bias, np.where(live, place, 0)[:, None], axis=2)  # [T, H or 1, K]
    found = widen(found, np.float64)
    for t, h, k in np.argwhere(live[:, None] & ~(found < np.inf))[:1]:
        head = f"{h}, " if case.bias is not None and case.bias.ndim == len(queries.axes.split()) + 2 else ""
        index = f"bias[{queries.place(first + t)}, {head}{place[t, k]}]"
        raise InputError(f"{index} is {found[t, h, k]}, expected a finite number or -inf")
    return live & (found > -np.inf).any(axis=1)


def _slots(paging: Paging, request: Array, position: Array) -> Array:
    """The slots of tokens [M], each of its request [M]."""
    if paging.table is None:
        return position.copy()
    column = position // paging.cache.block_size
    slots = _blocks(paging, request, column, position)
    slots -= column
    slots *= paging.cache.block_size
    slots += position
    return slots


def _first_slots(paging: Paging, b: int, n: int) -> Array:
    """The slots of tokens 0 .. n - 1 of request b."""
    block_size = paging.cache.block_size
    position = np.arange(0, n, block_size)
    blocks = _blocks(paging, np.full(len(position), b), position // block_size, position)
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:n]


def _blocks(paging: Paging, request: Array, column: Array, position: Array) -> Array:
    """The blocks of tokens at `position` [M], in these columns of the table. Raises InputError."""
    assert paging.table is not None
    num_blocks = paging.cache.num_blocks
    blocks: Array = paging.table.reshape(-1).take(request * paging.table.shape[1] + column).astype(np.int64)
    if blocks.size and (blocks.min() < 0 or blocks.max() >= num_blocks):
        i = np.flatnonzero((blocks < 0) | (blocks >= num_blocks))[0]
        raise InputError(
            f"{paging.prefix}block_table[{request[i]}, {column[i]}] is {blocks[i]}, expected 0 to {num_blocks - 1}:"
            f" request {request[i]} sees token {position[i]}, and {paging.prefix}kv_cache has {num_blocks} blocks"
        )
    return blocks
