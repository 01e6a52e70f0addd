# SPDX-License-Identifier: Apache-2.0
"""Roundings that a kernel may make and did not declare: with which of them its results would be within budget.

No bug, and no pass: it says what to declare, if it is what the kernel does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ..arrays import Array
from ..cases import DenseCase, PagedCase
from ..verdict.metrics import of_rows
from ..verdict.numerics import Numerics, parse
from .facts import Fact
from .measure import Measure

# The commonest first.
ROUNDINGS = (
    "p=bf16",
    "p=f16",
    "p=e4m3",
    "p=e4m3,p_scale=256",
    "out=bf16",
    "out=f16",
    "lse=bf16",
    "lse=f16",
    "partials=bf16",
    "partials=f16",
    "query=tf32,cache=tf32,p=tf32",
    "query=bf16,cache=bf16,p=bf16",
    "query=f16,cache=f16,p=f16",
    "scaled=q",
    "scores=bf16",
    "scores=f16",
    "score_accumulator=mma,value_accumulator=mma",
    "value_accumulator=f16",
    "value_accumulator=mma-f16",
)
NEAR = 3.0  # times the least budget that is kept to: what rounds more explains less
COARSEST = 0.25  # of a row's size: what no rounding of them makes


def undeclared(measure: Measure, actual: Mapping[str, Array], units: Mapping[str, Array]) -> list[Fact]:
    """That the results would pass with one of ROUNDINGS declared, if they would: those whose budgets are least."""
    if measure.numerics is None or not _may_be_rounding(measure, actual, units):
        return []
    found = {}
    for rounding in ROUNDINGS:
        worst = _worst(measure, measure.numerics, rounding, actual)
        if worst <= 1:
            found[rounding] = worst
    if not found:
        return []
    near = [rounding for rounding in found if found[rounding] >= max(found.values()) / NEAR]
    text = f"would pass with {' or '.join(near)}, which is not declared"
    return [Fact("would pass", text, {"numerics": near})]


def _may_be_rounding(measure: Measure, actual: Mapping[str, Array], units: Mapping[str, Array]) -> bool:
    if not all(np.isfinite(u).all() for u in units.values()):
        return False
    if "out" not in actual:
        return True
    relative = of_rows(*(np.nan_to_num(x.astype(np.float64)) for x in (actual["out"], measure.truth["out"])))[0]
    return float(relative.max(initial=0, where=np.isfinite(relative))) < COARSEST


def _worst(measure: Measure, base: Numerics, rounding: str, actual: Mapping[str, Array]) -> float:
    """The largest error in budgets of base with this rounding; infinity, where base has it."""
    fields = {name: value for name, value in parse(rounding).items() if name != "origin"}
    if all(getattr(base, name) == value for name, value in fields.items()):
        return np.inf
    assert isinstance(measure.case, (PagedCase, DenseCase))
    other = Measure(measure.case, measure.truth, measure.kinds, dataclasses.replace(base, **fields))
    return max(float(other.units(n, array, measure.truth[n]).max(initial=0)) for n, array in actual.items())
