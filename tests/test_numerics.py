# SPDX-License-Identifier: Apache-2.0
"""What a kernel declares: presets, fields, what is inferred, and every way to say it wrong."""

import dataclasses

import pytest

from mla_oracle.errors import InputError
from mla_oracle.inputs import generate
from mla_oracle.kernels import KERNELS
from mla_oracle.numerics import infer, resolve

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


def test_the_dtypes_of_the_results_are_theirs_whatever_is_declared(case) -> None:
    assert resolve("out=bf16,lse=bf16", case, {"out": "f32"}).out == "f32"
    assert resolve("out=bf16,lse=bf16", case, {"out": "f32"}).lse == "bf16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p=bf16,p=f32", "numerics gives p twice, expected it once"),
        ("flashmlaa", "numerics is 'flashmlaa', expected field=value or one of flashmla"),
        ("", "numerics is '', expected field=value"),
        ("p=f8", "numerics p is 'f8', expected f32 or bf16x2 or tf32"),
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


def test_numerics_as_they_are_stay_so(case) -> None:
    numerics = dataclasses.replace(infer(case, BF16), tile=7)
    assert resolve(numerics, case, {"out": "f32"}) is numerics


def test_a_case_without_weights_has_none() -> None:
    with pytest.raises(InputError, match="a merge case has no numerics"):
        resolve(None, generate("merge:"), {})
