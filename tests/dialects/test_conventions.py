# SPDX-License-Identifier: Apache-2.0
"""What engines disagree about, each as its own call says it: closed forms, where q = 0 makes every weight equal."""

import math

import ml_dtypes
import numpy as np
import pytest

from mla_oracle import canonical, generate
from mla_oracle.dialects import get
from mla_oracle.dialects.spelling import scaled_root, scaling_of

BF16 = ml_dtypes.bfloat16
MLA = "row=576,value=512"
DECODE = f"paged:heads=4,{MLA},scale=0.0625,dtype=bf16,lens=70+0+64"
SPARSE = f"{MLA},scale=0.0625,dtype=bf16,lens=70,causal=false,topk=64,topk_by=slot"


def said(name, case_id, **changes):
    """The arguments of a call, some changed: None leaves one out."""
    arguments = get(name).from_case(generate(case_id)) | changes
    return {argument: value for argument, value in arguments.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "argument", "scale"),
    [
        ("flashmla-dense", "softmax_scale", 576**-0.5),
        ("aiter", "sm_scale", 576**-0.5),
        ("lmdeploy", "softmax_scale", 576**-0.5),
        ("flashinfer-trtllm", "bmm1_scale", 1.0),
        ("flashinfer-cute-dsl", "bmm1_scale", 1.0),
        ("flashinfer-xqa", "bmm1_scale", 1.0),
        ("tokenspeed", "output_scale", None),
    ],
)
def test_a_scale_that_is_left_out_is_the_calls_own(name, argument, scale):
    block = {"aiter": 1, "tokenspeed": 32}.get(name, 32 if name.startswith("flashinfer") else 64)
    kind = "e4m3" if name == "tokenspeed" else "bf16"
    arguments = said(name, f"paged:heads=4,{MLA},scale=0.0625,dtype={kind},lens=70+0+64,block={block}")
    case = get(name).to_case(**{key: value for key, value in arguments.items() if key != argument})
    assert case.softmax_scale == (0.0625 if scale is None else scale) and case.output_scale is None


@pytest.mark.parametrize(("name", "case"), [
    ("flashinfer-trtllm", f"paged:heads=4,{MLA},scale=0.3,dtype=bf16,lens=70,block=32"),
    ("flashinfer-trtllm-sparse", f"paged:heads=4,{SPARSE},block=32"),
])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_in_tensors_are_the_numbers_in_them(name, case, shape):
    """The call multiplies the tensor by log2(e) itself: bmm1_scale * log2e, flashinfer/mla/_core.py."""
    numbers = {"bmm1_scale": 0.3, "bmm2_scale": 1.7}
    tensors = {key: np.full(shape, number, np.float32) for key, number in numbers.items()}
    found = get(name).to_case(**said(name, case, **tensors))
    assert (found.softmax_scale, found.output_scale) == (float(np.float32(0.3)), float(np.float32(1.7)))
    held = {key: float(np.float32(number)) for key, number in numbers.items()}
    one, other = (get(name).run(**said(name, case, **scales)) for scales in (tensors, held))
    assert all(one[key].tobytes() == other[key].tobytes() for key in one)


def test_rows_of_656_bytes_may_have_lengths_and_a_second_cache():
    row = f"paged:heads=64,{SPARSE.replace('lens=70', 'lens=70+90')},format=fp8_ds_mla,inputs=flat"
    given = said("flashmla-sparse", f"{row},topk_length=request,extra=80+80,extra_topk=64", q=None)
    given["q"] = np.zeros((2, 1, 64, 576), BF16)
    given |= {"topk_length": np.array([3, 5], np.int32), "extra_topk_length": np.array([2, 0], np.int32)}
    lse = get("flashmla-sparse").run(**given)["lse"]
    seen = [
        int((given[name][b, 0, :n] >= 0).sum())
        for name, counts in (("indices", (3, 5)), ("extra_indices_in_kvcache", (2, 0)))
        for b, n in enumerate(counts)
    ]
    np.testing.assert_allclose(lse[:, 0, 0], np.log([seen[0] + seen[2], seen[1] + seen[3]]), rtol=1e-12)


def test_the_scale_of_a_row_of_512_is_its_own_root():
    row = f"paged:heads=64,row=512,value=512,{SPARSE.removeprefix(MLA + ',')},format=model1"
    arguments = said("flashmla-sparse", row, softmax_scale=None)
    assert get("flashmla-sparse").to_case(**arguments).softmax_scale == 512**-0.5


