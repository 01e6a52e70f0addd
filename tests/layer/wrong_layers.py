# SPDX-License-Identifier: Apache-2.0
"""Engines that get one step wrong, each after a public bug or a reading of a config: where check --stages finds them.

To add one: a subclass of Engine that overrides the step, and a line in WRONG.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from engine import BIASED, CONFIG, DIRECT, GLM, INDEXED, LONGCAT, PLAIN, POOLED, WIDE, Engine


class NormWithoutEps(Engine):
    def eps(self):
        return 0.0


class NormOfAnotherEps(Engine):
    def eps(self):
        return 1e-5


class NormInBf16(Engine):
    """The sum of squares is rounded to bf16 after every element."""

    def norm(self, x, name):
        total = np.zeros(x.shape[:-1], self.dtype)
        for column in np.moveaxis(np.square(x), -1, 0):
            total = (total.astype(np.float32) + column).astype(self.dtype)
        mean = total.astype(np.float32)[..., None] / x.shape[-1]
        return x / np.sqrt(mean + self.real(self.eps())) * self.weights[f"{name}.weight"]


class NormOfTheWholeRow(Engine):
    """k_pe is normed with the latent."""

    def split_kv(self, kv):
        mean = np.mean(np.square(kv), axis=-1, keepdims=True)
        self.row = kv / np.sqrt(mean + self.real(self.eps()))
        return self.row[:, : self.L] * self.weights["kv_a_layernorm.weight"], kv[:, self.L :]

    def norm_kv(self, latent):
        return latent


class RopeRowsNormed(Engine):
    def rope_k(self, x, positions):
        return self.rope(x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + self.eps()), positions)


class NormAfterRope(Engine):
    """The latent and the rotated row are joined, and normed together."""

    def rope_k(self, x, positions):
        turned = self.rope(x, positions)
        return turned / np.sqrt(np.mean(np.square(turned), -1, keepdims=True) + self.eps())


class NoLatentNorm(Engine):
    def norm_kv(self, latent):
        return latent


class RopeFirstInTheRow(Engine):
    """kv_a is split as [k_pe | c_kv]."""

    def split_kv(self, kv):
        return kv[:, self.R :], kv[:, : self.R]


class RopeFirstInTheQuery(Engine):
    def split_q(self, q):
        return q[..., self.R :], q[..., : self.R]


class ReshapedByParts(Engine):
    """q_b's rows are read as all nope rows, then all rope rows."""

    def heads(self, q):
        nope = q[:, : self.H * self.P].reshape(len(q), self.H, self.P)
        return np.concatenate([nope, q[:, self.H * self.P :].reshape(len(q), self.H, self.R)], -1)


class KeysAndValuesGrouped(Engine):
    """kv_b's rows are read as all keys, then all values."""

    def parts(self):
        w = self.weights["kv_b_proj.weight"]
        keys, values = w[: self.H * self.P], w[self.H * self.P :]
        return keys.reshape(self.H, self.P, self.L), values.reshape(self.H, self.V, self.L)


class ValuesFirst(Engine):
    def parts(self):
        w = self.weights["kv_b_proj.weight"].reshape(self.H, self.P + self.V, self.L)
        return w[:, self.V :], w[:, : self.V]


class ScaleWithoutMscale(Engine):
    def softmax_scale(self):
        return 1 / math.sqrt(self.P + self.R)


class ScaleOfTheRow(Engine):
    """The absorbed width in the place of the head's."""

    def softmax_scale(self):
        return super().softmax_scale() * math.sqrt((self.P + self.R) / (self.L + self.R))


class RopeWithoutYarn(Engine):
    def angles(self, positions):
        kept, self.rope_scaling = self.rope_scaling, None
        theta, _ = super().angles(positions)
        self.rope_scaling = kept
        return theta, super().angles(positions)[1]


class RopeWithoutAmplitude(Engine):
    def angles(self, positions):
        return super().angles(positions)[0], 1.0


class RopeByHalves(Engine):
    def rope_q(self, x, positions):
        return self.rope_halves(x, positions)

    rope_k = rope_q


class KeysInAnotherLayout(Engine):
    """Keys have their pairs parted, queries do not."""

    def rope_k(self, x, positions):
        turned = self.rope(x, positions)
        return np.concatenate([turned[..., 0::2], turned[..., 1::2]], -1)


class QueriesOneOn(Engine):
    """Queries are rotated for the next position."""

    def rope_q(self, x, positions):
        return self.rope(x, np.asarray(positions) + 1)


class KeysNotRotated(Engine):
    def rope_k(self, x, positions):
        return x


class RopeTwice(Engine):
    def rope_q(self, x, positions):
        return self.rope(self.rope(x, positions), positions)


class NoLatentScale(Engine):
    def scale_kv(self, c):
        return c


class NoQueryScale(Engine):
    def scale_q(self, q):
        return q


class ScaledAlike(Engine):
    """c_kv is scaled by the query's factor."""

    def scale_kv(self, c):
        return self.scale_q(c)


class LastRowNotWritten(Engine):
    def append(self, past, new):
        rows = np.concatenate([past, new])
        rows[-1] = 0
        return rows


class NoMask(Engine):
    def seen(self, queries, rows):
        return np.ones((queries, rows), bool)


class OneRowShort(Engine):
    """A query does not see its own row; the first sees it alone."""

    def seen(self, queries, rows):
        found = super().seen(queries, rows)
        own = np.arange(rows) == (rows - queries + np.arange(queries))[:, None]
        return found & (~own | (found.sum(-1) == 1)[:, None])


