# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's other backends of dense decode: cute-dsl (SM100), xqa (SM120), and PrimTS (SM100).

Read from flashinfer-ai/flashinfer fb28d72: flashinfer/mla/_core.py, and, one stored version (2026),
flashinfer/attention/prims_ts/mla_decode.py. Scales are folded as in flashinfer_trtllm.py; rows are 512 and 64 wide.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cases import PagedCase
from ..errors import InputError
from ..spellings.cache_layouts import cache_view
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect
from .flashinfer_trtllm import SCALES, SOURCE, check_widths, scales, spelled_scales

LAUNCH = ("workspace_buffer", "qk_nope_head_dim", "max_seq_len", "out", "enable_pdl")
WIDTHS = {
    "kv_lora_rank": value(int),
    "qk_rope_head_dim": value(int),
}
CACHE = tensor("pages page d | pages 1 page d", "=query")
IMPLEMENTATIONS = ("auto", "monolithic", "modular")


def rows_of(given: Given) -> dict[str, Any]:
    """The fields that these calls share."""
    check_widths(given)
    return {
        "q": given.query,
        "kv_cache": cache_view(given.kv_cache, "PKSD") if given.kv_cache.ndim == 4 else given.kv_cache,
        "block_table": given.block_tables,
        "seq_lens": given.seq_lens,
        "head_dim_v": given.kv_lora_rank,
        **scales(given),
    }


def spelled(case: PagedCase) -> dict[str, Any]:
    """The arguments that these calls share, but the query."""
    return {
        "kv_cache": spelling.one_head(spelling.joined(case))[:, None],
        "kv_lora_rank": case.head_dim_v,
        "qk_rope_head_dim": case.q.shape[-1] - case.head_dim_v,
        "block_tables": case.block_table,
        "seq_lens": case.seq_lens,
        **spelled_scales(case),
    }


class CuteDsl(Dialect):
    """trtllm_batch_decode_with_kv_cache_mla with backend="cute-dsl", whose LSE is natural.

    Of its two kernels the monolithic one, the default, is causal bottom-right and has an LSE; the modular one, which
    sinks bring about, has no mask but the length and no LSE.
    """

    name = "flashinfer-cute-dsl"
    call = "trtllm_batch_decode_with_kv_cache_mla"
    source = SOURCE
    arguments = {
        "query": tensor("b q_len h d", "bf16 f16 e4m3"),
        "kv_cache": CACHE,
        **WIDTHS,
        "block_tables": tensor("b blocks", "i32"),
        "seq_lens": tensor("b", "i32"),
        "bmm1_scale": value(float, 1.0),
        "bmm2_scale": value(float, 1.0),
        "cute_dsl_impl": value(str, "auto", choices=IMPLEMENTATIONS),
        "sinks": tensor("h", "f32", None),
    }
    launch = (*LAUNCH, "is_var_seq", "lse", "return_lse", "kv_scale_format")
    fixed = {
        "backend": "cute-dsl", "sparse_mla_top_k": 0, "skip_softmax_threshold_scale_factor": None,
        "uses_shared_paged_kv_idx": True, "cum_seq_lens_q": None, "max_q_len": None,
    }  # fmt: skip
    limits = {"page": (32, 64), "d": (576,)}
    called = {**SCALES, "q": "query", "block_table": "block_tables"}
    folds = True
    masks = "length; causal bottom-right, not in the modular kernel"
    out_axes = "b q_len h kv_lora_rank"
    lse, lse_axes = "lse", "b q_len h"

    def canonical(self, given: Given) -> dict[str, Any]:
        kernel = given.cute_dsl_impl
        if kernel == "monolithic" and given.sinks is not None:
            raise InputError("sinks are given, expected none with cute_dsl_impl 'monolithic'")
        modular = kernel == "modular" or given.sinks is not None
        return {**rows_of(given), "sinks": given.sinks, "causal": not modular}

    def spell(self, case: PagedCase) -> dict[str, Any]:
        modular = case.sinks is not None or not case.causal
        own = {"query": spelling.rows_of(case), "sinks": case.sinks}
        return {**spelled(case), **own, "cute_dsl_impl": "modular" if modular else "auto"}

    def judges_lse(self, case: PagedCase) -> bool:
        return case.causal


