# SPDX-License-Identifier: Apache-2.0
"""The query rows of a paged case, request after request: [B, T, ...], [B, ...] or ragged [N, ...] as N rows.

    queries = queries_of(case, ("f32", "bf16"))
    queries.flat(case.topk_indices)         [N, K]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import FLOATS, Array, Axes
from ..cases import PagedCase
from ..errors import InputError


class Queries(NamedTuple):
    """Request b has the query rows starts[b] .. starts[b + 1] of N = starts[B]."""

    starts: Array  # [B + 1] i64
    axes: str  # of a query row: "B T", "B" or "N"
    sizes: dict[str, int]  # of those axes, B and H

    def flat(self, array: Array) -> Array:
        """[*axes, ...] -> [N, ...]"""
        return array.reshape(int(self.starts[-1]), *array.shape[len(self.axes.split()) :])

    def bound(self) -> Axes:
        """Axes that are bound to these sizes."""
        return Axes(self.sizes)

    def place(self, row: int) -> str:
        """The indices of query row 0 .. N - 1 in a tensor of these axes."""
        b = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"{b}, {row - self.starts[b]}" if self.axes == "B T" else str(row)


def queries_of(case: PagedCase, allowed: tuple[str, ...]) -> Queries:
    """The query rows of each request. Raises InputError."""
    axes = Axes()
    if case.qo_indptr is None:
        rows = "B" if case.q.ndim == 3 else "B T"
        axes.take("q", case.q, f"{rows} H D", allowed)
        starts = np.arange(axes["B"] + 1, dtype=np.int64) * axes.get("T", 1)
        return Queries(starts, rows, {name: axes[name] for name in (*rows.split(), "H")})
    axes.take("q", case.q, "N H D", allowed)
    starts = axes.take("qo_indptr", case.qo_indptr, "B+1", ("i32",)).astype(np.int64)
    if not len(starts):
        raise InputError("qo_indptr is [0], expected [B+1]")
    if starts[0] != 0:
        raise InputError(f"qo_indptr[0] is {starts[0]}, expected 0")
    for b in np.flatnonzero(np.diff(starts) < 0)[:1]:
        raise InputError(f"qo_indptr[{b + 1}] is {starts[b + 1]}, expected at least {starts[b]}, the entry before it")
    if starts[-1] != axes["N"]:
        raise InputError(f"qo_indptr[{axes['B+1'] - 1}] is {starts[-1]}, expected {axes['N']}, the rows of q")
    return Queries(starts, "N", {"N": axes["N"], "B": len(starts) - 1, "H": axes["H"]})


def bias_of(case: PagedCase, queries: Queries) -> Array | None:
    """The bias as [N, H or 1, columns]. Raises InputError."""
    if case.bias is None:
        return None
    if case.topk_by == "slot":
        raise InputError("bias is given, expected None with topk_by 'slot': a slot has no position")
    per_head = case.bias.ndim == len(queries.axes.split()) + 2
    letters = f"{queries.axes} {'H ' if per_head else ''}columns"
    flat = queries.flat(queries.bound().take("bias", case.bias, letters, FLOATS))
    return flat if per_head else flat[:, None]
