# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several forms take; each names the argument, its value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .arrays import FLOATS, Array, aligned
from .dtypes import LARGEST
from .errors import InputError
from .geometry import show

WIDE_FLOATS = (*FLOATS, "f64")


def number_type(precision: str) -> tuple[Any, tuple[str, ...]]:
    if choice("precision", precision, ("f32", "f64")) == "f32":
        return np.float32, FLOATS
    return np.float64, WIDE_FLOATS


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} is {show(value)}, expected {' or '.join(choices)}")
    return value


def widen(array: Array, real: Any) -> Array:
    """`array` in the number type `real`, aligned: itself where it is that already, or lies on a GPU."""
    if not isinstance(array, np.ndarray):
        return array
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return aligned(array.astype(real, copy=False))


def number(name: str, value: object) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise InputError(f"{name} is {show(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name} is {show(value)}, expected a number") from None


def positive_scale(softmax_scale: object, precision: str) -> float:
    return positive("softmax_scale", softmax_scale, precision)


def positive(name: str, value: object, precision: str) -> float:
    """`value`, positive and finite in the number type of `precision`, rounded to it."""
    scale = number(name, value)
    if precision == "f32" and abs(scale) <= LARGEST["f32"]:
        scale = float(np.float32(scale))
    elif precision == "f32":
        scale = math.inf
    if not 0 < scale < math.inf:
        raise InputError(f"{name} is {value}, expected a positive finite number")
    return scale


def value_width(head_dim_v: object, width: int) -> int:
    if isinstance(head_dim_v, bool) or not isinstance(head_dim_v, (int, np.integer)):
        raise InputError(f"head_dim_v is {show(head_dim_v)}, expected an integer")
    if not 1 <= head_dim_v <= width:
        raise InputError(
            f"head_dim_v is {show(int(head_dim_v))}, expected 1 to {width}, the width of a kv_cache row"
        )
    return int(head_dim_v)


@contextmanager
def arguments_named(**names: str) -> Iterator[None]:
    """An InputError raised inside names arguments by names[...]: `with arguments_named(indptr="kv_indptr")`."""
    try:
        yield
    except InputError as error:
        import re

        text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise InputError(text) from None


def thread_count(threads: object) -> int | None:
    if threads is None:
        return None
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024:
        raise InputError(f"threads is {show(threads)}, expected 1 to 1024, or None")
    return threads
