# SPDX-License-Identifier: Apache-2.0
"""How far a mutant's results are from the truth: what of it a case shows.

Rows are compared by the relative root mean square of their difference, an lse by the difference; a number where the
truth has none, and the other way round, is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from .problem import Results

ROUNDING = 1e-9  # what f64 in another order may differ by, with a wide margin


@dataclass(frozen=True)
class Effect:
    """`out` is the worst row's relative error, inf where the truth is 0; `rows` the share of rows that differ."""

    out: float
    lse: float
    rows: float
    nonfinite: int

    @property
    def differs(self) -> bool:
        return self.rows > 0


def effect(results: Results, truth: Results) -> Effect:
    """The effect of what a mutant gives, against what is right."""
    out = lse = 0.0
    differing, count, nonfinite = 0, 0, 0
    with np.errstate(all="ignore"):
        for name, right in truth.items():
            if name not in results:
                continue
            wrong, right = results[name].astype(np.float64), right.astype(np.float64)
            clash = ~(
                (wrong == right) | (np.isnan(wrong) & np.isnan(right)) | (np.isfinite(wrong) & np.isfinite(right))
            )
            difference = np.where(np.isfinite(wrong) & np.isfinite(right), wrong - right, 0)
            if name.endswith("lse"):
                far = np.abs(difference) > ROUNDING * np.maximum(np.abs(np.where(np.isfinite(right), right, 0)), 1)
                lse = max(lse, float(np.abs(difference).max(initial=0)))
                bad = clash
            else:
                error = relative(difference, right)
                far, bad = error > ROUNDING, clash.any(-1)
                out = max(out, float(error.max(initial=0)))
            differing += int((far | bad).sum())
            count += far.size
            nonfinite += int(bad.sum())
    return Effect(out, lse, differing / max(count, 1), nonfinite)


def relative(difference: Array, right: Array) -> Array:
    """The root mean square of each row of `difference` [..., n] over that of `right`."""
    size = (
        np.sqrt((np.where(np.isfinite(right), right, 0) ** 2).mean(-1))
        if right.shape[-1]
        else np.zeros(right.shape[:-1])
    )
    error = np.sqrt((difference**2).mean(-1)) if right.shape[-1] else size
    return np.where(error == 0, 0, error / size)
