# SPDX-License-Identifier: Apache-2.0
"""Mutants with one number in the scores, fitted to the lse that was returned, or to out where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..arrays import Array
from ..mutants import Mutant
from . import made
from .samples import Sample, log_sum

AT_ONCE = 1 << 18  # elements of the scores of as many numbers as are tried at once
Curve = Callable[[Sample, Array], Array]  # of numbers [g, 1, 1]: scores [g, R, n]


def curves(known: list[Sample]) -> Iterator[Mutant]:
    """One number in the scores: temperature, cap, bias."""
    if not known:
        return
    with np.errstate(all="ignore"):
        tried: list[tuple[Callable[[float], Mutant], Curve, Array]] = [
            (made.temperature, lambda k, x: k.s * x, np.geomspace(1 / 64, 4096, 73)),
            (made.soft_cap, _capped, np.geomspace(0.5, 200, 49)),
            (made.clipped, lambda k, x: np.minimum(k.s, x), np.geomspace(0.1, 100, 49)),
            (
                made.distance_bias,
                lambda k, x: k.s + x * (np.arange(k.s.shape[1]) - k.length + 1),
                np.r_[-np.geomspace(1e-4, 1, 20)[::-1], np.geomspace(1e-4, 1, 20)],
            ),
        ]
        if all(k.rope is not None for k in known):
            amounts = np.r_[0.0, np.geomspace(1 / 32, 32, 41)]
            tried.append((made.rope_scaled, lambda k, x: k.s + (x - 1) * _rope(k), amounts))
            tried.append((made.latent_scaled, lambda k, x: x * k.s + (1 - x) * _rope(k), amounts))
        for build, curve, grid in tried:
            value = _minimum(known, curve, grid)
            if value is not None:
                yield build(value)


def _rope(k: Sample) -> Array:
    """[R, n] the rope elements' part, 0 where masked."""
    return np.zeros(k.s.shape) if k.rope is None else np.where(np.isfinite(k.s), k.rope, 0.0)


def _capped(k: Sample, cap: Array) -> Array:
    return np.where(k.s > -np.inf, cap * np.tanh(k.s / cap), -np.inf)


def _minimum(known: list[Sample], curve: Curve, grid: Array) -> float | None:
    """Where the scores curve(sample, x) fit what was returned best; None: nowhere better than as they are."""
    start = float(np.mean([_misfit(k, k.s[None]) for k in known]))
    low, high = 0.0, 0.0
    best, least = np.nan, np.inf
    for _ in range(5):
        errors = np.mean([_misfits(k, curve, grid) for k in known], axis=0)  # [g]
        if not np.isfinite(errors).any():
            return None
        at = int(np.nanargmin(errors))
        best, low, high = float(grid[at]), float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])
        if not 0 < at < len(grid) - 1:
            return None
        least, grid = float(errors[at]), np.linspace(low, high, 15)
    return best if least <= 0.9 * start else None  # not before: a grid may be too coarse for what is near


def _misfits(k: Sample, curve: Curve, grid: Array) -> Array:
    """`_misfit` of every number in `grid` [g]."""
    rows, keys = k.s.shape
    step = max(1, AT_ONCE // max(rows * max(keys, k.values.shape[1]), 1))
    parts = [_misfit(k, curve(k, grid[i : i + step, None, None])) for i in range(0, len(grid), step)]
    return np.concatenate(parts)


def _misfit(k: Sample, s: Array) -> Array:
    """How far the lse of scores s [g, R, n] is from the returned one, or out, where there is no lse [g]."""
    if k.lse is not None and np.isfinite(k.lse).any():
        return _mean(np.abs(log_sum(s) - k.lse))
    if k.out is None:
        return np.full(len(s), np.nan)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return _mean(np.abs(p @ np.nan_to_num(k.values) - k.out))


def _mean(x: Array) -> Array:
    """[g] of x [g, ...], of what is finite, a thing that is not counting as far; NaN where nothing is."""
    x = x.reshape(len(x), -1)
    good = np.isfinite(x)
    far = 10 * x.max(-1, initial=-np.inf, where=good, keepdims=True)
    return np.where(good.any(-1), np.where(good, x, far).mean(-1), np.nan)
