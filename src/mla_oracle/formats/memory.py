# SPDX-License-Identifier: Apache-2.0
"""The bytes of a cache, taken from an array of any outer strides and any alignment; only the rows asked for are read.

A cache is [num_blocks, block_size, bytes]; engines that keep an axis for the one KV head, [num_blocks, block_size, 1,
bytes], are taken too. The bytes of a row lie next to each other. Everything here refuses in one line that names the
tensor, the number and what was expected.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import as_array
from ..errors import InputError

Array = np.ndarray[Any, Any]
BYTES = ("u8", "i8")


def check_dtype(name: str, array: Array, *expected: str) -> None:
    try:
        found = dtypes.name_of(array.dtype)
    except InputError:
        found = str(array.dtype)
    if found not in expected:
        raise InputError(f"{name} is {found}, expected {_either(expected)}")


def take_rows(name: str, value: object, *expected: str, width: str, multiple: int = 0, exact: int = 0) -> Array:
    """`value` as [num_blocks, block_size, W], W contiguous: `exact` wide, or a positive multiple of `multiple`."""
    array = as_array(name, value)
    check_dtype(name, array, *expected)
    if array.ndim == 4 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 3:
        raise InputError(f"{name} is {list(array.shape)}, expected [num_blocks, block_size, {width}]")
    last = array.shape[2]
    if exact and last != exact:
        raise InputError(f"{name} has {last} bytes a row, expected {exact}: {width}")
    if multiple and (last == 0 or last % multiple):
        raise InputError(f"{name} has {last} {width} a row, expected a multiple of {multiple}")
    check_contiguous(name, array)
    return array


def check_contiguous(name: str, array: Array) -> None:
    step, size = array.strides[-1], array.itemsize
    if array.shape[-1] > 1 and step != size:
        raise InputError(f"{name} has a stride of {step} bytes along its last axis, expected {size}: no gaps in a row")


def pages_of(name: str, value: object, block_size: int | None, row_bytes: int) -> tuple[Array, int]:
    """(pages [num_blocks, page bytes] u8, block_size) of a cache whose pages hold regions that span all of its rows.

    `value` is [num_blocks, block_size, row_bytes] with the rows of a page next to each other, any distance between
    pages; or [num_blocks, page bytes], padding included, where `block_size` tells the rows.
    """
    array = as_array(name, value)
    check_dtype(name, array, *BYTES, "e4m3")
    if array.ndim == 2:
        check_contiguous(name, array)
        rows = array.shape[1] // row_bytes if block_size is None else block_size
        if rows < 1 or array.shape[1] < rows * row_bytes:
            raise InputError(
                f"{name} has {array.shape[1]} bytes a page, expected at least {max(rows, 1) * row_bytes}: "
                f"{max(rows, 1)} rows of {row_bytes}"
            )
        return array.view(np.uint8), rows
    array = take_rows(name, array, *BYTES, "e4m3", width="the bytes of a row", exact=row_bytes)
    num_blocks, rows, _ = array.shape
    if rows > 1 and array.strides[1] != row_bytes:
        raise InputError(
            f"{name} has a row stride of {array.strides[1]} bytes, expected {row_bytes}: no gaps in a page"
        )
    pages = np.lib.stride_tricks.as_strided(
        array.view(np.uint8), (num_blocks, rows * row_bytes), (array.strides[0], 1), writeable=False
    )
    return pages, rows


def check_slots(blocks: object, offsets: object, num_blocks: int, block_size: int) -> tuple[Array, Array]:
    """`blocks` and `offsets` as two [n] integer arrays within a cache of `num_blocks` pages of `block_size` rows."""
    found = []
    for name, value, count in (("blocks", blocks, num_blocks), ("offsets", offsets, block_size)):
        index = as_array(name, value)
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise InputError(f"{name} is {index.dtype} {list(index.shape)}, expected integers [n]")
        outside = np.flatnonzero((index < 0) | (index >= count))
        if outside.size:
            first = int(outside[0])
            raise InputError(f"{name}[{first}] is {index[first]}, expected 0 to {count - 1}")
        found.append(index)
    if found[0].shape != found[1].shape:
        raise InputError(f"offsets is {list(found[1].shape)}, expected {list(found[0].shape)} as blocks")
    return found[0], found[1]


def scale_of(name: str, value: object, rows: tuple[int, ...] | None = None) -> Array:
    """The scale `value`: f32, () where it is one number ([1] or a Python float too), else of shape `rows`.

    One number must be finite and above 0. Of many, only those of the rows that are read count: they are not looked at.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with np.errstate(over="ignore"):
            array: Array = np.asarray(np.float32(value))
    else:
        array = as_array(name, value)
        check_dtype(name, array, "f32")
        if array.shape == (1,):
            array = array.reshape(())
    if array.ndim == 0:
        if not (np.isfinite(array) and array > 0):
            raise InputError(f"{name} is {array}, expected a finite number above 0")
    elif array.shape != rows:
        wanted = "a number or [1]" if rows is None else f"a number, [1] or {list(rows)}"
        raise InputError(f"{name} is {list(array.shape)}, expected {wanted}")
    return array


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
