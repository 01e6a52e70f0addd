# SPDX-License-Identifier: Apache-2.0
"""Paged decode on a machine: `decode` takes what the strict kernel takes, and fills the same outputs.

A request's keys are cut into splits of `split_keys`, counted from its first key, or into MOST_SPLITS of whole tiles
where that would be more; a block of threads does one split of a query, or of several on tensor cores (gpu.paged_mma,
gpu.paged_wgmma), and the splits are combined in ascending order. So a row's bits depend on its own request and on
`split_keys`, not on the batch it stands in, or on where its pages lie; those of tensor cores also on the tile that an
architecture has room for.

`split_keys` is SPLIT_KEYS unless a caller says otherwise, as only gpu.check does: the public forms run splits of 512
keys on every machine. paged_mma.split_keys is the rule that fills a machine; with it bits would depend on the batch
and the machine. Of 32k keys at B = 1 and T x H = 64 an H200 then takes 256 keys a split, at B = 128 all of them:
decode's own are half as many blocks as it has room for at B = 1, and 64 times the partial states at B = 128.
"""

from __future__ import annotations

import numpy as np

from mla_oracle import dtypes
from mla_oracle.arrays import Array
from mla_oracle.checks import choice
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.gpu import paged_mma, paged_wgmma
from mla_oracle.gpu.layout import THREADS, few, name_of, narrow, put, strides
from mla_oracle.gpu.layout import packed as dense
from mla_oracle.gpu.machine import Buffer, Machine
from mla_oracle.gpu.selection import Selection

FLOATS = ("f32", "f16", "bf16")
SPLIT_KEYS = 512
KERNELS = ("scalar", "mma", "wgmma")
MOST_SPLITS = 64  # as in cuda/splits.cuh
NO_FAULT = np.uint64(2**64 - 1)


