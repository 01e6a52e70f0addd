# SPDX-License-Identifier: Apache-2.0
"""Arrays on a GPU, handed over without a copy and without waiting for them: torch's, cupy's, and ours to them.

    array = take("q", tensor, stream)    # through DLPack or __cuda_array_interface__
    buffer = device.upload(array)
    cupy.asarray(device.empty(...))      # through __cuda_array_interface__

Nobody's host waits. DLPack's producer makes `stream` wait for what is still being written; for
__cuda_array_interface__, whoever takes the array makes a stream of its own wait for the one that is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_oracle import dtypes
from mla_oracle.errors import InputError
from mla_oracle.gpu import driver
from mla_oracle.gpu.machine import Buffer, contiguous

DLPACK_CUDA = (2, 13)  # device memory, managed memory


@dataclass(frozen=True, eq=False)
class DeviceArray(Buffer):
    """An array on CUDA device `ordinal`. What uses it waits for the stream `after` first, unless that is None.

    Whoever lets go of it has its own stream's uses of it done, or in the order of the stream it came from.
    """

    ordinal: int = 0
    after: int | None = None
    readonly: bool = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.isbuiltin != 1:
            raise AttributeError(f"__cuda_array_interface__ has no name for {self.dtype}")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, self.readonly),
            "strides": self.strides,
            "stream": self.after,
        }

    @property
    def ndim(self) -> int:
        return len(self.shape)


def is_foreign(value: object) -> bool:
    """Whether `value` is an array in CUDA memory."""
    return isinstance(value, DeviceArray) or _dlpack_device(value)[0] in DLPACK_CUDA or _speaks_interface(value)


def device_of(arrays: Mapping[str, object]) -> int | None:
    """The one device that the CUDA arrays among `arrays` lie on, None if there are none. Raises InputError."""
    found: tuple[str, int] | None = None
    for name, value in arrays.items():
        if not is_foreign(value):
            continue
        ordinal = _ordinal(name, value)
        if found is not None and ordinal != found[1]:
            raise InputError(f"{name} is on CUDA device {ordinal}, expected device {found[1]} like {found[0]}")
        found = found or (name, ordinal)
    return found[1] if found else None


def take(name: str, value: Any, stream: int = 1) -> DeviceArray:
    """`value`, an array in CUDA memory, for use on `stream` (1: the default) of its device. Raises InputError."""
    if isinstance(value, DeviceArray):
        return value
    array = _from_dlpack(name, value, stream) if hasattr(value, "__dlpack__") else _from_interface(name, value)
    check_strides(name, array.pointer, array.strides, array.dtype.itemsize)
    return array


def check_strides(name: str, pointer: int, strides: tuple[int, ...], itemsize: int) -> None:
    """Raise InputError for elements at addresses that a kernel cannot read them from."""
    for axis, stride in enumerate(strides):
        if stride % itemsize:
            raise InputError(f"stride {axis} of {name} is {stride} bytes, expected a multiple of {itemsize}")
    if pointer % itemsize:
        raise InputError(f"{name} begins at address {pointer:#x}, expected a multiple of {itemsize}")


def _from_dlpack(name: str, value: Any, stream: int) -> DeviceArray:
    from mla_oracle._dlpack import Borrowed

    try:
        if hasattr(value, "is_neg") and value.is_neg():
            raise BufferError("torch exports a negative view without its sign, use tensor.resolve_neg()")
        try:
            capsule = value.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:
            capsule = value.__dlpack__(stream=stream)
        borrowed = Borrowed(capsule)
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name} cannot be read through DLPack: {line}") from error
    fields = borrowed.__array_interface__
    return DeviceArray(
        pointer=fields["data"][0],
        shape=fields["shape"],
        dtype=dtypes.dtype(borrowed.dtype),
        strides=fields["strides"],
        owner=borrowed,
        ordinal=_dlpack_device(value)[1],
        readonly=fields["data"][1],
    )


def _from_interface(name: str, value: Any) -> DeviceArray:
    fields = value.__cuda_array_interface__
    try:
        shape = tuple(int(size) for size in fields["shape"])
        pointer, readonly = fields["data"]
        dtype = np.dtype(fields["typestr"])
        strides = fields.get("strides")
        after = fields.get("stream")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be read through __cuda_array_interface__: {error!r}") from error
    if fields.get("mask") is not None:
        raise InputError(f"{name} is a masked array, expected one whose every element counts")
    if after == 0:
        raise InputError(f"{name} names stream 0 in __cuda_array_interface__, expected 1, 2 or a stream's handle")
    try:
        dtypes.name_of(dtype)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return DeviceArray(
        pointer=int(pointer or 0),
        shape=shape,
        dtype=dtype,
        strides=contiguous(shape, dtype.itemsize) if strides is None else tuple(int(stride) for stride in strides),
        owner=value,
        ordinal=_ordinal(name, value),
        after=None if after is None else int(after),
        readonly=bool(readonly),
    )


def _ordinal(name: str, value: Any) -> int:
    if isinstance(value, DeviceArray):
        return value.ordinal
    kind, ordinal = _dlpack_device(value)
    if kind in DLPACK_CUDA:
        return ordinal
    pointer = int(value.__cuda_array_interface__["data"][0] or 0)
    return _ordinal_of_pointer(name, pointer) if pointer else 0


def _ordinal_of_pointer(name: str, pointer: int) -> int:
    which = driver.load().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    try:
        return int(driver.call(f"asking where {name} is", "cuPointerGetAttribute", which, pointer))
    except driver.DriverError as error:
        if "CUDA_ERROR_INVALID_VALUE" not in str(error):
            raise
        raise InputError(f"{name} is at address {pointer:#x}, which is not CUDA memory") from None


def _dlpack_device(value: Any) -> tuple[int, int]:
    if not hasattr(value, "__dlpack_device__"):
        return 0, 0
    kind, ordinal = value.__dlpack_device__()
    return int(kind), int(ordinal)


def _speaks_interface(value: object) -> bool:
    return not isinstance(value, np.ndarray) and hasattr(value, "__cuda_array_interface__")
