# SPDX-License-Identifier: Apache-2.0
"""Speeds as shares of the machine's peak, on machines that others use too.

A repetition stands between two runs of a register-only loop of multiply-adds in the same process (`Peak`),
and its speed is divided by the mean of theirs. It counts if both were quiet. A core lowers its clock under
heavy vector work and takes milliseconds to raise it again, so quiet is: within a tenth of what this
contestant's neighbours reach (their 90th percentile), and at least 0.7 of the best any calibration showed,
which another tenant on the core's other thread does not leave. `rounds` takes turns between contestants; the
first call of a turn is not timed. One thread is timed by its own CPU clock, several by the wall, and then a
repetition in which any thread had to wait for a processor does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mla_oracle.fast import isa as isas

QUIET, FLOOR = 0.9, 0.7
WAITED = 0.02  # of the repetition's time, what threads together may have waited for a processor
TURN = 3  # repetitions in a turn
STEPS = 100_000  # of 12 registers: about a third of a millisecond


class Reading(NamedTuple):
    """One calibration: multiply-adds per second of all threads together, and of the slowest."""

    total: float
    slowest: float


class Peak:
    """The f32 multiply-add peak of `threads` threads under one instruction set."""

    def __init__(self, isa: str, threads: int = 1) -> None:
        self.isa, self.threads = isa, threads
        self._loop = isas.kernels("paged", "f32", isa).multiply_add
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self.best = max(self().slowest for _ in range(200))

    def _one(self) -> float:
        x = np.ones(12 * 16, np.float32)
        start = self._clock()
        flops = self._loop(STEPS * self.threads, x)  # longer where threads have to meet
        return float(flops / (self._clock() - start))

    def __call__(self) -> Reading:
        others = [self._pool.submit(self._one) for _ in range(self.threads - 1)] if self._pool else []
        speeds = [self._one(), *(other.result() for other in others)]
        return Reading(sum(speeds), min(speeds))


def waiting() -> float:
    """Seconds that this process's threads have stood ready without a processor, so far; 0 where unknown."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except OSError:  # the thread has just ended
            continue
    return total / 1e9


@dataclass
class Contestant:
    """One way to compute a problem. `call` computes; `result` hands over what the last call left, in f64."""

    name: str
    call: Callable[[], object]
    result: Callable[[], np.ndarray]
    flops: float
    slow: bool = False  # a few repetitions are enough


@dataclass
class Samples:
    """The repetitions of one contestant. `wall`: timed by the wall clock."""

    name: str
    flops: float
    peak: Peak
    wall: bool
    error: float | None = None  # of the result, relative to the largest element of the truth
    seconds: list[float] = field(default_factory=list)
    neighbours: list[tuple[Reading, Reading]] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)  # seconds in each

    def repetitions(self, quiet_only: bool = True) -> list[tuple[float, float]]:
        """(seconds, peak of all threads beside it), one for each repetition."""
        pairs = list(zip(self.seconds, self.neighbours, strict=True))
        if self.wall and quiet_only:
            lost = zip(pairs, self.waited, strict=True)
            pairs = [pair for pair, waited in lost if waited <= WAITED * pair[0]]
        if quiet_only and pairs:
            usual = float(np.percentile([r.slowest for pair in self.neighbours for r in pair], 90))
            least, most = max(QUIET * usual, FLOOR * self.peak.best), usual / QUIET
            pairs = [p for p in pairs if all(least <= r.slowest <= most for r in p[1])]
        return [(seconds, (before.total + after.total) / 2) for seconds, (before, after) in pairs]

    def share_of(self, quiet_only: bool) -> float | None:
        shares = [self.flops / seconds / peak for seconds, peak in self.repetitions(quiet_only)]
        return statistics.median(shares) if shares else None

    @property
    def share(self) -> float | None:
        """Speed over the peak of all threads: the median over quiet repetitions; None if there was none."""
        return self.share_of(quiet_only=True)

    @property
    def quiet(self) -> int:
        return len(self.repetitions())

    @property
    def rate(self) -> float | None:
        """Operations per second, not a ratio: the median over quiet repetitions."""
        speeds = [self.flops / seconds for seconds, _ in self.repetitions()]
        return statistics.median(speeds) if speeds else None

    @property
    def counts(self) -> str:
        return f"{self.quiet}/{len(self.seconds)}"

    def record(self) -> dict[str, object]:
        """For the JSON file, where alone seconds stand."""
        beside = [peak for _, peak in self.repetitions()]
        return {
            "name": self.name, "isa": self.peak.isa, "threads": self.peak.threads,
            "clock": "wall" if self.wall else "thread", "flops": self.flops, "error": self.error,
            "share": self.share, "share_of_all": self.share_of(quiet_only=False),
            "quiet": self.quiet, "repetitions": len(self.seconds),
            "peak_beside": statistics.median(beside) if beside else None,
            "median_seconds": statistics.median(self.seconds) if self.seconds else None,
            "best_seconds": min(self.seconds, default=None),
        }  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """How long to try: until each has `want` quiet repetitions, but `most` or `seconds` at most."""

    want: int
    most: int
    seconds: float
    slow_want: int  # of contestants that are slow, and twice that at most


def rounds(contestants: Iterable[Contestant], peak: Peak, effort: Effort) -> dict[str, Samples]:
    """Time the contestants, which were called before, in turns, each repetition between two calibrations."""
    wall = peak.threads > 1
    clock = time.perf_counter if wall else time.thread_time
    running = {c.name: (c, Samples(c.name, c.flops, peak, wall)) for c in contestants}
    found = {name: samples for name, (_, samples) in running.items()}
    end = time.perf_counter() + effort.seconds
    while running and (time.perf_counter() < end or not all(s.seconds for _, s in running.values())):
        for contestant, samples in running.values():
            if not contestant.slow:
                contestant.call()
            before = peak()
            for _ in range(1 if contestant.slow else TURN):
                waited, start = waiting(), clock()
                contestant.call()
                samples.seconds.append(clock() - start)
                samples.waited.append(waiting() - waited)
                after = peak()
                peak.best = max(peak.best, after.slowest)
                samples.neighbours.append((before, after))
                before = after
        for name, (contestant, samples) in list(running.items()):
            want, most = effort.want, effort.most
            if contestant.slow:
                want, most = effort.slow_want, 2 * effort.slow_want
            if samples.quiet >= want or len(samples.seconds) >= most:
                del running[name]
    return found
