# SPDX-License-Identifier: Apache-2.0
"""What a kernel takes, read from its PTX, and launches checked against it.

The driver checks neither the number nor the width of arguments: it reads whatever lies there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mla_oracle.errors import InputError
from mla_oracle.gpu.machine import Buffer, Dim

Argument = Buffer | np.generic | None

_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(\s*(.*?)\)", re.MULTILINE | re.DOTALL)
_PARAM = re.compile(r"\.param (?:\.align \d+ )?\.[a-z]+(\d+)[^,\[]*(?:\[(\d+)\])?")
_SMEM = re.compile(r"^(?:\.visible )?\.global \.align 4 \.u32 (\w+)_smem(?: = (\d+))?;", re.MULTILINE)


@lru_cache(maxsize=64)
def signatures(ptx: str) -> dict[str, tuple[int, ...]]:
    """The kernels of a PTX text, and the bytes of each of their parameters."""
    return {
        name: tuple(int(bits) // 8 * int(count or 1) for bits, count in _PARAM.findall(params))
        for name, params in _ENTRY.findall(ptx)
    }


@lru_cache(maxsize=64)
def dynamic_smem(ptx: str) -> dict[str, int]:
    """The dynamic shared memory, in bytes, that kernels declare: DYNAMIC_SMEM in cuda/common.cuh."""
    return {name: int(value or 0) for name, value in _SMEM.findall(ptx)}


def pack(kernel: str, widths: Sequence[int], args: Sequence[Argument]) -> list[bytes]:
    """The parameters' bytes. Raises InputError for another number of arguments, or one of another width."""
    if len(args) != len(widths):
        raise InputError(f"{kernel} takes {len(widths)} arguments, {len(args)} given")
    packed = []
    for index, (arg, width) in enumerate(zip(args, widths, strict=True)):
        if not isinstance(arg, Buffer | np.generic | None):
            raise InputError(
                f"argument {index} of {kernel} is a {type(arg).__name__}, expected a Buffer, a numpy scalar or None"
            )
        data = arg.tobytes() if isinstance(arg, np.generic) else _pointer(arg)
        if len(data) != width:
            raise InputError(f"argument {index} of {kernel} is {len(data)} bytes, expected {width}")
        packed.append(data)
    return packed


def check_shape(kernel: str, grid: Dim, block: Dim, smem: int, most_smem: int | None = None) -> None:
    """Raise InputError for a launch that no device takes, or for more shared memory than the kernel declares."""
    for what, dim, limits in (
        ("grid", grid, (2**31 - 1, 65535, 65535)),
        ("block", block, (1024, 1024, 64)),
    ):
        for axis, size, limit in zip("xyz", dim, limits, strict=True):
            if not 1 <= size <= limit:
                raise InputError(f"{what}.{axis} of {kernel} is {size}, expected 1 to {limit}")
    if block[0] * block[1] * block[2] > 1024:
        raise InputError(f"block of {kernel} is {block}, expected 1024 threads or fewer")
    if smem < 0:
        raise InputError(f"dynamic shared memory of {kernel} is {smem} bytes, expected 0 or more")
    if most_smem is not None and smem > most_smem:
        raise InputError(f"dynamic shared memory of {kernel} is {smem} bytes, it declares {most_smem} at most")


def _pointer(arg: Buffer | None) -> bytes:
    return (0 if arg is None else arg.pointer).to_bytes(8, "little")
