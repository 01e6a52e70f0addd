# SPDX-License-Identifier: Apache-2.0
"""Case ids with a cache format: every format is written, goes through a file, and its unread rows are no numbers."""

import numpy as np
import pytest
from ids import same

from mla_oracle import InputError, expected, formats, generate
from mla_oracle.files.exchange import read_case, write_case

WIDTH = {"aiter_v4": 512, "model1": 512, "v4.1": 512, "v4.1_fp4": 512}  # else 576
TWO_CACHES = ["fp8_ds_mla", "model1", "fp8_e4m3"]


def made(name, options=""):
    rows = f"row={WIDTH.get(name, 576)},value=512,block=4,lens=0+5+11,dtype=bf16"
    return generate(f"paged:heads=2,scale=0.06,{rows},format={name}{options}")


def rows_of(case):
    """[num_blocks, block_size, D] f32 by the case's reader."""
    blocks, slots = np.indices(case.kv_cache.shape[:2])
    tensors = {n: getattr(case, n) for n in ("kv_cache", "kpe_cache", "kv_scale", "kpe_scale", "ckv_scale")}
    given = {n: array for n, array in tensors.items() if array is not None}
    read = formats.read(case.cache_format, given, blocks.ravel(), slots.ravel(), block_size=4, reader=case.cache_reader)
    return read.reshape(*blocks.shape, -1)


@pytest.mark.parametrize("name", formats.NAMES)
def test_rows_in_use_are_near_the_plain_ones_and_all_others_are_nan(name):
    case = made(name)
    plain = generate(case.id.replace(f",format={name}", ""))
    rows, wanted = rows_of(case), plain.kv_cache.astype(np.float32)
    in_use = np.isfinite(wanted).all(axis=-1)
    error = np.abs(rows - wanted)[in_use]
    assert 0 < np.sqrt(np.mean(error**2)) < (0.2 if "fp4" in name else 0.08) and not in_use.all()
    assert not np.isfinite(rows[~in_use]).all(axis=-1).any()
    out = expected(case)["out"]
    assert np.isfinite(out).all() and np.abs(out - expected(plain)["out"]).max() < (0.6 if "fp4" in name else 0.3)


@pytest.mark.parametrize("name", formats.NAMES)
@pytest.mark.parametrize("options", ["", ",topk=3,tokens=2", ",window=2"])
def test_a_case_of_a_format_goes_through_a_file(tmp_path, name, options):
    case = made(name, options)
    write_case(tmp_path / "case", case)
    back = read_case(tmp_path / "case")
    assert back.id == case.id and back.cache_format == name and back.extensions() == case.extensions()
    for tensor, array in case.tensors().items():
        assert back.tensors()[tensor].dtype == array.dtype
        assert back.tensors()[tensor].tobytes() == array.tobytes()
    one, other = expected(case), expected(back)
    assert same(one["out"], other["out"]) and same(one["lse"], other["lse"])


@pytest.mark.parametrize("name", TWO_CACHES)
@pytest.mark.parametrize("by", ["position", "slot"])
def test_a_second_cache_has_the_format_of_the_first(name, by):
    case = made(name, f",topk=3,extra=7+0+9,extra_block=8,topk_by={by}")
    assert case.extra_kv_cache.dtype == case.kv_cache.dtype and case.extra_kv_cache.shape[1] == 8
    assert (case.extra_kv_scale is None) == (case.kv_scale is None)
    assert np.isfinite(expected(case)["out"]).all()


@pytest.mark.parametrize(("name", "other"), [("model1", "v4.1_fp4"), ("fp8_ds_mla", "fp8_e4m3")])
def test_a_second_cache_may_have_a_format_of_its_own(tmp_path, name, other):
    writer = ",writer=sglang" if name == "fp8_ds_mla" else ""  # of the first cache alone
    case = made(name, f",topk=3,extra=7+4+9,topk_by=slot,extra_format={other}{writer}")
    assert (case.cache_format, case.extra_cache_format) == (name, other)
    write_case(tmp_path / "case", case)
    one, back = expected(case), expected(read_case(tmp_path / "case"))
    assert np.isfinite(one["out"]).all() and same(one["out"], back["out"])
    both = made(name, ",topk=3,extra=7+4+9,topk_by=slot")
    assert not same(one["out"], expected(both)["out"]) and np.allclose(one["out"], expected(both)["out"], atol=0.6)


def test_a_writer_and_a_reader_are_named():
    arbitrary, power = made("fp8_ds_mla", ",writer=sglang,reader=exponent"), made("fp8_ds_mla", ",reader=exponent")
    assert arbitrary.cache_reader == "exponent" and arbitrary.kv_cache.tobytes() != power.kv_cache.tobytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format=fp8", "cache_format is 'fp8', expected one of fp8_e4m3"),
        ("format=fp8_ds_mla,writer=me", "writer is 'me', expected one of"),
        ("format=fp8_ds_mla,reader=me", "reader is 'me', expected one of"),
        ("format=model1", "rows has 576 columns, expected 512"),
        ("format=flashinfer_fp8,topk=2,extra=1",
         "has extra in format flashinfer_fp8, whose kpe_cache is of one cache"),
    ],
)
def test_a_format_that_cannot_be_written_is_one_line(text, said):
    with pytest.raises(InputError) as error:
        generate(f"paged:heads=2,row=576,value=512,scale=0.06,lens=5,{text}")
    assert said in str(error.value) and str(error.value).startswith("case id 'paged:") and "\n" not in str(error.value)
