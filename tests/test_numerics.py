# SPDX-License-Identifier: Apache-2.0
"""What a kernel declares: presets, fields, what is inferred, and every way to say it wrong."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import discrimination
from mla_oracle.errors import InputError
from mla_oracle.mutants import find
from mla_oracle.oracle import expected
from mla_oracle.verdict.compare import check
from mla_oracle.verdict.kernels import KERNELS
from mla_oracle.verdict.numerics import infer, resolve

ID = "paged:heads=2,row=24,value=16,lens=5+33,block=16,scale=0.25"
BF16 = {"out": "bf16", "lse": "f32"}


@pytest.fixture
def case():
    return generate(f"{ID},dtype=bf16")


def test_a_narrow_cache_means_weights_of_its_dtype_and_tensor_cores(case) -> None:
    numerics = infer(case, BF16)
    assert (numerics.p, numerics.cache, numerics.value_accumulator) == ("bf16", "bf16", "mma")
    wide = infer(generate(ID), {"out": "bf16"})
    assert (wide.p, wide.cache, wide.value_accumulator, wide.out) == ("bf16", "f32", "mma", "bf16")
    wide = infer(generate(ID), {"out": "f32"})
    assert (wide.p, wide.cache, wide.value_accumulator, wide.out) == ("f32", "f32", "f32", "f32")


def test_a_query_of_more_bits_is_rounded_to_meet_the_cache(case) -> None:
    wide = dataclasses.replace(case, q=case.q.astype("float32"))
    assert infer(wide, BF16).query == "bf16"
    assert infer(dataclasses.replace(case, q=case.q.astype("float16")), BF16).query == "f16"


@pytest.mark.parametrize("name", KERNELS)
def test_a_preset_has_a_source_and_reads_back(case, name: str) -> None:
    numerics = resolve(name, case, BF16)
    assert len(KERNELS[name].source) > 20
    assert numerics.origin == f"preset {name}, the rest inferred from the dtypes"
    assert resolve(str(numerics), case, BF16) == numerics


def test_fields_after_a_preset_take_its_place(case) -> None:
    numerics = resolve("flashmla,splits=3,p=f16", case, BF16)
    assert (numerics.row_sum, numerics.splits, numerics.p) == ("f32", 3, "f16")
    assert resolve({"row_sum": "p"}, case, BF16).row_sum == "p"


def test_partial_outputs_of_a_preset_follow_the_output(case) -> None:
    assert resolve("flashinfer-fa2", case, BF16).partials == "bf16"
    assert resolve("flashinfer-fa2", case, {"out": "f32"}).partials == "f32"


def test_results_that_were_widened_are_judged_as_what_they_were(case) -> None:
    widened = resolve("out=bf16,lse=bf16", case, {"out": "f32", "lse": "f64"})
    assert (widened.out, widened.lse) == ("bf16", "bf16")
    assert widened == resolve("out=bf16,lse=bf16", case, {"out": "bf16", "lse": "bf16"})
    assert resolve("flashinfer-fa2,out=f16", case, {"out": "f32"}).partials == "f16"
    truth = expected(case)
    out = truth["out"].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert check(case, {"out": out}, truth, numerics="p=f32,out=bf16").passed
    assert not check(case, {"out": out}, truth, numerics="p=f32").passed


def test_results_in_fewer_bits_than_is_declared_are_refused(case) -> None:
    with pytest.raises(InputError, match=r"^numerics out is f32, but out holds bf16, expected bf16 or none$"):
        resolve("out=f32", case, BF16)
    with pytest.raises(InputError, match=r"^numerics lse is f64, but lse holds f32, expected f32 or none$"):
        resolve({"lse": "f64"}, case, BF16)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p=bf16,p=f32", "numerics gives p twice, expected it once"),
        ("flashmlaa", "numerics is 'flashmlaa', expected field=value or one of flashmla"),
        ("", "numerics is '', expected field=value"),
        ("p=f8", "numerics p is 'f8', expected f32 or bf16x2 or tf32"),
        ("out=e4m3", "numerics out is 'e4m3', expected f64 or f32 or bf16 or f16"),
        ("lse=e8m0", "numerics lse is 'e8m0', expected f64 or f32 or bf16 or f16"),
        ("q=f32", "numerics has 'q', expected query"),
        ("splits=0", "numerics splits is 0, expected 1 or more"),
        ("splits=x", "numerics splits is 'x', expected an integer or any"),
        ("p_scale=nan", "numerics p_scale is nan"),
        ("p_scale=one", "numerics p_scale is 'one', expected a number"),
    ],
)
def test_a_mistake_is_named(case, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        resolve(text, case, BF16)


def test_what_a_case_can_tell_is_asked_of_results_as_declared(case) -> None:
    for dtype in ("f32", "bf16"):
        asked = discrimination(case, f"out={dtype},lse=bf16", mutants=(find("temperature.half"),))
        assert f",out={dtype},lse=bf16," in asked.numerics


def test_numerics_as_they_are_stay_so(case) -> None:
    numerics = dataclasses.replace(infer(case, BF16), tile=7)
    assert resolve(numerics, case, {"out": "f32"}) is numerics


def test_a_case_without_weights_has_none() -> None:
    with pytest.raises(InputError, match="a merge case has no numerics"):
        resolve(None, generate("merge:"), {})
