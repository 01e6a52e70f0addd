# SPDX-License-Identifier: Apache-2.0
"""What a cache format is: tensors in, codes and scales of the rows asked for, values by the rule of a reader; and back.

    fetch    tensors, slots -> Parts       only moves bytes
    values   Parts, reader  -> [n, D]      only computes
    pack     rows, writer   -> tensors

A subclass is one layout; its docstring is the byte map. Readers differ in how they multiply a code by its scale:

    fold        exact: the kernel multiplies codes, and the scale is folded into the softmax scale and the output
    f32         f32(code * scale)
    f32_bf16    bf16(f32(code * scale)), f32_f16 likewise
    bf16        bf16(code * bf16(scale))
    exponent    bf16(code * 2^floor(log2 scale)): the exponent bits of the f32 scale, taken for an e8m0 code
    e8m0_rz     the same by `cvt.rz.satfinite.ue8m0x2.f32`: infinity becomes 2^127, NaN stays

and, where the scale is an e8m0 code, in what codes 0 and 255 are (else 2^(code - 127)); the product is rounded to bf16:

    bf16        0 -> 2^-127, 255 -> NaN: the definition, torch's cast
    exp2        0 -> 2^-127, 255 -> infinity: exp2f(code - 127)
    guarded     0 -> 0, 255 -> NaN: SGLang's CPU kernel
    shift       0 -> 0, 255 -> infinity: the code moved into the exponent bits of an f32
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from .codes import decode, exponent_bits, exponents, rounded, table

Array = np.ndarray[Any, Any]
F32 = np.float32
E8M0 = {"bf16": (2.0**-127, np.nan), "exp2": (2.0**-127, np.inf), "guarded": (0.0, np.nan), "shift": (0.0, np.inf)}
TILE_READERS = ("f32_bf16", "bf16", "f32", "exponent", "e8m0_rz")
EXTERNAL = ("kpe_cache", "kv_scale", "kpe_scale", "ckv_scale")
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """The bytes of n rows, apart but not yet multiplied."""

    codes: Array  # [n, C] u8, one an element; of e2m1 a nibble each
    element: str  # the dtype of a code
    scales: Array  # as stored: f32, f16, or u8 codes; [n, G], or [1, 1] or [1, C] where it is external
    rope: Array | None = None  # [n, R] f32, where it is stored without a scale
    outer: F32 | None = None  # one scale more, of all rows


class Format:
    """One layout. `latent`, `rope`, `width` and `row_bytes` are None where the arrays tell them."""

    name: str
    latent: int | None = None
    rope: int | None = None
    row_bytes: int | None = None
    tensors: tuple[str, ...] = ()  # external tensors it takes, beside kv_cache
    writers: tuple[str, ...]  # the first is the default, of readers too
    readers: tuple[str, ...]

    @property
    def width(self) -> int | None:
        """D, the columns of a row."""
        return None if self.latent is None or self.rope is None else self.latent + self.rope

    @property
    def reader_roundings(self) -> dict[str, str]:
        """The dtype each reader rounds a row's numbers to before it multiplies them with the query.

        To round them to it once more changes nothing; only "fold", which rounds nothing, loses what f32 cannot hold.
        """
        return {reader: _ROUNDING.get(reader, "bf16") for reader in self.readers}

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        """(num_blocks, block_size, D) of the tensors, or an InputError in one line."""
        raise NotImplementedError

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        """The rows at (blocks[i], offsets[i]), which are inside the cache."""
        raise NotImplementedError

    def values(self, parts: Parts, reader: str) -> Array:
        """[n, D] f32, f64 for the reader "fold"."""
        scales = self.scales_of(parts, reader)  # [n, G], or what broadcasts against [n, C]
        if scales.shape == (1, 1):  # one for all rows: multiply the table, then look up
            product = np.take(times(table(parts.element), scales[0], reader), parts.codes, mode="clip")
        else:
            elements = decode(parts.codes, parts.element)  # [n, C]
            if scales.shape[-1] not in (1, elements.shape[-1]):
                groups = scales.shape[-1]
                elements = elements.reshape(len(elements), groups, elements.shape[-1] // groups)
                scales = scales[:, :, None]
            product = times(elements, scales, reader).reshape(parts.codes.shape)
        if parts.rope is None:
            return product
        return np.concatenate([product, parts.rope], axis=1)

    def scales_of(self, parts: Parts, reader: str) -> Array:
        """The stored scales as f32 numbers."""
        return parts.scales

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        """The tensors that `writer` makes of f32 rows [num_blocks, block_size, D]."""
        raise NotImplementedError

    def writer_of(self, writer: str | None) -> str:
        return _choice("writer", writer, self.writers, self.name)

    def reader_of(self, reader: str | None) -> str:
        return _choice("reader", reader, self.readers, self.name)


_ROUNDING = {"fold": "f32", "f32": "f32", "f32_f16": "f16"}


def times(elements: Array, scales: Array, reader: str) -> Array:
    """elements * scales as `reader` multiplies them; f32, f64 for "fold"."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if reader == "fold":
            return elements * scales.astype(np.float64)
        if reader == "bf16":
            scales = rounded(np.ascontiguousarray(scales), "bf16")
        elif reader == "exponent":
            scales = exponents(exponent_bits(scales), 2.0**-127, np.nan)
        elif reader == "e8m0_rz":
            codes = np.where(np.isnan(scales), np.uint8(255), np.minimum(exponent_bits(scales), 254))
            scales = exponents(codes, 2.0**-127, np.nan)
        return rounded(elements * scales, _ROUNDING.get(reader, "bf16"))


def e8m0_scales(codes: Array, reader: str) -> Array:
    """e8m0 codes as f32 numbers, codes 0 and 255 as `reader` takes them."""
    return exponents(codes, *E8M0[reader])


def no_others(name: str, tensors: Tensors, taken: tuple[str, ...]) -> None:
    """Refuse an external tensor that the format has no place for."""
    for other in EXTERNAL:
        if tensors.get(other) is not None and other not in taken:
            raise InputError(f"{other} is given, expected none: a cache of format {name} has no such tensor")


def needed(name: str, tensors: Tensors, tensor: str) -> Any:
    """tensors[tensor], which must be there."""
    value = tensors.get(tensor)
    if value is None:
        raise InputError(f"{tensor} is missing, expected it beside a cache of format {name}")
    return value


def check_width(rows: Array, width: int | None) -> None:
    if width is not None and rows.shape[-1] != width:
        raise InputError(f"rows has {rows.shape[-1]} columns, expected {width}")


def _choice(what: str, value: str | None, known: tuple[str, ...], name: str) -> str:
    if value is None:
        return known[0]
    if value not in known:
        raise InputError(f"{what} is {value!r}, expected one of {' '.join(known)} for format {name}")
    return value
