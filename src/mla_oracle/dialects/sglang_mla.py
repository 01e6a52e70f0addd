# SPDX-License-Identifier: Apache-2.0
"""SGLang's kernels for MLA alone: CUTLASS (SM100), and FlashMLA's sparse decode on a CPU.

Read from sgl-project/sglang, one stored version (2026): sgl-kernel/python/sgl_kernel/attention.py,
sgl-kernel/csrc/cpu/flash_mla.cpp.
"""

from __future__ import annotations

import math
from typing import Any

from ..cases import PagedCase
from ..errors import InputError
from ..spellings.cache_layouts import cache_view
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect

LAYOUTS = {1: ("fp8_ds_mla", 656), 2: ("model1", 584)}  # fp8_layout -> format, bytes of a row
READERS = {"fp8_ds_mla": "f32_bf16", "model1": "guarded"}


class Cutlass(Dialect):
    """cutlass_mla_decode: 128 heads, one token a request, and the scale 1/sqrt(192) in the kernel. No LSE."""

    name = "sglang-cutlass"
    call = "cutlass_mla_decode"
    source = "sgl-project/sglang sgl-kernel/python/sgl_kernel/attention.py"
    arguments = {
        "q_nope_and_q_pe": tensor("b 128 576", "bf16 f16"),
        "kv_c_and_k_pe_cache": tensor("num_blocks page_size 576", "=q_nope_and_q_pe"),
        "seq_lens": tensor("b", "i32"),
        "page_table": tensor("b max_blocks", "i32"),
    }
    launch = ("workspace",)
    limits = {"page_size": (1, 2, 4, 8, 16, 32, 64, 128)}
    called = {"q": "q_nope_and_q_pe", "kv_cache": "kv_c_and_k_pe_cache", "block_table": "page_table"}
    itself = "scale 1/sqrt(192)"
    masks = "length"
    out_axes = "b 128 512"

    def canonical(self, given: Given) -> dict[str, Any]:
        return {
            "q": given.q_nope_and_q_pe,
            "kv_cache": given.kv_c_and_k_pe_cache,
            "block_table": given.page_table,
            "seq_lens": given.seq_lens,
            "softmax_scale": spelling.inverse_root(192),
            "head_dim_v": 512,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        return {
            "q_nope_and_q_pe": spelling.rows_of(case, "B"),
            "kv_c_and_k_pe_cache": spelling.one_head(spelling.joined(case)),
            "seq_lens": case.seq_lens,
            "page_table": case.block_table,
        }


class CpuFlashMla(Dialect):
    """flash_mla_with_kvcache_cpu: slots of a cache of bf16, of rows of 656 bytes (fp8_layout 1) or 584 (2).

    An index below 0 or beyond the cache is none, lengths are of a request, a second cache follows in the same softmax.
    LSE natural, +inf where a query sees nothing, without the sink. A scale of 584 bytes' rows whose byte is 0 is 0.
    """

    name = "sglang-cpu-flashmla"
    call = "flash_mla_with_kvcache_cpu"
    source = "sgl-project/sglang sgl-kernel/csrc/cpu/flash_mla.cpp"
    arguments = {
        "q": tensor("b s_q h d", "bf16"),
        "k_cache": tensor("num_blocks page 1 width", "bf16 u8 e4m3"),
        "head_dim_v": value(int),
        "softmax_scale": value(float),
        "indices": tensor("b s_q topk", "i32"),
        "topk_length": tensor("b", "i32", None),
        "attn_sink": tensor("h", "f32", None),
        "extra_k_cache": tensor("extra_blocks extra_page 1 width", "=k_cache", None),
        "extra_indices": tensor("b s_q extra_topk", "i32", None),
        "extra_topk_length": tensor("b", "i32", None),
        "is_fp8_kvcache": value(bool),
        "fp8_layout": value(int),
    }
    limits = {"d": (-32,)}
    called = {
        "kv_cache": "k_cache", "topk_indices": "indices", "sinks": "attn_sink", "extra_kv_cache": "extra_k_cache",
        "extra_topk_indices": "extra_indices",
    }  # fmt: skip
    selects = True
    masks = "indices; topk_length of the request"
    out_axes = "b s_q h head_dim_v"
    lse, lse_axes, empty_lse = "lse", "b h s_q", math.inf

    def canonical(self, given: Given) -> dict[str, Any]:
        form = _format(given)
        extra = given.extra_k_cache
        return {
            "q": given.q,
            "kv_cache": cache_view(given.k_cache, "PSKD"),
            "cache_format": form,
            "cache_reader": READERS.get(form or ""),
            "topk_indices": given.indices,
            "topk_length": given.topk_length,
            "topk_by": "slot",
            "topk_outside": "skip",
            "extra_kv_cache": None if extra is None else cache_view(extra, "PSKD"),
            "extra_topk_indices": given.extra_indices,
            "extra_topk_length": given.extra_topk_length,
            "sinks": given.attn_sink,
            "softmax_scale": given.softmax_scale,
            "head_dim_v": given.head_dim_v,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        packed = {form: layout for layout, (form, _) in LAYOUTS.items()}
        if case.cache_format is not None and case.cache_format not in packed:
            raise InputError(f"cache_format is {case.cache_format}, expected none or {' or '.join(packed)}")
        rows = spelling.one_head(spelling.joined(case)) if case.cache_format is None else case.kv_cache
        extra = case.extra_kv_cache
        return {
            "q": spelling.rows_of(case),
            "k_cache": rows[:, :, None],
            "head_dim_v": case.head_dim_v,
            "softmax_scale": case.softmax_scale,
            "indices": spelling.batched(case, spelling.by_slot(case, case.topk_indices, case.topk_length)),
            "topk_length": case.topk_length,
            "attn_sink": case.sinks,
            "extra_k_cache": None if extra is None else extra[:, :, None],
            "extra_indices": spelling.batched(case, case.extra_topk_indices),
            "extra_topk_length": case.extra_topk_length,
            "is_fp8_kvcache": case.cache_format is not None,
            "fp8_layout": packed.get(case.cache_format or "", 0),
        }


def _format(given: Given) -> str | None:
    """The format of the cache. Raises InputError for one that is not what the flags say."""
    dense, width = given.k_cache.dtype.itemsize > 1, given.sizes["width"]
    if dense == given.is_fp8_kvcache:
        raise InputError(f"is_fp8_kvcache is {given.is_fp8_kvcache}, expected {not dense} with k_cache as it is")
    if dense:
        return None
    form, size = LAYOUTS.get(given.fp8_layout, ("", 0))
    if width != size:
        raise InputError(f"fp8_layout is {given.fp8_layout}, expected 1 with rows of 656 bytes or 2 with 584")
    return form


DIALECTS = (Cutlass(), CpuFlashMla())
