# SPDX-License-Identifier: Apache-2.0
"""Orders in which a tile of a row may come out: index arrays i, new = old[..., i]."""

from __future__ import annotations

import numpy as np

from ..arrays import Array


def transposed_tiles(n: int, tile: int = 64, rows: int = 8) -> Array:
    """Each whole tile of `tile` elements read as [rows, tile / rows] where it is the transpose."""
    i = np.arange(n)
    r, c = divmod(i % tile, tile // rows)
    order = i // tile * tile + c * rows + r
    return np.where(i < n // tile * tile, order, i)


def hadamard(x: Array) -> Array:
    """H x / sqrt(n) over the last axis, n a power of two (Sylvester's order)."""
    n = x.shape[-1]
    y = x.copy()
    step = 1
    while step < n:
        pairs = y.reshape(*x.shape[:-1], n // (2 * step), 2, step)
        y = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        step *= 2
    scaled: Array = y / np.sqrt(n)
    return scaled
