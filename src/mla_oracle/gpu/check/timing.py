# SPDX-License-Identifier: Apache-2.0
"""Every kernel at B in {1, 32, 128}, H in {16, 64, 128} and lengths of 1k, 4k and 32k, beside a copy and a matmul.

TFLOP/s and GB/s are of what the problem takes at least: whatever a kernel reads twice or computes in vain counts
against it. `of_copy` and `of_matmul` are fractions of what limits.py measured in the same run.
Paged decode is timed with the splits that it has, whatever the batch; on tensor cores of bf16 with those of
paged_mma.split_keys too, "filling", which fill the machine. `splits` and `split_keys` say which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mla_oracle.gpu import paged_wgmma
from mla_oracle.gpu.check import clock, limits, workloads
from mla_oracle.gpu.check.limits import Limits
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Finding
from mla_oracle.gpu.check.workloads import Widths, Work

BATCHES, HEADS, LENGTHS = (1, 32, 128), (16, 64, 128), (1024, 4096, 32768)
SMALL = ((1, 2), (4,), (40,))
LONGEST = 0.5  # seconds of one run: what would take longer is left out
RESERVE = 5.0  # seconds of the budget that are left to the end


@dataclass(frozen=True)
class Subject:
    """A kernel, or a form whole. `make` takes those of B, H and length that it depends on, `size` too: its bytes."""

    name: str
    axes: str
    make: Callable[..., Work]
    size: Callable[..., float]


def findings(bench: Bench) -> Iterator[Finding]:
    yield {"name": "clock", "ok": None, "by": "wall clock, interpreted: no speed" if bench.small else "CUDA events"}
    limit, found = limits.measure(bench)
    yield from found
    grid = SMALL if bench.small else (BATCHES, HEADS, LENGTHS)
    for subject in subjects(bench, limit, workloads.SMALL if bench.small else Widths()):
        yield from _timed(bench, limit, subject, grid)


def subjects(bench: Bench, limit: Limits, w: Widths) -> list[Subject]:
    """In the order of what matters most, for the case that time runs out."""

    def cache(dtype: str) -> Callable[..., float]:
        return lambda B, H, n: workloads.ITEM[dtype] * B * (n + H) * w.D + 12.0 * B * H * (-(-n // 512)) * (w.L + 2)

    def paged(dtype: str, kernel: str, filling: bool = False) -> Subject:
        make = lambda B, H, n: workloads.paged(bench, limit, w, dtype, kernel, B, H, n, filling)  # noqa: E731
        return Subject(f"paged {kernel} {dtype}{' filling' if filling else ''}", "BHn", make, cache(dtype))

    def ends(dtype: str, end: str) -> Subject:
        make = lambda *sizes: workloads.ends(bench, w, dtype, end, *sizes)  # noqa: E731
        return Subject(f"{end} {dtype}", "BH", make, lambda B, H: 4.0 * H * w.L * (2 * B + w.P + w.V))

    def dense(dtype: str, form: str) -> Subject:
        make = lambda *sizes: workloads.dense(bench, w, dtype, form, *sizes)  # noqa: E731
        scratch = lambda B, H, n: 4.0 * H * n * (w.P + w.V) + 8.0 * B * H * w.L  # noqa: E731
        return Subject(f"{form} {dtype}", "BHn", make, scratch)

    def small(dtype: str, form: str, axes: str) -> Subject:
        makes: dict[str, Callable[..., Work]]
        makes = {"merge": workloads.merge, "rope": workloads.rope, "append": workloads.append}
        return Subject(f"{form} {dtype}", axes, lambda *sizes: makes[form](bench, w, dtype, *sizes), lambda *sizes: 0)

    cores = ("mma", "wgmma") if bench.machine.arch == paged_wgmma.ARCH else ("mma",)
    return [
        *(paged("bf16", kernel, filling) for kernel in cores for filling in (False, True)),
        *(paged("f16", kernel) for kernel in cores),
        *(paged(dtype, "scalar") for dtype in ("bf16", "f16", "f32")),
        *(ends(dtype, f"{end} mma") for dtype in ("bf16", "f16") for end in ("absorb", "project")),
        *(ends(dtype, end) for dtype in ("bf16", "f32") for end in ("absorb", "project")),
        *(small(dtype, form, "BH") for form in ("merge", "rope") for dtype in workloads.ITEM),
        *(small(dtype, "append", "B") for dtype in workloads.ITEM),
        *(dense(dtype, "absorbed mma") for dtype in ("bf16", "f16")),
        *(dense(dtype, "absorbed") for dtype in ("bf16", "f32")),
        dense("f32", "naive"),
    ]


def _timed(bench: Bench, limit: Limits, subject: Subject, grid: tuple[tuple[int, ...], ...]) -> Iterator[Finding]:
    axes = [values for axis, values in zip("BHn", grid, strict=True) if axis in subject.axes]
    rate = 0.0  # operations or bytes a microsecond, of the point before
    for sizes in sorted(itertools.product(*axes), key=lambda sizes: _product(sizes)):
        shown = dict(zip((axis for axis in "BHn" if axis in subject.axes), sizes, strict=True))
        name = f"{subject.name} " + " ".join(f"{axis}={size}" for axis, size in shown.items())
        if bench.left < RESERVE:
            yield {"name": f"{subject.name} and what follows", "ok": None, "reason": "no time was left"}
            return
        if subject.size(*sizes) > 0.8 * limit.memory:
            yield {"name": name, "ok": None, "left_out": f"needs {subject.size(*sizes) / 1e9:.0f} GB"}
            continue
        if subject.axes.startswith("BHn") and subject.name.split()[0] in ("naive", "absorbed") and sizes[0] > sizes[2]:
            continue  # queries are rows of the cache
        if rate and _product(sizes) / rate > LONGEST * 1e6:
            yield {"name": name, "ok": None, "left_out": f"would take {_product(sizes) / rate / 1e6:.1f} s a run"}
            continue
        work = subject.make(*sizes)
        taken = clock.microseconds(bench, work.run)
        rate = _product(sizes) / taken
        tflops, gbs = 1e-6 * work.operations / taken, 1e-3 * work.moved / taken
        yield {
            "name": name,
            "ok": None,
            "subject": subject.name,
            **shown,
            **work.about,
            "microseconds": round(taken, 2),
            "tflops": tflops,
            "gbs": gbs,
            "of_copy": gbs / limit.copy,
            "of_matmul": tflops / limit.matmul,
        }
        del work  # before the next one's inputs are made


def _product(sizes: tuple[int, ...]) -> float:
    total = 1.0
    for size in sizes:
        total *= size
    return total
