# SPDX-License-Identifier: Apache-2.0
"""Lanes of a tile that hold no key: counted, or multiplied by 0 though they hold NaN.

A phantom state is a running (m, l, acc) that did not start empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .memory import ZERO
from .mutant import Maker, Mutant
from .needs import Need, one_key, paged, partial_page, two_requests, unsharded
from .plan import Part, Plan, bound
from .problem import Problem

PADS, NAN_TAIL, PHANTOM = "pad lanes in denominator", "0·NaN tail", "phantom state"


def rest_of(tile: int) -> Need:
    return Need(f"a length that is no multiple of {tile}", lambda p: bool(np.any(p.lens % tile)))


def padded(length: int, tile: int) -> Array:
    return np.arange(-(-length // tile) * tile)


def pad_lanes(tile: Callable[[Problem], int]) -> Callable[[Problem, Plan], Plan]:
    """Lanes up to the next multiple of the tile are seen, with score 0 and value 0."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        inner, sees = plan.address, plan.sees
        return replace(
            plan,
            lanes=padded(plan.length, tile(problem)),
            address=lambda own, j: np.where(j < own.length, inner(own, j), ZERO),
            sees=lambda own: sees(own) | (own.lanes >= own.length),
        )

    return edit


def masked_as_zero(problem: Problem, plan: Plan) -> Plan:
    """Masked keys have score 0 instead of -inf: a product with the mask in the place of a choice."""
    return replace(plan, mask=lambda s, seen: np.where(seen, s, 0.0))


def slack(
    mask: Callable[[Array, Array], Array] | None, address: Callable[[Plan, Array], Array] | None = None
) -> Callable[[Problem, Plan], Plan]:
    """Lanes up to the end of the last page are masked, and their values multiplied by the weight 0."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        lanes = padded(plan.length, problem.block)
        return replace(
            plan,
            lanes=lanes,
            touches_masked=True,
            mask=mask or plan.mask,
            address=plan.address if address is None else address,
        )

    return edit


def _added(s: Array, seen: Array) -> Array:
    """A mask added to the scores: a NaN stays."""
    return s + np.where(seen, 0, -np.inf)


def _slot_0(plan: Plan, tokens: Array) -> Array:
    """Masked lanes read slot 0 of page 0."""
    from .plan import page_address

    return np.where(tokens < plan.length, page_address(plan, tokens), 0)


def _zero_state(problem: Problem, plan: Plan) -> Plan:
    """m = 0, l = 1, acc = 0 before the first key."""
    shape = (len(plan.t), problem.H)
    return replace(plan, extras=(*plan.extras, Part(np.zeros((*shape, problem.V)), np.zeros(shape))))


def _carried(problem: Problem, plan: Plan) -> Plan:
    """The states of the requests before it were never cleared."""
    unit = problem.unit
    before = []
    for b in range(plan.b):
        state = problem.state(b)[1]
        seen = bound(state.plan)[:, None] > 0
        before.append(Part(state.out[plan.t], np.where(seen, state.lse / unit, -np.inf)[plan.t]))
    return replace(plan, extras=(*plan.extras, *before))


_mutant = Maker()


def pads(tile: int) -> Mutant:
    return _mutant(
        f"pad.lanes-{tile}",
        PADS,
        f"Z <- Z + (-L mod {tile}) e^0",
        one_key,
        rest_of(tile),
        unsharded,
        edit=pad_lanes(lambda p: tile),
        tile=tile,
        refs="flashinfer-ai/flashinfer#3716 tenstorrent/tt-metal#54833",
    )


def pads_of_rows(tile: int) -> Mutant:
    """Each query token has a loop of its own length: its last tile is padded, not the request's."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        more = np.where((top := bound(plan)) > 0, -top % tile, 0)  # [T]
        zero = np.zeros((len(plan.t), problem.H, problem.V))
        logs = np.where(more > 0, np.log(np.maximum(more, 1)), -np.inf)[:, None]
        return replace(plan, extras=(*plan.extras, Part(zero, np.broadcast_to(logs, zero.shape[:2]))))

    return _mutant(
        f"pad.rows-{tile}",
        PADS,
        f"Z <- Z + (-n mod {tile}) e^0, n the keys that the query token sees",
        one_key,
        Need("two query tokens of one request under a causal bound", lambda p: p.causal and p.T >= 2),
        unsharded,
        edit=edit,
        tile=tile,
        refs="flashinfer-ai/flashinfer#3716",
    )


_TAIL = "flashinfer-ai/flashinfer#941 flashinfer-ai/flashinfer#942 NVIDIA/cudnn-frontend#624"


MUTANTS = (
    pads(32),
    pads(64),
    pads(128),
    pads(256),
    _mutant(
        "pad.lanes-page",
        PADS,
        "Z <- Z + (-L mod P) e^0",
        one_key,
        paged,
        partial_page,
        unsharded,
        edit=pad_lanes(lambda p: p.block),
    ),
    pads_of_rows(32),
    pads_of_rows(64),
    _mutant(
        "pad.masked-as-zero",
        "mask value",
        "masked scores are 0, not -inf",
        one_key,
        Need("a key that a query token does not see", lambda p: p.causal and p.T >= 2),
        edit=masked_as_zero,
    ),
    _mutant(
        "tail.nan-value",
        NAN_TAIL,
        "o = sum_(j < P ceil(L / P)) w_j n_j, w_j = 0 from L on",
        paged,
        one_key,
        partial_page,
        edit=slack(None),
        refs=_TAIL,
    ),
    _mutant(
        "tail.nan-score",
        "NaN through additive mask",
        "s_j + (-inf) for j from L on: NaN stays NaN",
        paged,
        one_key,
        partial_page,
        edit=slack(_added),
        refs="vllm-project/vllm#37442",
    ),
    _mutant(
        "tail.slot-0",
        NAN_TAIL,
        "masked lanes read slot 0, weight 0",
        paged,
        one_key,
        partial_page,
        edit=slack(None, _slot_0),
        refs="sgl-project/sglang#36207 sgl-project/sglang#36003 ROCm/aiter#5010",
    ),
    _mutant(
        "state.zero",
        PHANTOM,
        "l_0 = 1 with m_0 = 0, acc_0 = 0: o = acc / (Z + e^0)",
        one_key,
        unsharded,
        edit=_zero_state,
        refs="vllm-project/tpu-inference#3426",
    ),
    _mutant(
        "state.carried",
        PHANTOM,
        "the running state of the requests before it is kept",
        two_requests,
        one_key,
        unsharded,
        paged,
        edit=_carried,
        refs="sgl-project/sglang#22688 flashinfer-ai/flashinfer#3047",
    ),
)
