# SPDX-License-Identifier: Apache-2.0
"""FlashMLA: dense decode, sparse decode of packed fp8 rows (V32 and MODEL1), sparse prefill.

Read from deepseek-ai/FlashMLA 9241ae3: flash_mla/flash_mla_interface.py, csrc/api/dense_decode.h,
csrc/api/sparse_decode.h, tests/ref.py. An LSE is natural and +inf where a query sees nothing, even with a sink, which
it never counts; out is 0 there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..cases import PagedCase
from ..errors import InputError
from ..spellings.cache_layouts import cache_view, tokens_as_blocks
from ..spellings.selections import check_slots
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect

SOURCE = "deepseek-ai/FlashMLA 9241ae3 flash_mla/flash_mla_interface.py"
SCHEDULE = ("tile_scheduler_metadata", "num_splits")
SPARSE = (
    "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"
)  # fmt: skip
PACKED = {656: "fp8_ds_mla", 584: "model1"}  # bytes of a row -> format


class DenseDecode(Dialect):
    """flash_mla_with_kvcache without indices. Pages of 64, latent then rope; a causal query alone sees every key."""

    name = "flashmla-dense"
    call = "flash_mla_with_kvcache"
    source = f"{SOURCE}, csrc/api/dense_decode.h"
    arguments = {
        "q": tensor("b s_q h d", "bf16 f16"),
        "k_cache": tensor("num_blocks 64 h_k d", "=q"),
        "block_table": tensor("b max_blocks", "i32"),
        "cache_seqlens": tensor("b", "i32"),
        "head_dim_v": value(int),
        "softmax_scale": value(float, None, "1/sqrt(d)"),
        "causal": value(bool, False),
    }
    launch = SCHEDULE
    fixed = {"is_fp8_kvcache": False} | dict.fromkeys(SPARSE)
    limits = {"d": (576,)}
    called = {"kv_cache": "k_cache", "seq_lens": "cache_seqlens"}
    masks = "length; causal bottom-right"
    out_axes = "b s_q h head_dim_v"
    lse, lse_axes, empty_lse = "lse", "b h s_q", math.inf

    def canonical(self, given: Given) -> dict[str, Any]:
        scale = given.softmax_scale
        return {
            "q": given.q,
            "kv_cache": cache_view(given.k_cache, "PSKD"),
            "block_table": given.block_table,
            "seq_lens": given.cache_seqlens,
            "softmax_scale": spelling.inverse_root(given.sizes["d"]) if scale is None else scale,
            "head_dim_v": given.head_dim_v,
            "causal": given.causal,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        rows = spelling.joined(case)
        return {
            "q": spelling.rows_of(case),
            "k_cache": rows[:, :, None] if rows.ndim == 3 else rows,
            "block_table": case.block_table,
            "cache_seqlens": case.seq_lens,
            "head_dim_v": case.head_dim_v,
            "softmax_scale": case.softmax_scale,
            "causal": case.causal,
        }


class SparseDecode(Dialect):
    """flash_mla_with_kvcache with indices: slots (block * page + offset), -1 alone for none, lengths of a request.

    Rows of 656 bytes (V32, q of 576) or 584 (MODEL1, q of 512: the value is the whole row). A second cache of such
    rows, with pages of its own, may follow in the same softmax. The interface takes it and lengths of either rows;
    with V32's the kernels of SM100 do (csrc/sm100/decode/head64), and that of SM90 asserts that neither is given
    (csrc/sm90/decode/sparse_fp8). Scales of V32 are f32, read as f32 products rounded to bf16.
    """

    name = "flashmla-sparse"
    call = "flash_mla_with_kvcache"
    source = f"{SOURCE}, csrc/api/sparse_decode.h"
    arguments = {
        "q": tensor("b s_q h d", "bf16"),
        "k_cache": tensor("num_blocks page 1 bytes", "u8 i8 e4m3"),
        "indices": tensor("b s_q topk", "i32"),
        "head_dim_v": value(int),
        "softmax_scale": value(float, None, "1/sqrt(d)"),
        "is_fp8_kvcache": value(bool, False),
        "attn_sink": tensor("h", "f32", None),
        "extra_k_cache": tensor("extra_blocks extra_page 1 bytes", "u8 i8 e4m3", None),
        "extra_indices_in_kvcache": tensor("b s_q extra_topk", "i32", None),
        "topk_length": tensor("b", "i32", None),
        "extra_topk_length": tensor("b", "i32", None),
    }
    launch = (*SCHEDULE, "block_table", "cache_seqlens")
    fixed = {"causal": False}
    limits = {"h": (64, 128), "d": (576, 512), "bytes": tuple(PACKED), "topk": (-64,), "extra_topk": (-64,)}
    called = {
        "kv_cache": "k_cache",
        "topk_indices": "indices",
        "sinks": "attn_sink",
        "extra_kv_cache": "extra_k_cache",
        "extra_topk_indices": "extra_indices_in_kvcache",
    }
    selects = True
    masks = "indices; topk_length of the request"
    out_axes = "b s_q h head_dim_v"
    lse, lse_axes, empty_lse = "lse", "b h s_q", math.inf

    def canonical(self, given: Given) -> dict[str, Any]:
        if not given.is_fp8_kvcache:
            raise InputError("is_fp8_kvcache is False, expected True with indices")
        check_slots("indices", given.indices, given.topk_length)
        check_slots("extra_indices_in_kvcache", given.extra_indices_in_kvcache, given.extra_topk_length)
        scale = given.softmax_scale
        extra = given.extra_k_cache
        return {
            "q": given.q,
            "kv_cache": cache_view(given.k_cache, "PSKD"),
            "cache_format": PACKED[given.sizes["bytes"]],
            "topk_indices": given.indices,
            "topk_length": given.topk_length,
            "topk_by": "slot",
            "extra_kv_cache": None if extra is None else cache_view(extra, "PSKD"),
            "extra_topk_indices": given.extra_indices_in_kvcache,
            "extra_topk_length": given.extra_topk_length,
            "sinks": given.attn_sink,
            "softmax_scale": spelling.inverse_root(given.sizes["d"]) if scale is None else scale,
            "head_dim_v": given.head_dim_v,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        if case.cache_format not in PACKED.values():
            raise InputError(f"cache_format is {case.cache_format}, expected {' or '.join(PACKED.values())}")
        extra = case.extra_kv_cache
        return {
            "q": spelling.rows_of(case),
            "k_cache": case.kv_cache[:, :, None],
            "indices": spelling.batched(case, spelling.by_slot(case, case.topk_indices, case.topk_length)),
            "topk_length": case.topk_length,
            "extra_k_cache": None if extra is None else extra[:, :, None],
            "extra_indices_in_kvcache": spelling.batched(case, case.extra_topk_indices),
            "extra_topk_length": case.extra_topk_length,
            "attn_sink": case.sinks,
            "head_dim_v": case.head_dim_v,
            "softmax_scale": case.softmax_scale,
            "is_fp8_kvcache": True,
        }


class SparsePrefill(Dialect):
    """flash_mla_sparse_fwd: bf16 rows without pages; an index below 0 or beyond the rows is none; lengths of a query.

    max_logits, which it returns as well, is not judged. The README says log2 of this LSE; its reference is natural.
    """

    name = "flashmla-prefill"
    call = "flash_mla_sparse_fwd"
    source = f"{SOURCE}, tests/ref.py"
    arguments = {
        "q": tensor("s_q h d", "bf16"),
        "kv": tensor("s_kv 1 d", "bf16"),
        "indices": tensor("s_q 1 topk", "i32"),
        "sm_scale": value(float),
        "d_v": value(int, 512),
        "attn_sink": tensor("h", "f32", None),
        "topk_length": tensor("s_q", "i32", None),
    }
    limits = {"h": (64, 128), "d": (576, 512), "topk": (-64,)}
    called = {
        "kv_cache": "kv", "topk_indices": "indices", "sinks": "attn_sink", "softmax_scale": "sm_scale",
        "head_dim_v": "d_v",
    }  # fmt: skip
    selects = True
    masks = "indices; topk_length of the query"
    out_axes = "s_q h d_v"
    lse, lse_axes, empty_lse = "lse", "s_q h", math.inf
    unjudged = ("max_logits",)

    def canonical(self, given: Given) -> dict[str, Any]:
        return {
            "q": given.q,
            "kv_cache": cache_view(given.kv, "SKD"),
            "topk_indices": given.indices[:, 0],
            "topk_length": given.topk_length,
            "topk_by": "slot",
            "topk_outside": "skip",
            "sinks": given.attn_sink,
            "softmax_scale": given.sm_scale,
            "head_dim_v": given.d_v,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        indices = spelling.flat(case, spelling.by_slot(case, case.topk_indices, case.topk_length))
        assert indices is not None
        return {
            "q": spelling.rows_of(case, "N"),
            "kv": tokens_as_blocks(spelling.one_head(spelling.joined(case))),
            "indices": indices[:, None],
            "topk_length": _of_queries(case),
            "sm_scale": case.softmax_scale,
            "d_v": case.head_dim_v,
            "attn_sink": case.sinks,
        }


def _of_queries(case: PagedCase) -> Any:
    """topk_length of every query [N]."""
    length = case.topk_length
    if length is None or length.shape == case.q.shape[:-2]:
        return spelling.flat(case, length)
    return np.repeat(length, spelling.tokens_of(case))


DIALECTS = (DenseDecode(), SparseDecode(), SparsePrefill())
