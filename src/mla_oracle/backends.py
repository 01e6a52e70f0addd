# SPDX-License-Identifier: Apache-2.0
"""Who computes: "strict", "fast", or "auto", which takes fast where the case is large."""

from __future__ import annotations

from .checks import choice
from .errors import InputError

BACKENDS = ("auto", "strict", "fast")

# Multiply-adds from which auto takes fast: a second or two of the strict loops.
LARGE = 1 << 30


def choose(backend: str, multiply_adds: int, isa: str | None = None) -> str:
    """"strict" or "fast" for a case of this size; an `isa` means fast. Raises InputError."""
    choice("backend", backend, BACKENDS)
    if backend == "strict" and isa is not None:
        raise InputError(f"isa is {isa!r}, expected None with backend 'strict'")
    if backend == "auto":
        return "fast" if isa is not None or multiply_adds >= LARGE else "strict"
    return backend
