# SPDX-License-Identifier: Apache-2.0
"""What kernels run on: a GPU (gpu.device.Device) or the interpreter (ptx.Interpreter), behind the same few calls.

    x = machine.upload(array)                               # a copy of a numpy array
    y = machine.empty((n,), np.float32)                     # holds nothing yet
    kernel = machine.kernel("paged.cu", "paged_decode_bf16")
    machine.launch(kernel, (blocks, 1, 1), (256, 1, 1), smem, x, y, np.int32(n), np.int64(stride))
    result = machine.download(y)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from mla_oracle.arrays import Array

Dim = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array in a machine's memory.

    `pointer` is the address of element [0, 0, ...]; `strides` are in bytes and may be negative or 0. `owner` is
    whatever keeps the memory alive: it is let go with the last buffer that names it.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    owner: object = None


class Kernel(Protocol):
    """A compiled kernel of one machine."""

    @property
    def file(self) -> str: ...

    @property
    def name(self) -> str: ...


class Machine(Protocol):
    """Memory, and kernels that run on it."""

    @property
    def arch(self) -> str:
        """What kernels are compiled for: "sm_90"."""

    def upload(self, array: Array) -> Buffer:
        """A copy of `array` with the same strides, gaps between its elements included."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """Contiguous memory that nothing has been written to."""

    def download(self, buffer: Buffer) -> Array:
        """A copy of `buffer` with the same strides, after everything launched before."""

    def kernel(self, file: str, name: str, **defines: int) -> Kernel:
        """The kernel `name` of cuda/`file`, compiled once with these macros and kept."""

    def launch(
        self, kernel: Kernel, grid: Dim, block: Dim, smem: int, *args: Buffer | np.generic | None
    ) -> None:
        """Run `kernel` with `smem` bytes of dynamic shared memory.

        `grid` and `block` are (x, y, z). An argument is a Buffer (its pointer is passed), a numpy scalar of the
        parameter's own width (np.int32, np.int64, np.float32), or None, a null pointer. Python's numbers have no
        width and are refused, like another number of arguments or another width than the kernel declares.
        """


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """The bytes an array touches, [low, high) counted from its element [0, 0, ...]; low is 0 or less."""
    if 0 in shape:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of a row-major array."""
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(size, 1)
    return tuple(reversed(strides))
