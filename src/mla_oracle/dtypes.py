# SPDX-License-Identifier: Apache-2.0
"""Number formats: the oracle's names, their numpy dtypes and safetensors tags, explicit rounding.

To add a format, add it to `_NUMPY` or `_ML_DTYPES`, to `TAGS` if a file can hold it, and to `LARGEST` if
`round_to` can make it. The narrow floats are named after their fields: e4m3 has four bits of exponent and
three of mantissa; e4m3fnuz has another bias, no negative zero and one NaN. ml_dtypes is imported when one of
its formats is first asked for.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InputError

_NUMPY = {
    "f64": "float64", "f32": "float32", "f16": "float16",
    "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8",
    "u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8",
    "bool": "bool",
}
_ML_DTYPES = {
    "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz", "e5m2": "float8_e5m2",
    "e8m0": "float8_e8m0fnu", "e2m1": "float4_e2m1fn",
}
_NAME_OF = {numpy_name: name for name, numpy_name in (_NUMPY | _ML_DTYPES).items()}
_KNOWN = " ".join(_NAME_OF.values())

# Tag of each name in a safetensors header. e2m1 has none: F4 packs two values a byte, in no stated order.
TAGS = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16",
    "e4m3": "F8_E4M3", "e4m3fnuz": "F8_E4M3FNUZ", "e5m2": "F8_E5M2", "e8m0": "F8_E8M0",
    "i64": "I64", "i32": "I32", "i16": "I16", "i8": "I8",
    "u64": "U64", "u32": "U32", "u16": "U16", "u8": "U8",
    "bool": "BOOL",
}

# Largest finite value of each float.
LARGEST = {
    "f64": (2 - 2**-52) * 2.0**1023, "f32": (2 - 2**-23) * 2.0**127,
    "f16": 65504.0, "bf16": (2 - 2**-7) * 2.0**127,
    "e4m3": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0, "e8m0": 2.0**127, "e2m1": 6.0,
}

# How a latent row may be stored; `reference/_common.pxd` numbers them in this order.
STORED = ("f32", "f16", "bf16", "f64")


@cache
def dtype(name: str) -> np.dtype[Any]:
    """The dtype that `name` stands for."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    if name in _ML_DTYPES:
        import ml_dtypes

        narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
        return narrow
    raise InputError(f"dtype is {name!r}, expected one of {_KNOWN}")


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """The name of `dtype`. A byte order other than the machine's has none."""
    name = _NAME_OF.get(dtype.name) if dtype.isnative else None
    if name is None:
        raise InputError(f"dtype is {dtype}, expected one of {_KNOWN} in native byte order")
    return name


def round_to(array: ArrayLike, name: str, *, saturate: bool = False) -> NDArray[Any]:
    """Round an f32 or f64 array to the float `name`: one rounding, to nearest, ties to even.

    What lies beyond the largest finite value, and infinity itself, becomes infinity or, where the format has
    none, NaN; with `saturate` it becomes the largest finite value. NaN stays NaN. The result is a new array
    of the same shape.

    Two formats lack what others have. e2m1 holds neither infinity nor NaN: it always saturates, and NaN is an
    InputError. e8m0 holds powers of two only, so a tie goes to the larger (IEEE 754-2019, 4.3.1) and a value
    below its smallest rounds up to it; zero and negative values are an InputError.
    """
    if name not in LARGEST:
        raise InputError(f"dtype to round to is {name!r}, expected one of {' '.join(LARGEST)}")
    array = np.asarray(array)
    if array.dtype not in (np.float32, np.float64):
        raise InputError(f"dtype of the array to round is {array.dtype}, expected f32 or f64")
    values = np.atleast_1d(array)
    if name == "e8m0":
        _refuse(array, array <= 0, "greater than 0: e8m0 holds powers of two only")
    if name == "e2m1":
        _refuse(array, np.isnan(array), "a number: e2m1 has no NaN")

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if name == "f64":
            values = values.astype(np.float64)
        if saturate:
            values = np.clip(values, -LARGEST[name], LARGEST[name])
        if name == "e8m0":
            rounded = _round_to_power(values)
        elif values.dtype == np.float64 and name not in ("f64", "f32"):
            rounded = _round_to_odd(values).astype(dtype(name))
        else:
            rounded = values.astype(dtype(name))
    return rounded.reshape(array.shape)


def _round_to_odd(values: NDArray[Any]) -> NDArray[Any]:
    # f64 to f32 such that rounding once more, to a format at least two bits narrower, rounds like one step:
    # an inexact result takes the neighbour whose last bit is 1, so it never lands on a tie of that format.
    nearest = values.astype(np.float32)
    back = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    bits -= np.abs(back) > np.abs(values)
    bits |= back != values
    return nearest


def _round_to_power(values: NDArray[Any]) -> NDArray[Any]:
    # f32 or f64 to e8m0. ml_dtypes 0.6 rounds all of (2^-127, 2^-126) up.
    fraction, exponent = np.frexp(values)  # fraction in [1/2, 1)
    codes = np.clip(exponent - (fraction < 0.75) + 127, 0, 255).astype(np.uint8)
    codes[~np.isfinite(values)] = 255
    powers: NDArray[Any] = codes.view(dtype("e8m0"))
    return powers


def _refuse(array: NDArray[Any], bad: NDArray[Any], expected: str) -> None:
    if np.any(bad):
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        raise InputError(f"value at {list(index)} is {array[index]}, expected {expected}")
