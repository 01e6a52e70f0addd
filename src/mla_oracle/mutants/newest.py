# SPDX-License-Identifier: Apache-2.0
"""Rope elements at wrong positions: of the newest tokens, queries and keys alike, or of keys joined from fragments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from .mutant import Mutant
from .needs import angles, longer_than, rope, two_keys, two_tokens
from .plan import Plan
from .problem import Problem
from .rotation import Rotation
from .turns import rotate

Move = Callable[[Problem, Plan, Array], Array]


def _moved(query: Move | None, key: Move | None) -> Callable[[Problem, Plan], Plan]:
    """Query and keys rotated at the positions made of the right ones."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        def at(move: Move | None) -> Callable[[Rotation, Array, Array], Array] | None:
            return None if move is None else lambda known, x, p: known.turn(x, move(problem, plan, p))

        return rotate(problem, plan, at(query), at(key))

    return edit


def _first_new(problem: Problem, plan: Plan) -> int:
    return int(problem.lens[plan.b]) - problem.T


def _at_first(problem: Problem, plan: Plan, p: Array) -> Array:
    return np.minimum(p, _first_new(problem, plan))


def local(tokens: int) -> Mutant:
    """Fragments of so many keys, joined as they were."""
    return Mutant(
        name=f"rope.fragments-{tokens}",
        family="wrong position",
        formula=f"key j at position j mod {tokens}",
        references=("MemTensor/MemOS#2315",),
        parameters={"tokens": tokens},
        conditions=(longer_than(tokens), rope, angles),
        edit=_moved(None, lambda problem, plan, p: p % tokens),
    )


MUTANTS = (
    Mutant(
        name="rope.new-plus-one",
        family="position off by one",
        formula="the T newest tokens, q and k, at position + 1",
        references=("sgl-project/sglang#25015",),
        conditions=(two_keys, rope, angles),
        edit=_moved(
            lambda problem, plan, p: p + 1, lambda problem, plan, p: p + (p >= _first_new(problem, plan))
        ),
    ),
    Mutant(
        name="rope.window-at-first",
        family="wrong position",
        formula="the T newest tokens, q and k, at the position of the first of them",
        references=("jundot/omlx#2363",),
        conditions=(two_tokens, two_keys, rope, angles),
        edit=_moved(_at_first, _at_first),
    ),
    local(64),
)
