# SPDX-License-Identifier: Apache-2.0
"""Paged recipe -> case: rows and queries of a family, laid out in pages; the keys that queries see come from
selected_inputs.py, what is stored from stored_inputs.py.

Slots nobody may read hold NaN, table entries past a request's length an id that exists nowhere, unless `unread` says
numbers.

Families of inputs, for unit-normal rows k and queries q:
    normal    as they are                       peaked    q x 8: one key takes nearly all the weight
    flat      q = 0: lse = log(visible)         position  flat, and every value is a code of its position
    onehot    head h reads one element of k     tailed    q and k cubed: rare large scores
    rising    the score grows with every token, so that each moves the maximum (as far as the dtype tells them apart)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .. import _generators, dtypes
from ..arrays import Array
from ..errors import InputError
from . import ABSENT, PagedCase
from .draws import empty, normal, permutation
from .extensions import require_plain
from .placement import SPARE_ENTRIES, count_pages, place_pages
from .recipes import PagedRecipe
from .selected_inputs import select
from .stored_inputs import extra_cache, extra_pages, poison, stored_cache, stored_queries


@dataclass(frozen=True)
class Sizes:
    """What a recipe asks for, in numbers. N queries are B requests of T tokens, or as many as `counts` has of each."""

    recipe: PagedRecipe

    @cached_property
    def heads(self) -> int:
        return self.recipe.size("heads", lambda g: g.num_heads)

    @cached_property
    def row(self) -> int:
        return self.recipe.size("row", lambda g: g.latent_dim)

    @cached_property
    def value(self) -> int:
        return self.recipe.size("value", lambda g: g.kv_lora_rank)

    @cached_property
    def scale(self) -> float:
        geometry = self.recipe.preset()
        if self.recipe.scale is not None:
            return self.recipe.scale
        if geometry is None:
            raise InputError(f"case id {str(self.recipe)!r} has neither scale nor geometry, expected one of them")
        return geometry.softmax_scale

    @cached_property
    def lens(self) -> Array:
        return np.array(self.recipe.lens, np.int32)  # [B]

    @cached_property
    def counts(self) -> Array:
        """Query tokens of each request [B]."""
        if self.recipe.ragged is not None:
            return np.array(self.recipe.ragged, np.int64)
        return np.full(len(self.lens), self.recipe.tokens or 1)

    def queries(self, rows: Array) -> Array:
        """rows [N, ...] as the axes of q are: [B, T, ...], or [B, ...], or [N, ...]."""
        if self.recipe.tokens is None:
            return rows
        return rows.reshape(len(self.lens), self.recipe.tokens, *rows.shape[1:])

    def check(self) -> None:
        recipe, here = self.recipe, f"case id {str(self.recipe)!r}"
        recipe.check()
        H, D, V = self.heads, self.row, self.value
        self.scale  # noqa: B018
        for name, value, most, of in (
            ("value", V, D, "row"), ("value_offset", recipe.value_offset, D - V, "row - value"),
            ("kpe", recipe.kpe, D - 1, "row - 1"),
        ):
            if value > most:
                raise InputError(f"{here} has {name}={value}, expected at most {of}={most}")
        if H % recipe.kv_heads:
            raise InputError(f"{here} has kv_heads={recipe.kv_heads}, expected a number that divides heads={H}")
        for field in ("ragged", "extra"):
            given = getattr(recipe, field)
            if given is not None and len(given) != len(self.lens):
                raise InputError(f"{here} has {len(given)} of {field}, expected {len(self.lens)}, as lens")
        right = -1 if recipe.window is None or len(recipe.window) == 1 else recipe.window[1]
        if recipe.causal and right > 0:
            raise InputError(f"{here} has a window of {right} to the right, expected 0: it is causal")


def paged(recipe: PagedRecipe) -> PagedCase:
    """The case of `recipe`. Raises InputError; UnsupportedError for shards or pages that only plain cases have."""
    sizes = Sizes(recipe)
    sizes.check()
    lens, H, D, K = sizes.lens, sizes.heads, sizes.row, recipe.kv_heads
    N = int(sizes.counts.sum())
    kv = empty(count_pages(lens, recipe.block, recipe.pages), recipe.block, *([K] if K > 1 else []), D)
    pages = place_pages(lens, recipe.block, recipe.pages, lambda n: permutation(recipe.seed, "pages", n))
    if recipe.inputs == "lcg":
        q = empty(N, H, D)
        _generators.lcg(recipe.seed & 0xFFFFFFFF, kv.reshape(-1))
        _generators.lcg((recipe.seed + 7919) & 0xFFFFFFFF, q.reshape(-1))
    else:
        q, rows = _rows(sizes, N)
        kv[:] = np.nan
        kv.reshape(-1, K * D)[pages.row_of_token] = rows
    extra = extra_pages(sizes)
    chosen = select(sizes, pages, extra)
    unread = pages.unread_rows.copy()
    unread[pages.row_of_token[~chosen.seen]] = True
    poison(recipe, "unread", kv.reshape(-1, K * D), unread)

    kv = dtypes.round_to(kv, recipe.dtype, saturate=recipe.dtype == "e4m3")
    page_bytes = recipe.block * K * D * kv.itemsize
    ids, num_blocks, stride = pages.apart(page_bytes, recipe.pages)
    by_slot = recipe.topk_by == "slot"
    case = PagedCase(
        id=str(recipe),
        q=sizes.queries(stored_queries(recipe, q)),
        block_table=ABSENT if by_slot else pages.table(ids, spare=0 if recipe.unread == "nan" else SPARE_ENTRIES),
        seq_lens=ABSENT if by_slot else lens,
        page_ids=ids,
        num_blocks=num_blocks,
        block_stride=stride,
        softmax_scale=sizes.scale,
        head_dim_v=sizes.value,
        causal=recipe.causal and not by_slot,
        lse_base=recipe.lse_base,
        empty_lse=recipe.empty_lse,
        shards=recipe.shards,
        shard_layout=recipe.shard_layout,
        topk_by=recipe.topk_by,
        topk_outside=recipe.topk_outside,
        window_left=recipe.window[0] if recipe.window else None,
        window_right=recipe.window[1] if recipe.window and len(recipe.window) > 1 else None,
        window_first=recipe.first,
        softcap=recipe.softcap,
        sinks_in_lse=recipe.sinks_in_lse,
        value_offset=recipe.value_offset,
        q_scale=recipe.q_scale,
        output_scale=recipe.output_scale,
        lse_axes=recipe.lse_axes,
        cache_format=recipe.format,
        cache_reader=recipe.reader,
        extra_cache_format=recipe.extra_format,
        qo_indptr=None if recipe.ragged is None else np.concatenate([[0], np.cumsum(sizes.counts)]).astype(np.int32),
        sinks=_sinks(recipe, H),
        **stored_cache(recipe, kv),
        **extra_cache(sizes, extra, chosen, by_slot),
        **chosen.tensors,
    )
    if recipe.shards > 1:
        require_plain(case, f"shards={recipe.shards}")
    if ids is not None:
        require_plain(case, f"pages={recipe.pages}")
    return case


def _rows(sizes: Sizes, N: int) -> tuple[Array, Array]:
    """q [N, H, D] and the rows of every token in order [sum(lens), KV * D]."""
    recipe, lens, H, D, V = sizes.recipe, sizes.lens, sizes.heads, sizes.row, sizes.value
    q = normal(recipe.seed, "q", N, H, D)
    rows = normal(recipe.seed, "kv_cache", int(lens.sum()), recipe.kv_heads, D)
    position = np.concatenate([np.arange(n) for n in lens] or [np.arange(0)]).astype(np.float32)[:, None]
    match recipe.inputs:
        case "peaked":
            q *= 8
        case "flat":
            q[:] = 0
        case "position":
            q[:] = 0
            code = (position + np.arange(V, dtype=np.float32)) % 251 / 16  # [tokens, V]
            rows[:, :, recipe.value_offset : recipe.value_offset + V] = code[:, None]
        case "onehot":
            q[:] = 0
            head = np.arange(H)
            q[:, head, head * 37 % D] = 4 / sizes.scale
        case "tailed":
            q, rows = q**3 / 4, rows**3 / 4
        case "rising":
            # One direction shared by every query; its coordinate grows by 1/2 in score with every token.
            q[:] = 0
            q[..., D - 1] = 1 / sizes.scale
            rows[:, :, D - 1] = position / 2
    return q, rows.reshape(len(rows), recipe.kv_heads * D)


def _sinks(recipe: PagedRecipe, H: int) -> Array | None:
    """A logit for each head [H]; "infinite": -inf and +inf by turns with numbers."""
    if recipe.sinks is None:
        return None
    sinks = normal(recipe.seed, "sinks", H) * 4
    if recipe.sinks == "infinite":
        sinks[1::3], sinks[2::3] = -np.inf, np.inf
    return sinks
