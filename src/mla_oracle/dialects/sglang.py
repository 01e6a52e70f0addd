# SPDX-License-Identifier: Apache-2.0
"""SGLang's own decode kernels: Triton and CPU, both with pages of one token.

Read from sgl-project/sglang, one stored version (2026): layers/attention/triton_ops/decode_attention.py,
sgl-kernel/csrc/cpu/decode.cpp. Its FlashMLA backend is flashmla-dense with causal=True.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import PagedCase
from ..checks import arguments_named
from ..errors import InputError
from ..spellings.cache_layouts import cache_view, from_cache_view, tokens_as_blocks
from ..spellings.tables import from_csr_tokens, from_request_tokens, to_csr_tokens, to_request_tokens
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect


def keys_of(case: PagedCase) -> Array:
    """k_buffer [tokens, heads, D] of a case: its pages one after the other."""
    return from_cache_view(tokens_as_blocks(spelling.joined(case)), "SKD")


class Triton(Dialect):
    """decode_attention_fwd: one token a request, tokens by CSR, values a view of the keys' first columns.

    No LSE but that of each split. A request without tokens gives 0/0.
    """

    name = "sglang-triton"
    call = "decode_attention_fwd"
    source = "sgl-project/sglang python/sglang/srt/layers/attention/triton_ops/decode_attention.py"
    arguments = {
        "q": tensor("b h d", "bf16 f16 f32"),
        "k_buffer": tensor("tokens h_k d", "=q"),
        "v_buffer": tensor("tokens h_k d_v", "=q"),
        "kv_indptr": tensor("b+1", "i32"),
        "kv_indices": tensor("entries", "i32 i64"),
        "sm_scale": value(float),
        "logit_cap": value(float, 0.0),
        "sinks": tensor("h", "f32", None),
    }
    launch = ("o", "attn_logits", "attn_lse", "num_kv_splits", "max_kv_splits")
    fixed = {"k_scale": 1.0, "v_scale": 1.0, "xai_temperature_len": -1}
    called = {"kv_cache": "k_buffer", "softmax_scale": "sm_scale", "softcap": "logit_cap"}
    masks = "length"
    out, out_axes = "o", "b h d_v"
    empty_out = "nan"

    def canonical(self, given: Given) -> dict[str, Any]:
        offset, width = spelling.values_of(given.k_buffer, given.v_buffer, "v_buffer")
        with arguments_named(indptr="kv_indptr", indices="kv_indices"):
            table = from_csr_tokens(given.kv_indptr, given.kv_indices, num_slots=given.sizes["tokens"])
        return {
            "q": given.q,
            "kv_cache": cache_view(given.k_buffer, "SKD"),
            **table._asdict(),
            "softmax_scale": given.sm_scale,
            "head_dim_v": width,
            "value_offset": offset,
            "softcap": given.logit_cap or None,
            "sinks": given.sinks,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        keys = keys_of(case)
        tokens = to_csr_tokens(case.block_table, case.seq_lens, block_size=case.kv_cache.shape[1])
        return {
            "q": spelling.rows_of(case, "B"),
            "k_buffer": keys,
            "v_buffer": keys[..., case.value_offset : case.value_offset + case.head_dim_v],
            "kv_indptr": tokens.indptr,
            "kv_indices": tokens.indices,
            "sm_scale": case.softmax_scale,
            "logit_cap": case.softcap,
            "sinks": case.sinks,
        }


class Cpu(Dialect):
    """decode_attention_cpu: a map of requests to tokens, and the new key is written at loc before it is attended to.

    Every request has its new token. No LSE but that of each split.
    """

    name = "sglang-cpu"
    call = "decode_attention_cpu"
    source = "sgl-project/sglang sgl-kernel/csrc/cpu/decode.cpp"
    arguments = {
        "query": tensor("b h d", "bf16 f16"),
        "k_buffer": tensor("tokens h_k d", "=query"),
        "v_buffer": tensor("tokens h_k d_v", "=query"),
        "key": tensor("b h_k d", "=query"),
        "value": tensor("b h_k d_v", "=query"),
        "loc": tensor("b", "i64"),
        "req_to_token": tensor("requests context", "i32 i64"),
        "req_pool_indices": tensor("b", "i64"),
        "seq_lens": tensor("b", "i64"),
        "sm_scale": value(float),
        "logit_cap": value(float),
    }
    launch = ("output", "attn_logits")
    called = {"kv_cache": "k_buffer", "softmax_scale": "sm_scale", "softcap": "logit_cap", "q": "query"}
    masks = "length"
    out, out_axes = "output", "b h d_v"

    def canonical(self, given: Given) -> dict[str, Any]:
        for b in np.flatnonzero(given.seq_lens < 1)[:1]:
            raise InputError(f"seq_lens[{b}] is {given.seq_lens[b]}, expected 1 or more: the new token is one of them")
        offset, width = spelling.values_of(given.k_buffer, given.v_buffer, "v_buffer")
        if given.value.tobytes() != given.key[..., offset : offset + width].tobytes():
            raise InputError("value is not the columns of key that v_buffer is of k_buffer")
        keys = given.k_buffer.copy()
        for b in np.flatnonzero((given.loc < 0) | (given.loc >= len(keys)))[:1]:
            raise InputError(f"loc[{b}] is {given.loc[b]}, expected 0 to {len(keys) - 1}, a token of k_buffer")
        for b in range(1, len(given.loc)):
            for other in np.flatnonzero(given.loc[:b] == given.loc[b])[:1]:
                raise InputError(f"loc[{b}] is {given.loc[b]}, which loc[{other}] is: two requests write one token")
        keys[given.loc] = given.key
        table = from_request_tokens(given.req_to_token, given.req_pool_indices, given.seq_lens, num_slots=len(keys))
        return {
            "q": given.query,
            "kv_cache": cache_view(keys, "SKD"),
            **table._asdict(),
            "softmax_scale": given.sm_scale,
            "head_dim_v": width,
            "value_offset": offset,
            "softcap": given.logit_cap or None,
            "causal": False,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        """The rows of new tokens are NaN in k_buffer: a kernel that does not write them is found out."""
        size = case.kv_cache.shape[1]
        for b in np.flatnonzero(case.seq_lens < 1)[:1]:
            raise InputError(f"seq_lens[{b}] is {case.seq_lens[b]}, expected 1 or more: the new token is one of them")
        rows = np.arange(len(case.seq_lens), dtype=np.int64)[::-1].copy()  # the last request is in row 0 of the map
        tokens = to_request_tokens(case.block_table, case.seq_lens, block_size=size, req_pool_indices=rows)
        keys = keys_of(case).copy()
        loc = tokens.req_to_token[rows, tokens.seq_lens - 1].astype(np.int64)
        new = keys[loc]
        keys[loc] = np.nan
        values = slice(case.value_offset, case.value_offset + case.head_dim_v)
        return {
            "query": spelling.rows_of(case, "B"),
            "k_buffer": keys,
            "v_buffer": keys[..., values],
            "key": new,
            "value": new[..., values],
            "loc": loc,
            **tokens._asdict(),
            "sm_scale": case.softmax_scale,
            "logit_cap": 0.0 if case.softcap is None else case.softcap,
        }


DIALECTS = (Triton(), Cpu())
