# SPDX-License-Identifier: Apache-2.0
"""Attention states over disjoint keys, joined by their LSE."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .arrays import Array, Shaped, as_array, dtype_name
from .backends import choose_kernels, machine, refuse_stream
from .checks import choice, number, number_type, widen
from .errors import InputError, UnsupportedError
from .paged import Attention


def merge_states(
    partial_out: object,
    partial_lse: object,
    *,
    precision: str = "f32",
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    backend: str = "auto",
    stream: object = None,
) -> Attention:
    """Join S attention states over disjoint keys, in ascending order.

    partial_out [S, ..., V] and partial_lse [S, ...] of the same leading axes (or sequences of S arrays). A state
    is empty where its lse is -inf, +inf or `empty_lse` (as partial_lse's dtype stores it): its out may hold
    anything. Where every state is empty, the result is out 0 and lse `empty_lse`.
    `backend` is auto or strict, or cuda or ptx as in `decode_paged`, which takes arrays on a GPU, on `stream`: both of
    them contiguous, not sequences, and partial_lse f32.

    Returns Attention(out [..., V], lse [...]). Raises InputError.
    """
    kernels = choose_kernels(backend)
    real, allowed = number_type(precision)
    unit = math.log(2) if choice("lse_base", lse_base, ("e", "2")) == "2" else 1.0
    empty_lse = number("empty_lse", empty_lse)
    if kernels == "cuda":
        from .gpu import calls

        if calls.any_foreign(partial_out, partial_lse):
            if precision != "f32":
                raise UnsupportedError("arrays on a GPU are computed in precision 'f32'")
            arrays = {"partial_out": partial_out, "partial_lse": partial_lse}
            return Attention(*calls.merge_states(arrays, unit, empty_lse, stream))
    refuse_stream(stream)
    partial_out = stack("partial_out", partial_out)
    partial_lse = stack("partial_lse", partial_lse)
    check_shapes(partial_out, partial_lse)
    for name, array in (("partial_out", partial_out), ("partial_lse", partial_lse)):
        if (kind := dtype_name(name, array)) not in allowed:
            raise InputError(f"{name} is {kind}, expected {' or '.join(allowed)}")
    with np.errstate(over="ignore"):
        marker = float(np.array(empty_lse).astype(partial_lse.dtype))
    states, *rows, width = partial_out.shape
    count = math.prod(rows)
    out = np.empty((count, width), real)
    lse = np.empty(count, real)
    partial_out = partial_out.reshape(states, count, width)
    partial_lse = widen(partial_lse, real).reshape(states, count)
    if kernels:
        from .gpu import forms

        on, partial = machine(kernels, precision), map(np.ascontiguousarray, (partial_out, partial_lse))
        forms.fill(forms.merge, on, *partial, unit, marker, empty_lse, outputs=(out, lse))
    else:
        from .reference import _merge

        _merge.merge(widen(partial_out, real), partial_lse, unit, marker, empty_lse, out, lse)
    return Attention(out.reshape(*rows, width), lse.reshape(rows))


def check_shapes(partial_out: Shaped, partial_lse: Shaped) -> None:
    """Raise InputError unless partial_out [S, ..., V] and partial_lse [S, ...] belong together."""
    if partial_out.ndim < 2 or partial_out.shape[:-1] != partial_lse.shape:
        raise InputError(
            f"partial_lse is {list(partial_lse.shape)}, expected [S, ...] with partial_out [S, ..., V],"
            f" which is {list(partial_out.shape)}"
        )


def stack(name: str, states: object) -> Array:
    if isinstance(states, Sequence):
        arrays = [as_array(f"{name}[{s}]", state) for s, state in enumerate(states)]
        for s, array in enumerate(arrays):
            if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
                raise InputError(
                    f"{name}[{s}] is {array.dtype} {list(array.shape)}, expected {name}[0]'s"
                    f" {arrays[0].dtype} {list(arrays[0].shape)}"
                )
        if not arrays:
            raise InputError(f"{name} has no state, expected one or more")
        return np.stack(arrays)
    return as_array(name, states)
