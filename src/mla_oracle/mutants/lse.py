# SPDX-License-Identifier: Apache-2.0
"""Wrong log-sum-exps beside a right output: base, maximum, sign, place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..paged import LOG2E
from .mutant import Maker
from .needs import Need, empty_row, one_key, paged, two_heads, two_keys, two_requests, two_tokens, unsharded
from .plan import Plan
from .problem import Problem, Results

FAMILY, BASE, SLOT = "LSE value", "LSE base", "LSE slot"
natural = Need("an lse in base e", lambda p: p.unit == 1)
base_2 = Need("an lse in base 2", lambda p: p.unit != 1)


def value(of: Callable[[Plan, Array, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """lse = of(plan, m, z), stored as it is."""
    return lambda problem, plan: replace(plan, log_sum=of)


def place(of: Callable[[Problem, Array], Array]) -> Callable[[Problem, Results], Results]:
    """The stored lse [B, T, H] moved."""
    return lambda problem, results: {**results, "lse": of(problem, results["lse"])}


def _next_to_empty(problem: Problem, lse: Array) -> Array:
    """An empty request's lse is stored at the request after it, or before where there is none."""
    lse = lse.copy()
    for b in np.flatnonzero(problem.lens == 0):
        lse[b + 1 if b + 1 < problem.B else b - 1] = problem.empty_lse
    return lse


_mutant = Maker("lse.", (paged, one_key))


_MERGED = "vllm-project/vllm#47079 flashinfer-ai/flashinfer#2113 sgl-project/sglang#33064"
MUTANTS = (
    _mutant(
        "base-2",
        BASE,
        "log2 where ln is asked for",
        natural,
        edit=value(lambda p, m, z: (m + np.log(z)) * LOG2E),
        refs=_MERGED,
    ),
    _mutant(
        "base-e", BASE, "ln where log2 is asked for", base_2, edit=value(lambda p, m, z: m + np.log(z)), refs=_MERGED
    ),
    _mutant(
        "base-twice", BASE, "converted to base 2 twice", base_2, edit=value(lambda p, m, z: (m + np.log(z)) * LOG2E**2)
    ),
    _mutant("mixed-m", BASE, "m in base 2, log l in base e", edit=value(lambda p, m, z: m * LOG2E + np.log(z))),
    _mutant("mixed-l", BASE, "m in base e, log l in base 2", two_keys, edit=value(lambda p, m, z: m + np.log2(z))),
    _mutant("without-maximum", FAMILY, "lse = log l", edit=value(lambda p, m, z: np.log(z) * p.unit)),
    _mutant("maximum-only", FAMILY, "lse = m", two_keys, edit=value(lambda p, m, z: m * p.unit)),
    _mutant(
        "unscaled-maximum",
        FAMILY,
        "lse = m / scale + log l",
        edit=value(lambda p, m, z: (m / p.scale + np.log(z)) * p.unit),
    ),
    _mutant(
        "maximum-scaled-twice",
        FAMILY,
        "lse = scale m + log l",
        edit=value(lambda p, m, z: (m * p.scale + np.log(z)) * p.unit),
    ),
    _mutant("negated", FAMILY, "lse <- -lse", edit=value(lambda p, m, z: -(m + np.log(z)) * p.unit)),
    _mutant("minus-maximum", FAMILY, "lse = log l - m", edit=value(lambda p, m, z: (np.log(z) - m) * p.unit)),
    _mutant("sum", FAMILY, "l e^m, the log not taken", edit=value(lambda p, m, z: z * np.exp(m))),
    _mutant("l-only", FAMILY, "l, neither log nor maximum", edit=value(lambda p, m, z: z)),
    _mutant("log-left-out", FAMILY, "lse = m + l", edit=value(lambda p, m, z: (m + z) * p.unit)),
    _mutant(
        "mean",
        FAMILY,
        "lse = log (Z / keys)",
        two_keys,
        unsharded,
        edit=value(lambda p, m, z: (m + np.log(z) - np.log(np.maximum(p.sees(p).sum(-1), 1))) * p.unit),
    ),
    _mutant(
        "zero",
        FAMILY,
        "lse not written: 0",
        finish=place(lambda _, x: x * 0 if np.isfinite(x).all() else np.zeros_like(x)),
    ),
    _mutant(
        "all-minus-inf",
        SLOT,
        "an idle split stores -inf over it",
        unsharded,
        finish=place(lambda _, x: np.full_like(x, -np.inf)),
        refs="sgl-project/sgl-kernel-xpu#487",
    ),
    _mutant(
        "next-to-empty",
        SLOT,
        "the lse of an empty request stored at the one after it",
        two_requests,
        empty_row,
        finish=place(_next_to_empty),
        refs="Dao-AILab/flash-attention#2842 Dao-AILab/flash-attention#2573",
    ),
    _mutant(
        "next-head", SLOT, "lse of head h stored at head h + 1", two_heads, finish=place(lambda _, x: np.roll(x, 1, 2))
    ),
    _mutant(
        "heads-first",
        SLOT,
        "stored [B, H, T] in the place of [B, T, H]",
        two_tokens,
        two_heads,
        finish=place(lambda _, x: np.swapaxes(x, 1, 2).reshape(x.shape)),
    ),
    _mutant(
        "request-last",
        SLOT,
        "stored [H, B T] in the place of [B, T, H]",
        Need("two rows, of two heads", lambda p: p.B * p.T >= 2 and p.H >= 2),
        finish=place(lambda p, x: np.moveaxis(x, 2, 0).reshape(x.shape)),
    ),
    _mutant(
        "first-token",
        SLOT,
        "lse of query token 0 for every one",
        two_tokens,
        finish=place(lambda _, x: np.broadcast_to(x[:, :1], x.shape).copy()),
    ),
)
