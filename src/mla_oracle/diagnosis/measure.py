# SPDX-License-Identifier: Apache-2.0
"""Errors of result rows in units of what an honest kernel may miss there: 1 is the budget, NaN for a number infinity.

    measure = Measure(case, truth, {"out": "bf16", "lse": "f32"})
    measure.units("out", actual, truth["out"])      # [*rows]

A row is compared with any results, not the truth alone: a mutant's. Its budget grows with the size of its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..cases import AppendCase, Case, DenseCase, PagedCase
from ..checks import widen
from ..verdict.numerics import Numerics
from ..verdict.tolerance import limits

COARSE = 2.0**-7


class Measure:
    """`kinds`: the dtype of each result that is there. Raises InputError for numerics that are not known."""

    def __init__(
        self, case: Case, truth: Mapping[str, Array], kinds: Mapping[str, str], numerics: Any = None, **how: Any
    ) -> None:
        self.case, self.truth, self.kinds = case, dict(truth), dict(kinds)
        self.numerics: Numerics | None = None
        self._scales: dict[str, Array] = {}  # [*rows, V], or [*rows] of an lse: what one element may miss
        self._limits: dict[str, tuple[Array, Array]] = {}  # [*rows] of the root mean square, and of the largest
        if isinstance(case, (PagedCase, DenseCase)):
            from ..verdict.budget import budgets
            from ..verdict.numerics import resolve

            self.numerics = resolve(numerics, case, kinds)
            self.budgets = budgets(case, self.numerics, kinds, truth, **how)
            for name in kinds:
                budget = self.budgets[name]
                is_lse = name.endswith("lse")
                self._scales[name] = budget.lse_scale if is_lse else budget.out_scale
                largest = budget.lse_max if is_lse else budget.out_max
                self._limits[name] = (largest if is_lse else budget.out_rms, largest)
        else:
            for name, kind in kinds.items():
                size = np.abs(np.where(np.isfinite(truth[name]), truth[name], 0)).astype(np.float64)
                allowed = np.array(limits(name, size, kind, case).allowed)
                self._scales[name] = np.where(np.isfinite(widen(truth[name], np.float64)), allowed, 0)
                rows = allowed.shape if name.endswith("lse") else allowed.shape[:-1]
                self._limits[name] = (np.full(rows, np.inf), np.ones(rows))

    def units(self, name: str, actual: Array, other: Array, rows: Any = ...) -> Array:
        """The error of every row [*rows] of `actual` against `other`, which may be many, [m, *rows, V].

        `rows` cuts the leading axes of what is measured, as `actual` and `other` are cut.
        """
        units, growth = self.errors(name, actual, other, rows)
        return units / growth

    def errors(self, name: str, actual: Array, other: Array, rows: Any = ...) -> tuple[Array, Array]:
        """`units` in budgets of the truth, and how many times that the budget around `other` is, 1 or more."""
        scale = self._scales[name][rows]
        rms, largest = (limit[rows] for limit in self._limits[name])
        is_lse = name.endswith("lse")
        with np.errstate(all="ignore"):
            growth = _size(other, is_lse) / _size(self.truth[name][rows], is_lse)
            growth = np.where((growth > 1) & np.isfinite(growth), growth, 1.0)
            z = self._ratio(name, actual, other, scale, self.truth[name][rows])
            if is_lse:
                return z / largest, growth
            units: Array = z.max(axis=-1, initial=0) / largest
            if np.isfinite(rms).all() and z.shape[-1]:
                units = np.maximum(units, np.sqrt(np.square(z).mean(-1)) / rms)
            return np.where(np.isnan(units), np.inf, units), growth

    def scale_of(self, name: str) -> Array:
        """[*rows, V], or [*rows] of an lse: what the budget allows one element."""
        largest = self._limits[name][1]
        return self._scales[name] * (largest if name.endswith("lse") else largest[..., None])

    def _ratio(self, name: str, actual: Array, other: Array, scale: Array, truth: Array) -> Array:
        """|actual - other| / scale: 0 where they are the same value, also NaN.

        Where nothing may be missed, as in an empty row, infinity; where `other` has a number there that the truth has
        not, its roundings are not known and COARSE of it may be missed.
        """
        g, w = widen(actual, np.float64), widen(other, np.float64)
        z: Array = g - w
        np.abs(z, out=z)
        z /= scale
        strange = ~np.isfinite(z) | (scale == 0)
        if strange.any():
            odd = np.nonzero(strange)
            g, w, right, scale = (np.broadcast_to(x, z.shape)[odd] for x in (g, w, truth, scale))
            held = w if isinstance(self.case, AppendCase) else widen(dtypes.round_to(w, self.kinds[name]), np.float64)
            same = (g == held) | (g == w) | (np.isnan(g) & np.isnan(w))
            coarse = np.abs(g - w) / (COARSE * (np.abs(w) + float(name.endswith("lse"))))
            known = (scale > 0) | (w == right) | ~np.isfinite(coarse)
            z[odd] = np.where(same, 0.0, np.where(known, np.inf, coarse))
        return z


def _size(x: Array, is_lse: bool) -> Array:
    """[*rows] the size of what is finite of each row; of an lse plus one, as it may be 0 by chance."""
    x = widen(x, np.float64)
    finite = np.isfinite(x)
    x = x if finite.all() else np.where(finite, x, 0.0)
    if is_lse:
        return np.abs(x) + 1
    found: Array = np.sqrt(np.square(x).mean(-1)) if x.shape[-1] else np.zeros(x.shape[:-1])
    return found
