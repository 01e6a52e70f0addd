# SPDX-License-Identifier: Apache-2.0
"""The rows that are numbers: what a cache without a format's name is, so that it is read like all others."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InputError
from .format import Array, Format, Parts, Tensors, needed, no_others
from .memory import take_rows

FLOATS = ("f32", "f16", "bf16", "f64", "e4m3", "e4m3fnuz", "e5m2")


class Dense(Format):
    """`kv_cache` [num_blocks, block_size, D], or [.., L] and `kpe_cache` [.., R]; any float, the same for both."""

    name = "dense"
    tensors = ("kpe_cache",)
    writers = ("cast",)
    readers = ("fold",)

    def arrays(self, tensors: Tensors) -> list[Array]:
        cache = take_rows("kv_cache", needed(self.name, tensors, "kv_cache"), *FLOATS, width="columns", multiple=1)
        if tensors.get("kpe_cache") is None:
            return [cache]
        rope = take_rows("kpe_cache", tensors["kpe_cache"], *FLOATS, width="columns", multiple=1)
        if rope.shape[:2] != cache.shape[:2] or rope.dtype != cache.dtype:
            raise InputError(
                f"kpe_cache is {rope.dtype} {list(rope.shape)}, "
                f"expected {cache.dtype} [{cache.shape[0]}, {cache.shape[1]}, ..] as kv_cache"
            )
        return [cache, rope]

    def check(self, tensors: Tensors, block_size: int | None = None) -> tuple[int, int, int]:
        no_others(self.name, tensors, self.tensors)
        arrays = self.arrays(tensors)
        return (*arrays[0].shape[:2], sum(a.shape[2] for a in arrays))

    def fetch(self, tensors: Tensors, blocks: Array, offsets: Array, block_size: int | None) -> Parts:
        rows = np.concatenate([a[blocks, offsets] for a in self.arrays(tensors)], axis=1)
        return Parts(rows, "f64", np.ones((1, 1)))

    def values(self, parts: Parts, reader: str) -> Array:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return parts.codes.astype(np.float64)

    def pack(self, rows: Array, writer: str, scales: dict[str, Any]) -> dict[str, Array]:
        return {"kv_cache": rows}


FORMATS = (Dense(),)
