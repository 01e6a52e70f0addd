# SPDX-License-Identifier: Apache-2.0
"""One honest kernel: attention with the roundings a Numerics declares, its free choices drawn at random.

`Problem` is the attention of some query rows over one list of keys, `Choices` is what one kernel chose, and `attend`
computes, as a kernel would: splits, in each an online softmax over tiles of keys, then their merge by LSE.
Rows are vectorised, tiles are a loop. What is f32 in a kernel is f32 here; BLAS adds in an order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..paged import LOG2E
from .numerics import Numerics
from .options import SINKS, placed, scored, settled, with_sinks
from .roundings import STEP, accumulate, narrow

F32 = np.float32
EXP_ERROR = {"exp": 2.0**-23, "exp2": 2.0**-22, "u20": 20 * 2.0**-23}
SMALLEST_NORMAL = F32(2.0**-126)
STALE = 5.5  # how far scores may exceed a maximum that is renewed lazily, natural
TILES = (16, 32, 64, 96, 128, 256, 1024)


class Problem(NamedTuple):
    """Query rows over their keys, as a kernel multiplies them."""

    q: Array  # [R, D] f32
    keys: Array  # [n, D] f32
    values: Array  # [n, V] f32, finite
    visible: Array  # [R] keys a row sees, the first ones
    scale: float
    shards: list[Array] | None = None  # keys of each rank, where that is given
    softcap: float = 0.0  # 0: none
    bias: Array | None = None  # [R, n] f32, -inf where a row does not see the key
    sinks: Array | None = None  # [R] f32
    sinks_in_lse: bool = False
    output_scale: float = 1.0

    def take(self, rows: Array) -> Problem:
        bias, sinks = (None if x is None else x[rows] for x in (self.bias, self.sinks))
        return self._replace(q=self.q[rows], visible=self.visible[rows], bias=bias, sinks=sinks)

    @property
    def seen(self) -> Array:
        """[R] how many keys a row sees."""
        return self.visible if self.bias is None else (self.bias > -np.inf).sum(axis=-1)


@dataclass(frozen=True)
class Choices:
    """The free choices of one kernel."""

    tile: int
    splits: int
    reverse: bool
    base: str  # max, stale or normalised
    sum_rounded: bool
    exp: str
    step: int | None  # keys between two roundings of the accumulators; None: a tile
    sink: str  # before, within or after
    naive: bool  # of the dense forms, which both compute the same function: the naive one


def choose(
    numerics: Numerics, longest: int, rng: np.random.Generator, *, turn: int | None = None, fine: bool = False
) -> Choices:
    """Choices that `numerics` leaves free, for rows of at most `longest` keys.

    `turn` goes round the discrete ones, so that a few kernels show all of them. `fine`: the most roundings.
    """
    turn = int(rng.integers(6)) if turn is None else turn
    base = numerics.p_base if numerics.p_base != "any" else ("max", "stale", "normalised")[turn % 3]
    rounded = turn % 2 == (base == "stale")
    tile = numerics.tile
    if tile is None:
        tile = int(rng.choice(TILES))
        if base == "stale":
            tile = min(tile, -(-longest // 4))
        if not fine:
            tile = max(tile, -(-longest // 8))
    if base == "normalised":
        tile = longest
    splits = numerics.splits
    if splits is None:
        splits = 1 if base == "normalised" or rng.random() < 0.4 else int(rng.integers(2, 9))
    step = max(STEP[numerics.value_accumulator], longest // 2048 if numerics.value_accumulator == "f32" else 1)
    half = numerics.value_accumulator in ("f16", "mma-f16")
    return Choices(
        tile=max(1, tile),
        splits=splits,
        reverse=bool(rng.integers(2)) and numerics.tile is None,
        base=base,
        sum_rounded=rounded if numerics.row_sum == "any" else numerics.row_sum == "p",
        exp=("exp", "exp2")[rng.integers(2)] if numerics.exp == "any" else numerics.exp,
        step=step if fine or half else None,
        sink=SINKS[(turn // 3 + splits) % 3],
        naive=turn // 2 % 2 == 0,
    )


def attend(problem: Problem, numerics: Numerics, choices: Choices, rng: np.random.Generator) -> tuple[Array, Array]:
    """(out [R, V], lse [R]) f64, lse natural and not yet of its dtype; a row that sees nothing has out 0, lse -inf."""
    scores = score(problem, numerics, rng, fine=choices.step is not None)
    splits = list(_split(problem, choices))
    sink = placed(problem, choices.sink, len(splits))
    states = []
    for i, keys in enumerate(splits):
        own = problem.sinks if i == 0 and sink in ("before", "within") else None
        values = problem.values[keys]
        states.append(_run(scores[:, keys], values, numerics, choices, rng, own, sink, problem.sinks_in_lse))
    out, lse = states[0] if len(states) == 1 else _merge(states, numerics)
    if sink == "after":
        out, lse = with_sinks(problem, out, lse, _errors_of_exp(choices.exp, rng))
    if sink is not None or problem.bias is not None:
        out, lse = settled(problem, out, lse)
    if problem.output_scale != 1:
        out = out * F32(problem.output_scale)
    return out.astype(np.float64), lse.astype(np.float64)


def _merge(states: list[tuple[Array, Array]], numerics: Numerics) -> tuple[Array, Array]:
    """(out [R, V], lse [R]) f32 of states over disjoint keys."""
    outs = np.stack([narrow(out, numerics.partials) for out, _ in states])  # [S, R, V]
    lses = np.stack([lse for _, lse in states])
    top = lses.max(0)
    with np.errstate(invalid="ignore"):
        weights = np.where(lses == -np.inf, F32(0), np.exp(lses - np.where(top == -np.inf, F32(0), top)))
    total = weights.sum(0)
    safe = np.where(total == 0, F32(1), total)
    out = (weights[..., None] * outs).sum(0) / safe[:, None]
    with np.errstate(divide="ignore"):
        lse = top + np.log(safe)
    return out, np.where(total == 0, F32(-np.inf), lse)


def score(problem: Problem, numerics: Numerics, rng: np.random.Generator, *, fine: bool) -> Array:
    """Scores [R, n] f32 as they are weighed, -inf where a row does not see the key."""
    q, keys = problem.q, problem.keys
    with np.errstate(invalid="ignore", over="ignore"):
        if fine or numerics.score_accumulator in ("f16", "mma-f16"):
            step = max(STEP[numerics.score_accumulator], 8)
            raw = accumulate(None, q, keys.T, step, numerics.score_accumulator)
        else:
            raw = q @ keys.T
        scores = narrow(narrow(raw, numerics.scores) * F32(problem.scale), numerics.scores)
    scores = scored(problem, scores, lambda x: narrow(x, numerics.scores), numerics.tanh, rng)
    unseen = np.arange(len(problem.keys)) >= problem.visible[:, None]
    if unseen.any():
        scores[unseen] = -np.inf
    return scores


def _split(problem: Problem, choices: Choices) -> Iterator[Any]:
    """The keys of each split, as an index of the key axis, in the order a kernel takes them."""
    if problem.shards is not None:
        yield from problem.shards
        return
    n = len(problem.keys)
    size = max(1, -(-n // choices.splits))
    for low in range(0, max(n, 1), size):
        high = min(low + size, n)
        yield slice(low, high) if not choices.reverse else slice(high - 1, None if low == 0 else low - 1, -1)


def _errors_of_exp(name: str, rng: np.random.Generator) -> Callable[[Array], Array]:
    """The relative errors of one kernel's exponentials: of either sign, or all of one; exp(0) is 1."""
    most, sign = F32(EXP_ERROR[name]), F32(rng.integers(3) - 1)
    if sign:
        return lambda x: most * sign * (x < 1)
    return lambda x: most * (2 * rng.random(x.shape, F32) - 1) * (x < 1)