@pytest.mark.parametrize("name", ["flashinfer-cutlass", "sglang-cutlass"])
def test_cutlass_has_one_scale_and_nobody_may_ask_for_another(name):
    cutlass = get(name)
    wanted = f"paged:heads=128,{MLA},scale={192**-0.5!r},dtype=bf16,lens=70,block=32"
    arguments = cutlass.from_case(generate(wanted))
    assert "scale" not in " ".join(arguments) and cutlass.to_case(**arguments).softmax_scale == 192**-0.5
    with pytest.raises(Exception, match=f"softmax_scale is 0.0625, it has {192**-0.5!r}"):
        cutlass.from_case(generate(wanted.replace(repr(192**-0.5), "0.0625")))


@pytest.mark.parametrize(
    ("name", "options", "base", "empty"),
    [
        ("flashmla-dense", "tokens=1", "e", math.inf),
        ("flashinfer", "block=16,lse_base=2", "2", -math.inf),
        ("flashinfer-trtllm", "block=32", "2", -math.inf),
        ("flashinfer-cute-dsl", "block=32", "e", -math.inf),
        ("vllm-triton", "block=16", "e", -math.inf),
        ("aiter", "block=1", "e", -math.inf),
        ("tvm", "block=16", "2", -5e4),
        ("vllm.cpp", "block=16", "e", -math.inf),
    ],
)
def test_the_lse_of_equal_weights_is_the_log_of_their_count_in_the_calls_base(name, options, base, empty):
    dialect = get(name)
    found = dialect.run(**said(name, f"{DECODE},inputs=flat,{options}"))[dialect.lse]
    found = found.reshape(3, 4)
    log = math.log2 if base == "2" else math.log
    np.testing.assert_allclose(found[0], log(70), rtol=1e-12)
    np.testing.assert_allclose(found[2], log(64), rtol=1e-12)
    assert (found[1] == empty).all()


def test_flashinfer_gives_a_natural_lse_where_it_is_asked_to():
    flashinfer = get("flashinfer")
    arguments = said("flashinfer", f"{DECODE},inputs=flat,block=16")
    for natural, log in ((True, math.log), (False, math.log2)):
        found = flashinfer.run(**arguments | {"return_lse_base_on_e": natural})["lse"]
        np.testing.assert_allclose(found[0], log(70), rtol=1e-12)


def test_a_row_without_keys_is_0_or_may_be_nan_as_the_call_has_it():
    for name, nan in (("flashmla-dense", False), ("vllm-triton", True), ("sglang-triton", True), ("aiter", True)):
        dialect = get(name)
        arguments = said(name, f"{DECODE},block={64 if name == 'flashmla-dense' else 1}")
        case, found = dialect.to_case(**arguments), dialect.run(**arguments)
        out = found[dialect.out].reshape(3, 4, 512)
        assert (np.isnan(out[1]) if nan else out[1] == 0).all() and np.isfinite(out[[0, 2]]).all()
        for given in (np.nan, 0.0):
            other = out.copy()
            other[1] = given
            read = dialect.read(case, {dialect.out: other.reshape(found[dialect.out].shape)})["out"]
            assert (np.isnan(read) if np.isnan(given) and not nan else read == 0).reshape(3, -1)[1].all()


def flat_sinks(name, sink):
    """(out, LSE, mean of the values, keys) of 9 equal keys of the first request and a sink, by the call `name`."""
    heads, form = (8, "fp8_ds_mla,reader=exponent") if name == "flashinfer-sm120" else (64, "fp8_ds_mla")
    dialect = get(name)
    arguments = said(name, f"paged:heads={heads},{SPARSE},format={form},inputs=flat,invalid=none,sinks=normal")
    indices = next(key for key in ("indices", "topk_indices") if key in arguments)
    slots = np.full_like(arguments[indices], -1)
    slots[..., ::7] = arguments[indices][..., ::7]  # holes of -1
    arguments |= {indices: slots, "attn_sink": np.full(heads, sink, np.float32)}
    plain = {key: value for key, value in arguments.items() if key != "attn_sink"}
    mean = dialect.run(**plain)[dialect.out].reshape(-1, 512)[0]
    found = dialect.run(**arguments)
    return found[dialect.out].reshape(-1, 512)[0], found[dialect.lse].reshape(-1)[0], mean, int((slots >= 0).sum())


