# SPDX-License-Identifier: Apache-2.0
"""Arrays as the kernels take them: the innermost axis contiguous, the other strides in whole elements.

    q = put(machine, q)                                          # a numpy array, on the machine
    q_token, q_head = strides("q", q, "f32", "bf16")             # what a kernel asks for, as np.int64
"""

from __future__ import annotations

import re

import numpy as np

from mla_oracle import dtypes
from mla_oracle.arrays import Array
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.gpu.machine import Buffer, Machine, contiguous

THREADS = 128  # of a block, as in cuda/common.cuh
WIDEST = 4096  # elements of a key or a value: both lie in 48 KiB of shared memory, with one tile's weights
# Shared memory that a block can have, in KiB, by compute capability (CUDA C++ Programming Guide, technical
# specifications), a kilobyte that the system keeps left out; 99 where it is not known.
SMEM = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
MANY = 65535  # the largest second and third axis of a grid


def most_smem(arch: str) -> int:
    """Bytes of shared memory that a block can have on `arch` ("sm_90")."""
    if not (found := re.match(r"sm_(\d{2,3})[af]?$", arch)):
        raise InputError(f"arch is {arch!r}, expected one like sm_90")
    return SMEM.get(int(found[1]), 99) << 10


def put(machine: Machine, array: Array) -> Buffer:
    """A copy of `array` on `machine`; its strides are kept where kernels can follow them."""
    whole = all(stride % array.itemsize == 0 for stride in array.strides)
    if not (whole and array.flags.aligned) or (array.shape[-1] > 1 and array.strides[-1] != array.itemsize):
        array = np.ascontiguousarray(array)
    return machine.upload(array)


def name_of(name: str, buffer: Buffer, *allowed: str) -> str:
    """The dtype of `buffer`, one of `allowed`."""
    kind = dtypes.name_of(buffer.dtype)
    if kind not in allowed:
        raise InputError(f"{name} is {kind}, expected {' or '.join(allowed)}")
    return kind


def strides(name: str, buffer: Buffer, *allowed: str) -> list[np.int64]:
    """The strides of `buffer` in elements, but for the innermost. Raises InputError for what no kernel can follow."""
    name_of(name, buffer, *allowed)
    size = buffer.dtype.itemsize
    if 0 in buffer.shape:
        return [np.int64(0)] * (len(buffer.shape) - 1)
    if buffer.shape[-1] > 1 and buffer.strides[-1] != size:
        raise InputError(
            f"{name} has an innermost stride of {buffer.strides[-1]} bytes, expected {size} (contiguous)"
        )
    for axis, stride in enumerate(buffer.strides[:-1]):
        if stride % size:
            raise InputError(f"{name} has a stride of {stride} bytes on axis {axis}, expected a multiple of {size}")
    if buffer.pointer % size:
        raise InputError(f"{name} begins at address {buffer.pointer:#x}, expected a multiple of {size}")
    return [np.int64(stride // size) for stride in buffer.strides[:-1]]


def packed(name: str, buffer: Buffer, shape: tuple[int, ...], *allowed: str) -> None:
    """Raise InputError unless `buffer` has this shape and is contiguous."""
    name_of(name, buffer, *allowed)
    if buffer.shape != shape:
        raise InputError(f"{name} is {list(buffer.shape)}, expected {list(shape)}")
    wanted = contiguous(shape, buffer.dtype.itemsize)
    for axis, (size, stride) in enumerate(zip(shape, buffer.strides, strict=True)):
        if size > 1 and stride != wanted[axis] and 0 not in shape:
            raise InputError(
                f"{name} has a stride of {stride} bytes on axis {axis}, expected {wanted[axis]} (contiguous)"
            )


def narrow(**sizes: int) -> None:
    """Raise UnsupportedError for a key or value that is too wide for a block's shared memory."""
    for name, size in sizes.items():
        if size > WIDEST:
            raise UnsupportedError(f"{name} is {size}, the CUDA kernels take at most {WIDEST}")


def few(**sizes: int) -> None:
    """Raise UnsupportedError for more heads than an axis of a grid has blocks."""
    for name, size in sizes.items():
        if size > MANY:
            raise UnsupportedError(f"{name} is {size}, the CUDA kernels take at most {MANY}")
