# SPDX-License-Identifier: Apache-2.0
"""The problems that are timed: paged decode in four shapes and over lengths, the dense forms of GLM-5.2.

Inputs are N(0, 1), seed 1; pages of 64 rows, shuffled, seven of them spare; arrays start at a cache line,
which some peers need. The queries have the dtype of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from calibration import Contestant

import mla_oracle

D, V, BLOCK, SCALE = 576, 512, 64, 1 / 16
NEAR = 4  # pages that stay in a core's second cache: 0.6 MB of f32
SHAPES = {"S1": (1, 128, 4096), "S2": (4, 128, 2048), "S3": (1, 16, 8192), "S4": (32, 16, 512)}  # B, H, L
SPARE = 7


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64 bytes."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    first = -raw.ctypes.data % 64
    copy = raw[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass
class Paged:
    """One paged decode with one query token."""

    q: np.ndarray  # [B, H, D]
    cache: np.ndarray  # [pages, BLOCK, D]
    table: np.ndarray  # [B, L / BLOCK]
    lens: np.ndarray  # [B]
    flops: float

    @property
    def dtype(self) -> str:
        return {"float32": "f32", "bfloat16": "bf16"}[self.cache.dtype.name]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, H, L."""
        return (*self.q.shape[:2], int(self.lens[0]))

    def rounded(self) -> Paged:
        """The same problem in bf16."""
        q, cache = (aligned(x.astype(ml_dtypes.bfloat16)) for x in (self.q, self.cache))
        return Paged(q, cache, self.table, self.lens, self.flops)

    def near(self) -> Paged:
        """The same work on a few pages over and over: without the memory's part."""
        return replace(self, table=self.table % NEAR)

    def decode(self, name: str, isa: str, threads: int = 1, precision: str = "f32") -> Contestant:
        """The fast tier."""
        kept: list[np.ndarray] = []

        def call() -> None:
            kept[:] = [
                mla_oracle.decode_paged(
                    self.q, self.cache, self.table, self.lens, softmax_scale=SCALE, head_dim_v=V,
                    precision=precision, backend="fast", threads=threads, isa=isa,
                ).out
            ]  # fmt: skip

        return Contestant(name, call, lambda: kept[0].astype(np.float64), self.flops)

    def truth(self, heads: list[int] | slice) -> np.ndarray:
        """Strict f64 of some of the heads: [B, heads, V]."""
        return mla_oracle.decode_paged(
            self.q[:, heads], self.cache, self.table, self.lens, softmax_scale=SCALE, head_dim_v=V,
            precision="f64", backend="strict",
        ).out  # fmt: skip


def paged(B: int, H: int, L: int) -> Paged:
    """In f32. L is a multiple of BLOCK."""
    rng = np.random.default_rng(1)
    pages = B * L // BLOCK
    table = rng.permutation(pages + SPARE)[:pages].reshape(B, -1).astype(np.int32)
    cache = aligned(rng.standard_normal((pages + SPARE, BLOCK, D), np.float32))
    q = aligned(rng.standard_normal((B, H, D), np.float32))
    return Paged(q, cache, table, np.full(B, L, np.int32), 2.0 * B * H * L * (D + V))


@dataclass
class Dense:
    """One dense form at one query token, GLM-5.2's sizes. Weights are divided by sqrt(kv_lora_rank)."""

    form: str
    t_kv: int

    def __post_init__(self) -> None:
        self.geometry = g = mla_oracle.Geometry.preset("glm-5.2")
        H, P, R = g.num_heads, g.qk_nope_head_dim, g.qk_rope_head_dim
        W, L, t_kv = g.v_head_dim, g.kv_lora_rank, self.t_kv
        rng = np.random.default_rng(1)
        shapes = [(1, H, P), (1, H, R), (t_kv, L), (t_kv, R), (H, P, L), (H, W, L)]
        arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
        self.arrays = [*arrays[:4], *(w / np.float32(np.sqrt(L)) for w in arrays[4:])]
        self.shape = (H, t_kv, P, R, L, W)
        per_head = t_kv * (2 * L + R) + (P + W) * L
        if self.form == "naive":
            per_head = t_kv * (L * (P + W) + P + R + W)
        self.flops = 2.0 * H * per_head

    def attend(self, name: str, isa: str | None, backend: str = "fast", precision: str = "f32") -> Contestant:
        form = {"absorbed": mla_oracle.attend_absorbed, "naive": mla_oracle.attend_naive}[self.form]
        kept: list[np.ndarray] = []
        how = {"softmax_scale": SCALE, "precision": precision, "backend": backend, "isa": isa, "threads": 1}

        def call() -> None:
            kept[:] = [form(self.geometry, *self.arrays, **how)]

        return Contestant(name, call, lambda: kept[0].astype(np.float64), self.flops)

    def truth(self) -> np.ndarray:
        """Strict f64 of the absorbed form, the quick one: [1, H, V]."""
        absorbed = Dense("absorbed", self.t_kv)
        strict = absorbed.attend("strict", None, "strict", "f64")
        strict.call()
        return strict.result()
