# SPDX-License-Identifier: Apache-2.0
"""Wrong projections around the latent attention of an absorbed or naive case: w_uk before it, w_uv after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..cases import DenseCase
from .mutant import Mutant
from .needs import Need, dense, one_key, two_heads, two_keys
from .plan import Plan
from .problem import Problem, absorb

FAMILY = "upstream GEMM"


def key(of: Callable[[Array, Array], tuple[Array, Array]]) -> Callable[[Problem, Plan], Plan]:
    """The query absorbed through another w_uk [H, P, L], or another q_nope [T, H, P]."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        case = problem.case
        assert isinstance(case, DenseCase)
        q, w = of(case.q_nope.astype(np.float64), case.w_uk.astype(np.float64))
        return replace(plan, q_latent=absorb(q, w))

    return edit


def value(of: Callable[[Problem, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """The output projected up by another w_uv [H, V, L]."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert plan.up is not None
        return replace(plan, up=of(problem, plan.up))

    return edit


def _flat(w: Array) -> Array:
    """[H, P, L] read as if it were stored [H, L, P]."""
    return w.reshape(w.shape[0], w.shape[2], w.shape[1]).swapaxes(1, 2)


def _offset(w: Array) -> Array:
    """[H, N, L] with head h found h N elements on."""
    size = w[0].size
    flat = w.reshape(-1)
    return np.stack([flat[at : at + size].reshape(w[0].shape) for at in np.arange(len(w)) * w.shape[1]])


def _together(problem: Problem) -> tuple[Array, Array]:
    """kv_b_proj holds P rows of w_uk and V of w_uv head by head; split as all of w_uk, then all of w_uv."""
    case = problem.case
    assert isinstance(case, DenseCase)
    rows = np.concatenate([case.w_uk, case.w_uv], 1).astype(np.float64)  # [H, P + V, L]
    flat = rows.reshape(-1, rows.shape[2])
    count = case.w_uk.shape[0] * case.w_uk.shape[1]
    return flat[:count].reshape(case.w_uk.shape), flat[count:].reshape(case.w_uv.shape)


def _split(problem: Problem, plan: Plan) -> Plan:
    w_uk, w_uv = _together(problem)
    assert isinstance(problem.case, DenseCase)
    return replace(plan, q_latent=absorb(problem.case.q_nope.astype(np.float64), w_uk), up=w_uv)


def _mutant(name: str, formula: str, edit: Callable[[Problem, Plan], Plan], *needs: Need, refs: str = "") -> Mutant:
    return Mutant(
        name=f"absorb.{name}",
        family=FAMILY,
        formula=formula,
        references=tuple(refs.split()),
        conditions=(dense, *needs),
        edit=edit,
    )


pow2 = Need(
    "nope elements that are no power of two",
    lambda p: isinstance(p.case, DenseCase) and p.case.w_uk.shape[1] & (p.case.w_uk.shape[1] - 1) != 0,
)


def _power_of_two(q: Array, w: Array) -> tuple[Array, Array]:
    n = 1 << (w.shape[1].bit_length() - 1)
    return q[..., :n], w[:, :n]


MUTANTS = (
    _mutant(
        "uk-of-head-0", "a_h = q_h w_uk_0", key(lambda q, w: (q, np.broadcast_to(w[:1], w.shape))), two_heads, two_keys
    ),
    _mutant("uk-next-head", "a_h = q_h w_uk_(h+1)", key(lambda q, w: (q, np.roll(w, -1, 0))), two_heads, two_keys),
    _mutant("uk-transposed", "w_uk [H, P, L] read as [H, L, P]", key(lambda q, w: (q, _flat(w))), two_keys),
    _mutant(
        "uk-power-of-two",
        "only the first 2^k nope elements, a GEMM for powers of two",
        key(_power_of_two),
        pow2,
        two_keys,
        refs="vllm-project/vllm#51915",
    ),
    _mutant(
        "uv-of-head-0", "v_h = w_uv_0 o_h", value(lambda _, w: np.broadcast_to(w[:1], w.shape)), two_heads, one_key
    ),
    _mutant("uv-next-head", "v_h = w_uv_(h+1) o_h", value(lambda _, w: np.roll(w, -1, 0)), two_heads, one_key),
    _mutant(
        "uk-head-offset",
        "head h starts h P elements into w_uk, not h P rows",
        key(lambda q, w: (q, _offset(w))),
        two_heads,
        two_keys,
        refs="1bit-MONSTER/1bit-MONSTER#2451",
    ),
    _mutant(
        "uv-head-offset",
        "head h starts h V elements into w_uv, not h V rows",
        value(lambda _, w: _offset(w)),
        two_heads,
        one_key,
    ),
    _mutant("uv-transposed", "w_uv [H, V, L] read as [H, L, V]", value(lambda _, w: _flat(w)), one_key),
    _mutant(
        "split",
        "kv_b_proj split as all of w_uk, then all of w_uv, where it holds both head by head",
        _split,
        two_heads,
        one_key,
    ),
)
