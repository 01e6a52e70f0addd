# SPDX-License-Identifier: Apache-2.0
"""Case -> expected results: every kind of case, through the public forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import canonical, dense, paged
from .append import append_kv
from .arrays import Array, Axes
from .backends import KERNELS, choose, machine
from .cases import AbsorbedCase, AppendCase, Case, DenseCase, MergeCase, PagedCase, RopeCase, placement
from .checks import WIDE_FLOATS
from .errors import InputError
from .geometry import Geometry, Yarn
from .shards import shard
from .states import merge_states

DENSE_AXES = {
    "q_nope": "t_q H P",
    "q_pe": "t_q H R",
    "c_kv": "t_kv L",
    "k_pe": "t_kv R",
    "w_uk": "H P L",
    "w_uv": "H V L",
}


def expected(
    case: Case,
    *,
    precision: str = "f64",
    backend: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    kernel: str | None = None,
) -> dict[str, Array]:
    """The results of `case` by name: out, and lse where the form has one; the written kv_cache of an append case.

    `kernel` is decode_paged's and attend_absorbed's, for a case of theirs; `isa` is for paged and the dense forms.
    A sharded paged case has partial_out [S, ...] and partial_lse [S, ...] too, and out is their merge.
    Raises InputError for a case that is not valid; cuda and ptx, UnsupportedError and MissingError too.
    """
    choose(backend, 0, isa, kernel)
    if kernel is not None and not isinstance(case, AbsorbedCase | PagedCase):
        raise InputError(f"kernel is {kernel!r}, expected None for a {case.kind} case")
    if isa is not None and not isinstance(case, DenseCase | PagedCase):
        raise InputError(f"isa is {isa!r}, expected None for a {case.kind} case")
    single = backend if backend in KERNELS else "strict"
    match case:
        case DenseCase():
            of_form = {"kernel": kernel} if isinstance(case, AbsorbedCase) else {}
            return {"out": _dense(case, precision=precision, backend=backend, threads=threads, isa=isa, **of_form)}
        case PagedCase():
            if case.extensions():
                how = {"precision": precision, "backend": backend, "threads": threads, "isa": isa, "kernel": kernel}
                return canonical.attend(case, **how)._asdict()  # type: ignore[arg-type]
            return _paged(case, precision=precision, backend=backend, threads=threads, isa=isa, kernel=kernel)
        case MergeCase():
            merged = merge_states(
                case.partial_out,
                case.partial_lse,
                precision=precision,
                lse_base=case.lse_base,
                empty_lse=case.empty_lse,
                backend=single,
            )
            return merged._asdict()
        case RopeCase():
            return {"out": _rope(case, precision, single)}
        case AppendCase():
            cache = case.kv_cache.copy()
            append_kv(cache, case.c_kv, case.k_pe, case.slot_mapping, backend=single)
            return {"kv_cache": cache}
    raise TypeError(f"no such case: {case!r}")


def check_shapes(case: Case) -> None:
    """Raise InputError for a tensor of another rank, dtype or size than the case's kind has."""
    axes = Axes()
    match case:
        case DenseCase():
            for name, letters in DENSE_AXES.items():
                axes.take(name, getattr(case, name), letters, WIDE_FLOATS)
        case PagedCase():
            if case.extensions():
                canonical.checked(case, "f64")
                return
            axes.take("q", case.q, "B H D" if case.q.ndim == 3 else "B T H D", WIDE_FLOATS)
            axes.take("kv_cache", case.kv_cache, "pages block_size D", WIDE_FLOATS)
            axes.take("block_table", case.block_table, "B max_blocks", ("i32",))
            axes.take("seq_lens", case.seq_lens, "B", ("i32",))


