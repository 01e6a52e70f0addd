# SPDX-License-Identifier: Apache-2.0
"""What explain says: every convention of a case in words, and the shape of every result."""

import dataclasses

import numpy as np
import pytest
from ids import IDS, SMALL, made

from mla_oracle import commands, expected, generate
from mla_oracle.cases.extensions import Extensions
from mla_oracle.meaning import meaning, result_shapes


@pytest.mark.parametrize("options", [*IDS, "causal=true"])
def test_results_have_the_shapes_that_explain_says(options):
    case = made(options)
    assert result_shapes(case) == {name: list(array.shape) for name, array in expected(case).items()}


def test_a_plain_case_reads_as_it_did():
    assert meaning(generate(SMALL)) == [
        "key: all 12 elements of a row; value: its first 8",
        "score = (q . key) * 0.5",
        "query t of 1 sees the first seq_len - 1 + t + 1 tokens",
        "lse is in base e; a row that sees nothing has out 0 and lse -inf",
    ]


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ("value_offset=4", ["key: all 12 elements of a row", "values: columns 4 to 11 of each row"]),
        ("kpe=3", ["storage: columns 0 to 8 of a row in kv_cache, 9 to 11 in kpe_cache"]),
        ("kv_heads=2", ["2 key/value heads: head h of 4 reads head h // 2"]),
        ("kv_heads=4", ["4 key/value heads: head h of 4 reads head h // 1"]),
        ("ragged=2+1+0+3+1+2", [
            "q is ragged: request b has its rows qo_indptr[b] to qo_indptr[b + 1] - 1",
            "query t of the T of its request sees the first seq_len - T + t + 1 tokens",
            "lse: base e, axes N H, -inf where a row sees no key",
        ]),
        ("q_dtype=e4m3,q_scale=0.25", ["score = (q . key) * (0.5 * 0.25)", "q stands for q * 0.25"]),
        ("output_scale=2", ["out is multiplied by 2.0 before it is stored", "out: 0 where a row sees no key"]),
        ("softcap=30", ["softcap: score becomes 30.0 * tanh(score / 30.0), before any bias"]),
        ("bias=normal", [
            "bias: that of the query, the same for all heads, at the key's position is added to the score;"
            " -inf skips the key"
        ]),
        ("bias=alibi", [
            "bias: that of the query and the head at the key's position is added to the score; -inf skips the key"
        ]),
        ("sinks=normal", [
            "sinks: a logit a head in the softmax's denominator, without a value",
            "lse: base e, axes B H, the sink not counted, -inf where a row sees no key",
        ]),
        ("sinks=normal,sinks_in_lse=true,tokens=2,lse_axes=BHT,lse_base=2,empty_lse=inf", [
            "lse: base 2, axes B H T, the sink counted, +inf where a row sees no key"
        ]),
        ("empty_lse=-1e30,tokens=2,softcap=1", ["lse: base e, axes B T H, -1e+30 where a row sees no key"]),
        ("window=3+0,first=2", ["window: a query at position i sees i - 3 to i, and the first 2 tokens"]),
        ("window=3", ["window: a query at position i sees i - 3 to i"]),
        ("window=3,causal=false", [
            "window: a query at position i sees i - 3 to the end", "every query sees all seq_len tokens"
        ]),
        ("window=-1+2,causal=false", ["window: a query at position i sees token 0 to i + 2"]),
        ("window=2+0,causal=false", ["window: a query at position i sees i - 2 to i"]),
        ("topk=6,topk_length=query", [
            "selection: topk_indices are positions of tokens in kv_cache, 6 a query, in their order, one named twice"
            " counted twice; negative ones are skipped, those at or above seq_lens refused",
            "entries from topk_length of the query on may be anything",
        ]),
        ("topk=6,topk_by=slot,topk_outside=skip,topk_length=request,tokens=2", [
            "selection: topk_indices are slots (block * block_size + offset) of kv_cache, 6 a query, in their order,"
            " one named twice counted twice; negative ones are skipped,"
            " those at or above the slots of kv_cache skipped",
            "entries from topk_length of the request on may be anything",
            "by slot there is no table, no length, no causality and no window",
        ]),
        ("topk=6,extra=1x6,extra_topk=2", [
            "selection: extra_topk_indices are positions of tokens in extra_kv_cache, 2 a query, in their order, one"
            " named twice counted twice; negative ones are skipped, those at or above extra_seq_lens refused",
            "the keys of extra_kv_cache follow those of kv_cache in one softmax, whatever their position",
        ]),
    ],
)
def test_every_convention_is_told_in_words(options, sentences):
    told = meaning(made(options))
    for sentence in sentences:
        assert sentence in told
    assert told[0] == "key: all 12 elements of a row"


def test_a_format_and_its_reader_are_told():
    rows = "heads=2,row=576,value=512,scale=0.06,lens=5"
    told = meaning(generate(f"paged:{rows},format=fp8_e4m3"))
    assert "rows: bytes of format fp8_e4m3, read by rule 'fold'" in told
    assert "the format's scales outside the rows: kv_scale" in told
    told = meaning(generate(f"paged:{rows},format=fp8_ds_mla,reader=bf16"))
    assert "rows: bytes of format fp8_ds_mla, read by rule 'bf16'" in told
    extra = "topk=2,extra=4,extra_format=nvfp4_sglang"
    told = meaning(generate(f"paged:{rows},{extra},format=fp8_ds_mla,reader=bf16"))
    assert "rows of the extra cache: bytes of format nvfp4_sglang, read by rule 'f32_bf16'" in told


def test_no_field_goes_unsaid():
    """Each field of its own changes what is told."""
    changed = {
        "lse_axes": "BHT", "topk_by": "slot", "topk_outside": "skip", "sinks_in_lse": True,
        "cache_format": "fp8_e4m3", "cache_reader": "bf16", "extra_cache_format": "q8_0",
    }
    fields = {f.name: str(f.type).startswith("Array") for f in dataclasses.fields(Extensions)}
    numbers = {name: changed.get(name, 3) for name, is_tensor in fields.items() if not is_tensor}
    tensors = {name: np.zeros((6, 4, 12), np.float32) for name, is_tensor in fields.items() if is_tensor}
    base = {"topk_outside": "topk_indices", "sinks_in_lse": "sinks", "cache_reader": "cache_format",
            "topk_length": "topk_indices", "extra_topk_length": "extra_topk_indices", "window_first": "window_left"}
    told_with_others = {"kv_scale", "kpe_scale", "ckv_scale", "extra_kv_scale"}  # of a format
    tables = {"extra_block_table", "extra_seq_lens"}  # as the main ones
    for name, value in (numbers | tensors).items():
        case = made("softcap=2,tokens=2") if name == "lse_axes" else made("softcap=2")
        if name in base:
            case = dataclasses.replace(case, **{base[name]: (numbers | tensors)[base[name]]})
        if name in told_with_others:
            case = dataclasses.replace(case, cache_format="fp8_e4m3")
        told = meaning(dataclasses.replace(case, **{name: value}))
        assert told != meaning(case) or name in tables, name


def test_the_command_explains_a_case_that_is_not_plain():
    answer = commands.explain(f"{SMALL},topk=6,tokens=2,sinks=infinite,lse_axes=BHT")
    assert answer["backend"] == "strict" and answer["results"]["lse"] == [6, 4, 2]
    assert answer["conventions"]["lse_axes"] == "BHT" and answer["tensors"]["topk_indices"]["shape"] == [6, 2, 6]
