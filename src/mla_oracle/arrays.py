# SPDX-License-Identifier: Apache-2.0
"""Arrays as callers hand them over: taken without a copy, and checked against a shape written in letters.

    axes = Axes()
    q = axes.take("q", q, "B T H D", FLOATS)                # binds B, T, H and D
    seq_lens = axes.take("seq_lens", seq_lens, "B", ("i32",))  # B must agree
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Protocol

import numpy as np

from . import dtypes
from .errors import InputError

Array = np.ndarray[Any, Any]

FLOATS = ("f32", "f16", "bf16")


def as_array(name: str, value: object) -> Array:
    """`value` as a numpy array over the same memory.

    Takes numpy and ml_dtypes arrays, anything on the CPU that speaks DLPack (torch, bf16 included), and
    anything that speaks numpy's array interface. Everything else is refused: lists carry no dtype.
    """
    if isinstance(value, np.ndarray):
        if hasattr(value, "mask"):
            raise InputError(f"{name} is a masked array, expected one whose every element counts")
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        return _from_dlpack(name, value)
    if hasattr(value, "__array_interface__"):
        try:
            return np.asarray(value)
        except Exception as error:
            raise InputError(f"{name} cannot be read through the array interface: {_line(error)}") from error
    raise InputError(
        f"{name} is a {type(value).__name__}, expected an array (numpy, DLPack or the array interface)"
    )


def _from_dlpack(name: str, value: Any) -> Array:
    from ._dlpack import Borrowed

    try:
        device = int(value.__dlpack_device__()[0])
        if device != 1:
            raise InputError(f"{name} is on DLPack device type {device}, expected the CPU (1)")
        if hasattr(value, "is_neg") and value.is_neg():
            raise BufferError("torch exports a negative view without its sign, use tensor.resolve_neg()")
        try:
            capsule = value.__dlpack__(max_version=(1, 0))
        except TypeError:
            capsule = value.__dlpack__()
        borrowed = Borrowed(capsule)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name} cannot be read through DLPack: {_line(error)}") from error
    if math.prod(borrowed.__array_interface__["shape"]) == 0:
        return np.empty(borrowed.__array_interface__["shape"], dtypes.dtype(borrowed.dtype))
    return np.asarray(borrowed).view(dtypes.dtype(borrowed.dtype))


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Shaped(Protocol):
    """What is checked of an array, wherever it lies."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


def dtype_name(name: str, array: Shaped) -> str:
    """The dtype's name in mla_oracle.dtypes; an InputError says which tensor has a dtype that has none."""
    try:
        return dtypes.name_of(array.dtype)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


class Axes(dict[str, int]):
    """The sizes bound so far to the letters of a problem's shapes."""

    def take(self, name: str, value: object, letters: str, allowed: tuple[str, ...]) -> Array:
        """`value` as an array whose axes are `letters`; a letter seen before must have the same size."""
        array = as_array(name, value)
        self.check(name, array, letters, allowed)
        return array

    def check(self, name: str, array: Shaped, letters: str, allowed: tuple[str, ...]) -> None:
        """Raise InputError unless the axes of `array` are `letters` and its dtype is one of `allowed`."""
        axes = _split(letters)
        if array.ndim != len(axes):
            raise InputError(
                f"{name} has {array.ndim} axes {list(array.shape)}, expected {len(axes)}: [{', '.join(axes)}]"
            )
        kind = dtype_name(name, array)
        if kind not in allowed:
            raise InputError(f"{name} is {kind}, expected {' or '.join(allowed)}")
        for letter, size in zip(axes, array.shape, strict=True):
            if self.setdefault(letter, size) != size:
                raise InputError(
                    f"{name} is {list(array.shape)}, expected [{', '.join(axes)}] with {letter} = {self[letter]}"
                    f" on axis {axes.index(letter)}"
                )


@cache
def _split(letters: str) -> tuple[str, ...]:
    return tuple(letters.split())


def address(array: Array) -> int:
    """Where the first element of `array` is."""
    where: int = array.__array_interface__["data"][0]
    return where


def aligned(array: Array) -> Array:
    """`array`, or a copy of it where its elements lie at addresses that C does not read them from."""
    return array if array.flags.aligned else array.copy()


def bytes_of(name: str, array: Array) -> Array:
    """`array` as bytes with its outer strides; the innermost axis must be contiguous."""
    if array.size == 0:
        return np.empty((*array.shape[:-1], array.shape[-1] * array.itemsize), np.uint8)
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise InputError(
            f"{name} has an innermost stride of {array.strides[-1]} bytes, expected {array.itemsize} (contiguous)"
        )
    if array.shape[-1] == 1:
        array = np.lib.stride_tricks.as_strided(array, strides=(*array.strides[:-1], array.itemsize))
    return array.view(np.uint8)
