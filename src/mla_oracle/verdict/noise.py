# SPDX-License-Identifier: Apache-2.0
"""The root mean square error that declared roundings make in every element of a paged result, from first principles.

Errors of different roundings are independent, so their squares add. With p the weights of a row, which sum to 1:

    a score      its sum of D products, its dtype, the argument of exp            -> its weight, relative
    a weight     its rounding to p: relative in the normal range, a step below    -> p v
    a sum of n   a walk of one rounding a step; truncation drifts as well         -> sqrt(sum p^2 v^2) or |out|
                 below the normal range of f16 every step rounds to a step of it  -> alone, over the sum of weights
    a softcap    its steps, relative to what they give, and tanh's own, of which  -> a score
                 a sigmoid's is a step of the cap however small the score; what
                 the score was off by before it is damped by its slope, 1 - tanh^2
    a bias       the sum's rounding, and the bias's own times log2(e)             -> a score
    a sink       an LSE of the keys that is off shifts the sink's share of all    -> share |out|
    the results  half a unit of their dtype

A rounding to nearest of a number whose mantissa may be anything has the RMS error RMS * unit roundoff.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from .emulate import EXP_ERROR, Problem
from .numerics import Numerics
from .options import TANH_ERROR, TANH_STEP
from .roundings import STEP

F32 = np.float32
UNIT = {
    "f64": 2.0**-53, "f32": 2.0**-24, "bf16x2": 2.0**-17, "tf32": 2.0**-11, "f16": 2.0**-11, "bf16": 2.0**-8,
    "e4m3": 2.0**-4,
}
# The distance of neighbours below the normal range; of formats whose small numbers processors flush, all of it.
SMALLEST = {
    "f64": 2.0**-1022, "f32": 2.0**-126, "bf16x2": 2.0**-126, "bf16": 2.0**-126, "tf32": 2.0**-126, "f16": 2.0**-24,
    "e4m3": 2.0**-9,
}
RMS = 0.4247  # sqrt((1 - 1/4) / (6 ln 2))
LONE = 1 / RMS  # the largest error over the RMS, where one rounding decides
TINY = 1e-18
BLOCK = 1 << 24  # scores at a time
UNIFORM = 1 / math.sqrt(12)  # the RMS of a rounding over the distance of neighbours


class Noise(NamedTuple):
    """Of N rows. 0 where nothing is measured: an empty row, a truth that is not finite."""

    out: Array  # [N, V] RMS error
    lse: Array  # [N]
    keys: Array  # [N] how many equal weights are as spread as the row's: 1 / sum p^2
    of_weights: Array  # [N] the part of out's mean square that the weights' own roundings make
    of_scores: Array  # [N] the part that errors of the scores make
    of_total: Array  # [N] the part that the error of the weights' sum makes, which every column has


class Weights(NamedTuple):
    """The softmax of R rows over n keys, in f32."""

    p: Array  # [R, n] of the keys alone, rows sum to 1
    total: Array  # [R] sum of the weights relative to the largest
    base: Array  # [R] the largest score
    score_error: Array  # [R, n] RMS, of its own
    drift: Array  # [R] mean error that all scores of a row share


class Sinks(NamedTuple):
    """The sinks of R rows, f64."""

    keys: Array | float  # [R] the keys' share of all weight; 1 without sinks
    total: Array  # [R] sum of all weights relative to the largest
    lse: Array  # [R] of the keys, natural
    own: Array | float  # [R] RMS error of the logarithm of a sink's weight


def noise(
    problem: Problem, numerics: Numerics, of_products: float, of_values: float, out: Array, lse: Array, unit: float
) -> Noise:
    """The noise of a problem with truth out [R, V] and lse [R] in units of `unit` (1, or log2(e) for base 2).

    `of_products`, `of_values`: the relative RMS error that the problem's arrays have from rounding, of a product of q
    and key, and of a value.
    """
    n, V = len(problem.keys), problem.values.shape[1]
    largest = max(float(np.abs(problem.values).max(initial=0)), 1e-30)
    values = np.square(problem.values / F32(largest))  # [n, V]
    values[values < TINY**2] = 0
    exp = EXP_ERROR["exp2" if numerics.exp == "any" else numerics.exp]
    sums = walk(numerics.value_accumulator, n) + drift(numerics.value_accumulator, n)
    partials = 0.0 if numerics.partials == "f32" else RMS * UNIT[numerics.partials]
    of_sums = math.hypot(sums, partials, of_values, 4 * UNIT["f32"])

    found = Noise(np.zeros_like(out), *(np.full(len(out), x) for x in (0.0, 1.0, 0.0, 0.0, 0.0)))
    count = problem.seen
    measured = np.flatnonzero(np.isfinite(lse) & (count > 0))
    size = max(1, BLOCK // max(n, 1))
    for i in range(0, len(measured), size):
        rows = measured[i : i + size]
        finite = np.isfinite(out[rows])
        w, of_row = np.where(finite, out[rows], 0.0) / problem.output_scale, problem.take(rows)
        weights = _weights(of_row, numerics, of_products)
        sinks = _sinks(of_row, weights, np.abs(lse[rows]) / unit, exp)
        squares = np.square(weights.p)
        squares[weights.p < TINY] = 0  # numbers below the normal range slow a BLAS down a hundredfold
        spread_over = squares.sum(axis=-1, dtype=np.float64)
        step = np.full(len(rows), SMALLEST[numerics.p] * UNIFORM / numerics.p_scale)  # of a weight that small
        if numerics.p_base == "max":
            step = step / sinks.total
        several = (count[rows] > 1) | (problem.sinks is not None)  # a lone weight is 1
        own = ((RMS * UNIT[numerics.p]) ** 2 + exp**2) * several

        both = np.concatenate([squares * np.square(weights.score_error), squares]) @ values
        of_scores, spread = both.reshape(2, -1, V).astype(np.float64) * largest**2
        if problem.sinks is not None:
            share = np.square(sinks.keys)[:, None]
            of_scores, spread = of_scores * share, spread * share
        all_values = values.sum(axis=0, dtype=np.float64) * largest**2
        of_own = own[:, None] * spread + np.square(step)[:, None] * all_values
        small = np.square(SMALLEST[numerics.cache] * UNIFORM) * spread_over if of_values else np.zeros(len(rows))
        if numerics.value_accumulator in ("f16", "mma-f16"):
            held = numerics.p_scale * (1.0 if numerics.p_base == "normalised" else sinks.total)
            steps = n / STEP[numerics.value_accumulator] + 1
            small += np.square(SMALLEST["f16"] * UNIFORM / held) * steps
        if numerics.partials != "f32":
            small += (SMALLEST[numerics.partials] * UNIFORM) ** 2
        of_lse = np.square((weights.p * weights.score_error).sum(axis=-1, dtype=np.float64) + weights.drift + exp)
        of_lse += np.square(UNIT["f32"] * (np.abs(weights.base) + sinks.lse + 1 + 0.5 * math.sqrt(n)))
        if numerics.row_sum != "f32":
            of_lse += np.square(RMS * UNIT[numerics.p]) * spread_over * several
            of_lse += np.square(step * n / 4) + sums**2
        of_total = np.square(walk("f32", n) * w)
        if problem.sinks is not None:
            shifted = np.square(1 - sinks.keys) * (of_lse + np.square(sinks.own))
            of_total += (shifted + np.square(2 * UNIT["f32"]))[:, None] * np.square(w)
            if problem.sinks_in_lse:
                of_lse = np.square(sinks.keys) * of_lse + np.square((1 - sinks.keys) * sinks.own)
                of_lse += np.square(UNIT["f32"] * (np.abs(lse[rows]) / unit + 1))
        squared = of_own + of_scores + of_total + of_sums**2 * (np.square(w) + spread) + small[:, None]
        tail = n * SMALLEST["f32"] * largest  # weights flushed to zero
        parts = [of_own, of_scores, of_total]
        if problem.output_scale != 1:
            w, tail = w * problem.output_scale, tail * problem.output_scale
            squared, *parts = (x * np.square(problem.output_scale) for x in (squared, *parts))
            squared += np.square(UNIT["f32"] * w)
        squared += np.square(spacing(w, numerics.out) * UNIFORM)
        found.out[rows] = np.where(finite, np.sqrt(squared) + tail, 0.0)
        found.lse[rows] = np.sqrt(of_lse * unit**2 + np.square(spacing(lse[rows], numerics.lse) * UNIFORM))
        found.keys[rows] = 1 / np.maximum(spread_over, 1e-30)
        for share, part in zip((found.of_weights, found.of_scores, found.of_total), parts, strict=True):
            share[rows] = part.sum(axis=-1) / squared.sum(axis=-1)
    return found


def _weights(problem: Problem, numerics: Numerics, inputs: float) -> Weights:
    """`inputs`: the RMS relative error of a product from rounding its factors."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = (problem.q @ problem.keys.T) * F32(problem.scale)
        s = capped = F32(problem.softcap) * np.tanh(scaled / F32(problem.softcap)) if problem.softcap else scaled
        if problem.bias is not None:
            s = np.where(problem.bias == -np.inf, F32(-np.inf), capped + problem.bias)
    s[np.isnan(s)] = -np.inf
    s[np.arange(s.shape[1]) >= problem.visible[:, None]] = -np.inf
    base = s.max(axis=-1)
    base = np.where(np.isfinite(base), base, F32(0))
    p = np.exp(s - base[:, None])
    total = np.maximum(p.sum(axis=-1), F32(1e-30))
    p /= total[:, None]
    s = np.where(p > 0, s, F32(0))
    scaled = s if scaled is s else np.where(p > 0, scaled, F32(0))
    D = problem.q.shape[1]
    of_sum = math.hypot(inputs, walk(numerics.score_accumulator, D))
    error = np.hypot(_root_sum_of_squares(problem.q, problem.keys) * F32(problem.scale), scaled) * F32(of_sum)
    twice = math.sqrt(2 if numerics.scaled == "scores" else 1) * RMS * UNIT[numerics.scores]  # around the scale
    error += F32(twice + 2 * UNIT["f32"]) * np.abs(scaled)
    moved, once = scaled, RMS * UNIT[numerics.scores] + UNIT["f32"]
    if problem.softcap:
        cap, capped = F32(problem.softcap), np.where(p > 0, capped, F32(0))
        slope = 1 - np.square(capped / cap)
        own = math.hypot(once, once, TANH_ERROR.get(numerics.tanh, UNIT["f32"]))
        step = TANH_STEP if numerics.tanh == "sigmoid" else SMALLEST["f32"]
        of_tanh = np.hypot(F32(own) * np.abs(capped), F32(step) * cap)
        damped = slope > 0  # a score that is not finite has none
        error = np.hypot(np.where(damped, np.hypot(error, F32(once) * np.abs(scaled)) * slope, F32(0)), of_tanh)
        moved = np.where(damped, scaled * slope, F32(0))
    if problem.bias is not None:
        bias = np.where(p > 0, problem.bias, F32(0))
        error = np.hypot(error, F32(once) * np.abs(s)) + F32(UNIT["f32"]) * (np.abs(s) + np.abs(bias))
    mean = (p * moved).sum(axis=-1)
    error += F32(UNIT["f32"]) * np.abs(base)[:, None]
    # Scores that are all too small by the same factor move a weight by how far its score is from the mean.
    drifted = F32(drift(numerics.score_accumulator, D))
    return Weights(p, total, base, error + drifted * np.abs(moved - mean[:, None]), drifted * np.abs(mean))


