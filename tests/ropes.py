# SPDX-License-Identifier: Apache-2.0
"""Rows to rotate. `turned` rotates (1, 0) pairs: the outcome is the cosine and the sine of every angle."""

import hashlib
import math
from types import SimpleNamespace

import numpy as np

from mla_oracle.rope import rope_interleaved, rope_neox

ROPES = {"interleaved": rope_interleaved, "neox": rope_neox}
F32 = 2.0**-24  # half an ulp of 1
DEEPSEEK = {
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def yarn(**changed):
    return SimpleNamespace(**{**DEEPSEEK, **changed})


def uniform(state):
    """The documents' generator: xorshift 13/7/17, a multiplier, the top 24 bits, [-1, 1)."""
    mask = 2**64 - 1
    while True:
        state ^= state << 13 & mask
        state ^= state >> 7
        state ^= state << 17 & mask
        yield ((state * 0x2545F4914F6CDD1D & mask) >> 40) / 2**24 * 2 - 1


def draw(rng, *shape):
    return np.array([next(rng) for _ in range(math.prod(shape))], np.float32).reshape(shape)


def seed_rows():
    """position -> x [2, 64]: the two rows that the documents' test draws for it."""
    rng = uniform(99)
    return {position: draw(rng, 2, 64) for position in (0, 1, 17, 4096, 1_000_000)}


def at(position, rows=1):
    return np.full(rows, position, np.int64)


def turned(position, *, n=64, precision="f32", **conventions):
    """e^(i theta) [n/2], times the amplitude."""
    unit = np.zeros((1, n), np.float32)
    unit[:, 0::2] = 1
    out = rope_interleaved(unit, at(position), precision=precision, **conventions)[0].astype(np.float64)
    return out[0 : n - 1 : 2] + 1j * out[1::2]


def sha16(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def words(array):
    return [f"{word:08x}" for word in array.view(np.uint32)]
