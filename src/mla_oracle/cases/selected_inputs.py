# SPDX-License-Identifier: Apache-2.0
"""Which keys the queries of a generated paged case see: lists of indices and biases, as hostile as the recipe allows,
and from these, length, causality and window, the tokens that anybody sees; the rows of all others are unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtypes
from ..arrays import Array
from .draws import normal, permutation, words
from .placement import Pages
from .recipes import PagedRecipe

if TYPE_CHECKING:
    from .paged_inputs import Sizes

TOO_LARGE = 2147480000


@dataclass
class Selection:
    """Tensors of the case, and which tokens [sum(lens)] anybody sees."""

    seen: Array
    extra_seen: Array
    tensors: dict[str, Any] = field(default_factory=dict)


def select(sizes: Sizes, pages: Pages, extra: Pages | None) -> Selection:
    """The selection of every query; `pages` of the main cache, `extra` of the second one."""
    recipe, lens = sizes.recipe, sizes.lens
    if recipe.window is None and recipe.bias is None and recipe.topk is None:
        return Selection(np.repeat(sizes.counts > 0, lens), np.zeros(0, bool))
    extra_lens = np.array(recipe.extra or [0] * len(lens), np.int32)
    chosen = Selection(np.zeros(int(lens.sum()), bool), np.zeros(int(extra_lens.sum()), bool))
    bias = _bias(sizes)
    if bias is not None:
        chosen.tensors["bias"] = sizes.queries(dtypes.round_to(bias, "f32" if recipe.dtype == "e4m3" else recipe.dtype))
    lists = extra_lists = None
    if recipe.topk is not None:
        lists = _lists(sizes, "topk", lens, recipe.topk, pages, recipe.block, chosen)
    if extra is not None:
        width = recipe.extra_topk or recipe.topk or 0
        extra_lists = _lists(sizes, "extra_topk", extra_lens, width, extra, recipe.extra_block, chosen)

    starts, extra_starts = np.cumsum(lens) - lens, np.cumsum(extra_lens) - extra_lens
    for r, b, position in _queries(sizes):
        sees = _in_sight(recipe, position, int(lens[b]))
        if bias is not None:
            shown = bias[r, ..., : lens[b]] > -np.inf  # [n] or [H, n]
            sees &= shown.any(axis=0) if shown.ndim == 2 else shown
        if lists is not None:
            listed = np.zeros(lens[b], bool)
            listed[lists[r]] = True
            sees &= listed
        chosen.seen[starts[b] : starts[b] + lens[b]] |= sees
        if extra_lists is not None:
            chosen.extra_seen[extra_starts[b] + extra_lists[r]] = True
    return chosen


def _queries(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """The row, the request and the position of every query."""
    r = 0
    for b, (count, length) in enumerate(zip(sizes.counts, sizes.lens, strict=True)):
        for t in range(count):
            yield r, b, int(length) - int(count) + t
            r += 1


def _in_sight(recipe: PagedRecipe, position: int, length: int) -> Array:
    """Which tokens [length] causality and window let a query at `position` see."""
    p = np.arange(length)
    sees = np.ones(length, bool)
    if recipe.window is not None:
        left, right = recipe.window[0], recipe.window[-1] if len(recipe.window) > 1 else -1
        sees &= (p >= position - left) | (left < 0)
        sees &= (p <= position + right) | (right < 0)
    sees |= p < recipe.first
    if recipe.causal and recipe.topk_by == "position":
        sees &= p <= position
    return sees


def _bias(sizes: Sizes) -> Array | None:
    """[N, n], or [N, H, n] of "alibi", f32, n the longest length; large numbers past a request's own length."""
    recipe, lens = sizes.recipe, sizes.lens
    if recipe.bias is None:
        return None
    N, n = int(sizes.counts.sum()), int(lens.max(initial=0))
    request = np.repeat(np.arange(len(lens)), sizes.counts)
    p = np.arange(n)
    if recipe.bias == "alibi":
        position = np.array([i for _, _, i in _queries(sizes)], np.int64)
        slope = 2.0 ** (-8.0 * np.arange(1, sizes.heads + 1) / sizes.heads)
        bias = -slope[:, None] * np.abs(position[:, None] - p)[:, None]  # [N, H, n]
        past = np.broadcast_to((p >= lens[request][:, None])[:, None], bias.shape)
    else:
        bias = normal(recipe.seed, "bias", N, n) if recipe.bias == "normal" else np.zeros((N, n))
        share = 4 if recipe.bias == "normal" else 2
        bias[(words(recipe.seed, "bias/hidden", N * n) % np.uint64(share) == 0).reshape(N, n)] = -np.inf
        if recipe.bias == "mask":
            bias[2::3] = -np.inf  # rows that are empty by mask
        past = p >= lens[request][:, None]
    return np.where(past, 1e4, bias).astype(np.float32)