def _sinks(problem: Problem, weights: Weights, natural: Array, exp: float) -> Sinks:
    """`natural`: the size of the truth's LSE, `exp`: the relative error of an exponential."""
    if problem.sinks is None:
        return Sinks(1.0, weights.total, natural, 0.0)
    sink, base = problem.sinks.astype(np.float64), weights.base.astype(np.float64)
    lse = base + np.log(weights.total)
    top = np.maximum(base, np.where(np.isposinf(sink), base, sink))
    with np.errstate(over="ignore"):
        keys = 1 / (1 + np.exp(sink - lse))
        total = weights.total * np.exp(base - top) + np.where(np.isposinf(sink), 0.0, np.exp(sink - top))
    own = np.hypot(exp, UNIT["f32"] * (np.abs(np.where(np.isfinite(sink), sink, 0.0)) + np.abs(lse) + 1))
    return Sinks(keys, total, np.abs(lse), own)


def walk(how: str, n: int) -> float:
    """RMS error of a sum of n terms whose every step rounds to nearest what is summed so far.

    Relative to the sum, or to the root sum of its terms' squares if that is larger.
    """
    if how in ("f16", "mma-f16"):
        return UNIT["f16"] * RMS * math.sqrt(n / STEP[how] + 1)
    return UNIT["f32"] * RMS * math.sqrt(n)


