# SPDX-License-Identifier: Apache-2.0
"""Wrong ranks of a sharded case: which tokens they think they own, what they see of them, whose states arrive.

Merges of their states that are wrong are in splits.py and apply to ranks as they do to splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from .mutant import Mutant
from .needs import Need, paged, sharded, two_keys
from .plan import Plan, bound
from .problem import Problem

uneven = Need("a length that is no multiple of the shards", lambda p: bool(np.any(p.lens % p.shards)))
several = Need("two query tokens and causal", lambda p: p.causal and p.T >= 2)


def owner(problem: Problem, plan: Plan) -> tuple[Array, Array]:
    """The rank of each lane's token, and its place among the rank's tokens."""
    ranks = problem.owned(plan).of_lane
    places = np.zeros(len(ranks), np.int64)
    for rank in range(problem.shards):
        own = ranks == rank
        places[own] = np.arange(own.sum())
    return ranks, places


def seeing(of: Callable[[Problem, Plan, Array, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """Of each rank's tokens at places [n], those a query token sees: [T, n]."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        return replace(plan, sees=lambda own: of(problem, own, *owner(problem, own))[:, None])

    return edit


def _other_layout(problem: Problem, plan: Plan, ranks: Array, places: Array) -> Array:
    """How many tokens of its own a rank sees is counted for the other layout."""
    assert isinstance(problem.case, PagedCase)
    n, top = plan.length, bound(plan)  # [T]
    if problem.case.shard_layout == "contiguous":
        counted = -(-(top[:, None] - np.arange(problem.shards)) // problem.shards)
    else:
        size = -(-n // problem.shards)
        counted = np.clip(top[:, None] - np.arange(problem.shards) * size, 0, size)
    return places < np.maximum(counted, 0)[:, ranks]


def _all_own(problem: Problem, plan: Plan, ranks: Array, places: Array) -> Array:
    """A rank sees all tokens it owns, whatever the query token."""
    return np.broadcast_to(bound(plan)[:, None] > 0, (len(plan.t), len(places)))


def _local_bound(problem: Problem, plan: Plan, ranks: Array, places: Array) -> Array:
    """The causal bound counted with the rank's own length: n_r - T + t + 1 of its n_r tokens."""
    owned = np.bincount(ranks, minlength=problem.shards)[ranks]  # [n]
    return places < (owned - plan.tokens + plan.t[:, None] + 1 if plan.causal else owned)


def _even_length(problem: Problem, plan: Plan, ranks: Array, places: Array) -> Array:
    """Every rank has floor(L / shards) tokens."""
    seen = plan.lanes < bound(plan)[:, None]
    return seen & (places < plan.length // problem.shards)


def _mutant(name: str, formula: str, *needs: Need, edit: Callable[[Problem, Plan], Plan], refs: str = "") -> Mutant:
    return Mutant(
        name=f"shard.{name}",
        family="shard ownership",
        formula=formula,
        references=tuple(refs.split()),
        conditions=(paged, sharded, two_keys, *needs),
        edit=edit,
    )


MUTANTS = (
    _mutant(
        "other-layout", "how many of its tokens a rank sees, counted for the other layout", edit=seeing(_other_layout)
    ),
    _mutant("no-bound", "a rank sees all its tokens, whatever the query token", several, edit=seeing(_all_own)),
    _mutant("local-bound", "the causal bound of a rank from its own length", several, edit=seeing(_local_bound)),
    _mutant("rest-lost", "every rank has floor(L / shards) tokens", uneven, edit=seeing(_even_length)),
)
