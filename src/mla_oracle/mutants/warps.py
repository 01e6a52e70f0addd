# SPDX-License-Identifier: Apache-2.0
"""Work of one tile shared by warps, put together wrongly: sums, maxima, halves of the columns, orders of tokens.

Warps take `width` keys in turn, 8 in the bank: key j belongs to warp j / 8 mod 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .joins import inverse, powers
from .mutant import Join, Maker, Mutant
from .needs import Need, longer_than, two_keys, unsharded
from .permutations import transposed_tiles
from .plan import Joined, Parts, Plan, bound
from .problem import Problem, Results
from .recurrence import acc_not_rescaled, tiles, two_tiles
from .values import lanes

whole_tile = longer_than(63)
part_of_tile = Need(
    "more than 8 keys, and a length that is no multiple of 64",
    lambda p: bool(np.any((p.lens > 8) & (p.lens % 64 != 0))),
)
two_columns = Need("values of two elements", lambda p: p.V >= 2)


def shared(join: Join, width: int = 8, warps: int = 2) -> Callable[[Problem, Plan], Plan]:
    """The parts of the warps joined by `join`."""

    def parts(plan: Plan) -> Parts:
        return Parts(plan.lanes // width % warps, warps)

    return lambda problem, plan: replace(plan, parts=parts, join=join)


def _own_sum(m: Array, d: Array) -> Joined:
    """The sum of warp 0 alone."""
    top, c = powers(m)
    z = c[..., 0] * d[..., 0]
    return Joined(c * inverse(z)[..., None], top, z)


def _own_maximum(m: Array, d: Array) -> Joined:
    """Each warp relative to its own maximum, added as if that were one; the lse takes that of warp 0."""
    z = d.sum(-1)
    return Joined((d > 0) * inverse(z)[..., None], m[..., 0], z)


def not_joined(what: str, width: int = 8, warps: int = 2) -> Mutant:
    """`what` of "sum" and "maximum" is left as each warp has it."""
    usual = (width, warps) == (8, 2)
    family, words, join = _NOT_JOINED[what]
    return _mutant(
        f"{what}-not-joined" + ("" if usual else f"-{width}x{warps}"),
        family,
        words if usual else f"{words}, {warps} warps of {width} keys in turn",
        longer_than(width),
        edit=shared(join, width, warps),
        width=width,
        warps=warps,
    )


_NOT_JOINED = {
    "sum": ("wrong normalisation", "l of the keys of warp 0 alone", _own_sum),
    "maximum": ("missing rescale", "each warp by its own maximum, l and acc added", _own_maximum),
}


def _half_rescaled(problem: Problem, results: Results) -> Results:
    """The second half of the columns has an accumulator that is not rescaled."""
    wrong = problem.evaluate(
        replace(problem.plan(b), parts=tiles(problem), join=acc_not_rescaled) for b in range(problem.B)
    )
    out = results["out"].copy()
    half = out.shape[-1] // 2
    out[..., half:] = wrong["out"][..., half:]
    return {**results, "out": out}


def _mask_permuted(problem: Problem, plan: Plan) -> Plan:
    """Lane i of a tile holds token transposed(i), and is masked by i."""
    order = transposed_tiles(-(-plan.length // 64) * 64)

    def sees(own: Plan) -> Array:
        seen: Array = np.arange(len(own.lanes)) < bound(own)[:, None, None]
        return seen

    return replace(plan, lanes=order[: plan.length], sees=sees)


def _pairs(problem: Problem, plan: Plan) -> Array:
    return np.where((plan.lanes ^ 1) < plan.length, plan.lanes ^ 1, plan.lanes)


_mutant = Maker("warp.", (unsharded,))


MUTANTS = (
    not_joined("sum"),
    not_joined("maximum"),
    _mutant(
        "half-not-rescaled",
        "missing rescale",
        "acc of the second half of the columns without e^(M_old - M_new)",
        two_tiles,
        two_columns,
        Need("a paged case", lambda p: p.paged),
        finish=_half_rescaled,
    ),
    _mutant(
        "tokens-transposed",
        "value rows permuted",
        "w_j v_i, i the place of j in a tile of 64 transposed as 8 x 8",
        whole_tile,
        edit=lanes(lambda _, p: transposed_tiles(p.length)[p.lanes]),
    ),
    _mutant(
        "tokens-swapped",
        "value rows permuted",
        "w_j v_(j xor 1)",
        two_keys,
        edit=lanes(_pairs),
    ),
    _mutant(
        "mask-transposed",
        "key lost or repeated",
        "lane i holds token i of a tile transposed as 8 x 8, and is masked as token i",
        part_of_tile,
        edit=_mask_permuted,
    ),
)