@pytest.mark.parametrize("sink", [0.0, 3.0, -np.inf, np.inf])
def test_a_sink_is_in_the_denominator_and_in_the_lse_of_sm120_alone(sink):
    for name, log in (("flashmla-sparse", math.log), ("flashinfer-sm120", math.log2)):
        out, lse, mean, n = flat_sinks(name, sink)
        weight = math.exp(sink) if sink < np.inf else np.inf
        np.testing.assert_allclose(out, mean * n / (n + weight), rtol=1e-12)
        counted = n + weight if name == "flashinfer-sm120" else n
        assert lse == pytest.approx(log(counted) if counted < np.inf else np.inf, rel=1e-12)


def test_a_query_that_selects_nothing_has_out_0_even_with_a_sink():
    for name, empty, heads in (("flashmla-sparse", np.inf, 64), ("flashinfer-sm120", np.float32(-1e30), 8)):
        dialect = get(name)
        reader = ",reader=exponent" if heads == 8 else ""
        arguments = said(name, f"paged:heads={heads},{SPARSE},format=fp8_ds_mla{reader},sinks=normal")
        found = dialect.run(**arguments | {"indices": np.full_like(arguments["indices"], -1)})
        assert (found[dialect.out] == 0).all() and (found[dialect.lse].astype(np.float32) == empty).all()


def test_one_causal_query_sees_what_one_that_is_not_sees():
    dense = get("flashmla-dense")
    arguments = said("flashmla-dense", f"{DECODE},tokens=1")
    found = [dense.run(**arguments | {"causal": causal}) for causal in (True, False)]
    assert all(found[0][name].tobytes() == found[1][name].tobytes() for name in ("out", "lse"))
    two = said("flashmla-dense", f"{DECODE},tokens=2")
    found = [dense.run(**two | {"causal": causal})["out"] for causal in (True, False)]
    assert (found[0][:, 1] == found[1][:, 1]).all() and (found[0][0, 0] != found[1][0, 0]).all()


def test_lengths_of_a_selection_are_the_requests_or_the_queries():
    row = "row=512,value=512," + SPARSE.removeprefix(MLA + ",")
    by_request = f"paged:heads=64,{row},tokens=2,format=model1,topk_length=request,inputs=flat,invalid=none"
    arguments = said("flashmla-sparse", by_request, topk_length=np.array([5], np.int32))
    lse = get("flashmla-sparse").run(**arguments)["lse"]
    np.testing.assert_allclose(lse, math.log(5), rtol=1e-12)
    by_query = f"paged:heads=64,{SPARSE},tokens=2,topk_length=query,inputs=flat,invalid=none"
    arguments = said("flashmla-prefill", by_query, topk_length=np.array([5, 9], np.int32))
    lse = get("flashmla-prefill").run(**arguments)["lse"]
    np.testing.assert_allclose(lse, np.broadcast_to(np.log([[5], [9]]), (2, 64)), rtol=1e-12)


def test_an_index_beyond_the_rows_is_no_key_in_prefill_and_refused_in_decode():
    prefill, decode = get("flashmla-prefill"), get("flashmla-sparse")
    one = said("flashmla-prefill", f"paged:heads=64,{SPARSE},invalid=none")
    beyond, holes = one["indices"].copy(), one["indices"].copy()
    beyond[..., ::3], holes[..., ::3] = 10**6, -1
    found = [prefill.run(**one | {"indices": indices})["out"] for indices in (beyond, holes)]
    assert found[0].tobytes() == found[1].tobytes()
    two = said("flashmla-sparse", f"paged:heads=64,{SPARSE},format=fp8_ds_mla,invalid=none")
    beyond = two["indices"].copy()
    beyond[0, 0, 3] = 10**6
    with pytest.raises(Exception, match=r"^indices\[0, 0, 3\] is 1000000, expected below 320, the rows of k_cache$"):
        decode.to_case(**two | {"indices": beyond})


@pytest.mark.parametrize("name", ["flashinfer-trtllm", "tokenspeed"])
def test_a_cache_may_have_an_axis_of_its_one_head(name):
    given = said(name, f"paged:heads=2,{MLA},scale=0.0625,dtype=e4m3,lens=9+70,tokens=2,block=32")
    rows = given["kv_cache"].reshape(-1, 32, 576)
    one, other = (get(name).run(**given | {"kv_cache": k})["out"] for k in (rows, rows[:, None]))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", ["llama.cpp", "ik_llama.cpp"])
