# SPDX-License-Identifier: Apache-2.0
"""Budget: what an honest kernel with given numerics may miss the f64 truth by, on one case, row by row.

    1. A scale for every element: the RMS error that the declared roundings make there (noise.py). It gives the budget
       its shape, and a floor that no lucky emulation lowers.
    2. The errors of emulated honest kernels on this case (emulate.py), in units of that scale.
    3. The budget of a row: the upper end of 2 over the rows whose weight is spread over as many keys, times MARGIN.

Of a row of out two numbers are held to it, both in units of the scale: the root mean square over the columns, and the
largest. Of an LSE, its error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..cases import Case, PagedCase
from ..cases.placement import dense_table
from ..checks import widen
from ..errors import UnsupportedError
from ..shards import shard
from .emulate import choose
from .noise import LONE, Noise
from .numerics import Numerics
from .parts import parts_of

# Emulated rows are a sample, and a kernel may add in an order that was not drawn.
MARGIN = 1.25
# The upper end of a distribution that few draws show: its mean and this many standard deviations.
DEVIATIONS = 5.0
# The upper end of a number that is a sum of many errors, in units of its RMS.
MANY = 4.0
# The least upper end of |error| / RMS: of a root mean square over many columns, of the largest of them, of one number.
LEAST = {"rms": 1.0, "max": 3.0, "lse": MANY}
WORK = 3e8  # multiply-adds of one emulated kernel; above, rows are sampled
FINE_WORK = 2e7  # of one whose accumulators are rounded after every step
DRAWS = 8


@dataclass(frozen=True)
class Budget:
    """What the rows of one case may miss. Rows are those of out without its last axis."""

    numerics: Numerics
    out_scale: Array  # [*rows, V]; 0 where nothing is measured: an empty row, a truth that is not finite
    out_rms: Array  # [*rows] allowed root mean square of error / out_scale
    out_max: Array  # [*rows] allowed largest error / out_scale
    lse_scale: Array  # [*rows]
    lse_max: Array  # [*rows] allowed error / lse_scale
    reason: str

    def units(self, actual: Mapping[str, Array], truth: Mapping[str, Array]) -> dict[str, Array]:
        """The error of every row [*rows] of out and of lse, where given, in units of its budget: above 1 is too much.

        A row that is not measured has 0 where the actual is the truth, else infinity.
        """
        found = {}
        if "out" in actual:
            z = _ratio(actual["out"], truth["out"], self.out_scale)
            found["out"] = np.maximum(_rms(z) / self.out_rms, z.max(axis=-1, initial=0) / self.out_max)
        if "lse" in actual:
            found["lse"] = _ratio(actual["lse"], truth["lse"], self.lse_scale) / self.lse_max
        return found

    def allowed(self, truth: Mapping[str, Array]) -> dict[str, Array]:
        """[*rows] what the budget allows, of what `truth` holds: of out relative to the row's RMS, of lse absolute."""
        found = {}
        if "out" in truth:
            size = _rms(np.where(np.isfinite(truth["out"]), truth["out"], 0.0))
            allowed = _rms(self.out_scale) * self.out_rms
            found["out"] = np.divide(allowed, size, out=np.zeros_like(allowed), where=size > 0)
        if "lse" in truth:
            found["lse"] = self.lse_scale * self.lse_max
        return found

    def worst_column(self, out: Array, truth: Array, row: tuple[int, ...]) -> tuple[int, float | None]:
        """The column of a row of out whose error is largest in units of the scale.

        And what it alone may miss by, where it and not the root mean square of the row is what decides.
        """
        z = _ratio(out[row], truth[row], self.out_scale[row])
        column = int(z.argmax())
        alone = z[column] / self.out_max[row] > _rms(z) / self.out_rms[row]
        return column, float(self.out_scale[row][column] * self.out_max[row]) if alone else None


