# SPDX-License-Identifier: Apache-2.0
"""Calls that cannot be made: one line that names the argument by its own name, its value and what was expected."""

import ml_dtypes
import numpy as np
import pytest
from test_conventions import DECODE, MLA, SPARSE, said

from mla_oracle import InputError, UnsupportedError, generate
from mla_oracle.dialects import NAMES, get

BF16 = ml_dtypes.bfloat16
PACKED = f"paged:heads=64,{SPARSE},format=fp8_ds_mla"
IDS = {
    "flashmla-dense": f"{DECODE},tokens=2",
    "flashmla-sparse": PACKED,
    "flashmla-prefill": f"paged:heads=64,{SPARSE}",
    "flashinfer": f"{DECODE},block=16",
    "flashinfer-cutlass": f"paged:heads=128,{MLA},scale={192**-0.5!r},dtype=bf16,lens=70,block=32",
    "flashinfer-trtllm": f"{DECODE},block=32",
    "flashinfer-trtllm-sparse": f"paged:heads=4,{SPARSE},block=32",
    "flashinfer-dsv4": "paged:heads=8,row=512,value=512,scale=1,dtype=bf16,lens=140,block=32,topk=128,topk_by=slot,"
    "extra=40,extra_topk=24,causal=false",
    "flashinfer-cute-dsl": f"{DECODE},block=32,tokens=2",
    "flashinfer-xqa": f"{DECODE},block=32",
    "flashinfer-prims-ts": f"paged:heads=4,{MLA},scale=0.0625,dtype=bf16,lens=70+3,block=32,tokens=2",
    "flashinfer-sm120": f"paged:heads=8,{SPARSE},format=fp8_ds_mla,reader=exponent",
    "vllm-triton": f"{DECODE},block=16",
    "vllm-cpu": f"{DECODE},block=16",
    "sglang-triton": f"{DECODE},block=1",
    "sglang-cpu": f"paged:heads=4,{MLA},scale=0.0625,dtype=bf16,lens=70+1+64,block=1",
    "sglang-cutlass": f"paged:heads=128,{MLA},scale={192**-0.5!r},dtype=bf16,lens=70,block=16",
    "sglang-cpu-flashmla": f"paged:heads=4,{SPARSE}",
    "tensorrt-llm": f"{DECODE},block=32",
    "tensorrt-llm-fp8": f"paged:heads=4,{MLA},scale=0.0625,dtype=e4m3,lens=70,block=32",
    "aiter": f"{DECODE},block=1",
    "lmdeploy": f"{DECODE}",
    "tvm": f"{DECODE},block=16",
    "tokenspeed": f"paged:heads=4,{MLA},scale=0.0625,dtype=e4m3,lens=70,block=32",
    "llama.cpp": f"paged:heads=4,{MLA},scale=0.0625,dtype=f16,q_dtype=f32,lens=70+0+64",
    "ik_llama.cpp": f"paged:heads=4,{MLA},value_offset=64,scale=0.0625,dtype=f16,q_dtype=f32,lens=70+0+64",
    "memra": "absorbed:heads=4,nope=24,rope=8,value=32,rank=64",
    "vllm.cpp": DECODE,
}


def wide(argument):
    return argument.astype(np.float32)


def packed(argument):
    return np.zeros(argument.shape, ml_dtypes.float8_e4m3fn)


def i64(argument):
    return argument.astype(np.int64)


