# SPDX-License-Identifier: Apache-2.0
"""Numbers by a counter-based generator keyed by (seed, name of the tensor): the same on every machine."""

from __future__ import annotations

import math
import os

import numpy as np

from .. import _generators
from ..arrays import Array
from ..errors import InputError

# Half of this machine's memory: the numbers and their stored dtype.
MAX_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def normal(seed: int, name: str, *shape: int) -> Array:
    """Unit normals (sums of twelve 16-bit uniforms, within +-6), f32, for the tensor `name`."""
    out = empty(*shape)
    _generators.normal(_key(seed, name), out.reshape(-1))
    return out


def words(seed: int, name: str, n: int) -> Array:
    """`n` uniform 64-bit words [n] u64 for what is called `name`."""
    drawn = np.empty(n, np.uint64)
    _generators.words(_key(seed, name), 0, drawn)
    return drawn


def permutation(seed: int, name: str, n: int) -> Array:
    """A permutation of range(n)."""
    return np.argsort(words(seed, name, n), kind="stable")


def _key(seed: int, name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def empty(*shape: int) -> Array:
    if math.prod(shape) * 4 > MAX_BYTES:
        raise InputError(f"a tensor of {list(shape)} f32 is too large to generate, expected at most {MAX_BYTES} bytes")
    return np.empty(shape, np.float32)
