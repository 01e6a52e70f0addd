# SPDX-License-Identifier: Apache-2.0
"""Rope elements at wrong positions, of some rows only, or left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Mutant
from .needs import (
    Need,
    angles,
    full_value,
    one_key,
    rope,
    rope_pairs,
    two_heads,
    two_keys,
    two_lengths,
    two_pages,
    two_requests,
    two_tokens,
)
from .plan import Plan
from .problem import Problem, Results
from .rotation import Rotation, halves, joined
from .turns import rotate

_MLX = "ml-explore/mlx#3494 ml-explore/mlx#3795 ml-explore/mlx#3949"


def _mutant(
    name: str, family: str, formula: str, refs: str, edit: Callable[[Problem, Plan], Plan], *needs: Need
) -> Mutant:
    return Mutant(
        name=f"rope.{name}", family=family, formula=formula, references=tuple(refs.split()), conditions=needs, edit=edit
    )


def _at(move: Callable[[Problem, Plan, Array], Array], side: str) -> Callable[[Problem, Plan], Plan]:
    """Query or keys rotated at the positions that `move` makes of the right ones."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        def act(known: Rotation, x: Array, positions: Array) -> Array:
            return known.turn(x, move(problem, plan, positions))

        return rotate(problem, plan, act if side == "q" else None, act if side == "k" else None)

    return edit


