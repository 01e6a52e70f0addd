# SPDX-License-Identifier: Apache-2.0
"""The dense forms: one sequence, its latent rows in order, the queries at its end.

    attend_naive     decompress the cache to keys and values, then attend
    attend_absorbed  attend in the latent space; its two ends alone: absorb_query, up_project

Backend "strict" in precision "f32" is the documents' arithmetic, bit for bit; "f64" accumulates in double over the
inputs as stored and is the truth that errors are measured from. "auto" takes the fast tier for large problems.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .arrays import Array, Axes, dtype_name
from .backends import KERNELS, choose, choose_kernels, empty, machine, place
from .checks import number_type, positive_scale, thread_count, widen
from .errors import InputError
from .geometry import Geometry, show

if TYPE_CHECKING:
    from .gpu.device import Device


def attend_naive(
    geometry: Geometry,
    q_nope: object,
    q_pe: object,
    c_kv: object,
    k_pe: object,
    w_uk: object,
    w_uv: object,
    *,
    softmax_scale: float | None = None,
    precision: str = "f32",
    backend: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    stream: object = None,
) -> Array:
    """Attention over keys and values decompressed from the latent cache.

    q_nope [t_q, H, P] and q_pe [t_q, H, R] (rope applied), c_kv [t_kv, L] (normed) and k_pe [t_kv, R]
    (rope applied), w_uk [H, P, L], w_uv [H, V, L]; f32, f16 or bf16, and f64 in precision "f64". R may be 0.
    The queries are the last t_q rows of the cache: query i sees rows 0 .. t_kv - t_q + i.
    `softmax_scale` None is 1/sqrt(P + R), times the geometry's YaRN mscale squared, in the precision asked for.
    `backend`, `threads` and `isa` as in `decode_paged`. Backend "cuda" takes arrays on a GPU as well, all six and f32,
    on `stream`, without a copy or a wait, and out is a mla_oracle.gpu.foreign.DeviceArray there.

    Returns out [t_q, H, V], f32 or f64. Raises InputError; cuda and ptx, UnsupportedError and MissingError too.
    """
    arrays = q_nope, q_pe, c_kv, k_pe, w_uk, w_uv
    problem = _check(geometry, arrays, softmax_scale, precision, backend, stream)
    threads = thread_count(threads)
    used = choose(backend, multiply_adds("naive", geometry, *problem.lengths), isa)
    if used in KERNELS:
        from .gpu import forms

        on = problem.device or machine(used, precision, threads)
        forms.fill(forms.attend_naive, on, *problem.widened(), problem.scale, outputs=(problem.out,))
    elif used == "fast":
        from .fast import naive

        naive.attend(*problem.arrays, problem.scale, problem.out, threads, isa)
    else:
        from .reference import _naive

        _naive.attend(*problem.widened(), problem.scale, problem.out)
    return problem.out


def attend_absorbed(
    geometry: Geometry,
    q_nope: object,
    q_pe: object,
    c_kv: object,
    k_pe: object,
    w_uk: object,
    w_uv: object,
    *,
    softmax_scale: float | None = None,
    precision: str = "f32",
    backend: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    kernel: str | None = None,
    stream: object = None,
) -> Array:
    """The function of `attend_naive`, computed in the latent space: same arguments, same result up to rounding.

    `kernel` is of cuda and ptx: "scalar", within the bound of mla_oracle.gpu.dense; "mma", on tensor cores, for arrays
    all f16 or all bf16 of widths that mla_oracle.gpu.absorbed_mma takes, within its bound, which counts what engines
    round; None is mma where it takes the problem. On a GPU arrays are all f32 or all bf16, for mma all f16 too.
    """
    arrays = q_nope, q_pe, c_kv, k_pe, w_uk, w_uv
    problem = _check(geometry, arrays, softmax_scale, precision, backend, stream)
    threads = thread_count(threads)
    used = choose(backend, multiply_adds("absorbed", geometry, *problem.lengths), isa, kernel)
    if used in KERNELS:
        from .gpu import absorbed_mma, forms

        on = problem.device or machine(used, precision, threads, kernel)
        attend, inputs = absorbed_mma.attend, problem.arrays
        if not absorbed_mma.kernel_of(inputs, on.arch, kernel).startswith("absorbed_mma"):
            attend, inputs = forms.attend_absorbed, stored_alike(inputs)
        forms.fill(attend, on, *inputs, problem.scale, outputs=(problem.out,))
    elif used == "fast":
        from .fast import absorbed

        absorbed.attend(*problem.arrays, problem.scale, problem.out, threads, isa)
    else:
        from .reference import _absorbed

        _absorbed.attend(*problem.widened(), problem.scale, problem.out)
    return problem.out


def multiply_adds(form: str, geometry: Geometry, t_q: int, t_kv: int) -> int:
    """How large a problem is, for `backends.choose`."""
    decompress = geometry.num_heads * (geometry.qk_nope_head_dim + geometry.v_head_dim) * geometry.kv_lora_rank
    if form == "naive":
        return t_kv * decompress + t_q * t_kv * geometry.num_heads * (geometry.qk_head_dim + geometry.v_head_dim)
    return t_q * decompress + t_q * t_kv * geometry.num_heads * (geometry.latent_dim + geometry.kv_lora_rank)


SHAPES = {
    "q_nope": "t_q H P",
    "q_pe": "t_q H R",
    "c_kv": "t_kv L",
    "k_pe": "t_kv R",
    "w_uk": "H P L",
    "w_uv": "H V L",
}
Inputs = tuple[Any, Any, Any, Any, Any, Any]


class Problem(NamedTuple):
    """A checked problem; `out` has the number type of its precision."""

    arrays: Inputs  # those of SHAPES, as stored
    scale: float
    out: Array  # [t_q, H, V], to be filled
    lengths: tuple[int, int]  # t_q, t_kv
    device: Device | None  # the GPU that arrays and out lie on

    def widened(self) -> Inputs:
        a, b, c, d, e, f = (widen(array, self.out.dtype) for array in self.arrays)
        return a, b, c, d, e, f


def stored_alike(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """`arrays` as the absorbed kernels take them: bf16 where all are, else f32."""
    if all(dtype_name("", array) == "bf16" for array in arrays):
        return arrays
    return tuple(widen(array, np.float32) for array in arrays)


def _check(
    geometry: Geometry,
    arrays: Inputs,
    softmax_scale: float | None,
    precision: str,
    backend: str,
    stream: object,
) -> Problem:
    real, allowed = number_type(precision)
    if not isinstance(geometry, Geometry):
        raise InputError(f"geometry is {show(geometry)}, expected a Geometry")
    axes = Axes(
        H=geometry.num_heads,
        P=geometry.qk_nope_head_dim,
        R=geometry.qk_rope_head_dim,
        V=geometry.v_head_dim,
        L=geometry.kv_lora_rank,
    )
    device, taken = place(backend, precision, stream, dict(zip(SHAPES, arrays, strict=True)))
    for name, letters in SHAPES.items():
        axes.check(name, taken[name], letters, allowed)
    if axes["t_q"] > axes["t_kv"]:
        raise InputError(
            f"q_nope has {axes['t_q']} queries and c_kv {axes['t_kv']} rows, expected the queries to be its last rows"
        )
    if softmax_scale is None:
        scale = real(1) / np.sqrt(real(axes["P"] + axes["R"])) * real(geometry.softmax_mscale**2)
    else:
        scale = positive_scale(softmax_scale, precision)
    out = empty(device, (axes["t_q"], axes["H"], axes["V"]), real)
    a, b, c, d, e, f = taken.values()
    return Problem((a, b, c, d, e, f), float(scale), out, (axes["t_q"], axes["t_kv"]), device)


def absorb_query(
    q_nope: object, w_uk: object, *, precision: str = "f32", backend: str = "auto", stream: object = None
) -> Array:
    """q_lat[t, h] = w_uk[h]^T q_nope[t, h]: q_nope [T, H, P], w_uk [H, P, L] -> [T, H, L].

    `backend` is auto or strict, or cuda or ptx as in `decode_paged`; arrays on a GPU as in `attend_absorbed`.
    """
    kernels = choose_kernels(backend)
    real, allowed = number_type(precision)
    device, taken = place(backend, precision, stream, {"q_nope": q_nope, "w_uk": w_uk})
    axes, (q, w) = Axes(), taken.values()
    axes.check("q_nope", q, "T H P", allowed)
    axes.check("w_uk", w, "H P L", allowed)
    q_lat: Array = empty(device, (axes["T"], axes["H"], axes["L"]), real)
    if kernels:
        from .gpu import forms

        arrays = stored_alike((q, w))
        forms.fill(forms.absorb_query, device or machine(kernels, precision), *arrays, outputs=(q_lat,))
    else:
        from .reference import _absorbed

        _absorbed.absorb_query(widen(q, real), widen(w, real), q_lat)
    return q_lat


def up_project(
    o_lat: object, w_uv: object, *, precision: str = "f32", backend: str = "auto", stream: object = None
) -> Array:
    """out[t, h] = w_uv[h] o_lat[t, h]: o_lat [T, H, L], w_uv [H, V, L] -> [T, H, V]; `backend` as in `absorb_query`.

    Arrays on a GPU as well: there o_lat is f32 and contiguous, w_uv f32 or bf16.
    """
    kernels = choose_kernels(backend)
    real, allowed = number_type(precision)
    device, taken = place(backend, precision, stream, {"o_lat": o_lat, "w_uv": w_uv})
    axes, (o, w) = Axes(), taken.values()
    axes.check("o_lat", o, "T H L", allowed)
    axes.check("w_uv", w, "H V L", allowed)
    out: Array = empty(device, (axes["T"], axes["H"], axes["V"]), real)
    if kernels:
        from .gpu import forms

        if not device:
            o = np.ascontiguousarray(widen(o, real))
        arrays = o, *stored_alike((w,))
        forms.fill(forms.up_project, device or machine(kernels, precision), *arrays, outputs=(out,))
    else:
        from .reference import _absorbed

        _absorbed.up_project(widen(o, real), widen(w, real), out)
    return out
