# SPDX-License-Identifier: Apache-2.0
"""Cases that every dialect can say: ids, hostile where ids are (shuffled pages, NaN in rows nobody reads, entries that
exist nowhere), with the options of each call drawn.
"""

from hypothesis import strategies as st

from mla_oracle import dialects

LENS = st.lists(st.sampled_from([0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 70]), min_size=1, max_size=3)
INPUTS = st.sampled_from(["normal", "peaked", "flat", "position", "onehot", "tailed", "rising"])
MLA = "row=576,value=512"
FLAT = "row=512,value=512"  # the whole row is the value


def lens(draw, at_least=0):
    return "+".join(str(max(at_least, n)) for n in draw(LENS))


def counted(draw, least=1):
    """lens, and ragged query tokens for each."""
    given = draw(LENS)
    tokens = [draw(st.integers(least, 3)) for _ in given]
    return f"lens={'+'.join(map(str, given))},ragged={'+'.join(map(str, tokens))}"


def some(draw, *options):
    """Some of the options."""
    kept = [option for option in options if draw(st.booleans())]
    return "".join("," + option for option in kept)


def one(draw, *options):
    return draw(st.sampled_from(options))


def dtype(draw, *names):
    return f"dtype={one(draw, *names)}"


SIXTEEN = ("bf16", "f16")


def _flashmla_dense(draw):
    tokens, heads = one(draw, 1, 2, 3), one(draw, "heads=3", "heads=4,kv_heads=2")
    return f"{heads},{MLA},lens={lens(draw)},tokens={tokens},{dtype(draw, *SIXTEEN)}{some(draw, 'causal=false')}"


def _slots(draw, topk, *more):
    options = some(draw, "duplicates=true", "sinks=infinite", *more)
    invalid = one(draw, "", ",invalid=rows", ",invalid=none")
    return f"tokens={one(draw, 1, 2)},topk={topk},topk_by=slot,causal=false{invalid}{options}"


def _flashmla_sparse(draw):
    rows = one(draw, f"{MLA},format=fp8_ds_mla", f"{FLAT},format=model1")
    extra = "" if draw(st.booleans()) else ",extra=LENS,extra_topk=64"
    given = lens(draw, 1)
    options = _slots(draw, 64, "topk_length=request") + extra.replace("LENS", given)
    return f"heads=64,{rows},lens={given},block={one(draw, 5, 64)},dtype=bf16,{options}"


def _flashmla_prefill(draw):
    width = one(draw, MLA, FLAT)
    options = _slots(draw, 64, "topk_length=query", "topk_outside=skip")
    return f"heads=64,{width},lens={lens(draw, 1)},dtype=bf16,{options}"


def _flashinfer(draw):
    kinds = (f"{MLA},{dtype(draw, *SIXTEEN)}", f"{MLA},dtype=bf16,format=flashinfer_fp8", f"{FLAT},dtype=f16")
    sizes = one(draw, *kinds, f"{MLA},dtype=bf16,format=flashinfer_fp8_grouped")
    causal = some(draw, "causal=false")
    return f"heads=3,{sizes},{counted(draw, 0)},block={one(draw, 1, 16, 33)},lse_base={one(draw, 2, 'e')}{causal}"


def _flashinfer_cutlass(draw):
    return f"heads=128,{MLA},lens={lens(draw)},{dtype(draw, *SIXTEEN)},block={one(draw, 32, 64)}"


FOLDED = "dtype=bf16,format=fp8_e4m3,reader=fold,q_dtype=e4m3,q_scale=0.03125"
FP8 = ("dtype=e4m3,output_scale=0.5", FOLDED, f"{FOLDED},output_scale=0.5")


def _flashinfer_trtllm(draw):
    rows = one(draw, f"lens={lens(draw)},tokens=2", counted(draw))
    kind = one(draw, "dtype=bf16", "dtype=e4m3,q_dtype=bf16", *FP8)
    return f"heads=3,{one(draw, MLA, FLAT)},{rows},{kind},block={one(draw, 32, 64)}{some(draw, 'sinks=normal')}"


