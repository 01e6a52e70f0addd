# SPDX-License-Identifier: Apache-2.0
"""Which keys each query sees, where that is not the first of its request: a top-k selection, a window, or both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mla_oracle.errors import InputError
from mla_oracle.gpu.layout import packed
from mla_oracle.gpu.machine import Buffer, Machine

WARP = 32  # as in cuda/keys.cu


@dataclass(frozen=True)
class Selection:
    """Candidates and what is left of them; every field is optional.

    indices [B, T, K] i32: positions of tokens, or slots block * block_size + offset if `by_slot`; negative ones are
    skipped, others are taken as they are. lengths [B, T] i32: how many of them count. The window of a query at position
    p is p - left to p + right, -1 for no end, and the first `kept` tokens; it and causality hold for positions alone.
    """

    indices: Buffer | None = None
    lengths: Buffer | None = None
    by_slot: bool = False
    left: int = -1
    right: int = -1
    kept: int = 0

    def list_keys(
        self,
        machine: Machine,
        block_table: Buffer,
        seq_lens: Buffer,
        shape: tuple[int, ...],
        block_size: int,
        cache_strides: list[np.int64],
        table_strides: list[np.int64],
        causal: bool,
        longest: int,
    ) -> tuple[Buffer, Buffer]:
        """(keys [B T, most] i64, where the row of each key begins, counts [B T] i32) for queries of this shape."""
        B, T = shape[:2]
        K, most = 0, longest
        if self.indices is not None:
            K = most = self.indices.shape[2]
            packed("indices", self.indices, (B, T, K), "i32")
        elif self.left >= 0 and (self.right >= 0 or causal):
            most = min(longest, self.kept + self.left + max(self.right, 0) + 1)
        if self.lengths is not None:
            packed("lengths", self.lengths, (B, T), "i32")
        if self.by_slot and (self.indices is None or causal):
            raise InputError("by_slot is True, expected indices, and causal False")
        keys, counts = machine.empty((B * T, max(1, most)), np.int64), machine.empty((B * T,), np.int32)
        machine.launch(
            machine.kernel("keys.cu", "keys_list"),
            (B * T, 1, 1),
            (WARP, 1, 1),
            0,
            None if self.by_slot else block_table,
            seq_lens,
            self.indices,
            self.lengths,
            *map(np.int32, (causal, self.left, self.right, self.kept)),
            keys,
            counts,
            *map(np.int32, (T, K, block_size, keys.shape[1])),
            *cache_strides,
            *table_strides,
        )
        return keys, counts

    @staticmethod
    def queries(q: Buffer) -> Buffer:
        """q [B, T, H, D] as [B T, 1, H, D]."""
        (B, T, H, D), size = q.shape, q.strides[1]
        if B > 1 and T > 1 and q.strides[0] != T * size:
            raise InputError(f"q has a stride of {q.strides[0]} bytes on axis 0, expected {T * size} with a selection")
        stride = q.strides[0] if T == 1 else size
        return Buffer(q.pointer, (B * T, 1, H, D), q.dtype, (stride, size, *q.strides[2:]), q)
