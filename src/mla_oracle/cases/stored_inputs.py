# SPDX-License-Identifier: Apache-2.0
"""What of a generated paged case is stored, and as what.

Queries in their dtype; rows as they are, split or in a format; a second cache in pages of its own; NaN or numbers in
the rows that nobody reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..errors import InputError
from .draws import empty, normal, permutation
from .placement import Pages, place_pages
from .recipes import PagedRecipe
from .selected_inputs import Selection

if TYPE_CHECKING:
    from .paged_inputs import Sizes


def stored_queries(recipe: PagedRecipe, q: Array) -> Array:
    """q [N, H, D] as it is stored: what q_scale multiplies. Raises InputError where its dtype does not hold that."""
    kind = recipe.q_dtype or recipe.dtype
    if recipe.q_scale is None:
        return dtypes.round_to(q, kind, saturate=kind == "e4m3")
    with np.errstate(all="ignore"):
        scale = np.float32(recipe.q_scale)
        stored = dtypes.round_to(q / scale, kind, saturate=kind == "e4m3")
    if not (0 < scale < np.inf and np.isfinite(stored.astype(np.float32)).all()):
        raise InputError(f"case id {str(recipe)!r} has q_scale={recipe.q_scale!r}, expected one by which q / q_scale "
                         f"is finite in {kind}")  # fmt: skip
    return stored


def poison(recipe: PagedRecipe, name: str, rows: Array, unread: Array) -> None:
    """NaN, or numbers, in the rows [slots, columns] that are unread [slots]."""
    rows[unread] = np.nan
    if recipe.unread == "numbers":
        empty_rows = np.isnan(rows).all(axis=1)
        rows[empty_rows] = normal(recipe.seed, name, int(empty_rows.sum()), rows.shape[1])


def stored_cache(recipe: PagedRecipe, kv: Array) -> dict[str, Any]:
    """The tensors of the cache of rows kv [pages, block, D] in the recipe's dtype: as they are, split, or quantised."""
    if recipe.kpe:
        cut = kv.shape[-1] - recipe.kpe
        return {"kv_cache": kv[..., :cut], "kpe_cache": kv[..., cut:]}
    return {"kv_cache": kv} if recipe.format is None else _quantized(recipe, kv, recipe.format)


def _quantized(recipe: PagedRecipe, kv: Array, name: str) -> dict[str, Any]:
    """The tensors that the format `name` has for kv; the recipe's writer and reader are of its main cache."""
    from .. import formats

    try:
        writer = recipe.writer if name == recipe.format else None
        formats.get(recipe.format).reader_of(recipe.reader)
        tensors: dict[str, Any] = formats.quantize(name, kv.astype(np.float32), writer=writer)
    except InputError as error:
        raise InputError(f"case id {str(recipe)!r}: {error}") from None
    return tensors


def extra_pages(sizes: Sizes) -> Pages | None:
    recipe = sizes.recipe
    if recipe.extra is None:
        return None
    lens = np.array(recipe.extra, np.int32)
    return place_pages(lens, recipe.extra_block, "shuffled", lambda n: permutation(recipe.seed, "extra_pages", n))


def extra_cache(sizes: Sizes, pages: Pages | None, chosen: Selection, by_slot: bool) -> dict[str, Any]:
    """The tensors of the second cache, in its own format or that of the first one."""
    recipe = sizes.recipe
    if pages is None or recipe.extra is None:
        return {}
    K, D = recipe.kv_heads, sizes.row
    kv = empty(pages.count, recipe.extra_block, *([K] if K > 1 else []), D)
    kv[:] = np.nan
    rows = kv.reshape(-1, K * D)
    rows[pages.row_of_token] = normal(recipe.seed, "extra_kv_cache", len(pages.row_of_token), K * D)
    unread = pages.unread_rows.copy()
    unread[pages.row_of_token[~chosen.extra_seen]] = True
    poison(recipe, "extra_unread", rows, unread)
    kv = dtypes.round_to(kv, recipe.dtype, saturate=recipe.dtype == "e4m3")
    form = recipe.extra_format or recipe.format
    stored = {"kv_cache": kv} if form is None else _quantized(recipe, kv, form)
    for name in sorted(stored.keys() - {"kv_cache", "kv_scale"}):
        raise InputError(f"case id {str(recipe)!r} has extra in format {form}, whose {name} is of one cache")
    tensors = {f"extra_{name}": array for name, array in stored.items()}
    if not by_slot:
        tensors |= {"extra_block_table": pages.table(None), "extra_seq_lens": np.array(recipe.extra, np.int32)}
    return tensors