def _flashinfer_trtllm_sparse(draw):
    return f"heads=3,{MLA},lens={lens(draw, 1)},dtype=bf16,block=32,{_slots(draw, 20)}"


def _flashinfer_cute_dsl(draw):
    kernel = one(draw, "tokens=2", "tokens=1", "tokens=3,causal=false", "tokens=2,causal=false,sinks=normal")
    kind = one(draw, "dtype=bf16", "dtype=f16", *FP8)
    return f"heads=3,{MLA},lens={lens(draw)},{kernel},{kind},block={one(draw, 32, 64)}"


def _flashinfer_xqa(draw):
    return f"heads=3,{MLA},lens={lens(draw)},{one(draw, 'dtype=bf16', *FP8)},block={one(draw, 32, 64)}"


def _flashinfer_prims_ts(draw):
    free = f"lens={lens(draw, 1)},tokens=3,causal=false"
    rows = one(draw, f"lens={lens(draw, 2)},tokens=2", "lens=70+3+64,ragged=1+0+3", free)
    return f"heads=3,{MLA},{rows},{one(draw, 'dtype=bf16', *FP8)},block={one(draw, 32, 33)}"


def _flashinfer_dsv4(draw):
    given = lens(draw, 1)
    return f"heads=8,{FLAT},lens={given},dtype=bf16,block=32,extra={given},extra_topk=24,{_slots(draw, 128)}"


def _flashinfer_sm120(draw):
    if draw(st.booleans()):
        reader = one(draw, "exponent", "f32_bf16")
        options = _slots(draw, 20, "topk_length=query")
        return f"heads=8,{MLA},lens={lens(draw, 1)},dtype=bf16,format=fp8_ds_mla,reader={reader},{options}"
    given = lens(draw, 1)
    extra = one(draw, "", f",extra={given},extra_topk=9")
    return f"heads=8,{FLAT},lens={given},dtype=bf16,format=model1,{_slots(draw, 20, 'topk_length=query')}{extra}"


def _vllm_triton(draw):
    kind = one(draw, "dtype=bf16", "dtype=f16", "dtype=f32", "dtype=bf16,format=fp8_e4m3,reader=f32_bf16")
    heads = "heads=3" if "format" in kind else one(draw, "heads=3", "heads=4,kv_heads=2")
    return f"{heads},{MLA},lens={lens(draw)},{kind},block={one(draw, 1, 16, 33)}{some(draw, 'softcap=30')}"


def _vllm_cpu(draw):
    return f"heads=3,{MLA},lens={lens(draw)},{dtype(draw, 'bf16', 'f16', 'f32')},block=16"


def _sglang_triton(draw):
    options = some(draw, "softcap=30", "sinks=normal")
    heads = one(draw, "heads=3", "heads=4,kv_heads=2")
    return f"{heads},{MLA},lens={lens(draw)},{dtype(draw, *SIXTEEN)},block={one(draw, 1, 16)}{options}"


def _sglang_cpu(draw):
    options = f"block={one(draw, 1, 16)}{some(draw, 'softcap=30')}"
    return f"heads=3,{MLA},lens={lens(draw, 1)},{dtype(draw, *SIXTEEN)},{options}"


def _sglang_cutlass(draw):
    return f"heads=128,{MLA},lens={lens(draw)},{dtype(draw, *SIXTEEN)},block={one(draw, 16, 128)}"


def _sglang_cpu_flashmla(draw):
    given = lens(draw, 1)
    extra = one(draw, "", f",extra={given},extra_topk=9")
    options = _slots(draw, 20, "topk_length=request", "topk_outside=skip")
    kinds = (f"{MLA},dtype=bf16", f"{FLAT},dtype=bf16", f"{MLA},dtype=bf16,format=fp8_ds_mla")
    kind = one(draw, *kinds, f"{FLAT},dtype=bf16,format=model1,reader=guarded")
    return f"heads=3,{kind},lens={given},block={one(draw, 5, 64)},{options}{extra}"