def budgets(
    case: Case, numerics: Numerics, kinds: Mapping[str, str], truth: Mapping[str, Array], **how: Any
) -> dict[str, Budget]:
    """The budget of each result in `kinds` (name -> dtype): out and lse, and the partial ones of a sharded case."""
    found: dict[str, Budget] = {}
    if "out" in kinds or "lse" in kinds:
        found |= dict.fromkeys(case.results, budget(case, numerics, truth, **how))
    if isinstance(case, PagedCase) and ("partial_out" in kinds or "partial_lse" in kinds):
        own = dataclasses.replace(
            numerics, out=kinds.get("partial_out", numerics.out), lse=kinds.get("partial_lse", numerics.lse)
        )
        ranks = []
        for s, rank in enumerate(shard(case, dense_table(case))):
            alone = PagedCase(
                **rank._asdict(),
                softmax_scale=case.softmax_scale,
                head_dim_v=case.head_dim_v,
                causal=False,
                lse_base=case.lse_base,
                empty_lse=case.empty_lse,
            )
            rows = alone.q.shape[:-1]
            partial = {"out": truth["partial_out"][s].reshape(*rows, -1), "lse": truth["partial_lse"][s].reshape(rows)}
            ranks.append(budget(alone, own, partial, **how))
        names = ("out_scale", "out_rms", "out_max", "lse_scale", "lse_max")
        shape = truth["partial_lse"].shape
        joined = [np.stack([getattr(rank, name) for rank in ranks]) for name in names]
        joined = [x.reshape(*shape, *x.shape[3:]) if x.ndim == 4 else x.reshape(shape) for x in joined]
        whole = Budget(numerics=own, **dict(zip(names, joined, strict=True)), reason=ranks[0].reason)
        found |= dict.fromkeys(("partial_out", "partial_lse"), whole)
    return found


def budget(
    case: Case, numerics: Numerics, truth: Mapping[str, Array], *, draws: int = DRAWS, seed: int = 0
) -> Budget:
    """The budget of `case` for a kernel with `numerics`, around its f64 truth {"out", and "lse" where it has one}.

    The same for the same seed up to the last bits of BLAS. Of a large case a sample of the rows is emulated.
    Raises UnsupportedError where nothing can be said of what roundings make: a softcap of 1e30, say.
    """
    with np.errstate(all="ignore"):  # rows that are not finite are computed and not measured
        return _budget(case, numerics, truth, draws, np.random.default_rng(seed))


def _budget(
    case: Case, numerics: Numerics, truth: Mapping[str, Array], draws: int, rng: np.random.Generator
) -> Budget:
    parts = parts_of(case, numerics)
    out = parts.split(truth["out"])
    lse = parts.split(truth["lse"]) if "lse" in truth else np.zeros(out.shape[:-1])
    sequential = numerics.value_accumulator in ("f16", "mma-f16")
    kernels = [choose(numerics, parts.longest, rng, turn=i, fine=sequential or i == 0) for i in range(draws)]
    samples = [_sample(parts, FINE_WORK if kernel.step else WORK, rng) for kernel in kernels]

    seen = _Seen()
    found = [np.zeros((parts.count, parts.rows, *more)) for more in ((parts.width,), *[()] * 5)]
    whole = Noise(*found)
    for i in range(parts.count):
        part = parts.open(i)
        noise = part.noise(out[i], lse[i])
        for all_parts, of_part in zip(whole, noise, strict=True):
            all_parts[i] = of_part
        for kernel, sample in zip(kernels, samples, strict=True):
            rows = sample.get(i)
            if rows is not None:
                seen.add(noise, rows, *part.run(rows, kernel, rng), out[i], lse[i])
    limits = seen.limits(whole)
    measured = whole.lse != 0
    if not all(np.isfinite(array[measured]).all() for array in (whole.out, whole.lse, *limits.values())):
        raise UnsupportedError(f"{case.name} has no budget: its scores or results are beyond what f32 holds")
    return Budget(
        numerics=numerics,
        out_scale=parts.join(whole.out),
        out_rms=parts.join(limits["rms"]),
        out_max=parts.join(limits["max"]),
        lse_scale=parts.join(whole.lse),
        lse_max=parts.join(limits["lse"]),
        reason=f"{MARGIN} times the upper end of {seen.rows} rows of {draws} emulated kernels",
    )


def emulate(case: Case, numerics: Numerics, rng: np.random.Generator, *, fine: bool = False) -> dict[str, Array]:
    """The results of one honest kernel for `case`, as f64 arrays that hold what it stores.

    `fine`: with accumulators rounded as often as any kernel does.
    """
    parts = parts_of(case, numerics)
    kernel = choose(numerics, parts.longest, rng, fine=fine)
    out, lse = np.zeros((parts.count, parts.rows, parts.width)), np.zeros((parts.count, parts.rows))
    with np.errstate(all="ignore"):
        for i in range(parts.count):
            out[i], lse[i] = parts.open(i).run(np.arange(parts.rows), kernel, rng)
    results = {"out": parts.join(out), "lse": parts.join(lse)}
    return {name: results[name] for name in case.results}