def _unrotated(where: Callable[[Problem, Plan, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    return _at(lambda problem, plan, p: np.where(where(problem, plan, p), 0, p), "k")


def _query(change: Callable[[Problem, Plan, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    def edit(problem: Problem, plan: Plan) -> Plan:
        return plan if plan.q_rope is None else replace(plan, q_rope=change(problem, plan, plan.q_rope))

    return edit


def _tail_heads(problem: Problem, plan: Plan) -> Plan:
    """The last block of heads of token t - 1 runs over into the first heads of token t and rotates them once more."""
    block = head_block(problem.H)
    over = -problem.H % block
    assert isinstance(problem.rotation, Rotation) and plan.q_rope is not None
    before = problem.positions(plan.b)[plan.t] - 1
    again = problem.rotation.turn(plan.q_rope, before[:, None])
    hit = (np.arange(problem.H) < over) & (plan.t > 0)[:, None]
    return replace(plan, q_rope=np.where(hit[..., None], again, plan.q_rope))


def head_block(heads: int) -> int:
    return 16 if heads > 16 else 2


def _interleave(x: Array) -> Array:
    return joined(*halves(x, False), True)


def _neox(x: Array) -> Array:
    return joined(*halves(x, True), False)


def _output(problem: Problem, results: Results) -> Results:
    assert isinstance(problem.rotation, Rotation)
    positions = np.stack([problem.positions(b) for b in range(problem.B)]).astype(np.float64)  # [B, T]
    out = results["out"].copy()
    out[..., problem.split :] = problem.rotation.turn(out[..., problem.split :], positions[..., None], -1)
    return {**results, "out": out}


MUTANTS = (
    _mutant(
        "dropped", "rope not in the score", "s = scale <a, n>", "", lambda _, p: replace(p, q_rope=None), two_keys, rope
    ),
    _mutant(
        "zero-rows",
        "row-indexing in rope",
        "q_r[b >= 1] <- 0",
        _MLX,
        _query(lambda _, p, x: x if p.b == 0 else np.zeros_like(x)),
        two_requests,
        two_keys,
        rope,
    ),
    _mutant(
        "first-head",
        "row-indexing in rope",
        "q_r of head 0 for every head",
        "",
        _query(lambda _, p, x: np.broadcast_to(x[:, :1], x.shape).copy()),
        two_keys,
        rope,
    ),
    _mutant(
        "next-head",
        "row-indexing in rope",
        "q_r of head h + 1, of the last one head 0",
        "",
        _query(lambda _, p, x: np.roll(x, -1, 1)),
        two_keys,
        two_heads,
        rope,
    ),
    _mutant(
        "head-before",
        "row-indexing in rope",
        "q_r of head h - 1, of head 0 the last one",
        "",
        _query(lambda _, p, x: np.roll(x, 1, 1)),
        two_keys,
        two_heads,
        rope,
    ),
    _mutant(
        "order-q",
        "rope pairing",
        "q_r permuted from pairs to halves, k_r not",
        "HabanaAI/vllm-fork#2042",
        _query(lambda _, p, x: _neox(x)),
        two_keys,
        rope_pairs,
    ),
    _mutant(
        "order-k",
        "rope pairing",
        "k_r permuted from pairs to halves, q_r not",
        "",
        _query(lambda _, p, x: _interleave(x)),
        two_keys,
        rope_pairs,
    ),
    _mutant(
        "amplitude",
        "scale of one part",
        "<r, k> <- mscale^2 <r, k>, the factor in the cosines too",
        "",
        _query(lambda _, p, x: x * (0.1 * math.log(40) + 1) ** 2),
        two_keys,
        rope,
    ),
    _mutant(
        "tail-heads",
        "double rotation, tail heads",
        "r_(t,h) <- R(p_t) R(p_(t-1)) r for the first -H mod BH heads, t >= 1",
        "NVIDIA/Megatron-LM#6890",
        _tail_heads,
        two_tokens,
        two_keys,
        rope,
        angles,
        Need("heads that are no multiple of the block of 16 (2 up to 16 heads)", lambda p: p.H % head_block(p.H) != 0),
    ),
    _mutant(
        "query-at-t",
        "wrong position",
        "query token t at position t, not seq_len - T + t",
        "",
        _at(lambda _, plan, p: plan.t[:, None] * 1.0, "q"),
        two_keys,
        rope,
        angles,
    ),
    _mutant(
        "query-at-last",
        "wrong position",
        "every query token at position seq_len - 1",
        "",
        _at(lambda problem, plan, p: np.full(p.shape, problem.lens[plan.b] - 1.0), "q"),
        two_tokens,
        two_keys,
        rope,
        angles,
    ),
    _mutant(
        "query-of-request-0",
        "wrong position",
        "query positions from the length of request 0",
        "",
        _at(lambda problem, plan, p: problem.positions(0)[plan.t, None] * 1.0, "q"),
        two_lengths,
        two_keys,
        rope,
        angles,
    ),
    _mutant(
        "page-local",
        "wrong position",
        "key j at position j mod block",
        "",
        _at(lambda problem, plan, p: p % problem.block, "k"),
        two_pages,
        rope,
        angles,
    ),
    _mutant(
        "key-flat",
        "wrong position",
        "key positions counted on from request to request",
        "",
        _at(lambda problem, plan, p: p + problem.lens[: plan.b].sum(), "k"),
        two_requests,
        two_keys,
        rope,
        angles,
    ),
    _mutant(
        "new-keys-missing",
        "missing rotation",
        "the T newest keys are not rotated",
        "",
        _unrotated(lambda problem, plan, p: p >= problem.lens[plan.b] - problem.T),
        two_keys,
        rope,
        angles,
    ),
    _mutant(
        "outside-window",
        "missing rotation",
        "k_j not rotated for j < seq_len - 128",
        "ml-explore/mlx-lm#1189",
        _unrotated(lambda problem, plan, p: p < problem.lens[plan.b] - 128),
        Need("more than 130 keys", lambda p: int(p.lens.max(initial=0)) > 130),
        rope,
        angles,
    ),
    Mutant(
        name="rope.output-turned",
        family="missing rotation",
        formula="o_r <- R(-p_t) o_r, the output's rope elements rotated back (or not, where they should be)",
        references=("AMD-AGI/Primus#928",),
        conditions=(full_value, one_key, angles),
        finish=_output,
    ),
)
