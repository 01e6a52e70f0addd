# SPDX-License-Identifier: Apache-2.0
"""Where an element of a result is: request, query, head, column, token position, page and slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import AppendCase, Case, DenseCase, MergeCase, PagedCase, RopeCase
from ..checks import widen


def locate(case: Case, name: str, index: tuple[int, ...]) -> dict[str, Any]:
    """`index` of the result `name` in words: a dict of coordinates, the raw index, and all of it as `text`."""
    place: dict[str, Any] = {}
    if name.startswith("partial_"):
        place["rank" if isinstance(case, PagedCase) else "state"], index = index[0], index[1:]
    match case:
        case PagedCase():
            place |= _paged(case, name, index)
        case DenseCase():
            place |= dict(zip(("query", "head", "column"), index, strict=False))
            place["token"] = len(case.c_kv) - len(case.q_nope) + index[0]
        case RopeCase():
            axes = ("row", "head", "column") if len(index) == 3 else ("row", "column")
            place |= dict(zip(axes, index, strict=True))
            place["position"] = int(case.positions[index[0]])
        case AppendCase():
            place |= dict(zip(("page", "slot", "column"), index, strict=True))
        case MergeCase():
            place |= {"row": list(index[:-1]) if name.endswith("out") else list(index)}
            if name.endswith("out"):
                place["column"] = index[-1]
    text = ", ".join(f"{key} {value}" for key, value in place.items() if value is not None)
    return {**place, "index": list(index), "text": text}


def in_row_order(case: Case, lse: Array) -> Array:
    """The LSE of `case` with its axes in the order of out's rows: [B, T, H] of the [B, H, T] that "BHT" says."""
    return lse.swapaxes(1, 2) if isinstance(case, PagedCase) and case.lse_axes == "BHT" and lse.ndim == 3 else lse


def in_row_axes(case: Case, results: dict[str, Array]) -> tuple[Case, dict[str, Array]]:
    """`case` and its results with the LSE's axes in the order of out's rows."""
    if not isinstance(case, PagedCase) or case.lse_axes == "BTH":
        return case, results
    turned = {name: in_row_order(case, array) if name == "lse" else array for name, array in results.items()}
    return dataclasses.replace(case, lse_axes="BTH"), turned


def own_index(case: Case, name: str, index: tuple[int, ...]) -> tuple[int, ...]:
    """`index` of the result `name`, whose axes are in the order of out's rows, in the order they have in the case.

    Its own inverse.
    """
    if name == "lse" and isinstance(case, PagedCase) and case.lse_axes == "BHT" and len(index) == 3:
        return index[0], index[2], index[1]
    return index


def _paged(case: PagedCase, name: str, index: tuple[int, ...]) -> dict[str, Any]:
    index = own_index(case, name, index)
    if case.qo_indptr is not None:
        request = int(np.searchsorted(case.qo_indptr, index[0], side="right")) - 1
        first, end = (int(row) for row in case.qo_indptr[request : request + 2])
        index, tokens = (request, index[0] - first, *index[1:]), end - first
    else:
        request, tokens = index[0], case.q.shape[1] if case.q.ndim == 4 else 0
    axes = ("request", "query", "head", "column") if tokens else ("request", "head", "column")
    place: dict[str, Any] = dict(zip(axes, index, strict=False))
    if case.extensions() not in ((), ("lse_axes",)):
        return place | _last_key(case, request, index[1] if tokens else 0)
    length = int(case.seq_lens[request])
    last = length - tokens + index[1] if tokens and case.causal else length - 1
    place["token"] = None if last < 0 else last
    if last >= 0:
        block = case.kv_cache.shape[1]
        place["page"] = int(case.block_table[request, last // block])
        place["slot"] = last % block
    return place


def _last_key(case: PagedCase, request: int, query: int) -> dict[str, Any]:
    """How many keys a query sees, and where the last of them is: its token (by position), its page and slot."""
    from itertools import islice

    from ..canonical import checked

    problem = checked(case, "f64")
    seen = next(islice(problem.seen, request, None))
    first, end = (int(i) for i in seen.starts[query : query + 2])
    place: dict[str, Any] = {"keys": end - first}
    if end == first:
        return place
    extra = bool(seen.source[end - 1])
    cache = problem.extra if extra else problem.main
    assert cache is not None
    if case.topk_by == "position":
        place["extra token" if extra else "token"] = int(seen.position[end - 1])
    page, slot = divmod(int(seen.slot[end - 1]), cache.block_size)
    return place | ({"extra page": page, "slot": slot} if extra else {"page": page, "slot": slot})


def first_nonfinite_inputs(case: Case) -> list[dict[str, Any]]:
    """The first NaN or infinity of every tensor that a right kernel reads, with how many there are."""
    found = []
    for name, array, index_of in _visible(case):
        bad = ~np.isfinite(widen(array, np.float32))
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            place = {"tensor": name, "index": index_of(index), "value": str(array[index])}
            found.append({**place, "count": int(bad.sum())})
    return found


def _visible(case: Case) -> Iterator[tuple[str, Array, Callable[[tuple[int, ...]], list[int]]]]:
    """Tensors that a right kernel reads, by name, and how messages index them."""
    if not isinstance(case, PagedCase):
        if not isinstance(case, (MergeCase, AppendCase)):
            yield from ((n, t, list) for n, t in case.tensors().items() if t.dtype.kind not in "iu")
        return
    yield "q", case.q, list
    if case.extensions():
        yield from _rows_seen(case)
        return
    from ..cases.placement import dense_table

    table = dense_table(case)
    block = case.kv_cache.shape[1]
    for b, length in enumerate(case.seq_lens):
        j = np.arange(length)
        yield f"request {b} of kv_cache", case.kv_cache[table[b, j // block], j % block], list


def _rows_seen(case: PagedCase) -> Iterator[tuple[str, Array, Callable[[tuple[int, ...]], list[int]]]]:
    """The rows [KV, n, D] that each request sees of each cache, indexed as [block, offset, column]."""
    from ..canonical import checked

    problem = checked(case, "f64")
    for b, seen in enumerate(problem.seen):
        for source, name, cache in ((0, "kv_cache", problem.main), (1, "extra_kv_cache", problem.extra)):
            if cache is not None:
                slots = np.unique(seen.slot[seen.source == source])
                size = cache.block_size

                def index_of(index: tuple[int, ...], slots: Array = slots, size: int = size) -> list[int]:
                    return [*divmod(int(slots[index[1]]), size), index[2]]

                yield f"request {b} of {name}", cache.read(slots), index_of
