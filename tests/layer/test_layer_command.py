# SPDX-License-Identifier: Apache-2.0
"""Layer cases in files, and what the command line and serve say of them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine import BIASED, CONFIG, GLM, INDEXED, LONGCAT, PLAIN, POOLED, Engine, random_states, random_weights
from safetensors.numpy import save_file
from wrong_layers import KeysNotRotated, NormWithoutEps

from mla_oracle import InputError, commands
from mla_oracle.cli import main
from mla_oracle.files.tensorfile import read_tensors, write_tensors
from mla_oracle.layer import read_layer_case, write_layer_case
from mla_oracle.serve import answer

pytest_plugins = ["pytester"]
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


WORDS = [
    "q = q_b_proj, RMSNorm and q_a_proj (rank 24) of hidden states of 48: 3 heads of 16, not rotated, and 8",
    "norms: x / sqrt(mean x^2 + 1e-06) weight, in f32",
    "rope: pairs (2j, 2j + 1) of 8 elements, base 10000",
    "angles: in f32 in whatever way: what any mode rounds is allowed for, and sines of angles reduced in f32",
    "rotated pairs are stored as the first of them in the dump is",
    f"score = (q_nope . k_nope + q_pe . k_pe) * {1 / 24**0.5!r}: 1/sqrt(24)",
    "0 rows were cached before; query t of 6 sees rows 0 to 0 + t",
    "what is not dumped is held in the coarsest dtype of what is",
    "lse is in base e",
]


def test_explain_says_a_layer_in_words_and_its_stages_by_shape(folder, capsys):
    code, told, said = call(capsys, "explain", folder / "case.safetensors")
    assert code == 0 and told["kind"] == "layer" and told["meaning"] == said.splitlines()
    assert not set(WORDS) - set(told["meaning"])
    assert told["conventions"] == {"layer": 1, "config": "model", "weights": "model"}
    assert told["results"]["q_pe"] == [TOKENS, 3, 8] and told["results"]["out"] == [TOKENS, 48]
    assert told["weights"]["q_a_proj"] == {"dtype": "f32", "shape": [24, 48]}
    found = answer(json.dumps({"op": "explain", "case": str(folder / "case.safetensors")}).encode())
    assert found["result"] == told
    code, told, _ = call(capsys, "explain", folder / "case.safetensors", "--blind")
    assert (code, told["error"]["message"]) == (2, "blind or numerics is given for a layer case, expected neither")


MISTRAL = {
    **PLAIN, "model_type": "mistral4",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
        "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
NOPE = {**POOLED, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "how", "words"),
    [
        (LONGCAT, {}, ["q is multiplied by 1.4142135623730951, sqrt(hidden_size / rank)",
                       "c_kv is multiplied by 1.224744871391589, sqrt(hidden_size / rank)"]),
        (CONFIG, {"rope_layout": "neox", "held": "bf16", "lse_base": "2", "angles": "closed"}, [
            "YaRN: factor 40 over 4096 tokens, beta_fast 32, beta_slow 1, mscale 1, mscale_all_dim 0.707",
            "rotated pairs are stored parted, the even elements and then the odd",
            "what is not dumped is held in bf16", "lse is in base 2", "angles: position * base^(-2j/R)",
        ]),
        (BIASED, {}, ["attention_bias: q_a_proj (where there is one), kv_a_proj_with_mqa and o_proj add one"]),
        (MISTRAL, {}, ["q at position p is multiplied by 1 + 0.1 ln(1 + floor(p / 8192))"]),
        (INDEXED, {"index_hadamard": True, "index_scores": "fp8"}, [
            "indexer: 4 heads of 16, rotated in neox pairs, times the Hadamard matrix, scores in fp8",
            "a query attends to the 4 best of the tokens it sees, or to fewer",
        ]),
        (NOPE, {}, ["rope: nothing is rotated", "indexer: 4 heads of 16, nothing rotated, scores in f32",
                    "a query attends to the 2 best pools of 2 tokens and to the tokens after its last whole pool"]),
    ],
    ids=["longcat", "yarn", "biased", "mistral4", "indexer", "pools"],
)  # fmt: skip
def test_what_a_config_settles_is_said(tmp_path, capsys, config, how, words):
    weights = {f"model.layers.0.self_attn.{k}": w for k, w in random_weights(config).items()}
    save_file(weights, tmp_path / "model.safetensors")
    inputs = {"hidden_states": random_states(config, 5), "positions": np.arange(5)}
    how = {"config": json.dumps(config), "weights": "model.safetensors", **how}
    write_layer_case(tmp_path / "case.safetensors", inputs, **how)
    code, told, _ = call(capsys, "explain", tmp_path / "case.safetensors")
    assert code == 0, told
    assert not set(words) - set(told["meaning"]), told["meaning"]
    _, computed, _ = call(capsys, "run", tmp_path / "case.safetensors")
    assert told["results"] == {name: stage["shape"] for name, stage in computed["tensors"].items()}


def test_a_harness_in_cpp_asks_for_the_first_wrong_stage(folder):
    compiler = next((found for name in ("c++", "g++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{commands.include_dir()}"]
    subprocess.run([compiler, *flags, Path(__file__).parent / "dump.cpp", "-o", folder / "dump"], check=True)
    oracle = folder / "oracle"
    oracle.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mla_oracle "$@"\n')
    oracle.chmod(0o755)
    environment = os.environ | {"MLA_ORACLE": str(oracle)}
    asked = [folder / "dump", folder / "model", folder / "case.safetensors", folder]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True)
    said = "10 out is the first stage that leaves its budget: o\n"
    assert (done.returncode, done.stdout) == (0, 2 * said), done.stderr


def test_the_pytest_fixture_asserts_a_layers_stages(folder, pytester):
    pytester.makepyfile(
        f"""
        import pytest
        from mla_oracle.files.tensorfile import read_tensors

        @pytest.mark.parametrize("dump", ["right", "wrong"])
        def test_layer(mla_oracle, dump):
            stages, _ = read_tensors("{folder}/" + dump + ".safetensors")
            layer = mla_oracle.layer("{folder}/case.safetensors")
            assert layer.expected()["out"].shape == stages["out"].shape
            verdict = layer.check(**stages)
            assert verdict.passed and dump == "right"
        """
    )
    found = pytester.runpytest()
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines(["k_pe is the first stage that leaves its budget: *"])


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


@pytest.mark.parametrize("source", ["model/model.safetensors", "model"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("case.safetensors", "the case file"),
        ("model/model.safetensors", "the weights"),
        ("model/config.json", "the config"),
    ],
)
def test_what_a_case_is_read_from_is_not_overwritten(folder, capsys, name, said, source):
    tensors, metadata = read_tensors(folder / "case.safetensors")
    write_tensors(folder / "case.safetensors", tensors, metadata | {"weights": source})
    before = (folder / name).read_bytes()
    code, told, _ = call(capsys, "run", folder / "case.safetensors", "-o", folder / name)
    assert code == 2 and told["error"]["message"] == f"the result file {folder / name} is {said}, expected another name"
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "one.safetensors", "other.safetensors"])
def test_a_shard_is_not_overwritten_be_it_another_layers(folder, capsys, name):
    os.rename(folder / "model" / "model.safetensors", folder / "model" / "one.safetensors")
    index = dict.fromkeys(read_tensors(folder / "model" / "one.safetensors")[0], "one.safetensors")
    index["model.layers.0.self_attn.q_a_proj.weight"] = "other.safetensors"
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write_tensors(folder / "model" / "other.safetensors", {}, {})
    before = (folder / "model" / name).read_bytes()
    code, told, _ = call(capsys, "run", folder / "case.safetensors", "-o", folder / "model" / name)
    assert code == 2 and told["error"]["message"].endswith(f"{name} is the weights, expected another name")
    assert (folder / "model" / name).read_bytes() == before
    assert call(capsys, "run", folder / "case.safetensors", "-o", folder / "model" / "new.safetensors")[0] == 0


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
    assert code == 2 and "expected none for a layer case" in told["error"]["message"]


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
