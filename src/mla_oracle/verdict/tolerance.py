# SPDX-License-Identifier: Apache-2.0
"""Tolerances: limits on |g - w| that need no emulation, for the kinds of case that have no budget.

    max |g - w| <= tol * max(max |w|, 1)        over the whole tensor
    |g - w| <= atol + rtol * |w|                element by element

Both apply, derived from the roundings an honest kernel makes (`rounding`). For every result but an LSE atol is tol
times the largest |w| of the element's own row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..cases import AppendCase, Case, DenseCase, PagedCase, RopeCase
from ..cases.extensions import require_plain

UNIT_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


class Limits(NamedTuple):
    """The limit of every element, and the tolerances that made it; atol "row": relative to the element's row."""

    allowed: Array
    tol: float
    atol: float | str
    rtol: float


def limits(name: str, size: Array, kind: str, case: Case) -> Limits:
    """The limits of the result `name`, whose truth is |w| = size and which was returned as dtype `kind`."""
    honest = rounding(case, kind)
    if name.endswith("lse"):
        tol, rtol, floor = honest.lse_floor, honest.lse, np.asarray(honest.lse_floor)
    else:
        tol, rtol, floor = honest.row, honest.row, honest.row * size.max(axis=-1, keepdims=True, initial=0)
    whole = tol * max(float(size.max(initial=0)), 1.0)
    allowed = np.broadcast_to(np.minimum(whole, floor + rtol * size), size.shape)
    return Limits(allowed, tol, tol if name.endswith("lse") else "row", rtol)


class Rounding(NamedTuple):
    """The unit roundoffs of an actual's dtype and of the case's coarsest input, and what f32 accumulation may cost."""

    actual: float
    inputs: float
    accumulation: float

    @property
    def row(self) -> float:
        """Of an element of out, relative to its row: 4 u + accumulation, u the coarser of the two dtypes.

        One rounding of the softmax weights and one of the output, each at most u of the row, doubled because a
        weight's error is relative to sum p|v| and not to |out|.
        """
        return 4 * max(self.actual, self.inputs) + self.accumulation

    @property
    def lse(self) -> float:
        """Of an LSE, relative to its size: 4 u of its own dtype + accumulation."""
        return 4 * self.actual + self.accumulation

    @property
    def lse_floor(self) -> float:
        """Of an LSE, absolute: as above, and u of the inputs for weights rounded before they are summed."""
        return self.lse + self.inputs


def rounding(case: Case, dtype: str) -> Rounding:
    """What an honest kernel that returns `dtype` may round on `case`.

    Sums of D products and of n weighted rows in f32 lose at most (D + n) 2^-24. A case that only moves bytes rounds
    nothing.
    """
    require_plain(case, "the derived tolerance")
    if isinstance(case, AppendCase):
        return Rounding(0.0, 0.0, 0.0)
    inputs = max(UNIT_ROUNDOFF.get(dtypes.name_of(tensor.dtype), 0.0) for tensor in case.tensors().values())
    terms: int
    if isinstance(case, PagedCase):
        terms = case.q.shape[-1] + int(case.seq_lens.max(initial=0))
    elif isinstance(case, DenseCase):
        terms = sum(case.w_uk.shape[1:]) + len(case.c_kv)
    else:
        terms = max(tensor.shape[-1] for tensor in case.tensors().values())
        if isinstance(case, RopeCase):
            terms += _angle_terms(case)
    return Rounding(UNIT_ROUNDOFF[dtype], inputs, terms * 2.0**-24)


def _angle_terms(case: RopeCase) -> int:
    """Units of 2^-24 that an f32 angle may be off by: pair j is 2 j + 2 roundings of position * base^(-2j/n)."""
    n = case.rotary_dim or case.x.shape[-1]
    if case.angles == "table" or n < 2 or not len(case.positions):
        return 0
    furthest = float(np.abs(case.positions.astype(np.float64)).max())
    roundings: float = max((2 * j + 2) * furthest * float(case.base) ** (-2 * j / n) for j in range(n // 2))
    return math.ceil(roundings)
