# SPDX-License-Identifier: Apache-2.0
"""What the options of the canonical problem do in one honest kernel: softcap and bias to its scores, sinks to its sums.

    score = softcap tanh(score / softcap) + bias            every step rounded as scores are
    out = acc / (total + exp(sink - top))                   a sink is a weight without a value

A kernel adds the sink where it likes: as the maximum it starts with ("before"), as the last key of its first split
("within"), or to the merged result, of which it knows the LSE ("after").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Array

if TYPE_CHECKING:
    from .emulate import Problem

F32 = np.float32
SINKS = ("after", "within", "before")
TANH_STEP = 2.0**-22  # absolute, of 1 - 2 / (1 + exp(2 x)) in f32, which has no more bits near 0
TANH_ERROR = {"f32": 2.0**-22, "approx": 2.0**-11}  # relative, of tanhf and of tanh.approx.f32 (PTX ISA, "tanh")


def scored(
    problem: Problem, scaled: Array, narrow: Callable[[Array], Array], tanh: str, rng: np.random.Generator
) -> Array:
    """Scaled scores [R, n] f32 with softcap and bias, -inf where the bias is; `narrow` rounds as scores are rounded."""
    scores = scaled
    with np.errstate(over="ignore", invalid="ignore"):
        if problem.softcap:
            cap = F32(problem.softcap)
            ratio = narrow(scores / cap)
            scores = narrow(narrow(_tanh(ratio, tanh, rng)) * cap)
        if problem.bias is not None:
            scores = np.where(problem.bias == -np.inf, F32(-np.inf), narrow(scores + problem.bias))
    return scores


def _tanh(x: Array, how: str, rng: np.random.Generator) -> Array:
    found: Array = 1 - 2 / (1 + np.exp(2 * x)) if how == "sigmoid" and rng.integers(2) else np.tanh(x)
    if how in TANH_ERROR:
        sign = F32(rng.integers(3) - 1)
        found = found * (1 + F32(TANH_ERROR[how]) * (sign if sign else 2 * rng.random(x.shape, F32) - 1))
    return found


def placed(problem: Problem, wanted: str, splits: int) -> str | None:
    """Where a kernel that wants the sinks at `wanted` adds them; None: there are none.

    Without the sink in it, an LSE is lost in a state that starts with the sink or is merged with others.
    """
    if problem.sinks is None:
        return None
    if problem.sinks_in_lse:
        return wanted
    return "after" if splits > 1 or wanted == "after" else "within"


def with_sinks(problem: Problem, out: Array, lse: Array, wrong: Callable[[Array], Array]) -> tuple[Array, Array]:
    """(out [R, V], lse [R]) f32 of the keys alone, with the sinks in their sums."""
    assert problem.sinks is not None
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        of_sink = np.exp(problem.sinks - lse)  # [R] over the sum of the others
        of_sink = of_sink * (1 + wrong(of_sink))
        out = out * (1 / (1 + of_sink))[:, None]
        if problem.sinks_in_lse:
            lse = lse + np.log1p(of_sink)
    return out, lse


def settled(problem: Problem, out: Array, lse: Array) -> tuple[Array, Array]:
    """What no kernel computes: rows that see no key, and sinks that are infinite."""
    if problem.sinks is not None:
        out = np.where(np.isposinf(problem.sinks)[:, None], F32(0), out)
        if problem.sinks_in_lse:
            lse = np.where(np.isposinf(problem.sinks), F32(np.inf), lse)
    empty = problem.seen == 0
    return np.where(empty[:, None], F32(0), out), np.where(empty, F32(-np.inf), lse)
