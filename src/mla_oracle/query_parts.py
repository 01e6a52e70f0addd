# SPDX-License-Identifier: Apache-2.0
"""The parts of a paged case that is not plain, as parts.py has those of others: the queries, each over its own list of
keys, those of one KV head alone. Rows are the heads of a group.

A key that a bias hides from a head has the score -inf there. A sink is one key more, whose score is the sink's logit
and whose value is 0; an LSE that does not count it is that of the list without it.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import numpy as np

from .arrays import Array
from .canonical import bias_at, checked
from .cases import PagedCase
from .emulate import Choices, Problem, attend, narrow
from .noise import Noise, coarser, noise
from .numerics import Numerics, stored_dtypes
from .paged import LOG2E
from .parts import finite, stored

F32 = np.float32
SURE = 1e4  # a sink beyond it takes all the weight, or none


class Queries:
    """The parts of a case; N queries times KV heads of them, rows [H // KV] each."""

    def __init__(self, case: PagedCase, numerics: Numerics) -> None:
        self.case, self.numerics = case, numerics
        self.problem = checked(case, "f64")
        self.seen = list(self.problem.seen)
        self.shape, self.width = case.q.shape[:-1], case.head_dim_v
        N, H, D = self.problem.q.shape
        self.heads = self.problem.main.heads
        self.count, self.rows = N * self.heads, H // self.heads
        starts = self.problem.queries.starts
        self.request = np.repeat(np.arange(len(self.seen)), np.diff(starts))  # [N]
        lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(seen.starts) for seen in self.seen)])  # [N]
        self.cost = np.repeat(lengths, self.heads).astype(np.float64) * (D + self.width)
        self.longest = int(lengths.max(initial=0)) + (case.sinks is not None)
        self.bias_of = lru_cache(maxsize=1)(lambda b: bias_at(self.problem, b, self.seen[b]))  # [H, M] of request b

    def split(self, rows: Array) -> Array:
        """[*shape, ...] -> [count, rows, ...]"""
        return rows.reshape(self.count, self.rows, *rows.shape[len(self.shape) :])

    def join(self, rows: Array) -> Array:
        return rows.reshape(*self.shape, *rows.shape[2:])

    def open(self, part: int) -> Query:
        case, numerics, problem = self.case, self.numerics, self.problem
        row, g = divmod(part, self.heads)
        b = int(self.request[row])
        seen, t = self.seen[b], row - int(problem.queries.starts[b])
        mine = slice(*seen.starts[t : t + 2])
        heads = slice(g * self.rows, (g + 1) * self.rows)
        keys = np.empty((len(seen.slot[mine]), problem.q.shape[2]), F32)
        for s, cache in enumerate((problem.main, problem.extra)):
            of_source = seen.source[mine] == s
            if cache is not None and of_source.any():
                keys[of_source] = cache.read(seen.slot[mine][of_source])[g]
        query_dtype, cache_dtype = stored_dtypes(case)
        keys = keys if cache_dtype == numerics.cache else narrow(keys, numerics.cache)
        q = problem.q[row, heads].astype(F32)
        q = q if query_dtype == numerics.query else narrow(q, numerics.query)
        bias = self.bias_of(b)[heads, mine].astype(F32)  # [R, n]
        values = finite(keys[:, problem.value]) * F32(problem.output_scale)
        visible = np.where((bias > -np.inf).any(axis=1), len(keys), 0)
        plain = Problem(q, keys, values, visible, problem.scale, bias=bias, softcap=problem.softcap)
        return Query(plain, problem.sinks[heads].astype(F32), case, numerics)


@dataclasses.dataclass(frozen=True)
class Query:
    """One query and the heads of one KV head."""

    problem: Problem  # its keys alone
    sinks: Array  # [R], -inf where there is none
    case: PagedCase
    numerics: Numerics

    def run(self, rows: Array, choices: Choices, rng: np.random.Generator) -> tuple[Array, Array]:
        """(out [R, V], lse [R]) as they are stored, in the case's base and with its value of an empty row."""
        out, lse = attend(self.with_sinks.take(rows), self.numerics, choices, rng)
        empty = self.problem.visible[rows] == 0
        if self.case.sinks is not None and not self.case.sinks_in_lse:
            _, lse = attend(self.problem.take(rows), self.numerics, choices, rng)
        lse = np.where(self.sinks[rows] == np.inf, np.inf, lse) if self.case.sinks_in_lse else lse
        lse = stored((lse * self.unit).astype(F32).astype(np.float64), self.numerics.lse)
        return stored(out, self.numerics.out), np.where(empty, self.case.empty_lse, lse)

    def noise(self, out: Array, lse: Array) -> Noise:
        numerics = self.numerics
        query_dtype, cache_dtype = stored_dtypes(self.case)
        cache = coarser(numerics.cache, cache_dtype)
        products = math.hypot(coarser(numerics.query, query_dtype), cache)
        found = noise(self.with_sinks, numerics, products, cache, out, lse, self.unit)
        if self.case.sinks is None or self.case.sinks_in_lse:
            return found
        return found._replace(lse=noise(self.problem, numerics, products, cache, out, lse, self.unit).lse)

    @property
    def with_sinks(self) -> Problem:
        """The problem with the sink of each row as its last key."""
        problem = self.problem
        if self.case.sinks is None:
            return problem
        assert problem.bias is not None
        sinks = np.where(self.sinks == -np.inf, -np.inf, np.clip(self.sinks, -SURE, SURE))[:, None]
        n = len(problem.keys) + 1
        return problem._replace(
            keys=np.concatenate([problem.keys, np.zeros((1, problem.keys.shape[1]), F32)]),
            values=np.concatenate([problem.values, np.zeros((1, problem.values.shape[1]), F32)]),
            bias=np.concatenate([problem.bias, sinks.astype(F32)], axis=1),
            visible=np.where(problem.visible > 0, n, 0),
        )

    @property
    def unit(self) -> float:
        return LOG2E if self.case.lse_base == "2" else 1.0
