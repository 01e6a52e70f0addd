# SPDX-License-Identifier: Apache-2.0
"""A case in parts that are emulated alone: of a paged case those of paged_parts.py, the heads of a dense one.

    parts = parts_of(case, numerics)        how many, how many rows each, what a row costs
    part = parts.open(3)                    its arrays in the dtypes a kernel multiplies
    part.run(rows, choices, rng)            what one honest kernel returns for some of its rows
    part.noise(out, lse)                    the noise around the truth of all of them

A dense part is computed in either form, as `choices.naive` says: keys and values decompressed and rounded, or the query
absorbed and rounded, and the latent output rounded before it is projected.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..cases import Case, DenseCase, PagedCase
from ..errors import InputError
from .emulate import Choices, Problem, attend
from .noise import RMS, UNIT, Noise, coarser, drift, noise, walk
from .numerics import Numerics
from .paged_parts import Requests, Tokens, as_multiplied, as_stored, finite, of_scaling, scaled
from .roundings import accumulate, narrow

F32 = np.float32


def parts_of(case: Case, numerics: Numerics) -> Requests | Heads:
    """The parts of a case that has numerics. Raises InputError, UnsupportedError."""
    match case:
        case PagedCase():
            return (Tokens if case.extensions() else Requests)(case, numerics)
        case DenseCase():
            return Heads(case, numerics)
    raise InputError(f"a {case.kind} case has no numerics, expected a paged, naive or absorbed one")


class Heads:
    """The parts of a dense case, rows [t_q] each."""

    def __init__(self, case: DenseCase, numerics: Numerics) -> None:
        self.case, self.numerics = case, numerics
        t_q, self.count, P = case.q_nope.shape
        R, L, self.width = case.k_pe.shape[1], case.c_kv.shape[1], case.w_uv.shape[1]
        self.rows, self.shape = t_q, (t_q, self.count)
        self.longest = len(case.c_kv)
        of_row = self.longest * (2 * L + P + 2 * R + self.width)
        self.cost = np.full(self.count, of_row + self.longest * L * (P + self.width) / max(t_q, 1), np.float64)

    def split(self, rows: Array) -> Array:
        """[t_q, H, ...] -> [H, t_q, ...]"""
        return rows.swapaxes(0, 1)

    join = split

    def open(self, head: int) -> Head:
        return Head(self.case, self.numerics, head)


@dataclasses.dataclass(frozen=True)
class Head:
    """One head of a dense case."""

    case: DenseCase
    numerics: Numerics
    head: int

    def run(self, rows: Array, choices: Choices, rng: np.random.Generator) -> tuple[Array, Array]:
        """(out [R, V] as it is stored, zeros)."""
        problem = (self.naive if choices.naive else self.absorbed).take(rows)
        out, _ = attend(problem, self.numerics, choices, rng)
        if not choices.naive:
            latent = narrow(out.astype(F32), self.numerics.query)
            out = accumulate(None, latent, self.array("w_uv").T, None, self.numerics.value_accumulator)
        return as_stored(out.astype(np.float64), self.numerics.out), np.zeros(len(rows))

    def noise(self, out: Array, lse: Array) -> Noise:
        """As of a naive kernel, with the roundings that an absorbed one makes instead beside it."""
        numerics, case = self.numerics, self.case
        L = case.c_kv.shape[1]
        scaling = of_scaling(numerics, self.scale)
        query = math.hypot(coarser(numerics.query, dtypes.name_of(case.q_nope.dtype)), scaling)
        projected = math.hypot(_relative(numerics.query), _relative(numerics.cache), 0.5 * UNIT["f32"] * math.sqrt(L))
        decompressed = math.hypot(_relative(numerics.cache), 0.5 * UNIT["f32"] * math.sqrt(L))
        found = noise(self.naive, numerics, math.hypot(query, projected), decompressed, out, lse, 1.0)
        # Of an absorbed kernel: rounding of the latent output, and the sums of its projection.
        p = np.exp(_scores(self.absorbed))
        latent = (p @ self.absorbed.values) / np.maximum(p.sum(-1), F32(1e-30))[:, None]
        size = np.sqrt(np.square(latent) @ np.square(self.array("w_uv")).T).astype(np.float64)
        sums = walk(numerics.value_accumulator, L) + drift(numerics.value_accumulator, L)
        of_latent = math.hypot(_relative(numerics.query), sums, UNIT["f32"])
        extra = np.where(found.out > 0, size * of_latent, 0.0)
        whole = np.hypot(found.out, extra)
        kept = np.square(found.out).sum(-1) / np.maximum(np.square(whole).sum(-1), 1e-300)
        shares = {name: getattr(found, name) * kept for name in ("of_weights", "of_scores", "of_total")}
        return found._replace(out=whole, **shares)

    def array(self, name: str) -> Array:
        """The tensor `name` of this head, f32 in the dtype it is multiplied in."""
        tensor = getattr(self.case, name)
        if name in ("q_nope", "q_pe"):
            return as_multiplied(tensor[:, self.head], self.numerics.query)
        return as_multiplied(tensor[self.head] if name.startswith("w_") else tensor, self.numerics.cache)

    @cached_property
    def naive(self) -> Problem:
        c_kv = self.array("c_kv")
        nope = narrow(c_kv @ self.array("w_uk").T, self.numerics.cache)
        values = narrow(c_kv @ self.array("w_uv").T, self.numerics.cache)
        keys = np.concatenate([nope, self.array("k_pe")], axis=1)
        return self._problem(np.concatenate([self.array("q_nope"), self.array("q_pe")], axis=1), keys, values)

    @cached_property
    def absorbed(self) -> Problem:
        latent = narrow(self.array("q_nope") @ self.array("w_uk"), self.numerics.query)
        c_kv = self.array("c_kv")
        keys = np.concatenate([c_kv, self.array("k_pe")], axis=1)
        return self._problem(np.concatenate([latent, self.array("q_pe")], axis=1), keys, c_kv)

    def _problem(self, q: Array, keys: Array, values: Array) -> Problem:
        case = self.case
        t_q, t_kv = len(case.q_nope), len(case.c_kv)
        q, scale = scaled(q, self.scale, self.numerics)
        return Problem(q, keys, finite(values), t_kv - t_q + 1 + np.arange(t_q), scale)

    @property
    def scale(self) -> float:
        case = self.case
        width = case.q_nope.shape[2] + case.q_pe.shape[2]
        return 1 / math.sqrt(width) if case.softmax_scale is None else case.softmax_scale


def _scores(problem: Problem) -> Array:
    """[R, n] f32 scores below their largest, -inf where a row does not see the key."""
    s = (problem.q @ problem.keys.T) * F32(problem.scale)
    s[np.isnan(s) | (np.arange(s.shape[1]) >= problem.visible[:, None])] = -np.inf
    return s - np.where(np.isfinite(top := s.max(-1)), top, F32(0))[:, None]


def _relative(name: str) -> float:
    """The RMS error of rounding to `name`; 0 where that is f32, which sums account for."""
    return 0.0 if name == "f32" else RMS * UNIT[name]

