# SPDX-License-Identifier: Apache-2.0
"""Public bugs of rope and of row layout, each in the call of the engine it was reported of (of a like one, where that
has no dialect): what the right kernel returns passes, what the wrong one returns fails, from file to verdict.

Wrong kernels are mutants of the plain case behind the call, or the call's own loops (engines.py) with the bug in them.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from engines import ENGINES, Kernel

from mla_oracle import commands, generate, write_result
from mla_oracle.dialects import files, get
from mla_oracle.mutants.bank import find
from mla_oracle.paged import Attention

BF16 = ml_dtypes.bfloat16
V3 = "paged:geometry=deepseek-v3,dtype=bf16"
GGML = "paged:heads=2,row=576,value=512,scale=0.1,dtype=f16,q_dtype=f32"
ROPE = f"{V3},heads=4,lens=70+33,tokens=2"


class Lagging(Kernel):
    """Values in blocks of 512 rows, keys in blocks of 576: the values' pointer falls 64 behind with every block."""

    def value(self, rows, columns):
        j = np.arange(len(rows))
        return rows[j - 64 * (j // 576)][:, columns]


class Losing(Lagging):
    """And the last 64 rows of each block of keys have no value."""

    def value(self, rows, columns):
        values = super().value(rows, columns).copy()
        values[np.arange(len(rows)) % 576 >= 512] = 0
        return values


class KeysNotRotatedFar(Kernel):
    """Rows behind a window of 128 hold the rope of position 0: each is turned back by an angle of its own."""

    def keys(self, rows, where):
        near, far = rows[:128], rows[128:].copy()
        a, b = far[:, 448::2].copy(), far[:, 449::2].copy()
        angle = np.arange(1.0, len(far) + 1)[:, None] / 10000 ** (np.arange(32) / 32)
        far[:, 448::2], far[:, 449::2] = a * np.cos(angle) + b * np.sin(angle), b * np.cos(angle) - a * np.sin(angle)
        return np.concatenate([near, far])


class RotatedBasis(Kernel):
    """Values stay in the basis in which quantised rows are kept."""

    def value(self, rows, columns):
        order = np.arange(512)
        ones = np.array([[bin(i & j).count("1") % 2 for j in order] for i in order])
        return rows[:, columns] @ ((1 - 2 * ones) / np.sqrt(512))


class RopeFirst(Kernel):
    """The value is read behind a rope that comes first."""

    def value(self, rows, columns):
        return rows[:, rows.shape[1] - 512 :]


def of_mutant(name, case, arguments, mutant):
    """What a kernel with the bug returns from the call."""
    dialect = get(name)
    own = dialect.to_case(**arguments)
    if case.kind == "paged":
        case = replace(case, lse_base=own.lse_base, empty_lse=own.empty_lse)
    wrong = find(mutant).run(case)
    if "lse" not in wrong:
        return dialect.of_case(own, wrong)
    rows = own.q.shape[:-1]
    out, lse = wrong["out"].reshape(*rows, -1), wrong["lse"].reshape(rows)
    return dialect.results(own, Attention(out, lse.swapaxes(1, 2) if own.lse_axes == "BHT" else lse))


def rounded(name, results):
    """As the engine stores them."""
    dialect = get(name)
    kind = np.float32 if name in ("llama.cpp", "ik_llama.cpp", "memra", "vllm.cpp") else BF16
    return {r: np.asarray(x).astype(kind if r == dialect.out else np.float32) for r, x in results.items()}


def verdict(folder, name, case, results):
    call, actual = folder / "call.safetensors", folder / "actual.safetensors"
    if not call.exists():
        files.write_call(call, get(name), case)
    write_result(actual, rounded(name, results), {})
    return commands.check(str(call), str(actual), dialect=name)


BUGS = [
    (14, "flashmla-dense", ROPE, "rope.table-layout-q"),
    (14, "flashmla-dense", ROPE, "rope.table-layout-k"),
    (16, "flashinfer", f"{ROPE},block=16", "rope.plus-one-q"),
    (16, "flashinfer", f"{ROPE},block=16", "length.without-new"),
    (17, "vllm-triton", f"{V3},heads=4,lens=70+33,block=16", "rope.zero-rows"),
    (18, "tensorrt-llm", f"{ROPE},block=32,scale={192**-0.5!r}", "rope.doubled"),
    (19, "lmdeploy", f"{V3},heads=4,lens=200+131", "rope.outside-window"),
    (
        19, "flashinfer-dsv4", "paged:heads=8,row=512,value=512,scale=0.06,dtype=bf16,lens=140,block=32,topk=128,"
        "topk_by=slot,extra=40,extra_topk=24,causal=false,invalid=none", KeysNotRotatedFar(),
    ),
    (20, "flashinfer-trtllm", f"{V3},heads=4,row=512,value=512,lens=70+33,tokens=2,block=32", "rope.output-turned"),
    (21, "flashmla-dense", ROPE.replace("heads=4", "heads=5"), "rope.tail-heads"),
    (22, "llama.cpp", f"{GGML},lens=70", RopeFirst()),
    (23, "ik_llama.cpp", f"{GGML},value_offset=64,lens=577,inputs=rising", Lagging()),
    (23, "ik_llama.cpp", f"{GGML},value_offset=64,lens=513", Losing()),
    (24, "tensorrt-llm", f"{ROPE},block=32,scale={192**-0.5!r}", "value.page-skips"),
    (24, "flashinfer-trtllm", f"{ROPE},block=32", "value.page-frozen"),
    (24, "flashinfer-xqa", f"{V3},heads=4,lens=70+133,block=32", "value.page-skips"),
    (24, "flashinfer-xqa", f"{V3},heads=4,lens=70+133,block=32", "value.page-frozen"),
    (25, "flashinfer-trtllm", f"{V3},heads=64,lens=70+33,block=32", "query.heads-128"),
    (28, "aiter", f"{V3},heads=16,lens=70+33,tokens=3,block=1", "query.broadcast"),
    (29, "flashmla-dense", ROPE, "query.table-row"),
    (29, "flashinfer-trtllm", f"{ROPE},block=32", "query.table-row"),
    (30, "flashinfer-xqa", f"{V3},heads=4,lens=70+33,block=32", "score.tile-transposed"),
    (31, "flashmla-dense", ROPE, "value.tile-transposed"),
    (32, "llama.cpp", f"{GGML.replace('f16', 'f32')},format=q8_0,lens=70", RotatedBasis()),
    (32, "vllm-triton", f"{V3},heads=4,lens=70+33,block=16", "score.key-basis"),
    (32, "vllm-cpu", f"{V3},heads=4,lens=70+33,block=16", "value.basis"),
    (33, "vllm.cpp", f"{V3},heads=4,lens=70+33,block=16", "score.next-head"),
    (34, "memra", "absorbed:heads=3,nope=24,rope=8,value=32,rank=64,queries=2,cached=17", "absorb.uk-power-of-two"),
]


@pytest.mark.parametrize(("number", "name", "case_id", "wrong"), BUGS)
def test_a_public_bug_fails_in_the_call_it_is_of_and_the_right_kernel_passes(tmp_path, number, name, case_id, wrong):
    case = generate(case_id)
    arguments = get(name).from_case(case)
    right = verdict(tmp_path, name, case, ENGINES[name](arguments))
    assert right["verdict"] == "pass", right["reason"]
    returned = of_mutant(name, case, arguments, wrong) if isinstance(wrong, str) else ENGINES[name](arguments, wrong)
    assert verdict(tmp_path, name, case, returned)["verdict"] == "fail"


OF_THEIR_OWN = {12, 13, 27}  # below
ROPE_AND_ROWS = {12, 13, 14, *range(16, 26), *range(27, 35)}  # sections B and C of the log


def test_every_public_bug_of_rope_and_of_rows_has_a_case():
    assert {number for number, *_ in BUGS} | OF_THEIR_OWN == ROPE_AND_ROWS


def test_bug_27_one_number_of_heads_is_wrong_and_only_a_case_of_it_tells(tmp_path):
    """32 heads are folded in two groups of 16 and left in the order of the groups; its cause was never stated."""
    fp8 = "format=fp8_e4m3,reader=fold,q_dtype=e4m3,q_scale=0.03125"
    for heads, expected in ((16, "pass"), (32, "fail"), (64, "pass")):
        folder = tmp_path / str(heads)
        folder.mkdir()
        case = generate(f"{V3},heads={heads},lens=70+33,tokens=2,block=1,{fp8}")
        results = ENGINES["aiter"](get("aiter").from_case(case))
        assert verdict(folder, "aiter", case, results)["verdict"] == "pass"
        if heads == 32:
            o = results["o"].reshape(2, 2, 2, 16, 512)  # [b, t, group, h, d_v]
            results["o"] = o.transpose(0, 2, 1, 3, 4).reshape(4, 32, 512)
        assert verdict(folder, "aiter", case, results)["verdict"] == expected


def test_bug_30_all_nan_is_told_as_that(tmp_path):
    case = generate(f"{V3},heads=4,lens=70+33,block=32")
    results = ENGINES["flashinfer-xqa"](get("flashinfer-xqa").from_case(case))
    found = verdict(tmp_path, "flashinfer-xqa", case, {"out": np.full_like(results["out"], np.nan)})
    assert found["verdict"] == "fail" and "nan" in found["reason"]


def selection(lens):
    case_id = f"paged:heads=64,row=576,value=512,scale=0.1,dtype=bf16,lens={lens},causal=false,topk=64,topk_by=slot"
    return generate(f"{case_id},format=fp8_ds_mla,invalid=none,unread=numbers")


def test_bug_12_another_set_of_keys_is_seen_beyond_topk_and_is_the_same_set_up_to_it(tmp_path):
    """V3.2's indexer with the wrong pairing of its rope: another set where there is a choice, else another order."""
    for lens, expected in ((64, "pass"), (65, "fail")):
        folder = tmp_path / str(lens)
        folder.mkdir()
        case = selection(lens)
        arguments = get("flashmla-sparse").from_case(case)
        slots = arguments["indices"].copy()
        if lens == 64:
            slots = slots[..., ::-1]
        else:
            slots[0, 0, 7] = next(slot for slot in range(65) if slot not in slots)
        results = ENGINES["flashmla-sparse"]({**arguments, "indices": slots})
        assert verdict(folder, "flashmla-sparse", case, results)["verdict"] == expected


def test_bug_13_rope_elements_in_another_order_in_query_and_keys_are_no_bug(tmp_path):
    case = generate(f"{V3},heads=4,lens=70+33,block=16")
    order = np.concatenate([np.arange(512), 512 + np.arange(64).reshape(32, 2).T.reshape(-1)])
    other = replace(case, q=case.q[..., order], kv_cache=case.kv_cache[..., order], id=None)
    arguments = get("vllm-triton").from_case(other)
    results = ENGINES["vllm-triton"](arguments)
    assert verdict(tmp_path, "vllm-triton", case, results)["verdict"] == "pass"
    one = get("vllm-triton").from_case(replace(other, kv_cache=case.kv_cache))
    assert verdict(tmp_path, "vllm-triton", case, ENGINES["vllm-triton"](one))["verdict"] == "fail"


def test_a_new_key_that_is_not_written_fails(tmp_path):
    case = generate(f"{V3},heads=4,lens=70+33,block=16")
    arguments = get("sglang-cpu").from_case(case)
    stale = arguments["k_buffer"].copy()
    stale[arguments["loc"]] = 0
    for writes, expected in ((True, "pass"), (False, "fail")):
        results = ENGINES["sglang-cpu"]({**arguments, "k_buffer": stale}, writes=writes)
        assert verdict(tmp_path, "sglang-cpu", case, results)["verdict"] == expected


def misread(lse):
    """[b, h, s_q] whose memory is that of [b, s_q, h]."""
    return np.ascontiguousarray(lse.transpose(0, 2, 1)).reshape(lse.shape)


def emptied(lse):
    """-inf where +inf is right."""
    return np.where(lse == np.inf, -np.inf, lse)


@pytest.mark.parametrize(
    ("name", "case_id", "change"),
    [
        ("flashmla-dense", f"{ROPE}", lambda r: {**r, "lse": r["lse"] * np.log2(np.e)}),
        ("flashinfer", f"{ROPE},block=16", lambda r: {**r, "lse": r["lse"] / np.log2(np.e)}),
        ("flashmla-dense", f"{V3},heads=4,lens=70+0", lambda r: {**r, "lse": emptied(r["lse"])}),
        ("flashmla-dense", f"{ROPE}", lambda r: {**r, "lse": misread(r["lse"])}),
    ],
    ids=["base 2", "base e", "-inf where empty", "axes of an LSE"],
)
def test_an_lse_of_another_call_fails(tmp_path, name, case_id, change):
    case = generate(case_id)
    right = ENGINES[name](get(name).from_case(case))
    assert verdict(tmp_path, name, case, right)["verdict"] == "pass"
    found = verdict(tmp_path, name, case, change(right))
    assert found["verdict"] == "fail" and "lse" in found["reason"]


def test_a_default_scale_of_another_call_fails(tmp_path):
    """1/sqrt(576), which a call without a scale has, where the model has 1/sqrt(192)."""
    case = generate(f"{V3},heads=4,lens=70+33,scale={192**-0.5!r},block=1")
    arguments = get("aiter").from_case(case)
    assert verdict(tmp_path, "aiter", case, ENGINES["aiter"](arguments))["verdict"] == "pass"
    forgotten = {name: value for name, value in arguments.items() if name != "sm_scale"}
    assert verdict(tmp_path, "aiter", case, ENGINES["aiter"](forgotten))["verdict"] == "fail"
