# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of one failing result: facts, ranked classes, their evidence, in words and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import Array, as_array
from ..cases import Case, PagedCase
from ..checks import widen
from ..errors import InputError
from ..mutants import Mutant
from ..mutants.temperature import FAMILY as TEMPERATURE
from ..verdict.compare import form
from .facts import Fact, localise
from .fewer import of_requests, starts_of
from .measure import Measure
from .score import Evidence, Fit
from .search import EXACT, LEAST, search
from .suspects import Suspects, choose_requests
from .undeclared import undeclared

SHOWN = 5  # classes
LISTED = 0.3  # of the error: below, a class is not listed


@dataclass(frozen=True)
class Suspicion:
    """A class and the mutant of it that explains most."""

    family: str
    mutant: Mutant
    share: float
    distance: float
    where: str = ""
    rivals: tuple[str, ...] = ()  # mutants of other classes that give the same on this case
    variants: tuple[str, ...] = ()  # mutants of the class that do
    constants: Mapping[str, Any] = field(default_factory=dict)  # the parameters of the mutant, and its temperature
    over: float = 0.0  # share of the rows that it leaves beyond their budgets
    apart: Mapping[str, str] = field(default_factory=dict)  # rival -> id of a case that tells it from the mutant

    @property
    def text(self) -> str:
        where = f", {self.where}" if self.where else ""
        if "factor" in self.constants and "factor" not in self.mutant.parameters:
            where = f", factor {self.constants['factor']:g}{where}"
        return f"{self.family} ({self.mutant.name}: {self.mutant.formula}){where}"

    def as_json(self) -> dict[str, Any]:
        return {
            "class": self.family,
            "mutant": self.mutant.name,
            "formula": self.mutant.formula,
            "parameters": {key: _plain(value) for key, value in self.constants.items()},
            "references": list(self.mutant.references),
            "share": _short(self.share),
            "distance": _short(self.distance),
            "over": _short(self.over),
            "where": self.where,
            "rivals": list(self.rivals),
            "variants": list(self.variants),
            "apart": dict(self.apart),
        }


@dataclass(frozen=True)
class Diagnosis:
    """`named` says whether the first class explains enough to be named; `tested` how many functions were tried."""

    case: str
    named: bool
    summary: str
    facts: list[Fact]
    classes: list[Suspicion]
    tested: int
    requests: list[int] | None = None  # those that were compared with mutants; None: all

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "named": self.named,
            "summary": self.summary,
            "facts": [{"fact": f.name, "text": f.text, **f.data} for f in self.facts],
            "classes": [suspicion.as_json() for suspicion in self.classes],
            "tested": self.tested,
            "least_share": LEAST,
            "requests": self.requests,
        }


def diagnose(
    case: Case,
    actual_out: Any,
    actual_lse: Any = None,
    *,
    numerics: Any = None,
    truth: Mapping[str, Array] | None = None,
    others: Mapping[str, Any] | None = None,
    separate: bool = True,
) -> Diagnosis:
    """What `actual_out` (the first result of the case's kind) and `actual_lse` were computed by.

    `others`: further results by name; `separate`: look for cases that tell rivals apart. Raises InputError for results
    of another shape or dtype than the case has.
    """
    from ..oracle import expected

    given = {case.results[0]: actual_out, "lse": actual_lse, **(others or {})}
    actual = {name: as_array(name, value) for name, value in given.items() if value is not None}
    right = expected(case, precision="f64") if truth is None else truth
    for name, array in actual.items():
        if name not in right:
            raise InputError(f"the actual results hold {name}, expected {', '.join(right)}")
        if reason := form(name, array, right[name], case):
            raise InputError(reason)
    right = {name: right[name] for name in actual}
    measure = Measure(case, right, {name: dtypes.name_of(array.dtype) for name, array in actual.items()}, numerics)
    return of_measured(case, actual, right, measure, separate=separate)