class HeadsTransposed(Engine):
    def joined(self, attn):
        return attn.transpose(0, 2, 1).reshape(len(attn), -1)


class IndexWithoutRelu(Engine):
    def relu(self, x):
        return x


class IndexRopeOfTheOtherPairing(Engine):
    def index_rope(self, x, positions):
        turn = self.rope_halves if self.config["model_type"] == "glm_moe_dsa" else self.rope
        return np.concatenate([turn(x[..., : self.R], positions), x[..., self.R :]], -1)


class IndexRopeLast(Engine):
    """The last elements of an indexer's row are rotated."""

    def index_rope(self, x, positions):
        return np.concatenate([x[..., : -self.R], self.rope_halves(x[..., -self.R :], positions)], -1)


class IndexNormNotCentred(Engine):
    def index_norm(self, k):
        scaled = k / np.sqrt(np.mean(np.square(k), -1, keepdims=True) + self.real(1e-6))
        return scaled * self.weights["indexer.k_norm.weight"] + self.weights["indexer.k_norm.bias"]


class IndexWeightsByHeads(Engine):
    def index_scale(self):
        return 1 / self.config["index_n_heads"]


class SmallestChosen(Engine):
    def best(self, scores, candidates):
        return sorted(candidates, key=lambda i: (scores[i], i))


class NewestChosen(Engine):
    """A window in the place of a choice."""

    def best(self, scores, candidates):
        return sorted(candidates, reverse=True)


class NoBias(Engine):
    """Of one projection."""

    of = "q_a_proj"

    def linear(self, x, name):
        found = super().linear(x, name)
        return found - self.weights[f"{name}.bias"] if name == self.of else found


class NoBiasOfRows(NoBias):
    of = "kv_a_proj_with_mqa"


class NoBiasOfTheOutput(NoBias):
    of = "o_proj"


class Wrong(NamedTuple):
    engine: type[Engine]
    first: str  # the first stage that is wrong, where everything is dumped
    config: dict = CONFIG
    row: int = 0  # the first query of it
    dtype: str = "f32"
    naive: bool = True
    size: float = 1.0  # of the hidden states


WRONG = [
    Wrong(NormWithoutEps, "q_a_norm", size=0.03),
    Wrong(NormWithoutEps, "kv_a_norm", DIRECT, size=0.03),
    Wrong(NormOfAnotherEps, "q_a_norm"),
    Wrong(NormOfAnotherEps, "q_a_norm", dtype="bf16", size=0.01),
    Wrong(NormInBf16, "q_a_norm", WIDE, dtype="bf16"),
    Wrong(NormOfTheWholeRow, "kv_a_norm"),
    Wrong(NormOfTheWholeRow, "kv_a_norm", dtype="bf16"),
    Wrong(RopeRowsNormed, "k_pe"),
    Wrong(NormAfterRope, "k_pe"),
    Wrong(NoLatentNorm, "kv_a_norm"),
    Wrong(RopeFirstInTheRow, "kv_a_norm"),
    Wrong(RopeFirstInTheQuery, "q_nope"),
    Wrong(ReshapedByParts, "q"),
    Wrong(KeysAndValuesGrouped, "k_nope"),
    Wrong(KeysAndValuesGrouped, "q_lat", naive=False),
    Wrong(KeysAndValuesGrouped, "k_nope", dtype="bf16"),
    Wrong(ValuesFirst, "k_nope"),
    Wrong(ScaleWithoutMscale, "scores"),
    Wrong(ScaleWithoutMscale, "scores", naive=False),
    Wrong(ScaleWithoutMscale, "scores", dtype="bf16"),
    Wrong(ScaleOfTheRow, "scores"),
    Wrong(RopeWithoutYarn, "q_pe", row=1),
    Wrong(RopeWithoutAmplitude, "q_pe"),
    Wrong(RopeWithoutAmplitude, "q_pe", dtype="bf16"),
    Wrong(RopeByHalves, "q_pe", PLAIN, row=1),
    Wrong(RopeByHalves, "q_pe", PLAIN, row=1, dtype="bf16"),
    Wrong(KeysInAnotherLayout, "k_pe"),
    Wrong(QueriesOneOn, "q_pe"),
    Wrong(KeysNotRotated, "k_pe", PLAIN, row=1),
    Wrong(RopeTwice, "q_pe", PLAIN, row=1),
    Wrong(NoBias, "q_a", BIASED),
    Wrong(NoBiasOfRows, "kv_a", BIASED, dtype="bf16"),
    Wrong(NoBiasOfTheOutput, "out", BIASED, dtype="bf16"),
    Wrong(NoLatentScale, "c_kv", LONGCAT),
    Wrong(NoQueryScale, "q_nope", LONGCAT),
    Wrong(ScaledAlike, "c_kv", LONGCAT),
    Wrong(LastRowNotWritten, "kv_cache", row=8),
    Wrong(NoMask, "scores"),
    Wrong(OneRowShort, "scores", row=1),
    Wrong(HeadsTransposed, "out"),
    Wrong(IndexWithoutRelu, "index_scores", INDEXED),
    Wrong(IndexRopeOfTheOtherPairing, "index_q", INDEXED, row=1),
    Wrong(IndexRopeOfTheOtherPairing, "index_q", GLM, row=1),
    Wrong(IndexRopeLast, "index_q", INDEXED),
    Wrong(IndexNormNotCentred, "index_k", INDEXED),
    Wrong(IndexWeightsByHeads, "index_weights", INDEXED),
    Wrong(SmallestChosen, "topk", INDEXED, row=4),
    Wrong(NewestChosen, "topk", POOLED, row=5),
]
