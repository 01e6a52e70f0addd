# SPDX-License-Identifier: Apache-2.0
"""What a paged case may have beyond the plain one, and the guard of those who know the plain one only.

A paged case with none of these fields set is plain. Every field is independent of the others unless its comment says
so. B requests of T query tokens are N = B T queries, or as many as qo_indptr counts; a tensor written [N, ...] here is
[B, T, ...] where q is [B, T, H, D], and [B, ...] where q is [B, H, D].
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array
from ..errors import UnsupportedError


@dataclass(frozen=True, kw_only=True, eq=False)
class Extensions:
    """The optional fields of a paged case; None or the default: not in use."""

    # [B + 1] i32: q is [N, H, D], request b owns its rows qo_indptr[b] .. qo_indptr[b + 1]
    qo_indptr: Array | None = None
    # [num_blocks, block_size, R]: a key is the row of kv_cache, then this one
    kpe_cache: Array | None = None
    # [N, K] i32 or i64: the keys of each query in this order, duplicates counted; negative ones are skipped
    topk_indices: Array | None = None
    # [B] or [N] i32: entries of topk_indices from here on may be anything
    topk_length: Array | None = None
    # A second cache, with a page size of its own: its selected keys follow the main ones in the same softmax.
    extra_kv_cache: Array | None = None
    extra_block_table: Array | None = None  # with topk_by "position", as extra_seq_lens
    extra_seq_lens: Array | None = None
    extra_topk_indices: Array | None = None
    extra_topk_length: Array | None = None
    # [N, n] or [N, H, n], f32, f16 or bf16: added to the score of the token at each position; -inf skips the key
    bias: Array | None = None
    # [H] f32: a logit of each head that is in the denominator only
    sinks: Array | None = None
    # What the cache's format keeps outside the rows.
    kv_scale: Array | None = None
    kpe_scale: Array | None = None
    ckv_scale: Array | None = None
    extra_kv_scale: Array | None = None
    # What an index is: "position", a token of the request; "slot", block * block_size + offset, without a table.
    topk_by: str = "position"
    # An index at or above the capacity: "error", or "skip".
    topk_outside: str = "error"
    # A query at position i sees i - window_left .. i + window_right (None or -1: no bound), and the first tokens.
    window_left: int | None = None
    window_right: int | None = None
    window_first: int = 0
    # score = softcap * tanh(score / softcap), before the bias
    softcap: float | None = None
    sinks_in_lse: bool = False
    # value = row[value_offset : value_offset + head_dim_v]
    value_offset: int = 0
    # q stands for q * q_scale; out is multiplied by output_scale before it is stored.
    q_scale: float | None = None
    output_scale: float | None = None
    # The order of the axes of lse: "BTH" or "BHT".
    lse_axes: str = "BTH"
    # A name of mla_oracle.formats and the rule its rows are read by; None: dense numbers, the format's first rule.
    cache_format: str | None = None
    cache_reader: str | None = None
    # The format of the extra cache, read by its first rule; None: as the main cache.
    extra_cache_format: str | None = None

    def set_extensions(self) -> dict[str, Any]:
        """The fields above that are in use, by name."""
        values = ((name, getattr(self, name), default) for name, default in DEFAULTS.items())
        return {
            name: x
            for name, x, default in values
            if x is not default and (default is None or not (np.isscalar(x) and x == default))
        }

    def extensions(self) -> tuple[str, ...]:
        """What of the case is not plain; a kind of case that has more says so."""
        return tuple(self.set_extensions())


DEFAULTS = {f.name: f.default for f in dataclasses.fields(Extensions)}


def require_plain(case: object, who: str) -> None:
    """Raise UnsupportedError for a case that is not plain: `who` ("backend 'cuda'") knows plain ones only."""
    if isinstance(case, Extensions):
        for name in case.extensions()[:1]:
            raise UnsupportedError(f"{name} is not supported by {who}")
