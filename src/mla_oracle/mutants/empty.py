# SPDX-License-Identifier: Apache-2.0
"""Wrong empty rows: a request without keys, a query token before the first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Mutant
from .needs import Need, empty_row, paged
from .plan import Plan
from .problem import Problem, Results

empty_request = Need("a request without keys", lambda p: bool(np.any(p.lens == 0)))
empty_first = Need(
    "a request without keys before one that has some",
    lambda p: bool(np.any((p.lens[:-1] == 0) & (np.maximum.accumulate(p.lens[::-1])[::-1][1:] > 0))),
)
some_keys = Need(
    "a query token that sees nothing of a request that has keys",
    lambda p: p.causal and bool(np.any((p.lens > 0) & (p.lens < p.T))),
)
output_above = Need("a row above an empty one", lambda p: bool(np.any(_empty(p).reshape(-1)[1:])))


def _empty(problem: Problem) -> Array:
    """Which query tokens see nothing [B, T]."""
    seen = problem.lens[:, None] - (problem.T - 1 - np.arange(problem.T) if problem.causal else 0)
    return np.broadcast_to(seen <= 0, (problem.B, problem.T))


def stored(out: float | None, lse: float | None) -> Callable[[Problem, Plan], Plan]:
    """What an empty row holds; None: as it should."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        return replace(
            plan, empty_out=plan.empty_out if out is None else out, empty_lse=plan.empty_lse if lse is None else lse
        )

    return edit


def _first_key(problem: Problem, plan: Plan) -> Plan:
    """A length of 0 taken for 1."""
    return replace(plan, length=1, lanes=np.arange(1)) if plan.length == 0 else plan


def _last_entry(problem: Problem, plan: Plan) -> Plan:
    """Block -1 of a request without keys: the last table entry, a whole page of it."""
    if plan.length:
        return plan
    return replace(plan, length=problem.block, lanes=np.arange(problem.block), table=plan.table[-1:])


def _uniform(problem: Problem, plan: Plan) -> Plan:
    """Masked scores are the lowest finite number: a row that sees nothing takes the mean of all keys."""
    lowest = float(np.finfo(np.float32).min)
    return replace(plan, mask=lambda s, seen: np.where(seen, s, lowest))


def _row_above(problem: Problem, results: Results) -> Results:
    """Empty rows keep what the row above left."""
    empty = _empty(problem).reshape(-1)
    out = results["out"].copy()
    flat = out.reshape(len(empty), *out.shape[2:])
    for row in np.flatnonzero(empty):
        if row:
            flat[row] = flat[row - 1]
    return {**results, "out": out}


def _shifted(problem: Problem, results: Results) -> Results:
    """Work items of empty requests are not counted: later requests get the place of the one before them."""
    full = np.flatnonzero(problem.lens > 0)
    moved = {}
    for name, x in results.items():
        y = x.copy()
        if name in ("out", "lse"):
            y[: len(full)] = x[full]
            y[len(full) :] = 0 if name == "out" else problem.empty_lse
        moved[name] = y
    return moved


def _mutant(
    name: str,
    formula: str,
    *needs: Need,
    edit: Callable[[Problem, Plan], Plan] | None = None,
    finish: Callable[[Problem, Results], Results] | None = None,
    refs: str = "",
    family: str = "empty row",
) -> Mutant:
    return Mutant(
        name=f"empty.{name}",
        family=family,
        formula=formula,
        references=tuple(refs.split()),
        conditions=(paged, *needs),
        edit=edit,
        finish=finish,
    )


MUTANTS = (
    _mutant(
        "nan",
        "o = 0 / 0 where nothing is seen",
        empty_row,
        edit=stored(np.nan, None),
        family="0/0",
        refs="vllm-project/vllm#57094 flashinfer-ai/flashinfer#2883 vllm-project/vllm#37815",
    ),
    _mutant(
        "nan-lse",
        "lse = (-inf) - (-inf) where nothing is seen, and out NaN",
        empty_row,
        edit=stored(np.nan, np.nan),
        family="-inf merge",
        refs="vllm-project/vllm#27491 vllm-project/vllm#39148",
    ),
    _mutant(
        "lse-zero", "lse = 0 where nothing is seen", empty_row, edit=stored(None, 0.0), refs="vllm-project/vllm#49294"
    ),
    _mutant(
        "lse-other-sign",
        "lse = -inf for +inf, or +inf for -inf",
        empty_row,
        Need("an infinite empty_lse", lambda p: np.isinf(p.empty_lse)),
        edit=lambda problem, plan: replace(plan, empty_lse=-plan.empty_lse),
    ),
    _mutant(
        "lse-lowest",
        "lse = the lowest f32 where nothing is seen",
        empty_row,
        edit=stored(None, float(np.finfo(np.float32).min)),
    ),
    _mutant(
        "one",
        "o = 1 where nothing is seen: an output filled before",
        empty_row,
        edit=stored(1.0, None),
        family="empty row untouched",
        refs="flashinfer-ai/flashinfer#4975",
    ),
    _mutant(
        "row-above",
        "o of an empty row is that of the row above",
        empty_row,
        output_above,
        finish=_row_above,
        family="empty row untouched",
        refs="flashinfer-ai/flashinfer#4975",
    ),
    _mutant("first-key", "L' = max(L, 1)", empty_request, edit=_first_key),
    _mutant(
        "last-entry",
        "page bt[-1] for a request without keys",
        empty_request,
        edit=_last_entry,
        refs="vllm-project/vllm#35969",
    ),
    _mutant("mean", "a row that sees nothing takes the mean of all keys", some_keys, edit=_uniform),
    _mutant(
        "work-shifted",
        "empty requests have no work item: later results move up",
        empty_first,
        finish=_shifted,
        refs="flashinfer-ai/flashinfer#868 deepseek-ai/FlashMLA#11 deepseek-ai/FlashMLA#92",
    ),
)
