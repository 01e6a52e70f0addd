# SPDX-License-Identifier: Apache-2.0
"""Which keys a wrong output attends to: weights recovered from it by least squares, where values allow it.

An output is sum w_j v_j. With no more keys than half the columns, and values that are independent, w follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import Case, PagedCase
from ..cases.placement import dense_table
from ..checks import widen

RESIDUAL = 0.03  # of an output that is a mix of the request's values
CONDITION = 30.0
MOVED = 0.6  # of the keys: with more of them weighted wrongly, none is first


def attended(case: Case, g: Array, w: Array, bad: Array) -> Iterator[Any]:
    """g and w [B, T, H, V], bad [B, T, H] -> facts on the longest wrong request short enough."""
    if not isinstance(case, PagedCase):
        return
    hit = bad.any((1, 2)) & (case.seq_lens >= 2) & (case.seq_lens <= case.head_dim_v // 2)
    for b in sorted(np.flatnonzero(hit), key=lambda b: -case.seq_lens[b])[:3]:
        found = told(_values(case, int(b)), g[b], w[b], bad[b], f"request {b}", {"request": int(b)})
        if found is not None:
            yield from found
            return


def told(values: Array, g: Array, w: Array, bad: Array, of: str, data: dict[str, Any]) -> list[Any] | None:
    """Facts on the rows g and w [..., V] over the keys of `of`, whose values are [n, V]; None: they tell nothing."""
    from .facts import Fact, ranges

    rows = bad & np.isfinite(g).all(-1)
    spectrum = np.linalg.svd(values, compute_uv=False) if np.isfinite(values).all() else np.zeros(1)
    if not rows.any() or spectrum[-1] * CONDITION < spectrum[0] or spectrum[0] == 0:
        return None
    solve = np.linalg.pinv(values)  # [V, n]
    mine, right = g[rows] @ solve, w[rows] @ solve  # [rows, n]
    size = np.linalg.norm(g[rows], axis=-1)
    residual = np.linalg.norm(mine @ values - g[rows], axis=-1)
    if (residual > RESIDUAL * size).mean() > 0.5:
        return [Fact("values", f"out of {of} is no mix of the values of its keys", data)]
    heavy = right > 0.3 / len(values)
    with np.errstate(all="ignore"):
        ratio = np.where(heavy, mine / right, np.nan)
        ratio = ratio[np.isfinite(ratio).any(1)]
        of_row = np.nanmedian(ratio, axis=1, keepdims=True) if len(ratio) else ratio[:, :1]
        of_key = _median(ratio / np.where(of_row > 0, of_row, np.nan))  # [n]
    moved = np.abs(of_key[np.isfinite(of_key)] - 1) > 0.25
    found: list[Any] = []
    if not moved.any() or moved.mean() > MOVED:
        return found
    for name, which in (("lost", of_key < 0.25), ("twice", np.abs(of_key - 2) < 0.25)):
        keys = [int(j) for j in np.flatnonzero(which)]
        if keys and len(keys) < len(values):
            count = "has" if len(keys) == 1 else "have"
            weight = "no weight" if name == "lost" else "twice its weight"
            text = f"key{'s' * (len(keys) > 1)} {ranges(keys)} of {of} {count} {weight}"
            found.append(Fact(f"keys {name}", text, {**data, "keys": ranges(keys)}))
    first = int(np.flatnonzero(np.abs(of_key - 1) > 0.25)[0])
    text = f"the first key of {of} that is weighted wrongly, next to the others, is {first}"
    return [*found, Fact("first wrong key", text, {**data, "key": first})]


def _median(x: Array) -> Array:
    """[n] of [rows, n]; NaN where a column has none."""
    good = np.isfinite(x).any(0)
    found = np.full(x.shape[1], np.nan)
    if good.any():
        found[good] = np.nanmedian(x[:, good], axis=0)
    return found


def _values(case: PagedCase, b: int) -> Array:
    j = np.arange(int(case.seq_lens[b]))
    block = case.kv_cache.shape[1]
    rows = case.kv_cache[dense_table(case)[b, j // block], j % block, : case.head_dim_v]
    return widen(rows, np.float64)
