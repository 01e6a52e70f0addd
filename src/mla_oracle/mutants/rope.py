# SPDX-License-Identifier: Apache-2.0
"""Wrong rotations of the rope elements, of the query, of the keys or of both.

A paged case holds rotated elements. These mutants undo the rotation (query token t at position seq_len - T + t, key j
at position j, the angles of the case) and make the wrong one; the undoing is exact but for the rounding of what is
stored. On a rope case the rows are turned the wrong way to begin with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Mutant, Turn
from .needs import Need, angles, full_value, one_key, rope, two_keys, two_lengths, two_pages, two_requests, two_tokens
from .plan import Plan
from .problem import Problem, Results
from .rotation import Rotation, frequencies, halves, joined, turn

BASES = (10000.0, 500000.0, 1000000.0)
not_at_zero = Need("a position other than 0", lambda p: int(p.lens.max(initial=0)) >= 2)
rotated_with_yarn = Need("angles with YaRN", lambda p: isinstance(p.rotation, Rotation) and p.rotation.yarn is not None)


def unturned_query(problem: Problem, plan: Plan) -> Array:
    """The rope elements of the query before rotation [T, H, R]."""
    assert isinstance(problem.rotation, Rotation) and plan.q_rope is not None
    return problem.rotation.turn(plan.q_rope, problem.positions(plan.b)[plan.t, None], -1)


def rotate(problem: Problem, plan: Plan, query: Turn | None, keys: Turn | None) -> Plan:
    """`plan` with the query, the keys, or both turned otherwise."""
    known = problem.rotation
    assert isinstance(known, Rotation)
    if query is not None:
        positions = problem.positions(plan.b)[plan.t, None].astype(np.float64)
        plan = replace(plan, q_rope=query(known, unturned_query(problem, plan), positions))
    if keys is not None:
        again = keys

        def turn_keys(x: Array, tokens: Array) -> Array:
            positions = tokens.astype(np.float64)
            return again(known, known.turn(x, positions, -1), positions)

        plan = replace(plan, turn_keys=turn_keys)
    return plan


def _pairing(known: Rotation, x: Array, positions: Array) -> Array:
    return turn(x, positions[..., None] * known.theta, not known.interleaved)


def _missing(known: Rotation, x: Array, positions: Array) -> Array:
    return x


def _with(theta: Callable[[Rotation], Array]) -> Turn:
    return lambda known, x, positions: turn(x, positions[..., None] * theta(known), known.interleaved)


def _moved(move: Callable[[Array], Array]) -> Turn:
    return lambda known, x, positions: known.turn(x, move(positions))


def _table_layout(known: Rotation, x: Array, positions: Array) -> Array:
    """The two elements of a pair take the angles that the other pairing has in their places: no rotation."""
    pair = np.arange(known.width // 2)
    mine = joined(pair, pair, not known.interleaved).astype(int)  # [R] the angle in each place of the table
    first, second = halves(x, known.interleaved)
    one, two = halves(mine, known.interleaved)
    phi, psi = positions[..., None] * known.theta[one], positions[..., None] * known.theta[two]
    return joined(
        first * np.cos(phi) - second * np.sin(phi), second * np.cos(psi) + first * np.sin(psi), known.interleaved
    )


def _swapped(known: Rotation, x: Array, positions: Array) -> Array:
    first, second = halves(x, known.interleaved)
    phi = positions[..., None] * known.theta
    return joined(
        first * np.sin(phi) - second * np.cos(phi), first * np.cos(phi) + second * np.sin(phi), known.interleaved
    )


def _half(known: Rotation, x: Array, positions: Array) -> Array:
    n = known.width // 4 * 2
    own = turn(x[..., :n], positions[..., None] * frequencies(n, known.base), known.interleaved)
    return np.concatenate([own, x[..., n:]], -1)


def _rounded(dtype: str) -> Turn:
    def as_stored(positions: Array) -> Array:
        import ml_dtypes

        number: Array = positions.astype(ml_dtypes.bfloat16 if dtype == "bf16" else np.float16).astype(np.float64)
        return number

    return _moved(as_stored)


_MLX = "ml-explore/mlx#3494 ml-explore/mlx#3795 ml-explore/mlx#3949"
# name, class, formula, references, what it needs beside angles, how it turns, which sides
TURNS: tuple[tuple[str, str, str, str, tuple[Need, ...], Turn, str], ...] = (
    (
        "pairing",
        "rope pairing",
        "pairs (2i, 2i + 1) rotated as (i, i + R/2), or the other way round",
        "huggingface/optimum-intel#1877 vllm-project/vllm#28968 sgl-project/sglang#13531",
        (),
        _pairing,
        "both q k",
    ),
    (
        "table-layout",
        "rope pairing",
        "x'_m = x_m cos phi_m -+ x_m' sin phi_m with the phi of the other pairing's table",
        "NVIDIA/Megatron-LM#3900",
        (),
        _table_layout,
        "both q k",
    ),
    (
        "doubled",
        "double rotation",
        "R(p) -> R(2p)",
        "NVIDIA/TensorRT-LLM#13222",
        (),
        _moved(lambda p: 2 * p),
        "both q k",
    ),
    ("missing", "missing rotation", "R(p) -> 1", "ml-explore/mlx-lm#1189", (), _missing, "both q k"),
    (
        "plus-one",
        "position off by one",
        "R(p) -> R(p + 1)",
        "EfficientMoE/MoE-Infinity#195",
        (),
        _moved(lambda p: p + 1),
        "q k",
    ),
    ("minus-one", "position off by one", "R(p) -> R(p - 1)", "", (), _moved(lambda p: p - 1), "q k"),
    ("reversed", "wrong angle", "R(p) -> R(-p), the sine's sign", "", (), _moved(lambda p: -p), "both q k"),
    ("cos-sin-swapped", "wrong angle", "cos and sin exchanged", "", (), _swapped, "both q k"),
    (
        "exponent",
        "wrong angle",
        "theta_i = base^(-i/R) for base^(-2i/R)",
        "",
        (),
        _with(lambda r: r.base ** (-np.arange(r.width // 2) / r.width)),
        "both k",
    ),
    (
        "exponent-width",
        "wrong angle",
        "theta_i = base^(-2i/3R), R taken for the width of the whole query head",
        "",
        (),
        _with(lambda r: r.base ** (-2 * np.arange(r.width // 2) / (3 * r.width))),
        "both k",
    ),
    ("half", "wrong angle", "only the first R/2 elements are rotated", "", (), _half, "both k"),
    (
        "no-yarn",
        "wrong angle",
        "theta without YaRN's ramp",
        "",
        (rotated_with_yarn,),
        _with(lambda r: frequencies(r.width, r.base)),
        "both k",
    ),
    (
        "position-bf16",
        "position rounded",
        "R(p) -> R(bf16(p)), from position 257 on",
        "",
        (Need("more than 257 keys", lambda p: int(p.lens.max(initial=0)) > 257),),
        _rounded("bf16"),
        "both k",
    ),
    (
        "position-f16",
        "position rounded",
        "R(p) -> R(f16(p)), from position 2049 on",
        "",
        (Need("more than 2049 keys", lambda p: int(p.lens.max(initial=0)) > 2049),),
        _rounded("f16"),
        "both k",
    ),
)


def _turning(
    name: str, family: str, formula: str, refs: str, needs: tuple[Need, ...], act: Turn, sides: str, side: str
) -> Mutant:
    where = {"both": "q and k", "q": "q alone", "k": "k alone"}[side]

    def edit(problem: Problem, plan: Plan) -> Plan:
        return rotate(problem, plan, act if side != "k" else None, act if side != "q" else None)

    return Mutant(
        name=f"rope.{name}" if side == "both" else f"rope.{name}-{side}",
        family=family,
        formula=f"{formula}: {where}",
        references=tuple(refs.split()),
        parameters={"side": side},
        conditions=(two_keys, rope, angles, *needs),
        edit=edit,
        turn=act if side == "both" or (side == "q" and "both" not in sides) else None,
    )


def base(value: float, side: str) -> Mutant:
    """The keys, the query or both rotated with another base."""
    act = _with(lambda r: frequencies(r.width, value, r.yarn))
    other = Need(
        f"angles of a base other than {value:g}",
        lambda p: isinstance(p.rotation, Rotation) and p.rotation.base != value,
    )
    made = _turning(
        f"base-{value:g}",
        "wrong base",
        f"theta_i = {value:g}^(-2i/R)",
        "ml-explore/mlx-lm#1189",
        (other,),
        act,
        "both q k",
        side,
    )
    return replace(made, parameters={"base": value, "side": side})


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
    *(_turning(*spec, side) for spec in TURNS for side in spec[6].split()),
    *(base(value, side) for value in BASES for side in ("both", "k")),
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
        "order-q",
        "rope pairing",
        "q_r permuted from pairs to halves, k_r not",
        "HabanaAI/vllm-fork#2042",
        _query(lambda _, p, x: _neox(x)),
        two_keys,
        rope,
    ),
    _mutant(
        "order-k",
        "rope pairing",
        "k_r permuted from pairs to halves, q_r not",
        "",
        _query(lambda _, p, x: _interleave(x)),
        two_keys,
        rope,
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
