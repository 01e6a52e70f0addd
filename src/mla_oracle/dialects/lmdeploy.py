# SPDX-License-Identifier: Apache-2.0
"""LMDeploy's MLA decoding, which calls FlashMLA.

Read from InternLM/lmdeploy, one stored version (2026): lmdeploy/pytorch/backends/cuda/attention/mla.py.
"""

from __future__ import annotations

import math
from typing import Any

from ..arrays import Array
from ..cases import PagedCase
from ..checks import arguments_named
from ..errors import InputError
from ..spellings.cache_layouts import cache_view, from_cache_view
from ..spellings.tables import from_block_table
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect


class Decoding(Dialect):
    """FlashMLAImpl's decoding: tokens in a row, as many for each request; causal; the scale 1/sqrt(576) unless given.

    block_offsets and kv_seqlens are i32 or i64. The layer's call returns no LSE.
    """

    name = "lmdeploy"
    call = "FlashMLAImpl.forward"
    source = "InternLM/lmdeploy lmdeploy/pytorch/backends/cuda/attention/mla.py"
    arguments = {
        "query": tensor("t h d", "bf16 f16"),
        "k_cache": tensor("blocks block_size 1 d", "=query"),
        "block_offsets": tensor("b max_blocks", "i32 i64"),
        "kv_seqlens": tensor("b", "i32 i64"),
        "v_head_size": value(int, 512),
        "softmax_scale": value(float, None, "1/sqrt(d)"),
        "causal": value(bool, True),
    }
    called = {"kv_cache": "k_cache", "q": "query", "head_dim_v": "v_head_size"}
    masks = "length; causal bottom-right"
    out, out_axes = "attn_output", "t h v_head_size"

    def canonical(self, given: Given) -> dict[str, Any]:
        count, requests = given.sizes["t"], given.sizes["b"]
        if count % max(1, requests):
            raise InputError(f"query has {count} rows, expected a multiple of {requests} as kv_seqlens")
        with arguments_named(block_table="block_offsets", seq_lens="kv_seqlens"):
            table = from_block_table(
                given.block_offsets,
                given.kv_seqlens,
                block_size=given.sizes["block_size"],
                num_blocks=given.sizes["blocks"],
            )
        scale = given.softmax_scale
        return {
            "q": given.query.reshape(requests, count // max(1, requests), *given.query.shape[1:]),
            "kv_cache": cache_view(given.k_cache, "PSKD"),
            **table._asdict(),
            "softmax_scale": spelling.inverse_root(given.sizes["d"]) if scale is None else scale,
            "head_dim_v": given.v_head_size,
            "causal": given.causal,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        spelling.tokens_of(case)
        return {
            "query": spelling.rows_of(case, "N"),
            "k_cache": from_cache_view(spelling.one_head(spelling.joined(case)), "PSKD"),
            "block_offsets": case.block_table,
            "kv_seqlens": case.seq_lens,
            "v_head_size": case.head_dim_v,
            "softmax_scale": case.softmax_scale,
            "causal": case.causal,
        }

    def lay_out(self, case: PagedCase, out: Array) -> Array:
        return out.reshape(math.prod(out.shape[:-2]), *out.shape[-2:])


DIALECTS = (Decoding(),)