def test_a_mask_may_be_padded_beyond_the_tokens(name):
    """ggml_flash_attn_ext wants mask->ne[1] >= q->ne[1], in ik_llama.cpp a multiple of 64."""
    offset = ",value_offset=64" if name == "ik_llama.cpp" else ""
    given = said(name, f"paged:heads=2,{MLA},scale=1,dtype=f16,q_dtype=f32,lens=9+4,tokens=3{offset}")
    mask = np.full((2, 1, 64, 9), np.nan, np.float16)
    mask[:, :, :3] = given["mask"]
    one, other = (get(name).run(**given | {"mask": m})["dst"] for m in (given["mask"], mask))
    assert one.tobytes() == other.tobytes()


def test_streams_and_heads_share_the_masks_that_divide_them():
    """q->ne[3] % mask->ne[3] == 0 and q->ne[2] % mask->ne[2] == 0: stream s has mask s % ne[3], head h h % ne[2]."""
    given = said("llama.cpp", f"paged:heads=4,{MLA},scale=1,dtype=f16,q_dtype=f32,lens=9+9+9+9,tokens=3")
    masks = np.where(np.random.default_rng(3).random((2, 2, 3, 9)) < 0.3, -np.inf, 0).astype(np.float16)
    masks[..., 0] = 0
    each = np.stack([masks[s % 2][[0, 1, 0, 1]] for s in range(4)])
    one, other = (get("llama.cpp").run(**given | {"mask": m})["dst"] for m in (masks, each))
    assert one.tobytes() == other.tobytes()
    alone = get("llama.cpp").run(**given | {"mask": masks[:1, :1]})["dst"]
    assert alone.tobytes() == get("llama.cpp").run(**given | {"mask": np.repeat(masks[:1, :1], 4, 0)})["dst"].tobytes()
    assert alone.tobytes() != one.tobytes()


def test_rope_comes_last_in_llama_cpp_and_first_in_ik_llama_cpp():
    for name, offset in (("llama.cpp", 0), ("ik_llama.cpp", 64)):
        dialect = get(name)
        width = f"heads=2,{MLA},value_offset={offset}"
        arguments = said(name, f"paged:{width},scale=0.0625,dtype=f16,q_dtype=f32,lens=1,inputs=position")
        row = arguments["k"][0, 0, 0].astype(np.float64)
        assert (dialect.run(**arguments)["dst"] == row[offset : offset + 512]).all()
        assert dialect.to_case(**arguments).value_offset == offset
    with pytest.raises(Exception, match=r"a value is columns 0 to 511 .* it has 64 to 575"):
        get("ik_llama.cpp").from_case(generate(f"paged:heads=2,{MLA},scale=1,dtype=f16,q_dtype=f32,lens=9"))


@pytest.mark.parametrize(("name", "form", "bytes_of_32"), [
    ("llama.cpp", "q8_0", 34), ("ik_llama.cpp", "q8_0", 34), ("ik_llama.cpp", "q6_0", 26),
])  # fmt: skip
def test_a_value_of_packed_rows_is_a_view_of_whole_blocks(name, form, bytes_of_32):
    offset = 64 if name == "ik_llama.cpp" else 0
    case = f"paged:heads=2,{MLA},value_offset={offset},scale=1,dtype=f32,q_dtype=f32,lens=9,format={form}"
    arguments = said(name, case)
    assert arguments["k"].shape == (1, 1, 9, 18 * bytes_of_32) and arguments["v"].shape == (1, 1, 9, 16 * bytes_of_32)
    begin = offset // 32 * bytes_of_32
    assert arguments["v"].tobytes() == arguments["k"][..., begin : begin + 16 * bytes_of_32].tobytes()
    found = get(name).to_case(**arguments)
    assert (found.cache_format, found.head_dim_v, found.value_offset) == (form, 512, offset)
    if form == "q6_0":
        with pytest.raises(Exception, match="cache_format is 'q6_0', expected q8_0 or dense rows"):
            get("llama.cpp").from_case(generate(case.replace("value_offset=64,", "")))


