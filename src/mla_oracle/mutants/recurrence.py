# SPDX-License-Identifier: Apache-2.0
"""Wrong online softmax: what the running maximum, sum and accumulator become from key tile to key tile.

Tiles are pages, or 64 keys. M_i is the maximum up to tile i; in the right recurrence every part ends with the factor
e^(m_i - M_last), so a wrong one is another factor for the accumulator (coef) or for the sum (z).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .joins import exact, inverse, last_of, powers
from .lse import FAMILY as LSE
from .mutant import Join, Mutant
from .needs import Need, two_heads, unsharded
from .plan import Joined, Parts, Plan
from .problem import Problem

two_tiles = Need("two key tiles: of a page, or of 64 keys", lambda p: int(p.lens.max(initial=0)) > tile(p))


def tile(problem: Problem) -> int:
    """Keys of a tile."""
    return min(problem.block, 64) if problem.paged and problem.block > 1 else 64


def tiles(problem: Problem) -> Callable[[Plan], Parts]:
    size = tile(problem)
    return lambda plan: Parts(np.arange(len(plan.lanes)) // size, max(-(-len(plan.lanes) // size), 1))


def running(m: Array) -> Array:
    """M_i, 0 where nothing has been seen."""
    top = np.maximum.accumulate(m, -1)
    return np.where(top == -np.inf, 0, top)


def factors(m: Array) -> tuple[Array, Array, Array]:
    """e^(m_i - M_last), e^(m_i - M_i), and M_last for the lse. m [T, H, tiles]."""
    top, right = powers(m)
    return right, np.exp(m - running(m)), top


def _sum_not_rescaled(m: Array, d: Array) -> Joined:
    right, own, top = factors(m)
    z = (own * d).sum(-1)
    return Joined(right * inverse(z)[..., None], top, z)


def acc_not_rescaled(m: Array, d: Array) -> Joined:
    right, own, top = factors(m)
    z = (right * d).sum(-1)
    return Joined(own * inverse(z)[..., None], top, z)


def _neither(m: Array, d: Array) -> Joined:
    _, own, top = factors(m)
    z = (own * d).sum(-1)
    return Joined(own * inverse(z)[..., None], top, z)


def _inverted(m: Array, d: Array) -> Joined:
    """The factor e^(M_new - M_old): every part grows where it should shrink."""
    _, own, top = factors(m)
    M = running(m)
    c = own * np.exp(M[..., -1:] - M)
    z = (c * d).sum(-1)
    return Joined(c * inverse(z)[..., None], top, z)


def _rescale(factor: Callable[[Array], Array], sum_too: bool) -> Join:
    """The factor of each step M_old -> M_new, the difference M_old - M_new <= 0 given, instead of its e^."""

    def join(m: Array, d: Array) -> Joined:
        right, own, top = factors(m)
        M = running(m)
        steps = factor(M[..., :-1] - M[..., 1:])  # [T, H, tiles - 1]
        after = np.cumprod(steps[..., ::-1], -1)[..., ::-1]  # of all steps after tile i
        c = own * np.concatenate([after, np.ones((*m.shape[:-1], 1))], -1)
        z = ((c if sum_too else right) * d).sum(-1)
        return Joined(c * inverse(z)[..., None], top, z)

    return join


def lazy(threshold: float) -> Mutant:
    """The accumulator is rescaled only where the maximum grows by more than the threshold, the sum always."""
    return _mutant(
        f"lazy-{threshold:g}",
        "lazy rescale",
        f"acc not rescaled where M grows by {threshold:g} or less",
        _rescale(lambda step: np.where(step >= -threshold, 1.0, np.exp(step)), False),
        refs="ROCm/FlyDSL#1033",
        threshold=threshold,
    )


def _stale_maximum(m: Array, d: Array) -> Joined:
    """Weights of tile i are e^(s - M_(i-1)): acc and sum are rescaled to M_i, the weights are not."""
    top, right = powers(m)
    M = running(m)
    before = np.concatenate([M[..., :1], M[..., :-1]], -1)
    c = right * np.exp(M - before)
    z = (c * d).sum(-1)
    return Joined(c * inverse(z)[..., None], top, z)


def _tile_maximum(m: Array, d: Array) -> Joined:
    """Each tile relative to its own maximum, summed as if that were one; the lse takes the last."""
    seen = (d > 0) * 1.0
    z = (seen * d).sum(-1)
    return Joined(seen * inverse(z)[..., None], last_of(m, d), z)


def _neighbour(m: Array, d: Array) -> Joined:
    """The accumulator of head h is rescaled by the factors of head h + 1."""
    right, own, top = factors(m)
    M = np.roll(running(m), -1, -2)
    z = (right * d).sum(-1)
    return Joined(own * np.exp(M - M[..., -1:]) * inverse(z)[..., None], top, z)


def _scaled_by(act: Callable[[Joined, Array, Array], Array]) -> Join:
    """The right join with its output times act(join, m, d) [T, H]."""

    def join(m: Array, d: Array) -> Joined:
        right = exact(m, d)
        return right._replace(coef=right.coef * act(right, m, d)[..., None])

    return join


def _last_sum(right: Joined, m: Array, d: Array) -> Array:
    """Z over the part of it that the last tile brought: divided by the sum of the last tile alone."""
    return right.z * inverse(last_of(powers(m)[1] * d, d))


def _stale_lse(m: Array, d: Array) -> Joined:
    """The right output, with the m and the l of the tiles before the last one."""
    last = (d > 0) & (np.cumsum((d > 0)[..., ::-1], -1)[..., ::-1] == 1)
    before = last & ((d > 0).sum(-1, keepdims=True) > 1)  # a row of one tile has no other
    known = exact(np.where(before, -np.inf, m), np.where(before, 0.0, d))
    return Joined(exact(m, d).coef, known.m, known.z)


def _divided_each_tile(m: Array, d: Array) -> Joined:
    right, _, top = factors(m)
    totals = np.cumsum(right * d, -1)
    M = running(m)
    top = np.where(top == -np.inf, 0, top)
    sums = totals * np.exp(top[..., None] - M)  # l after each tile, relative to its own maximum
    per = np.where(d == 0, 1.0, sums)  # a tile without keys is not run
    after = np.cumprod(per[..., ::-1], -1)[..., ::-1]
    return Joined(right * inverse(after), m.max(-1, initial=-np.inf), totals[..., -1])


def _mutant(
    name: str, family: str, formula: str, join: Join, *needs: Need, refs: str = "", **parameters: float
) -> Mutant:
    def edit(problem: Problem, plan: Plan) -> Plan:
        return replace(plan, parts=tiles(problem), join=join)

    return Mutant(
        name=f"online.{name}",
        family=family,
        formula=formula,
        references=tuple(refs.split()),
        parameters=parameters,
        conditions=(two_tiles, unsharded, *needs),
        edit=edit,
    )


def _exponent(name: str, formula: str, factor: Callable[[float], float]) -> Mutant:
    """Scores that are scaled when the weights are made: the factor of a step takes the scale not at all, or twice."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        join = _rescale(lambda step: np.exp(step * factor(problem.scale)), True)
        return replace(plan, parts=tiles(problem), join=join)

    return Mutant(
        name=f"online.{name}", family="wrong rescale", formula=formula, conditions=(two_tiles, unsharded), edit=edit
    )