def first(value):
    def changed(argument):
        other = argument.copy()
        other.reshape(-1)[0] = value
        return other

    return changed


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flashmla-dense", {"q": wide}, "q is f32, expected bf16 or f16"),
        ("flashmla-dense", {"k_cache": lambda k: k.astype(np.float16)}, "k_cache is f16, expected bf16"),
        ("flashmla-dense", {"block_table": i64}, "block_table is i64, expected i32"),
        ("flashmla-dense", {"k_cache": lambda k: k[:, :32]}, "k_cache is [6, 32, 1, 576], expected 64 on axis 1 of [num_blocks, 64, h_k, d]"),
        ("flashmla-dense", {"q": lambda q: q[..., :512], "k_cache": lambda k: k[..., :512]}, "q is [3, 2, 4, 512], expected 576 on axis 3, d"),
        ("flashmla-dense", {"q": lambda q: q[0]}, "q has 3 axes [2, 4, 576], expected [b, s_q, h, d]"),
        ("flashmla-dense", {"cache_seqlens": first(-1)}, "cache_seqlens[0] is -1, expected 0 or more"),
        ("flashmla-dense", {"cache_seqlens": first(129)}, "cache_seqlens[0] is 129, expected at most 128: block_table has 2 blocks of 64 a request"),
        ("flashmla-dense", {"cache_seqlens": lambda x: x[:2]}, "cache_seqlens is [2], expected b = 3 on axis 0 of [b]"),
        ("flashmla-dense", {"block_table": first(9)}, "block_table[0, 0] is 9, expected 0 to 5: request 0 sees token 0, and k_cache has 6 blocks"),
        ("flashmla-dense", {"head_dim_v": 577}, "head_dim_v is 577, expected 1 to 576, the width of a k_cache row"),
        ("flashmla-dense", {"causal": 1}, "causal is 1, expected True or False"),
        ("flashmla-dense", {"softmax_scale": "1"}, "softmax_scale is '1', expected a number"),
        ("flashmla-dense", {"softmax_scale": 0.0}, "softmax_scale is 0.0, expected a positive finite number"),
        ("flashmla-dense", {"is_fp8_kvcache": True}, "is_fp8_kvcache is True, expected False: flashmla-dense has no other"),
        ("flashmla-dense", {"indices": np.zeros((3, 2, 64), np.int32)}, "indices is an array, expected None: flashmla-dense has no other"),
        ("flashmla-dense", {"descale_q": 1.0}, "descale_q is given, expected one of q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal in a call of flash_mla_with_kvcache"),
        ("flashmla-dense", {"block_table": None}, "block_table is missing, expected it in a call of flash_mla_with_kvcache"),
        ("flashmla-sparse", {"q": lambda q: q[:, :, :32]}, "q is [1, 1, 32, 576], expected 64 or 128 on axis 2, h"),
        ("flashmla-sparse", {"q": lambda q: q.astype(np.float16)}, "q is f16, expected bf16"),
        ("flashmla-sparse", {"indices": lambda x: x[..., :50]}, "indices is [1, 1, 50], expected a multiple of 64 on axis 2, topk"),
        ("flashmla-sparse", {"indices": first(-2)}, "indices[0, 0, 0] is -2, expected -1 or a slot"),
        ("flashmla-sparse", {"indices": i64}, "indices is i64, expected i32"),
        ("flashmla-sparse", {"k_cache": lambda k: k[..., :600]}, "k_cache is [5, 64, 1, 600], expected 656 or 584 on axis 3, bytes"),
        ("flashmla-sparse", {"causal": True}, "causal is True, expected False: flashmla-sparse has no other"),
        ("flashmla-sparse", {"is_fp8_kvcache": None}, "is_fp8_kvcache is False, expected True with indices"),
        ("flashmla-sparse", {"attn_sink": np.full(64, np.nan, np.float32)}, "attn_sink[0] is nan, expected a number or an infinity"),
        ("flashmla-prefill", {"indices": lambda x: x[:, 0]}, "indices has 2 axes [1, 64], expected [s_q, 1, topk]"),
        ("flashmla-prefill", {"sm_scale": None}, "sm_scale is missing, expected it in a call of flash_mla_sparse_fwd"),
        ("flashinfer", {"kv_indptr": lambda x: x[:3]}, "kv_indptr is [3], expected b+1 = 4 on axis 0 of [b+1]"),
        ("flashinfer", {"kv_indices": first(99)}, "kv_indices[0] is 99, expected 0 to"),
        ("flashinfer", {"kv_len_arr": first(999)}, "kv_len_arr[0] is 999, expected 0 to 80: kv_indptr gives request 0 5 pages of 16"),
        ("flashinfer", {"page_size": 32}, "page_size is 32, expected 16, the tensors' page_size"),
        ("flashinfer", {"ckv_scale": 1.0}, "ckv_scale is given, expected none with a cache of 16 bits"),
        ("flashinfer", {"causal": None}, "causal is missing, expected it in a call of BatchMLAPagedAttentionWrapper"),
        ("flashinfer-cutlass", {"q_nope": lambda q: q[:, :64]}, "q_nope is [1, 64, 512], expected 128 on axis 1"),
        ("flashinfer-cutlass", {"page_table": lambda x: x[:, :3]}, "page_table has 3 blocks of 32, expected tiles of 128 rows to be full"),
        ("flashinfer-trtllm", {"bmm1_scale": np.ones(2, np.float32)}, "bmm1_scale is f32 [2], expected a number, or one in a tensor of f32"),
        ("flashinfer-trtllm-sparse", {"bmm2_scale": np.ones(1)}, "bmm2_scale is f64 [1], expected a number, or one in a tensor of f32"),
        ("flashinfer-cute-dsl", {"bmm1_scale": np.ones(1, np.float32)}, "bmm1_scale is a ndarray, expected a number"),
        ("flashinfer-trtllm", {"kv_lora_rank": 448}, "kv_lora_rank is 448 and qk_rope_head_dim 64, expected 576 together"),
        ("flashinfer-trtllm", {"backend": "cute-dsl"}, "backend is 'cute-dsl', expected auto or trtllm-gen"),
        ("flashinfer-trtllm", {"uses_shared_paged_kv_idx": False}, "block_tables has 2 axes, expected 3 as uses_shared_paged_kv_idx says"),
        ("flashinfer-trtllm", {"sparse_mla_top_k": 64}, "sparse_mla_top_k is 64, expected 0: flashinfer-trtllm has no other"),
        ("flashinfer-trtllm", {"query": lambda q: q[:, 0]}, "cum_seq_lens_q and query disagree"),
        ("flashinfer-cute-dsl", {"sinks": np.zeros(4, np.float32), "cute_dsl_impl": "monolithic"}, "sinks are given, expected none with cute_dsl_impl 'monolithic'"),
        ("flashinfer-cute-dsl", {"backend": "xqa"}, "backend is 'xqa', expected cute-dsl: flashinfer-cute-dsl has no other"),
        ("flashinfer-cute-dsl", {"cute_dsl_impl": "fast"}, "cute_dsl_impl is 'fast', expected auto or monolithic or modular"),
        ("flashinfer-xqa", {"query": lambda q: np.repeat(q, 2, axis=1)}, "query is [3, 2, 4, 576], expected 1 on axis 1"),
        ("flashinfer-xqa", {"query": lambda q: q.astype(ml_dtypes.float8_e4m3fn)}, "kv_cache is bf16, expected e4m3"),
        ("flashinfer-xqa", {"sinks": np.zeros(4, np.float32)}, "sinks is an array, expected None: flashinfer-xqa has no other"),
        ("flashinfer-prims-ts", {"seq_lens": first(0), "mask_type": "dense"}, "seq_lens[0] is 0, expected 1 or more"),
        ("flashinfer-prims-ts", {"seq_lens": first(1)}, "seq_lens[0] is 1, expected 2 or more: a token, 2 of the query"),
        ("flashinfer-prims-ts", {"query": lambda q: q[:, 0]}, "qo_indptr and query disagree"),
        ("sglang-cutlass", {"q_nope_and_q_pe": lambda q: q[:, :64]}, "q_nope_and_q_pe is [1, 64, 576], expected 128 on axis 1"),
        ("sglang-cutlass", {"kv_c_and_k_pe_cache": lambda k: k[:, :12]}, "kv_c_and_k_pe_cache is [8, 12, 576], expected 1 or 2 or 4 or 8"),
        ("sglang-cpu-flashmla", {"is_fp8_kvcache": True}, "is_fp8_kvcache is True, expected False with k_cache as it is"),
        ("sglang-cpu-flashmla", {"softmax_scale": None}, "softmax_scale is missing, expected it in a call of flash_mla_with_kvcache_cpu"),
        ("tensorrt-llm-fp8", {"mla_bmm1_scale": np.array([0.0625, 0.0625], np.float32)}, "mla_bmm1_scale[1] is 0.0625, expected 0.0901684: the first times log2(e)"),
        ("tensorrt-llm-fp8", {"kv_cache_pool": lambda k: k.astype(BF16)}, "kv_cache_pool is bf16, expected e4m3"),
        ("flashinfer-sm120", {"kv_scale_format": "ue8m0"}, "kv_scale_format is 'ue8m0', expected auto or pow2_fp32 or arbitrary_fp32"),
        ("flashinfer-sm120", {"kv_scale_format": np.zeros(2)}, "kv_scale_format is a ndarray, expected auto or pow2_fp32 or arbitrary_fp32"),
        ("flashinfer-sm120", {"topk_length": np.full(1, 65, np.int32)}, "topk_length[0] is 65, expected 0 to 64, the entries of indices"),
        ("vllm-triton", {"v_buffer": lambda v: v + v.dtype.type(1)}, "v_buffer [12, 16, 1, 512] is no view of the keys' first columns, nor a copy"),
        ("vllm-triton", {"k_scale": np.full(1, 2, np.float32)}, "k_scale is 2.0, expected 1 with a cache that is not fp8"),
        ("vllm-triton", {"k_buffer": packed, "v_buffer": lambda v: packed(v)[..., :512], "v_scale": np.full(1, 2, np.float32)}, "v_scale is 2.0, expected 1.0 as k_scale: a row is key and value"),
        ("vllm-triton", {"logit_cap": -1.0}, "logit_cap is -1.0, expected a positive finite number"),
        ("vllm-cpu", {"kv_cache": lambda k: k.reshape(-1, 8, 576)}, "kv_cache is [24, 8, 576], expected 16 on axis 1"),
        ("sglang-triton", {"xai_temperature_len": 64}, "xai_temperature_len is 64, expected -1: sglang-triton has no other"),
        ("sglang-triton", {"kv_indptr": first(1)}, "kv_indptr[0] is 1, expected 0"),
        ("sglang-cpu", {"seq_lens": first(0)}, "seq_lens[0] is 0, expected 1 or more: the new token is one of them"),
        ("sglang-cpu", {"loc": first(10**6)}, "loc[0] is 1000000, expected 0 to"),
        ("sglang-cpu", {"loc": lambda loc: np.full_like(loc, 3)}, "loc[1] is 3, which loc[0] is: two requests write one token"),
        ("sglang-cpu", {"logit_cap": None}, "logit_cap is missing, expected it in a call of decode_attention_cpu"),
        ("sglang-cpu", {"value": lambda v: v + v.dtype.type(1)}, "value is not the columns of key that v_buffer is of k_buffer"),
        ("tensorrt-llm", {"num_heads": 5}, "q is [3, 2304], expected a last axis that 5 heads divide"),
        ("tensorrt-llm", {"predicted_tokens_per_seq": 2}, "q has 3 rows, expected 3 x predicted_tokens_per_seq"),
        ("tensorrt-llm", {"kv_cache_block_offsets": first(99)}, "kv_cache_block_offsets[0, 0, 0] is 99, expected 0 to "),
        ("tensorrt-llm", {"qk_nope_head_dim": -1}, "qk_nope_head_dim is -1, expected 1 or more"),
        ("tensorrt-llm", {"q_scaling": 0.0}, "q_scaling is 0.0, expected a positive finite number"),
        ("aiter", {"logit_cap": 30.0}, "logit_cap is 30.0, expected 0.0: aiter has no other"),
        ("aiter", {"kv_last_page_lens": first(2)}, "kv_last_page_lens[0] is 2, expected 1 to 1: kv_indptr gives request 0 70 pages of 1"),
        ("aiter", {"page_size": 16}, "page_size is 16, expected 1, axis 1 of kv_buffer"),
        ("lmdeploy", {"kv_seqlens": first(-1)}, "kv_seqlens[0] is -1, expected 0 to 128"),
        ("lmdeploy", {"query": lambda q: q[:2]}, "query has 2 rows, expected a multiple of 3 as kv_seqlens"),
        ("tvm", {"causal": 2}, "causal is 2, expected 0 or 1"),
        ("tvm", {"length_info": first(17)}, "length_info[0] is 17, expected 1 to 16: page_indptr gives request 0 5 pages of 16"),
        ("tokenspeed", {"query": lambda q: q.astype(BF16)}, "query is bf16, expected e4m3"),
        ("llama.cpp", {"max_bias": 8.0}, "max_bias is 8.0, expected 0.0: llama.cpp has no other"),
        ("llama.cpp", {"mask": lambda m: m[:2]}, "mask is [2, 1, 1, 70], expected a divisor of 3 on axis 0, as q has"),
        ("llama.cpp", {"mask": lambda m: m[:0]}, "mask is [0, 1, 1, 70], expected a divisor of 3 on axis 0, as q has"),
        ("llama.cpp", {"mask": lambda m: m.repeat(3, 1)}, "mask is [3, 3, 1, 70], expected a divisor of 4 on axis 1, as q has"),
        ("llama.cpp", {"k": lambda k: np.zeros((*k.shape[:3], 468), np.uint8), "v": lambda v: np.zeros((*v.shape[:3], 416), np.uint8)}, "k has 468 bytes a row and v 416, expected q8_0, 34 for each 32 columns of q"),
        ("ik_llama.cpp", {"k": lambda k: np.zeros((*k.shape[:3], 600), np.uint8), "v": lambda v: np.zeros((*v.shape[:3], 544), np.uint8)}, "k has 600 bytes a row and v 544, expected q8_0, 34 or q6_0, 26 for each 32 columns of q"),
        ("llama.cpp", {"mask": wide}, "mask is f32, expected f16"),
        ("llama.cpp", {"mask": lambda m: m[:, :, :0]}, "mask is [3, 1, 0, 70], expected 1 or more on axis 2, a row for each token of q"),
        ("llama.cpp", {"mask": first(np.float16(np.nan))}, "mask[0, 0, 0, 0] is nan, expected a number or -inf"),
        ("llama.cpp", {"v": lambda v: v + np.float16(1)}, "v is not k[..., 0:512], of which it is a view"),
        ("llama.cpp", {"q": lambda q: q.astype(np.float16)}, "q is f16, expected f32"),
        ("memra", {"w_uk": lambda w: w.transpose(0, 2, 1)}, "w_uk is [4, 64, 24], expected d_nope = 24 on axis 1 of [n_head, d_nope, kv_rank]"),
        ("vllm.cpp", {"query": lambda q: q[..., :512]}, "kv_cache is [6, 64, 576], expected d = 512 on axis 2"),
        ("vllm.cpp", {"v_head_dim": 512.0}, "v_head_dim is 512.0, expected an integer"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_by_its_argument(name, changes, message):
    arguments = get(name).from_case(generate(IDS[name]))
    for argument, change in changes.items():
        arguments[argument] = change(arguments[argument]) if callable(change) else change
    with pytest.raises(InputError) as raised:
        get(name).to_case(**arguments)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "case_id", "message"),
    [
        ("flashmla-dense", DECODE.replace("bf16", "f32"), "q is f32, expected bf16 or f16"),
        ("flashmla-dense", f"{DECODE},block=16", "k_cache is [12, 16, 1, 576], expected 64 on axis 1"),
        ("flashmla-dense", f"{DECODE},softcap=30", "softcap is 30.0, it has None"),
        ("flashmla-dense", f"{DECODE},sinks=normal", "sinks differ"),
        ("flashmla-dense", f"{DECODE},window=9", "query 0 of request 0 sees 10 keys, it says 70"),
        ("flashmla-dense", f"{DECODE},bias=alibi", "the bias of query 0 of request 0 differs"),
        ("flashmla-dense", f"{DECODE},q_scale=0.5", "q_scale is 0.5, it has None"),
        ("flashmla-dense", f"{DECODE},output_scale=0.5", "output_scale is 0.5, it has None"),
        ("flashmla-dense", f"{DECODE},ragged=1+2+1", "qo_indptr"),
        ("flashmla-dense", f"paged:heads=4,{MLA},scale=1,lens=9,format=fp8_ds_mla", "cache_format is 'fp8_ds_mla', expected dense rows"),
        ("flashmla-sparse", f"paged:heads=64,{MLA},scale=1,dtype=bf16,lens=9,format=fp8_ds_mla", "topk_indices is None, expected slots"),
        ("flashmla-sparse", f"{PACKED},reader=exponent", "cache_reader is 'exponent', it has 'f32_bf16'"),
        ("flashmla-prefill", DECODE, "topk_indices is None, expected slots"),
        ("sglang-cpu", f"paged:heads=64,{SPARSE}", "topk_by is 'slot', expected a table"),
        ("flashinfer", f"paged:heads=4,kv_heads=2,{MLA},scale=1,dtype=bf16,lens=9", "kv_cache is [4, 64, 2, 576], expected one key/value head"),
        ("flashinfer", f"{DECODE},value_offset=64", "a value is columns 64 to 575 (value_offset, head_dim_v), it has 0 to 511"),
        ("vllm-triton", f"{DECODE},tokens=2", "q has 2 tokens a request, expected 1"),
        ("sglang-triton", f"{DECODE},pages=strided", "page_ids is not supported"),
        ("aiter", f"{DECODE},block=1,causal=false,tokens=2", "query 0 of request 0 sees 70 keys, it says 69"),
        ("flashinfer-xqa", f"{DECODE},block=32,tokens=2", "query is [3, 2, 4, 576], expected 1 on axis 1"),
        ("flashinfer-prims-ts", f"{DECODE},block=32", "seq_lens[1] is 0, expected 1 or more"),
        ("flashinfer-cute-dsl", f"{DECODE},block=32,tokens=2,sinks=normal", "query 0 of request 0 sees 69 keys, it says 70"),
        ("tensorrt-llm-fp8", f"{DECODE},block=32", "q is bf16, expected e4m3"),
        ("tensorrt-llm-fp8", f"paged:heads=4,{MLA},scale=0.1,dtype=e4m3,lens=70,block=32", "softmax_scale is 0.1, it has 0.1000000014"),
        ("sglang-cpu-flashmla", f"paged:heads=4,row=512,value=512,{SPARSE.removeprefix(MLA + ',')},format=model1", "cache_reader is 'bf16', it has 'guarded'"),
        ("vllm-cpu", f"{DECODE},pages=huge,block=16", "page_ids is not supported by dialect 'vllm-cpu'"),
        ("vllm.cpp", f"{DECODE},shards=2", "shards is not supported by dialect 'vllm.cpp'"),
        ("vllm.cpp", "absorbed:heads=4,nope=24,rope=8,value=32,rank=64", "a case of kind absorbed is not supported"),
        ("memra", DECODE, "a case of kind paged is not supported by dialect 'memra'"),
        ("memra", "absorbed:heads=4,nope=24,rope=8,value=32,rank=64,scale=0.5", "conventions are"),
    ],
)
def test_a_case_that_a_call_cannot_say_is_refused_in_one_line(name, case_id, message):
    with pytest.raises(UnsupportedError) as raised:
        get(name).from_case(generate(case_id))
    assert message in str(raised.value) and repr(name) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_that_is_needed_is_asked_for_by_its_name(name):
    from mla_oracle.dialects.arguments import REQUIRED

    dialect = get(name)
    arguments = dialect.from_case(generate(IDS[name]))
    for argument, declared in dialect.arguments.items():
        if declared.default is REQUIRED:
            left = {key: value for key, value in arguments.items() if key != argument}
            with pytest.raises(InputError, match=f"^{argument} is missing, expected it in a call of "):
                dialect.to_case(**left)
    with pytest.raises(InputError, match=r"^nonsense is given, expected one of "):
        dialect.to_case(**arguments, nonsense=1)
    ignored = dict.fromkeys(dialect.launch, object())
    assert dialect.to_case(**arguments, **ignored).conventions() == dialect.to_case(**arguments).conventions()


