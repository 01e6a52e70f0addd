# SPDX-License-Identifier: Apache-2.0
"""aiter's mla_decode_fwd (AMD).

Read from ROCm/aiter, one stored version (2026): aiter/mla.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from ..checks import arguments_named
from ..errors import InputError
from ..spellings.cache_layouts import cache_view, from_cache_view
from ..spellings.tables import from_csr_pages, to_csr_pages
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect


class Decode(Dialect):
    """mla_decode_fwd: tokens in a row, CSR pages of one token unless page_size is given, causal bottom-right always.

    sm_scale is 1/sqrt(576), the row's width, unless given; o, where it is given, says the width of a value, else 512.
    LSE natural; a request without tokens gives 0/0.
    """

    name = "aiter"
    call = "mla_decode_fwd"
    source = "ROCm/aiter aiter/mla.py"
    arguments = {
        "q": tensor("t h d", "bf16 f16 e4m3"),
        "kv_buffer": tensor("pages page 1 d", "bf16 f16 e4m3"),
        "qo_indptr": tensor("b+1", "i32"),
        "kv_indptr": tensor("b+1", "i32"),
        "kv_indices": tensor("entries", "i32"),
        "kv_last_page_lens": tensor("b", "i32"),
        "o": tensor("t h d_v", "bf16 f16 f32", None),
        "page_size": value(int, 1),
        "sm_scale": value(float, None, "1/sqrt(d)"),
        "q_scale": tensor("1", "f32", None),
        "kv_scale": tensor("1", "f32", None),
    }
    launch = ("max_seqlen_q", "num_kv_splits", "num_kv_splits_indptr", "return_logits", "return_lse")
    fixed = {"nhead_kv": 1, "logit_cap": 0.0}
    called = {"kv_cache": "kv_buffer", "softmax_scale": "sm_scale"}
    masks = "length; causal bottom-right"
    out, out_axes = "o", "t h d_v"
    lse, lse_axes = "lse", "t h"
    empty_out = "nan"

    def canonical(self, given: Given) -> dict[str, Any]:
        if given.page_size != given.sizes["page"]:
            raise InputError(f"page_size is {given.page_size}, expected {given.sizes['page']}, axis 1 of kv_buffer")
        with arguments_named(indptr="kv_indptr", indices="kv_indices", last_page_len="kv_last_page_lens"):
            table = from_csr_pages(
                given.kv_indptr,
                given.kv_indices,
                block_size=given.sizes["page"],
                last_page_len=given.kv_last_page_lens,
                num_blocks=given.sizes["pages"],
            )
        scale = given.sm_scale
        return {
            "q": given.q,
            "qo_indptr": given.qo_indptr,
            "kv_cache": cache_view(given.kv_buffer, "PSKD"),
            **table._asdict(),
            "softmax_scale": spelling.inverse_root(given.sizes["d"]) if scale is None else scale,
            "head_dim_v": given.sizes.get("d_v", 512),
            "causal": True,
            "q_scale": spelling.number_of("q_scale", given.q_scale),
            **_scaled(given.kv_buffer, given.kv_scale),
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        rows = case.kv_cache if case.cache_format == "fp8_e4m3" else spelling.joined(case)
        pages = to_csr_pages(case.block_table, case.seq_lens, block_size=rows.shape[1])
        return {
            "q": spelling.rows_of(case, "N"),
            "kv_buffer": from_cache_view(rows, "PSKD"),
            "qo_indptr": spelling.indptr(case),
            "kv_indptr": pages.indptr,
            "kv_indices": pages.indices,
            "kv_last_page_lens": pages.last_page_len,
            "o": None if case.head_dim_v == 512 else _blank(case),
            "page_size": rows.shape[1],
            "sm_scale": case.softmax_scale,
            "q_scale": None if case.q_scale is None else np.array([case.q_scale], np.float32),
            "kv_scale": case.kv_scale,
        }


def _blank(case: PagedCase) -> Array:
    """The output to be written, NaN: its width is that of the values."""
    rows = len(spelling.rows_of(case, "N"))
    return np.full((rows, case.q.shape[-2], case.head_dim_v), np.nan, np.float32)


def _scaled(rows: Array, scale: Array | None) -> dict[str, Any]:
    """An fp8 cache: the scale is folded into that of the scores, and into the output."""
    if rows.dtype.itemsize > 1:
        if scale is not None:
            raise InputError("kv_scale is given, expected none with a cache that is not fp8")
        return {}
    return {
        "cache_format": "fp8_e4m3",
        "cache_reader": "fold",
        "kv_scale": np.ones(1, np.float32) if scale is None else scale,
    }


DIALECTS = (Decode(),)
