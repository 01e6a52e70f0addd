# SPDX-License-Identifier: Apache-2.0
"""The canonical problem on the fast tier: the addresses of every query's rows, and what is done to the results.

Rows are read where they lie (packings.py); those of a cache that the fast tier does not read itself are first made
numbers, each once. Two caches that are read in different ways are attended apart and merged by their LSE, in f64. A
sink is one more term of a finished sum, so it is added to the results, in f64 too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..checks import number_type
from ..fast import listed
from .biases import listed_bias
from .caches import Cache
from .packings import Places, Region, places_of
from .visible import Lists

if TYPE_CHECKING:
    from . import Problem


@dataclass(frozen=True)
class Rows:
    """The keys of N queries of one KV head: `counts` [N] of the addresses in each line."""

    at: Array  # [N, K] i64
    apart: Array | None
    counts: Array  # [N] i32
    places: Places
    keys: Lists
    held: object  # what the addresses are in


def attend(problem: Problem, *, threads: int | None = None, isa: str | None = None) -> tuple[Array, Array]:
    """(out [N, H, V], lse [N, H]), natural, -inf where a query sees no key: `finish` makes them the results."""
    stored = problem.stored_q if dtypes.name_of(problem.stored_q.dtype) in dtypes.STORED else problem.q
    (N, H, _), real = stored.shape, np.dtype(number_type(problem.main.precision)[0])
    V, group = problem.value.stop - problem.value.start, H // problem.main.heads
    out, lse = np.empty((N, 1, H, V), real), np.empty((N, 1, H), real)
    for g in range(problem.main.heads):
        heads = slice(g * group, (g + 1) * group)
        q = np.ascontiguousarray(stored[:, None, heads]).view(np.uint8)
        states: list[tuple[Array, Array]] = []
        for rows in rows_of(problem, g):
            whole = group == H and not states
            part = (out, lse) if whole else (np.empty((N, 1, group, V), real), np.empty((N, 1, group), real))
            listed.decode(
                q,
                dtypes.STORED.index(dtypes.name_of(stored.dtype)),
                rows.at,
                rows.apart,
                rows.counts,
                rows.places.row_bytes,
                kv_dtype=rows.places.dtype,
                packing=rows.places.packing,
                first_value=problem.value.start,
                softmax_scale=problem.scale * rows.places.factor,
                softcap=problem.softcap,
                bias=listed_bias(problem, heads, rows.keys),
                out=part[0],
                lse=part[1],
                threads=threads,
                isa=isa,
            )
            if rows.places.factor != 1:
                part[0][...] *= real.type(rows.places.factor)
            states.append(part)
        if len(states) > 1 or group != H:
            out[:, :, heads], lse[:, :, heads] = states[0] if len(states) == 1 else _merged(states)
    return out[:, 0], lse[:, 0]


def _merged(states: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """(out [N, 1, H, V], lse [N, 1, H]) f64 of states over different keys."""
    lses = np.stack([lse for _, lse in states]).astype(np.float64)
    top = lses.max(axis=0)
    top[top == -np.inf] = 0
    weights = np.exp(lses - top)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    weights /= np.where(total == 0, 1, total)
    out: Array = sum(w[..., None] * out for w, (out, _) in zip(weights, states, strict=True))
    return out, lse


def rows_of(problem: Problem, head: int) -> list[Rows]:
    """Where the keys of every query lie: one list, or one for each of two caches that are read in different ways."""
    caches = [cache for cache in (problem.main, problem.extra) if cache is not None]
    places = [places_of(cache, head) for cache in caches]
    if all(one is None for one in places):
        return [_numbers(problem, caches, head)]
    if places[0] is None or any(not _alike(places[0], other) for other in places[1:]):
        return _apart(problem, caches, places, head)
    found = problem.seen.lists([one.regions() for one in places if one is not None])
    apart = found.at[1] if len(found.at) > 1 else None
    return [Rows(found.at[0], apart, found.counts.astype(np.int32), places[0], found, (caches, places))]


def _apart(problem: Problem, caches: list[Cache], places: list[Places | None], head: int) -> list[Rows]:
    """The keys in each cache by themselves."""
    found = problem.seen.lists([np.array([[0, cache.block_size, 1]]) for cache in caches])
    made, first = [], np.zeros_like(found.main)
    for cache, place, end in zip(caches, places, (found.main, found.counts), strict=True):
        counts = end - first
        entry = np.arange(int(counts.max(initial=0)))
        mine = entry < counts[:, None]  # [N, K]
        slots = np.zeros(mine.shape, np.int64)
        slots[mine] = found.at[0][np.nonzero(mine)[0], (first[:, None] + entry)[mine]]
        held: object = cache
        if place is None:
            used, which = np.unique(slots[mine], return_inverse=True)
            held = rows = cache.read(used)[head]
            slots[mine] = which
            step = rows.strides[0]
            place = Places(Region(rows.ctypes.data, cache.block_size * step, step), step, dtype=_stored(rows))
        at = [one.at(slots, cache.block_size) for one in place.parts()]
        keys = Lists(slots[None], found.positions[:, : len(entry)], found.main - first, counts)
        made.append(Rows(at[0], at[1] if len(at) > 1 else None, counts.astype(np.int32), place, keys, held))
        first = end
    return made


def _alike(a: Places, b: Places | None) -> bool:
    """Whether rows of both are read in one way."""
    if b is None or (a.elsewhere is None) != (b.elsewhere is None):
        return False
    if (a.row_bytes, a.dtype, a.factor) != (b.row_bytes, b.dtype, b.factor):
        return False
    fields: list[Any] = [places.packing or () for places in (a, b)]
    return len(fields[0]) == len(fields[1]) and all(_same(x, y) for x, y in zip(*fields, strict=True))


def _same(a: Any, b: Any) -> bool:
    """Tables of numbers have NaN where a code is one."""
    return np.array_equal(a, b, equal_nan=isinstance(a, np.ndarray) and a.dtype.kind == "f")


def _numbers(problem: Problem, caches: list[Cache], head: int) -> Rows:
    """Of caches that are read as numbers: each row that is seen, once."""
    found = problem.seen.lists([np.array([[0, cache.block_size, 1]]) for cache in caches])
    at, entry = found.at[0], np.arange(found.at.shape[2])
    extra = entry >= found.main[:, None]
    read = []
    for cache, mine in zip(caches, (~extra, extra & (entry < found.counts[:, None])), strict=False):
        slots, which = np.unique(at[mine], return_inverse=True)
        rows = cache.read(slots)[head]
        at[mine] = rows.ctypes.data + which * rows.strides[0]
        read.append(rows)
    places = Places(Region(0, 0, 0), read[0].strides[0], dtype=_stored(read[0]))
    return Rows(at, None, found.counts.astype(np.int32), places, found, read)


def _stored(rows: Array) -> int:
    return dtypes.STORED.index(dtypes.name_of(rows.dtype))


def finish(problem: Problem, out: Array, lse: Array, sinks_in_lse: bool) -> None:
    """Sinks, output_scale, lse_unit and empty_lse, in place."""
    sunk = bool((problem.sinks > -np.inf).any())
    if not sunk and (problem.output_scale, problem.lse_unit, problem.empty_lse) == (1, 1, -np.inf):
        return
    empty = lse == -np.inf
    wide = lse.astype(np.float64)
    factor = np.full(lse.shape, problem.output_scale)
    if sunk:
        sinks = problem.sinks.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            factor /= 1 + np.exp(np.where(sinks == -np.inf, -np.inf, sinks - wide))
            if sinks_in_lse:
                wide = np.logaddexp(wide, sinks)
    factor[empty] = 0
    if (factor != 1).any():
        out *= factor[..., None]
    lse[...] = np.where(empty, problem.empty_lse, wide * problem.lse_unit)
