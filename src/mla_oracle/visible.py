# SPDX-License-Identifier: Apache-2.0
"""Which keys each query of a paged case sees, in which order: length, mask, window, selection and bias; no arithmetic.

    for b, seen in enumerate(visible(case, queries, bias, main, extra)):
        seen.slot[seen.starts[t] : seen.starts[t + 1]]      the keys of query t of request b, first to last

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
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array
from .caches import Cache
from .cases import PagedCase
from .checks import choice, widen
from .errors import InputError
from .geometry import check_integer
from .queries import Queries


class Seen(NamedTuple):
    """The keys of one request, query after query: those of query t are starts[t] .. starts[t + 1] of the others."""

    starts: Array  # [T + 1] i64
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


def visible(case: PagedCase, queries: Queries, bias: Array | None, main: Cache, extra: Cache | None) -> Iterator[Seen]:
    """The keys of each request in turn. Raises InputError: at once for tensors that contradict each other, then for
    an index, a block id or a bias of a request where its turn comes. bias: [N, H or 1, columns]"""
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
    return (_seen(case, b, queries, pagings, window, bias) for b in range(len(queries.starts) - 1))


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
        table = axes.take(f"{prefix}block_table", table, "B max_blocks", ("i32",))
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


def _seen(case: PagedCase, b: int, queries: Queries, pagings: list[Paging], window: Any, bias: Array | None) -> Seen:
    first, last = (int(row) for row in queries.starts[b : b + 2])
    places, kept = [], []
    for paging in pagings:
        place, live = _selected(case, paging, b, first, last, queries)  # [T, K] each
        if not paging.prefix and paging.lens is not None:
            live = live & in_window(place, int(paging.lens[b]), case.causal, window)
            if bias is not None:
                live = _biased(case, queries, bias[first:last], first, place, live)
        places.append(place)
        kept.append(live)
    live, place = np.concatenate(kept, axis=1), np.concatenate(places, axis=1)
    source = np.repeat([0, 1][: len(places)], [p.shape[1] for p in places])
    starts = np.concatenate([[0], live.sum(axis=1).cumsum()]).astype(np.int64)
    source, position = np.broadcast_to(source, live.shape)[live], place[live]
    slot = position.copy()
    for s, paging in enumerate(pagings):
        if paging.table is not None:
            mine = source == s
            slot[mine] = _slots(paging, b, position[mine])
    return Seen(starts, source, position, slot)


def _selected(case: PagedCase, paging: Paging, b: int, first: int, last: int, queries: Queries) -> tuple[Array, Array]:
    """(positions or slots [T, K] i64, which of them the selection means [T, K])."""
    cache, lens = paging.cache, paging.lens
    capacity = cache.num_blocks * cache.block_size if lens is None else int(lens[b])
    if paging.indices is None:
        place = np.broadcast_to(np.arange(capacity), (last - first, capacity))
        return place, np.ones(place.shape, bool)
    place = paging.indices[first:last].astype(np.int64)
    live = place >= 0
    if paging.length is not None:
        live &= np.arange(place.shape[1]) < paging.length[first:last, None]
    outside = live & (place >= capacity)
    if case.topk_outside == "error":
        for t, k in np.argwhere(outside)[:1]:
            limit = f"the rows of {paging.prefix}kv_cache" if lens is None else f"{paging.prefix}seq_lens[{b}]"
            index = f"{paging.prefix}topk_indices[{queries.place(first + t)}, {k}]"
            raise InputError(f"{index} is {place[t, k]}, expected below {capacity}, {limit}")
    return place, live & ~outside


def in_window(place: Array, n: int, causal: bool, window: tuple[int | None, int | None, int]) -> Array:
    """bool [T, K] of positions [T, K] of a request of n tokens."""
    left, right, first = window
    i = (n - len(place) + np.arange(len(place)))[:, None]
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


def _slots(paging: Paging, b: int, position: Array) -> Array:
    """The slots of tokens of request b."""
    assert paging.table is not None and paging.lens is not None
    block_size, num_blocks = paging.cache.block_size, paging.cache.num_blocks
    column = position // block_size
    block = paging.table[b, column].astype(np.int64)
    for wrong in np.flatnonzero((block < 0) | (block >= num_blocks))[:1]:
        raise InputError(
            f"{paging.prefix}block_table[{b}, {column[wrong]}] is {block[wrong]}, expected 0 to {num_blocks - 1}:"
            f" request {b} sees token {position[wrong]}, and {paging.prefix}kv_cache has {num_blocks} blocks"
        )
    slots: Array = block * block_size + position % block_size
    return slots
