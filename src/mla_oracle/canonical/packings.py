# SPDX-License-Identifier: Apache-2.0
"""Where the fast tier finds the rows of a cache, and how it reads them: addresses, and a Packing for packed rows.

    places = places_of(cache, head)         None: this cache is read by caches.Cache.read alone
    places.regions()                        where the row at an offset of a block lies

A format that is named here is read as it is used, by the same rule and to the same bits as mla_oracle.formats reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..fast.listed import CODES, STORED_BF16, Packing
from ..formats import get
from ..formats.codes import exponents, rounded, table
from ..formats.format import E8M0, times
from ..formats.memory import pages_of
from ..formats.nvfp4 import PERMUTED
from ..formats.per_tensor import ROPE, FlashInferGrouped, PerTensor
from .caches import Cache

RULES = {"f32": 0, "f32_bf16": 0, "bf16": 1, "exponent": 2, "e8m0_rz": 3}
BF16_READERS = ("f32_bf16", "bf16", "exponent", "e8m0_rz", "exp2", "guarded", "shift", "f16_bf16")


class Region(NamedTuple):
    """Rows of one kind: the row at `offset` of a block is at `start` + block * `block` + offset * `row`."""

    start: int
    block: int
    row: int

    def at(self, slots: Array, block_size: int) -> Array:
        """The addresses of the rows at slots, block * block_size + offset."""
        blocks, offsets = np.divmod(slots, block_size)
        found: Array = self.start + blocks * self.block + offsets * self.row
        return found


@dataclass(frozen=True)
class Places:
    """The rows of a cache in memory; `factor` is that of every number, which scores and values are multiplied by."""

    region: Region
    row_bytes: int
    elsewhere: Region | None = None
    dtype: int = STORED_BF16  # of dense rows, reference._common.Stored
    packing: Packing | None = None
    factor: float = 1.0
    held: object = None  # what `elsewhere` is a region of, if not of the cache

    def parts(self) -> list[Region]:
        """Of the rows, and of what lies elsewhere."""
        return [self.region] if self.elsewhere is None else [self.region, self.elsewhere]

    def regions(self) -> Array:
        """[1 or 2, 3] i64"""
        return np.array(self.parts())


def places_of(cache: Cache, head: int) -> Places | None:
    """The places of the rows of one KV head, None where the fast tier does not read them itself."""
    if cache.tensors is None:
        return _dense(cache, head)
    form = get(cache.format)
    reader = form.reader_of(cache.reader)
    if isinstance(form, FlashInferGrouped):
        return _grouped(form, cache, reader)
    if isinstance(form, PerTensor):
        return _per_tensor(form, cache, reader)
    make = _PACKED.get(form.name)
    return None if make is None else make(cache, reader)


def _dense(cache: Cache, head: int) -> Places | None:
    parts = [part[:, :, head] for part in cache.parts]
    kinds = {dtypes.name_of(part.dtype) for part in parts}
    if len(kinds) > 1 or not kinds <= set(dtypes.STORED) or any(_gapped(part) for part in parts):
        return None
    kind = dtypes.STORED.index(kinds.pop())
    elsewhere = _region(parts[1]) if len(parts) > 1 else None
    return Places(_region(parts[0]), parts[0].shape[2] * parts[0].itemsize, elsewhere, kind)


def _per_tensor(form: PerTensor, cache: Cache, reader: str) -> Places | None:
    assert cache.tensors is not None
    rows, split = form.arrays(cache.tensors)
    scale, own = form.scales(cache.tensors, rows)
    rope = scale if own is None else own
    folds = reader == "fold" and not scale.ndim and not rope.ndim and rope == scale
    if reader == "fold" and not folds:
        if cache.precision == "f64":
            return None
        reader = "f32"  # as what `formats.read` rounds
    if _gapped(rows) or (split is not None and _gapped(split)):
        return None
    if scale.ndim:
        return _token_scales(form, rows, split, scale, own, reader)
    if rope.ndim:
        return None
    columns = rows.shape[2] if split is not None or own is None else rows.shape[2] - ROPE
    packing = Packing(
        table(form.element)[:, None],
        group=columns,
        groups=1,
        to_bf16=reader in BF16_READERS,
        rest=columns if split is None else 0,
        rest_apart=split is not None,
        rest_dtype=CODES,
        exact_in_bf16=folds or reader in BF16_READERS,
    )
    elsewhere = None if split is None else _region(split)
    if folds:
        packing = packing._replace(rest_numbers=table(form.element))
        return Places(_region(rows), rows.shape[2], elsewhere, packing=packing, factor=float(scale))
    numbers, factor = _products(form, rope, reader)
    packing = packing._replace(rest_numbers=numbers, rest_factor=factor)
    numbers, factor = _products(form, scale, reader)
    packing = packing._replace(numbers=numbers[:, None], factor=factor)
    return Places(_region(rows), rows.shape[2], elsewhere, packing=packing)


def _token_scales(
    form: PerTensor, rows: Array, split: Array | None, scale: Array, rope: Array | None, reader: str
) -> Places | None:
    """Of a scale a token [blocks, rows], where the rope has none or is in the row with one scale for all."""
    if split is not None or reader == "f32_f16" or (rope is not None and rope.ndim):
        return None
    columns = rows.shape[2] if rope is None else rows.shape[2] - ROPE
    packing = Packing(
        table(form.element)[:, None],
        group=columns,
        groups=1,
        scale_bytes=4,
        scales_apart=True,
        rule=RULES[reader],
        **_rounding(reader),
        rest=columns,
        rest_dtype=CODES,
        rest_numbers=table(form.element),
        rest_factor=1.0 if rope is None else _factor(rope, reader),
    )
    return Places(_region(rows), rows.shape[2], _region(scale), packing=packing, held=scale)


def _products(form: PerTensor, scale: Array, reader: str) -> tuple[Array, float]:
    """What the codes stand for [256], and what that is multiplied by before it is rounded."""
    if reader == "f32_f16":  # there is no such rounding in a Packing
        return times(table(form.element), np.atleast_1d(scale), reader), 1.0
    return table(form.element), _factor(scale, reader)


def _grouped(form: FlashInferGrouped, cache: Cache, reader: str) -> Places | None:
    """Scales and rope lie in two places, so they are laid side by side: a copy of 80 bytes a row."""
    assert cache.tensors is not None
    rows, rope = form.arrays(cache.tensors)
    groups, kpe = form.scales(cache.tensors, rows)
    if _gapped(rows):
        return None
    assert rope is not None and kpe is not None
    beside = np.concatenate([np.ascontiguousarray(groups).view(np.uint8), rope], axis=-1)
    packing = Packing(
        table(form.element)[:, None],
        group=128,
        groups=4,
        step=128,
        scale_bytes=4,
        scale_at=_steps(0, 4, 4),
        scales_apart=True,
        rule=RULES[reader],
        **_rounding(reader),
        rest=16,
        rest_apart=True,
        rest_dtype=CODES,
        rest_numbers=times(table(form.element), np.atleast_1d(kpe), "bf16"),
    )
    return Places(_region(rows), 512, _region(beside), packing=packing, held=beside)


def _factor(scale: Array, reader: str) -> float:
    return float(rounded(np.atleast_1d(scale), "bf16")[0] if reader == "bf16" else scale)


def _rows(cache: Cache) -> Array:
    """[num_blocks, block_size, bytes] u8 of a format whose rows stand alone."""
    assert cache.tensors is not None
    rows = cache.tensors["kv_cache"]
    return (rows[:, :, 0] if rows.ndim == 4 else rows).view(np.uint8)


def _ds_mla(cache: Cache, reader: str) -> Places | None:
    packing = Packing(
        table("e4m3")[:, None],
        group=128,
        groups=4,
        step=128,
        scale_bytes=4,
        scale_at=_steps(512, 4, 4),
        rule=RULES[reader],
        **_rounding(reader),
        rest=528,
    )
    return _alone(cache, packing)


def _aiter(cache: Cache, reader: str) -> Places | None:
    assert cache.tensors is not None
    rope = cache.tensors["kpe_cache"]
    rope = rope[:, :, 0] if rope.ndim == 4 else rope
    packing = Packing(
        table("e4m3")[:, None],
        group=32,
        groups=14,
        step=32,
        scales=_e8m0(reader),
        scale_bytes=1,
        scale_at=_steps(448, 1, 14),
        **_rounding(reader),
        rest_apart=True,
    )
    return None if _gapped(rope) else _alone(cache, packing, _region(rope))


def _nvfp4(cache: Cache, reader: str) -> Places | None:
    packing = Packing(
        _pairs(),
        group=16,
        groups=32,
        step=8,
        scales=table("e4m3"),
        scale_bytes=1,
        scale_at=(320 + PERMUTED).astype(np.int32),
        **_rounding(reader),
        rest=256,
        rest_dtype=CODES,
        rest_numbers=table("e4m3"),
    )
    return _alone(cache, packing)


def _nvfp4_sglang(cache: Cache, reader: str) -> Places | None:
    assert cache.tensors is not None
    packing = Packing(
        _pairs(),
        group=16,
        groups=32,
        step=8,
        scales=table("e4m3"),
        scale_bytes=1,
        scale_at=_steps(256, 1, 32),
        factor=float(np.asarray(cache.tensors["kv_scale"]).reshape(())),
        **_rounding(reader),
        rest=288,
    )
    return _alone(cache, packing)


def _q8_0(cache: Cache, reader: str) -> Places | None:
    groups = cache.width // 32
    packing = Packing(
        table("i8")[:, None],
        group=32,
        groups=groups,
        first=2,
        step=34,
        scale_bytes=2,
        scale_at=_steps(0, 34, groups),
    )
    return _alone(cache, packing)


def _q8_kv(cache: Cache, reader: str) -> Places | None:
    return _alone(cache, Packing(table("i8")[:, None], group=cache.width, groups=1, first=8, scale_bytes=4))


def _model1(cache: Cache, reader: str) -> Places:
    packing = Packing(
        table("e4m3")[:, None],
        group=64,
        groups=7,
        step=64,
        scales=_e8m0(reader),
        scale_bytes=1,
        scale_at=_steps(0, 1, 7),
        scales_apart=True,
        **_rounding(reader),
        rest=448,
    )
    return _paged(cache, packing, data=576, scales=8)


def _v41(cache: Cache, reader: str) -> Places:
    packing = Packing(
        table("e4m3")[:, None],
        group=32,
        groups=16,
        step=32,
        scales=_e8m0(reader),
        scale_bytes=1,
        scale_at=_steps(0, 1, 16),
        scales_apart=True,
        **_rounding(reader),
    )
    return _paged(cache, packing, data=512, scales=16)


def _v41_fp4(cache: Cache, reader: str) -> Places:
    packing = Packing(
        _pairs(),
        group=16,
        groups=32,
        step=8,
        scales=table("e4m3"),
        scale_bytes=1,
        scale_at=_steps(0, 1, 32),
        scales_apart=True,
        **_rounding(reader),
    )
    return _paged(cache, packing, data=256, scales=32)


_PACKED: dict[str, Callable[[Cache, str], Places | None]] = {
    "fp8_ds_mla": _ds_mla,
    "aiter_v4": _aiter,
    "model1": _model1,
    "v4.1": _v41,
    "v4.1_fp4": _v41_fp4,
    "nvfp4_ds_mla": _nvfp4,
    "nvfp4_sglang": _nvfp4_sglang,
    "q8_0": _q8_0,
    "q8_KV": _q8_kv,
}


def _alone(cache: Cache, packing: Packing, elsewhere: Region | None = None) -> Places:
    rows = _rows(cache)
    return Places(_region(rows), rows.shape[2], elsewhere, packing=packing)


def _paged(cache: Cache, packing: Packing, data: int, scales: int) -> Places:
    """Of pages of two regions (formats/pages.py): data rows, then scale rows."""
    assert cache.tensors is not None
    pages, rows = pages_of("kv_cache", cache.tensors["kv_cache"], cache.block_size, data + scales)
    start, step = pages.ctypes.data, pages.strides[0]
    elsewhere = Region(start + rows * data, step, scales)
    return Places(Region(start, step, data), data, elsewhere, packing=packing)


def _rounding(reader: str) -> dict[str, Any]:
    to_bf16 = reader in (*BF16_READERS, *E8M0)
    return {"to_bf16": to_bf16, "exact_in_bf16": to_bf16}


def _e8m0(reader: str) -> Array:
    return exponents(np.arange(256, dtype=np.uint8), *E8M0[reader])


def _pairs() -> Array:
    """[256, 2]: the two e2m1 of a byte, the low nibble first."""
    codes = np.arange(256)
    return np.ascontiguousarray(table("e2m1")[np.stack([codes & 15, codes >> 4], axis=1)])


def _steps(first: int, step: int, count: int) -> Array:
    return (first + step * np.arange(count)).astype(np.int32)


def _gapped(rows: Array) -> bool:
    return rows.shape[-1] > 1 and rows.strides[-1] != rows.itemsize


def _region(rows: Array) -> Region:
    return Region(rows.ctypes.data, rows.strides[0], rows.strides[1])
