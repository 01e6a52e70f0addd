# SPDX-License-Identifier: Apache-2.0
"""Where an element of a result is: request, query, head, column, token position, page and slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .arrays import Array
from .cases import AppendCase, Case, DenseCase, MergeCase, PagedCase, RopeCase
from .checks import widen
from .extensions import require_plain


def locate(case: Case, name: str, index: tuple[int, ...]) -> dict[str, Any]:
    """`index` of the result `name` in words: a dict of coordinates, the raw index, and all of it as `text`."""
    require_plain(case, "a verdict")
    place: dict[str, Any] = {}
    if name.startswith("partial_"):
        place["rank" if isinstance(case, PagedCase) else "state"], index = index[0], index[1:]
    match case:
        case PagedCase():
            place |= _paged(case, index)
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


def _paged(case: PagedCase, index: tuple[int, ...]) -> dict[str, Any]:
    tokens = case.q.shape[1] if case.q.ndim == 4 else None
    axes = ("request", "query", "head", "column") if tokens else ("request", "head", "column")
    place: dict[str, Any] = dict(zip(axes, index, strict=False))
    request = index[0]
    length = int(case.seq_lens[request])
    last = length - tokens + index[1] if tokens and case.causal else length - 1
    place["token"] = None if last < 0 else last
    if last >= 0:
        block = case.kv_cache.shape[1]
        place["page"] = int(case.block_table[request, last // block])
        place["slot"] = last % block
    return place


def first_nonfinite_inputs(case: Case) -> list[dict[str, Any]]:
    """The first NaN or infinity of every tensor that a right kernel reads, with how many there are."""
    found = []
    for name, array in _visible(case):
        bad = ~np.isfinite(widen(array, np.float32))
        if bad.any():
            index = [int(i) for i in np.argwhere(bad)[0]]
            found.append(
                {"tensor": name, "index": index, "value": str(array[tuple(index)]), "count": int(bad.sum())}
            )
    return found


def _visible(case: Case) -> Iterator[tuple[str, Array]]:
    require_plain(case, "a verdict")
    if not isinstance(case, PagedCase):
        if not isinstance(case, (MergeCase, AppendCase)):
            yield from ((n, t) for n, t in case.tensors().items() if t.dtype.kind not in "iu")
        return
    from .placement import dense_table

    yield "q", case.q
    table = dense_table(case)
    block = case.kv_cache.shape[1]
    for b, length in enumerate(case.seq_lens):
        j = np.arange(length)
        yield f"request {b} of kv_cache", case.kv_cache[table[b, j // block], j % block]