def _run(
    scores: Array,
    values: Array,
    numerics: Numerics,
    choices: Choices,
    rng: np.random.Generator,
    sinks: Array | None,
    sink: str | None,
    sinks_in_lse: bool,
) -> tuple[Array, Array]:
    """One split: scores [R, n] f32, values [n, V] f32, the sinks [R] it adds -> (out [R, V], lse [R]) f32."""
    R, n = scores.shape
    normalised = choices.base == "normalised"
    top = np.full(R, -np.inf, F32)
    if sinks is not None:
        sinks = np.where(np.isposinf(sinks), F32(-np.inf), sinks)
        if sink == "before" or normalised:
            top = sinks
    total = np.zeros(R, F32)
    acc = np.zeros((R, values.shape[1]), F32)
    weigh = F32(numerics.p_scale)
    stale = min(STALE, math.log(dtypes.LARGEST.get(numerics.p, math.inf) / numerics.p_scale))
    hold = rng.random(R, F32) * F32(max(0.0, stale) if choices.base == "stale" else 0.0)
    unit = F32(LOG2E)
    wrong = _errors_of_exp(choices.exp, rng)
    for j in range(0, n, choices.tile):
        s = scores[:, j : j + choices.tile]
        new = s.max(1)
        new = np.where(new > top + hold, new, top)
        base = np.where(new == -np.inf, F32(0), new)
        if choices.exp == "exp2":  # one rounding of s * log2(e) - base * log2(e), the second product rounded before
            x = (s.astype(np.float64) * unit - (base * unit)[:, None]).astype(F32)
            p, decay = np.exp2(x), np.exp2((top - base) * unit)
        else:
            p, decay = np.exp(s - base[:, None]), np.exp(top - base)
        p *= 1 + wrong(p)
        decay = decay * (1 + wrong(decay))
        p[p < SMALLEST_NORMAL] = 0  # as processors that flush them; and others are slow
        if normalised:
            total = p.sum(1)
            whole = total if sinks is None else total + np.exp(sinks - base)
            p *= (weigh / np.where(whole == 0, F32(1), whole))[:, None]
        else:
            p *= weigh
        rounded = narrow(p, numerics.p)
        if not normalised:
            total = total * decay + (rounded if choices.sum_rounded else p).sum(1)
        acc = accumulate(acc * decay[:, None] if j else acc, rounded, values[j : j + choices.tile], choices.step,
                         numerics.value_accumulator)
        top = new
    lse = _lse(top, total, F32(1) if normalised else weigh)
    whole = total
    if sinks is not None:  # one more weight, of the largest of all
        new = np.maximum(top, sinks)
        base = np.where(new == -np.inf, F32(0), new)
        decay = np.exp(top - base)
        whole = total * decay + np.exp(sinks - base) * (F32(1) if normalised else weigh)
        acc = acc if normalised else acc * decay[:, None]
        if sinks_in_lse:
            lse = _lse(new, whole, F32(1) if normalised else weigh)
    out = acc / weigh if normalised else acc / np.where(whole == 0, F32(1), whole)[:, None]
    return out, lse


def _lse(top: Array, total: Array, weigh: np.float32) -> Array:
    """Of a sum of weights relative to `top`, the largest of which is `weigh`."""
    safe = np.where(total == 0, F32(1), total)
    with np.errstate(invalid="ignore"):
        lse = top + np.log(safe / weigh)
    return np.where(total == 0, F32(-np.inf), lse)
