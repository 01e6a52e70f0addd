# SPDX-License-Identifier: Apache-2.0
"""Who computes: "strict"; "fast"; "cuda", a GPU; "ptx", the GPU's kernels interpreted; or "auto".

auto takes strict where the case is small and fast where it is large, never cuda or ptx: whoever wants another machine's
answer, or waits for an interpreter, says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import as_array
from .checks import choice
from .errors import InputError, UnsupportedError
from .geometry import show

if TYPE_CHECKING:
    from .gpu.device import Device
    from .gpu.machine import Machine

BACKENDS = ("auto", "strict", "fast", "cuda", "ptx")
KERNELS = ("cuda", "ptx")

# Multiply-adds from which auto takes fast: a second or two of the strict loops.
LARGE = 1 << 30


def choose(backend: str, multiply_adds: int, isa: str | None = None, kernel: str | None = None) -> str:
    """The backend for a case of this size; an `isa` means fast, a `kernel` is cuda's and ptx's. Raises InputError."""
    choice("backend", backend, BACKENDS)
    if backend not in KERNELS and kernel is not None:
        raise InputError(f"kernel is {show(kernel)}, expected None with backend {backend!r}")
    if backend not in ("auto", "fast") and isa is not None:
        raise InputError(f"isa is {isa!r}, expected None with backend {backend!r}")
    if backend == "auto":
        return "fast" if isa is not None or multiply_adds >= LARGE else "strict"
    return backend


def choose_kernels(backend: str) -> str | None:
    """"cuda" or "ptx", or None for the loops of a form that has one tier alone. Raises InputError."""
    choice("backend", backend, tuple(name for name in BACKENDS if name != "fast"))
    return backend if backend in KERNELS else None


def refuse_stream(stream: object) -> None:
    """Raise InputError for a stream, where the arrays are not on a GPU."""
    if stream is not None:
        raise InputError(f"stream is {show(stream)}, expected None without arrays on a GPU and backend 'cuda'")


def place(
    backend: str, precision: str, stream: object, arrays: Mapping[str, object], *movable: str
) -> tuple[Device | None, dict[str, Any]]:
    """The GPU that `arrays` lie on and the arrays there, for backend "cuda"; else None, and numpy arrays.

    If one is on a GPU, those in `movable` alone may be numpy's. Raises InputError, UnsupportedError.
    """
    if backend == "cuda":
        from .gpu import calls

        if calls.any_foreign(*arrays.values()):
            if precision != "f32":
                raise UnsupportedError("arrays on a GPU are computed in precision 'f32'")
            return calls.place(arrays, movable, stream)
    refuse_stream(stream)
    return None, {name: as_array(name, array) for name, array in arrays.items()}


def empty(device: Device | None, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array to be filled on `device`, or of numpy's."""
    return (device or np).empty(shape, dtype)


def machine(
    backend: str, precision: str = "f32", threads: int | None = None, kernel: str | None = None
) -> Machine:
    """What the kernels of `backend` run on: the first GPU, or the interpreter with `threads` threads.

    The interpreter is of sm_80, of sm_90a for the `kernel` "wgmma". Raises UnsupportedError for precision "f64",
    MissingError where a package, a driver or a device is missing.
    """
    if precision != "f32":
        raise UnsupportedError(f"precision is {precision!r}, backend {backend!r} computes in f32")
    if backend != "ptx":
        return _machine(None, None)
    return _machine(threads, "sm_90a" if kernel == "wgmma" else "sm_80")


@lru_cache(maxsize=4)
def _machine(threads: int | None, arch: str | None) -> Machine:
    if arch is None:
        from .gpu.device import Device

        return Device()
    from .ptx import Interpreter

    return Interpreter(arch, threads=threads)