def of_measured(
    case: Case, actual: Mapping[str, Array], truth: Mapping[str, Array], measure: Measure, *, separate: bool = True
) -> Diagnosis:
    """`diagnose` with budgets that are known."""
    units = {name: measure.units(name, array, truth[name]) for name, array in actual.items()}
    facts = localise(case, actual, truth, units)
    if not facts:
        return Diagnosis(case.name, False, "nothing is wrong: every row is within its budget", [], [], 0)
    evidence, requests = evidence_of(case, actual, truth, measure, units)
    fits, tested = search(evidence)
    classes = classified(evidence, fits)
    named = bool(classes) and classes[0].share >= LEAST
    if separate and named:
        from .separate import told_apart

        classes = [told_apart(case, classes[0]), *classes[1:]]
    said = summary(classes, named)
    if not named and (honest := undeclared(measure, actual, units)):
        facts, said = [*facts, *honest], f"{said}; {honest[0].text}"
    return Diagnosis(case.name, named, said, facts, classes, tested, requests)


def evidence_of(
    case: Case,
    actual: Mapping[str, Array],
    truth: Mapping[str, Array],
    measure: Measure,
    units: Mapping[str, Array],
) -> tuple[Evidence, list[int] | None]:
    """What mutants are compared with, of some requests of a large case, and which these are; None: all."""
    wide = {name: widen(array, np.float64) for name, array in actual.items()}
    requests = choose_requests(case, wrong_requests(case, units))
    if requests is None or not isinstance(case, PagedCase) or not case.extensions():
        return Evidence(Suspects(case, truth, requests), measure, wide), requests
    (some, wide), (_, right) = of_requests(case, requests, wide), of_requests(case, requests, truth)
    return Evidence(Suspects(some, right), Measure(some, right, measure.kinds, measure.numerics), wide), requests


def wrong_requests(case: Case, units: Mapping[str, Array]) -> Array:
    """bool [B] of a paged case."""
    if case.kind != "paged":
        return np.ones(1, bool)
    assert isinstance(case, PagedCase)
    if case.extensions():
        rows: Array = np.any([u.reshape(len(u), -1).max(1, initial=0) > 1 for u in units.values()], axis=0)
        if case.qo_indptr is None:
            return rows
        starts = starts_of(case)
        return np.array([rows[first:end].any() for first, end in pairwise(starts)])
    found: Array = np.zeros(len(case.seq_lens), bool)
    for name, u in units.items():
        rows = np.moveaxis(u, 1, 0) if name.startswith("partial_") else u
        found |= (rows > 1).reshape(len(found), -1).any(1)
    return found


def classified(evidence: Evidence, fits: list[Fit]) -> list[Suspicion]:
    """The best of each class, best first, with the others that give the same."""
    fits = [fit for fit in fits if fit.share >= LISTED]
    found: dict[str, Fit] = {}
    for fit in fits:
        found.setdefault(fit.mutant.family, fit)
    classes = []
    for family, fit in list(found.items())[:SHOWN]:
        near = [f for f in fits if f is not fit and abs(f.share - fit.share) < 0.02 and f.where == fit.where][:40]
        same = [f.mutant for f in near if evidence.same(fit.mutant, f.mutant)]
        rivals = dict.fromkeys(m.name for m in same if m.family != family)
        own = [m.name for m in same if m.family == family]
        constants = {**fit.mutant.parameters, **_temperature(evidence, fit.mutant)}
        names = tuple(rivals), tuple(own)
        classes.append(Suspicion(family, fit.mutant, fit.share, fit.distance, fit.where, *names, constants, fit.over))
    return classes


def _temperature(evidence: Evidence, mutant: Mutant) -> dict[str, float]:
    """The factor of the scores of a mutant that has one for all."""
    problem = evidence.suspects.problem
    if problem is None or mutant.family != TEMPERATURE:
        return {}
    right = problem.plan(int(problem.lens.argmax()))
    return {"factor": _short(mutant.plans(problem, right)[0].scale / right.scale)}


def summary(classes: list[Suspicion], named: bool) -> str:
    """One line."""
    if not classes:
        return "unknown: no wrong function tried explains a third of the error"
    best = classes[0]
    if not named:
        said = f"the nearest, {best.family} ({best.mutant.name}), explains {_percent(best.share)} of the error"
        return f"unknown: {said}, less than {_percent(LEAST)}"
    rivals = f"; on this case the same as {', '.join(best.rivals[:3])}" if best.rivals else ""
    left = ""
    if best.over and best.distance > EXACT:
        left = f", {_percent(best.over)} of the rows are still beyond their budgets"
    return f"suspected: {best.text}, explains {_percent(best.share)} of the error{left}{rivals}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, np.floating) else value


def _short(x: Any) -> float:
    return float(f"{x:.3g}")
