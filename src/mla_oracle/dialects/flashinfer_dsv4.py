# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decode of DeepSeek V4, which attends over two caches in one softmax.

Read from flashinfer-ai/flashinfer fb28d72: flashinfer/mla/_core.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from ..errors import InputError
from ..spellings.cache_layouts import cache_view
from ..spellings.selections import join_selection, split_selection
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect
from .flashinfer_trtllm import SCALES, SOURCE, scales, spelled_scales


class TwoCaches(Dialect):
    """trtllm_batch_decode_sparse_mla_dsv4: rows of 512 that are key and value, a window's cache and a compressed one.

    The first 128 columns of sparse_indices are slots of swa_kv_cache, the others of compressed_kv_cache;
    sparse_topk_lens of each query counts those 128 as well. No LSE.
    """

    name = "flashinfer-dsv4"
    call = "trtllm_batch_decode_sparse_mla_dsv4"
    source = SOURCE
    arguments = {
        "query": tensor("b q_len h 512", "bf16"),
        "swa_kv_cache": tensor("swa_pages 1 swa_page 512", "bf16"),
        "compressed_kv_cache": tensor("pages 1 page 512", "bf16"),
        "sparse_indices": tensor("b q_len topk", "i32"),
        "sparse_topk_lens": tensor("b q_len", "i32"),
        "bmm1_scale": value(float, 1.0),
        "bmm2_scale": value(float, 1.0),
        "sinks": tensor("h", "f32", None),
    }
    launch = ("workspace_buffer", "seq_lens", "out", "enable_pdl")
    fixed = {"kv_layout": "HND"}
    limits = {"h": (8, 16, 32, 64, 128)}
    called = {
        **SCALES, "q": "query", "kv_cache": "swa_kv_cache", "extra_kv_cache": "compressed_kv_cache",
        "topk_indices": "sparse_indices", "extra_topk_indices": "sparse_indices", "topk_length": "sparse_topk_lens",
    }  # fmt: skip
    selects = True
    masks = "indices; sparse_topk_lens of the query"
    out_axes = "b q_len h 512"

    def canonical(self, given: Given) -> dict[str, Any]:
        main, main_length, extra, extra_length = split_selection(given.sparse_indices, given.sparse_topk_lens, 128)
        return {
            "q": given.query,
            "kv_cache": cache_view(given.swa_kv_cache, "PKSD"),
            "topk_indices": main,
            "topk_length": main_length,
            "extra_kv_cache": cache_view(given.compressed_kv_cache, "PKSD"),
            "extra_topk_indices": extra,
            "extra_topk_length": extra_length,
            "topk_by": "slot",
            "sinks": given.sinks,
            "head_dim_v": 512,
            "causal": False,
            **scales(given),
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        main, extra = (spelling.batched(case, x) for x in (case.topk_indices, case.extra_topk_indices))
        whole = case.topk_length is None or bool((case.topk_length == 128).all())
        if main is None or extra is None or main.shape[-1] != 128 or not whole:
            raise InputError("topk_indices are not 128 whole columns before those of a second cache")
        cache = case.extra_kv_cache
        indices, lengths = join_selection(main, extra, _of_queries(case))
        return {
            "query": spelling.rows_of(case),
            "swa_kv_cache": spelling.one_head(spelling.joined(case))[:, None],
            "compressed_kv_cache": None if cache is None else cache[:, None],
            "sparse_indices": indices,
            "sparse_topk_lens": lengths,
            "sinks": case.sinks,
            **spelled_scales(case),
        }


def _of_queries(case: PagedCase) -> Array | None:
    """extra_topk_length of every query [B, T]."""
    length: Array | None = case.extra_topk_length
    if length is not None and length.shape != case.q.shape[:-2]:
        return np.broadcast_to(length[:, None], (len(length), spelling.tokens_of(case)))
    return spelling.batched(case, length)


DIALECTS = (TwoCaches(),)
