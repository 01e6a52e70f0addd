# SPDX-License-Identifier: Apache-2.0
"""Paged decode on tensor cores: which problems it takes, and the launch that fills the partial states of gpu.paged.

A block holds `rows` queries of one request and passes over tiles of `keys` latent rows, as many as its shared memory
has room for: a latent row is read once for all of them. Rows are too wide where 16 queries and 32 keys do not fit.
"""

from __future__ import annotations

import numpy as np

from mla_oracle import dtypes
from mla_oracle.arrays import Array
from mla_oracle.gpu.layout import MANY, few, most_smem
from mla_oracle.gpu.machine import Buffer, Machine

FLOATS = ("f16", "bf16")
ALIGNED = 16  # bytes of a copy, and elements of a step of a product
WIDEST_VALUE = 512  # what the registers of a block hold of 64 rows
WARP, KEY_WARPS = 32, 4  # as in cuda/paged_mma.cu
TILES = (64, 64), (64, 32), (32, 32), (16, 32)  # rows and keys of a block, the largest first
# PACKED in cuda/rows.cuh, by the names of mla_oracle.formats: a format and the rule that its rows are read by.
PACKED = {
    ("fp8_e4m3", "fold"): 1,
    ("fp8_ds_mla", "f32_bf16"): 2,
    ("fp8_ds_mla", "bf16"): 3,
    ("fp8_ds_mla", "exponent"): 4,
}
DS_MLA = 576, 656  # numbers and bytes of a row of fp8_ds_mla
# Keys for each row of a block whose bytes are what the block moves beside them: a query, a partial state of twice as
# many bytes, and that state again where it is combined.
START = 4


def tile(D: int, arch: str, packed: int = 0) -> tuple[int, int] | None:
    """(rows, keys) of a block for rows of D numbers: the first of TILES that fits the shared memory, None if none."""
    room = most_smem(arch)
    return next((tile for tile in TILES if shared_bytes(D, *tile, packed) <= room), None)


def refusal(q: Buffer | Array, kv_cache: Buffer | Array, V: int, arch: str, packed: int = 0) -> str | None:
    """Why the tensor-core kernel does not take this problem on `arch`, or None. A numpy array stands for its upload."""
    query, stored, D = dtypes.name_of(q.dtype), dtypes.name_of(kv_cache.dtype), q.shape[-1]
    if packed and query not in FLOATS:
        return f"q is {query}, expected f16 or bf16"
    if not packed and (stored not in FLOATS or query != stored):
        return f"q is {query} and kv_cache {stored}, expected both f16 or both bf16"
    if packed > 1 and DS_MLA[0] != D:
        return f"D is {D}, expected {DS_MLA[0]}"
    if q.shape[0] > MANY:
        return f"q has {q.shape[0]} requests, expected at most {MANY}"
    if reason := too_wide(D, V, arch, packed):
        return reason
    for name, buffer in (("q", q), ("kv_cache", kv_cache)):
        places = [(f"has a stride on axis {axis} of", stride) for axis, stride in enumerate(buffer.strides[:-1])]
        if isinstance(buffer, Buffer):
            places.append(("begins at address", buffer.pointer))
        for what, place in places:
            if place % ALIGNED:
                return f"{name} {what} {place}, expected a multiple of {ALIGNED} bytes"
    return None


def too_wide(D: int, V: int, arch: str, packed: int = 0) -> str | None:
    """Why the kernel does not take rows of D numbers and values of V on `arch`, or None."""
    for name, size in (("D", D), ("head_dim_v", V)):
        if size % ALIGNED:
            return f"{name} is {size}, expected a multiple of {ALIGNED}"
    if V > WIDEST_VALUE or tile(D, arch, packed) is None:
        return f"D is {D} and head_dim_v {V}, expected at most {WIDEST_VALUE} and what {most_smem(arch)} bytes hold"
    return None


def launch(
    machine: Machine,
    name: str,
    q: Buffer,
    kv_cache: Buffer,
    *args: Buffer | np.generic,
    packed: int = 0,
    listed: bool = False,
) -> None:
    """Launch the kernel `name` on a problem without a `refusal`, with its arguments as they follow.

    `listed`: in place of the block table is the list of where each key's row begins (gpu.selection).
    """
    partial_out = args[4]
    assert isinstance(partial_out, Buffer)
    (B, T, H, D), (splits, V) = q.shape, partial_out.shape[-2:]
    fits = tile(D, machine.arch, packed)
    assert fits is not None
    rows, keys = fits
    few(requests=B)  # with a selection, its queries
    machine.launch(
        machine.kernel("paged_mma.cu", name, D=D, V=V, ROWS=rows, KEYS=keys, PACKED=packed, LISTED=int(listed)),
        (-(-T * H // rows), splits, B),
        (KEY_WARPS * max(1, rows // 32) * WARP, 1, 1),
        shared_bytes(D, rows, keys, packed),
        q,
        kv_cache,
        *args,
    )


def split_keys(B: int, queries: int, longest: int, arch: str, multiprocessors: int, D: int = 576) -> int:
    """Keys of a split that keep `multiprocessors` busy with B requests of `queries` = T x H rows: decode's split_keys.

    D is that of rows without a `refusal`. It is the same for the same arguments, but it is not decode's default: with
    it, bits depend on the batch and on the machine. A multiprocessor has one block at a time, so blocks run in waves,
    and a block takes as long as its keys and START more for its own queries and partial states. The least sum over the
    waves wins; of equals, the fewest splits.
    """
    fits = tile(D, arch)
    assert fits is not None
    rows, keys = fits
    groups = B * -(-queries // rows)
    most = max(1, -(-longest // keys))

    def cost(size: int) -> tuple[int, int]:
        splits = max(1, -(-longest // size))
        waves = -(-groups * splits // multiprocessors)
        return waves * (size + START * rows), splits

    return min({keys * -(-most // splits) for splits in range(1, most + 1)}, key=cost)


def row_bytes(D: int, packed: int) -> int:
    """ROW_BYTES in cuda/rows.cuh."""
    return DS_MLA[1] if packed > 1 else D if packed else 2 * D


def shared_bytes(D: int, rows: int, keys: int, packed: int = 0) -> int:
    """sizeof(Shared) in cuda/paged_mma.cu."""

    def stride(chunks: int) -> int:
        return 16 * (chunks | 1 if chunks % 8 else chunks)

    row = stride(D // 8)
    tiles = keys * (row + (row_bytes(D, packed) if packed else row))
    return rows * row + tiles + rows * stride(keys // 8 | 1) + 4 * (KEY_WARPS + 1) * rows
