# SPDX-License-Identifier: Apache-2.0
"""Rates of the fast tier on packed rows and selections: python benchmarks/formats.py [--requests N] [--heads N] ...

Each is told as a share of the rate of plain paged decode of the same rows in bf16 (per row that is seen), both timed in
turn in processor time of one thread. Of a selection that is the rate of its further rows, 2048 to 8192 of them, and
beside it what its first 2048 take longer than plain decode of as many: what does not grow with the rows, finding out
what is asked. Asked: 0.7 for fp8 rows at 128 heads, 1 for a selection of bf16 rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from problems import aligned

import mla_oracle
from mla_oracle import formats

BLOCK, FEW, MANY = 64, 2048, 8192
TURNS = 7
WIDTHS = (512, 576)


def seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The fastest of several turns of each call."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(TURNS):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - start)
    return best


class Paged:
    """Requests of the same `rows` rows of D numbers, each in its own order of pages."""

    def __init__(self, requests: int, heads: int, rows: int, D: int) -> None:
        rng = np.random.default_rng(1)
        pages = rows // BLOCK
        self.rows = rng.standard_normal((pages, BLOCK, D), np.float32)
        self.q = rng.standard_normal((requests, heads, D), np.float32).astype(ml_dtypes.bfloat16)
        self.table = np.stack([rng.permutation(pages).astype(np.int32) for _ in range(requests)])
        self.lens = np.full(requests, rows, np.int32)
        self.indices = np.stack([rng.permutation(rows)[:MANY].astype(np.int32) for _ in range(requests)])

    def call(self, cache: dict[str, Any], lens: np.ndarray | None = None, **options: Any) -> Callable[[], object]:
        how = {"softmax_scale": 1 / 16, "head_dim_v": 512, "backend": "fast", "threads": 1, "causal": False}
        lens = self.lens if lens is None else lens
        return lambda: mla_oracle.decode(self.q, block_table=self.table, seq_lens=lens, **cache, **how, **options)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--heads", type=int, default=128)
    options.add_argument("--rows", type=int, default=16384, help="a multiple of 64; default: 16384")
    options.add_argument("--requests", type=int, default=1)
    chosen = options.parse_args()
    calls: dict[str, Callable[[], object]] = {}
    plain: dict[str, str] = {}
    for D in WIDTHS:
        paged = Paged(chosen.requests, chosen.heads, chosen.rows, D)
        caches = {f"bf16 {D}": {"kv_cache": aligned(paged.rows.astype(ml_dtypes.bfloat16))}}
        for name in formats.NAMES:
            if (formats.get(name).width or 576) == D:
                stored = {key: aligned(array) for key, array in formats.quantize(name, paged.rows).items()}
                caches[name] = {**stored, "cache_format": name}
        for name, cache in caches.items():
            plain[name] = f"bf16 {D}"
            calls[name] = paged.call(cache)
            for rows in (FEW, MANY):
                if name == plain[name]:
                    calls[f"{name}, {rows}"] = paged.call(cache, np.full_like(paged.lens, rows))
                calls[f"{name}, top {rows}"] = paged.call(cache, topk_indices=paged.indices[:, :rows])
    for call in calls.values():
        call()
    times = seconds(calls)
    print(f"{chosen.requests} x {chosen.heads} heads, {chosen.rows} rows; share of the rate of plain bf16")
    print(f"{'':30s} all rows   a selection's further rows   longer for its first {FEW}")
    for name, of in plain.items():
        further = (times[f"{of}, {MANY}"] - times[f"{of}, {FEW}"]) / (
            times[f"{name}, top {MANY}"] - times[f"{name}, top {FEW}"]
        )
        longer = times[f"{name}, top {FEW}"] - times[f"{of}, {FEW}"]
        print(f"{name:30s} {times[of] / times[name]:8.2f}   {further:26.2f}   {longer * 1e3:19.2f} ms")


if __name__ == "__main__":
    main()
