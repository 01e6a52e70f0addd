# SPDX-License-Identifier: Apache-2.0
"""Softmax arithmetic that leaves its range, or rounds where a small error is amplified.

Only the roundings named are made, everything else is f64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .joins import inverse
from .mutant import Mutant
from .needs import Need, one_key, two_keys, unsharded
from .plan import Joined, Plan
from .problem import Problem

FAMILY, SCORES = "softmax range", "low-precision scores"


def rounded(x: Array, dtype: str) -> Array:
    """x as the dtype stores it, in f64; past its range it is infinite, below it 0."""
    import ml_dtypes

    kinds = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}
    own: Array = x.astype(kinds[dtype]).astype(np.float64)
    return own


def scores(act: Callable[[Array, float | Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """The scaled scores are act(q . key, scale)."""
    return lambda problem, plan: replace(plan, score=lambda own, raw: act(raw, own.scale))


def without_maximum(dtype: str) -> Mutant:
    """Weights e^s in `dtype`: infinite where s is large, 0 where it is small."""

    def join(m: Array, d: Array) -> Joined:
        z = np.where(m == np.inf, m, d * np.exp(np.where(m == -np.inf, 0, m)))
        return Joined(np.exp(m) / z, np.zeros(z.shape[:-1]), z[..., 0])

    def edit(problem: Problem, plan: Plan) -> Plan:
        # e^s in the dtype is the weight of the score log(dtype(e^s)).
        before = plan.score
        return replace(plan, score=lambda own, raw: np.log(rounded(np.exp(before(own, raw)), dtype)), join=join)

    return Mutant(
        name=f"range.no-maximum-{dtype}",
        family=FAMILY,
        formula=f"weights e^s in {dtype}, no maximum taken out",
        references=("NVIDIA/cutlass#2274",),
        parameters={"dtype": dtype},
        conditions=(one_key, unsharded),
        edit=edit,
    )


def maximum_from(limit: float) -> Mutant:
    """A finite number for -inf: the running maximum starts there, and scores far below it have no weight in f32."""

    def join(m: Array, d: Array) -> Joined:
        top = np.maximum(m.max(-1, initial=-np.inf), limit)
        c = rounded(np.exp(m - top[..., None]), "f32")
        z = (c * d).sum(-1)
        return Joined(c * inverse(z)[..., None], top, z)

    def met(problem: Problem) -> bool:
        tops = (problem.state(b)[1].m for b in range(problem.B))
        return any(bool(((m > -np.inf) & (m < limit)).any()) for m in tops)

    return Mutant(
        name=f"range.maximum-from-{limit:g}",
        family=FAMILY,
        formula=f"the running maximum starts at {limit:g}: o = 0 where every score is far below",
        references=("flashinfer-ai/flashinfer#4267",),
        parameters={"limit": limit},
        conditions=(one_key, unsharded, steep, Need(f"a row of scores below {limit:g}", met)),
        edit=lambda problem, plan: replace(plan, join=join),
    )


steep = Need("a scale above 100", lambda p: abs(p.scale) > 100)


def _overflow(raw: Array, scale: float | Array, dtype: str) -> Array:
    return rounded(raw, dtype) * scale


def _mutant(
    name: str,
    family: str,
    formula: str,
    edit: Callable[[Problem, Plan], Plan],
    *needs: Need,
    refs: str = "",
    **parameters: object,
) -> Mutant:
    return Mutant(
        name=f"range.{name}",
        family=family,
        formula=formula,
        references=tuple(refs.split()),
        parameters=parameters,
        conditions=needs,
        edit=edit,
    )


def floored(limit: float) -> Mutant:
    """Weights of scores further than `limit` below the maximum are 0."""
    return _mutant(
        f"weights-above-{limit:g}",
        FAMILY,
        f"w_j = 0 where s_j < max s - {limit:g}",
        _seen_only(lambda s: s >= s.max(-1, keepdims=True, initial=-np.inf) - limit),
        two_keys,
        limit=limit,
    )


def _seen_only(kept: Callable[[Array], Array]) -> Callable[[Problem, Plan], Plan]:
    def edit(problem: Problem, plan: Plan) -> Plan:
        before = plan.mask

        def mask(s: Array, seen: Array) -> Array:
            s = before(s, seen)
            return np.where(kept(s), s, -np.inf)

        return replace(plan, mask=mask)

    return edit


MUTANTS = (
    without_maximum("f32"),
    without_maximum("f16"),
    _mutant(
        "scores-bf16",
        SCORES,
        "s <- bf16(s)",
        scores(lambda raw, scale: rounded(raw * scale, "bf16")),
        two_keys,
        refs="AI-Hypercomputer/maxtext#4136",
        dtype="bf16",
    ),
    _mutant(
        "scores-f16",
        SCORES,
        "s <- f16(q . k) scale: past 65504 it is infinite",
        scores(lambda raw, scale: _overflow(raw, scale, "f16")),
        one_key,
        refs="AI-Hypercomputer/maxtext#4136",
        dtype="f16",
    ),
    _mutant(
        "scores-e4m3",
        SCORES,
        "s <- e4m3(s)",
        scores(lambda raw, scale: rounded(raw * scale, "e4m3")),
        two_keys,
        dtype="e4m3",
    ),
    maximum_from(-50000.0),
    floored(4.0),
    floored(8.0),
)
