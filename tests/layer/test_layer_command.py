# SPDX-License-Identifier: Apache-2.0
"""Layer cases in files, and what the command line and serve say of them."""

import json

import numpy as np
import pytest
from engine import GLM, INDEXED, PLAIN, Engine, random_states, random_weights
from safetensors.numpy import save_file
from wrong_layers import KeysNotRotated, NormWithoutEps

from mla_oracle import InputError
from mla_oracle.cli import main
from mla_oracle.layer import read_layer_case, write_layer_case
from mla_oracle.serve import answer
from mla_oracle.tensorfile import read_tensors, write_tensors

TOKENS = 6


@pytest.fixture
def folder(tmp_path):
    """A model's folder with a config and weights of layer 1, a case beside it, and what two engines dumped."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PLAIN))
    weights = random_weights(PLAIN)
    save_file({f"model.layers.1.self_attn.{name}": w for name, w in weights.items()}, model / "model.safetensors")
    states, positions = random_states(PLAIN, TOKENS), np.arange(TOKENS)
    inputs = {"hidden_states": states, "positions": positions}
    write_layer_case(tmp_path / "case.safetensors", inputs, config="model", weights="model", layer=1)
    for name, engine in (("right", Engine), ("wrong", KeysNotRotated)):
        write_tensors(tmp_path / f"{name}.safetensors", engine(PLAIN, weights)(states, positions), {})
    return tmp_path


def call(capsys, *args):
    code = main([str(arg) for arg in args])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


def test_an_honest_dump_passes(folder, capsys):
    code, told, said = call(capsys, "check", "--stages", folder / "case.safetensors", folder / "right.safetensors")
    assert (code, told["verdict"], told["first"]) == (0, "pass", None)
    assert [found["stage"] for found in told["stages"]][:3] == ["q_a", "q_a_norm", "q"]
    assert "pass q_a_norm f32" in said and said.startswith("pass: ")
    assert told["missing"] == ["q_lat", "o_lat"]


def test_a_wrong_dump_fails_at_its_first_wrong_stage_and_query(folder, capsys):
    code, told, said = call(capsys, "check", "--stages", folder / "case.safetensors", folder / "wrong.safetensors")
    assert (code, told["verdict"], told["first"], told["row"], told["position"]) == (1, "fail", "k_pe", 1, 1)
    assert "k_pe is the first stage that leaves its budget" in said and "at query 1, position 1" in said
    failed = [found for found in told["stages"] if found["verdict"] == "fail"]
    assert [found["stage"] for found in failed] == ["k_pe"]
    assert failed[0]["rows_over"] == TOKENS - 1 and failed[0]["worst"]["index"][0] == 1


def test_run_writes_every_stage(folder, capsys):
    out = folder / "expected.safetensors"
    code, told, _ = call(capsys, "run", folder / "case.safetensors", "-o", out)
    assert (code, told["kind"], told["precision"]) == (0, "layer", "f64")
    stages, metadata = read_tensors(out)
    assert metadata["schema"] == "mla-oracle-result/1"
    assert stages["out"].shape == (TOKENS, 48) and stages["out"].dtype == np.float64
    code, told, _ = call(capsys, "check", "--stages", folder / "case.safetensors", out)
    assert code == 0 and max(found["units"] for found in told["stages"]) < 1e-3
    code, told, _ = call(capsys, "run", folder / "case.safetensors", "--precision", "f32")
    assert told["tensors"]["out"]["dtype"] == "f32" and told["result"] is None
    code, told, _ = call(capsys, "run", folder / "case.safetensors", "-o", folder / "case.safetensors")
    assert code == 2 and "is the case file" in told["error"]["message"]


def test_serve_answers_it_too(folder):
    request = {"op": "check", "case": str(folder / "case.safetensors"), "actual": str(folder / "wrong.safetensors")}
    found = answer(json.dumps(request | {"stages": True}).encode())
    assert found["ok"] and found["exit_code"] == 1 and found["result"]["first"] == "k_pe"
    found = answer(json.dumps(request | {"stages": "yes"}).encode())
    assert found["error"]["message"] == "stages is 'yes', expected true or false"
    found = answer(json.dumps({"op": "run", "case": str(folder / "case.safetensors")}).encode())
    assert found["result"]["kind"] == "layer"


def test_conventions_are_metadata(folder, capsys):
    states, positions = 0.03 * random_states(PLAIN, TOKENS), np.arange(TOKENS)
    dump = NormWithoutEps(PLAIN, random_weights(PLAIN))(states, positions)
    write_tensors(folder / "dump.safetensors", dump, {})
    inputs = {"hidden_states": states, "positions": positions}
    case = folder / "other.safetensors"
    for eps, code in ((None, 1), (0.0, 0)):
        how = {} if eps is None else {"norm_eps": eps}
        write_layer_case(case, inputs, config=json.dumps(PLAIN), weights="model", layer=1, **how)
        assert call(capsys, "check", "--stages", case, folder / "dump.safetensors")[0] == code
    how = {"angles": "table", "rope_layout": "neox", "held": "f32"}
    write_layer_case(case, inputs, config="model", weights="model", layer=1, **how)
    code, told, _ = call(capsys, "check", "--stages", case, folder / "right.safetensors")
    assert (code, told["first"]) == (1, "q_a")  # of other hidden states
    assert told["conventions"]["angles"] == "table" and told["conventions"]["rope_layout"] == "neox"


def test_a_shared_layer_and_index_conventions_in_a_file(tmp_path):
    config = {**GLM, "indexer_types": ["full", "shared"]}
    weights = {f"model.layers.1.self_attn.{k}": w for k, w in random_weights(config).items() if "indexer" not in k}
    save_file(weights, tmp_path / "model.safetensors")
    topk = np.tri(3, dtype=np.int64) - 1
    topk[:, 0] = 0
    inputs = {"hidden_states": random_states(config, 3), "positions": np.arange(3), "topk": topk}
    path = tmp_path / "case.safetensors"
    write_layer_case(path, inputs, config=json.dumps(config), weights="model.safetensors", layer=1, index_hadamard=True)
    case = read_layer_case(path)
    assert case.config.indexer.shared and case.config.indexer.hadamard
    np.testing.assert_array_equal(case.inputs["topk"], inputs["topk"])


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"config": None}, "metadata config is missing from the layer case"),
        ({"weights": None}, "metadata weights is missing from the layer case"),
        ({"layer": "-1"}, "metadata layer is '-1', expected a positive integer"),
        ({"layer": "7"}, "layer is 7, expected below num_hidden_layers, 2"),
        ({"angles": "steps"}, "metadata angles is 'steps', expected any or recurrence or power or closed or table"),
        ({"rope_base": "1"}, "metadata rope_base does not belong to a layer case, expected norm_eps"),
        ({"config": "{"}, "metadata config is not JSON"),
        ({"config": "none"}, "none' cannot be read: No such file or directory"),
        ({"weights": "none.safetensors"}, "none.safetensors: No such file"),
        ({"index_rope": "neox"}, "a convention of the indexer is given, expected none: deepseek_v3 has no indexer"),
        ({"schema": "mla-oracle-case/1"}, "schema is 'mla-oracle-case/1', expected 'mla-oracle-layer/1'"),
    ],
)
def test_a_case_that_is_none_is_told_in_one_line(folder, capsys, metadata, said):
    tensors, found = read_tensors(folder / "case.safetensors")
    found = {key: value for key, value in (found | metadata).items() if value is not None}
    write_tensors(folder / "bad.safetensors", tensors, found)
    code, told, err = call(capsys, "check", "--stages", folder / "bad.safetensors", folder / "right.safetensors")
    assert code == 2 and said in told["error"]["message"] and err.count("\n") == 1


def test_transposed_weights_are_told_with_exit_code_2(folder, capsys):
    path = folder / "model" / "model.safetensors"
    tensors, _ = read_tensors(path)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    write_tensors(path, tensors | {name: np.ascontiguousarray(tensors[name].T)}, {})
    code, told, _ = call(capsys, "check", "--stages", folder / "case.safetensors", folder / "right.safetensors")
    assert (code, told["error"]["message"]) == (2, f"{name} is [32, 84], expected [84, 32]: it is transposed")


def test_other_options_are_refused_with_stages(folder, capsys):
    files = folder / "case.safetensors", folder / "right.safetensors"
    code, told, _ = call(capsys, "check", "--stages", *files, "--tol", "1")
    assert (code, told["error"]["message"]) == (2, "tol is given with stages, expected numerics alone")
    assert call(capsys, "check", "--stages", *files, "--numerics", "torch-eager")[0] == 0
    code, told, _ = call(capsys, "check", *files)
    assert code == 2 and "schema is 'mla-oracle-layer/1'" in told["error"]["message"]
    code, told, _ = call(capsys, "run", files[0], "--out-dtype", "bf16")
    assert code == 2 and "expected neither" in told["error"]["message"]


def test_names_that_are_none_are_refused_when_written(tmp_path):
    with pytest.raises(InputError, match="tensor hidden does not belong to a layer case"):
        write_layer_case(tmp_path / "x", {"hidden": np.zeros(2)}, config="c", weights="w")
    with pytest.raises(InputError, match="metadata eps does not belong to a layer case"):
        write_layer_case(tmp_path / "x", {"positions": np.zeros(2)}, config="c", weights="w", eps=1)
    assert not (tmp_path / "x").exists()


def test_a_choice_beyond_the_tokens_is_bad_input(tmp_path, capsys):
    weights = random_weights(INDEXED)
    save_file({f"model.layers.0.self_attn.{k}": w for k, w in weights.items()}, tmp_path / "model.safetensors")
    states = random_states(INDEXED, 5)
    inputs = {"hidden_states": states, "positions": np.arange(5)}
    how = {"config": json.dumps(INDEXED), "weights": "model.safetensors"}
    write_layer_case(tmp_path / "case.safetensors", inputs, **how)
    topk = Engine(INDEXED, weights)(states, np.arange(5))["topk"].copy()
    topk[3, 1] = 5
    write_tensors(tmp_path / "dump.safetensors", {"topk": topk}, {})
    code, told, _ = call(capsys, "check", "--stages", tmp_path / "case.safetensors", tmp_path / "dump.safetensors")
    assert (code, told["error"]["message"]) == (2, "topk[3, 1] is 5, expected -1 or a token below 5")
