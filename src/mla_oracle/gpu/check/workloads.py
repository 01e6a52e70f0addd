# SPDX-License-Identifier: Apache-2.0
"""What is timed: a problem of each kernel with inputs larger than the caches, what it computes and moves at least.

A paged problem has its pages in a pool; where it needs fewer than twice what L2 holds, it has several tables over the
pool and several queries, and each run takes the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_oracle.gpu import absorbed_mma, forms, paged_mma
from mla_oracle.gpu.check.clock import filled
from mla_oracle.gpu.check.limits import Limits
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.machine import Buffer
from mla_oracle.gpu.paged import SPLIT_KEYS

BLOCK = 64  # rows of a page
SCALE = 0.0417
ITEM = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class Widths:
    """P, R, V of a head, L of the latent."""

    P: int = 128
    R: int = 64
    V: int = 128
    L: int = 512

    @property
    def D(self) -> int:
        return self.L + self.R


SMALL = Widths(32, 64, 32, 128)  # which every kernel takes


@dataclass(frozen=True)
class Work:
    """`run(i)` with the i-th inputs; operations and bytes are the least that the problem takes."""

    run: Callable[[int], Any]
    operations: float
    moved: float
    about: dict[str, Any]


@dataclass(frozen=True)
class Pages:
    """Several paged problems over one pool: q [B, 1, H, D] and block_table [B, blocks] of each, seq_lens of all."""

    q: list[Buffer]
    cache: Buffer
    tables: list[Buffer]
    lengths: Buffer


def pages(bench: Bench, limits: Limits, widths: Widths, dtype: str, B: int, H: int, length: int) -> Pages:
    blocks = -(-length // BLOCK)
    one = B * (blocks * BLOCK + H) * widths.D * ITEM[dtype]
    copies = max(1, min(-(-2 * limits.l2 // one), 256))
    cache = filled(bench, (copies * B * blocks, BLOCK, widths.D), dtype)
    order = np.random.default_rng(0).permutation(copies * B * blocks).astype(np.int32).reshape(copies, B, blocks)
    return Pages(
        q=[filled(bench, (B, 1, H, widths.D), dtype, seed=2 + copy) for copy in range(copies)],
        cache=cache,
        tables=[bench.machine.upload(table) for table in order],
        lengths=bench.machine.upload(np.full(B, length, np.int32)),
    )


def paged(
    bench: Bench,
    limits: Limits,
    widths: Widths,
    dtype: str,
    kernel: str,
    B: int,
    H: int,
    length: int,
    filling: bool = False,
) -> Work:
    """decode_paged whole, with the splits that it has by itself; `filling`, with those of paged_mma.split_keys."""
    problem = pages(bench, limits, widths, dtype, B, H, length)
    out, lse = bench.machine.empty((B, 1, H, widths.L), np.float32), bench.machine.empty((B, 1, H), np.float32)
    keys = SPLIT_KEYS
    if filling:
        keys = paged_mma.split_keys(B, H, length, bench.machine.arch, limits.multiprocessors, widths.D)
    about = {"splits": "filling" if filling else "decode's own", "split_keys": keys}

    def run(index: int) -> Any:
        copy = index % len(problem.tables)
        return forms.decode_paged(
            bench.machine, problem.q[copy], problem.cache, problem.tables[copy], problem.lengths, SCALE, True, 1.0,
            -np.inf, out, lse, longest=length, kernel=kernel, split_keys=keys,
        )  # fmt: skip

    operations = 2.0 * B * H * length * (widths.D + widths.L)
    moved = B * (length + H) * widths.D * ITEM[dtype] + 4.0 * B * H * (widths.L + 1)
    return Work(run, operations, moved, about)


def ends(bench: Bench, widths: Widths, dtype: str, end: str, T: int, H: int) -> Work:
    """The query ("absorb") or the projection of the absorbed form, for T tokens; on tensor cores with " mma"."""
    machine, w = bench.machine, widths
    mma, item = end.endswith(" mma"), ITEM[dtype]
    operations = 2.0 * T * H * w.L * (w.P if end.startswith("absorb") else w.V)
    if end.startswith("project"):
        o, weight = filled(bench, (T, H, w.L), "f32"), filled(bench, (H, w.V, w.L), dtype, 2)
        out = machine.empty((T, H, w.V), np.float32)
        project = absorbed_mma.up_project if mma else forms.up_project
        moved = item * H * w.V * w.L + 4.0 * T * H * (w.L + w.V)
        return Work(lambda _: project(machine, o, weight, out), operations, moved, {})
    q, weight = filled(bench, (T, H, w.P), dtype), filled(bench, (H, w.P, w.L), dtype, 2)
    moved = item * H * (T + w.L) * w.P
    if mma:
        q_pe, row = filled(bench, (T, H, w.R), dtype, 3), machine.empty((T, H, w.D), q.dtype)
        moved += item * T * H * (w.R + w.D)
        return Work(lambda _: absorbed_mma.absorb_query(machine, q, q_pe, weight, row), operations, moved, {})
    out = machine.empty((T, H, w.L), np.float32)
    return Work(lambda _: forms.absorb_query(machine, q, weight, out), operations, moved + 4.0 * T * H * w.L, {})


def dense(bench: Bench, widths: Widths, dtype: str, form: str, T: int, H: int, length: int) -> Work:
    """A form whole, "naive", "absorbed" or "absorbed mma", from q_nope to out, for T tokens at the end of one cache."""
    w, machine = widths, bench.machine
    shapes = ((T, H, w.P), (T, H, w.R), (length, w.L), (length, w.R), (H, w.P, w.L), (H, w.V, w.L))
    arrays = [filled(bench, shape, dtype, seed) for seed, shape in enumerate(shapes)]
    out = machine.empty((T, H, w.V), np.float32)
    attend: Any = {"naive": forms.attend_naive, "absorbed": forms.attend_absorbed}.get(form, absorbed_mma.attend)
    if form == "naive":
        operations = 2.0 * H * length * w.L * (w.P + w.V) + 2.0 * T * H * length * (w.P + w.R + w.V)
    else:
        operations = 2.0 * T * H * w.L * (w.P + w.V) + 2.0 * T * H * length * (w.D + w.L)
    moved = sum(float(np.prod(shape)) for shape in shapes) * ITEM[dtype] + 4.0 * T * H * w.V
    return Work(lambda _: attend(machine, *arrays, SCALE, out), operations, moved, {})


def merge(bench: Bench, widths: Widths, dtype: str, B: int, H: int) -> Work:
    machine, V, N, S = bench.machine, widths.L, B * H, 8
    states, lses = filled(bench, (S, N, V), dtype), filled(bench, (S, N), "f32", 2)
    out, lse = machine.empty((N, V), np.float32), machine.empty((N,), np.float32)
    run = lambda _: forms.merge(machine, states, lses, 1.0, -np.inf, -np.inf, out, lse)  # noqa: E731
    return Work(run, 2.0 * S * N * V, N * V * (S * ITEM[dtype] + 4.0), {"states": S})


def rope(bench: Bench, widths: Widths, dtype: str, T: int, H: int) -> Work:
    machine, R = bench.machine, widths.R
    x = filled(bench, (T, H, R), dtype)
    cosine, sine = (filled(bench, (T, R // 2), "f32", seed) for seed in (2, 3))
    out = machine.empty((T, H, R), np.float32)
    run = lambda _: forms.rotate(machine, x, cosine, sine, False, out)  # noqa: E731
    return Work(run, 3.0 * T * H * R, T * H * R * (ITEM[dtype] + 4.0), {})


def append(bench: Bench, widths: Widths, dtype: str, T: int) -> Work:
    machine, w = bench.machine, widths
    cache = filled(bench, (-(-T // BLOCK) + 1, BLOCK, w.D), dtype)
    rows, rope_rows = filled(bench, (T, w.L), dtype, 2), filled(bench, (T, w.R), dtype, 3)
    slots = machine.upload(np.arange(T, dtype=np.int64))
    run = lambda _: forms.append(machine, cache, rows, rope_rows, slots)  # noqa: E731
    return Work(run, 0.0, 2.0 * T * w.D * ITEM[dtype], {})
