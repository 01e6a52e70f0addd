# SPDX-License-Identifier: Apache-2.0
"""How far an honest engine's stages may be from the truth: the RMS error of every element, from first principles.

A stage is judged from the stages before it as the engine dumped them, which are then exact. A stage that was not dumped
has errors itself, of its own roundings and of those before it, and they are carried along: to first order, as if
independent. What is rounded (u = the unit roundoff, RMS = 0.4247 that of a rounding to nearest):

    a sum of n products    in f32, one rounding a step: RMS u32 sqrt(n) of its root sum of squares (noise.walk); where
                           the layer stores 16 bits tensor cores may sum, and truncate: noise.drift beside it
    a weight               to the dtype the layer stores, where the file's is finer; so is a bias, before which the sum
                           may be stored
    a norm                 its mean, root, quotient and products in f32; once more to the stored dtype before the weight
    a rotation             the angle in its mode; cosine and sine (in f32 at best), products and sum in the stored dtype
    a stage                to the dtype of the dump; where it is not dumped, to the coarsest dtype of those that are
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from ..geometry import yarn_mscale
from ..verdict.noise import RMS, UNIFORM, UNIT, coarser, drift, spacing, walk
from .rotation import angle_errors
from .state import State

U32 = UNIT["f32"]


@dataclass
class Spread:
    """The errors of a layer's stages: `errors` of those that are not dumped; `held`, the dtype they are stored in."""

    state: State
    held: str
    stored: dict[str, str]  # the dtype of each weight in its file
    errors: dict[str, Array]

    @property
    def sums(self) -> str:
        return "mma" if self.held in ("bf16", "f16") else "f32"

    def of(self, stage: str, truth: Array) -> Array:
        """RMS error of every element of `stage`, before it is stored."""
        from .spreads import SPREADS

        return np.broadcast_to(SPREADS[stage](self, truth), truth.shape)

    def rounding(self, truth: Array, dtype: str) -> Array:
        found: Array = spacing(truth, dtype) * UNIFORM
        return found

    def squares(self, name: str) -> Array | None:
        """The squared errors of a stage, or None where it is exact."""
        found = self.errors.get(name)
        return None if found is None or not found.any() else np.square(found)

    def linear(self, x: Array, errors: Array | None, weight: str, out: Array) -> Array:
        """Squared: of out [..., o] = x [..., i] w^T, w [o, i]."""
        w2 = np.square(self.state.weights[weight])
        carried = None if errors is None else errors @ w2.T
        found = self.contracted(np.square(x) @ w2.T, carried, weight, out, x.shape[-1])
        bias = self.state.weights.get(f"{weight}.bias")
        if bias is None:
            return found
        own = coarser(self.held, self.stored[f"{weight}.bias"]) ** 2 * np.square(bias)
        once = (RMS * max(UNIT[self.held], U32)) ** 2 * np.square(out - bias)
        found += own + once
        return found

    def contracted(self, inner: Array, carried: Array | None, weight: str, out: Array, n: int) -> Array:
        """Squared: of sums of n products with a weight: their squares add up to `inner`, their errors to `carried`."""
        own = walk(self.sums, n) ** 2 + coarser(self.held, self.stored[weight]) ** 2
        found = own * np.maximum(inner, np.square(out)) + np.square(drift(self.sums, n) * out)
        return found if carried is None else found + carried

    def product(self, inner: Array, n: int, out: Array) -> Array:
        """Squared: of sums of n products of two stages."""
        found: Array = walk(self.sums, n) ** 2 * np.maximum(inner, np.square(out))
        return found + np.square(drift(self.sums, n) * out)

    def norm(self, x: Array, errors: Array | None, weight: str, eps: float, out: Array, *, centred: bool) -> Array:
        """Squared: of a norm over the last axis; `centred` takes the mean off first."""
        n = x.shape[-1]
        if centred:
            x = x - x.mean(axis=-1, keepdims=True)
        mean = np.square(x).mean(axis=-1, keepdims=True) + eps
        w = self.state.weights[weight]
        relative = walk("f32", n) ** 2 + 6 * (RMS * U32) ** 2 + coarser(self.held, "f32") ** 2
        relative += coarser(self.held, self.stored[weight]) ** 2
        found: Array = np.square(out) * relative
        if centred:
            found = np.square(x / np.sqrt(mean) * w) * relative
            found += np.square(walk("f32", n)) * np.square(w) + np.square(RMS * U32 * out)
        if errors is not None:
            found += np.square(w) * errors / mean
            found += np.square(out) * (np.square(x) * errors).sum(axis=-1, keepdims=True) / np.square(n * mean)
        return found

    def rotation(self, x: Array, errors: Array | None, out: Array, pairing: str, kind: str) -> Array:
        """Squared: of rows out [T, ..., R'] rotated from x, whose first R elements turn."""
        s = self.state
        width = s.geometry.qk_rope_head_dim
        found = np.zeros_like(out) if errors is None else np.broadcast_to(errors, out.shape).copy()
        if not s.config.rotates:
            return found
        angle = angle_errors(s.config, s["positions"], s.angles)
        angle = angle.reshape(len(angle), *[1] * (x.ndim - 2), -1)
        first, second = slice(0, width, 2), slice(1, width, 2)
        halves = slice(0, width // 2), slice(width // 2, width)
        paired = (first, second) if pairing == "interleaved" else halves
        a, b = (x[..., i] for i in paired)
        size = np.square(a) + np.square(b)
        yarn = s.geometry.yarn
        amplitude = s.config.longrope.amplitude if s.config.longrope is not None else 1.0
        if yarn is not None:
            amplitude = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
        squared = size * amplitude**2 * (np.square(angle) + 4 * (RMS * max(UNIT[self.held], U32)) ** 2)
        if errors is not None:
            parts = [np.broadcast_to(errors, x.shape)[..., i] for i in paired]
            squared = squared + amplitude**2 * np.maximum(*parts)
        parted = pairing != "interleaved" or s.parted[kind]
        for i in halves if parted else (first, second):
            found[..., i] = squared
        return found
