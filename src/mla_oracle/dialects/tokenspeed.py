# SPDX-License-Identifier: Apache-2.0
"""tokenspeed-mla's decode (SM100, SM103): fp8 alone.

Read from tokenspeed-mla 0.1.3: tokenspeed_mla_decode.
"""

from __future__ import annotations

from typing import Any

from ..cases import PagedCase
from ..errors import InputError
from ..spellings.cache_layouts import cache_view
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect


class Decode(Dialect):
    """tokenspeed_mla_decode: query and rows e4m3, whose scales are folded into softmax_scale and output_scale."""

    name = "tokenspeed"
    call = "tokenspeed_mla_decode"
    source = "tokenspeed-mla 0.1.3 tokenspeed_mla_decode"
    arguments = {
        "query": tensor("b q_len h d", "e4m3"),
        "kv_cache": tensor("blocks page d | blocks 1 page d", "e4m3"),
        "kv_lora_rank": value(int),
        "qk_rope_head_dim": value(int),
        "block_tables": tensor("b max_blocks", "i32"),
        "seq_lens": tensor("b", "i32"),
        "softmax_scale": value(float),
        "output_scale": value(float, 1.0),
        "causal_mask": value(bool, True),
    }
    launch = ("workspace_buffer", "max_seq_len", "out", "is_var_seq", "enable_pdl")
    limits = {"d": (576,), "page": (32, 64)}
    called = {"q": "query", "block_table": "block_tables", "head_dim_v": "kv_lora_rank", "causal": "causal_mask"}
    folds = True
    masks = "length; causal bottom-right"
    out_axes = "b q_len h kv_lora_rank"

    def canonical(self, given: Given) -> dict[str, Any]:
        for name, width in (("kv_lora_rank", 512), ("qk_rope_head_dim", 64)):
            if given[name] != width:
                raise InputError(f"{name} is {given[name]}, expected {width}")
        return {
            "q": given.query,
            "kv_cache": cache_view(given.kv_cache, "PKSD") if given.kv_cache.ndim == 4 else given.kv_cache,
            "block_table": given.block_tables,
            "seq_lens": given.seq_lens,
            "softmax_scale": given.softmax_scale,
            "output_scale": None if given.output_scale == 1.0 else given.output_scale,
            "head_dim_v": given.kv_lora_rank,
            "causal": given.causal_mask,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        return {
            "query": spelling.rows_of(case),
            "kv_cache": spelling.one_head(spelling.joined(case)),
            "kv_lora_rank": case.head_dim_v,
            "qk_rope_head_dim": case.q.shape[-1] - case.head_dim_v,
            "block_tables": case.block_table,
            "seq_lens": case.seq_lens,
            "softmax_scale": case.softmax_scale,
            "output_scale": case.output_scale,
            "causal_mask": case.causal,
        }


DIALECTS = (Decode(),)
