# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's sparse MLA of SM120: packed rows, lengths of a query, an LSE that counts the sink.

Read from flashinfer-ai/flashinfer fb28d72: flashinfer/mla/_sparse_mla_sm120.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from ..errors import InputError
from ..spellings.cache_layouts import cache_view
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect

PACKED = {656: "fp8_ds_mla", 584: "model1"}
READERS = {"auto": "exponent", "pow2_fp32": "exponent", "arbitrary_fp32": "f32_bf16"}  # of a row of 656 bytes


class Sm120(Dialect):
    """sparse_mla_sm120_paged_attention: tokens in a row, each with its own slots and topk_length; pages of 64.

    LSE in base 2, with the sink, -1e30 where a query sees nothing. A scale of rows of 656 bytes is its exponent alone
    unless kv_scale_format is "arbitrary_fp32". Rows of 584 bytes may have a second cache.
    """

    name = "flashinfer-sm120"
    call = "sparse_mla_sm120_paged_attention"
    source = "flashinfer-ai/flashinfer fb28d72 flashinfer/mla/_sparse_mla_sm120.py"
    arguments = {
        "q": tensor("t h d", "bf16"),
        "kv_cache": tensor("pages 64 bytes | pages 1 64 bytes | pages 64 1 bytes", "u8"),
        "indices": tensor("t topk", "i32"),
        "sm_scale": value(float),
        "d_v": value(int, 512),
        "topk_length": tensor("t", "i32", None),
        "attn_sink": tensor("h", "f32", None),
        "extra_kv_cache": tensor("extra_pages extra_page bytes | extra_pages 1 extra_page bytes", "u8", None),
        "extra_indices": tensor("t extra_topk", "i32", None),
        "extra_topk_length": tensor("t", "i32", None),
        "kv_scale_format": value(str, "auto", choices=tuple(READERS)),
    }
    launch = ("output", "out_lse", "workspace_buffer")
    limits = {"d": (576, 512), "bytes": tuple(PACKED)}
    called = {
        "topk_indices": "indices", "sinks": "attn_sink", "softmax_scale": "sm_scale",
        "extra_topk_indices": "extra_indices", "head_dim_v": "d_v",
    }  # fmt: skip
    selects = True
    masks = "indices; topk_length of the query"
    out, out_axes = "output", "t h d_v"
    lse, lse_axes, lse_base, empty_lse, sinks_in_lse = "out_lse", "t h", "2", -1e30, True

    def canonical(self, given: Given) -> dict[str, Any]:
        packed = PACKED[given.sizes["bytes"]]
        if packed == "fp8_ds_mla" and given.extra_kv_cache is not None:
            raise InputError("extra_kv_cache is given, expected none with rows of 656 bytes")
        extra = given.extra_kv_cache
        return {
            "q": given.q,
            "kv_cache": _pages(given.kv_cache),
            "cache_format": packed,
            "cache_reader": READERS[given.kv_scale_format] if packed == "fp8_ds_mla" else None,
            "topk_indices": given.indices,
            "topk_length": given.topk_length,
            "topk_by": "slot",
            "extra_kv_cache": None if extra is None else _pages(extra),
            "extra_topk_indices": given.extra_indices,
            "extra_topk_length": given.extra_topk_length,
            "sinks": given.attn_sink,
            "softmax_scale": given.sm_scale,
            "head_dim_v": given.d_v,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        reader = case.cache_reader or "f32_bf16"
        formats = {rule: name for name, rule in READERS.items()}
        return {
            "q": spelling.rows_of(case, "N"),
            "kv_cache": case.kv_cache,
            "indices": spelling.flat(case, spelling.by_slot(case, case.topk_indices, case.topk_length)),
            "topk_length": _of_queries(case, case.topk_length),
            "extra_kv_cache": case.extra_kv_cache,
            "extra_indices": spelling.flat(case, case.extra_topk_indices),
            "extra_topk_length": _of_queries(case, case.extra_topk_length),
            "attn_sink": case.sinks,
            "sm_scale": case.softmax_scale,
            "d_v": case.head_dim_v,
            "kv_scale_format": formats.get(reader) if case.cache_format == "fp8_ds_mla" else None,
        }


def _pages(cache: Array) -> Array:
    """[pages, page, bytes], the axis of the one head gone wherever it is."""
    if cache.ndim == 4:
        return cache_view(cache, "PKSD" if cache.shape[1] == 1 else "PSKD")
    return cache


def _of_queries(case: PagedCase, length: Array | None) -> Array | None:
    if length is None or length.shape == case.q.shape[:-2]:
        return spelling.flat(case, length)
    return np.repeat(length, spelling.tokens_of(case))


DIALECTS = (Sm120(),)
