# SPDX-License-Identifier: Apache-2.0
"""The canonical problem: paged decode with every option of mla_oracle.cases.extensions, in any combination.

    out, lse = decode(q, kv_cache, table, lens, softmax_scale=s, head_dim_v=512, topk_indices=indices, sinks=sinks)

`checked` reads a case and refuses contradictions, visible.py lists the keys of every query, caches.py reads their rows,
reference/_attend.pyx attends.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Array, Axes, as_array
from ..backends import KERNELS, choose, machine
from ..cases import PagedCase
from ..cases.extensions import Extensions, require_plain
from ..checks import choice, number, number_type, positive, positive_scale, thread_count, value_width, widen
from ..errors import InputError
from ..geometry import check_integer, show
from ..paged import LOG2E, Attention, decode_paged
from .caches import Cache, extra_cache, main_cache
from .queries import Queries, bias_of, queries_of
from .visible import Seen, Visible, visible

IS_TENSOR = {f.name: str(f.type).startswith("Array") for f in dataclasses.fields(Extensions)}


@dataclass(frozen=True)
class Problem:
    """A case without contradictions, for the number type of a precision; N query rows."""

    queries: Queries
    stored_q: Array  # [N, H, D]
    main: Cache
    extra: Cache | None
    seen: Visible  # of each request in turn
    bias: Array | None  # [N, H or 1, columns]
    sinks: Array  # [H], -inf where there is none
    scale: float
    softcap: float  # 0: none
    output_scale: float
    value: slice  # of a row
    lse_unit: float
    empty_lse: float

    @cached_property
    def q(self) -> Array:
        """[N, H, D] in the number type of the precision."""
        return widen(self.stored_q, number_type(self.main.precision)[0])


def decode(
    q: object,
    kv_cache: object,
    block_table: object = None,
    seq_lens: object = None,
    *,
    softmax_scale: float,
    head_dim_v: int,
    causal: bool = True,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    precision: str = "f32",
    backend: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    kernel: str | None = None,
    **extensions: Any,
) -> Attention:
    """decode_paged with the fields of mla_oracle.cases.extensions: selection, a second cache, window, bias, softcap,
    sinks, ragged queries, several KV heads, e4m3, cache formats.

    Arrays are on the CPU; q and dense caches may be e4m3. Without any extension it is decode_paged, whose `isa` and
    `kernel` they are. With one, "fast" computes all of them, within the bound of mla_oracle.fast.paged over the numbers
    that the rows stand for, and what the extensions add to it (below); "cuda" and "ptx" what mla_oracle.gpu.canonical
    says.

    z = scaled score of a key, c = softcap tanh(z / softcap), s = c + bias; z and s must be finite in the precision, but
    for the -inf of a skipped key. In the bound s is the score, and size, the largest of the keys'
    sum |q_d| |k_d| |scale|, is with a softcap the largest of these times the slope of the curve,
    1 - tanh^2(max(|z| - eps (D + 6) sum, 0) / softcap). Besides,

        softcap:  relative += eps * (9 * max |c| + tiny * softcap)
        bias:     relative += 3 * eps * max |s|
        sinks:    3 eps to out and to the LSE; eps * (max |s| + log n) to out, the rounding of the LSE that a sink meets
        a second cache that is read in another way, of another format or scale: as sinks, an LSE meets the other

    9: of a capped score tanh (2), softcap, quotient and product (1/2 each), all that twice (a weight and the sum of
    weights), and what is subtracted from the maximum (2); tiny: a quotient below the normal range; 3: the sum with the
    bias (1/2, twice), and again what is subtracted.

    Returns Attention(out [*rows, head_dim_v], lse [*rows] with its axes in the order of `lse_axes`); rows are the axes
    of q but the last, and both are f32, or f64 in precision "f64".
    Raises InputError in one line for a bad argument or for two that contradict each other; UnsupportedError, which
    names the extension, for a backend that does not compute it.
    """
    for name in extensions:
        if name not in IS_TENSOR:
            raise TypeError(f"decode() got an unexpected keyword argument {name!r}")
    given: dict[str, Any] = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    given |= {name: value for name, value in extensions.items() if IS_TENSOR[name]}
    needed = ("q", "kv_cache")
    arrays = {name: as_array(name, value) for name, value in given.items() if value is not None or name in needed}
    conventions = {
        "softmax_scale": softmax_scale,
        "head_dim_v": head_dim_v,
        "causal": causal,
        "lse_base": lse_base,
        "empty_lse": empty_lse,
    }
    options = {name: value for name, value in extensions.items() if not IS_TENSOR[name]}
    choice("topk_by", options.get("topk_by", "position"), ("position", "slot"))
    case = PagedCase(**arrays, **conventions, **options)  # type: ignore[arg-type]
    how: dict[str, Any] = {
        "precision": precision,
        "backend": backend,
        "threads": threads,
        "isa": isa,
        "kernel": kernel,
    }
    if case.extensions():
        return attend(case, **how)
    return decode_paged(case.q, case.kv_cache, case.block_table, case.seq_lens, **conventions, **how)  # type: ignore[arg-type]


def attend(
    case: PagedCase,
    *,
    precision: str = "f64",
    backend: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    kernel: str | None = None,
) -> Attention:
    """The results of a case, plain or not. Raises InputError, UnsupportedError, of cuda and ptx MissingError too."""
    threads = thread_count(threads)
    problem = checked(case, precision)
    used = backend_of(problem, backend, isa, kernel)
    if used in KERNELS:
        from ..gpu import canonical

        how = canonical.how(case, f"backend {used!r}")
        out, lse = canonical.attend(case, problem, machine(used, precision, threads, kernel), *how, kernel)
    elif used == "fast":
        from . import listed

        out, lse = listed.attend(problem, threads=threads, isa=isa)
        listed.finish(problem, out, lse, case.sinks_in_lse)
    else:
        out, lse = _strict(case, problem)
    rows = case.q.shape[:-1]
    out, lse = out.reshape(*rows, out.shape[-1]), lse.reshape(rows)
    return Attention(out, np.ascontiguousarray(lse.swapaxes(1, 2)) if case.lse_axes == "BHT" else lse)


def backend_of(problem: Problem, backend: str, isa: str | None = None, kernel: str | None = None) -> str:
    """Who computes a problem. Raises InputError, UnsupportedError for a build this machine lacks."""
    return choose(backend, multiply_adds(problem) if backend == "auto" else 0, isa, kernel)


def multiply_adds(problem: Problem) -> int:
    """How large a problem is, for `backends.choose`."""
    _, H, D = problem.stored_q.shape
    size: int = H * problem.seen.pairs() * (D + problem.value.stop - problem.value.start)
    return size


def _strict(case: PagedCase, problem: Problem) -> tuple[Array, Array]:
    """(out [N, H, V], lse [N, H]) by the sequential loops."""
    from ..reference import _attend

    (N, H, _), real = problem.q.shape, problem.q.dtype
    out, lse = np.empty((N, H, problem.value.stop - problem.value.start), real), np.empty((N, H), real)
    group = H // problem.main.heads
    for b, one in enumerate(problem.seen):
        of_request = slice(*problem.queries.starts[b : b + 2])
        rows, keys = gather(problem, one)
        bias = bias_at(problem, b, one)
        for g in range(problem.main.heads):
            heads = slice(g * group, (g + 1) * group)
            _attend.attend(
                problem.q[of_request, heads],
                rows[g],
                one.starts,
                keys,
                bias[heads],
                problem.sinks[heads],
                problem.scale,
                problem.softcap,
                case.sinks_in_lse,
                problem.value.start,
                problem.output_scale,
                problem.lse_unit,
                problem.empty_lse,
                out[of_request, heads],
                lse[of_request, heads],
            )
    return out, lse


def gather(problem: Problem, seen: Seen) -> tuple[Array, Array]:
    """(rows [KV, n, D] that a request sees, each once, and which of them each of its keys is [M] i64)."""
    rows, keys, count = [], np.empty(len(seen.slot), np.int64), 0
    for s, cache in enumerate((problem.main, problem.extra)):
        if cache is not None:
            slots, found = np.unique(seen.slot[seen.source == s], return_inverse=True)
            keys[seen.source == s] = found + count
            rows.append(cache.read(slots))
            count += len(slots)
    return np.concatenate(rows, axis=1), keys


def bias_at(problem: Problem, b: int, seen: Seen) -> Array:
    """The bias of every key of request b by head [H, M], 0 for the keys that have none."""
    H, M, real = problem.q.shape[1], len(seen.slot), problem.q.dtype
    if problem.bias is None:
        return np.broadcast_to(np.zeros((), real), (H, M))
    token = np.repeat(np.arange(len(seen.starts) - 1), np.diff(seen.starts))
    main, of_request = seen.source == 0, slice(*problem.queries.starts[b : b + 2])
    found = np.zeros((problem.bias.shape[1], M), real)
    found[:, main] = widen(problem.bias[of_request][token[main], :, seen.position[main]], real).T
    return np.broadcast_to(found, (H, M))


def checked(case: PagedCase, precision: str) -> Problem:
    """The problem of a case. Raises InputError, UnsupportedError for page_ids and shards with an extension."""
    real, allowed = number_type(precision)
    if case.page_ids is not None:
        require_plain(case, "page_ids")
    if case.shards != 1:
        require_plain(case, "shards")
    for name in ("causal", "sinks_in_lse"):
        if not isinstance(getattr(case, name), (bool, np.bool_)):
            raise InputError(f"{name} is {show(getattr(case, name))}, expected True or False")
    unit = 1.0 if choice("lse_base", case.lse_base, ("e", "2")) == "e" else LOG2E
    queries = queries_of(case, (*allowed, "e4m3"))
    if choice("lse_axes", case.lse_axes, ("BTH", "BHT")) == "BHT" and queries.axes != "B T":
        raise InputError(f"lse_axes is 'BHT', expected 'BTH' where q is [{queries.axes}, H, D]")
    main = main_cache(case, precision)
    extra = extra_cache(case, precision, main)
    H, D = case.q.shape[-2:]
    if main.width != D:
        raise InputError(f"q has rows of {D} elements, expected {main.width} as the keys")
    if H % main.heads:
        raise InputError(f"q has {H} heads, expected a multiple of {main.heads}, the KV heads of kv_cache")
    V = value_width(case.head_dim_v, D)
    offset = check_integer("value_offset", case.value_offset, least=0)
    if offset + V > D:
        raise InputError(f"value_offset is {offset}, expected 0 to {D - V}: a row has {D} elements, a value {V}")
    bias = bias_of(case, queries)
    return Problem(
        queries=queries,
        stored_q=queries.flat(case.q),
        main=main,
        extra=extra,
        seen=visible(case, queries, bias, main, extra),
        bias=bias,
        sinks=_sinks(case, H, real),
        scale=_scale(case, precision),
        softcap=0.0 if case.softcap is None else positive("softcap", case.softcap, precision),
        output_scale=1.0 if case.output_scale is None else positive("output_scale", case.output_scale, precision),
        value=slice(offset, offset + V),
        lse_unit=unit,
        empty_lse=number("empty_lse", case.empty_lse),
    )


def _scale(case: PagedCase, precision: str) -> float:
    scale = positive_scale(case.softmax_scale, precision)
    if case.q_scale is None:
        return scale
    product = number("softmax_scale", case.softmax_scale) * positive("q_scale", case.q_scale, precision="f64")
    return positive("softmax_scale * q_scale", product, precision)


def _sinks(case: PagedCase, num_heads: int, real: Any) -> Array:
    if case.sinks is None:
        return np.full(num_heads, -np.inf, real)
    sinks = Axes(H=num_heads).take("sinks", case.sinks, "H", ("f32",))
    for h in np.flatnonzero(np.isnan(sinks))[:1]:
        raise InputError(f"sinks[{h}] is {sinks[h]}, expected a number or an infinity")
    return np.ascontiguousarray(widen(sinks, real))
