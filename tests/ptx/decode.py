# SPDX-License-Identifier: Apache-2.0
"""tensor_decode.cu on the interpreter: its problem, its launch, and what it should compute."""

from pathlib import Path

import ml_dtypes
import numpy as np

from mla_oracle.gpu import cache
from mla_oracle.ptx import Interpreter

SOURCE = Path(__file__).with_name("tensor_decode.cu").read_text(encoding="utf-8")
D, V, HEADS = 576, 512, 16
SMEM = 2 * 64 * D * 2 + 16 * 72 * 2 + 2 * 8 * 16 * 4 + 2 * 64 * 8


class Problem:
    def __init__(self, lens, heads=HEADS, block_size=16, seed=0):
        rng = np.random.default_rng(seed)
        self.lens, self.heads, self.block_size = np.array(lens, np.int32), heads, block_size
        used = -(-self.lens // block_size)
        pages = int(used.sum()) + 1
        bf16 = ml_dtypes.bfloat16
        self.q = rng.standard_normal((len(lens), heads, D), np.float32).astype(bf16)
        self.cache = np.full((pages, block_size, D), np.nan, np.float32).astype(bf16)
        self.table = np.full((len(lens), max(1, int(used.max(initial=0)))), 2147480000, np.int32)
        ids = iter(rng.permutation(pages))
        for b, length in enumerate(lens):
            rows = rng.standard_normal((length, D), np.float32).astype(bf16)
            for block in range(used[b]):
                self.table[b, block] = page = next(ids)
                part = rows[block * block_size : (block + 1) * block_size]
                self.cache[page, : len(part)] = part
        self.scale = np.float32(0.1 / np.sqrt(D))

    def expected(self):
        """(out, lse) in f64."""
        out, lse = np.zeros((*self.q.shape[:2], V)), np.full(self.q.shape[:2], -np.inf)
        for b, length in enumerate(self.lens):
            if not length:
                continue
            tokens = np.arange(length)
            keys = self.cache[self.table[b, tokens // self.block_size], tokens % self.block_size].astype(np.float64)
            scores = self.q[b].astype(np.float64) @ keys.T * np.float64(self.scale)
            top = scores.max(1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(1, keepdims=True)
            out[b], lse[b] = weights / total @ keys[:, :V], (top + np.log(total))[:, 0]
        return out, lse

    def launch(self, machine: Interpreter, source: str = SOURCE):
        """(out, lse) as the kernel in `source` computes them."""
        ptx = cache.compile(source, machine.arch, name="tensor_decode.cu").ptx
        kernel = machine.load(ptx, "tensor_decode", file="tensor_decode.cu")
        shape = self.q.shape[:2]
        out, lse = machine.empty((*shape, V), np.float32), machine.empty(shape, np.float32)
        machine.launch(
            kernel,
            (-(-self.heads // HEADS), len(self.lens), 1),
            (256, 1, 1),
            SMEM,
            *(machine.upload(array) for array in (self.q, self.cache, self.table, self.lens)),
            out,
            lse,
            np.int32(self.heads),
            np.int32(self.block_size),
            np.int32(self.table.shape[1]),
            np.int64(self.block_size * D),
            self.scale,
        )
        return machine.download(out), machine.download(lse)
