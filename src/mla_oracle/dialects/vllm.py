# SPDX-License-Identifier: Apache-2.0
"""vLLM's own decode kernels: Triton and CPU. Its other backends are the libraries' dialects.

Read from vllm-project/vllm, one stored version (2026): vllm/v1/attention/ops/triton_decode_attention.py,
csrc/cpu/mla_decode.cpp, vllm/_custom_ops.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import dtype_name
from ..cases import PagedCase
from ..errors import InputError
from ..spellings.cache_layouts import cache_view
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect

ROUNDED = {"bf16": "f32_bf16", "f16": "f32_f16", "f32": "f32"}  # a key is rounded to the query's dtype


class Triton(Dialect):
    """decode_attention_fwd: one token a request; v_buffer is a view of k_buffer's first columns; page_size is 1 unless
    given. A fp8 cache has one scale for keys and values. A request without tokens gives 0/0.
    """

    name = "vllm-triton"
    call = "decode_attention_fwd"
    source = "vllm-project/vllm vllm/v1/attention/ops/triton_decode_attention.py"
    arguments = {
        "q": tensor("b h d", "bf16 f16 f32"),
        "k_buffer": tensor("blocks page h_k d", "bf16 f16 f32 e4m3"),
        "v_buffer": tensor("blocks page h_k d_v", "=k_buffer"),
        "req_to_token": tensor("b max_blocks", "i32"),
        "b_seq_len": tensor("b", "i32"),
        "sm_scale": value(float),
        "page_size": value(int, 1),
        "logit_cap": value(float, 0.0),
        "k_scale": tensor("1", "f32", None),
        "v_scale": tensor("1", "f32", None),
    }
    launch = ("o", "lse", "attn_logits", "num_kv_splits")
    called = {
        "kv_cache": "k_buffer", "block_table": "req_to_token", "seq_lens": "b_seq_len", "softmax_scale": "sm_scale",
        "softcap": "logit_cap", "kv_scale": "k_scale",
    }  # fmt: skip
    masks = "length"
    out, out_axes = "o", "b h d_v"
    lse, lse_axes = "lse", "b h"
    empty_out = "nan"

    def canonical(self, given: Given) -> dict[str, Any]:
        if given.page_size != given.sizes["page"]:
            raise InputError(f"page_size is {given.page_size}, expected {given.sizes['page']}, axis 1 of k_buffer")
        offset, width = spelling.values_of(given.k_buffer, given.v_buffer, "v_buffer")
        return {
            "q": given.q,
            "kv_cache": cache_view(given.k_buffer, "PSKD"),
            "block_table": given.req_to_token,
            "seq_lens": given.b_seq_len,
            "softmax_scale": given.sm_scale,
            "head_dim_v": width,
            "value_offset": offset,
            "softcap": given.logit_cap or None,
            "causal": False,
            **_scaled(given),
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        rows = case.kv_cache if case.cache_format is not None else spelling.joined(case)
        keys = rows[:, :, None] if rows.ndim == 3 else rows
        return {
            "q": spelling.rows_of(case, "B"),
            "k_buffer": keys,
            "v_buffer": keys[..., case.value_offset : case.value_offset + case.head_dim_v],
            "req_to_token": case.block_table,
            "b_seq_len": case.seq_lens,
            "sm_scale": case.softmax_scale,
            "page_size": keys.shape[1],
            "logit_cap": case.softcap,
            "k_scale": case.kv_scale,
            "v_scale": case.kv_scale,
        }


def _scaled(given: Given) -> dict[str, Any]:
    """The format of an fp8 cache."""
    if given.k_buffer.dtype.itemsize > 1:
        for name in ("k_scale", "v_scale"):
            if given[name] is not None and given[name][0] != 1:
                raise InputError(f"{name} is {given[name][0]}, expected 1 with a cache that is not fp8")
        return {}
    scale = np.ones(1, np.float32) if given.k_scale is None else given.k_scale
    if given.v_scale is not None and given.v_scale[0] != scale[0]:
        raise InputError(f"v_scale is {given.v_scale[0]}, expected {scale[0]} as k_scale: a row is key and value")
    return {"cache_format": "fp8_e4m3", "kv_scale": scale, "cache_reader": ROUNDED[dtype_name("q", given.q)]}


class Cpu(Dialect):
    """mla_decode_kvcache_cpu: rows of 576 with values of 512, blocks of 16, no other. No LSE; 0 without tokens."""

    name = "vllm-cpu"
    call = "mla_decode_kvcache_cpu"
    source = "vllm-project/vllm csrc/cpu/mla_decode.cpp"
    arguments = {
        "query": tensor("b h 576", "bf16 f16 f32"),
        "kv_cache": tensor("blocks 16 576", "=query"),
        "scale": value(float),
        "block_tables": tensor("b max_blocks", "i32"),
        "seq_lens": tensor("b", "i32"),
    }
    called = {"q": "query", "block_table": "block_tables", "softmax_scale": "scale"}
    masks = "length"
    out_axes = "b h 512"

    def canonical(self, given: Given) -> dict[str, Any]:
        return {
            "q": given.query,
            "kv_cache": given.kv_cache,
            "block_table": given.block_tables,
            "seq_lens": given.seq_lens,
            "softmax_scale": given.scale,
            "head_dim_v": 512,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        return {
            "query": spelling.rows_of(case, "B"),
            "kv_cache": spelling.one_head(spelling.joined(case)),
            "scale": case.softmax_scale,
            "block_tables": case.block_table,
            "seq_lens": case.seq_lens,
        }


DIALECTS = (Triton(), Cpu())
