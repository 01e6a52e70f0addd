# SPDX-License-Identifier: Apache-2.0
"""How the rope elements of a case were rotated, undone and done again otherwise, in f64.

A cache holds rotated keys, a query is rotated too; un-rotating is exact but for the rounding of the stored elements.
Where nothing says what the angles are, `assumed` pairs (2j, 2j + 1) with base 10000 are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..geometry import Geometry, Yarn
from ..rope import _yarn


@dataclass(frozen=True)
class Rotation:
    """Pair i turns by position * theta[i]; pairs are (2i, 2i + 1), or (i, i + R/2) where not interleaved."""

    width: int
    base: float
    interleaved: bool = True
    yarn: Yarn | None = None
    assumed: bool = False

    @property
    def theta(self) -> Array:
        return frequencies(self.width, self.base, self.yarn)

    @property
    def amplitude(self) -> float:
        """YaRN's factor of cosines and sines; undoing a rotation and making another leaves it as it is."""
        return 1.0 if self.yarn is None else _yarn(self.yarn, self.base, self.width, np.float64)[2]

    def turn(self, x: Array, positions: Array, times: float = 1.0) -> Array:
        """x [..., R] turned by times * positions * theta; positions have the shape of the leading axes of x."""
        return turn(x, times * positions[..., None] * self.theta, self.interleaved)


def rotation_of(geometry: Geometry | None, width: int) -> Rotation | str:
    """The rotation of the rope elements, or why there is none."""
    if geometry is None or geometry.qk_rope_head_dim not in (0, width):
        return Rotation(width, 10000.0, assumed=True)
    if geometry.longrope:
        return "the geometry's angles come from tables (LongRoPE)"
    if geometry.rope_theta is None:
        return "the geometry rotates nothing"
    return Rotation(width, geometry.rope_theta, geometry.rope_interleave, geometry.yarn)


def frequencies(width: int, base: float, yarn: Yarn | None = None) -> Array:
    """theta [R/2]: base^(-2i/R), or YaRN's."""
    theta: Array = base ** (-2.0 * np.arange(width // 2) / width)
    if yarn is None:
        return theta
    kept, factor, _ = _yarn(yarn, base, width, np.float64)
    slowed: Array = theta / factor * (1 - kept) + theta * kept
    return slowed


def turn(x: Array, angles: Array, interleaved: bool) -> Array:
    """x [..., R] with pair i turned by angles [..., R/2]."""
    first, second = halves(x, interleaved)
    cosine, sine = np.cos(angles), np.sin(angles)
    return joined(first * cosine - second * sine, first * sine + second * cosine, interleaved)


def halves(x: Array, interleaved: bool) -> tuple[Array, Array]:
    """The first and the second element of each pair, [..., R/2] each."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def joined(first: Array, second: Array, interleaved: bool) -> Array:
    """The inverse of `halves`."""
    if not interleaved:
        return np.concatenate([first, second], -1)
    out = np.empty((*first.shape[:-1], 2 * first.shape[-1]))
    out[..., 0::2], out[..., 1::2] = first, second
    return out
