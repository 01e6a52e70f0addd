# SPDX-License-Identifier: Apache-2.0
"""The caches of a paged case as numbers: dense rows, joined or split, of one or more KV heads, or a format's bytes.

    cache = main_cache(case, "f64")
    cache.read(slots)                   [KV, n, D]: slot = block * block_size + offset; no other row is touched
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import dtypes
from ..arrays import Array, Axes
from ..cases import PagedCase
from ..checks import number_type, widen
from ..errors import InputError
from ..geometry import show

SCALES = ("kv_scale", "kpe_scale", "ckv_scale")
HOLDS = {  # a dtype and those whose numbers it holds, narrowest first
    "e4m3": {"e4m3"},
    "bf16": {"e4m3", "bf16"},
    "f16": {"e4m3", "f16"},
    "f32": {"e4m3", "bf16", "f16", "f32"},
}


@dataclass(frozen=True)
class Cache:
    """num_blocks blocks of block_size rows [D]. A format's rows are of one KV head."""

    num_blocks: int
    block_size: int
    heads: int
    width: int
    precision: str
    parts: tuple[Array, ...] = ()  # dense: [num_blocks, block_size, KV, .], a row is one after the other
    tensors: dict[str, Array] | None = None  # of a format
    format: str | None = None
    reader: str | None = None

    def read(self, slots: Array) -> Array:
        """The rows at `slots` [n] in the number type of the precision, [KV, n, D] contiguous."""
        real, _ = number_type(self.precision)
        blocks, offsets = np.divmod(slots, max(1, self.block_size))
        if self.tensors is not None:
            from .. import formats

            read = formats.exact if self.precision == "f64" else formats.read
            where = (blocks, offsets)
            found = read(self.format, self.tensors, *where, block_size=self.block_size, reader=self.reader)
            return np.ascontiguousarray(found)[None]
        rows = [widen(part[blocks, offsets], real) for part in self.parts]  # [n, KV, .]
        return np.ascontiguousarray(np.concatenate(rows, axis=-1).swapaxes(0, 1))


def main_cache(case: PagedCase, precision: str) -> Cache:
    """kv_cache, with kpe_cache beside it. Raises InputError."""
    if case.cache_format is None and case.cache_reader is not None:
        raise InputError(f"cache_reader is {show(case.cache_reader)}, expected None without cache_format")
    for convention in ("cache_format", "cache_reader"):
        if not isinstance(getattr(case, convention), (str, type(None))):
            raise InputError(f"{convention} is {show(getattr(case, convention))}, expected a name or None")
    names = ("kpe_cache", *SCALES)
    beside = {name: getattr(case, name) for name in names if getattr(case, name) is not None}
    return _cache("kv_cache", case.kv_cache, beside, precision, case.cache_format, case.cache_reader)


def extra_cache(case: PagedCase, precision: str, main: Cache) -> Cache | None:
    """extra_kv_cache, whose rows are those of the main cache in form. Raises InputError."""
    if case.extra_kv_cache is None:
        for name in ("extra_kv_scale", "extra_cache_format"):
            if getattr(case, name) is not None:
                raise InputError(f"{name} is given, expected None without extra_kv_cache")
        return None
    beside = {} if case.extra_kv_scale is None else {"kv_scale": case.extra_kv_scale}
    form = case.cache_format, case.cache_reader
    if case.extra_cache_format is not None:
        form = case.extra_cache_format, None
    extra = _cache("extra_kv_cache", case.extra_kv_cache, beside, precision, *form)
    if extra.width != main.width:
        raise InputError(f"extra_kv_cache has rows of {extra.width} elements, expected {main.width} as the main cache")
    if extra.heads != main.heads:
        raise InputError(f"extra_kv_cache has {extra.heads} KV heads, expected {main.heads} as the main cache")
    return extra


def _cache(
    name: str, array: Array, beside: dict[str, Array], precision: str, form: str | None, reader: str | None
) -> Cache:
    prefix = name.removesuffix("kv_cache")
    if form is not None:
        from .. import formats

        tensors = {"kv_cache": array, **beside}
        try:
            formats.get(form).reader_of(reader)
            num_blocks, block_size, width = formats.check(form, tensors)
        except InputError as error:
            raise InputError(f"{prefix}{error}" if str(error).startswith("kv_") else str(error)) from None
        return Cache(num_blocks, _rows(name, block_size), 1, width, precision, (), tensors, form, reader)
    for scale in SCALES:
        if scale in beside:
            raise InputError(f"{prefix}{scale} is given, expected None without cache_format")
    allowed = (*number_type(precision)[1], "e4m3")
    heads = "KV " if np.ndim(array) == 4 else ""
    axes = Axes()
    parts = [axes.take(name, array, f"num_blocks block_size {heads}D", allowed)]
    if "kpe_cache" in beside:
        parts.append(axes.take("kpe_cache", beside["kpe_cache"], f"num_blocks block_size {heads}R", allowed))
    whole = tuple(part if heads else part[:, :, None] for part in parts)
    width = axes["D"] + axes.get("R", 0)
    if heads and axes["KV"] == 0:
        raise InputError(f"{name} has 0 KV heads, expected 1 or more")
    return Cache(axes["num_blocks"], _rows(name, axes["block_size"]), axes.get("KV", 1), width, precision, whole)


def _rows(name: str, block_size: int) -> int:
    if block_size == 0:
        raise InputError(f"{name} has block_size 0, expected 1 or more")
    return block_size


def held_as(case: PagedCase) -> str:
    """The narrowest dtype that holds every number of the case's rows, as the readers of their formats make them."""
    form = case.cache_format, case.cache_reader
    names = _dtypes(*form, case.kv_cache, case.kpe_cache)
    if case.extra_kv_cache is not None:
        own = case.extra_cache_format
        names |= _dtypes(*(form if own is None else (own, None)), case.extra_kv_cache)
    return next((name for name, held in HOLDS.items() if names <= held), "f64")


def _dtypes(form: str | None, reader: str | None, *tensors: Array | None) -> set[str]:
    """The dtypes of the numbers in one cache."""
    if form is None:
        return {dtypes.name_of(tensor.dtype) for tensor in tensors if tensor is not None}
    from .. import formats

    of = formats.get(form)
    return {of.reader_roundings[of.reader_of(reader)]}
