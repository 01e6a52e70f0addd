# SPDX-License-Identifier: Apache-2.0
"""Tolerances: limits on |g - w| that need no emulation, element by element.

    max |g - w| <= tol * max(max |w|, 1)        over the whole tensor
    |g - w| <= atol + rtol * |w|                element by element

Those that are asked for apply; with none, both do, derived from the roundings an honest kernel makes (`rounding`), and
the second is relative to the element's own row for every result but an LSE: atol is then tol times the largest |w| of
the row. So are judged the kinds of case that have no budget.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from . import dtypes
from .arrays import Array
from .cases import AppendCase, Case, DenseCase, PagedCase, RopeCase
from .errors import InputError
from .extensions import require_plain

UNIT_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


class Tolerance(NamedTuple):
    """What was asked for; None: not."""

    tol: float | None = None
    atol: float | None = None
    rtol: float | None = None

    @property
    def asked(self) -> bool:
        return any(value is not None for value in self)

    def checked(self) -> Tolerance:
        """Itself. Raises InputError for a value that is negative or not a number."""
        for name, value in self._asdict().items():
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"{name} is {value}, expected 0 or more")
        return self


class Limits(NamedTuple):
    """The limit of every element, and the tolerances that made it."""

    allowed: Array
    tol: float | None
    atol: float | str | None
    rtol: float | None


def limits(name: str, size: Array, kind: str, case: Case, asked: Tolerance) -> Limits:
    """The limits of the result `name`, whose truth is |w| = size and which was returned as dtype `kind`."""
    tol, atol, rtol = asked
    shown: float | str | None = atol
    floor: Any = atol or 0.0
    each = atol is not None or rtol is not None
    if not asked.asked:
        honest = rounding(case, kind)
        each = True
        if name.endswith("lse"):
            rtol = honest.lse
            tol = shown = floor = honest.lse_floor
        else:
            tol = rtol = honest.row
            shown, floor = "row", honest.row * size.max(axis=-1, keepdims=True, initial=0)
    whole = math.inf if tol is None else tol * max(float(size.max(initial=0)), 1.0)
    allowed = np.minimum(whole, floor + (rtol or 0.0) * size if each else np.inf)
    return Limits(np.broadcast_to(allowed, size.shape), tol, shown, rtol)


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
