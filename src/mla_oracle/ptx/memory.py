# SPDX-License-Identifier: Apache-2.0
"""Device memory of the interpreter: numpy bytes under virtual addresses, far apart and never used twice.

What an uploaded array leaves out between its elements counts as never written, as does all of `empty`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike

from mla_oracle.arrays import Array
from mla_oracle.gpu.machine import Buffer, contiguous, span

_FIRST, _ALIGN, _GAP = 1 << 44, 512, 1 << 20
# struct Piece in _block.pxd
PIECE = np.dtype([(name, np.uint64) for name in ("low", "high", "host", "written")] + [("read_only", np.int64)])


class Allocation:
    """Bytes at `low`; `written`: a byte for each, 0 where nothing was written, or None: all were."""

    def __init__(self, low: int, host: Array, written: Array | None, read_only: bool = False):
        self.low, self.host, self.written, self.read_only = low, host, written, read_only


class Memory:
    def __init__(self) -> None:
        self._pieces: WeakValueDictionary[int, Allocation] = WeakValueDictionary()
        self._next = _FIRST

    def allocate(self, host: Array, written: Array | None, *, read_only: bool = False) -> Allocation:
        allocation = Allocation(self._next, host, written, read_only)
        self._pieces[allocation.low] = allocation
        self._next += -(-(2 * host.nbytes + _GAP) // _ALIGN) * _ALIGN
        return allocation

    def upload(self, array: Array) -> Buffer:
        """A copy, stride for stride; only the elements are touched, so an array over a sparse file is no problem."""
        low, high = span(array.shape, array.strides, array.dtype.itemsize)
        host = np.zeros(high - low, np.uint8)
        view(host, -low, array.shape, array.dtype, array.strides)[...] = array
        written = None
        if array.nbytes < high - low:
            written = np.zeros(high - low, np.uint8)
            shape, strides = (*array.shape, array.dtype.itemsize), (*array.strides, 1)
            view(written, -low, shape, np.dtype(np.uint8), strides)[...] = 1
        owner = self.allocate(host, written)
        return Buffer(owner.low - low, array.shape, array.dtype, array.strides, owner)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
        dtype = np.dtype(dtype)
        strides = contiguous(shape, dtype.itemsize)
        size = span(shape, strides, dtype.itemsize)[1]
        owner = self.allocate(np.full(size, 0xFF, np.uint8), np.zeros(size, np.uint8))
        return Buffer(owner.low, shape, dtype, strides, owner)

    def download(self, buffer: Buffer) -> Array:
        owner: Any = buffer.owner
        low, high = span(buffer.shape, buffer.strides, buffer.dtype.itemsize)
        result = view(np.zeros(high - low, np.uint8), -low, buffer.shape, buffer.dtype, buffer.strides)
        result[...] = view(owner.host, buffer.pointer - owner.low, buffer.shape, buffer.dtype, buffer.strides)
        return result

    def table(self) -> tuple[Array, list[Allocation]]:
        """([n] of PIECE by address, what they point into)."""
        pieces = sorted(self._pieces.values(), key=lambda piece: piece.low)
        table = np.zeros(len(pieces), PIECE)
        for index, piece in enumerate(pieces):
            written = piece.written.ctypes.data if piece.written is not None else 0
            high = piece.low + piece.host.nbytes
            table[index] = (piece.low, high, piece.host.ctypes.data, written, piece.read_only)
        return table, pieces

    def nearest(self, address: int) -> Allocation | None:
        """The allocation that holds `address` or ends closest below it."""
        below = [piece for piece in self._pieces.values() if piece.low <= address]
        return max(below, key=lambda piece: piece.low, default=None)


def view(host: Array, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...]) -> Array:
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.ndarray(shape, dtype, host, offset, strides)
