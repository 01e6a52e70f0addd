# SPDX-License-Identifier: Apache-2.0
"""Public bugs of paging, tails, quantised caches, empty rows, masks, selections and sinks: the mutant that each one is,
and a case that rejects it and names its class.

A row: a public thread, the mutant, a case. Bugs with the same formula are one class: what differs is where they were.
"""

import numpy as np
import pytest
from test_every_listed_mutant import Prepared

from mla_oracle.cases import AppendCase
from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis.score import Evidence, ranked
from mla_oracle.mutants import find
from mla_oracle.mutants.absent import ABSENT
from mla_oracle.oracle import expected
from mla_oracle.verdict.compare import check

P = "paged:heads=3,row=20,value=12,scale=0.3,block=4"
LENS = "lens=9+0+1+11+30"
HUGE = f"{P},lens=9+4+7,pages=huge,unread=numbers"
STRIDED = f"{P},lens=9+4+7,pages=strided,unread=numbers"
SOME = f"{P},{LENS},unread=numbers"
ONE = f"{P.replace('block=4', 'block=1')},{LENS},unread=numbers"
THREE = f"{P},{LENS},tokens=3,unread=numbers"
LIST = f"{P},{LENS},topk=8,topk_length=query,tokens=2,unread=numbers"
OUTSIDE = f"{P},lens=9+5+30,topk=16,topk_outside=skip,tokens=3,invalid=rows,unread=numbers"
APPEND = "append:rank=16,rope=4,tokens=21"


def stored(name, more=""):
    row = 512 if name == "model1" else 576
    return f"paged:heads=3,row={row},value=512,scale=0.06,block=4,lens=9+5+30,tokens=2,format={name}{more}"


BUGS = (
    # pages, strides, addresses
    ("flashinfer-ai/flashinfer#3130", "wrap.uint32-elements", HUGE),
    ("vllm-project/vllm#47671", "wrap.int32-elements", HUGE),
    ("ROCm/aiter#4452", "wrap.uint32-bytes", HUGE),
    ("local-inference-lab/b12x#45", "wrap.int32-bytes", HUGE),
    ("ROCm/aiter#3498", "stride.pages", STRIDED),
    ("vllm-project/vllm#47493", "stride.pages", STRIDED),
    ("flashinfer-ai/flashinfer#1341", "stride.pages-doubled", SOME),
    ("sgl-project/sglang-jax#1074", "paging.size-doubled", ONE),
    ("sgl-project/sglang#25556", "paging.token-slots", SOME),
    ("vllm-project/vllm#31282", "length.twice-less-one", ONE),
    ("sgl-project/sglang-jax#20", "paging.start-offset", SOME),
    ("flashinfer-ai/flashinfer#810", "paging.size-1", SOME),
    ("local-inference-lab/vllm#588", "paging.truncated-half", SOME),
    ("vllm-project/vllm-ascend#3482", "append.padding-written", APPEND),
    # tails, stale data
    ("flashinfer-ai/flashinfer#941", "tail.nan-value", f"{P},{LENS}"),
    ("NVIDIA/cudnn-frontend#624", "tail.nan-value", f"{P},{LENS},tokens=2"),
    ("vllm-project/vllm#37442", "tail.nan-score", f"{P},{LENS}"),
    ("flashinfer-ai/flashinfer#3716", "pad.lanes-256", f"{SOME},causal=false"),
    ("vllm-project/tpu-inference#3426", "state.zero", SOME),
    ("ROCm/aiter#2983", "merge.stale-split", SOME),
    ("tenstorrent/tt-metal#54833", "pad.lanes-32", f"{P},lens=16+40,unread=numbers"),
    ("sgl-project/sglang#36207", "tail.slot-0", f"{P},{LENS}"),
    # quantised caches
    ("sgl-project/sglang#34765", "format.value-scale-ignored", stored("fp8_e4m3")),
    ("vllm-project/vllm#37054", "format.value-scale-twice", stored("fp8_e4m3")),
    ("vllm-project/vllm#37054", "scale.q-missing", f"{SOME},q_dtype=e4m3,q_scale=0.03"),
    ("vllm-project/vllm-xpu-kernels#475", "format.scale-twice", stored("fp8_e4m3")),
    ("deepseek-ai/FlashMLA#184", "format.scale-nearest-power", stored("fp8_ds_mla", ",topk=8,writer=vllm")),
    ("vllm-project/vllm#54563", "format.scale-exponent", stored("fp8_ds_mla", ",topk=8,writer=vllm")),
    ("NVIDIA/TensorRT-LLM#16916", "append.next-row", APPEND),
    ("vllm-project/vllm#48611", "format.packed-as-plain", stored("fp8_ds_mla")),
    ("vllm-project/vllm#36297", "scale.out-divided", f"{SOME},output_scale=0.5"),
    # empty rows, infinities
    ("flashinfer-ai/flashinfer#868", "empty.work-shifted", SOME),
    ("flashinfer-ai/flashinfer#4975", "empty.row-above", SOME),
    ("flashinfer-ai/flashinfer#2883", "empty.nan", SOME),
    ("vllm-project/vllm#57094", "empty.nan", f"{P},lens=1+1+1+0"),
    ("vllm-project/vllm#27491", "merge.empty-as-nan", SOME),
    ("vllm-project/vllm#49294", "merge.idle-split", SOME),
    ("sgl-project/sglang#22688", "state.carried", SOME),
    ("vllm-project/vllm#35969", "empty.last-entry", f"{P},lens=5+0,unread=numbers"),
    # causality, windows, masks
    ("lightseekorg/tokenspeed#469", "causal.none", THREE),
    ("ROCm/aiter#3046", "causal.none", THREE),
    ("ROCm/aiter#3993", "sight.causal-none", f"{THREE},softcap=9"),
    ("ROCm/aiter#4565", "causal.unwanted", f"{THREE},causal=false"),
    ("vllm-project/vllm#45227", "length.without-new", THREE),
    ("lablup/mlxcel#998", "causal.none", f"{P},lens=9+4,tokens=4,unread=numbers"),
    ("tenstorrent/tt-metal#55333", "bias.scaled", f"{SOME},bias=normal"),
    ("local-inference-lab/vllm#623", "sight.window-padded", f"{P},lens=90+9,window=7,unread=numbers"),
    ("onnxruntime/mobius#596", "sight.window-left-none", f"{P},lens=90+9,window=7,unread=numbers"),
    # selections, sinks
    ("vllm-project/vllm#45324", "topk.minus-one-as-first", LIST),
    ("radixark/miles#2079", "topk.minus-one-gathered", LIST),
    ("vllm-project/vllm#55692", "topk.prefix-of-valid", LIST),
    ("deepseek-ai/FlashMLA#184", "topk.outside-clamped", OUTSIDE),
    ("vllm-project/vllm#36616", "topk.length-ignored", LIST),
    ("flashinfer-ai/flashinfer#5095", "topk.length-ignored", LIST),
    ("vllm-project/vllm#52512", "topk.empty-as-zero-key", OUTSIDE),
    ("sgl-project/sglang#36807", "topk.cut-by-capacity", LIST),
    ("vllm-project/vllm#48611", "append.padding-written", APPEND),
    ("NVIDIA/cudnn-frontend#385", "topk.duplicates-dropped", f"{P},lens=30+9,topk=8,duplicates=true,unread=numbers"),
    ("vllm-project/vllm#54568", "sink.missing", f"{SOME},sinks=normal"),
    ("flashinfer-ai/flashinfer#5119", "sink.overflow", f"{P},lens=5+9,sinks=infinite"),
    ("vllm-project/vllm-gaudi#1777", "topk.dense", LIST),
    ("hw-native-sys/pypto-lib#1014", "topk.minus-one-as-zero-key", LIST),
)
KEPT = {}


