# SPDX-License-Identifier: Apache-2.0
"""A temperature together with keys that are not seen: two constants that neither shows alone, read off the lse at once.

Of each temperature the sums over the first keys, and over the last, are had by one accumulation: what number of keys
fits all rows best says how good the temperature is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..arrays import Array
from ..mutants import Mutant, causal, compose, lengths
from . import made
from .samples import Sample

ROWS = 12  # of each request
KEYS = 1 << 13  # of a row: more are not looked at
GRID = np.geomspace(1 / 16, 16, 97)
ROUNDS = 5


def truncated(known: list[Sample]) -> Iterator[Mutant]:
    """The window, or the number of first keys, and the temperature that say the lse together."""
    few = [k for k in known if k.s.shape[1] <= KEYS]
    if not few or any(k.lse is None or not np.isfinite(k.lse).all() for k in few):
        return
    for build, last in ((causal.window, True), (lengths.at_most, False)):
        rows = [_rows(k, last) for k in few]
        grid, best = GRID, (np.inf, 1.0, 0)
        for _ in range(ROUNDS):
            at, best = min(enumerate(_misfit(rows, float(x)) for x in grid), key=lambda found: found[1][0])
            grid = np.linspace(grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)], 15)
        if 0 < best[2] < max(k.s.shape[1] for k in few):
            yield compose(build(best[2]), made.temperature(best[1]))


def _rows(k: Sample, last: bool) -> tuple[Array, Array, Array]:
    """Scores [R, n] of the keys in the order they are counted in, how many a row sees [R], its lse [R]."""
    assert k.lse is not None
    s, seen = k.s[:ROWS], k.seen[:ROWS]
    if last:
        place = np.arange(s.shape[1])
        s = np.where(place < seen[:, None], np.take_along_axis(s, np.maximum(seen[:, None] - 1 - place, 0), 1), -np.inf)
    return s, seen, k.lse[:ROWS]


def _misfit(rows: list[tuple[Array, Array, Array]], x: float) -> tuple[float, float, int]:
    """(the mean error of the lse, x, the number of keys that gives it) of scores times x."""
    most = max(s.shape[1] for s, _, _ in rows)
    error = np.zeros(most)
    for s, _, lse in rows:
        top = x * s.max(-1, keepdims=True)
        sums = top + np.log(np.maximum(np.cumsum(np.exp(x * s - top), -1), 1e-300))  # [R, n] of 1, 2, ... keys
        apart = np.abs(sums - lse[:, None]).mean(0)
        error += np.concatenate([apart, np.full(most - len(apart), apart[-1])])
    at = int(error.argmin())
    return float(error[at]), x, at + 1
