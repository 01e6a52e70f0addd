# SPDX-License-Identifier: Apache-2.0
"""vllm.cpp: MlaDecodeAttention, one token a request.

Read from vllm.cpp d85906a: the operation MlaDecodeAttention and its CPU kernel.
"""

from __future__ import annotations

from typing import Any

from ..cases import PagedCase
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect


class MlaDecodeAttention(Dialect):
    """MlaDecodeAttention: a scale without default (mscale^2 folded in), natural LSE; 0 and -inf without tokens."""

    name = "vllm.cpp"
    call = "MlaDecodeAttention"
    source = "vllm.cpp d85906a MlaDecodeAttention"
    arguments = {
        "query": tensor("b h d", "bf16 f16 f32"),
        "kv_cache": tensor("blocks block_size d", "bf16 f16 f32"),
        "block_table": tensor("b max_blocks", "i32"),
        "seq_lens": tensor("b", "i32"),
        "scale": value(float),
        "v_head_dim": value(int),
    }
    launch = ("num_kv_splits", "max_seq_len")
    called = {"q": "query", "softmax_scale": "scale", "head_dim_v": "v_head_dim"}
    masks = "length"
    out_axes = "b h v_head_dim"
    lse, lse_axes = "lse", "b h"

    def canonical(self, given: Given) -> dict[str, Any]:
        return {
            "q": given.query,
            "kv_cache": given.kv_cache,
            "block_table": given.block_table,
            "seq_lens": given.seq_lens,
            "softmax_scale": given.scale,
            "head_dim_v": given.v_head_dim,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        return {
            "query": spelling.rows_of(case, "B"),
            "kv_cache": spelling.one_head(spelling.joined(case)),
            "block_table": case.block_table,
            "seq_lens": case.seq_lens,
            "scale": case.softmax_scale,
            "v_head_dim": case.head_dim_v,
        }


DIALECTS = (MlaDecodeAttention(),)
