# SPDX-License-Identifier: Apache-2.0
"""The paged form: an absorbed query over a latent cache in pages, online softmax, with LSE."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import dtypes
from .arrays import Array, Axes, aligned, as_array, bytes_of
from .backends import KERNELS, choose, machine, refuse_stream
from .checks import choice, number, number_type, positive_scale, thread_count, value_width
from .errors import InputError, UnsupportedError
from .geometry import show

LOG2E = 1.4426950408889634


class Attention(NamedTuple):
    """The output of a paged decode or a merge, and the log-sum-exp of its scaled scores."""

    out: Array
    lse: Array


def decode_paged(
    q: object,
    kv_cache: object,
    block_table: object,
    seq_lens: object,
    *,
    softmax_scale: float,
    head_dim_v: int,
    causal: bool = True,
    precision: str = "f32",
    backend: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    kernel: str | None = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out_dtype: str | None = None,
    stream: object = None,
    check_ids: bool = False,
) -> Attention:
    """Decode attention over a paged latent cache: key = the whole row, value = its first `head_dim_v` elements.

    q           [B, T, H, D], or [B, H, D] for T = 1
    kv_cache    [num_blocks, block_size, D]; any outer strides, innermost axis contiguous
    block_table [B, max_blocks] i32: request b's token j is row j % block_size of block block_table[b, j // block_size];
                entries past the request's length may hold anything
    seq_lens    [B] i32, cached tokens of each request, the T new ones included

    q and kv_cache are f32, f16 or bf16 (f64 too in precision "f64"), not necessarily the same.
    `causal` aligns bottom-right: query t of T sees the first seq_len - T + t + 1 tokens; a query that sees none
    is an empty row. An empty row has out 0 and lse `empty_lse`.
    `softmax_scale` has no default: the row's width does not tell the model's scale (see Geometry.softmax_scale).
    `lse_base` is "e" (lse = log sum exp) or "2". Outputs are f32, or f64 in precision "f64", unless `out_dtype`
    ("f32", "f16", "bf16", "f64") asks for a rounding of out.

    `backend`: "strict", the definition; "fast", blocked for the machine, the same answer within the bound of
    mla_oracle.fast.paged; "cuda", on a GPU, and "ptx", the same kernels interpreted, in precision "f32" and within the
    bound of mla_oracle.gpu.paged; "auto", fast for large problems (see mla_oracle.backends). `isa` picks a build of the
    fast tier; `kernel` a CUDA kernel, "scalar", "mma" (tensor cores) or "wgmma" (those of sm_90a, for which ptx then
    compiles): None is the last of them that takes the problem.
    `threads` (None: what mla_oracle.fast.threads.set_threads set, else every processor this process may use) does not
    change a bit of the result.

    Backend "cuda" takes arrays on a GPU as well (DLPack or __cuda_array_interface__: torch, cupy), without a copy and
    without waiting for them: it queues its work on `stream` (a handle, or an object with __cuda_stream__; None is the
    default stream), and out and lse are mla_oracle.gpu.foreign.DeviceArrays there, f32. block_table and seq_lens may
    stay on the host, where they are checked; on the GPU they are checked only if `check_ids`, which waits.

    Precision "f64": a score of -inf has weight 0 and its value is not touched, a row of nothing else is an empty
    row, a visible NaN (or a score of +inf) makes out and lse NaN; fast, cuda and ptx do so in "f32" too. Strict "f32"
    keeps the online recurrence's own non-finite cases: NaN out with lse `empty_lse`.

    Returns Attention(out [B, T, H, head_dim_v], lse [B, T, H]), without the T axis where q had none.
    Raises InputError for a bad argument; cuda and ptx, UnsupportedError and MissingError too (see backends.machine).
    """
    threads = thread_count(threads)
    if not isinstance(causal, (bool, np.bool_)):
        raise InputError(f"causal is {show(causal)}, expected True or False")
    if out_dtype is not None:
        choice("out_dtype", out_dtype, dtypes.STORED)
    real, allowed = number_type(precision)
    scale = positive_scale(softmax_scale, precision)
    unit = 1.0 if choice("lse_base", lse_base, ("e", "2")) == "e" else LOG2E
    empty_lse = number("empty_lse", empty_lse)
    if backend == "cuda":
        from .gpu import calls

        if calls.any_foreign(q, kv_cache, block_table, seq_lens):
            choose(backend, 0, isa, kernel)
            if precision != "f32" or out_dtype not in (None, "f32"):
                raise UnsupportedError("arrays on a GPU are computed in precision 'f32', with out_dtype 'f32'")
            arrays = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
            return Attention(
                *calls.decode_paged(
                    arrays,
                    softmax_scale=scale,
                    head_dim_v=head_dim_v,
                    causal=bool(causal),
                    lse_unit=unit,
                    empty_lse=empty_lse,
                    stream=stream,
                    check_ids=check_ids,
                    kernel=kernel,
                )
            )
    refuse_stream(stream)
    q = as_array("q", q)
    has_tokens = q.ndim != 3
    axes = Axes()
    q = axes.take("q", q, "B T H D" if has_tokens else "B H D", allowed)
    kv_cache = axes.take("kv_cache", kv_cache, "num_blocks block_size D", allowed)
    block_table = axes.take("block_table", block_table, "B max_blocks", ("i32",))
    seq_lens = axes.take("seq_lens", seq_lens, "B", ("i32",))
    head_dim_v = value_width(head_dim_v, axes["D"])
    block_table, seq_lens = aligned(block_table), aligned(seq_lens)
    tokens = count_tokens(block_table, seq_lens, axes["num_blocks"], axes["block_size"])

    q = q if has_tokens else q[:, None]
    out = np.empty((*q.shape[:3], head_dim_v), real)
    lse = np.empty(q.shape[:3], real)
    problem = (
        bytes_of("q", q),
        dtypes.STORED.index(dtypes.name_of(q.dtype)),
        bytes_of("kv_cache", kv_cache),
        dtypes.STORED.index(dtypes.name_of(kv_cache.dtype)),
        block_table,
        seq_lens,
        scale,
        bool(causal),
        unit,
        empty_lse,
        out,
        lse,
    )
    used = choose(backend, multiply_adds(q, tokens, head_dim_v), isa, kernel)
    if used in KERNELS:
        from .gpu import forms

        on, longest = machine(used, precision, threads, kernel), int(seq_lens.max(initial=0))
        cache, table = forms.pages_in_use(kv_cache, block_table, seq_lens)
        arguments = q, cache, table, seq_lens, scale, causal, unit, empty_lse
        forms.fill(forms.decode_paged, on, *arguments, outputs=(out, lse), longest=longest, kernel=kernel)
    elif out.size and used == "fast":
        from .fast import paged

        paged.decode(*problem, threads, isa)
    elif out.size:
        from .reference import _paged

        _paged.decode(*problem)
    if out_dtype is not None:
        out = dtypes.round_to(out, out_dtype)
    return Attention(out, lse) if has_tokens else Attention(out[:, 0], lse[:, 0])


def multiply_adds(q: Array, tokens: int, head_dim_v: int) -> int:
    """How large a problem is, for `backends.choose`: q [B, ..., D] over requests of `tokens` tokens in all."""
    pairs: int = math.prod(q.shape[1:-1]) * tokens
    return pairs * (int(q.shape[-1]) + head_dim_v)


def count_tokens(block_table: Array, seq_lens: Array, num_blocks: int, block_size: int) -> int:
    """The sum of the lengths, each in its table's reach, with every block id within a length in the cache."""
    from ._pages import scan

    if block_size == 0:
        raise InputError("kv_cache has block_size 0, expected 1 or more")
    tokens, b, slot = scan(block_table, seq_lens, num_blocks, block_size)
    if b < 0:
        return tokens
    if seq_lens[b] < 0:
        raise InputError(f"seq_lens[{b}] is {seq_lens[b]}, expected 0 or more")
    if slot < 0:
        max_blocks = block_table.shape[1]
        raise InputError(
            f"seq_lens[{b}] is {seq_lens[b]}, expected at most {max_blocks * block_size}:"
            f" block_table has {max_blocks} blocks of {block_size} a request"
        )
    raise InputError(
        f"block_table[{b}, {slot}] is {block_table[b, slot]}, expected 0 to {num_blocks - 1}:"
        f" seq_lens[{b}] is {seq_lens[b]}, and kv_cache has {num_blocks} blocks"
    )
