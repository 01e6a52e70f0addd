# SPDX-License-Identifier: Apache-2.0
"""Paged decode on the tensor cores of Hopper, sm_90a: which problems it takes, and the launch in place of paged_mma's.

Tiles are of 64 rows and 64 keys, which is what paged_mma has of sm_90a for rows that fit here: its split_keys holds.
"""

from __future__ import annotations

import numpy as np

from mla_oracle.arrays import Array
from mla_oracle.gpu import paged_mma
from mla_oracle.gpu.layout import most_smem
from mla_oracle.gpu.machine import Buffer, Machine

ARCH = "sm_90a"
BOX = 64  # rows and columns of a box of a tile, as in cuda/wgmma.cuh
THREADS = 384  # two warpgroups compute, one copies
VALUES = (128, 256, 512)  # widths whose halves are columns of one product


def not_for(arch: str) -> str | None:
    """Why there is nothing of it on `arch`, or None."""
    return None if arch == ARCH else f"arch is {arch}, expected {ARCH}"


def refusal(q: Buffer | Array, kv_cache: Buffer | Array, V: int, arch: str) -> str | None:
    """Why the kernel does not take this problem on `arch`, or None. A numpy array stands for its upload."""
    if reason := not_for(arch):
        return reason
    if reason := paged_mma.refusal(q, kv_cache, V, arch):
        return reason
    D = q.shape[-1]
    if D % BOX:
        return f"D is {D}, expected a multiple of {BOX}"
    if V not in VALUES:
        return f"head_dim_v is {V}, expected {' or '.join(map(str, VALUES))}"
    if shared_bytes(D, V) > most_smem(arch):
        return f"D is {D} and head_dim_v {V}, expected what {most_smem(arch)} bytes hold"
    return None


def launch(machine: Machine, name: str, q: Buffer, kv_cache: Buffer, *args: Buffer | np.generic) -> None:
    """Launch the kernel `name` on a problem without a `refusal`, with its arguments as they follow."""
    partial_out = args[4]
    assert isinstance(partial_out, Buffer)
    (B, T, H, D), (splits, V) = q.shape, partial_out.shape[-2:]
    machine.launch(
        machine.kernel("paged_wgmma.cu", name, D=D, V=V),
        (-(-T * H // BOX), splits, B),
        (THREADS, 1, 1),
        shared_bytes(D, V),
        q,
        kv_cache,
        *args,
    )


def shared_bytes(D: int, V: int) -> int:
    """sizeof(Shared) in cuda/paged_wgmma.cu: queries, two tiles with a box behind the values, statistics, barriers."""
    box = 128 * BOX
    tile = box * max(D // BOX, V // BOX + 1)
    return 2 * tile + box * (D // BOX) + 6 * 4 * BOX + 7 * 8
