# SPDX-License-Identifier: Apache-2.0
"""How far actual results are from the truth, row by row, and what kinds of values that are not finite differ.

A row is the last axis of out. Cosine and norm ratio tell "shrunk" (cosine 1, ratio not) from "turned".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..checks import widen

BITS: dict[str, Any] = {"f64": np.int64, "f32": np.int32, "f16": np.int16, "bf16": np.int16}


class Metrics(NamedTuple):
    """Figures of rows [*rows] of out, and of their LSE [*rows] where there is one. A row not finite has 0, 1, 1, 0."""

    relative_rms: Array  # RMS of g - w over the RMS of w
    cosine: Array
    norm_ratio: Array  # |g| / |w|
    max_ulp: Array  # i64, in the dtype of the actual, from the truth rounded to it
    lse_error: Array | None  # g - w
    nonfinite: dict[str, int]  # kind -> how many elements of out and lse


def metrics(actual: Mapping[str, Array], truth: Mapping[str, Array], *, empty_lse: float = -np.inf) -> Metrics:
    """The metrics of actual {"out" [*rows, V], optional "lse"} against the f64 truth of the same shapes."""
    g, w = widen(actual["out"], np.float64), truth["out"]
    good: Array = np.all(np.isfinite(g) & np.isfinite(w), axis=-1)
    g, w = np.where(good[..., None], g, 0.0), np.where(good[..., None], w, 0.0)
    relative, cosine, ratio = of_rows(g, w)
    kinds = nonfinite(actual["out"], truth["out"], None)
    lse_error = None
    if "lse" in actual:
        h, v = widen(actual["lse"], np.float64), truth["lse"]
        finite = np.isfinite(h) & np.isfinite(v)
        lse_error = np.where(finite, h, 0.0) - np.where(finite, v, 0.0)
        for kind, count in nonfinite(actual["lse"], truth["lse"], empty_lse).items():
            kinds[kind] = kinds.get(kind, 0) + count
    ulps = np.where(good, ulp(actual["out"], truth["out"]).max(axis=-1, initial=0), 0)
    return Metrics(relative, cosine, ratio, ulps, lse_error, kinds)


def of_rows(g: Array, w: Array) -> tuple[Array, Array, Array]:
    """(relative RMS error, cosine, norm ratio) of the rows of finite g and w [*rows, V], f64."""
    of_g, of_w = (np.sqrt(np.square(x).sum(axis=-1)) for x in (g, w))
    error = np.sqrt(np.square(g - w).sum(axis=-1))
    both = (of_g > 0) & (of_w > 0)
    same = error == 0
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(same, 0.0, error / of_w)
        cosine = np.where(both, (g * w).sum(axis=-1) / (of_g * of_w), np.where(same, 1.0, 0.0))
        ratio = np.where(same, 1.0, of_g / of_w)
    return relative, cosine, ratio


def ulp(actual: Array, truth: Array) -> Array:
    """How many numbers of actual's dtype it is from the truth rounded to it, i64; 0 where either is not finite."""
    name = dtypes.name_of(actual.dtype)
    rounded = dtypes.round_to(np.asarray(truth, np.float64), name)
    finite = np.isfinite(widen(actual, np.float64)) & np.isfinite(widen(rounded, np.float64))
    steps = [_ordered(x, name) for x in (actual, rounded)]
    found: Array = np.where(finite, np.abs(steps[0] - steps[1]), 0)
    return found


def nonfinite(actual: Array, truth: Array, empty: float | None) -> dict[str, int]:
    """How many elements differ where actual or truth is not finite, by kind; `empty`: the LSE of an empty row."""
    g, w = widen(actual, np.float64), truth
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    differs = ~same & ~(np.isfinite(g) & np.isfinite(w))
    of_empty = np.zeros(w.shape, bool) if empty is None or np.isfinite(empty) else w == empty
    kinds = {
        "value of an empty row": differs & of_empty,
        "NaN for a number": differs & ~of_empty & np.isnan(g) & np.isfinite(w),
        "infinity for a number": differs & ~of_empty & np.isinf(g) & np.isfinite(w),
        "number for NaN": differs & np.isnan(w) & ~np.isnan(g),
        "NaN for infinity": differs & ~of_empty & np.isnan(g) & np.isinf(w),
        "sign of infinity": differs & ~of_empty & np.isinf(g) & np.isinf(w),
        "number for infinity": differs & ~of_empty & np.isfinite(g) & np.isinf(w),
    }
    return {kind: int(where.sum()) for kind, where in kinds.items() if where.any()}


def _ordered(x: Array, name: str) -> Array:
    """Integers that count the numbers of the format in their order, both zeros the same."""
    bits = np.ascontiguousarray(x).view(BITS[name]).reshape(x.shape).astype(np.int64)
    least = np.iinfo(BITS[name]).min
    found: Array = np.where(bits < 0, least - bits, bits)
    return found
