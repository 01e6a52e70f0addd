# SPDX-License-Identifier: Apache-2.0
"""The parts of a paged case: its requests, or where it is not plain the query tokens by KV head.

    parts = Requests(case, numerics)        of a plain case: T * H rows over the first keys of one list
    parts = Tokens(case, numerics)          of any: the heads of one KV head, over the keys that one token sees
    part = parts.open(3)                    a Part, as parts.py says
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..canonical import bias_at, checked, gather
from ..canonical.caches import held_as
from ..cases import PagedCase
from ..cases.placement import dense_table
from ..errors import InputError
from ..paged import LOG2E
from .emulate import Choices, Problem, attend
from .noise import RMS, UNIT, Noise, coarser, noise
from .numerics import Numerics
from .roundings import narrow

F32 = np.float32


class Requests:
    """The parts of a plain paged case, rows [T, H] each."""

    def __init__(self, case: PagedCase, numerics: Numerics) -> None:
        self.case, self.numerics = case, numerics
        self.shape = case.q.shape[:-1]
        self.width = case.head_dim_v
        self.count, self.rows = len(case.seq_lens), math.prod(self.shape[1:])
        self.cost = case.seq_lens.astype(np.float64) * (case.q.shape[-1] + case.head_dim_v)
        self.longest = int(case.seq_lens.max(initial=0))
        self.table = dense_table(case)
        query = coarser(numerics.query, dtypes.name_of(case.q.dtype))
        query = math.hypot(query, of_scaling(numerics, case.softmax_scale))
        self.of_values = coarser(numerics.cache, dtypes.name_of(case.kv_cache.dtype))
        self.of_products = math.hypot(query, self.of_values)

    def split(self, rows: Array) -> Array:
        """[*shape, ...] -> [count, rows, ...]"""
        return rows.reshape(self.count, self.rows, *rows.shape[len(self.shape) :])

    def join(self, rows: Array) -> Array:
        return rows.reshape(*self.shape, *rows.shape[2:])

    def open(self, request: int) -> Part:
        case, numerics = self.case, self.numerics
        q = case.q if case.q.ndim == 4 else case.q[:, None]
        _, T, H, D = q.shape
        block = case.kv_cache.shape[1]
        n = int(case.seq_lens[request])
        j = np.arange(n)
        keys = as_multiplied(case.kv_cache[self.table[request, j // block], j % block], numerics.cache)
        rows, scale = scaled(as_multiplied(q[request].reshape(T * H, D), numerics.query), case.softmax_scale, numerics)
        values = finite(keys[:, : case.head_dim_v])
        seen = np.maximum(n - T + 1 + np.arange(T), 0) if case.causal else np.full(T, n)
        visible = np.repeat(seen, H)
        problem = Problem(rows, keys, values, visible, scale, _owned(case, j))
        return Part(problem, case, numerics, self.of_products, self.of_values)


class Tokens(Requests):
    """The parts of any paged case: H / KV rows each, query token after query token, KV head after KV head.

    What a token sees is one list of keys, as often and in the order it sees them: as a kernel takes them.
    """

    def __init__(self, case: PagedCase, numerics: Numerics) -> None:
        self.case, self.numerics = case, numerics
        self.given = checked(case, "f64")
        self.seen = list(self.given.seen)
        (N, H, D), V = self.given.q.shape, case.head_dim_v
        self.shape, self.width, self.heads = case.q.shape[:-1], V, self.given.main.heads
        self.count, self.rows = N * self.heads, H // self.heads
        lens = np.concatenate([np.zeros(0), *(np.diff(one.starts) for one in self.seen)])
        self.cost = np.repeat(lens * (D + V), self.heads)
        self.longest = int(lens.max(initial=0))
        self._read_q()
        self._read_rules()
        self.read: tuple[int, Any] = (-1, None)

    def _read_q(self) -> None:
        """The queries as they are multiplied, and what of q_scale is not yet in them."""
        case, numerics = self.case, self.numerics
        stored = dtypes.name_of(case.q.dtype)
        self.q, self.scale = self.given.q, self.given.scale
        self.of_query = coarser(numerics.query, stored)
        if case.q_scale is not None and stored == "e4m3" != numerics.query:  # made numbers before they are multiplied
            self.q, self.scale = self.q * float(case.q_scale), float(case.softmax_scale)
            self.of_query = 0.0 if math.frexp(case.q_scale)[0] == 0.5 else RMS * UNIT[numerics.query]
        self.q = rounded(self.q, numerics.query if numerics.query != stored else "f64")
        self.of_query = math.hypot(self.of_query, of_scaling(numerics, self.scale))
        self.q, self.scale = scaled(self.q, self.scale, numerics)

    def _read_rules(self) -> None:
        """What rows are rounded to as they are multiplied: `kept` where that is what they are."""
        case, numerics = self.case, self.numerics
        held = held_as(case)
        self.kept = held == numerics.cache
        if case.cache_format is not None and numerics.cache == "e4m3":
            from .. import formats

            reader = formats.get(case.cache_format).reader_of(case.cache_reader)
            if reader != "fold":
                raise InputError(
                    f"numerics cache is 'e4m3', expected what {reader!r} makes of {case.cache_format}: {held} or wider"
                )
            self.kept = True  # the codes themselves are multiplied
        self.of_values = 0.0 if self.kept else coarser(numerics.cache, held)
        self.of_products = math.hypot(self.of_query, self.of_values)

    def open(self, part: int) -> Part:
        case, given = self.case, self.given
        n, g = divmod(part, self.heads)
        b = int(np.searchsorted(given.queries.starts, n, side="right")) - 1
        rows, keys, bias = self._request(b)
        starts = self.seen[b].starts
        t = n - int(given.queries.starts[b])
        mine = slice(int(starts[t]), int(starts[t + 1]))
        heads = slice(g * self.rows, (g + 1) * self.rows)
        found = rows[g][keys[mine]]
        visible = np.full(self.rows, len(found))
        problem = Problem(
            self.q[n, heads],
            found,
            finite(found[:, given.value]),
            visible,
            self.scale,
            softcap=given.softcap,
            bias=None if bias is None else bias[heads, mine],
            sinks=None if case.sinks is None else given.sinks[heads].astype(F32),
            sinks_in_lse=bool(case.sinks_in_lse),
            output_scale=given.output_scale,
        )
        return Part(problem, case, self.numerics, self.of_products, self.of_values)

    def _request(self, b: int) -> tuple[Array, Array, Array | None]:
        """(rows [KV, n, D] f32 as they are multiplied, which of them each key is [M], bias [H, M]) of request b."""
        if self.read[0] != b:
            rows, keys = gather(self.given, self.seen[b])
            rows = rounded(rows, "f64" if self.kept else self.numerics.cache)
            bias = None if self.given.bias is None else bias_at(self.given, b, self.seen[b]).astype(F32)
            self.read = b, (rows, keys, bias)
        found: tuple[Array, Array, Array | None] = self.read[1]
        return found


@dataclasses.dataclass(frozen=True)
class Part:
    """Query rows over one list of keys."""

    problem: Problem
    case: PagedCase
    numerics: Numerics
    of_products: float  # RMS relative errors, as `noise` takes them
    of_values: float

    def run(self, rows: Array, choices: Choices, rng: np.random.Generator) -> tuple[Array, Array]:
        """(out [R, V], lse [R]) as they are stored, in the case's base and with its value of an empty row."""
        out, lse = attend(self.problem.take(rows), self.numerics, choices, rng)
        lse = as_stored((lse * self.unit).astype(F32).astype(np.float64), self.numerics.lse)
        return as_stored(out, self.numerics.out), np.where(np.isneginf(lse), self.case.empty_lse, lse)

    def noise(self, out: Array, lse: Array) -> Noise:
        return noise(self.problem, self.numerics, self.of_products, self.of_values, out, lse, self.unit)

    @property
    def unit(self) -> float:
        return LOG2E if self.case.lse_base == "2" else 1.0