def drift(how: str, n: int) -> float:
    """Mean error of a sum of n terms that is truncated: half a unit a step, toward zero."""
    return 0.5 * UNIT["f32"] * n / STEP[how] if how == "mma" else 0.0


def spacing(x: Array, name: str) -> Array:
    """The distance between neighbours of x, f64, in the format `name`."""
    finite = np.where(np.isfinite(x), x, 0.0)
    exponent = np.where(finite == 0, -2000, np.frexp(finite)[1] - 1)
    distance: Array = np.maximum(np.ldexp(2 * UNIT[name], exponent), SMALLEST[name])
    return distance


def coarser(name: str, than: str) -> float:
    """The RMS error of rounding numbers of the format `than` to `name`."""
    return RMS * UNIT[name] if UNIT[name] > UNIT[than] else 0.0


def _root_sum_of_squares(a: Array, b: Array) -> Array:
    """[R, n] sqrt(sum (a b)^2) of a [R, D] and b [n, D], f32, whatever their size."""
    squares, size = [], 1.0
    for x in (a, b):
        if not np.isfinite(x).all():
            x = np.where(np.isfinite(x), x, F32(0))
        largest = max(float(np.abs(x).max(initial=0)), 1e-30)
        squares.append(np.square(x * F32(1 / largest)))
        size *= largest
    found: Array = np.sqrt(squares[0] @ squares[1].T) * F32(size)
    return found