def case_of(case_id):
    if case_id not in KEPT:
        KEPT[case_id] = Prepared(case_id)
    return KEPT[case_id]


def test_classes_without_a_mutant_say_why():
    reasons = {absent.family: absent.reason for absent in ABSENT}
    assert "not a function of the case" in reasons["upstream query"]  # NVIDIA/TensorRT-LLM#14480
    families = {find(name).family for _, name, _ in BUGS}
    assert not families & set(reasons)


@pytest.mark.parametrize(("thread", "name", "case_id"), BUGS, ids=[f"{t}:{n}" for t, n, _ in BUGS])
def test_a_public_bug_is_rejected_and_its_class_named(thread, name, case_id):
    mutant = find(name)
    p = case_of(case_id)
    assert mutant.applies(p.case) is None
    if isinstance(p.case, AppendCase):
        actual = mutant.run(p.case)
        assert not check(p.case, actual, p.truth).passed
        return
    actual = p.actual(mutant)
    assert not check(p.case, {n: x for n, x in actual.items() if not n.startswith("partial_")}, p.truth).passed
    evidence = Evidence(p.suspects, p.measure, actual)
    fits = ranked(evidence.fits(p.suspects.applicable()))
    best = [fit for fit in fits if fit.share >= fits[0].share - 1e-9 and fit.distance <= fits[0].distance + 1e-9]
    assert fits[0].share > 0.9
    families = {fit.mutant.family for fit in best} | {fits[0].mutant.family}
    same = {fit.mutant.family for fit in fits if evidence.same(fit.mutant, fits[0].mutant)}
    assert mutant.family in families | same, (fits[0].mutant.name, fits[0].share)


def test_threads_are_those_the_mutants_name():
    for thread, name, _ in BUGS:
        assert thread.count("#") == 1 and "/" in thread
        if name.partition(".")[0] in ("topk", "sink", "format", "bias"):
            known = find(name).references
            assert thread in known or name in ("append.padding-written", "topk.duplicates-dropped"), (thread, known)


def test_an_append_that_writes_padding_is_rejected():
    case = generate(APPEND)
    assert not np.array_equal(find("append.padding-written").run(case)["kv_cache"], expected(case)["kv_cache"])