def _owned(case: PagedCase, tokens: Array) -> list[Array] | None:
    """The tokens of every rank that has some, where the case says who owns which."""
    if case.shards == 1:
        return None
    size = max(1, -(-len(tokens) // case.shards))
    interleaved = case.shard_layout == "interleaved"
    ranks = [tokens[s :: case.shards] if interleaved else tokens[s * size : (s + 1) * size] for s in range(case.shards)]
    return [rank for rank in ranks if len(rank)] or [tokens]


def scaled(q: Array, scale: float, numerics: Numerics) -> tuple[Array, float]:
    """q as it is multiplied, and what is left of the scale for the scores."""
    if numerics.scaled == "scores":
        return q, scale
    return narrow(q * F32(scale), numerics.query), 1.0


def of_scaling(numerics: Numerics, scale: float) -> float:
    """The RMS relative error of a query that is scaled and rounded again; a power of two leaves its mantissa."""
    return 0.0 if numerics.scaled == "scores" or math.frexp(scale)[0] == 0.5 else RMS * UNIT[numerics.query]


def as_multiplied(stored: Array, name: str) -> Array:
    """f32 `stored`, rounded to `name` where it is of another dtype."""
    return rounded(stored, "f64" if dtypes.name_of(stored.dtype) == name else name)


def rounded(x: Array, name: str) -> Array:
    """`x` rounded to f32 and then to `name`, as f32."""
    with np.errstate(invalid="ignore", over="ignore"):
        wide: Array = x.astype(F32)
    return narrow(wide, name)


def finite(values: Array) -> Array:
    return values if np.isfinite(values).all() else np.where(np.isfinite(values), values, F32(0))


def as_stored(x: Array, name: str) -> Array:
    """f64 `x` as a result of dtype `name` holds it."""
    held: Array = dtypes.round_to(x, name).astype(np.float64)
    return held
