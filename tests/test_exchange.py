# SPDX-License-Identifier: Apache-2.0
"""Case and result files: what goes in comes out, and what does not belong is named."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mla_oracle.cases import KINDS
from mla_oracle.cases.inputs import generate
from mla_oracle.errors import InputError
from mla_oracle.files.exchange import load_case, read_case, read_result, write_case, write_result
from mla_oracle.files.tensorfile import read_tensors, write_tensors
from mla_oracle.oracle import expected

IDS = [
    "naive:heads=2,nope=16,rope=8,value=12,rank=32",
    "absorbed:heads=2,nope=16,rope=0,value=12,rank=32,dtype=bf16,scale=0.125",
    "paged:heads=2,row=40,value=32,lens=0+9+130,block=16,scale=0.1,empty_lse=nan,lse_base=2,causal=false",
    "paged:heads=2,row=40,value=32,lens=9,block=16,scale=0.5,pages=huge,shards=2,dtype=f16",
    "merge:empty_lse=inf",
    "rope:geometry=deepseek-v3,angles=table",
    "append:rank=32,rope=8,dtype=bf16",
]


@pytest.mark.parametrize("case_id", IDS)
def test_a_case_comes_back_as_it_went(tmp_path: Path, case_id: str) -> None:
    case = generate(case_id)
    write_case(tmp_path / "case", case)
    back = read_case(tmp_path / "case")
    assert type(back) is type(case) and back.id == case.id
    assert repr(back.conventions()) == repr(case.conventions())
    assert back.tensors().keys() == case.tensors().keys()
    for name, array in case.tensors().items():
        assert back.tensors()[name].dtype == array.dtype
        assert back.tensors()[name].tobytes() == array.tobytes()


def test_a_file_that_looks_like_an_id_is_still_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_case("paged:x", generate(IDS[2]))
    assert load_case("paged:x").id == generate(IDS[2]).id


def edited(tmp_path: Path, tensors: dict | None = None, **metadata: str | None) -> Path:
    write_case(tmp_path / "case", generate(IDS[2]))
    old_tensors, old = read_tensors(tmp_path / "case")
    new = {name: text for name, text in {**old, **metadata}.items() if text is not None}
    write_tensors(tmp_path / "edited", {**old_tensors, **(tensors or {})}, new)
    return tmp_path / "edited"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"schema": None}, "schema is None, expected 'mla-oracle-case/1'"),
        ({"schema": "mla-oracle-case/2"}, "schema is 'mla-oracle-case/2'"),
        ({"kind": "pagd"}, f"kind is 'pagd', expected {', '.join(KINDS)}"),
        ({"kind": None}, "kind is None"),
        ({"kind": "merge"}, "does not belong to a merge case"),
        ({"softmax_scale": None}, "metadata softmax_scale is missing"),
        ({"softmax_scale": "big"}, "metadata softmax_scale is 'big', expected a number"),
        ({"id": "a\nb"}, "metadata id is"),
        ({"head_dim_v": "-3"}, "metadata head_dim_v is '-3', expected a positive integer"),
        ({"causal": "True"}, "metadata causal is 'True', expected true or false"),
        ({"lse_base": "10"}, "metadata lse_base is '10', expected e or 2"),
        ({"window": "128"}, "metadata window does not belong to a paged case"),
        ({"q": "1"}, "metadata q does not belong"),
    ],
)
def test_wrong_metadata_is_one_line(tmp_path: Path, metadata: dict, said: str) -> None:
    with pytest.raises(InputError) as error:
        read_case(edited(tmp_path, **metadata))
    assert said in str(error.value) and "edited: " in str(error.value) and "\n" not in str(error.value)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tensor mask does not belong to a paged case, expected bias, block_table"):
        read_case(edited(tmp_path, {"mask": np.ones(3, np.float32)}))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = {"q": np.ones((1, 1, 8), np.float32), "kv_cache": np.ones((1, 1, 8), np.float32)}
    about = {"schema": "mla-oracle-case/1", "kind": "paged", "softmax_scale": "1.0", "head_dim_v": "8"}
    write_tensors(tmp_path / "case", tensors, about)
    with pytest.raises(InputError, match="tensor block_table is missing from the paged case"):
        read_case(tmp_path / "case")


def test_a_result_needs_no_metadata_but_its_schema_is_believed(tmp_path: Path) -> None:
    out = {"out": np.ones((2, 3), ml_dtypes.bfloat16)}
    write_tensors(tmp_path / "bare", out, {})
    assert read_result(tmp_path / "bare")["out"].dtype == ml_dtypes.bfloat16
    write_tensors(tmp_path / "newer", out, {"schema": "mla-oracle-result/9"})
    with pytest.raises(InputError, match="expected 'mla-oracle-result/1'"):
        read_result(tmp_path / "newer")
    write_result(tmp_path / "ours", out, {"case": "x"})
    assert read_result(tmp_path / "ours")["out"].tobytes() == out["out"].tobytes()


def recorded(folder: Path, **manifest: object) -> Path:
    """A problem as an engine's golden folder has it: bf16 as u16 .npy, names of its own."""
    case = generate("paged:heads=2,row=40,value=32,lens=9+30,block=16,scale=0.5,dtype=bf16,causal=true")
    tensors = {
        "query": case.q,
        "kv_cache": case.kv_cache,
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
        "out": expected(case, precision="f32")["out"],
    }
    described = {}
    for name, array in tensors.items():
        bf16 = array.dtype == ml_dtypes.bfloat16
        np.save(folder / f"{name}.npy", array.view(np.uint16) if bf16 else array)
        dtype = "bf16" if bf16 else {"int32": "i32", "float32": "f32"}[array.dtype.name]
        described[name] = {"file": f"{name}.npy", "dtype": dtype, "shape": list(array.shape)}
    content = {
        "op": "mla_decode_attention",
        "args": {"scale": 0.5, "num_kv_splits": 4},
        "tensors": described,
        "inputs": ["query", "kv_cache", "block_table", "seq_lens"],
        "outputs": ["out"],
        "tol": {"atol": 1e-5, "rtol": 0},
        **manifest,
    }
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def test_a_recorded_folder_is_a_case_and_a_result(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    case = load_case(folder)
    assert case.conventions()["softmax_scale"] == 0.5 and case.conventions()["head_dim_v"] == 32
    assert expected(case, precision="f32")["out"].tobytes() == read_result(folder)["out"].tobytes()


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({"op": "rms_norm"}, "kind is 'rms_norm'"),
        ({"args": {"scale": 0.5, "window_size": 8}}, "metadata window_size does not belong to a paged case"),
        ({"args": {}}, "metadata softmax_scale is missing"),
        ({"args": {"scale": "0.5x"}}, "metadata softmax_scale is '0.5x'"),
        ({"args": {"scale": 0.5, "softmax_scale": 0.25}}, "both scale and softmax_scale are given, expected one"),
    ],
)
def test_a_folder_of_something_else_is_one_line(tmp_path: Path, manifest: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_case(recorded(tmp_path, **manifest))


def test_a_recorded_value_width_is_the_cases_own(tmp_path: Path) -> None:
    folder = recorded(tmp_path, args={"scale": 0.5, "v_head_dim": 24}, outputs=[])
    with pytest.raises(InputError, match="tensor out does not belong to a paged case"):
        load_case(folder)
    folder = recorded(tmp_path, args={"scale": 0.5, "v_head_dim": 24})
    assert load_case(folder).conventions()["head_dim_v"] == 24


def test_conventions_survive_as_text() -> None:
    case = generate(IDS[2])
    assert math.isnan(case.conventions()["empty_lse"]) and case.conventions()["softmax_scale"] == 0.1


def test_the_scale_of_a_dense_case_and_the_yarn_of_a_rope_case_count() -> None:
    dense = "naive:heads=2,nope=16,rope=8,value=12,rank=32"
    assert (expected(generate(dense))["out"] != expected(generate(f"{dense},scale=0.9"))["out"]).any()
    with_yarn = generate("rope:geometry=deepseek-v3,angles=table")
    plain = type(with_yarn)(**{**with_yarn.tensors(), **with_yarn.conventions(), "yarn": None})
    assert (expected(with_yarn)["out"] != expected(plain)["out"]).any()


def test_the_default_dense_scale_has_mscale_squared() -> None:
    case = generate("absorbed:geometry=deepseek-v3,heads=2,cached=3")
    assert case.conventions()["softmax_scale"] == pytest.approx(0.1352337788608801, rel=1e-15)
