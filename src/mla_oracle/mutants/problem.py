# SPDX-License-Identifier: Apache-2.0
"""A case of attention (paged, absorbed, naive) as plans: one right plan per request, and what mutants may ask of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from ..arrays import Array
from ..cases import Case, DenseCase, PagedCase
from ..cases.extensions import require_plain
from ..cases.placement import dense_table
from ..errors import InputError
from ..geometry import Geometry
from ..oracle import check_shapes
from ..paged import LOG2E, count_tokens
from . import joins, plan
from .evaluate import State, evaluate
from .memory import Memory, Rows
from .plan import Parts, Plan
from .rotation import Rotation, rotation_of

KEPT_BYTES = 1 << 30  # of the states of right plans
Results = dict[str, Array]


class Problem:
    """The sizes, queries, lengths, table and memory of a case. Raises InputError for a case that is not valid."""

    q: Array  # [B, T, H, D]
    lens: Array  # [B]
    table: Array  # [B, W] block ids
    memory: Memory
    B: int
    T: int
    H: int
    D: int
    V: int
    split: int  # latent elements of a row; the rest are rope elements
    block: int
    scale: float
    unit: float
    shards: int
    listed = False  # every query has a list of keys of its own: listed.py

    def __init__(self, case: PagedCase | DenseCase):
        require_plain(case, "the mutants")
        check_shapes(case)
        self.case = case
        self.paged = isinstance(case, PagedCase)
        self.up: Array | None = None  # w_uv [H, V, L] of a dense case
        self.causal, self.unit, self.empty_lse, self.shards = True, 1.0, -math.inf, 1
        if isinstance(case, PagedCase):
            self._paged(case)
        else:
            self._dense(case)
        self.B, self.T, self.H = self.q.shape[:3]
        self.D, self.block = self.memory.width, self.memory.block
        self.split = self.D - self._rope_width()
        self._kept: dict[int, tuple[Rows, State]] = {}
        self._last: tuple[Rows, State] | None = None
        self._room = KEPT_BYTES

    def _paged(self, case: PagedCase) -> None:
        count_tokens(dense_table(case), case.seq_lens, len(case.kv_cache), case.kv_cache.shape[1])
        with np.errstate(invalid="ignore"):
            q = case.q.astype(np.float64)
        self.q = q if q.ndim == 4 else q[:, None]  # [B, T, H, D]
        self.lens = case.seq_lens.astype(np.int64)  # [B]
        self.table = case.block_table.astype(np.int64)  # [B, W]
        self.memory = Memory(case.kv_cache, case.page_ids, case.num_blocks, case.block_stride)
        self.V, self.scale = case.head_dim_v, case.softmax_scale
        self.causal, self.empty_lse, self.shards = bool(case.causal), case.empty_lse, case.shards
        self.unit = 1.0 if case.lse_base == "e" else LOG2E

    def _dense(self, case: DenseCase) -> None:
        w_uk, q_nope = case.w_uk.astype(np.float64), case.q_nope.astype(np.float64)
        self.q = np.concatenate([absorb(q_nope, w_uk), case.q_pe.astype(np.float64)], -1)[None]
        rows = np.concatenate([case.c_kv.astype(np.float64), case.k_pe.astype(np.float64)], -1)
        if len(case.q_nope) > len(rows):
            raise InputError(f"q_nope has {len(case.q_nope)} tokens, expected at most {len(rows)}, those of c_kv")
        self.memory = Memory(rows[None])
        self.lens, self.table = np.array([len(rows)]), np.zeros((1, 1), np.int64)
        self.V = case.c_kv.shape[1]
        self.up = case.w_uv.astype(np.float64)
        width = case.q_nope.shape[2] + case.q_pe.shape[2]
        self.scale = 1 / math.sqrt(width) if case.softmax_scale is None else case.softmax_scale

    def _rope_width(self) -> int:
        if not self.paged:
            return self.D - self.V
        if self.geometry is not None and 0 < self.geometry.qk_rope_head_dim < self.D:
            return self.geometry.qk_rope_head_dim
        if self.V < self.D:
            return self.D - self.V
        return 64 if self.D > 64 else 0

    @cached_property
    def geometry(self) -> Geometry | None:
        """The geometry that the case's id names."""
        from ..cases.recipes import parse_id

        try:
            return None if self.case.id is None else parse_id(self.case.id).preset()
        except InputError:
            return None

    @cached_property
    def rotation(self) -> Rotation | str:
        """How the rope elements were rotated, or why they were not."""
        width = self.D - self.split
        if width < 2 or width % 2:
            return f"{width} rope elements make no pairs"
        return rotation_of(self.geometry, width)

    def positions(self, b: int) -> Array:
        """The position of each query token of request b [T]."""
        positions: Array = self.lens[b] - self.T + np.arange(self.T)
        return positions

    def used(self, b: int) -> int:
        """Pages that request b uses."""
        return -(-int(self.lens[b]) // self.block)

    def plan(self, b: int) -> Plan:
        """The right plan of request b; the same object for as long as its state is kept."""
        return self.state(b)[1].plan

    def _plan(self, b: int) -> Plan:
        return Plan(
            b=b,
            t=np.arange(self.T),
            tokens=self.T,
            q_latent=np.ascontiguousarray(self.q[b, ..., : self.split]),
            q_rope=np.ascontiguousarray(self.q[b, ..., self.split :]),
            length=int(self.lens[b]),
            lanes=np.arange(self.lens[b]),
            table=self.table[b],
            block=self.block,
            page_stride=self.memory.stride,
            row_stride=self.memory.row_bytes,
            causal=self.causal,
            scale=self.scale,
            unit=self.unit,
            empty_lse=self.empty_lse,
            empty_out=0.0,
            head_dim_v=self.V,
            address=plan.page_address,
            sees=plan.sees,
            score=plan.scaled,
            mask=plan.skip,
            join=joins.exact,
            log_sum=plan.log_sum,
            parts=self.owned if self.shards > 1 else None,
            keeps_parts=self.shards > 1,
            up=self.up,
        )

    def owned(self, p: Plan) -> Parts:
        """The rank of each lane of a sharded case: the one that owns its token."""
        assert isinstance(self.case, PagedCase)
        size = -(-int(self.lens[p.b]) // self.shards)
        rank = p.lanes % self.shards if self.case.shard_layout == "interleaved" else p.lanes // max(size, 1)
        return Parts(np.minimum(rank, self.shards - 1), self.shards)

    def state(self, b: int) -> tuple[Rows, State]:
        """The rows of request b and the state of its right plan, kept for the next mutant while there is room."""
        if b in self._kept:
            return self._kept[b]
        if self._last is not None and self._last[1].plan.b == b:
            return self._last
        right = self._plan(b)
        rows = Rows(self.memory, right.address(right, right.lanes))
        self._last = rows, evaluate(right, rows)
        room = self._room - rows.data.nbytes - self._last[1].nbytes
        if room >= 0:
            self._kept[b], self._room = self._last, room
        return self._last

    def evaluate(self, plans: Iterable[Plan]) -> Results:
        """The results of plans that cover every query token of every request."""
        out = np.empty((self.B, self.T, self.H, self.V if self.up is None else self.up.shape[1]))
        lse = np.empty((self.B, self.T, self.H))
        partial_out = np.empty((self.shards, *out.shape)) if self.shards > 1 else None
        partial_lse = np.empty((self.shards, *lse.shape))
        for p in plans:
            rows, base = self.state(p.b)
            state = evaluate(p, rows, base)
            out[p.b, p.t], lse[p.b, p.t] = state.out, state.lse
            if partial_out is not None:
                partial_out[:, p.b, p.t], partial_lse[:, p.b, p.t] = state.partials()
        results = {"out": out, "lse": lse}
        if partial_out is not None:
            results |= {"partial_out": partial_out, "partial_lse": partial_lse}
        return results

    def shape(self, results: Results) -> Results:
        """Results in the shapes of the case: without the axes it has not, without an lse where its form has none."""
        if not self.paged:
            return {"out": results["out"][0]}
        assert isinstance(self.case, PagedCase)
        if self.case.q.ndim == 4:
            return results
        axis = {"out": 1, "lse": 1, "partial_out": 2, "partial_lse": 2}
        return {name: value.squeeze(axis[name]) for name, value in results.items()}


def absorb(q_nope: Array, w_uk: Array) -> Array:
    """q_nope [T, H, P] through w_uk [H, P, L]: [T, H, L]."""
    latent: Array = np.matmul(q_nope.swapaxes(0, 1), w_uk).swapaxes(0, 1)
    return latent


def problem_of(case: Case) -> Problem | None:
    """The problem of a case of attention, plain or not. Raises InputError for a case that is not valid."""
    if isinstance(case, PagedCase) and case.extensions():
        from .listed import Listed

        return Listed(case)
    return Problem(case) if isinstance(case, (PagedCase, DenseCase)) else None


def attention_of(case: Case) -> bool:
    return isinstance(case, (PagedCase, DenseCase))
