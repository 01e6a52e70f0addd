# SPDX-License-Identifier: Apache-2.0
"""Wrong rotations: how rope elements are undone and turned otherwise, of the query, of the keys or of both.

A paged case holds rotated elements: query token t at position seq_len - T + t, key j at position j, by the angles of
the case. Undoing that is exact but for the rounding of what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Turn
from .plan import Plan
from .problem import Problem
from .rotation import Rotation, frequencies, halves, joined, turn


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


def pairing(known: Rotation, x: Array, positions: Array) -> Array:
    return turn(x, positions[..., None] * known.theta, not known.interleaved)


def missing(known: Rotation, x: Array, positions: Array) -> Array:
    return x


def with_angles(theta: Callable[[Rotation], Array]) -> Turn:
    return lambda known, x, positions: turn(x, positions[..., None] * theta(known), known.interleaved)


def moved(move: Callable[[Array], Array]) -> Turn:
    return lambda known, x, positions: known.turn(x, move(positions))


def table_layout(known: Rotation, x: Array, positions: Array) -> Array:
    """The two elements of a pair take the angles that the other pairing has in their places: no rotation."""
    pair = np.arange(known.width // 2)
    mine = joined(pair, pair, not known.interleaved).astype(int)  # [R] the angle in each place of the table
    first, second = halves(x, known.interleaved)
    one, two = halves(mine, known.interleaved)
    phi, psi = positions[..., None] * known.theta[one], positions[..., None] * known.theta[two]
    return joined(
        first * np.cos(phi) - second * np.sin(phi), second * np.cos(psi) + first * np.sin(psi), known.interleaved
    )


def swapped(known: Rotation, x: Array, positions: Array) -> Array:
    first, second = halves(x, known.interleaved)
    phi = positions[..., None] * known.theta
    return joined(
        first * np.sin(phi) - second * np.cos(phi), first * np.cos(phi) + second * np.sin(phi), known.interleaved
    )


def half(known: Rotation, x: Array, positions: Array) -> Array:
    n = known.width // 4 * 2
    own = turn(x[..., :n], positions[..., None] * frequencies(n, known.base), known.interleaved)
    return np.concatenate([own, x[..., n:]], -1)


def rounded(dtype: str) -> Turn:
    def as_stored(positions: Array) -> Array:
        import ml_dtypes

        number: Array = positions.astype(ml_dtypes.bfloat16 if dtype == "bf16" else np.float16).astype(np.float64)
        return number

    return moved(as_stored)


MUTANTS = ()
