# SPDX-License-Identifier: Apache-2.0
"""TVM's MLA kernel over a paged cache, of MLC-LLM.

Read from apache/tvm, one stored version (2026): _attention_prefill_mla of the relax KV cache, whose function is
batch_prefill_paged_kv_mla; d_latent and d_rope are what it is compiled for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cases import PagedCase
from ..checks import arguments_named
from ..errors import InputError
from ..spellings.cache_layouts import tokens_as_blocks
from ..spellings.tables import from_csr_pages, from_length_info, to_csr_pages, to_length_info
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect


class PrefillMla(Dialect):
    """batch_prefill_paged_kv_mla: CSR pages, length_info [b] the tokens of the last page; or [3, b], then with the
    window's offset and a count of first tokens that stay in it, called sink: no logit.

    LSE in base 2, -50000 where a query sees nothing, from which its running maximum starts.
    """

    name = "tvm"
    call = "batch_prefill_paged_kv_mla"
    source = "apache/tvm python/tvm/relax/frontend/nn/llm/kv_cache.py"
    arguments = {
        "q": tensor("t h d", "f16 bf16 f32"),
        "q_indptr": tensor("b+1", "i32"),
        "pages": tensor("max_pages page_size d", "=q"),
        "page_indptr": tensor("b+1", "i32"),
        "page_values": tensor("entries", "i32"),
        "length_info": tensor("b | 3 b", "i32"),
        "causal": value(int),
        "sm_scale": value(float),
        "d_latent": value(int),
        "d_rope": value(int),
    }
    launch = ("output",)
    called = {"kv_cache": "pages", "softmax_scale": "sm_scale", "qo_indptr": "q_indptr", "head_dim_v": "d_latent"}
    masks = "length; causal bottom-right; window and first tokens"
    out, out_axes = "output", "t h d_latent"
    lse, lse_axes, lse_base, empty_lse = "lse", "t h", "2", -5e4

    def canonical(self, given: Given) -> dict[str, Any]:
        if given.causal not in (0, 1):
            raise InputError(f"causal is {given.causal}, expected 0 or 1")
        if given.d_latent + given.d_rope != given.sizes["d"]:
            raise InputError(f"d_latent is {given.d_latent}, expected {given.sizes['d']} with d_rope {given.d_rope}")
        pages = (given.page_indptr, given.page_values)
        sizes: dict[str, Any] = {"block_size": given.sizes["page_size"], "num_blocks": given.sizes["max_pages"]}
        with arguments_named(indptr="page_indptr", indices="page_values", last_page_len="length_info"):
            if given.length_info.ndim == 1:
                table = from_csr_pages(*pages, last_page_len=given.length_info, **sizes)
            else:
                table = from_length_info(*pages, given.length_info, **sizes)
        return {
            "q": given.q,
            "qo_indptr": given.q_indptr,
            "kv_cache": given.pages if given.length_info.ndim == 1 else tokens_as_blocks(given.pages),
            **table._asdict(),
            "softmax_scale": given.sm_scale,
            "head_dim_v": given.d_latent,
            "causal": given.causal == 1,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        rows = spelling.one_head(spelling.joined(case))
        pages, lengths = to_csr_pages(case.block_table, case.seq_lens, block_size=rows.shape[1]), None
        if case.window_left not in (None, -1):
            spelling.rows_of(case, "B")
            window = {"window_left": case.window_left, "window_first": case.window_first}
            lengths = to_length_info(case.block_table, case.seq_lens, block_size=rows.shape[1], **window).length_info
        return {
            "q": spelling.rows_of(case, "N"),
            "q_indptr": spelling.indptr(case),
            "pages": rows,
            "page_indptr": pages.indptr,
            "page_values": pages.indices,
            "length_info": np.ascontiguousarray(pages.last_page_len if lengths is None else lengths),
            "causal": int(case.causal),
            "sm_scale": case.softmax_scale,
            "d_latent": case.head_dim_v,
            "d_rope": case.q.shape[-1] - case.head_dim_v,
        }


DIALECTS = (PrefillMla(),)