def test_a_mask_of_f16_is_added_to_the_scores_and_hides_what_is_minus_infinity():
    llama = get("llama.cpp")
    arguments = said("llama.cpp", f"paged:heads=2,{MLA},scale=1,dtype=f16,q_dtype=f32,lens=4,inputs=flat")
    mask = np.array([[[[0.0, -np.inf, -1.5, 1.0]]]], np.float16)
    found = llama.run(**arguments | {"mask": mask})["dst"][0, 0, 0]
    weights = np.exp([0.0, -np.inf, -1.5, 1.0])
    values = arguments["v"][0, 0].astype(np.float64)
    np.testing.assert_allclose(found, weights @ values / weights.sum(), rtol=1e-12)
    hidden = np.full_like(mask, -np.inf)
    assert (llama.run(**arguments | {"mask": hidden})["dst"] == 0).all()


def test_a_bias_that_f16_does_not_hold_cannot_be_said_in_a_mask():
    with pytest.raises(Exception, match=r"dialect 'llama.cpp': the bias of query 0 of request 0 differs"):
        get("llama.cpp").from_case(
            generate(f"paged:heads=2,{MLA},scale=1,dtype=f32,q_dtype=f32,lens=9,bias=normal")
        )


def test_exponents_alone_are_the_scales_of_packed_rows_unless_sm120_is_told():
    sm120 = get("flashinfer-sm120")
    case_id = f"paged:heads=8,{SPARSE},format=fp8_ds_mla,writer=vllm,reader=f32_bf16,inputs=position"
    arguments = said("flashinfer-sm120", case_id)
    assert arguments["kv_scale_format"] == "arbitrary_fp32"
    right = sm120.run(**arguments)["output"]
    auto = sm120.run(**arguments | {"kv_scale_format": "auto"})["output"]
    ratio = np.median(auto[right != 0] / right[right != 0])
    assert 0.5 < ratio < 0.99
    plain = {name: value for name, value in arguments.items() if name != "kv_scale_format"}
    assert sm120.to_case(**plain).cache_reader == "exponent"


def test_the_first_128_columns_of_a_list_are_the_windows_and_count():
    dsv4 = get("flashinfer-dsv4")
    case_id = (
        "paged:heads=8,row=512,value=512,scale=1,dtype=bf16,lens=140,block=32,topk=128,topk_by=slot,"
        "extra=40,extra_topk=24,causal=false,inputs=flat,invalid=none"
    )
    arguments = said("flashinfer-dsv4", case_id)
    assert arguments["sparse_topk_lens"].tolist() == [[152]]
    near = arguments["swa_kv_cache"][:, 0].reshape(-1, 512)[arguments["sparse_indices"][0, 0, :128]]
    far = arguments["compressed_kv_cache"][:, 0].reshape(-1, 512)[arguments["sparse_indices"][0, 0, 128:131]]
    found = dsv4.run(**arguments | {"sparse_topk_lens": np.array([[131]], np.int32)})["out"][0, 0, 0]
    rows = np.concatenate([near, far]).astype(np.float64)
    np.testing.assert_allclose(found, rows.mean(axis=0), rtol=1e-9, atol=1e-12)


def test_a_window_in_length_info_keeps_the_last_tokens_and_the_first_ones():
    arguments = said("tvm", f"{DECODE},block=16,window=9,first=3,inputs=flat")
    assert arguments["length_info"].tolist() == [[6, 0, 16], [60, 0, 54], [3, 0, 3]]
    lse = get("tvm").run(**arguments)["lse"]
    np.testing.assert_allclose(lse[0], np.log2(13), rtol=1e-12)


def test_the_scale_of_tensorrt_llm_is_a_root_of_the_heads_width_over_q_scaling():
    trt = get("tensorrt-llm")
    arguments = said("tensorrt-llm", f"{DECODE},tokens=1,block=32")
    assert arguments["qk_nope_head_dim"] + arguments["qk_rope_head_dim"] == 192
    for scaling in (1.0, 0.5, 0.2846):
        case = trt.to_case(**arguments | {"q_scaling": scaling})
        assert case.softmax_scale == pytest.approx(1 / (scaling * math.sqrt(192)), rel=1e-15)
    assert trt.to_case(**{k: v for k, v in arguments.items() if k != "q_scaling"}).softmax_scale == 192**-0.5


