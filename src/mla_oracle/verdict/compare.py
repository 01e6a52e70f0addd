# SPDX-License-Identifier: Apache-2.0
"""The verdict: actual results against the f64 truth of their case, first failure first.

    1. shapes and dtypes
    2. non-finite values, before any metric: NaN for a number, a number for NaN, an infinity or its sign
    3. attention: the budget of every row of out and of its LSE, for the numerics declared or inferred (budget.py)
       other kinds: tolerances derived from the roundings an honest kernel makes (tolerance.py)

What tolerances that are asked for, and other projects' rules (rules.py), would have said is told beside the verdict
and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtypes
from ..arrays import Array, as_array, dtype_name
from ..cases import AppendCase, Case, DenseCase, PagedCase
from ..checks import widen
from ..errors import InputError
from .locate import first_nonfinite_inputs, in_row_axes, in_row_order, locate, own_index
from .tolerance import Limits, limits, rounding

if TYPE_CHECKING:
    from .numerics import Numerics

FLOAT_RESULTS = ("f64", "f32", "bf16", "f16")
__all__ = ["Figures", "Verdict", "check", "rounding"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one tensor. `worst` is the element that decides: where, actual and expected."""

    dtype: str
    max_abs_error: float
    max_abs_expected: float
    max_ulp: int  # in the dtype of the actual
    worst: dict[str, Any]
    # In a kind with budgets: of the row that is furthest, unless said otherwise.
    units: float | None = None  # error over budget
    rows_over: int | None = None  # rows beyond their budget, of all
    rows: int | None = None
    rows_blind: int | None = None  # rows whose budget is as large as out itself, or 1 of an LSE: it tells nothing
    error: float | None = None  # of out: RMS over the row's own; of an LSE: absolute
    allowed: float | None = None  # what of that the budget allows
    cosine: float | None = None
    norm_ratio: float | None = None
    # In the other kinds, the tolerances that decide.
    tol: float | None = None
    atol: float | str | None = None
    rtol: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Pass or fail, why, and the figures of every tensor that reached them."""

    case: str
    passed: bool
    reason: str
    figures: dict[str, Figures] = field(default_factory=dict)
    nonfinite_inputs: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    numerics: dict[str, str] = field(default_factory=dict)  # what the budget was made for, and who said so
    rules: dict[str, Any] = field(default_factory=dict)  # what other rules say, where asked for; they decide nothing

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"verdict": "pass" if fields.pop("passed") else "fail", **fields}


def check(
    case: Case,
    actual: Mapping[str, Any],
    truth: dict[str, Array],
    *,
    tol: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    numerics: Numerics | str | Mapping[str, Any] | None = None,
    rules: str | tuple[str, ...] | None = None,
    complete: bool = False,
) -> Verdict:
    """The verdict on `actual`, arrays of any kind by name, given the f64 `truth` of the same case.

    The first result of the case's kind must be there; the others may be missing and are then named in the verdict,
    and fail it where `complete` is asked for.
    `numerics`: what the kernel rounds, see `numerics.resolve`; None infers it from the dtypes. `rules`: "all", or names
    of rules.RULES joined by +; `tol`, `atol`, `rtol`: rules of one's own. They are told in the verdict's `rules`, and
    none decides. Raises InputError for a missing or unknown tensor, a tolerance that is negative or not a number,
    unknown numerics or rules.
    """
    actual = {name: as_array(name, value) for name, value in actual.items()}
    for name in actual:
        if name not in truth:
            raise InputError(f"the actual results hold {name}, expected {', '.join(truth)}")
    main = case.results[0]
    if main not in actual:
        raise InputError(f"the actual results hold no {main}, expected {', '.join(truth)}")

    reasons = {}
    compared = {}
    for name in truth:
        if name in actual:
            reason = form(name, actual[name], truth[name], case)
            if reason is None:
                compared[name] = actual[name]
                reason = _nonfinite(name, actual[name], truth[name], case)
            if reason is not None:
                reasons[name] = reason
    if complete:
        reasons |= {name: f"{name} is missing" for name in case.results if name not in actual}
    measured = {name: array for name, array in compared.items() if name not in reasons}
    judge = _Judge(case, {name: dtypes.name_of(array.dtype) for name, array in measured.items()}, truth, numerics)
    figures = {}
    for name, array in measured.items():
        figures[name], reason = judge.measure(name, array)
        if reason is not None:
            reasons[name] = reason
    missing = [name for name in truth if name not in actual]
    told = {}
    if any(asked is not None for asked in (rules, tol, atol, rtol)):
        from .rules import told as told_by

        given = {name: widen(compared[name], np.float64) if name in compared else None for name in actual}
        right = {name: widen(truth[name], np.float64) for name in actual}
        told = told_by(rules, given, right, tol=tol, atol=atol, rtol=rtol)
    return Verdict(
        case=case.name,
        passed=not reasons,
        reason="; ".join([reasons[name] for name in truth if name in reasons] + judge.blame(reasons, figures))
        or "; ".join([judge.praise(figures), *(f"not judged: {name} is missing" for name in missing)]),
        figures=figures,
        nonfinite_inputs=first_nonfinite_inputs(case),
        missing=missing,
        numerics=judge.numerics,
        rules=told,
    )


def form(name: str, actual: Array, truth: Array, case: Case) -> str | None:
    if actual.shape != truth.shape:
        return f"{name} is {list(actual.shape)}, expected {list(truth.shape)}"
    kind = dtype_name(name, actual)
    allowed = (dtypes.name_of(truth.dtype),) if isinstance(case, AppendCase) else FLOAT_RESULTS
    if kind not in allowed:
        return f"{name} is {kind}, expected {' or '.join(allowed)}"
    return None


def _nonfinite(name: str, actual: Array, truth: Array, case: Case) -> str | None:
    from .metrics import nonfinite

    g, w = widen(actual, np.float64), widen(truth, np.float64)
    kinds = nonfinite(actual, w, getattr(case, "empty_lse", None) if name.endswith("lse") else None)
    if not kinds:
        return None
    bad = ~((g == w) | (np.isnan(g) & np.isnan(w))) & ~(np.isfinite(g) & np.isfinite(w))
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return (
        f"{name} is {g[index]} where {w[index]} is expected, at {locate(case, name, index)['text']}"
        f" ({int(bad.sum())} such of {bad.size}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())})"
    )


class _Judge:
    """Measures results of one case against its truth; makes the budgets the case has, if it has any.

    An LSE is measured with its axes in the order of out's rows.
    """

    def __init__(self, given: Case, kinds: dict[str, str], truth: dict[str, Array], numerics: Any) -> None:
        case, truth = in_row_axes(given, truth)
        self.given, self.case, self.truth = given, case, truth
        self.budgets: dict[str, Any] = {}
        self.numerics: dict[str, str] = {}
        if isinstance(case, (PagedCase, DenseCase)):
            from .budget import budgets
            from .numerics import resolve

            declared = resolve(numerics, case, kinds)
            self.budgets = budgets(case, declared, kinds, truth)
            self.numerics = {"origin": declared.origin, "rounds": str(declared)}
            if self.budgets:
                self.numerics["budget"] = next(iter(self.budgets.values())).reason
        elif numerics is not None:
            raise InputError(f"numerics is given for a {case.kind} case, expected a paged, naive or absorbed one")

    def praise(self, figures: dict[str, Figures]) -> str:
        """Why a pass is one."""
        units = {name: figure.units for name, figure in figures.items() if figure.units is not None}
        if not units:
            return "within tolerance of the f64 truth"
        used = ", ".join(f"{name} {value:.3g}" for name, value in units.items())
        said = f"within budget of the f64 truth ({used} of it), numerics {self.numerics['origin']}"
        blind = [
            f"; the case is blind in {figure.rows_blind} of {figure.rows} rows of {name}, whose budget is "
            f"{'1 or more' if name.endswith('lse') else 'as large as they are'}"
            for name, figure in figures.items()
            if figure.rows_blind
        ]
        return said + "".join(blind)

    def blame(self, reasons: dict[str, str], figures: dict[str, Figures]) -> list[str]:
        """What a failed budget was made for."""
        failed = any(name in self.budgets and name in figures for name in reasons)
        return [f"numerics {self.numerics['origin']}"] if failed else []

    def measure(self, name: str, actual: Array) -> tuple[Figures, str | None]:
        from .metrics import ulp

        actual = in_row_order(self.given, actual) if name == "lse" else actual
        g, w = widen(actual, np.float64), widen(self.truth[name], np.float64)
        finite = np.isfinite(w)
        error = np.abs(np.where(finite, g, 0) - np.where(finite, w, 0))
        size = np.abs(np.where(finite, w, 0))
        kind = dtypes.name_of(actual.dtype)
        values: dict[str, Any] = {
            "dtype": kind,
            "max_abs_error": float(error.max(initial=0)),
            "max_abs_expected": float(size.max(initial=0)),
            "max_ulp": int(ulp(actual, w).max(initial=0)) if kind in FLOAT_RESULTS else 0,
        }
        if name in self.budgets:
            index, decided, reason = self._by_budget(name, actual, g, w)
        else:
            index, decided, reason = _by_tolerance(error, limits(name, size, kind, self.case))
        values |= decided
        where = locate(self.given, name, own_index(self.given, name, index)) if error.size else {}
        values["worst"] = {**where, "actual": float(g[index]), "expected": float(w[index])} if error.size else {}
        if reason is not None:
            reason = f"{name} is {g[index]:.9g} where {w[index]:.9g} is expected at {where['text']}: {reason}"
        return Figures(**values), reason

    def _by_budget(
        self, name: str, actual: Array, g: Array, w: Array
    ) -> tuple[tuple[int, ...], dict[str, Any], str | None]:
        from .metrics import of_rows

        budget = self.budgets[name]
        result = "lse" if name.endswith("lse") else "out"
        units = budget.units({result: actual}, {result: w})[result]
        if not units.size:
            return (), {"units": 0.0, "rows_over": 0, "rows": 0, "rows_blind": 0}, None
        row = tuple(int(i) for i in np.unravel_index(int(units.argmax()), units.shape))
        over = int((units > 1).sum())
        allowed = budget.allowed({result: w})[result]
        values = {"units": _short(units[row]), "rows_over": over, "rows": int(units.size)}
        values |= {"rows_blind": int((allowed >= 1).sum()), "allowed": _short(allowed[row])}
        if result == "lse":
            index = row
            values["error"] = 0.0 if g[row] == w[row] or np.isnan(w[row]) else _short(abs(g[row] - w[row]))
            said = f"off by {values['error']:.3g}, the budget allows {values['allowed']:.3g}"
        else:
            column, alone = budget.worst_column(actual, w, row)
            index = (*row, column)
            finite = np.isfinite(w[row])
            relative, cosine, ratio = (float(x) for x in of_rows(g[row][finite], w[row][finite]))
            values |= {"error": _short(relative), "cosine": cosine, "norm_ratio": ratio}
            said = f"its row is off by {relative:.3g} of its size, the budget allows {values['allowed']:.3g}"
            if alone is not None:
                said = f"off by {abs(g[index] - w[index]):.3g}, the budget of one element allows {alone:.3g}"
        said += f", {values['units']:.3g} times the budget"
        if values["units"] == np.inf:
            said = "nothing is computed in this row, so that it is exact"
        reason = f"{said} ({over} such rows of {units.size})"
        return index, values, reason if over else None


def _by_tolerance(error: Array, limit: Limits) -> tuple[tuple[int, ...], dict[str, Any], str | None]:
    over = error - limit.allowed
    index = tuple(int(i) for i in np.unravel_index(int(over.argmax()), over.shape)) if over.size else ()
    values = {"tol": limit.tol, "rtol": limit.rtol, "atol": limit.atol}
    if not (over > 0).any():
        return index, values, None
    return index, values, (
        f"error {error[index]:.3g}, allowed {limit.allowed[index]:.3g} ({int((over > 0).sum())} such of {over.size})"
    )


def _short(x: Any) -> float:
    """`x` to three digits: the last bits of a budget depend on the order of a BLAS."""
    return float(f"{float(x):.3g}")
