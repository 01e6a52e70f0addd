# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's trtllm-gen decode (SM100): by tables, and by a sparse selection.

Read from flashinfer-ai/flashinfer fb28d72: flashinfer/mla/_core.py. The one scale of the scores, bmm1_scale, is
1.0 unless it is given: the softmax scale and those of an fp8 query and cache are folded into it, and that of the values
into bmm2_scale (folded.py). Either may lie in a tensor, and is the same number there: the call itself then multiplies
bmm1_scale by log2(e), which its kernel does to a number. Its other backends take numbers alone.
"""

from __future__ import annotations

from typing import Any

from ..cases import PagedCase
from ..checks import arguments_named
from ..errors import InputError
from ..spellings.cache_layouts import cache_view
from ..spellings.tables import from_block_offsets
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect

SOURCE = "flashinfer-ai/flashinfer fb28d72 flashinfer/mla/_core.py"
LAUNCH = (
    "workspace_buffer", "qk_nope_head_dim", "max_seq_len", "out", "enable_pdl", "is_var_seq", "lse", "return_lse",
    "max_q_len",
)  # fmt: skip
BACKENDS = ("auto", "trtllm-gen")  # cute-dsl and xqa return another LSE, or none
SCALES = {"softmax_scale": "bmm1_scale", "output_scale": "bmm2_scale"}


def scales(given: Given) -> dict[str, Any]:
    return {
        "softmax_scale": given.bmm1_scale,
        "output_scale": None if given.bmm2_scale == 1.0 else given.bmm2_scale,
    }


def spelled_scales(case: PagedCase) -> dict[str, Any]:
    return {"bmm1_scale": case.softmax_scale, "bmm2_scale": case.output_scale}


class Decode(Dialect):
    """trtllm_batch_decode_with_kv_cache_mla: q_len tokens a request, or a row of tokens with cum_seq_lens_q.

    LSE in base 2, tokens in a row; what it is beside sinks is not said, so that it is not judged there.
    """

    name = "flashinfer-trtllm"
    call = "trtllm_batch_decode_with_kv_cache_mla"
    source = SOURCE
    arguments = {
        "query": tensor("b q_len h d | t h d", "bf16 f16 e4m3"),
        "kv_cache": tensor("pages page d | pages 1 page d", "bf16 f16 e4m3"),
        "kv_lora_rank": value(int),
        "qk_rope_head_dim": value(int),
        "block_tables": tensor("b blocks | b 2 blocks", "i32"),
        "seq_lens": tensor("b", "i32"),
        "bmm1_scale": value(float, 1.0, device=True),
        "bmm2_scale": value(float, 1.0, device=True),
        "backend": value(str, "auto", choices=BACKENDS),
        "sinks": tensor("h", "f32", None),
        "cum_seq_lens_q": tensor("b+1", "i32", None),
        "uses_shared_paged_kv_idx": value(bool, True),
    }
    launch = LAUNCH
    fixed = {"sparse_mla_top_k": 0, "skip_softmax_threshold_scale_factor": None}
    limits = {"page": (32, 64), "d": (576, 320, 512)}
    called = {**SCALES, "q": "query", "block_table": "block_tables", "qo_indptr": "cum_seq_lens_q"}
    folds = True
    masks = "length; causal bottom-right"
    out_axes = "b q_len h kv_lora_rank"
    lse, lse_axes, lse_base = "lse", "t h", "2"

    def canonical(self, given: Given) -> dict[str, Any]:
        check_widths(given)
        table = given.block_tables
        shared = given.uses_shared_paged_kv_idx
        if shared != (table.ndim == 2):
            axes = 2 if shared else 3
            raise InputError(f"block_tables has {table.ndim} axes, expected {axes} as uses_shared_paged_kv_idx says")
        if (given.query.ndim == 3) != (given.cum_seq_lens_q is not None):
            raise InputError("cum_seq_lens_q and query disagree, expected it with a query [t, h, d] and only there")
        if not shared:
            with arguments_named(block_offsets="block_tables"):
                sizes = {"block_size": given.sizes["page"], "num_blocks": given.sizes["pages"]}
                table = from_block_offsets(table, given.seq_lens, **sizes).block_table
        return {
            "q": given.query,
            "qo_indptr": given.cum_seq_lens_q,
            "kv_cache": cache_view(given.kv_cache, "PKSD") if given.kv_cache.ndim == 4 else given.kv_cache,
            "block_table": table,
            "seq_lens": given.seq_lens,
            "sinks": given.sinks,
            "head_dim_v": given.kv_lora_rank,
            "causal": True,
            **scales(given),
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        ragged = case.qo_indptr is not None
        return {
            "query": case.q if ragged else spelling.rows_of(case),
            "cum_seq_lens_q": case.qo_indptr,
            "kv_cache": spelling.one_head(spelling.joined(case))[:, None],
            "kv_lora_rank": case.head_dim_v,
            "qk_rope_head_dim": case.q.shape[-1] - case.head_dim_v,
            "block_tables": case.block_table,
            "seq_lens": case.seq_lens,
            "sinks": case.sinks,
            **spelled_scales(case),
        }

    def judges_lse(self, case: PagedCase) -> bool:
        return case.sinks is None


class SparseDecode(Dialect):
    """trtllm_batch_decode_with_kv_cache_mla with sparse_mla_top_k: block_tables [b, q_len, topk] are slots, -1 none.

    seq_lens then change nothing: a selection says all that is seen.
    """

    name = "flashinfer-trtllm-sparse"
    call = "trtllm_batch_decode_with_kv_cache_mla"
    source = SOURCE
    arguments = {
        "query": tensor("b q_len h d", "bf16 f16 e4m3"),
        "kv_cache": tensor("pages page d | pages 1 page d", "bf16 f16 e4m3"),
        "kv_lora_rank": value(int),
        "qk_rope_head_dim": value(int),
        "block_tables": tensor("b q_len topk", "i32"),
        "sparse_mla_top_k": value(int, 0),
        "bmm1_scale": value(float, 1.0, device=True),
        "bmm2_scale": value(float, 1.0, device=True),
        "backend": value(str, "auto", choices=BACKENDS),
        "sinks": tensor("h", "f32", None),
    }
    launch = (*LAUNCH, "seq_lens", "uses_shared_paged_kv_idx")
    fixed = {"skip_softmax_threshold_scale_factor": None}
    limits = {"page": (32, 64), "d": (576, 320, 512)}
    called = {**SCALES, "q": "query", "topk_indices": "block_tables"}
    folds = True
    selects = True
    masks = "indices"
    out_axes = "b q_len h kv_lora_rank"
    lse, lse_axes, lse_base = "lse", "b*q_len h", "2"

    def canonical(self, given: Given) -> dict[str, Any]:
        check_widths(given)
        count, columns = given.sparse_mla_top_k, given.sizes["topk"]
        if count != columns:
            raise InputError(f"sparse_mla_top_k is {count}, expected {columns} as block_tables has it")
        return {
            "q": given.query,
            "kv_cache": cache_view(given.kv_cache, "PKSD") if given.kv_cache.ndim == 4 else given.kv_cache,
            "topk_indices": given.block_tables,
            "topk_by": "slot",
            "sinks": given.sinks,
            "head_dim_v": given.kv_lora_rank,
            "causal": False,
            **scales(given),
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        indices = spelling.batched(case, spelling.by_slot(case, case.topk_indices, case.topk_length))
        return {
            "query": spelling.rows_of(case),
            "kv_cache": spelling.one_head(spelling.joined(case)),
            "kv_lora_rank": case.head_dim_v,
            "qk_rope_head_dim": case.q.shape[-1] - case.head_dim_v,
            "block_tables": indices,
            "sparse_mla_top_k": 0 if indices is None else indices.shape[-1],
            "sinks": case.sinks,
            **spelled_scales(case),
        }

    def judges_lse(self, case: PagedCase) -> bool:
        return case.sinks is None


def check_widths(given: Given) -> None:
    if given.kv_lora_rank + given.qk_rope_head_dim != given.sizes["d"]:
        raise InputError(
            f"kv_lora_rank is {given.kv_lora_rank} and qk_rope_head_dim {given.qk_rope_head_dim},"
            f" expected {given.sizes['d']} together, the width of kv_cache"
        )


DIALECTS = (Decode(), SparseDecode())
