# SPDX-License-Identifier: Apache-2.0
"""Joins of partial states that are wrong: with which weight each partial output enters.

A join takes the maximum and the sum of each part (for a state m = lse, d = 1); `weighted` gives out = sum w_i out_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..arrays import Array
from .joins import exact, inverse, log_parts, powers, weighted
from .mutant import Join
from .plan import Joined


def softmax(x: Array) -> Array:
    """e^x / sum e^x over the last axis, 0 where x is -inf."""
    e = powers(x)[1]
    return e * inverse(e.sum(-1))[..., None]


def log_sum_exp(x: Array) -> Array:
    top, e = powers(x)
    return np.where(top == -np.inf, top, top + np.log(e.sum(-1)))


def by(
    weights: Callable[[Array, Array, Array], Array], lse: Callable[[Array, Array, Array], Array] | None = None
) -> Join:
    """out = sum w_i out_i with w = weights(lse_i, m_i, l_i); the lse right, or lse(...) as it is stored."""

    def join(m: Array, d: Array) -> Joined:
        logs = log_parts(m, d)
        return weighted(weights(logs, m, d), d, exact(m, d), None if lse is None else lse(logs, m, d))

    return join


def natural(weights: Callable[[Array, Array, Array], Array], lse: Callable[[Array, Array, Array], Array]) -> Join:
    """As `by`, with a natural lse(...) [T, H], stored in the case's unit."""

    def join(m: Array, d: Array) -> Joined:
        logs = log_parts(m, d)
        own, seen = lse(logs, m, d), exact(m, d)
        return Joined(weighted(weights(logs, m, d), d, seen).coef, own, np.where(seen.z == 0, 0.0, 1.0))

    return join


def right(logs: Array, m: Array, d: Array) -> Array:
    return softmax(logs)


def equal(logs: Array, m: Array, d: Array) -> Array:
    return (d > 0) * inverse((d > 0).sum(-1))[..., None]


def base_2_as_e(logs: Array, m: Array, d: Array) -> Array:
    return softmax(logs / math.log(2))


def e_as_base_2(logs: Array, m: Array, d: Array) -> Array:
    return softmax(logs * math.log(2))


def keep(which: Callable[[Array], Array]) -> Join:
    """Only the parts i where which(d) holds, d [T, H, parts]."""

    def join(m: Array, d: Array) -> Joined:
        kept = which(d)
        return exact(np.where(kept, m, -np.inf), np.where(kept, d, 0.0))

    return join


def nth(d: Array, n: int) -> Array:
    return np.broadcast_to(np.arange(d.shape[-1]) == n % d.shape[-1], d.shape)


def last_twice(m: Array, d: Array) -> Joined:
    """The last state that is not empty enters twice."""
    last = d.shape[-1] - 1 - np.argmax((d > 0)[..., ::-1], -1)
    twice = 1.0 + (np.arange(d.shape[-1]) == last[..., None])
    top, c = powers(m)
    z = (c * d * twice).sum(-1)
    return Joined(c * twice * inverse(z)[..., None], top, z)


def empty_as_zero(m: Array, d: Array) -> Joined:
    """An empty part has out 0 and lse 0: it takes weight e^0. Nothing changes where every part is empty."""
    none = (d > 0).sum(-1, keepdims=True) == 0
    phantom = (d == 0) & ~none
    top, c = powers(np.where(phantom, 0.0, m))
    z = (c * np.where(phantom, 1.0, d)).sum(-1)
    return Joined(np.where(phantom, 0, c) * inverse(z)[..., None], top, z)


def empty_as_nan(m: Array, d: Array) -> Joined:
    """An empty part holds NaN, which its weight 0 does not remove."""
    right = exact(m, d)
    nan = (d == 0).any(-1) & (d > 0).any(-1)
    return right._replace(coef=np.where(nan[..., None], np.nan, right.coef))


def empty_as_infinite(m: Array, d: Array) -> Joined:
    """An empty part's lse of +inf is the maximum: inf - inf is its weight."""
    right = exact(m, d)
    nan = np.where((d == 0).any(-1), np.nan, 1.0)
    return Joined(right.coef * nan[..., None], right.m, right.z * nan)


def one_in_base_2(logs: Array, m: Array, d: Array) -> Array:
    """The lse of part 0 alone is in base 2."""
    return softmax(np.where(nth(d, 0), logs / math.log(2), logs))


def rounded(dtype: str) -> Callable[[Array, Array, Array], Array]:
    def weights(logs: Array, m: Array, d: Array) -> Array:
        import ml_dtypes

        kind = ml_dtypes.bfloat16 if dtype == "bf16" else np.float16
        return softmax(logs.astype(kind).astype(np.float64))

    return weights


def overflowing(logs: Array, m: Array, d: Array) -> Array:
    """e^lse in f32, the maximum not taken out."""
    e = np.exp(logs).astype(np.float32).astype(np.float64)
    weights: Array = e / e.sum(-1, keepdims=True)
    return weights


def of_neighbour(by: int) -> Callable[[Array, Array, Array], Array]:
    """The lse of the part `by` further on of those that have keys, around the end."""

    def weights(logs: Array, m: Array, d: Array) -> Array:
        full = d > 0
        order = np.argsort(~full, -1, kind="stable")  # the parts that have keys first
        place = (np.cumsum(full, -1) - 1 + by) % np.maximum(full.sum(-1, keepdims=True), 1)
        other = np.take_along_axis(logs, np.take_along_axis(order, place, -1), -1)
        return softmax(np.where(full, other, -np.inf))

    return weights


def of_head_0(logs: Array, m: Array, d: Array) -> Array:
    return np.broadcast_to(softmax(logs)[..., :1, :], logs.shape)


MUTANTS = ()