def _tensorrt_llm_fp8(draw):
    rows = f"lens={lens(draw)},tokens={one(draw, 1, 2)}"
    return f"heads=3,{MLA},{rows},{one(draw, 'dtype=e4m3', *FP8)},block={one(draw, 32, 64)},scale=0.125"


def _tensorrt_llm(draw):
    scale = one(draw, 0.0721687836487032, 0.0625, 0.1352337788608801)
    return f"heads=3,{MLA},lens={lens(draw)},tokens={one(draw, 1, 2)},{dtype(draw, *SIXTEEN)},block=32,scale={scale}"


def _aiter(draw):
    kind = one(draw, "dtype=bf16", "dtype=f16", "dtype=bf16,format=fp8_e4m3,reader=fold,q_dtype=e4m3,q_scale=0.03125")
    width = one(draw, MLA, "row=288,value=256")
    return f"heads=3,{width},{counted(draw)},{kind},block={one(draw, 1, 16)}"


def _lmdeploy(draw):
    rows = f"lens={lens(draw)},tokens={one(draw, 1, 2)}"
    return f"heads=3,{MLA},{rows},{dtype(draw, *SIXTEEN)},block=64{some(draw, 'causal=false')}"


def _tvm(draw):
    rows = f"lens={lens(draw)},window={one(draw, 0, 3, 40)},first={one(draw, 0, 5)}"
    rows = one(draw, rows, counted(draw) + some(draw, "causal=false"))
    return f"heads=3,{MLA},{rows},{dtype(draw, *SIXTEEN)},block={one(draw, 1, 16)}"


def _tokenspeed(draw):
    options = some(draw, "causal=false")
    kind = one(draw, "dtype=e4m3", *FP8)
    return f"heads=3,{MLA},lens={lens(draw)},tokens={one(draw, 1, 2)},{kind},block={one(draw, 32, 64)}{options}"


def _masked(draw, *more):
    biased = ("dtype=f16,bias=mask", "dtype=f16,bias=normal", "dtype=f16,bias=alibi")
    rows = one(draw, "format=q8_0,dtype=f32", *more, "dtype=f16", "dtype=bf16", *biased)
    options = some(draw, "softcap=20", "sinks=infinite", "window=20,first=3")
    return f"lens={lens(draw)},tokens={one(draw, 1, 3)},q_dtype=f32,{rows}{options}"


def _llama_cpp(draw):
    return f"heads=3,{one(draw, MLA, 'row=320,value=256')},{_masked(draw)}"


def _ik_llama_cpp(draw):
    return f"heads=3,{MLA},value_offset=64,{_masked(draw, 'format=q6_0,dtype=f32')}"


def _vllm_cpp(draw):
    width = one(draw, MLA, "row=40,value=32")
    return f"heads=3,{width},lens={lens(draw)},{dtype(draw, 'f32', 'bf16')},block={one(draw, 1, 16)}"


def _memra(draw):
    queries = one(draw, 1, 3)
    return f"heads=3,nope=24,rope={one(draw, 0, 8)},value=32,rank=64,queries={queries},cached={one(draw, 3, 17)}"


SAID = {name: globals()["_" + name.replace("-", "_").replace(".", "_")] for name in dialects.NAMES}


@st.composite
def ids(draw, name):
    """An id of a case that the dialect `name` can say."""
    text = SAID[name](draw)
    seed = draw(st.integers(1, 5))
    if name == "memra":
        return f"absorbed:{text},seed={seed}"
    if ",scale=" not in text:
        text += ",scale=" + repr(192**-0.5 if name.endswith("cutlass") else 0.0625)
    inputs = draw(INPUTS)
    return f"paged:{text},inputs={inputs},seed={seed}"
