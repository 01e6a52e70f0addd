# SPDX-License-Identifier: Apache-2.0
"""A paged case that is not plain as plans: one right plan per query row and KV head, over its own list of keys.

To what is written for plain cases such a row is a request of one query token; its keys are places in the list, in the
order the case gives them. `listing` says which keys a row would have under other rules, `keys_of` where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..canonical import Problem as Canonical
from ..canonical import checked
from ..canonical.caches import Cache
from ..canonical.paging import window_of
from ..cases import PagedCase
from . import joins, plan
from .list_steps import biased, in_denominator, joined, list_address
from .memory import ZERO
from .plan import MISSING, Keys, Plan
from .problem import Problem, Results

EXTRA = 1 << 50  # the address of the extra cache
SPACE = 1 << 54  # and of the same caches read in another way
Reader = Callable[[int, Array], Array]  # cache 0 or 1, slots [n] -> [KV, n, D]
Window = tuple[int | None, int | None, int]


class Selection(NamedTuple):
    """What a query row is given to select keys of one cache by, [K] each."""

    entries: Array
    within: Array  # before topk_length
    valid: Array  # within, not negative, and below the capacity
    capacity: int


class Store:
    """Both caches at addresses: slot * KV + head, of the extra cache EXTRA more, read in other ways SPACE more each."""

    def __init__(self, problem: Canonical) -> None:
        self.caches = [cache for cache in (problem.main, problem.extra) if cache is not None]
        self.heads, self.width = problem.main.heads, problem.main.width
        self.block, self.item, self.row_bytes = problem.main.block_size, 1, 1
        self.stride = self.block
        self.readers: list[Reader] = [lambda source, slots: self.caches[source].read(slots)]

    def space(self, reader: Reader) -> int:
        """What to add to addresses that are to be read by `reader`."""
        self.readers.append(reader)
        return (len(self.readers) - 1) * SPACE

    def read(self, addresses: Array, width: int | None = None) -> Array:
        """[n, D]: NaN for what lies outside the caches."""
        found = np.full((len(addresses), self.width), np.nan)
        found[addresses == ZERO] = 0
        held = addresses >= 0
        for space in np.unique(addresses[held] // SPACE):
            for source, cache in enumerate(self.caches):
                first = space * SPACE + source * EXTRA
                count = cache.num_blocks * cache.block_size
                mine = np.flatnonzero((addresses >= first) & (addresses < first + count * self.heads))
                if len(mine):
                    slots, head = np.divmod(addresses[mine] - first, self.heads)
                    rows = self.readers[space](source, slots)
                    found[mine] = rows[head, np.arange(len(mine))]
        return found


class Listed(Problem):
    """N query rows times KV heads as B requests of one query token. Raises InputError for a case that is not valid."""

    listed = True
    case: PagedCase

    def __init__(self, case: PagedCase) -> None:
        self.case = case
        self.canonical = problem = checked(case, "f64")
        self.seen = list(problem.seen)
        self.paged, self.up, self.causal, self.shards = True, None, False, 1
        self.store = self.memory = Store(problem)  # type: ignore[assignment]
        N, self.all_heads, self.D = problem.q.shape
        self.KV = problem.main.heads
        self.H, self.T, self.B, self.rows = self.all_heads // self.KV, 1, N * self.KV, N
        self.q = problem.q.reshape(N * self.KV, 1, self.H, self.D)
        self.starts = problem.queries.starts
        self.request = np.repeat(np.arange(len(self.seen)), np.diff(self.starts))  # [N]
        self.token = np.arange(N) - self.starts[self.request]  # [N]
        counts = [np.diff(seen.starts) for seen in self.seen]
        self.lens = np.repeat(np.concatenate([np.zeros(0, np.int64), *counts]), self.KV)
        self.table = np.zeros((self.B, 1), np.int64)
        self.V, self.block = case.head_dim_v, problem.main.block_size
        self.offset = problem.value.start
        self.split = self.D if self.offset else self.D - self._rope_width()
        self.scale, self.unit, self.empty_lse = problem.scale, problem.lse_unit, problem.empty_lse
        self.window, self.by_slot = window_of(case), case.topk_by == "slot"
        self._kept, self._last, self._room = {}, None, 1 << 28
        self.spaces: dict[str, int] = {}

    def row(self, p: Plan) -> int:
        """The query row of a plan."""
        return p.b // self.KV

    def tokens_of(self, b: int) -> int:
        """Query tokens of request b."""
        return int(self.starts[b + 1] - self.starts[b])

    def length(self, b: int, source: int = 0) -> int:
        """Tokens of request b; by slot the rows of the cache."""
        lens = self.case.extra_seq_lens if source else self.case.seq_lens
        cache = self.store.caches[source]
        return cache.num_blocks * cache.block_size if lens is None else int(lens[b])

    def position(self, n: int) -> int:
        """The position of query row n in its request."""
        b = int(self.request[n])
        return self.length(b) - self.tokens_of(b) + int(self.token[n])

    def selection(self, n: int, source: int = 0) -> Selection | None:
        """The indices of row n; None: all keys are selected."""
        prefix = "extra_" if source else ""
        indices = getattr(self.case, f"{prefix}topk_indices")
        if indices is None:
            return None
        index = self.canonical.queries.flat(indices)[n].astype(np.int64)
        length = getattr(self.case, f"{prefix}topk_length")
        within = np.ones(len(index), bool)
        if length is not None:
            of_request = len(self.canonical.queries.axes.split()) > length.ndim
            within = np.arange(len(index)) < int(length[self.request[n]] if of_request else length.reshape(-1)[n])
        capacity = self.length(int(self.request[n]), source)
        return Selection(index, within, within & (index >= 0) & (index < capacity), capacity)

    def candidates(self, n: int) -> tuple[Array, Array]:
        """Places [K] of the main cache that row n might have, and which of them its selection names."""
        chosen = self.selection(n)
        if chosen is not None:
            return chosen.entries, chosen.valid
        capacity = self.length(int(self.request[n]))
        return np.arange(capacity), np.ones(capacity, bool)

    def sight(
        self,
        n: int,
        place: Array,
        *,
        position: int | None = None,
        window: Window | None = None,
        causal: bool | None = None,
        biased: bool = True,
    ) -> Array:
        """bool [K]: which places causality, window and bias let row n see, by other rules where they are given."""
        seen: Array = np.ones(len(place), bool)
        if self.by_slot:
            return seen
        at = self.position(n) if position is None else position
        causal = self.case.causal if causal is None else causal
        seen = _in_window(place[None], np.array([at]), causal, self.window if window is None else window)[0]
        bias = self.canonical.bias
        if biased and bias is not None:
            known = (place >= 0) & (place < bias.shape[2])
            seen &= ~known | (bias[n][:, np.where(known, place, 0)] > -np.inf).any(0)
        return seen

    def slots(
        self, b: int, place: Array, source: int = 0, block: int | None = None, by_slot: bool | None = None
    ) -> Array:
        """Where places lie in the cache, through the table of request b; -1 outside. `block`: rows of a page."""
        cache: Cache = self.store.caches[source]
        table = self.case.extra_block_table if source else self.case.block_table
        size = cache.block_size if block is None else block
        if table is None or (self.by_slot if by_slot is None else by_slot):
            slot = place // size * cache.block_size + place % size
        else:
            column = place // size
            known = (place >= 0) & (column < table.shape[1])
            page = table[b][np.where(known, column, 0)].astype(np.int64) if table.shape[1] else np.zeros_like(place)
            known &= (page >= 0) & (page < cache.num_blocks)
            slot = np.where(known, page * size + place % size, -1)
        inside = (place >= 0) & (slot >= 0) & (slot < cache.num_blocks * cache.block_size)
        return np.where(inside, slot, -1)

    def keys_of(self, p: Plan, place: Array, slot: Array, source: int = 0) -> Keys:
        """The keys of a plan at places and slots of one cache."""
        n, g = divmod(p.b, self.KV)
        address = np.where(slot < 0, MISSING, source * EXTRA + slot * self.KV + g)
        bias = np.zeros((self.H, len(place)))
        if source == 0 and self.canonical.bias is not None:
            held = np.broadcast_to(self.canonical.bias[n], (self.all_heads, self.canonical.bias.shape[2]))
            known = (place >= 0) & (place < held.shape[1])
            bias[:, known] = held[g * self.H : (g + 1) * self.H][:, place[known]]
        return Keys(address, place, np.full(len(place), source), bias)

    def main_keys(self, p: Plan, place: Array) -> Keys:
        """The keys of a plan at these places of its own request, in the main cache."""
        return self.keys_of(p, place, self.slots(int(self.request[self.row(p)]), place))

    def _plan(self, b: int) -> Plan:
        n, g = divmod(b, self.KV)
        request = int(self.request[n])
        seen = self.seen[request]
        mine = slice(*seen.starts[self.token[n] : self.token[n] + 2])
        place, slot, source = seen.position[mine], seen.slot[mine], seen.source[mine]
        heads = slice(g * self.H, (g + 1) * self.H)
        made = Plan(
            b=b,
            t=np.arange(1),
            tokens=1,
            q_latent=np.ascontiguousarray(self.q[b, ..., : self.split]),
            q_rope=np.ascontiguousarray(self.q[b, ..., self.split :]),
            length=len(place),
            lanes=np.arange(len(place)),
            table=self.table[b],
            block=self.block,
            page_stride=self.block,
            row_stride=1,
            causal=False,
            scale=self.scale,
            unit=self.unit,
            empty_lse=self.empty_lse,
            empty_out=0.0,
            head_dim_v=self.V,
            address=list_address,
            sees=plan.sees,
            score=biased,
            mask=plan.skip,
            join=joins.exact,
            log_sum=plan.log_sum,
            value_columns=self.offset + np.arange(self.V) if self.offset else None,
            softcap=self.canonical.softcap,
            sinks=None if self.case.sinks is None else self.canonical.sinks[heads],
            sinks_in_lse=self.case.sinks_in_lse,
            add_sinks=in_denominator,
            out_factor=self.canonical.output_scale,
        )
        parts = [self.keys_of(made, place[source == s], slot[source == s], s) for s in range(len(self.store.caches))]
        return replace(made, keys=joined(*parts))

    def shape(self, results: Results) -> Results:
        """[N KV, 1, H / KV, ...] as the case has it; an LSE with its axes in the order of out's rows."""
        rows = self.case.q.shape[:-1]
        if len(results["lse"]) != self.B:  # of some rows alone
            rows = (len(results["lse"]), self.H)
        return {name: x.reshape(*rows, *x.shape[3:]) for name, x in results.items()}


def _in_window(place: Array, at: Array, causal: bool, window: tuple[int | None, int | None, int]) -> Array:
    """bool [n, K]: which of the positions [n, K] queries at positions [n] see."""
    left, right, first = window
    i = at[:, None]
    if left is None and right is None:
        return place <= i if causal else np.ones(place.shape, bool)
    inside = np.ones(place.shape, bool)
    if left is not None:
        inside &= place >= i - left
    if right is not None:
        inside &= place <= i + right
    inside |= place < first
    return inside & (place <= i) if causal else inside