def test_no_scaling_of_tensorrt_llm_has_a_nearer_root():
    trt = get("tensorrt-llm")
    scales = np.exp(np.random.default_rng(5).uniform(-9, 5, 2000))
    for scale in scales:
        near = scaling_of(scale, 192)
        others = (abs(scaled_root(math.nextafter(near, to), 192) - scale) for to in (0, math.inf))
        assert abs(scaled_root(near, 192) - scale) <= min(others)
    case = generate(f"{DECODE},tokens=1,block=32".replace("0.0625", "0.3"))
    assert trt.to_case(**trt.from_case(case)).softmax_scale == 0.3


@pytest.mark.parametrize(
    ("name", "case", "argument", "causal"),
    [
        ("flashmla-dense", DECODE, "causal", False),
        ("lmdeploy", DECODE, "causal", True),
        ("tokenspeed", f"paged:heads=4,{MLA},scale=0.0625,dtype=e4m3,lens=70,block=32", "causal_mask", True),
    ],
)
def test_a_causal_rule_that_is_left_out_is_the_calls_own(name, case, argument, causal):
    for given in ("true", "false"):
        arguments = said(name, f"{case},tokens=2,causal={given}")
        left = {key: value for key, value in arguments.items() if key != argument}
        assert get(name).to_case(**left).causal is causal
        assert get(name).to_case(**arguments).causal is (given == "true")


def test_pages_have_one_token_where_triton_is_not_told():
    arguments = said("vllm-triton", f"{DECODE},block=16")
    with pytest.raises(Exception, match=r"^page_size is 1, expected 16, axis 1 of k_buffer$"):
        get("vllm-triton").to_case(**{key: value for key, value in arguments.items() if key != "page_size"})


