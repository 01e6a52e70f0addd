# SPDX-License-Identifier: Apache-2.0
"""The canonical problem on the fast tier: the addresses of every query's rows, and what is done to the results.

Rows are read where they lie (packings.py); those of a cache that the fast tier does not read itself are first made
numbers, each once. A sink is one more term of a finished sum, so it is added to the results, in f64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import dtypes
from .arrays import Array
from .caches import Cache
from .checks import number_type
from .fast import listed
from .packings import Places, Region, places_of
from .visible import Seen

if TYPE_CHECKING:
    from .canonical import Problem


@dataclass(frozen=True)
class Rows:
    """The keys of N queries of one KV head: `counts` [N] of the addresses in each line."""

    at: Array  # [N, K] i64
    apart: Array | None
    counts: Array  # [N] i32
    places: Places
    held: object  # what the addresses are in


def attend(problem: Problem, *, threads: int | None = None, isa: str | None = None) -> tuple[Array, Array]:
    """(out [N, H, V], lse [N, H]), natural, -inf where a query sees no key: `finish` makes them the results.

    The problem has no softcap, and no bias but 0.
    """
    stored = problem.stored_q if dtypes.name_of(problem.stored_q.dtype) in dtypes.STORED else problem.q
    (N, H, _), real = stored.shape, np.dtype(number_type(problem.main.precision)[0])
    V, group = problem.value.stop - problem.value.start, H // problem.main.heads
    out, lse = np.empty((N, 1, H, V), real), np.empty((N, 1, H), real)
    for g in range(problem.main.heads):
        heads = slice(g * group, (g + 1) * group)
        rows = rows_of(problem, g)
        part = (out, lse) if group == H else (np.empty((N, 1, group, V), real), np.empty((N, 1, group), real))
        listed.decode(
            np.ascontiguousarray(stored[:, None, heads]).view(np.uint8),
            dtypes.STORED.index(dtypes.name_of(stored.dtype)),
            rows.at,
            rows.apart,
            rows.counts,
            rows.places.row_bytes,
            kv_dtype=rows.places.dtype,
            packing=rows.places.packing,
            first_value=problem.value.start,
            softmax_scale=problem.scale * rows.places.factor,
            out=part[0],
            lse=part[1],
            threads=threads,
            isa=isa,
        )
        if rows.places.factor != 1:
            part[0][...] *= real.type(rows.places.factor)
        if group != H:
            out[:, :, heads], lse[:, :, heads] = part
    return out[:, 0], lse[:, 0]


def rows_of(problem: Problem, head: int) -> Rows:
    """Where the keys of every query lie."""
    seen = problem.seen.runs
    caches = [cache for cache in (problem.main, problem.extra) if cache is not None]
    places = [places_of(cache, head) for cache in caches]
    if places[0] is None or any(not _alike(places[0], other) for other in places[1:]):
        return _numbers(caches, seen, head)
    at = _lists(seen, lambda s, slots: places[s].rows(slots))  # type: ignore[union-attr]
    apart = None
    if places[0].elsewhere is not None:
        apart = _lists(seen, lambda s, slots: places[s].apart(slots))[0]  # type: ignore[union-attr]
    return Rows(at[0], apart, at[1], places[0], caches)


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


def _numbers(caches: list[Cache], seen: list[Seen], head: int) -> Rows:
    """Of caches that are read as numbers: each row that is seen, once."""
    slots = [np.unique(np.concatenate([s.slot[s.source == i] for s in seen])) for i in range(len(caches))]
    read = [cache.read(used)[head] for cache, used in zip(caches, slots, strict=True)]
    dtype = dtypes.STORED.index(dtypes.name_of(read[0].dtype))
    regions = [Region(rows.ctypes.data, rows.strides[0], 0) for rows in read]
    places = [Places(region, read[0].strides[0], 1, dtype=dtype) for region in regions]
    at, counts = _lists(seen, lambda s, wanted: places[s].rows(np.searchsorted(slots[s], wanted)))
    return Rows(at, None, counts, places[0], read)


def _lists(seen: list[Seen], place: Callable[[int, Array], Any]) -> tuple[Array, Array]:
    """([N, K] i64, counts [N] i32): what `place` makes of the slots of each source, query after query."""
    counts = _joined([one.starts[1:] - one.starts[:-1] for one in seen])
    at, K = _joined([_placed(one, place) for one in seen]), int(counts.max(initial=0))
    if (counts == K).all():
        return at.reshape(len(counts), K), counts.astype(np.int32)
    found = np.zeros((len(counts), K), np.int64)
    found[np.arange(K) < counts[:, None]] = at
    return found, counts.astype(np.int32)


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])


def _placed(seen: Seen, place: Callable[[int, Array], Any]) -> Array:
    extra = seen.source.astype(bool)
    if not extra.any():
        return np.asarray(place(0, seen.slot))
    at = np.empty(len(seen.slot), np.int64)
    for s, mine in enumerate((~extra, extra)):
        at[mine] = place(s, seen.slot[mine])
    return at


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