def test_an_array_that_cannot_be_computed_is_told_by_the_name_of_its_argument():
    dialect = get("flashinfer-trtllm")
    arguments = dialect.from_case(generate(IDS["flashinfer-trtllm"]))
    query = arguments["query"].repeat(2, axis=-1)[..., ::2]
    with pytest.raises(InputError, match=r"^query has an innermost stride of 4 bytes, expected 2 \(contiguous\)$"):
        dialect.run(**arguments | {"query": query})


def test_an_unknown_dialect_is_told_with_those_there_are():
    with pytest.raises(InputError, match=r"^dialect is 'flashmla', expected one of flashmla-dense flashmla-sparse "):
        get("flashmla")


def test_results_of_another_name_or_shape_are_told_by_the_calls_names():
    dense = get("flashmla-dense")
    arguments = said("flashmla-dense", f"{DECODE},tokens=2")
    case, results = dense.to_case(**arguments), dense.run(**arguments)
    for given, message in (
        ({"o": results["out"]}, "the actual results hold o, expected out, lse"),
        ({"lse": results["lse"]}, "the actual results hold no out, expected out, lse"),
        ({**results, "lse": results["lse"].transpose(0, 2, 1)}, r"lse is \[3, 2, 4\], expected \[3, 4, 2\]"),
    ):
        with pytest.raises(InputError, match=f"^{message}$"):
            dense.read(case, given)
