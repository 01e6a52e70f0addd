# SPDX-License-Identifier: Apache-2.0
"""The canonical problem on a machine: what its tensor-core kernel takes of the extensions; the rest is refused by name.

Taken, in any combination: a selection by position or by slot, a window, sinks, lse axes, q_scale, output_scale, and
packed rows of the formats and readers of paged_mma.PACKED. q is [B, T, H, D] or [B, H, D], f16 or bf16. Of fp8 rows one
scale is folded into scores and values; the rope's own, into the queries, which must hold what that makes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mla_oracle.arrays import Array
from mla_oracle.errors import UnsupportedError
from mla_oracle.formats.per_tensor import ROPE
from mla_oracle.gpu import forms, paged
from mla_oracle.gpu.layout import put
from mla_oracle.gpu.machine import Machine
from mla_oracle.gpu.paged_mma import PACKED
from mla_oracle.gpu.selection import Selection

if TYPE_CHECKING:
    from mla_oracle.canonical import Problem
    from mla_oracle.cases import PagedCase

TAKEN = (
    "topk_indices", "topk_length", "topk_by", "topk_outside", "window_left", "window_right", "window_first", "sinks",
    "sinks_in_lse", "q_scale", "output_scale", "lse_axes", "cache_format", "cache_reader", "kv_scale",
    "kpe_scale",
)  # fmt: skip


def attend(
    case: PagedCase, problem: Problem, machine: Machine, packed: int, factor: float, kernel: str | None = None
) -> tuple[Array, Array]:
    """(out [B, T, H, V], lse [B, T, H]) f32, `how` the rows are read; `kernel` is gpu.paged.decode's.

    The keys of the problem were listed, so ids and indices are right. Raises UnsupportedError where no kernel takes it.
    """
    q, cache = _arrays(case)
    q = _with_rope_scale(case, q)
    (B, T, H, _), V = q.shape, case.head_dim_v
    by_slot = case.topk_by == "slot"
    table = np.zeros((B, 1), np.int32) if by_slot else case.block_table
    lens = np.zeros(B, np.int32) if by_slot else case.seq_lens
    assert table is not None and lens is not None
    out, lse = machine.empty((B, T, H, V), np.float32), machine.empty((B, T, H), np.float32)
    forms.decode_paged(
        machine,
        put(machine, np.ascontiguousarray(q)),
        put(machine, cache),
        put(machine, table),
        put(machine, np.ascontiguousarray(lens)),
        problem.scale * factor,
        bool(case.causal),
        problem.lse_unit,
        problem.empty_lse,
        out,
        lse,
        longest=int(lens.max(initial=0)),
        kernel=kernel,
        packed=packed,
        selection=_selection(case, machine, B, T, problem),
        sinks=None if case.sinks is None else put(machine, np.ascontiguousarray(case.sinks)),
        sinks_in_lse=bool(case.sinks_in_lse),
        out_scale=problem.output_scale * factor,
    )
    return machine.download(out), machine.download(lse)


def kernel_of(case: PagedCase, arch: str, who: str, kernel: str | None = None) -> str:
    """The kernel that attends. Raises UnsupportedError."""
    packed, _ = how(case, who)
    selected = any(name in case.extensions() for name in ("topk_indices", "window_left", "window_right"))
    return paged.kernel_of(*_arrays(case), case.head_dim_v, arch, kernel, packed, selected)


def _arrays(case: PagedCase) -> tuple[Array, Array]:
    """q [B, T, H, D] and the cache [num_blocks, block_size, D], of packed rows as bytes."""
    cache = case.kv_cache[:, :, 0] if case.kv_cache.ndim == 4 else case.kv_cache
    return case.q if case.q.ndim == 4 else case.q[:, None], cache.view(np.uint8) if case.cache_format else cache


def how(case: PagedCase, who: str) -> tuple[int, float]:
    """(PACKED of the cache's rows, 0: dense; the scale that is folded into scores and values).

    Raises UnsupportedError: something of the case is not supported by `who` ("backend 'ptx'").
    """
    for name in case.extensions():
        if name not in TAKEN:
            raise UnsupportedError(f"{name} is not supported by {who}")
    if case.cache_format is None:
        return 0, 1.0
    from mla_oracle import formats

    reader = formats.get(case.cache_format).reader_of(case.cache_reader)
    packed = PACKED.get((case.cache_format, reader))
    if packed is None or (packed > 1 and case.q.dtype == np.float16):  # which it would round the rows to
        raise UnsupportedError(
            f"cache_format {case.cache_format!r} with cache_reader {reader!r} and q {case.q.dtype}"
            f" is not supported by {who}"
        )
    if case.kv_scale is None:
        return packed, 1.0
    for name in ("kv_scale", "kpe_scale"):
        if getattr(case, name) is not None and np.size(getattr(case, name)) != 1:
            raise UnsupportedError(f"{name} of every token is not supported by {who}")
    _with_rope_scale(case, case.q, who)
    return packed, float(np.reshape(case.kv_scale, ()))


def _with_rope_scale(case: PagedCase, q: Array, who: str = "this backend") -> Array:
    """q [.., D], its rope times kpe_scale / kv_scale. Raises UnsupportedError where that rounds or is of values."""
    if case.kpe_scale is None or case.kv_scale is None:
        return q
    latent, rope = (np.reshape(scale, ()).astype(np.float64) for scale in (case.kv_scale, case.kpe_scale))
    if latent == rope:
        return q
    if case.head_dim_v > q.shape[-1] - ROPE:
        raise UnsupportedError(f"kpe_scale of columns of the value is not supported by {who}")
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = q[..., -ROPE:].astype(np.float64) * (rope / latent)
        folded = np.concatenate([q[..., :-ROPE], wanted.astype(q.dtype)], axis=-1)
    if not np.array_equal(folded[..., -ROPE:].astype(np.float64), wanted, equal_nan=True):
        raise UnsupportedError(
            f"kpe_scale of {rope:g} beside a kv_scale of {latent:g} is not supported by {who}: q {q.dtype} does not"
            " hold itself times their ratio"
        )
    return folded


def _selection(case: PagedCase, machine: Machine, B: int, T: int, problem: Problem) -> Selection | None:
    left, right = (-1 if bound is None else bound for bound in (case.window_left, case.window_right))
    if case.topk_indices is None:
        if left < 0 and right < 0:
            return None
        return Selection(left=left, right=right, kept=case.window_first)
    indices = case.topk_indices.reshape(B, T, -1).astype(np.int64)
    rows = np.array([[[problem.main.num_blocks * problem.main.block_size]]])
    capacity = rows if case.topk_by == "slot" else np.asarray(case.seq_lens, np.int64)[:, None, None]
    indices = np.where((indices >= 0) & (indices < capacity), indices, -1).astype(np.int32)
    lengths = None
    if case.topk_length is not None:
        length = case.topk_length.reshape(B, -1)
        lengths = put(machine, np.ascontiguousarray(np.broadcast_to(length, (B, T)), np.int32))
    return Selection(put(machine, indices), lengths, case.topk_by == "slot", left, right, case.window_first)
