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
from ..tables import to_csr_tokens


def gathered(case: PagedCase, cache: Array) -> Array:
    """[B, n, ...] of a cache [P, S, ...]: n rows a request, as many as the longest has, zeros where it has fewer."""
    if case.seq_lens is None or cache.ndim != 3:
        raise InputError("topk_by is 'slot' or kv_cache has several heads, expected tokens of a request and one head")
    tokens = to_csr_tokens(case.block_table, case.seq_lens, block_size=cache.shape[1])
    rows = np.zeros((len(case.seq_lens), max(1, int(case.seq_lens.max(initial=0))), cache.shape[2]), cache.dtype)
    owner = np.repeat(np.arange(len(case.seq_lens)), case.seq_lens)
    position = np.arange(len(owner)) - tokens.indptr[owner]
    rows[owner, position] = cache[tokens.indices // cache.shape[1], tokens.indices % cache.shape[1]]
    return rows


def mask_of(case: PagedCase, columns: int) -> Array:
    """[B, 1 or H, T, columns] f16: the bias of every key that is seen, -inf for all others."""
    problem = checked(case, "f64")
    heads = 1 if problem.bias is None else problem.bias.shape[1]
    tokens = int(np.diff(problem.queries.starts).max(initial=1))
    mask = np.full((len(problem.queries.starts) - 1, heads, tokens, columns), -np.inf, np.float16)
    for b, seen in enumerate(problem.seen):
        query = np.repeat(np.arange(len(seen.starts) - 1), np.diff(seen.starts))
        with np.errstate(over="ignore"):
            mask[b, :, query, seen.position] = bias_at(problem, b, seen)[:heads].T
    return mask