def test_what_lies_beyond_the_blocks_of_a_length_changes_nothing():
    dense = get("flashmla-dense")
    arguments = said("flashmla-dense", f"{DECODE},tokens=1")
    right = dense.run(**arguments)
    for garbage in (2147480000, -1):
        table = np.pad(arguments["block_table"], ((0, 0), (0, 3)), constant_values=garbage)
        for b, length in enumerate(arguments["cache_seqlens"]):
            table[b, -(-int(length) // 64) :] = garbage
        found = dense.run(**arguments | {"block_table": table})
        assert all(found[name].tobytes() == right[name].tobytes() for name in right)


def test_sglang_writes_the_new_key_before_it_attends():
    arguments = said("sglang-cpu", f"paged:heads=2,{MLA},scale=0.0625,dtype=bf16,lens=1+3,block=1")
    assert np.isnan(arguments["k_buffer"][arguments["loc"]].astype(np.float32)).all()
    found = get("sglang-cpu").run(**arguments)["output"]
    assert np.isfinite(found).all() and (found[0] == arguments["value"][0].astype(np.float64)).all()


def test_both_planes_of_trtllms_tables_are_the_blocks_of_keys():
    trtllm = get("flashinfer-trtllm")
    arguments = said("flashinfer-trtllm", f"{DECODE},block=32")
    table = arguments["block_tables"]
    planes = np.stack([table, table], axis=1)
    how = {"block_tables": planes, "uses_shared_paged_kv_idx": False}
    assert trtllm.run(**arguments | how)["out"].tobytes() == trtllm.run(**arguments)["out"].tobytes()
    planes[0, 1, 1] += 1
    with pytest.raises(Exception, match=r"^block_tables\[0, 1, 1\] is \d+, expected \d+, the block of its key$"):
        trtllm.to_case(**arguments | how)


def test_an_lse_beside_a_sink_is_not_judged_where_no_document_says_what_it_is():
    trtllm = get("flashinfer-trtllm")
    arguments = said("flashinfer-trtllm", f"{DECODE},block=32,sinks=normal")
    case = trtllm.to_case(**arguments)
    assert trtllm.run(**arguments).keys() == {"out"}
    out = trtllm.run(**arguments)["out"]
    assert trtllm.read(case, {"out": out, "lse": np.full((3, 4), 7.0)}).keys() == {"out"}


FOLDED = f"paged:heads=4,{MLA},scale=0.0625,q_dtype=e4m3,q_scale=0.5,dtype=bf16,format=fp8_e4m3,reader=fold,block=32"


@pytest.mark.parametrize(
    "name",
    "flashinfer-trtllm flashinfer-cute-dsl flashinfer-xqa flashinfer-prims-ts tokenspeed tensorrt-llm-fp8".split(),
)
def test_scales_of_fp8_are_folded_into_those_of_scores_and_output(name):
    """Bits of codes as they are, products of scales, and in f64 the results of the case that was given."""
    case = generate(f"{FOLDED},lens=70+64,output_scale=0.25")
    dialect = get(name)
    arguments = dialect.from_case(case)
    said = dialect.to_case(**arguments)
    scale = float(case.kv_scale[0])
    assert said.softmax_scale == np.float32(0.0625 * 0.5 * scale) and said.output_scale == np.float32(0.25 * scale)
    assert (said.q_scale, said.cache_format, said.kv_scale) == (None, None, None)
    rows = said.kv_cache.reshape(case.kv_cache.shape)
    assert rows.tobytes() == case.kv_cache.tobytes() and rows.dtype == ml_dtypes.float8_e4m3fn
    given = canonical.attend(case, precision="f64", backend="strict").out
    found = dialect.run(**arguments)[dialect.out].reshape(given.shape)
    np.testing.assert_allclose(found, given, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("reader=f32_bf16", "cache_format is 'fp8_e4m3', expected dense rows"),
        ("reader=fold,softcap=3", "softcap is 3.0, it has None"),
    ],
)
def test_scales_that_a_row_is_rounded_with_are_not_folded(options, told):
    with pytest.raises(Exception, match=f"dialect 'flashinfer-trtllm': {told}"):
        get("flashinfer-trtllm").from_case(generate(f"{FOLDED.replace('reader=fold', options)},lens=70"))


def test_the_modular_kernel_of_cute_dsl_has_no_mask_and_sinks_bring_it_about():
    cute = get("flashinfer-cute-dsl")
    arguments = said("flashinfer-cute-dsl", f"{DECODE},block=32,tokens=2,inputs=flat")
    found = cute.run(**arguments)
    np.testing.assert_allclose(found["lse"][0], np.log([[69.0] * 4, [70.0] * 4]), rtol=1e-12)
    for how in ({"cute_dsl_impl": "modular"}, {"sinks": np.full(4, -np.inf, np.float32)}):
        other = cute.run(**arguments | how)
        assert other.keys() == {"out"}
        assert (other["out"][0, 0] == other["out"][0, 1]).all() and (other["out"][0, 1] == found["out"][0, 1]).all()


def test_an_index_beyond_the_cache_is_no_key_on_a_cpu_and_a_scale_byte_of_0_is_0():
    flash = get("sglang-cpu-flashmla")
    one = said("sglang-cpu-flashmla", f"paged:heads=4,{SPARSE},invalid=none")
    beyond, holes = one["indices"].copy(), one["indices"].copy()
    beyond[..., ::3], holes[..., ::3] = 10**6, -1
    found = [flash.run(**one | {"indices": indices})["out"] for indices in (beyond, holes)]
    assert found[0].tobytes() == found[1].tobytes()
    row = f"paged:heads=4,row=512,value=512,{SPARSE.removeprefix(MLA + ',')},format=model1,reader=guarded,invalid=none"
    two = said("sglang-cpu-flashmla", row)
    assert (two["is_fp8_kvcache"], two["fp8_layout"]) == (True, 2)
    cache = two["k_cache"].copy()
    size, pages = cache.shape[1], cache.reshape(len(cache), -1)
    pages[:, size * 576 :] = 0  # the scales
    found = flash.run(**two | {"k_cache": pages.reshape(cache.shape)})["out"]
    assert (found[..., :448] == 0).all() and (found[..., 448:] != 0).any()


def test_the_scales_of_an_fp8_pool_are_those_that_the_rope_kernel_wrote():
    fp8 = get("tensorrt-llm-fp8")
    arguments = said("tensorrt-llm-fp8", f"paged:heads=4,{MLA},scale=0.0625,dtype=e4m3,lens=70,block=32")
    assert arguments["mla_bmm1_scale"].tolist() == [0.0625, np.float32(0.0625 * math.log2(math.e))]
    other = fp8.to_case(**arguments | {"mla_bmm2_scale": np.array([0.5], np.float32)})
    assert (other.softmax_scale, other.output_scale) == (0.0625, 0.5)
    assert other.q.dtype == ml_dtypes.float8_e4m3fn
