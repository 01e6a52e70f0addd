# SPDX-License-Identifier: Apache-2.0
"""Several sequences in one layer case: each is what it is alone, and a wrong one is told by its number."""

import json

import numpy as np
import pytest
from engine import CONFIG, GLM, INDEXED, PLAIN, POOLED, Engine, random_states, random_weights
from safetensors.numpy import save_file
from wrong_layers import KeysNotRotated, SmallestChosen

from mla_oracle import InputError
from mla_oracle.cli import main
from mla_oracle.files.tensorfile import write_tensors
from mla_oracle.layer import LayerConfig, check_stages, check_weights, run, stages_of, write_layer_case

TOKENS = (5, 1, 3)
CACHED = (2, 0, 7)
FAMILIES = {"yarn": CONFIG, "v3.2": INDEXED, "pooled": POOLED}


def layer_of(config):
    read = LayerConfig.from_hf_config(config)
    return read, check_weights({name.removesuffix(".weight"): w for name, w in random_weights(config).items()}, read)


def parts(config, tokens=TOKENS, cached=CACHED, dtype="f32"):
    """The inputs of every sequence, its first rows cached by an honest engine."""
    found = []
    for b, (new, old) in enumerate(zip(tokens, cached, strict=True)):
        states = random_states(config, new + old, seed=10 + b)
        positions = 3 * b + np.arange(new + old)
        inputs = {"hidden_states": states[old:], "positions": positions[old:]}
        before = Engine(config, random_weights(config), dtype)(states[:old], positions[:old]) if old else None
        L, R = config["kv_lora_rank"], config["qk_rope_head_dim"]
        cache = before["kv_cache"] if old else np.zeros((0, L + R), np.float32)
        inputs |= {"past_c_kv": cache[:, :L], "past_k_pe": cache[:, L:]}
        for name in ("index_k", "index_gate") if config is POOLED else ("index_k",) if config is INDEXED else ():
            inputs[f"past_{name}"] = before[name] if old else np.zeros((0, 16), np.float32)
        found.append(inputs)
    return found


def whole(sequences):
    """One case of them."""
    inputs = {name: np.concatenate([s[name] for s in sequences]) for name in sequences[0]}
    starts = {
        indptr: np.concatenate([[0], np.cumsum([len(s[name]) for s in sequences])]).astype(np.int32)
        for indptr, name in (("qo_indptr", "hidden_states"), ("past_indptr", "past_c_kv"))
    }
    return inputs | starts


def joined(config, dumps):
    """As an engine dumps a batch: rows one after the other, columns as many as the longest has, garbage beyond."""
    found = {}
    stages = stages_of(LayerConfig.from_hf_config(config))
    for name in dumps[0]:
        width = max(d[name].shape[-1] for d in dumps)
        if stages[name].axes.split()[-1] in ("N", "keys", "k"):
            fill = -1 if name == "topk" else np.nan
            pads = [[(0, 0)] * (d[name].ndim - 1) + [(0, width - d[name].shape[-1])] for d in dumps]
            of = [np.pad(d[name], pad, constant_values=fill) for d, pad in zip(dumps, pads, strict=True)]
            found[name] = np.concatenate(of)
        else:
            found[name] = np.concatenate([d[name] for d in dumps])
    return found