@dataclass
class _Seen:
    """Errors of emulated kernels in units of the noise, row by row."""

    kind: list[Array] = field(default_factory=list)
    errors: dict[str, list[Array]] = field(default_factory=lambda: {name: [] for name in LEAST})
    rows: int = 0

    def add(self, noise: Noise, rows: Array, out: Array, lse: Array, true_out: Array, true_lse: Array) -> None:
        measured = noise.lse[rows] > 0
        where = noise.out[rows] > 0
        z = np.where(where, _ratio(out, true_out[rows], noise.out[rows]), 0.0)
        of_lse = _ratio(lse, true_lse[rows], noise.lse[rows])
        measured &= np.isfinite(z).all(axis=-1) & np.isfinite(of_lse)
        self.kind.append(_kind(noise.keys[rows])[measured])
        self.errors["rms"].append(_rms(z)[measured])
        self.errors["max"].append(z.max(axis=-1, initial=0)[measured])
        self.errors["lse"].append(of_lse[measured])
        self.rows += int(measured.sum())

    def limits(self, noise: Noise) -> dict[str, Array]:
        """The budget of every row, in units of its noise; rows of a kind not seen get the largest."""
        kinds = _kind(noise.keys)
        kind = np.concatenate([np.zeros(0, kinds.dtype), *self.kind])
        V = max(1, noise.out.shape[-1])
        # Few independent errors may all be large: roundings of the weights that count and of the columns LONE times
        # their RMS, scores of the keys that count and the sum of the weights, themselves sums of many, MANY times.
        parts: list[tuple[Array, float, Any]] = [
            (noise.of_weights, LONE, np.sqrt(noise.keys)),
            (noise.of_scores, MANY, np.sqrt(noise.keys)),
            (noise.of_total, MANY, 1.0),
            (1 - noise.of_weights - noise.of_scores - noise.of_total, LONE, math.sqrt(V)),
        ]
        lone = np.sqrt(sum(share * np.square(1 + (most - 1) / root) for share, most, root in parts))
        found = {}
        for name, errors in self.errors.items():
            z = np.concatenate([np.zeros(0), *errors])
            upper = np.full(int(kinds.max(initial=0)) + 1, np.nan)
            for k in range(len(upper)):
                of_kind = z[kind == k]
                if of_kind.size:
                    upper[k] = max(of_kind.max(), of_kind.mean() + DEVIATIONS * of_kind.std())
            upper = np.where(np.isnan(upper), np.nanmax(upper) if len(z) else 0.0, upper)
            found[name] = MARGIN * np.maximum(upper[kinds], LEAST[name] * (lone if name != "lse" else 1.0))
        return found


def _sample(parts: Any, work: float, rng: np.random.Generator) -> dict[int, Array]:
    """Rows by part, of a sample that costs about `work` multiply-adds: all rows, or some of every part.

    Where even four rows of each are too many, every so many-th part in the order of cost, the dearest first.
    """
    cost = parts.cost
    share = min(1.0, work / max(1.0, float(cost.sum()) * parts.rows))
    take = max(math.ceil(parts.rows * share), min(parts.rows, 4))
    step = max(1, round(float(cost.sum()) * take / (2 * work)))
    chosen = np.argsort(-cost, kind="stable")[::step]
    return {int(i): np.sort(rng.choice(parts.rows, take, replace=False)) for i in chosen if parts.rows}


def _kind(keys: Array) -> Array:
    """floor(log2 keys): rows are judged by others of the same."""
    return np.frexp(np.maximum(keys, 1.0))[1] - 1


def _rms(x: Array) -> Array:
    return np.sqrt(np.mean(np.square(x), axis=-1)) if x.shape[-1] else np.zeros(x.shape[:-1])


def _ratio(actual: Array, truth: Array, scale: Array) -> Array:
    """|actual - truth| / scale; where the scale is 0: 0 if actual is the truth as its dtype holds it, else infinity."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        g, w = widen(actual, np.float64), np.asarray(truth, np.float64)
        error = np.abs(g - w) / scale
        if (scale > 0).all() and not np.isnan(error).any():
            return error
        held = widen(dtypes.round_to(w, dtypes.name_of(np.asarray(actual).dtype)), np.float64)
        same = (g == held) | (np.isnan(g) & np.isnan(w))
        return np.where(scale > 0, np.where(np.isnan(error), np.inf, error), np.where(same, 0.0, np.inf))
