# SPDX-License-Identifier: Apache-2.0
"""Wrong combines of partial sums: what each part's accumulator and sum are multiplied by before they are added.

A combine kernel adds acc_i e^(m_i - M) and l_i e^(m_i - M) and divides; here one of the two factors is another, or both
are. The lse is M + log of the sum that was made, as such a kernel stores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..arrays import Array
from .joins import inverse, powers
from .mutant import Join, Mutant
from .needs import paged, two_keys
from .plan import Joined, Plan
from .problem import Problem
from .splits import BASE, SPLITS, split

Factor = Callable[[Array], Array]  # of e^(m_i - M)


def unscaled(c: Array) -> Array:
    return np.ones_like(c)


def base_2(c: Array) -> Array:
    powered: Array = c ** math.log(2)
    return powered


def same(c: Array) -> Array:
    return c


def rescaled(acc: Factor, total: Factor) -> Join:
    def join(m: Array, d: Array) -> Joined:
        top, c = powers(m)
        z = (total(c) * d).sum(-1)
        return Joined(np.where(d == 0, 0, acc(c)) * inverse(z)[..., None], top, z)

    return join


def _maximum_base_2(m: Array, d: Array) -> Joined:
    """The maxima are in base 2, and taken for natural ones."""
    whole = rescaled(_raised, _raised)(m, d)
    return whole._replace(m=whole.m / math.log(2))


def _raised(c: Array) -> Array:
    raised: Array = c ** (1 / math.log(2))
    return raised


def _mutant(name: str, family: str, formula: str, join: Join, *, states: bool = True) -> Mutant:
    """`states`: it means something for states whose parts are unknown, too."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        return split(problem, plan, SPLITS, join)

    return Mutant(
        name=f"merge.{name}",
        family=family,
        formula=formula,
        parameters={"splits": SPLITS},
        conditions=(paged, two_keys),
        edit=edit,
        join=join if states else None,
    )


MISSING, WRONG = "missing rescale", "wrong rescale"
MUTANTS = (
    _mutant("acc-not-rescaled", MISSING, "o = sum acc_i / sum l_i e^(m_i - M)", rescaled(unscaled, same)),
    _mutant("sum-not-rescaled", MISSING, "o = sum acc_i e^(m_i - M) / sum l_i", rescaled(same, unscaled)),
    _mutant("nothing-rescaled", MISSING, "o = sum acc_i / sum l_i, M in the lse", rescaled(unscaled, unscaled)),
    _mutant("rescaled-base-2", BASE, "acc_i and l_i times 2^(m_i - M), m_i natural", rescaled(base_2, base_2)),
    _mutant("acc-base-2", WRONG, "acc_i times 2^(m_i - M), l_i times e^(m_i - M)", rescaled(base_2, same)),
    _mutant("sum-base-2", WRONG, "l_i times 2^(m_i - M), acc_i times e^(m_i - M)", rescaled(same, base_2)),
    _mutant("maximum-base-2", BASE, "m_i in base 2, taken for natural", _maximum_base_2, states=False),
)