class Xqa(Dialect):
    """xqa_batch_decode_with_kv_cache_mla, to which backend="xqa" leads as well: one query token. No LSE, no sinks."""

    name = "flashinfer-xqa"
    call = "xqa_batch_decode_with_kv_cache_mla"
    source = SOURCE
    arguments = {
        "query": tensor("b 1 h d", "bf16 e4m3"),
        "kv_cache": CACHE,
        **WIDTHS,
        "block_tables": tensor("b blocks", "i32"),
        "seq_lens": tensor("b", "i32"),
        "bmm1_scale": value(float, 1.0),
        "bmm2_scale": value(float, 1.0),
    }
    launch = LAUNCH
    fixed = {"sinks": None}
    limits = {"page": (32, 64), "d": (576,)}
    called = {**SCALES, "q": "query", "block_table": "block_tables"}
    folds = True
    masks = "length"
    out_axes = "b 1 h kv_lora_rank"

    def canonical(self, given: Given) -> dict[str, Any]:
        return {**rows_of(given), "causal": False}

    def spell(self, case: PagedCase) -> dict[str, Any]:
        return {**spelled(case), "query": spelling.rows_of(case)}


class PrimTs(Dialect):
    """batch_mla_decode_with_paged_kv_cache of flashinfer.attention.prims_ts: q_len tokens a request, or packed rows.

    A request without tokens is refused, and a causal one with more query tokens than tokens. No LSE.
    """

    name = "flashinfer-prims-ts"
    call = "batch_mla_decode_with_paged_kv_cache"
    source = "flashinfer-ai/flashinfer flashinfer/attention/prims_ts/mla_decode.py"
    arguments = {
        "query": tensor("b q_len h d | t h d", "bf16 e4m3"),
        "kv_cache": CACHE,
        "block_tables": tensor("b blocks", "i32"),
        "seq_lens": tensor("b", "i32"),
        "qo_indptr": tensor("b+1", "i32", None),
        "kv_lora_rank": value(int, 512),
        "qk_rope_head_dim": value(int, 64),
        "mask_type": value(str, "causal", choices=("causal", "dense")),
        "bmm1_scale": value(float, 1.0),
        "bmm2_scale": value(float, 1.0),
    }
    launch = ("max_seq_len_q", "max_kv_len", "out", "out_dtype")
    limits = {"d": (576,)}
    called = {**SCALES, "q": "query", "block_table": "block_tables"}
    folds = True
    masks = "length; causal bottom-right"
    out_axes = "b q_len h kv_lora_rank"

    def canonical(self, given: Given) -> dict[str, Any]:
        packed, causal = given.qo_indptr is not None, given.mask_type == "causal"
        if (given.query.ndim == 3) != packed:
            raise InputError("qo_indptr and query disagree, expected it with a query [t, h, d] and only there")
        counts = np.diff(given.qo_indptr) if packed else np.full(given.sizes["b"], given.sizes["q_len"])
        for b, (tokens, length) in enumerate(zip(counts, given.seq_lens, strict=True)):
            least = max(1, tokens) if causal else 1
            if length < least:
                raise InputError(f"seq_lens[{b}] is {length}, expected {least} or more: a token, {tokens} of the query")
        return {**rows_of(given), "qo_indptr": given.qo_indptr, "causal": causal}

    def spell(self, case: PagedCase) -> dict[str, Any]:
        packed = case.qo_indptr is not None
        return {
            **spelled(case),
            "query": case.q if packed else spelling.rows_of(case),
            "qo_indptr": case.qo_indptr,
            "mask_type": "causal" if case.causal else "dense",
        }


DIALECTS = (CuteDsl(), Xqa(), PrimTs())
