# SPDX-License-Identifier: Apache-2.0
"""Wrong ways to read a cache format, by name: the rows that a kernel with a known bug takes from the same bytes.

    misreadings("model1")                                     the names that say something of this format
    misread("scale-neighbour", "model1", tensors, blocks, offsets, block_size=64)     [n, D] f32, as `formats.read`

Each is one function from the codes and scales of the rows (or, where the addresses are wrong, from the tensors) to
their values; its docstring is the formula, with the public bug where there is one. To add one, write it and list it in
KINDS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from . import check, fetch, get
from .codes import exponent_bits, exponents
from .format import Array, Format, Parts, Tensors
from .memory import check_slots, pages_of
from .nvfp4 import PERMUTED
from .pages import Pages
from .tile_rows import DsMla, bf16_values

F32 = np.float32


@dataclass(frozen=True)
class Rows:
    """The rows asked for: the format, the cache, the slots and what the format itself finds there."""

    form: Format
    tensors: dict[str, Any]
    blocks: Array
    offsets: Array
    block_size: int
    parts: Parts
    reader: str

    def values(self, **changed: Any) -> Array:
        """The values of the parts, some of them replaced."""
        return self.form.values(dataclasses.replace(self.parts, **changed), self.reader)

    def factors(self) -> Array:
        """The scale of every column that has one, [n, C] f32."""
        scales = self.form.scales_of(self.parts, self.reader)
        count = self.parts.codes.shape[1]
        if scales.shape[1] not in (1, count):
            scales = np.repeat(scales, count // scales.shape[1], axis=1)
        return np.broadcast_to(scales, self.parts.codes.shape)


def scale_neighbour(rows: Rows) -> Array:
    """Tile t takes the scale of tile t + 1, the last that of the first."""
    return rows.values(scales=np.roll(rows.parts.scales, -1, axis=1))


def scale_first(rows: Rows) -> Array:
    """Every tile takes the scale of tile 0."""
    return rows.values(scales=np.repeat(rows.parts.scales[:, :1], rows.parts.scales.shape[1], axis=1))


def scale_twice(rows: Rows) -> Array:
    """code * scale * scale (vllm-xpu-kernels 475: stored x * s for x / s)."""
    return _on_columns(rows, lambda row, factors: row * factors)


def scale_ignored(rows: Rows) -> Array:
    """The code alone."""
    return _on_columns(rows, lambda row, factors: row / factors)


def scale_divided(rows: Rows) -> Array:
    """code / scale (vLLM 36297: kernel and test shared the inverted scale)."""
    return _on_columns(rows, lambda row, factors: row / factors / factors)


def scale_exponent(rows: Rows) -> Array:
    """code * 2^floor(log2 scale): one sided, by up to 2 (vLLM 54563); nothing where scales are powers of two."""
    scales = np.ascontiguousarray(rows.parts.scales)
    return rows.values(scales=exponents(exponent_bits(scales), 2.0**-127, np.nan))


def scale_to_nearest_power(rows: Rows) -> Array:
    """code * 2^round(log2 scale) (FlashMLA 184)."""
    with np.errstate(all="ignore"):
        return rows.values(scales=np.exp2(np.rint(np.log2(rows.parts.scales))).astype(F32))


def scale_at_least_2_to_minus_13(rows: Rows) -> Array:
    """max(scale, 2^-13): the least scale of one writer asked of the rows of another, whose least is 2^-22."""
    if rows.parts.scales.dtype == np.uint8:
        return rows.values(scales=np.maximum(rows.parts.scales, 127 - 13))
    return rows.values(scales=np.maximum(rows.parts.scales, F32(2.0**-13)))


def scale_one_power_off(rows: Rows) -> Array:
    """2^(code - 128): the bias of e8m0 off by one."""
    return rows.values(scales=rows.parts.scales - (rows.parts.scales > 0))


def rope_scaled(rows: Rows) -> Array:
    """The rope, which has no scale, is multiplied by that of tile 0."""
    assert rows.parts.rope is not None
    return rows.values(rope=rows.parts.rope * rows.factors()[:, :1])


def rope_with_latent_scale(rows: Rows) -> Array:
    """The rope takes the scale of the latent, not its own."""
    tensors = rows.tensors | {"kpe_scale": rows.tensors["kv_scale"]}
    return rows.form.values(rows.form.fetch(tensors, rows.blocks, rows.offsets, rows.block_size), rows.reader)


def outer_scale_missing(rows: Rows) -> Array:
    """The scale of the layer is left out."""
    return rows.values(outer=F32(1))


def nibbles_swapped(rows: Rows) -> Array:
    """The even column in the high nibble."""
    pairs = rows.parts.codes.reshape(len(rows.parts.codes), rows.parts.codes.shape[1] // 2, 2)
    return rows.values(codes=pairs[..., ::-1].reshape(rows.parts.codes.shape))


def scales_unpermuted(rows: Rows) -> Array:
    """Byte s holds the scale of tile s."""
    linear = np.empty_like(rows.parts.scales)
    linear[:, PERMUTED] = rows.parts.scales
    return rows.values(scales=linear)


def scales_column_by_column(rows: Rows) -> Array:
    """The scales of a page lie tile by tile, [G, block_size], not token by token."""
    if isinstance(rows.form, Pages):
        pages, size = pages_of("kv_cache", rows.tensors["kv_cache"], rows.block_size, rows.form.page)
        region = pages[:, size * rows.form.data_bytes :]
        tiles = np.arange(rows.parts.scales.shape[1])
        return rows.values(scales=region[rows.blocks[:, None], tiles * size + rows.offsets[:, None]])
    page = np.asarray(rows.tensors["ckv_scale"])[rows.blocks]  # [n, block_size, G]
    flat = page.reshape(len(page), page.shape[1] * page.shape[2])
    tiles = np.arange(page.shape[2])
    return rows.values(scales=np.take_along_axis(flat, tiles * page.shape[1] + rows.offsets[:, None], axis=1))


def regions_as_rows(rows: Rows) -> Array:
    """A page is rows of data and scales, one after the other: token r at r * (a + b), its scales behind its data."""
    form = rows.form
    assert isinstance(form, Pages)
    pages, size = pages_of("kv_cache", rows.tensors["kv_cache"], rows.block_size, form.page)
    whole = form.region(pages, 0, size, form.page)[rows.blocks, rows.offsets]
    return form.values(form.parts(whole[:, : form.data_bytes], whole[:, form.data_bytes :]), rows.reader)


def scales_of_the_slot_before(rows: Rows) -> Array:
    """Region B begins a scale row too early: token 0 takes the last bytes of region A."""
    form = rows.form
    assert isinstance(form, Pages)
    pages, size = pages_of("kv_cache", rows.tensors["kv_cache"], rows.block_size, form.page)
    early = form.region(pages, size * form.data_bytes - form.scale_bytes, size, form.scale_bytes)
    return rows.values(scales=early[rows.blocks, rows.offsets][:, : rows.parts.scales.shape[1]])


def packed_as_plain(rows: Rows) -> Array:
    """Bytes 0 .. 575 of the record are taken for 576 e4m3 (vLLM 48611)."""
    form = rows.form
    assert isinstance(form, DsMla)
    data = form.cache(rows.tensors).view(np.uint8)[rows.blocks, rows.offsets]
    return form.values(Parts(data[:, :576], "e4m3", np.ones((1, 1), F32)), "f32")


def fn_and_fnuz(rows: Rows) -> Array:
    """e4m3fn read as e4m3fnuz, or the other way: half or twice, and NaN where the other has a number."""
    return rows.values(element="e4m3" if rows.parts.element == "e4m3fnuz" else "e4m3fnuz")


def e4m3_and_e5m2(rows: Rows) -> Array:
    """One read as the other."""
    return rows.values(element="e4m3" if rows.parts.element == "e5m2" else "e5m2")


def d_as_bf16(rows: Rows) -> Array:
    """The f16 of a block taken for bf16."""
    n = len(rows.parts.scales)
    return rows.values(scales=bf16_values(np.ascontiguousarray(rows.parts.scales).view(np.uint8).reshape(n, -1)))


def quants_unsigned(rows: Rows) -> Array:
    """The i8 of a block taken for u8: 256 d too much where negative."""
    return rows.values() + np.where(rows.parts.codes > 127, 256 * rows.factors(), F32(0))


def quants_uncentred(rows: Rows) -> Array:
    """The six bits are taken as they are, 0 .. 63: 32 d too much."""
    found: Array = rows.values() + 32 * rows.factors()
    return found


def _on_columns(rows: Rows, change: Callable[[Array, Array], Array]) -> Array:
    """`change` of the columns that have a scale, the others as they are."""
    values = rows.values().astype(np.float64)
    factors = rows.factors().astype(np.float64)
    count = factors.shape[1]
    with np.errstate(all="ignore"):
        return np.concatenate([change(values[:, :count], factors), values[:, count:]], axis=1)


PER_TENSOR = ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2", "flashinfer_fp8")
F32_TILES = ("fp8_ds_mla", "flashinfer_fp8_grouped")
E8M0_TILES = ("model1", "v4.1", "aiter_v4")
FP4 = ("v4.1_fp4", "nvfp4_ds_mla", "nvfp4_sglang")
PAGED = ("model1", "v4.1", "v4.1_fp4")
TILED = (*F32_TILES, *E8M0_TILES, *FP4, "q8_0", "q6_0")
SCALED = (*PER_TENSOR, *TILED, "q8_KV")
KINDS: dict[str, tuple[Callable[[Rows], Array], tuple[str, ...]]] = {
    "scale-neighbour": (scale_neighbour, TILED),
    "scale-first": (scale_first, TILED),
    "scale-twice": (scale_twice, SCALED),
    "scale-ignored": (scale_ignored, SCALED),
    "scale-divided": (scale_divided, SCALED),
    "scale-exponent": (scale_exponent, (*PER_TENSOR, *F32_TILES)),
    "scale-nearest-power": (scale_to_nearest_power, (*PER_TENSOR, *F32_TILES)),
    "scale-clamped": (scale_at_least_2_to_minus_13, (*F32_TILES, "model1")),
    "scale-bias": (scale_one_power_off, E8M0_TILES),
    "scales-transposed": (scales_column_by_column, (*PAGED, "flashinfer_fp8_grouped")),
    "scales-unpermuted": (scales_unpermuted, ("nvfp4_ds_mla",)),
    "scales-early": (scales_of_the_slot_before, PAGED),
    "regions-as-rows": (regions_as_rows, PAGED),
    "rope-scaled": (rope_scaled, ("fp8_ds_mla", "model1", "aiter_v4", "nvfp4_ds_mla", "nvfp4_sglang")),
    "rope-latent-scale": (rope_with_latent_scale, ("flashinfer_fp8",)),
    "outer-scale-missing": (outer_scale_missing, ("nvfp4_sglang",)),
    "nibbles-swapped": (nibbles_swapped, FP4),
    "packed-as-plain": (packed_as_plain, ("fp8_ds_mla",)),
    "fn-fnuz": (fn_and_fnuz, ("fp8_e4m3", "fp8_e4m3fnuz", "flashinfer_fp8", *F32_TILES, *E8M0_TILES)),
    "e4m3-e5m2": (e4m3_and_e5m2, ("fp8_e4m3", "fp8_e5m2", "flashinfer_fp8", *F32_TILES, *E8M0_TILES)),
    "d-as-bf16": (d_as_bf16, ("q8_0", "q6_0")),
    "quants-unsigned": (quants_unsigned, ("q8_0", "q8_KV")),
    "quants-uncentred": (quants_uncentred, ("q6_0",)),
}
NAMES = tuple(KINDS)


def misreadings(name: str) -> tuple[str, ...]:
    """The misreadings that say something of the format `name`."""
    get(name)
    return tuple(how for how, (_, names) in KINDS.items() if name in names)


def misread(
    how: str,
    name: str,
    tensors: Tensors,
    blocks: Array,
    offsets: Array,
    *,
    block_size: int | None = None,
    reader: str | None = None,
) -> Array:
    """[n, D] f32: the rows as a kernel with the bug `how` takes them; the arguments are those of `formats.read`."""
    if how not in misreadings(name):
        raise InputError(f"misreading is {how!r}, expected one of {' '.join(misreadings(name))} for format {name}")
    form = get(name)
    num_blocks, size, _ = check(name, tensors, block_size=block_size)
    blocks, offsets = check_slots(blocks, offsets, num_blocks, size)
    parts = fetch(name, tensors, blocks, offsets, block_size=block_size)
    rows = Rows(form, dict(tensors), blocks, offsets, size, parts, form.reader_of(reader))
    with np.errstate(all="ignore"):
        return KINDS[how][0](rows).astype(F32, copy=False)
