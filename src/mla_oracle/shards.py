# SPDX-License-Identifier: Apache-2.0
"""A sharded paged case: which tokens each rank owns, and the problem it solves alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import Array
from .cases import PagedCase
from .cases.extensions import require_plain
from .errors import InputError

MAX_SHARDS = 4096


class Rank(NamedTuple):
    """What one rank decodes: every query token a request of its own, none causal."""

    q: Array  # [B * T, H, D]
    kv_cache: Array  # [rows, 1, D], blocks of one token
    block_table: Array  # [B * T, tokens]: the rows of the tokens the rank owns, ascending
    seq_lens: Array  # [B * T]: how many of them the query sees


def shard(case: PagedCase, table: Array) -> list[Rank]:
    """The problem of each rank of `case`, whose block table in stored pages is `table`. Raises InputError."""
    require_plain(case, "shards")
    if case.shards > MAX_SHARDS:
        raise InputError(f"shards is {case.shards}, expected at most {MAX_SHARDS}")
    q = case.q if case.q.ndim == 4 else case.q[:, None]
    B, T = q.shape[:2]
    pages, block, D = case.kv_cache.shape
    rows = case.kv_cache.reshape(pages * block, 1, D)
    lens = case.seq_lens.astype(np.int64)
    longest = int(lens.max(initial=0))
    j = np.arange(longest)
    row_of_token = table[:, j // block].astype(np.int64) * block + j % block  # [B, longest]
    seen = lens[:, None] + (np.arange(T) - T + 1 if case.causal else np.zeros(T, np.int64))  # [B, T] tokens
    ranks = []
    for s in range(case.shards):
        if case.shard_layout == "interleaved":
            owned = [np.arange(s, n, case.shards) for n in lens]
        else:
            size = -(-lens // case.shards)
            owned = [np.arange(s * c, min((s + 1) * c, n)) for c, n in zip(size, lens, strict=True)]
        width = max((len(tokens) for tokens in owned), default=0)
        rank_table = np.full((B, width), -1, np.int64)
        for b, tokens in enumerate(owned):
            rank_table[b, : len(tokens)] = row_of_token[b, tokens]
        count = [[np.searchsorted(tokens, n) for n in seen[b]] for b, tokens in enumerate(owned)]
        ranks.append(
            Rank(
                q.reshape(B * T, *q.shape[2:]),
                rows,
                np.repeat(rank_table, T, axis=0).astype(np.int32),
                np.array(count, np.int32).reshape(B * T),
            )
        )
    return ranks
