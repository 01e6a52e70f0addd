# SPDX-License-Identifier: Apache-2.0
"""Wrong sets of visible keys: the causal bound, windows, the prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Maker, Mutant
from .needs import Need, causal, longer_than, not_causal, one_key, two_heads, two_keys
from .plan import Plan, bound
from .problem import Problem

NO_BOUND, BOUND, WINDOW = "no causal bound", "causal bound", "window"
more_keys = Need("more keys than query tokens", lambda p: int(p.lens.max(initial=0)) > p.T)


def upper(of: Callable[[Plan, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """Query token t sees the keys below of(plan, its right bound [T, 1]), at most L: [T, 1] or [T, H]."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        def sees(own: Plan) -> Array:
            most = np.minimum(of(own, bound(own)[:, None]), own.length)
            seen: Array = own.lanes < most[..., None]
            return seen

        return replace(plan, sees=sees)

    return edit


def also(seen: Callable[[Plan, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """Of the keys a token sees, those where seen(plan, its right bound [T, 1]) [T, n] holds."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        sees = plan.sees
        return replace(plan, sees=lambda own: sees(own) & seen(own, bound(own)[:, None])[:, None])

    return edit


def window(width: int) -> Mutant:
    """Only the last `width` keys."""
    return _mutant(
        f"window.{width}",
        WINDOW,
        f"S(t) = the last {width} keys of those t sees",
        longer_than(width),
        edit=also(lambda p, top: p.lanes >= top - width),
        width=width,
        refs="local-inference-lab/vllm#623 onnxruntime/mobius#596",
    )


def masked_at(value: float) -> Mutant:
    """Masked scores are a finite number."""
    return _mutant(
        f"mask.finite-{-value:g}",
        "mask value",
        f"masked scores are {value:g}, not -inf",
        one_key,
        Need("a key that a query token does not see", lambda p: p.causal and p.T >= 2),
        edit=lambda _, plan: replace(plan, mask=lambda s, seen: np.where(seen, s, value)),
        value=value,
    )


def _packed(plan: Plan, top: Array) -> Array:
    """Rows packed as t H + h, the token taken as row mod T."""
    heads = plan.q_latent.shape[1]
    row = plan.t[:, None] * heads + np.arange(heads)
    seen: Array = np.maximum(plan.length - plan.tokens + row % plan.tokens + 1, 0)
    return seen


def _packed_rows(plan: Plan, top: Array) -> Array:
    """The bound counted in packed rows: L - T H + row + 1."""
    heads = plan.q_latent.shape[1]
    row = plan.t[:, None] * heads + np.arange(heads)
    seen: Array = np.maximum(plan.length - plan.tokens * heads + row + 1, 0)
    return seen


_mutant = Maker()


_MISSING = "lightseekorg/tokenspeed#469 ROCm/aiter#3046 ROCm/aiter#3993 lablup/mlxcel#998 lablup/mlxcel#991"
MUTANTS = (
    _mutant(
        "causal.none",
        NO_BOUND,
        "S(t) = 0..L-1 for every t",
        causal,
        one_key,
        edit=upper(lambda p, top: top * 0 + p.length),
        refs=_MISSING,
    ),
    _mutant(
        "causal.unwanted",
        "unwanted causal bound",
        "S(t) = 0..L-T+t though all are asked for",
        not_causal,
        one_key,
        edit=lambda _, plan: replace(plan, causal=True),
        refs="ROCm/aiter#4565",
    ),
    _mutant("causal.top-left", BOUND, "S(t) = 0..t", two_keys, more_keys, edit=upper(lambda p, top: p.t[:, None] + 1)),
    _mutant(
        "causal.strict", BOUND, "S(t) = 0..L-T+t-1, not the token itself", two_keys, edit=upper(lambda p, top: top - 1)
    ),
    _mutant("causal.one-more", BOUND, "S(t) = 0..L-T+t+1", causal, one_key, edit=upper(lambda p, top: top + 1)),
    _mutant(
        "causal.first-token",
        BOUND,
        "S(t) = S(0)",
        causal,
        one_key,
        edit=upper(lambda p, top: top * 0 + max(p.length - p.tokens + 1, 0)),
    ),
    _mutant(
        "causal.reversed",
        BOUND,
        "S(t) = 0..L-1-t",
        causal,
        one_key,
        edit=upper(lambda p, top: np.maximum(p.length - p.t[:, None], 0)),
    ),
    _mutant(
        "causal.page-granular",
        BOUND,
        "the bound rounded up to a page",
        causal,
        one_key,
        Need("pages of two rows or more", lambda p: p.block >= 2),
        edit=upper(lambda p, top: -(-top // p.block) * p.block),
    ),
    _mutant(
        "causal.packed-mod",
        BOUND,
        "t = row mod T where rows are t H + h",
        causal,
        two_heads,
        one_key,
        edit=upper(_packed),
    ),
    _mutant(
        "causal.packed-rows",
        BOUND,
        "S(row) = 0..L-TH+row, the bound counted in packed rows",
        two_heads,
        two_keys,
        edit=upper(_packed_rows),
    ),
    _mutant(
        "causal.prefix-only",
        "new tokens not visible",
        "S(t) = 0..L-T-1",
        more_keys,
        two_keys,
        edit=also(lambda p, top: (p.lanes < p.length - p.tokens) & (top > 0)),
        refs="EfficientMoE/MoE-Infinity#195",
    ),
    _mutant(
        "causal.new-only",
        "prefix not visible",
        "S(t) = L-T..L-T+t",
        more_keys,
        edit=also(lambda p, top: (p.lanes >= p.length - p.tokens) & (top > 0)),
    ),
    _mutant(
        "causal.itself-only",
        "prefix not visible",
        "S(t) = {L-T+t}",
        two_keys,
        edit=also(lambda p, top: p.lanes == top - 1),
    ),
    _mutant(
        "causal.first-page-only",
        "prefix not visible",
        "S(t) within the first page",
        Need("a request of two pages", lambda p: p.paged and int(p.lens.max(initial=0)) > p.block),
        edit=also(lambda p, top: (p.lanes < p.block) & (top > 0)),
    ),
    window(16),
    window(128),
    window(512),
    window(1024),
    window(4096),
    masked_at(-1e4),
    masked_at(-100.0),
)
