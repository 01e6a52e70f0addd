# SPDX-License-Identifier: Apache-2.0
"""Rope as a layer applies it: YaRN or LongRoPE, either pairing, an angle mode; nothing in a NoPE model.

`angles` is one of rope.ANGLES, or "any", which computes as closed and allows for the recurrence, and for cosines and
sines that reduce their angle in f32. In a mode of rope.ANGLES they are those of the f32 angle, whatever its size; then
pair 0, whose angle is the position itself, is exact as far as f32 holds whole numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from ..rope import ANGLES, rope_interleaved, rope_neox, to_neox
from .config import LayerConfig

ANGLE_MODES = ("any", *ANGLES)
# Units of f32's roundoff that an f32 angle may be off by, of the angle itself, and how many more pair j adds: a power,
# its reciprocal and the product with the position; a recurrence rounds twice a step. YaRN's blend may take 6 more, and
# so may a factor of LongRoPE. Of pair 0 the power is 1, and YaRN's ramp 0.
ANGLE_UNITS = {"any": (4, 2), "recurrence": (2, 2), "power": (4, 2), "closed": (4, 0), "table": (0, 0)}
YARN_UNITS = 6


def rotate(config: LayerConfig, x: Array, positions: Array, pairing: str, angles: str, real: Any) -> Array:
    """x [T, ..., R'] with its first R = qk_rope_head_dim elements rotated, in `real`."""
    geometry = config.geometry
    width = geometry.qk_rope_head_dim
    if not config.rotates:
        return x.astype(real)
    if config.longrope is not None:
        return _longrope(config, x, positions, pairing, real)
    turn = rope_interleaved if pairing == "interleaved" else rope_neox
    return turn(
        x,
        positions,
        base=geometry.rope_theta or 1.0,
        rotary_dim=width,
        angles="closed" if angles == "any" else angles,
        yarn=geometry.yarn,
        precision="f32" if real == np.float32 else "f64",
    )


def regrouped(config: LayerConfig, x: Array) -> Array:
    """x as engines store it that rotate adjacent pairs by first parting them: the even elements, then the odd."""
    return to_neox(x, rotary_dim=config.geometry.qk_rope_head_dim)


def angle_errors(config: LayerConfig, positions: Array, angles: str) -> Array:
    """[T, R/2] what an f32 angle may be off by in the mode `angles`, in radians, 2 at most.

    That is how far apart, over the length of a pair, two turns of it can be.
    """
    geometry = config.geometry
    pairs = geometry.qk_rope_head_dim // 2
    base = config.longrope.base if config.longrope is not None else geometry.rope_theta
    if base is None:
        return np.zeros((len(positions), pairs))
    j = np.arange(pairs)
    frequency = base ** (-j / max(pairs, 1))
    place = positions.astype(np.float64)[:, None]
    fixed, more = ANGLE_UNITS[angles]
    if angles != "table" and (geometry.yarn is not None or config.longrope is not None):
        fixed += YARN_UNITS
    units = np.asarray(fixed + more * j, np.float64)
    stored = 0.0 if angles == "table" else np.abs(place.astype(np.float32) - place) * frequency
    if angles != "any" and config.longrope is None:
        units[:1] = 0
    found: Array = np.minimum(2.0**-24 * units * np.abs(place) * frequency + stored, 2.0)
    return found


def _longrope(config: LayerConfig, x: Array, positions: Array, pairing: str, real: Any) -> Array:
    table = config.longrope
    assert table is not None
    width = config.geometry.qk_rope_head_dim
    last = int(positions.max(initial=0)) + 1
    factors = (table.long if last > table.original_max_position_embeddings else table.short).astype(real)
    powers = real(table.base) ** (np.arange(0, width, 2).astype(real) / real(width))
    theta = positions.astype(real)[:, None] * (real(1) / (factors * powers))  # [T, R/2]
    rows = (slice(None), *[None] * (x.ndim - 2))
    cosine, sine = (np.asarray(f(theta) * real(table.amplitude))[rows] for f in (np.cos, np.sin))
    out = x.astype(real)
    first = slice(0, width, 2) if pairing == "interleaved" else slice(0, width // 2)
    second = slice(1, width, 2) if pairing == "interleaved" else slice(width // 2, width)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cosine - b * sine, a * sine + b * cosine
    return out
