# SPDX-License-Identifier: Apache-2.0
"""What known kernels round: presets of Numerics, by name, each with the file in which it can be read.

    resolve("flashmla", case, results)

A field that a preset does not name is inferred from the case (numerics.infer): a cache of bf16 means weights of bf16.
To add a kernel, name the source of every field; what the source does not settle stays "any".
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """The fields of Numerics that a kernel fixes, and where they can be read."""

    source: str
    rounds: dict[str, Any]


_F32 = {"score_accumulator": "f32", "p": "f32", "p_base": "max", "row_sum": "f32", "value_accumulator": "f32"}

KERNELS = {
    "flashmla": Kernel(
        "FlashMLA csrc/kernels/sm90/decode/dense/splitkv_mla.cuh: exp2f, weights summed before they are cast to the "
        "input's dtype; partial outputs in f32",
        {"p_base": "max", "row_sum": "f32", "exp": "exp2", "partials": "f32"},
    ),
    "flashinfer-fa2": Kernel(
        "FlashInfer include/flashinfer/attention/mla.cuh: ptx_exp2, the row sum is an MMA over the weights cast to the "
        "cache's dtype (m16k16_rowsum), partial_o has the output's dtype",
        {"p_base": "max", "row_sum": "p", "exp": "exp2", "partials": "out"},
    ),
    "flashinfer-fa3": Kernel(
        "FlashInfer include/flashinfer/attention/mla_hopper.cuh: weights cast to the cache's dtype (convert_s_to_p), "
        "partial_o has the output's dtype",
        {"p_base": "max", "row_sum": "any", "exp": "exp2", "partials": "out"},
    ),
    "vllm-triton": Kernel(
        "vLLM vllm/v1/attention/ops/triton_decode_attention.py: tl.exp, tl.dot(p.to(v.dtype), v), tl.sum(p) of the "
        "weights before the cast; 2 * tl.sigmoid(2 * x) - 1 of a logit_cap; partial outputs in f32",
        {"p_base": "max", "row_sum": "f32", "exp": "exp2", "partials": "f32", "tanh": "sigmoid"},
    ),
    "sglang-triton": Kernel(
        "SGLang python/sglang/srt/layers/attention/triton_ops/decode_attention.py: as vllm-triton",
        {"p_base": "max", "row_sum": "f32", "exp": "exp2", "partials": "f32", "tanh": "sigmoid"},
    ),
    "sglang-cpu": Kernel(
        "SGLang sgl-kernel/csrc/cpu/decode.cpp, decode_attention_mla_kernel_impl: exp_u20, weights summed in f32 and "
        "then cast to the cache's dtype, brgemm with f32 accumulators, f32 partial outputs",
        {"p_base": "max", "row_sum": "f32", "exp": "u20", "partials": "f32", "score_accumulator": "f32",
         "value_accumulator": "f32"},
    ),
    "llama.cpp-cpu": Kernel(
        "llama.cpp ggml/src/ggml-cpu/ops.cpp, ggml_compute_forward_flash_attn_ext_f16_one_chunk with an f16 cache: the "
        "query cast to f16, expf, every addition to the output rounded to f16 (ggml_vec_mad_f16), f32 partial outputs",
        {**_F32, "query": "f16", "cache": "f16", "value_accumulator": "f16", "exp": "exp", "partials": "f32"},
    ),
    "llama.cpp-cuda": Kernel(
        "llama.cpp ggml/src/ggml-cuda/fattn-mma-f16.cuh and fattn-common.cuh: query and weights in f16, scores in f32, "
        "outputs accumulated in f16 by the MMA, FATTN_KQ_MAX_OFFSET of 3 x 0.6931",
        {"query": "f16", "cache": "f16", "score_accumulator": "mma", "p": "f16", "p_scale": 0.1250177, "p_base": "max",
         "row_sum": "f32", "value_accumulator": "mma-f16", "exp": "exp2", "partials": "f32"},
    ),
    "vllm.cpp": Kernel(
        "vllm.cpp src/vt/cpu/cpu_mla_attn.cpp: f32 loops over keys, online softmax with expf",
        {**_F32, "exp": "exp", "partials": "f32"},
    ),
    "memra": Kernel("memra mla.rs: f32 loops, two passes, exp of f32", {**_F32, "exp": "exp", "splits": 1}),
    "strict": Kernel("mla_oracle.reference, precision f32", {**_F32, "exp": "exp", "splits": 1, "tile": 1}),
    "fast": Kernel(
        "mla_oracle.fast.paged.decode: f32 within the bound of its docstring; AMX: weights in two numbers of bf16",
        {**_F32, "p": "bf16x2", "exp": "u20"},
    ),
    "torch-eager": Kernel(
        "PyTorch: (q @ k.T) * scale in the input's dtype, softmax in f32, its result cast back, then the product",
        {"scores": "query", "p_base": "normalised", "row_sum": "f32", "splits": 1},
    ),
}
