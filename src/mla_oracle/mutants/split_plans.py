# SPDX-License-Identifier: Apache-2.0
"""Splits that are planned wrongly: keys at their edges, splits without work, states of other requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .evaluate import evaluate
from .mutant import Mutant
from .needs import Need, paged, two_keys, unsharded
from .plan import Part, Plan
from .problem import Problem
from .splits import SPLITS, cut, split
from .weights import (
    by,
    keep,
    softmax,
)


def _states_transposed(problem: Problem, plan: Plan) -> Plan:
    """State i of request b, stored at [b, i], read at [i, b]: it is that of another request."""
    states = []
    for i in range(SPLITS):
        part, b = divmod(plan.b * SPLITS + i, problem.B)
        rows, base = problem.state(b)
        own = evaluate(replace(base.plan, parts=cut(SPLITS), keeps_parts=True), rows, base)
        lse = np.where(own.d == 0, -np.inf, own.m + np.log(own.d))[..., part]
        states.append(Part(own.partials()[0][part][plan.t], lse[plan.t]))
    return replace(
        plan, extras=tuple(states), join=keep(lambda d: np.broadcast_to(np.arange(d.shape[-1]) > 0, d.shape))
    )


def boundary(name: str, formula: str, lost: bool) -> Mutant:
    """The key at each split's edge is in no split, or in two."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        size = max(-(-len(plan.lanes) // SPLITS), 1)
        edges = plan.lanes[size::size]
        lanes = np.setdiff1d(plan.lanes, edges) if lost else np.sort(np.concatenate([plan.lanes, edges]))
        return replace(plan, lanes=lanes)

    return Mutant(
        name=f"merge.{name}",
        family="split boundary",
        formula=formula,
        parameters={"splits": SPLITS},
        conditions=(paged, two_keys, unsharded),
        edit=edit,
    )


def _idle_splits(problem: Problem, plan: Plan) -> Plan:
    """As many splits as lanes and one more: the last has nothing, out 0 and lse 0."""
    shape = (len(plan.t), problem.H)
    return replace(plan, extras=(Part(np.zeros((*shape, problem.V)), np.zeros(shape)),))


def _stale_split(problem: Problem, plan: Plan) -> Plan:
    """A split without keys still has the state of the request before."""
    state = problem.state(plan.b - 1 if plan.b else problem.B - 1)[1]
    lse = np.where(np.isinf(state.m.max(-1)), -np.inf, state.lse / problem.unit)
    return replace(plan, extras=(Part(state.out[plan.t], lse[plan.t]),))


def _scaled(problem: Problem, plan: Plan) -> Plan:
    return split(problem, plan, SPLITS, by(lambda logs, m, d: softmax(logs * problem.scale)))


MUTANTS = (
    boundary("edge-lost", "the first key of every split but the first is in none", True),
    boundary("edge-twice", "the first key of every split but the first is in two", False),
    Mutant(
        name="merge.states-transposed",
        family="weights of another row",
        parameters={"splits": SPLITS},
        formula="states stored [B, splits] read as [splits, B]",
        edit=_states_transposed,
        conditions=(paged, two_keys, unsharded, Need("two requests", lambda p: p.B >= 2)),
    ),
    Mutant(
        name="merge.scaled",
        family="merge weights",
        formula="w_i ~ e^(scale lse_i), the scale applied to the lse as well",
        parameters={"splits": SPLITS},
        conditions=(paged, two_keys),
        edit=_scaled,
    ),
    Mutant(
        name="merge.idle-split",
        family="phantom split",
        formula="one split more than there is work: out 0, lse 0",
        references=("ROCm/aiter#3641", "vllm-project/vllm#47188"),
        conditions=(paged, two_keys, unsharded),
        edit=_idle_splits,
    ),
    Mutant(
        name="merge.stale-split",
        family="phantom split",
        formula="a split without keys has the state of the request before",
        references=("vllm-project/vllm#47188", "ROCm/aiter#2983"),
        conditions=(paged, two_keys, unsharded, Need("two requests", lambda p: p.B >= 2)),
        edit=_stale_split,
    ),
)
