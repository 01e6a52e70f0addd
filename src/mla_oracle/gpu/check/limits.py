# SPDX-License-Identifier: Apache-2.0
"""What a machine can do at most, measured beside the kernels: a copy of memory, a product of matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mla_oracle.gpu.check import clock
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Finding
from mla_oracle.gpu.device import Device

CHUNK, COPIED = 16, 8  # bytes, and chunks of a thread of bench_copy


@dataclass(frozen=True)
class Limits:
    """`copy`: GB/s read and written together; `matmul`: TFLOP/s of bf16; `l2` in bytes."""

    copy: float
    matmul: float
    multiprocessors: int
    l2: int
    memory: int


def measure(bench: Bench) -> tuple[Limits, list[Finding]]:
    multiprocessors, l2, memory = 2, 1 << 12, 1 << 28
    if isinstance(bench.machine, Device):
        from mla_oracle.gpu import driver

        multiprocessors = bench.machine.attribute("MULTIPROCESSOR_COUNT")
        l2 = bench.machine.attribute("L2_CACHE_SIZE")
        memory = driver.describe()["devices"][bench.machine.ordinal]["memory"]
    copied, copy = _copy(bench, memory)
    products, product = _products(bench, multiprocessors)
    found: list[Finding] = [
        {"name": "limit: copy", "ok": None, "microseconds": copied, "gbs": copy},
        {"name": "limit: mma from registers", "ok": None, "microseconds": products, "tflops": product},
    ]
    matmul = product
    try:
        if isinstance(bench.machine, Device):
            taken, matmul = _torch(bench)
            found.append({"name": "limit: torch.matmul", "ok": None, "microseconds": taken, "tflops": matmul})
    except ImportError:
        pass
    return Limits(copy, matmul, multiprocessors, l2, memory), found


def _copy(bench: Bench, memory: int) -> tuple[float, float]:
    """(microseconds, GB/s) of a copy far larger than any cache."""
    size = (1 << 14) if bench.small else min(1 << 31, memory // 8)
    source, target = clock.filled(bench, (size // 4,), "f32"), bench.machine.empty((size // 4,), np.float32)
    kernel = bench.machine.kernel(clock.FILE, "bench_copy")
    grid = (-(-size // (CHUNK * COPIED * clock.THREADS)), 1, 1)

    def work(_: int) -> None:
        bench.machine.launch(kernel, grid, (clock.THREADS, 1, 1), 0, source, target, np.int64(size // CHUNK))

    taken = clock.microseconds(bench, work)
    return taken, 2e-3 * size / taken


def _products(bench: Bench, multiprocessors: int) -> tuple[float, float]:
    """(microseconds, TFLOP/s) of our own mma.sync, with operands that never leave the registers."""
    steps, blocks = (2, 1) if bench.small else (4096, 8 * multiprocessors)
    numbers = clock.filled(bench, (6 * 32 * 2,), "bf16")
    out = bench.machine.empty((blocks * clock.THREADS,), np.float32)
    kernel = bench.machine.kernel(clock.FILE, "bench_mma_bf16")

    def work(_: int) -> None:
        bench.machine.launch(kernel, (blocks, 1, 1), (clock.THREADS, 1, 1), 0, numbers, out, np.int32(steps))

    taken = clock.microseconds(bench, work)
    return taken, 1e-6 * blocks * (clock.THREADS // 32) * steps * 8 * (2 * 16 * 8 * 16) / taken


def _torch(bench: Bench) -> tuple[float, float]:
    import torch

    n = 8192
    a, b = (torch.randn(n, n, device="cuda").to(torch.bfloat16) for _ in range(2))
    taken = clock.microseconds(bench, lambda _: torch.matmul(a, b))
    return taken, 1e-6 * 2 * n**3 / taken
