# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's attention operation in its MLA generation phase.

Read from NVIDIA/TensorRT-LLM, one stored version (2026): tests/unittest/_torch/attention/test_attention_mla.py,
cpp/tensorrt_llm/kernels/mlaKernels.cu (the scales of an fp8 pool). The pool is an array here; the operation takes a
pointer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import Array, dtype_name
from ..cases import PagedCase
from ..checks import arguments_named
from ..dtypes import dtype
from ..errors import InputError
from ..spellings.cache_layouts import cache_view, from_cache_view
from ..spellings.layouts import fold_heads, unfold_heads
from ..spellings.tables import from_block_offsets, to_block_offsets
from . import spelling
from .arguments import Given, tensor, value
from .dialect import Dialect


class Generation(Dialect):
    """Heads folded into the rows of query and output, block offsets with a plane for keys and one for values.

    The scale is 1/(q_scaling sqrt(qk_nope_head_dim + qk_rope_head_dim)). No LSE.
    """

    name = "tensorrt-llm"
    call = "attention"
    source = "NVIDIA/TensorRT-LLM tests/unittest/_torch/attention/test_attention_mla.py"
    arguments = {
        "q": tensor("t h*d", "bf16 f16"),
        "kv_cache_pool": tensor("blocks 1 tokens_per_block 1 d", "=q"),
        "kv_cache_block_offsets": tensor("b 2 max_blocks", "i32"),
        "sequence_length": tensor("b", "i32"),
        "num_heads": value(int),
        "kv_lora_rank": value(int),
        "qk_nope_head_dim": value(int),
        "qk_rope_head_dim": value(int),
        "q_scaling": value(float, 1.0),
        "predicted_tokens_per_seq": value(int, 1),
        "tokens_per_block": value(int, None, size="tokens_per_block"),
    }
    limits = {"tokens_per_block": (32, 64)}
    called = {"kv_cache": "kv_cache_pool", "seq_lens": "sequence_length", "head_dim_v": "kv_lora_rank"}
    itself = "scale 1/(`q_scaling` sqrt(`qk_nope_head_dim` + `qk_rope_head_dim`))"
    masks = "length; causal bottom-right"
    out, out_axes = "output", "t h*kv_lora_rank"

    def canonical(self, given: Given) -> dict[str, Any]:
        if given.qk_nope_head_dim < 1:
            raise InputError(f"qk_nope_head_dim is {given.qk_nope_head_dim}, expected 1 or more")
        scale = spelling.scaled_root(given.q_scaling, given.qk_nope_head_dim + given.qk_rope_head_dim)
        return {**_rows(given, given.q), "softmax_scale": scale}

    def spell(self, case: PagedCase) -> dict[str, Any]:
        """qk_nope_head_dim is 128, DeepSeek's; q_scaling is what gives the scale, where a number does."""
        rope = case.q.shape[-1] - case.head_dim_v
        return {
            **_spelled(case),
            "q": fold_heads(spelling.rows_of(case, "N")),
            "qk_nope_head_dim": 128,
            "q_scaling": spelling.scaling_of(case.softmax_scale, 128 + rope),
        }

    def lay_out(self, case: PagedCase, out: Array) -> Array:
        return fold_heads(out.reshape(math.prod(out.shape[:-2]), *out.shape[-2:]))