MISSING, WRONG, NORM = "missing rescale", "wrong rescale", "wrong normalisation"
MUTANTS = (
    _mutant("sum-not-rescaled", MISSING, "l <- l + l_i e^(m_i - M_i), without e^(M_old - M_new)", _sum_not_rescaled),
    _mutant(
        "acc-not-rescaled",
        MISSING,
        "acc <- acc + acc_i e^(m_i - M_i), without e^(M_old - M_new)",
        acc_not_rescaled,
        refs="ROCm/FlyDSL#1033",
    ),
    _mutant("nothing-rescaled", MISSING, "neither l nor acc times e^(M_old - M_new)", _neither),
    _mutant("inverted", WRONG, "l and acc times e^(M_new - M_old)", _inverted),
    _mutant(
        "acc-inverted",
        WRONG,
        "acc times e^(M_new - M_old), l times e^(M_old - M_new): FlashAttention-2's algorithm 1 as printed",
        _rescale(lambda step: np.exp(-step), False),
        refs="Dao-AILab/flash-attention#991",
    ),
    _mutant(
        "base-2",
        WRONG,
        "l and acc times 2^(M_old - M_new), weights in base e",
        _rescale(lambda step: np.exp2(step), True),
    ),
    _mutant(
        "acc-base-2",
        WRONG,
        "acc times 2^(M_old - M_new), l times e^(M_old - M_new)",
        _rescale(lambda step: np.exp2(step), False),
    ),
    _mutant("acc-twice", WRONG, "acc times e^(2 (M_old - M_new))", _rescale(lambda step: np.exp(2 * step), False)),
    _exponent("unscaled-maximum", "l and acc times e^((M_old - M_new) / scale)", lambda scale: 1 / scale),
    _exponent("scaled-twice", "l and acc times e^(scale (M_old - M_new))", lambda scale: scale),
    _mutant("neighbour", WRONG, "acc of head h rescaled by the factor of head h + 1", _neighbour, two_heads),
    _mutant("stale-maximum", WRONG, "weights of a tile from the maximum before it", _stale_maximum),
    _mutant("tile-maximum", MISSING, "each tile by its own maximum, m of the last", _tile_maximum),
    lazy(8.0),
    _mutant("unnormalised", NORM, "o = acc, not divided by l", _scaled_by(lambda right, m, d: right.z)),
    _mutant("divided-twice", NORM, "o = acc / l^2", _scaled_by(lambda right, m, d: inverse(right.z))),
    _mutant(
        "divided-each-tile",
        NORM,
        "acc <- (acc e^(M_old - M_new) + acc_i e^(m_i - M_i)) / l, after every tile",
        _divided_each_tile,
        refs="1bit-MONSTER/1bit-MONSTER#495",
    ),
    _mutant("lse-stale", LSE, "lse of the tiles before the last one, out right", _stale_lse),
    _mutant("last-tile-sum", NORM, "o = acc / (the sum of the last tile)", _scaled_by(_last_sum)),
)
