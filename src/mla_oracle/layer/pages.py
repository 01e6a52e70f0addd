# SPDX-License-Identifier: Apache-2.0
"""The paged form of a layer: rows go into pages by slot_mapping, and attention reads them back through block_table.

    block_table [B, blocks]    where a sequence's rows lie: row i in block i // block_size; entries past its rows may be
                               anything
    slot_mapping [T]           block * block_size + offset of each new row, which block_table must have there too

`Store` says how a row is stored: in a dtype, by append_kv, or in a format, which the pages that append_kv wrote are
quantised to. What it makes of a row is the stage kv_cache; attention is decode's, of absorbed queries. Rows that were
cached before are given as numbers, and stored alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import formats
from ..append import append_kv
from ..arrays import Array
from ..canonical import decode
from ..checks import choice, widen
from ..dtypes import round_to
from ..errors import InputError
from ..geometry import Geometry, check_integer, check_number

DTYPES = ("f32", "bf16", "f16")


@dataclass(frozen=True, kw_only=True)
class Store:
    """Pages of `block_size` rows in a dtype, or in a cache format by one of its writers, read by one of its readers.

    `scale` is kv_scale, for formats of one external scale; None: over all rows of the sequence. Raises InputError.
    """

    block_size: int
    dtype: str | None = None
    format: str | None = None
    writer: str | None = None
    reader: str | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        check_integer("block_size", self.block_size, least=1)
        if (self.dtype is None) == (self.format is None):
            given = "neither cache_dtype nor cache_format is" if self.dtype is None else "both are"
            raise InputError(f"{given} given, expected cache_dtype or cache_format")
        if self.format is None:
            choice("cache_dtype", self.dtype, DTYPES)
            for name, value in (("cache_writer", self.writer), ("cache_reader", self.reader), ("kv_scale", self.scale)):
                if value is not None:
                    raise InputError(f"{name} is {value!r}, expected none without cache_format")
            return
        form = formats.get(self.format)
        form.writer_of(self.writer), form.reader_of(self.reader)
        if self.scale is not None:
            check_number("kv_scale", self.scale, above=0)


class Places(NamedTuple):
    """Where the rows of a sequence lie, its blocks numbered from 0 on."""

    table: Array  # [1, blocks] i32
    slots: Array  # [N] i64


class Pages(NamedTuple):
    """The rows of a sequence as they are stored."""

    tensors: Mapping[str, Array]
    format: str | None
    reader: str | None


def places(store: Store, block_table: Array, slot_mapping: Array, cached: int) -> Places:
    """Of block_table [1, blocks] and slot_mapping [T], after `cached` rows. Raises InputError where they contradict."""
    size, rows = store.block_size, cached + len(slot_mapping)
    used = -(-rows // size)
    if len(block_table) != 1 or block_table.shape[1] < used:
        raise InputError(f"block_table is {list(block_table.shape)}, expected [1, {used}] or more: {rows} rows")
    blocks = block_table[0, :used]
    for i in np.flatnonzero(blocks < 0)[:1]:
        raise InputError(f"block_table[0, {i}] is {blocks[i]}, expected 0 or more")
    _, first, own = np.unique(blocks, return_index=True, return_inverse=True)
    for i in np.flatnonzero(first[own] != np.arange(used))[:1]:
        raise InputError(f"block_table[0, {i}] is {blocks[i]}, as block_table[0, {first[own][i]}] is")
    row = np.arange(rows)
    wanted = blocks[row // size] * size + row % size
    for t in np.flatnonzero(slot_mapping != wanted[cached:])[:1]:
        there = f"{wanted[cached + t]}, where block_table has row {cached + t}"
        raise InputError(f"slot_mapping[{t}] is {slot_mapping[t]}, expected {there}")
    return Places(own.reshape(1, -1).astype(np.int32), own[row // size] * size + row % size)


def written(store: Store, at: Places, rows: Array, cached: int, latent: int) -> Pages:
    """rows [N, L + R] in pages: the `cached` ones, and then the new ones."""
    held = round_to(rows, store.dtype or "f32")
    cache = np.zeros((at.table.size, store.block_size, rows.shape[1]), held.dtype)
    for part in (slice(0, cached), slice(cached, None)):
        append_kv(cache, held[part, :latent], held[part, latent:], at.slots[part])
    if store.format is None:
        return Pages({"kv_cache": cache}, None, None)
    scales = {} if store.scale is None else {"kv_scale": store.scale}
    tensors = formats.quantize(store.format, cache, writer=store.writer, **scales)
    return Pages(tensors, store.format, store.reader)


def as_they_are(at: Places, rows: Array, block_size: int) -> Pages:
    """Rows [N, L + R] that an engine read back, in pages in the dtype that they have."""
    cache = np.zeros((at.table.size * block_size, rows.shape[1]), rows.dtype)
    cache[at.slots] = rows
    return Pages({"kv_cache": cache.reshape(at.table.size, block_size, -1)}, None, None)


def read_back(pages: Pages, at: Places, block_size: int, real: Any) -> Array:
    """[N, L + R] in `real`: the numbers that a kernel multiplies with."""
    blocks, offsets = np.divmod(at.slots, block_size)
    if pages.format is None:
        return widen(pages.tensors["kv_cache"][blocks, offsets], real)
    read = formats.exact if real == np.float64 else formats.read
    return read(pages.format, pages.tensors, blocks, offsets, block_size=block_size, reader=pages.reader)


def attend(pages: Pages, at: Places, geometry: Geometry, q: Array, mask: Array, seen: Array, backend: str) -> Array:
    """[T, H, L] in the number type of q [T, H, L + R]: the latent output over the pages, mask and seen [T, N] bool."""
    beside: dict[str, Any] = {name: tensor for name, tensor in pages.tensors.items() if name != "kv_cache"}
    if pages.format is not None:
        beside |= {"cache_format": pages.format, "cache_reader": pages.reader}
    if not np.array_equal(mask, seen):
        chosen = np.full((1, len(mask), int(mask.sum(axis=1).max())), -1, np.int32)
        for t, row in enumerate(mask):
            tokens = np.flatnonzero(row)
            chosen[0, t, : len(tokens)] = tokens
        beside["topk_indices"] = chosen
    found = decode(
        q[None], pages.tensors["kv_cache"], at.table, np.array([mask.shape[1]], np.int32),
        softmax_scale=geometry.softmax_scale, head_dim_v=geometry.kv_lora_rank,
        precision="f32" if q.dtype == np.float32 else "f64", backend=backend, **beside,
    )  # fmt: skip
    return np.asarray(found.out[0])


def apart(store: Store, at: Places, rows: Array, off: Array, cached: int, latent: int) -> Array:
    """[N, L + R] how far a stored row may be from that of a row off by `off` or less: where it rounds on, else 0.

    Scales are those of the largest elements, off outwards or inwards; twice `off` is for an element off the other way.
    """

    def stored(of: Array) -> Array:
        return read_back(written(store, at, of, cached, latent), at, store.block_size, np.float64)

    held, away = stored(rows), 2 * np.copysign(off, rows)
    found: Array = np.maximum(np.abs(stored(rows + away) - held), np.abs(stored(rows - away) - held))
    return np.where(off > 0, found, 0.0)
