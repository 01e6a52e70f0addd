# SPDX-License-Identifier: Apache-2.0
"""Facts on a paged case that is not plain: how many keys wrong rows have, and which of a list are weighted wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..arrays import Array
from ..canonical import checked, gather
from ..cases import PagedCase
from .attended import told
from .facts import Fact
from .fewer import shape_of

LOOKED_AT = 3  # rows whose lists are solved for


def count_keys(case: PagedCase) -> Array:
    """Keys of each query row [B, T]."""
    B, T, _ = shape_of(case)
    counts = [np.diff(seen.starts) for seen in checked(case, "f64").seen]
    found: Array = np.concatenate([np.zeros(0, np.int64), *counts]).reshape(B, T)
    return found


def listed_lengths(keys: Array, bad: Array, rows: Mapping[str, Array]) -> Iterator[Fact]:
    """What the lists of wrong rows have that those of right ones have not. keys [B, T], bad [B, T, H]."""
    hit = np.asarray(bad.any(-1))
    if "out" in rows:
        wrong = np.asarray((rows["out"] > 1).any(-1))
        if (keys == 1).any() and not wrong[keys == 1].any() and wrong[keys > 1].any():
            every = "all" if wrong[keys > 1].all() else "some"
            yield Fact("one key", f"rows that see one key are right in out, {every} that see more are wrong")
    if hit.any() and not hit[keys > 0].any():
        yield Fact("empty", "only rows without keys are wrong")
        return
    right, wrong_keys = keys[(keys > 0) & ~hit], keys[(keys > 0) & hit]
    if len(right) and len(wrong_keys):
        if right.max() < wrong_keys.min():
            text = f"right up to lists of {right.max()} keys, wrong from {wrong_keys.min()} on"
            yield Fact("length", text, {"right": int(right.max()), "wrong": int(wrong_keys.min())})
        elif wrong_keys.max() < right.min():
            text = f"wrong up to lists of {wrong_keys.max()} keys, right from {right.min()} on"
            yield Fact("length", text, {"wrong": int(wrong_keys.max()), "right": int(right.min())})


def listed_attended(case: PagedCase, g: Array, w: Array, bad: Array) -> Iterator[Fact]:
    """g and w [B, T, H, V], bad [B, T, H] -> facts on the longest wrong lists short enough, key by place."""
    problem = checked(case, "f64")
    if problem.main.heads > 1 or case.output_scale is not None:
        return
    lists = list(problem.seen)
    counts = np.concatenate([np.zeros(0, np.int64), *(np.diff(seen.starts) for seen in lists)])
    request = np.repeat(np.arange(len(lists)), np.diff(problem.queries.starts))
    flat = [x.reshape(len(counts), *x.shape[2:]) for x in (g, w, bad)]
    hit = flat[2].any(-1) & (counts >= 2) & (counts <= case.head_dim_v // 2)
    for n in sorted(np.flatnonzero(hit), key=lambda n: -counts[n])[:LOOKED_AT]:
        b = int(request[n])
        t = int(n - problem.queries.starts[b])
        rows, keys = gather(problem, lists[b])
        mine = keys[lists[b].starts[t] : lists[b].starts[t + 1]]
        values = rows[0][mine][:, problem.value]
        of = f"the list of request {b}, query {t}"
        found = told(values, flat[0][n], flat[1][n], flat[2][n], of, {"request": b, "query": t})
        if found is not None:
            yield from found
            return
