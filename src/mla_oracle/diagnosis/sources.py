# SPDX-License-Identifier: Apache-2.0
"""Wrong rows that are right rows of another place: which row of the truth each one is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array

WRONG, KNOWN = 512, 8192  # rows looked at: of the actual, and of the truth
NEAR = 0.03  # relative error
MOST = 0.8  # of the rows


class Matches(NamedTuple):
    """Rows [n, 3] (request, query, head) of the actual, the rows of the truth they are, and how many were looked at."""

    to: Array
    source: Array
    wrong: int
    rule: str


def matches(g: Array, w: Array, bad: Array) -> Matches | None:
    """g and w [B, T, H, V], bad [B, T, H]: None, where less than half of the wrong rows are rows of the truth."""
    shape = bad.shape
    wrong = np.flatnonzero(bad & np.isfinite(g).all(-1))
    wrong = wrong[:: max(1, len(wrong) // WRONG)]
    rows = w.reshape(-1, w.shape[-1])
    known = np.flatnonzero(np.isfinite(rows).all(-1))[:KNOWN]
    if not len(wrong) or len(known) < 2:
        return None
    mine, right = g.reshape(rows.shape)[wrong], rows[known]
    size = np.square(right).sum(-1)
    square = size - 2 * mine @ right.T + np.square(mine).sum(-1)[:, None]  # [wrong, known]
    best = square.argmin(1)
    close = (square[np.arange(len(wrong)), best] < NEAR**2 * size[best]) & (size[best] > 0)
    if close.mean() < 0.5:
        return None
    to = np.array(np.unravel_index(wrong[close], shape)).T
    source = np.array(np.unravel_index(known[best[close]], shape)).T
    rules = [_rule(name, to[:, axis], source[:, axis]) for axis, name in enumerate(("request", "query", "head"))]
    return Matches(to, source, len(wrong), "; ".join(rule for rule in rules if rule))


def sources(g: Array, w: Array, bad: Array) -> Iterator[Any]:
    """g and w [B, T, H, V], bad [B, T, H] -> a fact, where half of the wrong rows are rows of the truth."""
    from .facts import Fact

    found = matches(g, w, bad)
    if found is not None and found.rule:
        share = len(found.to) / found.wrong
        count = "all" if share == 1 else f"{len(found.to)} of {found.wrong}"
        text = f"{count} wrong rows are right ones of another place: {found.rule}"
        yield Fact("rows of another place", text, {"share": float(f"{share:.3g}"), "rule": found.rule})


def permutation(g: Array, w: Array) -> Array | None:
    """Which column of w [R, V] each column of g is, where they are all there and not in their places."""
    size = np.square(w).sum(0)
    square = size - 2 * g.T @ w + np.square(g).sum(0)[:, None]  # [V, V]
    order: Array = square.argmin(1)
    close = square[np.arange(len(order)), order] <= NEAR**2 * size[order]
    moved = (order != np.arange(len(order))).any()
    return order if moved and close.all() and len(np.unique(order)) == len(order) else None


def _rule(name: str, to: Array, source: Array) -> str:
    """In words what most rows have in common; rows that are alike may have been taken for one another."""
    step = source - to
    values, counts = np.unique(step, return_counts=True)
    usual = int(values[counts.argmax()])
    if counts.max() >= MOST * len(step):
        return f"{name} {'+-'[usual < 0]}{abs(usual)}" if usual else ""
    first, counts = np.unique(source, return_counts=True)
    if counts.max() >= MOST * len(step):
        return f"{name} {first[counts.argmax()]} for all"
    moved = np.flatnonzero(step)[0]
    return f"{name} {source[moved]} for {name} {to[moved]}"