class Fp8Generation(Generation):
    """The same over a pool of e4m3: the query is quant_q_buffer, its scales are those that mla_rope_generation wrote.

    mla_bmm1_scale is the scale of the scores (dequantisation of query and cache in it), and that times log2(e);
    mla_bmm2_scale that of the output.
    """

    name = "tensorrt-llm-fp8"
    source = f"{Generation.source}, cpp/tensorrt_llm/kernels/mlaKernels.cu"
    arguments = {
        "quant_q_buffer": tensor("t h*d", "u8 e4m3"),
        "kv_cache_pool": tensor("blocks 1 tokens_per_block 1 d", "e4m3"),
        "kv_cache_block_offsets": tensor("b 2 max_blocks", "i32"),
        "sequence_length": tensor("b", "i32"),
        "mla_bmm1_scale": tensor("2", "f32"),
        "mla_bmm2_scale": tensor("1", "f32"),
        "num_heads": value(int),
        "kv_lora_rank": value(int),
        "qk_rope_head_dim": value(int),
        "predicted_tokens_per_seq": value(int, 1),
        "tokens_per_block": value(int, None, size="tokens_per_block"),
    }
    launch = ("q", "qk_nope_head_dim", "q_scaling")
    called = {**Generation.called, "softmax_scale": "mla_bmm1_scale", "output_scale": "mla_bmm2_scale"}
    itself = ""
    folds = True

    def canonical(self, given: Given) -> dict[str, Any]:
        scale, with_log2e = (float(number) for number in given.mla_bmm1_scale)
        wanted = spelling.times_log2e(scale)
        if not math.isclose(with_log2e, wanted, rel_tol=1e-6):
            raise InputError(f"mla_bmm1_scale[1] is {with_log2e:g}, expected {wanted:g}: the first times log2(e)")
        out = float(given.mla_bmm2_scale[0])
        return {
            **_rows(given, given.quant_q_buffer.view(dtype("e4m3"))),
            "softmax_scale": scale,
            "output_scale": None if out == 1 else out,
        }

    def spell(self, case: PagedCase) -> dict[str, Any]:
        scale, out = case.softmax_scale, 1.0 if case.output_scale is None else case.output_scale
        q = fold_heads(spelling.rows_of(case, "N"))
        if q.dtype != dtype("e4m3"):
            raise InputError(f"q is {dtype_name('q', q)}, expected e4m3")
        return {
            **_spelled(case),
            "quant_q_buffer": q.view(np.uint8),
            "mla_bmm1_scale": np.array([scale, spelling.times_log2e(scale)], np.float32),
            "mla_bmm2_scale": np.array([out], np.float32),
        }


def _rows(given: Given, q: Array) -> dict[str, Any]:
    """The fields of the case but its scales; q [t, h*d]."""
    tokens, latent, rope = given.predicted_tokens_per_seq, given.kv_lora_rank, given.qk_rope_head_dim
    if tokens < 1 or given.sizes["t"] != given.sizes["b"] * tokens:
        raise InputError(f"q has {given.sizes['t']} rows, expected {given.sizes['b']} x predicted_tokens_per_seq")
    if latent + rope != given.sizes["d"]:
        raise InputError(f"kv_lora_rank is {latent}, expected {given.sizes['d']} with qk_rope_head_dim {rope}")
    with arguments_named(block_offsets="kv_cache_block_offsets", seq_lens="sequence_length"):
        table = from_block_offsets(
            given.kv_cache_block_offsets,
            given.sequence_length,
            block_size=given.sizes["tokens_per_block"],
            num_blocks=given.sizes["blocks"],
        )
    heads = unfold_heads(q, given.num_heads)
    return {
        "q": heads.reshape(given.sizes["b"], tokens, *heads.shape[1:]),
        "kv_cache": cache_view(given.kv_cache_pool, "P1SKD"),
        **table._asdict(),
        "head_dim_v": latent,
        "causal": True,
    }


def _spelled(case: PagedCase) -> dict[str, Any]:
    """The arguments but the query and its scales."""
    return {
        "kv_cache_pool": from_cache_view(spelling.one_head(spelling.joined(case)), "P1SKD"),
        "kv_cache_block_offsets": np.ascontiguousarray(to_block_offsets(case.block_table)),
        "sequence_length": case.seq_lens,
        "num_heads": case.q.shape[-2],
        "kv_lora_rank": case.head_dim_v,
        "qk_rope_head_dim": case.q.shape[-1] - case.head_dim_v,
        "predicted_tokens_per_seq": spelling.tokens_of(case),
    }


DIALECTS = (Generation(), Fp8Generation())