def dumped(config, sequences, engines, dtype="f32"):
    weights = random_weights(config)
    return joined(config, [
        engine(config, weights, dtype)(s["hidden_states"], s["positions"], s)
        for engine, s in zip(engines, sequences, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sequence_is_what_it_is_alone(family):
    config = FAMILIES[family]
    sequences = parts(config)
    read, weights = layer_of(config)
    found = run(read, weights, whole(sequences))
    token, row, key = 0, 0, 0
    for s in sequences:
        alone = run(read, weights, s)
        for name, stage in alone.items():
            begin = {"T": token, "N": row, "keys": key}[stages_of(read)[name].axes.split()[0]]
            mine = found[name][begin : begin + len(stage)]
            if stage.ndim > 1:
                beyond = mine[..., stage.shape[-1] :]
                mine = mine[..., : stage.shape[-1]]
                assert (beyond == {"p": 0, "topk": -1}.get(name, -np.inf)).all()
            assert mine.tobytes() == stage.tobytes(), name
        token, row = token + len(alone["q"]), row + len(alone["kv_cache"])
        key += len(alone.get("index_keys", ()))
    assert len(found["out"]) == token and len(found["kv_cache"]) == row


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_batch_passes(family, dtype):
    config = FAMILIES[family]
    sequences = parts(config, dtype=dtype)
    verdict = check_stages(*layer_of(config), whole(sequences), dumped(config, sequences, [Engine] * 3, dtype))
    assert verdict.passed, verdict.reason
    rows = {finding.stage: finding.rows for finding in verdict.stages}
    assert rows["out"] == sum(TOKENS) and rows["kv_cache"] == sum(TOKENS) + sum(CACHED)


def test_a_wrong_sequence_is_told_by_its_number_and_its_query():
    sequences = parts(PLAIN)
    dump = dumped(PLAIN, sequences, [Engine, Engine, KeysNotRotated])
    verdict = check_stages(*layer_of(PLAIN), whole(sequences), dump)
    assert (verdict.first, verdict.sequence, verdict.row, verdict.position) == ("k_pe", 2, 6, 13)
    assert "k_pe[6, " in verdict.reason and "at query 6, position 13 of sequence 2 (3 of 3 rows)" in verdict.reason
    found = next(finding for finding in verdict.stages if finding.stage == "k_pe")
    assert (found.rows_over, found.rows) == (3, 9)
    dump = dumped(INDEXED, parts(INDEXED), [Engine, Engine, SmallestChosen])
    verdict = check_stages(*layer_of(INDEXED), whole(parts(INDEXED)), dump)
    assert (verdict.first, verdict.sequence, verdict.row) == ("topk", 2, 6)


def test_a_row_that_is_anothers_is_told():
    """Rows of two sequences change places, as with a table that is another request's."""
    sequences = parts(PLAIN, (3, 3), (4, 4))
    dump = dumped(PLAIN, sequences, [Engine] * 2)
    cache = dump["kv_cache"].copy()
    cache[[0, 7]] = cache[[7, 0]]
    verdict = check_stages(*layer_of(PLAIN), whole(sequences), dump | {"kv_cache": cache})
    assert (verdict.first, verdict.sequence, verdict.row) == ("kv_cache", 0, 0)
    assert "in row 0 of sequence 0, which was cached before" in verdict.reason


def test_the_layout_of_pairs_is_that_of_the_first_sequence():
    """One sequence that is stored otherwise than the others is wrong."""
    sequences = parts(PLAIN, (3, 3), (0, 0))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    dump = dumped(PLAIN, sequences, [Engine] * 2)
    turned = {name: dump[name][..., order] for name in ("q_pe", "k_pe")}
    turned["kv_cache"] = np.concatenate([dump["kv_cache"][:, :32], dump["kv_cache"][:, 32:][:, order]], 1)
    verdict = check_stages(*layer_of(PLAIN), whole(sequences), dump | turned)
    assert verdict.passed and verdict.conventions["rope_layout"] == "neox", verdict.reason
    half = {name: np.concatenate([x[:3], dump[name][3:]]) for name, x in turned.items()}
    verdict = check_stages(*layer_of(PLAIN), whole(sequences), dump | half)
    assert (verdict.first, verdict.sequence) == ("q_pe", 1)


def test_sequences_of_as_many_tokens_may_be_a_batch():
    sequences = parts(PLAIN, (3, 3), (4, 4))
    dump = dumped(PLAIN, sequences, [Engine] * 2)
    batch = {name: dump[name].reshape(2, 3, -1) for name in ("q_a", "q", "attn", "out")}
    batch["kv_cache"] = dump["kv_cache"].reshape(2, 7, -1)
    verdict = check_stages(*layer_of(PLAIN), whole(sequences), batch, rope_layout="interleaved")
    assert verdict.passed and len(verdict.stages) == 5, verdict.reason
    with pytest.raises(InputError, match=r"^q_a is \[3, 2, 24\], expected \[6, 24\]: \[T, Q\]$"):
        check_stages(*layer_of(PLAIN), whole(sequences), {"q_a": dump["q_a"].reshape(3, 2, 24)})


def test_a_shared_layer_chooses_within_each_sequence():
    config = {**GLM, "indexer_types": ["shared", "full"]}
    read, weights = LayerConfig.from_hf_config(config), random_weights(GLM)
    own = {name.removesuffix(".weight"): w for name, w in weights.items() if "index" not in name}
    weights = check_weights(own, read)
    inputs = {
        "hidden_states": random_states(GLM, 4), "positions": np.array([0, 1, 0, 1]), "qo_indptr": np.array([0, 2, 4]),
        "topk": np.array([[0, -1], [0, 1], [0, -1], [1, -1]]),
    }  # fmt: skip
    found = run(read, weights, inputs)
    assert np.isneginf(found["scores"][3, :, 0]).all() and np.isfinite(found["scores"][1]).all()
    with pytest.raises(InputError, match=r"^sequence 1: topk\[0, 0\] is 1, expected -1 or a token below 1$"):
        run(read, weights, inputs | {"topk": np.array([[0, -1], [0, 1], [1, -1], [1, -1]])})


def test_files_and_words_know_sequences(tmp_path, capsys):
    weights = {f"model.layers.0.self_attn.{name}": w for name, w in random_weights(PLAIN).items()}
    save_file(weights, tmp_path / "w.safetensors")
    sequences, case = parts(PLAIN), tmp_path / "case.safetensors"
    write_layer_case(case, whole(sequences), config=json.dumps(PLAIN), weights="w.safetensors")
    dump = dumped(PLAIN, sequences, [Engine, Engine, KeysNotRotated])
    write_tensors(tmp_path / "dump.safetensors", dump, {})
    assert main(["check", "--stages", str(case), str(tmp_path / "dump.safetensors")]) == 1
    assert json.loads(capsys.readouterr().out)["sequence"] == 2
    assert main(["explain", str(case)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "sequence 2: 7 rows were cached before; query t of 3 sees rows 0 to 7 + t" in told["meaning"]
    assert told["results"]["scores"] == [9, 3, 10] and told["results"]["kv_cache"] == [18, 40]
    assert main(["run", str(case)]) == 0
    shapes = {name: found["shape"] for name, found in json.loads(capsys.readouterr().out)["tensors"].items()}
    assert shapes == told["results"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"qo_indptr": np.array([0, 5, 6, 8])}, "qo_indptr[3] is 8, expected 9, the length of hidden_states"),
        ({"qo_indptr": np.array([0, 6, 5, 9])}, "qo_indptr[2] is 5, expected at least 6, qo_indptr[1]"),
        ({"qo_indptr": np.array([0, 5, 5, 9])}, "qo_indptr gives sequence 1 no token, expected 1 or more"),
        ({"qo_indptr": None}, "qo_indptr is missing, expected [B + 1]: hidden_states has the rows of sev"),
        ({"past_indptr": None}, "past_indptr is missing, expected [B + 1]: past_c_kv has the rows of sev"),
        ({"past_indptr": np.array([0, 2, 9])}, "past_indptr is [3], expected [4] as qo_indptr"),
        ({"past_indptr": np.array([0, 2, 2, 8])}, "past_indptr[3] is 8, expected 9, the length of past_c_kv"),
        ({"past_indptr": np.array([0.0, 2, 2, 9])}, "past_indptr is f64, expected i32 or i64 or u32"),
        ({"positions": np.arange(8)}, "positions is [8], expected 9 rows as qo_indptr has"),
        ({"past_k_pe": np.zeros((8, 8))}, "past_k_pe is [8, 8], expected 9 rows as past_indptr has"),
        ({"past_c_kv": None, "past_indptr": None}, "past_k_pe is given, expected past_c_kv and past_indptr with it"),
        ({"hidden_states": None}, "qo_indptr is given and hidden_states is not, expected both"),
        ({"hidden_states": np.zeros((9, 47))}, "sequence 0: hidden_states is [5, 47], expected [T, C] with C = 48"),
    ],
)
def test_starts_that_do_not_fit_are_told_in_one_line(change, said):
    inputs = {name: value for name, value in (whole(parts(PLAIN)) | change).items() if value is not None}
    with pytest.raises(InputError) as caught:
        run(*layer_of(PLAIN), inputs)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
