# SPDX-License-Identifier: Apache-2.0
"""Words for instructions to work on: all kinds of bits, and those at which instructions have rules of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mla_oracle.arrays import Array

# Zeros, infinities, NaNs quiet, signalling and with payloads, the ends of the subnormal and the normal range, 1 and its
# neighbours, the ends of the integers as numbers, the largest f16, e4m3 and bf16.
_SPECIAL = np.array(
    [
        0, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FC12345, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF,
        0x3F800000, 0x3F7FFFFF, 0x3F800001, 0x3F000000, 0x40000000, 0x4F000000, 0x4F800000, 0x4EFFFFFF, 0x477FE000,
        0x477FF000, 0x43E00000, 0x43E80000, 0x7F7F0000, 0x33800000, 0x33000000, 0x3B000000, 0x42FE0000, 0xC2FC0000,
        0xC3150000,
    ],
    np.uint32,
)  # fmt: skip

Words = tuple[Array, Array, Array]


def bits(rng: np.random.Generator, n: int) -> Array:
    return rng.integers(0, 1 << 32, n, np.uint32)


def floats(rng: np.random.Generator, n: int) -> Array:
    """f32: any bits, moderate numbers, those around the middle of two numbers of a narrower format, special ones."""
    words = bits(rng, n)
    kind = rng.integers(0, 8, n)
    exponent = rng.integers(127 - 16, 127 + 16, n, np.uint32) << 23
    moderate = words & 0x807FFFFF | exponent
    tail = 23 - rng.choice(np.array([10, 7, 3, 2], np.uint32), n)
    half = np.uint32(1) << (tail - 1)
    ends = np.stack([0 * half, half, half - 1, half + 1])[rng.integers(0, 4, n), np.arange(n)]
    middle = (moderate >> tail << tail) | ends
    special = rng.choice(_SPECIAL, n) | (words & 0x80000000)
    return np.select([kind < 3, kind < 5, kind < 7], [words, moderate, middle], special)


def halves(rng: np.random.Generator, n: int) -> Array:
    """Every 16 bits in the lower half, in order; any in the upper one."""
    return np.arange(n, dtype=np.uint32) % 65536 | (bits(rng, n) & 0xFFFF0000)


def any_three(rng: np.random.Generator, n: int) -> Words:
    return bits(rng, n), bits(rng, n), bits(rng, n)


def three_floats(rng: np.random.Generator, n: int) -> Words:
    """A sixth of the third cancel the product of the other two but for its last bits."""
    a, b, c = floats(rng, n), floats(rng, n), floats(rng, n)
    with np.errstate(all="ignore"):
        product = -(a.view(np.float32) * b.view(np.float32))
    return a, b, np.where(rng.integers(0, 6, n) == 0, product.view(np.uint32) ^ rng.integers(0, 4, n, np.uint32), c)


def angles(rng: np.random.Generator, n: int) -> Words:
    """Numbers up to pi, where sin and cos promise something, among all others."""
    a = rng.uniform(-np.pi, np.pi, n).astype(np.float32).view(np.uint32)
    return np.where(rng.integers(0, 4, n) == 0, floats(rng, n), a), bits(rng, n), bits(rng, n)


def quotients(rng: np.random.Generator, n: int) -> Words:
    """Divisors from 2^-63 to 2."""
    a, b, _ = three_floats(rng, n)
    return a, b & 0xBFFFFFFF | 0x20000000, bits(rng, n)


def three_halves(rng: np.random.Generator, n: int) -> Words:
    return halves(rng, n), halves(rng, n)[rng.permutation(n)], halves(rng, n)[rng.permutation(n)]


def small_counts(rng: np.random.Generator, n: int) -> Words:
    """Shifts and positions up to 40 and a little beyond a byte, besides any."""
    counts = [np.where(rng.integers(0, 4, n) == 0, bits(rng, n), rng.integers(0, 41, n, np.uint32)) for _ in range(2)]
    return bits(rng, n), counts[0], counts[1]


def fields(rng: np.random.Generator, n: int) -> Words:
    """bfi: a and b any bits, c a position with a length in its next byte."""
    return bits(rng, n), bits(rng, n), rng.integers(0, 41, n, np.uint32) | rng.integers(0, 41, n, np.uint32) << 8


def few_bits(rng: np.random.Generator, n: int) -> Words:
    """Words with leading zeros or ones of every number."""
    a = bits(rng, n) >> rng.integers(0, 32, n, np.uint32)
    return np.where(rng.integers(0, 2, n) == 0, a, ~a), bits(rng, n), bits(rng, n)


def lanes(rng: np.random.Generator, n: int) -> Words:
    """shfl: b names a lane, c clamps within 32, 16, 8 or 4 lanes, from above and from below."""
    clamps = np.array([segment << 8 | last for segment in (0, 16, 24, 28) for last in (31, 0)], np.uint32)
    return bits(rng, n), rng.integers(0, 64, n, np.uint32), rng.choice(clamps, n)


Operands = Callable[[np.random.Generator, int], Words]
