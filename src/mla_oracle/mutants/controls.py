# SPDX-License-Identifier: Apache-2.0
"""Equivalences: differences of a kernel that are no bugs. They must leave the results as they are, up to f64 rounding.

A verdict that names one of them is itself wrong. The log's class "equivalence (must pass)".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .joins import exact
from .mutant import Mutant, Turn
from .needs import Need, angles, one_key, paged, rope, two_keys, unsharded
from .plan import Plan
from .problem import Problem
from .rotation import Rotation, halves
from .splits import cut
from .tail import padded
from .turns import rotate

FAMILY = "equivalence (must pass)"


def permuted(x: Array) -> Array:
    """Pairs (2i, 2i + 1) to halves (i, i + R/2)."""
    return np.concatenate(halves(x, True), -1)


def _permuted(problem: Problem, plan: Plan) -> Plan:
    assert plan.q_rope is not None
    return replace(plan, q_rope=permuted(plan.q_rope), turn_keys=lambda x, tokens: permuted(x))


def _shifted(by: float) -> Callable[[Problem, Plan], Plan]:
    def act(known: Rotation, x: Array, positions: Array) -> Array:
        return known.turn(x, positions + by)

    shifted: Turn = act
    return lambda problem, plan: rotate(problem, plan, shifted, shifted)


def _backwards(problem: Problem, plan: Plan) -> Plan:
    return replace(plan, lanes=plan.lanes[::-1].copy())


def _slack_read(problem: Problem, plan: Plan) -> Plan:
    """The rest of the last page is read, and chosen away: NaN there is not touched."""
    return replace(plan, lanes=padded(plan.length, problem.block))


def _folded(problem: Problem, plan: Plan) -> Plan:
    """The scale multiplied into q."""
    q_rope = None if plan.q_rope is None else plan.q_rope * plan.scale
    return replace(plan, q_latent=plan.q_latent * plan.scale, q_rope=q_rope, scale=1.0)


def _mutant(name: str, formula: str, edit: Callable[[Problem, Plan], Plan], *needs: Need, refs: str = "") -> Mutant:
    return Mutant(
        name=f"control.{name}",
        family=FAMILY,
        formula=formula,
        references=tuple(refs.split()),
        control=True,
        conditions=needs,
        edit=edit,
    )


_PERMUTED = "huggingface/transformers#39687 vllm-project/vllm#26995 HabanaAI/vllm-fork#2042"
CONTROLS = (
    _mutant(
        "rope-permuted", "rope elements of q and k in another common order", _permuted, rope, two_keys, refs=_PERMUTED
    ),
    _mutant(
        "positions-shifted",
        "all positions counted from 7: only differences matter",
        _shifted(7),
        rope,
        two_keys,
        angles,
    ),
    _mutant(
        "keys-backwards",
        "keys in the opposite order",
        _backwards,
        two_keys,
        unsharded,
        refs="deepseek-ai/FlashMLA#212 vllm-project/vllm#53257 ROCm/aiter#4378",
    ),
    _mutant(
        "splits",
        "5 splits, merged rightly",
        lambda _, plan: replace(plan, parts=cut(5), join=exact),
        two_keys,
        unsharded,
        refs="lightseekorg/tokenspeed#904 flashinfer-ai/flashinfer#4647",
    ),
    _mutant("scale-folded", "the scale multiplied into q", _folded, one_key),
    _mutant("slack-not-touched", "rows nobody may read are read and chosen away", _slack_read, one_key, paged),
)