def _lists(
    sizes: Sizes, name: str, lens: Array, width: int, pages: Pages, block: int, chosen: Selection
) -> list[Array]:
    """Draws {name}_indices and {name}_length into `chosen`; returns the positions that each query lists."""
    recipe = sizes.recipe
    N = int(sizes.counts.sum())
    request = np.repeat(np.arange(len(lens)), sizes.counts)
    starts = np.cumsum(lens) - lens
    by_slot = recipe.topk_by == "slot"
    indices = np.full((N, width), -1, np.int64)
    lengths = _lengths(sizes, f"{name}_length", width)
    listed = []
    for r, b in enumerate(request):
        position, outside = _draw(recipe, f"{name}/{r}", int(lens[b]), width, r)
        within = np.arange(width) < (width if lengths is None else lengths[r])
        listed.append(position[within & (position >= 0)])
        index = position
        if by_slot:
            rows = pages.row_of_token[starts[b] : starts[b] + lens[b]]
            index = np.where(position < 0, -1, rows[position] if len(rows) else -1)
        capacity = pages.count * block if by_slot else int(lens[b])
        index = np.where(outside, np.resize([capacity, capacity + 1, TOO_LARGE], width), index)
        indices[r] = np.where(within, index, _garbage(recipe, f"{name}/{r}/beyond", index, width))
    dtype = np.int32 if pages.count * block < 2**31 else np.int64
    chosen.tensors[f"{name}_indices"] = sizes.queries(indices.astype(dtype))
    if lengths is not None:
        of_request = recipe.topk_length == "request" and recipe.ragged is None
        length = _per_request(sizes, f"{name}_length", width) if of_request else sizes.queries(lengths)
        chosen.tensors[f"{name}_length"] = length.astype(np.int32)
    return listed


def _garbage(recipe: PagedRecipe, name: str, index: Array, width: int) -> Array:
    """What lies beyond a topk_length [width]: by turns any number, and indices [width] the list has been drawn with."""
    drawn = words(recipe.seed, name, width)
    return np.where((drawn >> np.uint64(40)) % np.uint64(2) == 0, drawn.astype(np.uint32).view(np.int32), index)


def _draw(recipe: PagedRecipe, name: str, length: int, width: int, row: int) -> tuple[Array, Array]:
    """(positions [width], -1 for none, and which of these are to be indices outside) of one query."""
    position = np.full(width, -1)
    count = min(length, width)
    some = permutation(recipe.seed, name, length)[:count]
    if recipe.duplicates:
        some = np.repeat(some, 2)[:count]
    place = np.arange(width) if recipe.invalid == "none" else permutation(recipe.seed, f"{name}/place", width)
    position[place[:count]] = some
    drawn = words(recipe.seed, f"{name}/holes", width) % np.uint64(16)
    if recipe.invalid != "none":
        position[drawn < 2] = -1
    if recipe.invalid == "rows" and row % 3 == 2:
        position[:] = -1
    outside = (drawn == 15) & (recipe.topk_outside == "skip")
    position[outside] = -1
    return position, outside


def _lengths(sizes: Sizes, name: str, width: int) -> Array | None:
    """How much of its list each query [N] has; None: all of it."""
    recipe = sizes.recipe
    if recipe.topk_length is None:
        return None
    if recipe.topk_length == "request":
        return np.repeat(_per_request(sizes, name, width), sizes.counts)
    return (words(recipe.seed, name, int(sizes.counts.sum())) % np.uint64(width + 1)).astype(np.int64)


def _per_request(sizes: Sizes, name: str, width: int) -> Array:
    return (words(sizes.recipe.seed, name, len(sizes.lens)) % np.uint64(width + 1)).astype(np.int64)
