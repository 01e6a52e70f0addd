# SPDX-License-Identifier: Apache-2.0
"""Speed of the fast tier as ratios: python benchmarks/cpu.py [--shapes S1] [--reps N] [--json FILE] [--peers]

Machines are shared, so nothing here is a time. Every repetition stands between two runs of a register-only
loop of multiply-adds (the peak, in the same process), and its speed is divided by theirs.
The figure is the median over the repetitions whose two neighbours were quiet (within 15 % of the best seen);
how many those were is printed. One thread is timed by its own CPU clock, which other processes cannot stop;
several threads need the wall clock and a quiet machine, and their share is of that many times the peak.

To add a shape, add a line to SHAPES; to add a peer, a function to peers().
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the numpy peer is compared with one thread

import numpy as np

from mla_oracle.fast import absorbed, naive, paged
from mla_oracle.fast import isa as isas

QUIET = 0.85
BLOCK, D, V, SCALE = 64, 576, 512, 1 / 16
SHAPES = {"S1": (1, 128, 4096), "S2": (4, 128, 2048), "S3": (1, 16, 8192), "S4": (32, 16, 512)}  # B, H, L
ASKED = {  # share of the peak: f32, then f64 over f32
    ("S1", 1): 0.88, ("S2", 1): 0.86, ("S3", 1): 0.78, ("S4", 1): 0.72,
    ("S1", 2): 0.82, ("S2", 2): 0.84, ("S3", 2): 0.60, ("S4", 2): 0.70,
}  # fmt: skip


class Peak:
    """Multiply-adds per second of one core, measured around each repetition."""

    def __init__(self, isa: str | None, precision: str) -> None:
        self.loop = isas.kernels("paged", precision, isa).multiply_add
        self.x = np.ones(12 * 16, np.float32 if precision == "f32" else np.float64)
        self.best = max(self() for _ in range(100))

    def __call__(self) -> float:
        start = time.thread_time()
        flops = self.loop(100_000, self.x)
        return flops / (time.thread_time() - start)


def shares(
    work: Callable[[], object], flops: float, peak: Peak, reps: int, clock: Callable[[], float]
) -> tuple[float, float, int]:
    """(median share of the peak over the quiet repetitions, over all, how many were quiet)."""
    work()
    quiet, every = [], []
    before = peak()
    for _ in range(reps):
        start = clock()
        work()
        speed = flops / (clock() - start)
        after = peak()
        every.append(speed / ((before + after) / 2))
        if min(before, after) >= QUIET * peak.best:
            quiet.append(every[-1])
        before = after
    return statistics.median(quiet) if quiet else float("nan"), statistics.median(every), len(quiet)


def paged_case(B: int, H: int, L: int, dtype: type) -> tuple[np.ndarray, ...]:
    """(q [B, 1, H, D], cache [pages, BLOCK, D], block_table, seq_lens): N(0, 1), seed 1, shuffled pages."""
    rng = np.random.default_rng(1)
    blocks = -(-L // BLOCK)
    table = rng.permutation(B * blocks + 7)[: B * blocks].reshape(B, blocks).astype(np.int32)
    cache = rng.standard_normal((B * blocks + 7, BLOCK, D), np.float32).astype(dtype)
    q = rng.standard_normal((B, 1, H, D), np.float32).astype(dtype)
    return q, cache, table, np.full(B, L, np.int32)


def fast(case: tuple[np.ndarray, ...], threads: int, isa: str | None) -> Callable[[], None]:
    q, cache, table, lens = case
    code = {"float32": 0, "bfloat16": 2, "float64": 3}[cache.dtype.name]
    number = np.float64 if code == 3 else np.float32
    out, lse = np.empty((*q.shape[:3], V), number), np.empty(q.shape[:3], number)
    q8, cache8 = q.view(np.uint8), cache.view(np.uint8)
    return lambda: paged.decode(
        q8, code, cache8, code, table, lens, SCALE, True, 1.0, -np.inf, out, lse, threads=threads, isa=isa
    )


def gather_numpy(case: tuple[np.ndarray, ...]) -> Callable[[], None]:
    """numpy: gather the pages, two products and a softmax (its BLAS takes the threads it likes)."""
    q, cache, table, lens = case

    def work() -> None:
        for b in range(len(lens)):
            keys = cache[table[b]].reshape(-1, D)[: lens[b]]
            p = q[b, 0] @ keys.T * np.float32(SCALE)
            p = np.exp(p - p.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p @ keys[:, :V]

    return work


def forms() -> Iterator[tuple[str, Callable[..., None], int, float]]:
    """GLM-5.2 at one query token: (name, form, t_kv, flops)."""
    H, P, R, W, L = 64, 192, 64, 256, 512
    yield "absorbed T=4096", absorbed.attend, 4096, 2 * H * (4096 * (2 * L + R) + P * L + W * L)
    yield "naive T=512", naive.attend, 512, 2 * H * 512 * (L * (P + W) + P + R + W)


def measure(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    import ml_dtypes

    peaks = {precision: Peak(options.isa, precision) for precision in ("f32", "f64")}

    def row(
        name: str, precision: str, threads: int, flops: float, work: Callable[[], None], asked: float | None
    ):
        share, overall, quiet = shares(
            work,
            flops,
            peaks[precision],
            options.reps,
            time.thread_time if threads == 1 else time.perf_counter,
        )
        return {
            "what": name, "precision": precision, "threads": threads, "asked": asked,
            "share": share / threads, "share_of_all": overall / threads, "quiet": quiet, "reps": options.reps,
        }  # fmt: skip

    for name in options.shapes.split(","):
        B, H, L = SHAPES[name]
        flops = 2.0 * B * H * L * (D + V)
        case = paged_case(B, H, L, np.float32)
        for threads in (1, 2):
            run = fast(case, threads, options.isa)
            yield row(f"{name} f32 cache", "f32", threads, flops, run, ASKED[name, threads])
        if options.peers:
            yield row(f"{name} numpy", "f32", 1, flops, gather_numpy(case), None)
        bf16 = paged_case(B, H, L, ml_dtypes.bfloat16)
        yield row(f"{name} bf16 cache", "f32", 1, flops, fast(bf16, 1, options.isa), None)
        f64 = paged_case(B, H, L, np.float64)
        yield row(f"{name} f64 cache", "f64", 1, flops, fast(f64, 1, options.isa), None)

    rng = np.random.default_rng(1)
    for name, form, t_kv, flops in forms():
        shapes = [(1, 64, 192), (1, 64, 64), (t_kv, 512), (t_kv, 64), (64, 192, 512), (64, 256, 512)]
        arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
        out = np.empty((1, 64, 256), np.float32)

        def work(form=form, arrays=arrays, out=out) -> None:
            form(*arrays, SCALE, out, threads=1, isa=options.isa)

        yield row(name, "f32", 1, flops, work, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of " + ",".join(SHAPES))
    parser.add_argument("--reps", type=int, default=50)
    parser.add_argument("--isa", help="instead of the best this machine has")
    parser.add_argument("--peers", action="store_true", help="numpy beside it")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows = []
    print(f"{'':20} {'':4} threads  asked  share (quiet)  share (all)  quiet of reps")
    for row in measure(options):
        rows.append(row)
        asked = f"{row['asked']:.2f}" if row["asked"] else "    "
        print(
            f"{row['what']:20} {row['precision']:4} {row['threads']:7}   {asked}  {row['share']:13.3f}"
            f"  {row['share_of_all']:11.3f}  {row['quiet']:5} of {row['reps']}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"isa": isas.chosen(options.isa), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
