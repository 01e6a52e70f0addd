# SPDX-License-Identifier: Apache-2.0
"""The verdict: actual results against the f64 truth of their case, first failure first.

    1. shapes and dtypes
    2. non-finite values, before any metric: NaN for a number, a number for NaN, an infinity or its sign
    3. max |g - w| <= tol * max(max |w|, 1)        over the whole tensor
    4. |g - w| <= atol + rtol * |w|                element by element

Rules 3 and 4 are those asked for; with no tolerance given both are, derived from the roundings an honest kernel makes
(`rounding`), and rule 4 of out is relative to the element's own row: atol is then tol times the largest |w| of the row.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from . import dtypes
from .arrays import Array, dtype_name
from .cases import AppendCase, Case, DenseCase, PagedCase, RopeCase
from .checks import widen
from .errors import InputError
from .locate import first_nonfinite_inputs, locate

FLOAT_RESULTS = ("f64", "f32", "bf16", "f16")
UNIT_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True)
class Figures:
    """What was measured of one tensor."""

    dtype: str
    max_abs_error: float
    max_abs_expected: float
    tol: float | None  # of rule 3, None where it was not asked for
    rtol: float | None  # of rule 4
    atol: float | str | None
    worst: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Pass or fail, why, and the figures of every tensor that reached them."""

    case: str
    passed: bool
    reason: str
    figures: dict[str, Figures] = field(default_factory=dict)
    nonfinite_inputs: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"verdict": "pass" if fields.pop("passed") else "fail", **fields}


def check(
    case: Case,
    actual: dict[str, Array],
    truth: dict[str, Array],
    *,
    tol: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
) -> Verdict:
    """The verdict on `actual`, given the f64 `truth` of the same case.

    The first result of the case's kind must be there; the others may be missing and are then named in the verdict.
    Raises InputError for a missing or unknown tensor, or a tolerance that is negative or not a number.
    """
    for name, value in (("tol", tol), ("atol", atol), ("rtol", rtol)):
        if value is not None and not 0 <= value < math.inf:
            raise InputError(f"{name} is {value}, expected 0 or more")
    for name in actual:
        if name not in truth:
            raise InputError(f"the actual results hold {name}, expected {', '.join(truth)}")
    main = case.results[0]
    if main not in actual:
        raise InputError(f"the actual results hold no {main}, expected {', '.join(truth)}")

    figures: dict[str, Figures] = {}
    reasons = []
    for name in truth:
        if name not in actual:
            continue
        reason = _form(name, actual[name], truth[name], case) or _nonfinite(name, actual[name], truth[name], case)
        if reason is None:
            figures[name], reason = _measure(name, actual[name], truth[name], case, tol, atol, rtol)
        if reason is not None:
            reasons.append(reason)
    return Verdict(
        case=case.name,
        passed=not reasons,
        reason="; ".join(reasons) or "within tolerance of the f64 truth",
        figures=figures,
        nonfinite_inputs=first_nonfinite_inputs(case),
        missing=[name for name in truth if name not in actual],
    )


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


def _form(name: str, actual: Array, truth: Array, case: Case) -> str | None:
    if actual.shape != truth.shape:
        return f"{name} is {list(actual.shape)}, expected {list(truth.shape)}"
    kind = dtype_name(name, actual)
    allowed = (dtypes.name_of(truth.dtype),) if isinstance(case, AppendCase) else FLOAT_RESULTS
    if kind not in allowed:
        return f"{name} is {kind}, expected {' or '.join(allowed)}"
    return None


def _nonfinite(name: str, actual: Array, truth: Array, case: Case) -> str | None:
    g, w = widen(actual, np.float64), widen(truth, np.float64)
    bad = (np.isfinite(g) != np.isfinite(w)) | (~np.isfinite(w) & ~((g == w) | (np.isnan(g) & np.isnan(w))))
    if not bad.any():
        return None
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return (
        f"{name} is {g[index]} where {w[index]} is expected, at {locate(case, name, index)['text']}"
        f" ({int(bad.sum())} such of {bad.size})"
    )


def _measure(
    name: str, actual: Array, truth: Array, case: Case, tol: float | None, atol: float | None, rtol: float | None
) -> tuple[Figures, str | None]:
    kind = dtypes.name_of(actual.dtype)
    g, w = widen(actual, np.float64), widen(truth, np.float64)
    finite = np.isfinite(w)
    error = np.abs(np.where(finite, g, 0) - np.where(finite, w, 0))
    size = np.abs(np.where(finite, w, 0))
    of_row = False
    floor: Any = atol or 0.0
    if tol is None and atol is None and rtol is None:
        honest = rounding(case, kind)
        of_row = not name.endswith("lse")
        if of_row:
            tol = rtol = honest.row
            floor = honest.row * size.max(axis=-1, keepdims=True, initial=0)
        else:
            rtol = honest.lse
            tol = atol = floor = honest.lse_floor
    whole = math.inf if tol is None else tol * max(size.max(initial=0), 1.0)
    each = np.inf if atol is None and rtol is None else floor + (rtol or 0.0) * size
    over = error - np.minimum(whole, each)
    index = tuple(int(i) for i in np.unravel_index(int(over.argmax()), over.shape)) if over.size else ()
    where = locate(case, name, index) if over.size else {}
    figures = Figures(
        dtype=kind,
        max_abs_error=float(error.max(initial=0)),
        max_abs_expected=float(size.max(initial=0)),
        tol=tol,
        rtol=rtol,
        atol="row" if of_row else atol,
        worst={**where, "actual": float(g[index]), "expected": float(w[index])} if over.size else {},
    )
    if not (over > 0).any():
        return figures, None
    limit = error[index] - over[index]
    return figures, (
        f"{name} is {g[index]:.9g} where {w[index]:.9g} is expected (error {error[index]:.3g}, allowed {limit:.3g})"
        f" at {where['text']} ({int((over > 0).sum())} such of {over.size})"
    )
