# SPDX-License-Identifier: Apache-2.0
"""How long work takes on a machine: the device's own events, or the wall clock where the interpreter stands in.

The stream is kept busy while the host queues the work and its events, so that no gap of the host's is timed. Before
each run other memory is read, twice what L2 holds: inputs come from memory, as between the layers of a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from statistics import median

import numpy as np

from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.device import Device
from mla_oracle.gpu.machine import Buffer

FILE = "check/bench.cu"
SECONDS = 0.1  # of repetitions
MOST, LEAST = 30, 3  # repetitions; one of what takes longer
CYCLES = 2_000_000_000  # of a multiprocessor a second, at least
THREADS, CHUNK, READ = 128, 16, 8  # of a block; bytes, and chunks of a thread of bench_read


def microseconds(bench: Bench, work: Callable[[int], object]) -> float:
    """The median time of work(1), work(2), ..., after work(0) has warmed it up."""
    machine = bench.machine
    if not isinstance(machine, Device):
        times = []
        for index in range(LEAST):
            begin = time.perf_counter()
            work(index)
            times.append(time.perf_counter() - begin)
        return 1e6 * median(times[1:])

    work(0)
    machine.synchronize()
    begin = time.perf_counter()
    work(1)
    queued = time.perf_counter() - begin
    machine.synchronize()
    whole = time.perf_counter() - begin
    count = max(LEAST if whole < SECONDS else 1, min(MOST, int(SECONDS / whole)))
    wait(machine, 1.5 * count * (queued + 50e-6) + 500e-6)
    events = []
    for index in range(count):
        read_other_memory(machine)
        first = machine.record()
        work(index + 2)
        events.append((first, machine.record()))
    machine.synchronize()
    return 1e3 * median(machine.milliseconds(*pair) for pair in events)


def read_other_memory(device: Device) -> None:
    """Queue reads that leave nothing else in L2."""
    size = 2 * device.attribute("L2_CACHE_SIZE")
    chunks = size // CHUNK
    if chunks:
        grid = (-(-chunks // (READ * THREADS)), 1, 1)
        kernel = device.kernel(FILE, "bench_read")
        device.launch(kernel, grid, (THREADS, 1, 1), 0, *_other_memory(device, size), np.int64(chunks))


@lru_cache(maxsize=1)
def _other_memory(device: Device, size: int) -> tuple[Buffer, Buffer]:
    return device.empty((size,), np.uint8), device.empty((1,), np.uint32)


def wait(device: Device, seconds: float) -> None:
    """Queue something that takes about as long, a fifth of a second at most."""
    cycles = int(min(seconds, 0.2) * CYCLES)
    device.launch(device.kernel(FILE, "bench_wait"), (1, 1, 1), (1, 1, 1), 0, np.int64(cycles))


def filled(bench: Bench, shape: tuple[int, ...], dtype: str, seed: int = 1, size: float = 1.0) -> Buffer:
    """Numbers from -size to size, made where they lie; an even number of them."""
    from mla_oracle import dtypes

    n = int(np.prod(shape, dtype=np.int64))
    buffer = bench.machine.empty(shape, dtypes.dtype(dtype))
    threads = n if dtype == "f32" else n // 2
    kernel = bench.machine.kernel(FILE, f"bench_fill_{dtype}")
    grid = (-(-threads // THREADS), 1, 1)
    bench.machine.launch(kernel, grid, (THREADS, 1, 1), 0, buffer, np.int64(n), np.uint32(seed), np.float32(size))
    return buffer
