# SPDX-License-Identifier: Apache-2.0
"""The optional fields of a paged case: written, read back, named, and refused by whoever knows plain cases only."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from mla_oracle import InputError, UnsupportedError, generate, read_case, write_case
from mla_oracle.cases import PARSERS, format_convention, from_parts
from mla_oracle.cases.extensions import Extensions, require_plain
from mla_oracle.cases.placement import dense_table, sparse_cache
from mla_oracle.gpu.check.trials import Trial
from mla_oracle.gpu.check.trials import run as run_trial
from mla_oracle.mutants import Problem
from mla_oracle.ptx import convention
from mla_oracle.shards import shard
from mla_oracle.verdict.tolerance import rounding

PLAIN = "paged:heads=2,row=12,value=8,lens=5+3,block=4,scale=0.5"
SET = {
    "topk_by": "slot",
    "topk_outside": "skip",
    "window_left": 3,
    "window_right": 0,
    "window_first": 2,
    "softcap": 30.0,
    "sinks_in_lse": True,
    "value_offset": 4,
    "q_scale": 0.5,
    "output_scale": 2.0,
    "lse_axes": "BHT",
    "cache_format": "fp8_ds_mla",
    "cache_reader": "bf16",
    "extra_cache_format": "v4.1_fp4",
}
FIELDS = {f.name: f for f in dataclasses.fields(Extensions)}
TENSORS = [name for name in FIELDS if name not in SET]


def test_a_case_that_sets_nothing_is_plain_and_its_file_says_nothing_of_the_rest():
    case = generate(PLAIN)
    assert case.extensions() == ()
    assert not FIELDS.keys() & (case.tensors().keys() | case.conventions().keys())


def test_every_field_is_set_by_one_of_the_tests_below_and_every_convention_is_read_from_text():
    assert set(SET) <= set(PARSERS) and {*SET, *TENSORS} == set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_in_use_is_named_and_survives_a_file(tmp_path, name):
    value = SET.get(name, np.arange(2, dtype=np.int32))
    case = dataclasses.replace(generate(PLAIN), id=None, **{name: value})
    assert case.extensions() == (name,)
    write_case(tmp_path / "case", case)
    again = read_case(tmp_path / "case")
    assert again.extensions() == (name,)
    assert np.array_equal(getattr(again, name), value) and type(getattr(again, name)) is type(value)


def test_fields_are_named_in_their_order_after_what_needs_no_field():
    case = generate(PLAIN)
    q, kv_cache = case.q.astype(ml_dtypes.float8_e4m3fn), case.kv_cache[:, :, None].astype(ml_dtypes.float8_e4m3fn)
    case = dataclasses.replace(case, q=q, kv_cache=kv_cache, softcap=1.0, sinks=np.zeros(2, np.float32))
    assert case.extensions() == ("num_kv_heads", "e4m3 q", "e4m3 kv_cache", "sinks", "softcap")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"window_left": "-2"}, "metadata window_left is '-2', expected an integer of -1 or more"),
        ({"window_first": "-1"}, "metadata window_first is '-1', expected an integer of 0 or more"),
        ({"topk_by": "page"}, "metadata topk_by is 'page', expected position or slot"),
        ({"sinks_in_lse": "1"}, "metadata sinks_in_lse is '1', expected true or false"),
    ],
)
def test_a_convention_that_is_none_is_one_line(tmp_path, text, said):
    case = generate(PLAIN)
    about = {name: format_convention(value) for name, value in case.conventions().items()}
    with pytest.raises(InputError) as error:
        from_parts(case.tensors(), {"kind": "paged", **about, **text})
    assert str(error.value) == said


@pytest.mark.parametrize("name", ["block_table", "seq_lens"])
def test_a_table_and_lengths_may_be_absent_by_slot_only(name):
    fields = {"topk_indices": np.zeros((2, 1), np.int32), "block_table": None, "seq_lens": None}
    case = dataclasses.replace(generate(PLAIN), **fields, topk_by="slot")
    assert name not in case.tensors()
    with pytest.raises(InputError, match=f"^tensor {name} is missing from the paged case$"):
        dataclasses.replace(generate(PLAIN), **{name: None})


OUT, LSE = np.zeros((2, 2, 8)), np.zeros((2, 2))
RESULTS = {"out": OUT, "lse": LSE}
CONSUMERS = {
    "the derived tolerance": [lambda case: rounding(case, "f32")],
    "the mutants": [lambda case: Problem(case)],
    "shards": [lambda case: shard(dataclasses.replace(case, shards=2), case.block_table)],
    "page_ids": [
        lambda case: dense_table(dataclasses.replace(case, page_ids=np.arange(len(case.kv_cache)))),
        lambda case: sparse_cache(dataclasses.replace(case, page_ids=np.arange(len(case.kv_cache)))),
    ],
    "ptx run": [convention.default, lambda case: convention.arguments(None, ["q"], case, {})],
    "gpu.check": [lambda case: run_trial(None, case, Trial(PLAIN))],
}


@pytest.mark.parametrize(
    ("who", "use"), [(who, use) for who, uses in CONSUMERS.items() for use in uses], ids=lambda x: str(x)[:20]
)
@pytest.mark.parametrize("name", ["topk_indices", "bias", "sinks", "window_left", "softcap", "value_offset"])
def test_whoever_knows_plain_cases_only_refuses_the_others_by_name(who, use, name):
    tensor = {"topk_indices": np.zeros((2, 1), np.int32), "bias": np.zeros((2, 5), np.float32)}
    tensor["sinks"] = np.zeros(2, np.float32)
    case = dataclasses.replace(generate(PLAIN), **{name: tensor.get(name, SET.get(name))})
    with pytest.raises(UnsupportedError) as error:
        use(case)
    assert str(error.value) == f"{name} is not supported by {who}"


def test_a_plain_case_passes_the_guard():
    require_plain(generate(PLAIN), "anyone")