def backend_of(case: Case, backend: str = "auto", isa: str | None = None) -> str:
    """Which backend `expected` uses for a valid case: not "auto", and "strict" where a kind has no fast one."""
    match case:
        case DenseCase():
            size = dense.multiply_adds(case.kind, _geometry(case), len(case.q_nope), len(case.c_kv))
            return choose(backend, size, isa)
        case PagedCase():
            if case.extensions():
                used = canonical.backend_of(canonical.checked(case, "f64"), backend, isa)
                if used in KERNELS:
                    from .gpu import canonical as of_kernels

                    of_kernels.how(case, f"backend {used!r}")
                return used
            size = paged.multiply_adds(case.q, int(case.seq_lens.sum(dtype=np.int64)), case.head_dim_v)
            return choose(backend, size, isa)
    return backend if backend in KERNELS else "strict"


def kernel_of(case: Case, backend: str, kernel: str | None = None) -> str | None:
    """Who attends in `expected` of a paged or absorbed case on cuda or ptx: "paged_mma_bf16"; else None."""
    if backend not in KERNELS or not isinstance(case, AbsorbedCase | PagedCase):
        return None
    arch = machine(backend, kernel=kernel).arch
    if isinstance(case, AbsorbedCase):
        from .gpu import absorbed_mma

        return absorbed_mma.kernel_of(tuple(getattr(case, name) for name in DENSE_AXES), arch, kernel)
    if case.extensions():
        from .gpu import canonical as of_kernels

        return of_kernels.kernel_of(case, arch, f"backend {backend!r}", kernel)
    from .gpu.paged import kernel_of

    return kernel_of(case.q, case.kv_cache, case.head_dim_v, arch, kernel)


def _geometry(case: DenseCase) -> Geometry:
    axes = Axes()
    axes.take("q_nope", case.q_nope, "t_q H P", WIDE_FLOATS)
    axes.take("k_pe", case.k_pe, "t_kv R", WIDE_FLOATS)
    axes.take("w_uv", case.w_uv, "H V L", WIDE_FLOATS)
    return Geometry(
        num_heads=axes["H"],
        qk_nope_head_dim=axes["P"],
        qk_rope_head_dim=axes["R"],
        v_head_dim=axes["V"],
        kv_lora_rank=axes["L"],
    )


def _dense(case: DenseCase, **how: Any) -> Array:
    attend = dense.attend_naive if case.kind == "naive" else dense.attend_absorbed
    return attend(
        _geometry(case),
        case.q_nope,
        case.q_pe,
        case.c_kv,
        case.k_pe,
        case.w_uk,
        case.w_uv,
        softmax_scale=case.softmax_scale,
        **how,
    )


def _rope(case: RopeCase, precision: str, backend: str) -> Array:
    from . import rope

    rotate = rope.rope_interleaved if case.pairing == "interleaved" else rope.rope_neox
    return rotate(
        case.x,
        case.positions,
        base=case.base,
        rotary_dim=case.rotary_dim,
        angles=case.angles,
        yarn=None if case.yarn is None else Yarn.from_json(case.yarn),
        precision=precision,
        backend=backend,
    )


def _paged(case: PagedCase, **how: Any) -> dict[str, Array]:
    conventions: dict[str, Any] = {
        "softmax_scale": case.softmax_scale,
        "head_dim_v": case.head_dim_v,
        "lse_base": case.lse_base,
        "empty_lse": case.empty_lse,
    }
    table = placement.dense_table(case)
    whole = paged.decode_paged(
        case.q, case.kv_cache, table, case.seq_lens, causal=case.causal, **conventions, **how
    )._asdict()
    if case.shards == 1:
        return whole
    states = [
        paged.decode_paged(rank.q, rank.kv_cache, rank.block_table, rank.seq_lens, causal=False, **conventions, **how)
        for rank in shard(case, table)
    ]
    partial_out = np.stack([state.out.reshape(whole["out"].shape) for state in states])
    partial_lse = np.stack([state.lse.reshape(whole["lse"].shape) for state in states])
    merged = merge_states(
        partial_out,
        partial_lse,
        precision=how["precision"],
        lse_base=case.lse_base,
        empty_lse=case.empty_lse,
        backend=how["backend"] if how["backend"] in KERNELS else "strict",
    )
    return {**merged._asdict(), "partial_out": partial_out, "partial_lse": partial_lse}
