# SPDX-License-Identifier: Apache-2.0
"""Speed of the PTX interpreter on a tensor-core paged decode: python benchmarks/ptx.py [--rows N] [--arch sm_80]

Prints (head x cached row) per second on one core, with every check and with bounds alone, and what that is beside
the strict CPU kernel of the same problem in f32, both timed in turn. 500,000 per second with checks is asked.
The kernel is tests/ptx/tensor_decode.cu; its launch and its problem are tests/ptx/decode.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ptx"))

ASKED = 500_000
TURNS = 7


def seconds(calls: list[Callable[[], object]]) -> list[float]:
    """The fastest of several turns of each call, in processor time of this thread."""
    best = [float("inf")] * len(calls)
    for _ in range(TURNS):
        for index, call in enumerate(calls):
            start = time.thread_time()
            call()
            best[index] = min(best[index], time.thread_time() - start)
    return best


def main() -> None:
    from decode import HEADS, Problem, V

    from mla_oracle import decode_paged
    from mla_oracle.ptx import Interpreter

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=4096, help="cached rows; default: 4096")
    options.add_argument("--arch", default="sm_90")
    chosen = options.parse_args()
    problem = Problem([chosen.rows])
    checked, bare = (Interpreter(chosen.arch, checks=checks, threads=1) for checks in (True, False))

    def strict() -> object:
        arrays = (problem.q, problem.cache, problem.table, problem.lens)
        return decode_paged(*arrays, softmax_scale=float(problem.scale), head_dim_v=V, backend="strict")

    calls = [lambda: problem.launch(checked), lambda: problem.launch(bare), strict]
    for call in calls:
        call()
    times = seconds(calls)
    work = HEADS * chosen.rows
    out, _ = problem.launch(checked)
    assert np.isfinite(out).all()
    print(f"{chosen.arch}, 16 heads x {chosen.rows} rows, D = 576, one core")
    for name, took in zip(("with checks", "bounds alone", "strict f32"), times, strict=True):
        print(f"{name:13s} {work / took:12,.0f} (head x row)/s   {times[2] / took:6.2f} of strict")
    print(f"asked: {ASKED:,} with checks: {'reached' if work / times[0] >= ASKED else 'missed'}")


if __name__ == "__main__":
    main()
