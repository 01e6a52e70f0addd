# SPDX-License-Identifier: Apache-2.0
"""A paged case as dense rows and a mask: every request's rows in the order of their positions, and which of them each
query sees, as numbers of f16.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..canonical import bias_at, checked
from ..cases import PagedCase
from ..errors import InputError


def dense(case: PagedCase, cache: Array) -> tuple[Array, Array]:
    """(rows [B, n, ...] of a cache [P, S, ...], mask [B, 1 or H, T, n] f16), n the tokens of the longest request.

    The mask is the bias of every key that is seen, and -inf for all others. A row that no query sees is 0, as in a
    cache that was cleared: a mask that is added does not stop a NaN.
    """
    if cache.ndim != 3:
        raise InputError(f"kv_cache is {list(cache.shape)}, expected one key/value head")
    problem = checked(case, "f64")
    heads = 1 if problem.bias is None else problem.bias.shape[1]
    requests, columns = len(case.seq_lens), max(1, int(case.seq_lens.max(initial=0)))
    tokens = int(np.diff(problem.queries.starts).max(initial=1))
    rows = np.zeros((requests, columns, cache.shape[2]), cache.dtype)
    mask = np.full((requests, heads, tokens, columns), -np.inf, np.float16)
    for b, seen in enumerate(problem.seen):
        if case.extra_kv_cache is not None:
            raise InputError("extra_kv_cache is given, expected one cache")
        rows[b, seen.position] = cache[seen.slot // cache.shape[1], seen.slot % cache.shape[1]]
        query = np.repeat(np.arange(len(seen.starts) - 1), np.diff(seen.starts))
        with np.errstate(over="ignore"):
            mask[b, :, query, seen.position] = bias_at(problem, b, seen)[:heads].T
    return rows, mask
