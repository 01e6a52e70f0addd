# SPDX-License-Identifier: Apache-2.0
"""What the adapters share, beyond mla_oracle.spellings: a case's queries with other axes, its cache joined, values
that are views, scales that are defaults. Nothing is computed but a default scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from ..errors import InputError
from ..spellings import cache_layouts, layouts, selections


def inverse_root(width: int) -> float:
    """1/sqrt(width), the default scale of many calls."""
    return float(width**-0.5)


def tokens_of(case: PagedCase) -> int:
    """The query tokens of every request. Raises InputError where they are not as many in each."""
    q = case.q if case.qo_indptr is None else layouts.batched(case.q, case.qo_indptr)
    return int(q.shape[1]) if q.ndim == 4 else 1


def rows_of(case: PagedCase, axes: str = "B T") -> Array:
    """q with the axes [B, T, H, D], or [B, H, D] ("B"), or [N, H, D] ("N")."""
    q = {"B T": batched, "B": single, "N": flat}[axes](case, case.q)
    assert q is not None
    return q


def requests_of(case: PagedCase) -> int:
    return len(case.q) if case.qo_indptr is None else len(case.qo_indptr) - 1


def batched(case: PagedCase, array: Array | None) -> Array | None:
    """A tensor [*rows, ...] with the axes [B, T, ...]."""
    if array is None:
        return None
    rows = len(case.q.shape) - 2
    return array.reshape(requests_of(case), tokens_of(case), *array.shape[rows:])


def single(case: PagedCase, array: Array | None) -> Array | None:
    """A tensor [*rows, ...] with the axes [B, ...]; one query token a request."""
    tokens = tokens_of(case)
    if tokens != 1:
        raise InputError(f"q has {tokens} tokens a request, expected 1")
    whole = batched(case, array)
    return None if whole is None else whole[:, 0]


def flat(case: PagedCase, array: Array | None) -> Array | None:
    """A tensor [*rows, ...] with the axes [N, ...]."""
    if array is None:
        return None
    rows = len(case.q.shape) - 2
    return array.reshape(math.prod(case.q.shape[:rows]), *array.shape[rows:])


def indptr(case: PagedCase) -> Array:
    """qo_indptr [B + 1] i32, whatever the axes of q are."""
    if case.qo_indptr is not None:
        return case.qo_indptr
    return layouts.ragged(rows_of(case))[1]


def joined(case: PagedCase) -> Array:
    """The rows of a dense cache [P, S, D] or [P, S, KV, D] in one array, a view where they are in one already."""
    if case.cache_format is not None:
        raise InputError(f"cache_format is {case.cache_format!r}, expected dense rows")
    return case.kv_cache if case.kpe_cache is None else layouts.join(case.kv_cache, case.kpe_cache)


def one_head(cache: Array) -> Array:
    """A cache [P, S, D]. Raises InputError for several KV heads."""
    if cache.ndim != 3:
        raise InputError(f"kv_cache is {list(cache.shape)}, expected one key/value head")
    return cache


def values_of(keys: Array, values: Array, name: str) -> tuple[int, int]:
    """(value_offset, head_dim_v) of `values`, a view of columns of `keys`, or (from files) a copy of the first ones."""
    try:
        return cache_layouts.value_columns(keys, values)
    except InputError:
        width = values.shape[-1]
        if width <= keys.shape[-1] and values.dtype == keys.dtype and keys[..., :width].tobytes() == values.tobytes():
            return 0, width
        raise InputError(f"{name} {list(values.shape)} is no view of the keys' first columns, nor a copy") from None


def by_slot(case: PagedCase, array: Array | None, length: Array | None) -> Array | None:
    """The indices of a selection, as they are or through the main table, as physical slots."""
    if array is None or case.topk_by == "slot":
        return array
    return selections.slots_of_positions(
        array,
        case.block_table,
        case.seq_lens,
        block_size=case.kv_cache.shape[1],
        topk_length=length,
        qo_indptr=case.qo_indptr,
        topk_outside=case.topk_outside,
    )


def number_of(name: str, scale: Any) -> float | None:
    """The number in a scale of one element, given as an array or a number; None is None."""
    if scale is None:
        return None
    if np.size(scale) != 1:
        raise InputError(f"{name} is {list(np.shape(scale))}, expected one number")
    return float(np.asarray(scale).reshape(()))


def times_log2e(scale: float) -> float:
    """The scale of scores whose exponential is taken to base 2."""
    return scale * math.log2(math.e)


def scaled_root(scaling: float, width: int) -> float:
    """1/(scaling sqrt(width)), TensorRT-LLM's scale. Raises InputError for a scaling that is not positive."""
    if not 0 < scaling < math.inf or width < 1:
        raise InputError(f"q_scaling is {scaling}, expected a positive finite number")
    return inverse_root(width) / scaling


def scaling_of(scale: float, width: int) -> float:
    """The scaling whose scaled_root is `scale`, or where no number's is the nearest: a quotient has no nearer."""
    return inverse_root(width) / scale
