# SPDX-License-Identifier: Apache-2.0
"""What says which rows of a cache are keys: block table, lengths, selection and window, checked against each other.

    pagings_of(case, queries, main, extra)      a Paging of each cache
    window_of(case)                             (left, right, first)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Array, aligned
from ..cases import PagedCase
from ..checks import choice
from ..errors import InputError
from ..geometry import check_integer
from .caches import Cache
from .queries import Queries


class Paging(NamedTuple):
    """One cache and what says which of its rows are keys; messages name tensors with `prefix`."""

    prefix: str
    cache: Cache
    table: Array | None  # [B, max_blocks], None by slot, as lens
    lens: Array | None  # [B] i64
    indices: Array | None  # [N, K]
    length: Array | None  # [N]


def pagings_of(case: PagedCase, queries: Queries, main: Cache, extra: Cache | None) -> list[Paging]:
    """Of the main cache, and of the extra one. Raises InputError."""
    pagings = [_paging(case, queries, "", main)]
    if extra is not None:
        return [*pagings, _paging(case, queries, "extra_", extra)]
    for name in ("block_table", "seq_lens", "topk_indices", "topk_length"):
        if getattr(case, f"extra_{name}") is not None:
            raise InputError(f"extra_{name} is given, expected None without extra_kv_cache")
    return pagings


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
        table = aligned(axes.take(f"{prefix}block_table", table, "B max_blocks", ("i32",)))
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
    indices = aligned(axes.take(f"{prefix}topk_indices", indices, f"{queries.axes} K", ("i32", "i64")))
    if length is None:
        return Paging(prefix, cache, table, lens, queries.flat(indices), None)
    of_request = queries.axes == "B T" and length.ndim == 1
    length = axes.take(f"{prefix}topk_length", length, "B" if of_request else queries.axes, ("i32",))
    for index in np.argwhere((length < 0) | (length > axes["K"]))[:1]:
        found = f"{prefix}topk_length[{', '.join(map(str, index))}] is {length[tuple(index)]}"
        raise InputError(f"{found}, expected 0 to {axes['K']}, the entries of {prefix}topk_indices")
    of_row = np.repeat(length, axes["T"]) if of_request else aligned(length.reshape(-1))
    return Paging(prefix, cache, table, lens, queries.flat(indices), of_row)
