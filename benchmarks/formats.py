# SPDX-License-Identifier: Apache-2.0
"""Rates of the fast tier on packed rows and selections: python benchmarks/formats.py [--requests N] [--heads N] ...

Each is told as a share of the rate of plain paged decode of the same rows in bf16 (per row that is seen), both timed in
turn in processor time of one thread. Asked: 0.7 for fp8 rows at 128 heads, 1 for a selection of bf16 rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import mla_oracle
from mla_oracle import formats

BLOCK, SELECTED = 64, 2048
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
        self.indices = np.stack([rng.permutation(rows)[:SELECTED].astype(np.int32) for _ in range(requests)])

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
        bf16 = {"kv_cache": paged.rows.astype(ml_dtypes.bfloat16)}
        calls[f"bf16 {D}"] = paged.call(bf16)
        few = f"bf16 {D}, {SELECTED} rows"
        calls[few] = paged.call(bf16, np.full_like(paged.lens, SELECTED))
        calls[f"top-k {D}"] = paged.call(bf16, topk_indices=paged.indices)
        plain[f"top-k {D}"] = few
        for name in formats.NAMES:
            if (formats.get(name).width or 576) != D:
                continue
            stored = formats.quantize(name, paged.rows)
            calls[name] = paged.call({**stored, "cache_format": name})
            calls[f"{name}, top-k"] = paged.call({**stored, "cache_format": name}, topk_indices=paged.indices)
            plain[name], plain[f"{name}, top-k"] = f"bf16 {D}", few
    for call in calls.values():
        call()
    times = seconds(calls)
    of = f"{chosen.requests} x {chosen.heads} heads, {chosen.rows} rows or {SELECTED} of them"
    print(f"{of}; share of the rate of plain bf16")
    for name, of in plain.items():
        print(f"{name:30s} {times[of] / times[name]:5.2f}")


if __name__ == "__main__":
    main()
