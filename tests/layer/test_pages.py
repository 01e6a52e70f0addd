# SPDX-License-Identifier: Apache-2.0
"""The paged form of a layer, against an engine that stores its rows by itself: in a dtype, or in fp8."""

import json

import ml_dtypes
import numpy as np
import pytest
from engine import CONFIG, DIRECT, INDEXED, PLAIN, Engine, random_states, random_weights
from safetensors.numpy import save_file

from mla_oracle import InputError
from mla_oracle.cli import main
from mla_oracle.files.tensorfile import read_tensors
from mla_oracle.layer import LayerConfig, Store, check_stages, check_weights, run, write_layer_case

TOKENS, CACHED, BLOCK = 9, 3, 4
TABLE = np.array([[700, 2, 31, 5]], np.int32)  # the last of them is not used
SLOTS = np.array([TABLE[0, i // BLOCK] * BLOCK + i % BLOCK for i in range(CACHED + TOKENS)])
WIDE = {**DIRECT, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 2}


class Stored(Engine):
    """An engine that rounds its new rows as it appends them."""

    def append(self, past, new):
        return np.concatenate([past, self.held(new.astype(np.float32)).astype(self.real)])


class InBf16(Stored):
    def held(self, rows):
        return rows.astype(ml_dtypes.bfloat16)


class InF16(Stored):
    def held(self, rows):
        return rows.astype(np.float16)


class InFp8(Stored):
    def held(self, rows):
        return (rows / np.float32(0.125)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.125)


class InTiles(Stored):
    """DeepSeek's 656 bytes: a power of two for every 128 of the latents, the rope in bf16; read as bf16."""

    def held(self, rows):
        tiles = rows[:, :512].reshape(len(rows), 4, 128)
        scale = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(tiles).max(-1, keepdims=True) / 448, 1e-4)))
        latents = (tiles / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
        held = np.concatenate([latents.reshape(len(rows), 512), rows[:, 512:]], 1)
        return held.astype(ml_dtypes.bfloat16)


BF16, F16, F32 = (Store(block_size=BLOCK, dtype=name) for name in ("bf16", "f16", "f32"))
FP8 = Store(block_size=BLOCK, format="fp8_e4m3", scale=0.125)
STORES = {
    "f32": (Engine, F32, CONFIG), "bf16": (InBf16, BF16, CONFIG), "f16": (InF16, F16, PLAIN),
    "fp8": (InFp8, FP8, CONFIG), "fp8-chosen": (InFp8, FP8, INDEXED), "bf16-chosen": (InBf16, BF16, INDEXED),
    "tiles": (InTiles, Store(block_size=BLOCK, format="fp8_ds_mla"), WIDE),
}  # fmt: skip


def layer(config):
    weights = random_weights(config)
    read = LayerConfig.from_hf_config(config)
    return weights, read, check_weights({name.removesuffix(".weight"): w for name, w in weights.items()}, read)


def inputs_of(engine, config, dtype):
    """The last TOKENS tokens of a sequence, CACHED of it in pages before, and what the engine dumps of them."""
    states, positions = random_states(config, CACHED + TOKENS), np.arange(CACHED + TOKENS)
    made = engine(config, random_weights(config), dtype)
    states = states.astype(made.dtype)
    before, rank = made(states[:CACHED], positions[:CACHED]), config["kv_lora_rank"]
    past = {"past_c_kv": before["kv_cache"][:, :rank], "past_k_pe": before["kv_cache"][:, rank:]}
    past |= {"past_index_k": before["index_k"]} if "index_k" in before else {}
    dump = dict(made(states[CACHED:], positions[CACHED:], past))
    inputs = {"hidden_states": states[CACHED:], "positions": positions[CACHED:], **past}
    return inputs | {"slot_mapping": SLOTS[CACHED:], "block_table": TABLE}, dump


def judged(name, dtype="f32", keep=None, engine=None, store=None):
    own, stores, config = STORES[name]
    inputs, dump = inputs_of(engine or own, config, dtype)
    _, read, weights = layer(config)
    dump = {stage: x for stage, x in dump.items() if keep is None or stage in keep}
    return check_stages(read, weights, inputs, dump, store=store or stores, rope_layout="interleaved")


@pytest.mark.parametrize("keep", [None, ("kv_cache", "attn"), ("attn",), ("out",)], ids=["all", "rows", "attn", "out"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", STORES)
def test_an_honest_engine_passes_whatever_it_stores_its_rows_in(name, dtype, keep):
    keep = keep if keep is None or STORES[name][2] is not INDEXED else (*keep, "topk")
    verdict = judged(name, dtype, keep)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    ("name", "engine", "store", "first"),
    [
        ("bf16", Engine, None, "kv_cache"),
        ("bf16", InFp8, None, "kv_cache"),
        ("f32", InBf16, None, "kv_cache"),
        ("fp8", InBf16, None, "kv_cache"),
        ("fp8", None, Store(block_size=BLOCK, format="fp8_e4m3", scale=0.1), "kv_cache"),
        ("tiles", None, Store(block_size=BLOCK, format="fp8_ds_mla", writer="vllm"), "kv_cache"),
        ("tiles", InBf16, None, "kv_cache"),
    ],
)
def test_rows_that_are_stored_otherwise_are_told(name, engine, store, first):
    assert judged(name, engine=engine, store=store).first == first
    for keep in (("c_kv", "k_pe", "q_nope", "q_pe", "attn"), ("c_kv", "k_pe", "attn", "out")):
        assert judged(name, keep=keep).passed
        found = judged(name, engine=engine, store=store, keep=keep)
        assert found.first == "attn" or name in ("bf16", "f32"), found.reason


def test_rows_stored_in_bf16_do_not_tell_what_else_is():
    assert judged("bf16").conventions["held"] == judged("bf16", keep=("kv_cache", "attn")).conventions["held"] == "f32"


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_attention_is_that_of_the_rows_read_back(name, precision):
    engine, store, config = STORES[name]
    inputs, _ = inputs_of(engine, config, "f32")
    made, read, weights = layer(config)
    found = run(read, weights, inputs, form="paged", store=store, precision=precision)
    rows = Engine(config, made, "f64" if precision == "f64" else "f32")
    rows.append = lambda past, new: found["kv_cache"]
    past = {name: array for name, array in inputs.items() if name.startswith("past")}
    dump = rows(inputs["hidden_states"], inputs["positions"], past)
    assert np.abs(found["attn"] - dump["attn"]).max() < (1e-13 if precision == "f64" else 1e-5)
    assert np.array_equal(found["kv_cache"][:CACHED, : read.geometry.kv_lora_rank], inputs["past_c_kv"])


def test_rows_that_nobody_may_read_are_not_read():
    """One block more in the table, and blocks between those in use, change nothing."""
    inputs, _ = inputs_of(InBf16, CONFIG, "f32")
    _, read, weights = layer(CONFIG)
    found = run(read, weights, inputs, form="paged", store=BF16)
    dense = np.arange(12)
    other = run(read, weights, inputs | {"slot_mapping": dense[CACHED:], "block_table": np.array([[0, 1, 2]])},
                form="paged", store=BF16)  # fmt: skip
    assert all(np.array_equal(found[name], other[name]) for name in found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slot_mapping": np.array([*SLOTS[CACHED:-1], 3])},
         "slot_mapping[8] is 3, expected 127, where block_table has row 11"),
        ({"slot_mapping": SLOTS}, "slot_mapping is [12], expected [T] with T = 9 on axis 0"),
        ({"block_table": TABLE[:, :2]}, "block_table is [1, 2], expected [1, 3] or more: 12 rows"),
        ({"block_table": TABLE[0]}, "block_table has 1 axes [4], expected 2: [B, blocks]"),
        ({"block_table": np.array([[700, 700, 3]])}, "block_table[0, 1] is 700, as block_table[0, 0] is"),
        ({"block_table": np.array([[700, -1, 3]])}, "block_table[0, 1] is -1, expected 0 or more"),
        ({"block_table": TABLE.astype(np.float32)}, "block_table is f32, expected i64"),
    ],
)  # fmt: skip
def test_pages_that_contradict_are_told_in_one_line(changes, said):
    inputs, dump = inputs_of(InBf16, CONFIG, "f32")
    _, read, weights = layer(CONFIG)
    for call in (lambda x: run(read, weights, x, form="paged", store=BF16),
                 lambda x: check_stages(read, weights, x, dump, store=BF16)):  # fmt: skip
        with pytest.raises(InputError) as caught:
            call(inputs | changes)
        assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ({"block_size": 0}, "block_size is 0, expected an integer from 1 to"),
        ({}, "neither cache_dtype nor cache_format is given, expected cache_dtype or cache_format"),
        ({"dtype": "bf16", "format": "q8_0"}, "both are given, expected cache_dtype or cache_format"),
        ({"dtype": "bf16", "writer": "vllm"}, "cache_writer is 'vllm', expected none without cache_format"),
        ({"dtype": "e4m3"}, "cache_dtype is 'e4m3', expected f32 or bf16 or f16"),
        ({"format": "fp7"}, "cache_format is 'fp7', expected one of"),
        ({"format": "fp8_ds_mla", "writer": "nobody"}, "writer is 'nobody'"),
        ({"format": "fp8_e4m3", "scale": -1.0}, "kv_scale is -1"),
    ],
)
def test_a_store_that_is_none_is_told_in_one_line(store, said):
    with pytest.raises(InputError) as caught:
        Store(**{"block_size": 4} | store)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_sequences_have_blocks_of_their_own():
    inputs, _ = inputs_of(InBf16, CONFIG, "f32")
    _, read, weights = layer(CONFIG)
    alone = run(read, weights, inputs, form="paged", store=BF16)
    names = ("hidden_states", "positions", "past_c_kv", "past_k_pe")
    both = {name: np.concatenate([inputs[name]] * 2) for name in names}
    table = np.concatenate([TABLE, TABLE + 1000])
    both |= {"slot_mapping": np.concatenate([SLOTS[CACHED:], SLOTS[CACHED:] + 4000]), "block_table": table}
    both |= {"qo_indptr": np.array([0, 9, 18]), "past_indptr": np.array([0, 3, 6])}
    found = run(read, weights, both, form="paged", store=BF16)
    assert np.array_equal(found["out"], np.concatenate([alone["out"]] * 2))
    with pytest.raises(InputError, match=r"^block_table\[1, 0\] is 700, as block_table\[0, 0\] is: rows of two"):
        both["slot_mapping"] = np.concatenate([SLOTS[CACHED:]] * 2)
        run(read, weights, both | {"block_table": np.concatenate([TABLE] * 2)}, form="paged", store=BF16)
    with pytest.raises(InputError, match=r"^block_table is \[1, 4\], expected \[2, blocks\]: a row a sequence"):
        run(read, weights, both | {"block_table": TABLE}, form="paged", store=BF16)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = {f"model.layers.0.self_attn.{name}": w for name, w in random_weights(CONFIG).items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def call(capsys, *args):
    code = main([str(arg) for arg in args])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


def test_the_form_of_a_case_is_what_run_computes_in(folder, capsys):
    plain = {"hidden_states": random_states(CONFIG, TOKENS), "positions": np.arange(TOKENS)}
    paged = plain | {"slot_mapping": SLOTS[:TOKENS], "block_table": TABLE}
    forms = {
        "naive": (plain, {}), "absorbed": (plain, {}),
        "paged": (paged, {"block_size": 4, "cache_format": "fp8_e4m3", "kv_scale": 0.125}),
    }  # fmt: skip
    found = {}
    for form, (inputs, store) in forms.items():
        case, out = folder / f"{form}.safetensors", folder / f"{form}.out.safetensors"
        write_layer_case(case, inputs, config="config.json", weights="model.safetensors", form=form, **store)
        for precision in ("f64", "f32"):
            assert call(capsys, "run", case, "-o", out, "--precision", precision)[0] == 0
            code, told, said = call(capsys, "check", "--stages", case, out)
            assert (code, told["verdict"]) == (0, "pass"), said
        found[form] = read_tensors(out)[0]
    assert not np.array_equal(found["naive"]["attn"], found["absorbed"]["attn"])
    assert np.abs(found["naive"]["attn"] - found["absorbed"]["attn"]).max() < 1e-5
    assert np.abs(found["naive"]["attn"] - found["paged"]["attn"]).max() > 1e-3
    code, told, _ = call(capsys, "check", "--stages", folder / "paged.safetensors", folder / "naive.out.safetensors")
    assert (code, told["first"]) == (1, "kv_cache")
    code, told, said = call(capsys, "explain", folder / "paged.safetensors")
    assert code == 0 and {
        "cached rows are written by slot_mapping into pages of 4, as fp8_e4m3 by saturate, read by fold",
        "attention: the paged decode of absorbed queries over the rows that block_table says",
    } <= set(told["meaning"]), said


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"form": "paged"}, "metadata block_size is missing from the layer case, expected it with form paged"),
        ({"form": "paged", "block_size": 4}, "neither cache_dtype nor cache_format is given"),
        ({"cache_dtype": "bf16"}, "metadata cache_dtype is given, expected form paged with it"),
        ({"form": "sparse"}, "metadata form is 'sparse', expected naive or absorbed or paged"),
        ({"form": "paged", "block_size": 4, "cache_dtype": "bf16"}, "slot_mapping is missing, expected [T]"),
    ],
)
def test_a_form_without_its_pages_is_told_in_one_line(folder, capsys, metadata, said):
    inputs = {"hidden_states": random_states(CONFIG, TOKENS), "positions": np.arange(TOKENS)}
    case = folder / "case.safetensors"
    write_layer_case(case, inputs, config="config.json", weights="model.safetensors", **metadata)
    code, told, _ = call(capsys, "run", case)
    assert code == 2 and told["error"]["message"].startswith(said)
