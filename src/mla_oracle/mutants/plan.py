# SPDX-License-Identifier: Apache-2.0
"""One request's attention as data: what a kernel reads, in which order, how it weighs and joins it.

A right kernel is `Problem.plan(b)`; a mutant changes a few fields. `evaluate` computes any plan:

    addresses -> scores = q . key -> score -> mask -> parts: maximum and sum of each -> join -> values -> out, lse

Fields that are functions take the plan they are in, so that two changes compose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import Array

MISSING = -(1 << 40)  # a page, slot or byte that is outside every cache


class Joined(NamedTuple):
    """How the parts of a row become its result: out = sum coef_i acc_i, lse = m + log z, or `lse` as it is stored."""

    coef: Array  # [T, H, parts]
    m: Array  # [T, H]
    z: Array  # [T, H]
    lse: Array | None = None  # [T, H] in the unit it is returned in


class Parts(NamedTuple):
    """Which part each lane belongs to."""

    of_lane: Array  # [n]
    total: int


class Part(NamedTuple):
    """A state that no lane of the plan has: out [T, H, V] and natural lse [T, H]."""

    out: Array
    lse: Array


class Keys(NamedTuple):
    """A list of keys, for one query token: lanes are places in it."""

    address: Array  # [M] bytes
    place: Array  # [M] token of the request; by slot the slot
    source: Array  # [M] 0: the main cache, 1: the extra one
    bias: Array  # [H, M], -inf where a head does not see the key


@dataclass(frozen=True, eq=False)
class Plan:
    """The attention of the query tokens `t` of request `b`. n lanes, each one key a kernel looks at."""

    b: int
    t: Array  # [T] which query tokens
    tokens: int  # query tokens of the case
    q_latent: Array  # [T, H, D - R]
    q_rope: Array | None  # [T, H, R]; None: left out of the score
    length: int  # keys the kernel believes in
    lanes: Array  # [n] token of each lane
    table: Array  # [W] block ids
    block: int  # rows of a page
    page_stride: int  # bytes
    row_stride: int  # bytes
    causal: bool
    scale: float | Array  # factor of the scores, [] or broadcast to [T, H, n]
    unit: float  # of the returned lse: 1, or log2(e)
    empty_lse: float
    empty_out: float
    head_dim_v: int
    address: Callable[[Plan, Array], Array]  # tokens [n] -> byte addresses [n]
    sees: Callable[[Plan], Array]  # -> bool [T, H or 1, n]
    score: Callable[[Plan, Array], Array]  # q . key [T, H, n] -> scores
    mask: Callable[[Array, Array], Array]  # scores, what is seen -> scores
    join: Callable[[Array, Array], Joined]  # maximum and sum of each part [T, H, parts]
    log_sum: Callable[[Plan, Array, Array], Array]  # m, z [T, H] -> lse in its unit
    parts: Callable[[Plan], Parts] | None = None  # None: one part
    keeps_parts: bool = False  # the state of each part is a result, too
    extras: tuple[Part, ...] = ()  # parts after those
    turn_keys: Callable[[Array, Array], Array] | None = None  # rope elements [n, R], tokens [n] -> [n, R]
    value_lanes: Array | None = None  # [n] token whose value a lane takes; None: its own
    value_address: Callable[[Plan, Array], Array] | None = None  # None: as `address`
    value_columns: Array | None = None  # [V] elements of the row; None: the first V
    touches_masked: bool = False  # 0 * value is computed for masked lanes too
    up: Array | None = None  # [H, V, L]: what projects the latent output up, None: nothing
    keys: Keys | None = None  # of a case whose queries have lists of keys
    softcap: float = 0.0  # 0: none
    sinks: Array | None = None  # [H]
    sinks_in_lse: bool = False
    add_sinks: Callable[[Plan, Array, Array, Array], tuple[Array, Array]] | None = None  # out, m, z -> out, z
    out_factor: float = 1.0


def page_address(plan: Plan, tokens: Array) -> Array:
    """Token j is row j % block of page table[j // block]."""
    first = table_entry(plan, tokens // plan.block, lambda page: page * plan.page_stride)
    address: Array = first + tokens % plan.block * plan.row_stride
    return address


def table_entry(plan: Plan, index: Array, base: Callable[[Array], Array]) -> Array:
    """base(table[index]), and MISSING where the table has no such entry."""
    width = len(plan.table)
    inside = (index >= 0) & (index < width)
    page = plan.table[np.clip(index, 0, max(width - 1, 0))] if width else np.zeros(index.shape, np.int64)
    return np.where(inside, base(page), MISSING)


def bound(plan: Plan) -> Array:
    """How many keys each query token sees [T]."""
    if not plan.causal:
        return np.full(len(plan.t), plan.length)
    seen: Array = np.maximum(plan.length - plan.tokens + plan.t + 1, 0)
    return seen


def sees(plan: Plan) -> Array:
    seen: Array = plan.lanes < bound(plan)[:, None, None]
    return seen


def scaled(plan: Plan, scores: Array) -> Array:
    return scores * plan.scale


def skip(scores: Array, seen: Array) -> Array:
    """A masked lane has no weight and its value is not touched."""
    return scores if seen.all() else np.where(seen, scores, -np.inf)


def log_sum(plan: Plan, m: Array, z: Array) -> Array:
    return (m + np.log(z)) * plan.unit