def decode(
    machine: Machine,
    q: Buffer,
    kv_cache: Buffer,
    block_table: Buffer,
    seq_lens: Buffer,
    softmax_scale: float,
    causal: bool,
    lse_unit: float,
    empty_lse: float,
    out: Buffer,
    lse: Buffer,
    *,
    longest: int | None = None,
    split_keys: int = SPLIT_KEYS,
    kernel: str | None = None,
    packed: int = 0,
    selection: Selection | None = None,
    sinks: Buffer | None = None,
    sinks_in_lse: bool = False,
    out_scale: float = 1.0,
) -> str:
    """Fill `out` [B, T, H, V] and `lse` [B, T, H], times `lse_unit`; both f32 and contiguous. Returns who did.

    q [B, T, H, D] and kv_cache [num_blocks, block_size, D] are f32, f16 or bf16, not necessarily the same;
    block_table [B, max_blocks] and seq_lens [B] are i32. Any outer strides of whole elements. Query t of T sees the
    first seq_len - T + t + 1 keys, or all if not causal; other slots are never touched. A score of -inf has weight 0
    and its value is not touched; a visible NaN or score of +inf makes out and lse NaN; a row without keys, or with
    scores of -inf alone, is zeros and `empty_lse`.

    `kernel` is "scalar", "mma" (tensor cores, gpu.paged_mma), "wgmma" (those of sm_90a, gpu.paged_wgmma), or None: the
    last of them that takes the problem.
    `longest`: no length in seq_lens is larger; None is what the block table can hold. Lengths and ids are taken as
    they are, see `check_ids`.

    For a row with n keys of D numbers and weights p, with size = max over keys of sum_d |q_d| |k_d| * |scale| (which
    must be finite in f32), eps = 2^-23 and tiny = 2^-126, the result differs from strict f64's over the same stored
    numbers by at most

        relative = eps * ((D/32 + 12) * size + n + 32) + 2 D tiny |scale|
        out:  relative * (sum p |v| / sum p) + n * tiny * (1 + max |v|)
        lse:  (relative + 2 eps (max |score| + 2 log n)) * lse_unit

    D/32 + 12: a lane's products, the sum over the lanes (5), scale, and the subtractions of the maxima (of a tile, of
    the row, twice each), of the weights and of their sum; n: the sums over keys, a rounding (eps/2) for each key, with
    a rescaling for each tile of 32 and split; 32: exp (2 ulp), the lanes' sum, the division; tiny: weights and products
    below it may count as 0; the LSE: log (2 ulp), its sum and its unit.

    On tensor cores, which may truncate where they add (a product of 16 and a sum is 17 addends), and with weights
    rounded to the cache's dtype, u = 2^-8 of bf16 or 2^-11 of f16, whose smallest step is 2^-24,

        relative = eps * ((1.1 D + 16) * size + 1.6 n + 32) + 2 D tiny |scale|
        out:  (relative + u) * (sum p |v| / sum p) + n * (tiny + 2^-24 if f16) * (1 + max |v|)

    What the tensor-core kernel takes besides, and it alone but for sinks: `packed`, one of paged_mma.PACKED: kv_cache
    is u8 [num_blocks, block_size, bytes of a row]; `selection`, the keys of each query (gpu.selection), in place of the
    block table's, which is then [B, 0] where they are slots. `sinks` [H] f32: the logit of a key without a value, which
    the LSE counts if `sinks_in_lse`; a row that sees no key is an empty row whatever its sink. `out_scale` multiplies
    out. Bounds: sinks add 2 eps to out and eps max |sink| to the LSE; out_scale, eps.

    Scratch: B x T x H x splits x (V + 2) numbers, splits being those of `longest`.
    Raises InputError for arrays that do not fit, UnsupportedError for D above 4096, H or B above 65535, or a kernel
    that does not take the problem.
    """
    B, T, H, D = q.shape
    V, block_size = out.shape[-1], kv_cache.shape[1]
    if longest is None:
        longest = block_table.shape[1] * block_size
    if not 1 <= split_keys < 2**31:
        raise InputError(f"split_keys is {split_keys}, expected 1 or more, below 2^31")
    splits = min(MOST_SPLITS, max(1, -(-longest // split_keys)))
    name = kernel_of(q, kv_cache, V, machine.arch, kernel, packed, selection is not None)
    narrow(D=D)
    few(H=H)
    width = paged_mma.row_bytes(D, packed) if packed else D
    if kv_cache.shape[2] != width or V > D:
        raise InputError(
            f"kv_cache is {list(kv_cache.shape)}, expected rows of {width}: q has {D} elements, out {V} at most that"
        )
    query = dtypes.STORED.index(name_of("q", q, *FLOATS))
    q_strides = strides("q", q, *FLOATS)
    cache_strides = strides("kv_cache", kv_cache, *(("u8",) if packed else FLOATS))
    table_strides = strides("block_table", block_table, "i32")
    dense("seq_lens", seq_lens, (B,), "i32")
    dense("out", out, (B, T, H, V), "f32")
    dense("lse", lse, (B, T, H), "f32")
    if sinks is not None:
        dense("sinks", sinks, (H,), "f32")
    if 0 in out.shape:
        return "none"
    if selection is not None:
        keys, seq_lens = selection.list_keys(
            machine, block_table, seq_lens, q.shape, block_size, cache_strides, table_strides, causal, longest
        )
        q, block_table, table_strides = selection.queries(q), keys, [np.int64(keys.shape[1])]
        q_strides = strides("q", q, *FLOATS)
        B, T, causal, longest = B * T, 1, False, keys.shape[1]
        splits = min(MOST_SPLITS, max(1, -(-longest // split_keys)))

    partial_out = machine.empty((B * T, H, splits, V), np.float32)
    partial_max = machine.empty((B * T, H, splits), np.float32)
    partial_sum = machine.empty((B * T, H, splits), np.float32)
    problem = (kv_cache, block_table, seq_lens, np.float32(softmax_scale), np.int32(causal))
    partial = (partial_out, partial_max, partial_sum)
    far = (*q_strides, *cache_strides, *table_strides)
    if name.startswith("paged_decode"):
        machine.launch(
            machine.kernel("paged.cu", name),
            (B * T, H, splits),
            (THREADS, 1, 1),
            4 * (D + V),
            q,
            np.int32(query),
            *problem,
            *partial,
            *map(np.int32, (T, D, V, block_size, split_keys)),
            *far,
        )
    else:
        sizes = map(np.int32, (T, H, block_size, split_keys))
        rest: tuple[Buffer | np.generic, ...] = (*problem[1:], *partial, *sizes, *far)
        if name.startswith("paged_wgmma"):
            paged_wgmma.launch(machine, name, q, kv_cache, *rest)
        else:
            paged_mma.launch(machine, name, q, kv_cache, *rest, packed=packed, listed=selection is not None)
    machine.launch(
        machine.kernel("paged.cu", "paged_combine_f32"),
        (B * T, H, 1),
        (THREADS, 1, 1),
        0,
        *partial,
        seq_lens,
        np.int32(causal),
        np.float32(lse_unit),
        np.float32(empty_lse),
        sinks,
        np.int32(sinks_in_lse),
        np.float32(out_scale),
        out,
        lse,
        *map(np.int32, (T, V, splits, split_keys)),
    )
    return name


def kernel_of(
    q: Buffer | Array,
    kv_cache: Buffer | Array,
    head_dim_v: int,
    arch: str,
    kernel: str | None = None,
    packed: int = 0,
    selected: bool = False,
) -> str:
    """The kernel that `decode` launches for this problem on `arch`; numpy arrays stand for their uploads.

    Raises UnsupportedError for one that was named and does not take the problem, or where only one could and does not;
    InputError for no such name.
    """
    choice("kernel", kernel or "mma", KERNELS)
    plain = not (packed or selected)
    if not plain and kernel in ("scalar", "wgmma"):
        raise UnsupportedError(f"kernel {kernel!r} takes neither packed rows nor a selection")
    if plain and kernel in (None, "wgmma"):
        reason = paged_wgmma.refusal(q, kv_cache, head_dim_v, arch)
        if reason is None:
            return f"paged_wgmma_{dtypes.name_of(q.dtype)}"
        if kernel:
            raise UnsupportedError(f"kernel 'wgmma' does not take this problem: {reason}")
    if kernel != "scalar":
        reason = paged_mma.refusal(q, kv_cache, head_dim_v, arch, packed)
        if reason is None:
            return f"paged_mma_{dtypes.name_of(q.dtype)}"
        if kernel or not plain:
            raise UnsupportedError(f"kernel 'mma' does not take this problem: {reason}")
    return f"paged_decode_{dtypes.name_of(kv_cache.dtype)}"


def pages_in_use(kv_cache: Array, block_table: Array, seq_lens: Array) -> tuple[Array, Array]:
    """The cache and the table of the blocks in use alone, where that leaves out most of the cache.

    A cache is copied to the machine as a whole, and may be larger than any memory: mapped, empty but for its blocks.
    """
    slots = np.arange(block_table.shape[1])
    used = slots < -(-seq_lens.astype(np.int64) // kv_cache.shape[1])[:, None]  # [B, max_blocks]
    ids = np.unique(block_table[used])
    if 2 * len(ids) >= len(kv_cache):
        return kv_cache, block_table
    return kv_cache[ids], np.where(used, np.searchsorted(ids, block_table), -1).astype(np.int32)


def check_ids(
    machine: Machine, block_table: Buffer, seq_lens: Buffer, num_blocks: int, block_size: int
) -> tuple[int, int]:
    """(b, slot): where the first fault is in lengths and ids that are on the machine, as `_pages.scan` says it.

    b is -1 if there is none; slot is -1 if seq_lens[b] is negative or past the table, else the index of an id that no
    block has. It waits for the machine.
    """
    B, max_blocks = block_table.shape
    (table_request,) = strides("block_table", block_table, "i32")
    dense("seq_lens", seq_lens, (B,), "i32")
    if B == 0:
        return -1, -1
    fault = put(machine, np.array([NO_FAULT]))
    machine.launch(
        machine.kernel("paged.cu", "paged_check_ids"),
        (-(-B // THREADS), 1, 1),
        (THREADS, 1, 1),
        0,
        block_table,
        seq_lens,
        np.int64(num_blocks),
        fault,
        *map(np.int32, (B, max_blocks, block_size)),
        table_request,
    )
    found = int(machine.download(fault)[0])
    if found == NO_FAULT:
        return -1, -1
    return found // (max_blocks + 1), found % (max_blocks + 1) - 1
