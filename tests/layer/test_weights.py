# SPDX-License-Identifier: Apache-2.0
"""Weights in safetensors files: one file, shards with an index, a folder, fp8 blocks, and bad ones."""

import json
import re
import sys

import ml_dtypes
import numpy as np
import pytest
from engine import BIASED, CONFIG, DIRECT, INDEXED, PLAIN, POOLED, random_weights
from safetensors.numpy import save_file

from mla_oracle import InputError, MissingError
from mla_oracle.files.tensorfile import read_tensors, write_tensors
from mla_oracle.layer import LayerConfig, check_weights, read_weights
from mla_oracle.layer.weights import MADE_OF, shapes

PREFIX = "model.layers.1.self_attn."


def named(config):
    return {PREFIX + name: w for name, w in random_weights(config).items()}


def others():
    return {"model.layers.1.mlp.up_proj.weight": np.zeros((3, 3)), "model.layers.11.self_attn.x": np.zeros(2)}


def same(read, config):
    weights = random_weights(config)
    for name, array in read.arrays.items():
        if name not in ("w_uk", "w_uv"):
            whole = weights[name] if name in weights else weights[f"{name}.weight"]
            np.testing.assert_array_equal(array, whole)
    both = weights["kv_b_proj.weight"].reshape(3, 16 + 12, 32)
    np.testing.assert_array_equal(read["w_uk"], both[:, :16])
    np.testing.assert_array_equal(read["w_uv"], both[:, 16:])


@pytest.mark.parametrize("config", [CONFIG, DIRECT, INDEXED, POOLED], ids=lambda c: c["model_type"])
def test_a_file_that_its_own_package_wrote_is_read(tmp_path, config):
    path = tmp_path / "model.safetensors"
    save_file(named(config) | others(), path)
    read = LayerConfig.from_hf_config(config, layer=1)
    same(read_weights(path, read, 1), config)
    same(read_weights(tmp_path, read, 1), config)


def test_shards_are_found_through_their_index(tmp_path):
    whole = named(CONFIG)
    names = sorted(whole)
    parts = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, held in parts.items():
        save_file({name: whole[name] for name in held} | (others() if held is not names[:4] else {}), tmp_path / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read = LayerConfig.from_hf_config(CONFIG, layer=1)
    same(read_weights(tmp_path, read, 1), CONFIG)
    same(read_weights(tmp_path / "model.safetensors.index.json", read, 1), CONFIG)
    index["weight_map"][names[0]] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-00002-of-00002.safetensors holds no model.layers.1.self_attn.kv_a"):
        read_weights(tmp_path, read, 1)
    index["weight_map"][names[0]] = "../x.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"weight_map has '../x.safetensors' for .*, expected the name of a file"):
        read_weights(tmp_path, read, 1)


def test_only_what_is_wanted_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(named(PLAIN) | others(), path)
    tensors, _ = read_tensors(path, wanted=lambda name: name.endswith("q_a_layernorm.weight"))
    assert list(tensors) == [f"{PREFIX}q_a_layernorm.weight"]
    expected = random_weights(PLAIN)["q_a_layernorm.weight"]
    np.testing.assert_array_equal(tensors[f"{PREFIX}q_a_layernorm.weight"], expected)


def test_biases_are_read_where_the_config_has_them(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(named(BIASED), path)
    found = read_weights(path, LayerConfig.from_hf_config(BIASED), 1)
    biases = {name for name in found.arrays if name.endswith("bias")}
    assert biases == {"q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"}
    np.testing.assert_array_equal(found["o_proj.bias"], random_weights(BIASED)["o_proj.bias"])
    with pytest.raises(InputError, match=r"proj.*.bias is \[\d+\], expected none: the config has no att"):
        read_weights(path, LayerConfig.from_hf_config(CONFIG), 1)


def test_a_prefix_may_be_given(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({f"attn.{name}": w for name, w in random_weights(PLAIN).items()}, path)
    read = LayerConfig.from_hf_config(PLAIN)
    same(read_weights(path, read, 0, prefix="attn."), PLAIN)
    with pytest.raises(InputError, match=r"holds no tensor model.layers.0.self_attn.\*"):
        read_weights(path, read, 0)


def test_bf16_and_f16_weights_keep_their_dtype(tmp_path):
    path = tmp_path / "model.safetensors"
    kinds = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
    for name, kind in kinds.items():
        write_tensors(path, {k: w.astype(kind) for k, w in named(PLAIN).items()}, {})
        found = read_weights(path, LayerConfig.from_hf_config(PLAIN), 1)
        assert set(found.dtypes().values()) == {name}


def test_fp8_weights_are_multiplied_by_the_scale_of_their_block(tmp_path):
    config = {**PLAIN, "hidden_size": 200, "q_lora_rank": 130}
    weights = random_weights(config)
    fp8 = weights["q_a_proj.weight"].astype(ml_dtypes.float8_e4m3fn)  # [130, 200]: 2 x 2 blocks
    scale = np.array([[1.0, 2.0], [0.5, 3.0]], np.float32)
    stored = {PREFIX + k: w for k, w in weights.items()} | {
        f"{PREFIX}q_a_proj.weight": fp8,
        f"{PREFIX}q_a_proj.weight_scale_inv": scale,
    }
    path = tmp_path / "model.safetensors"
    write_tensors(path, stored, {})
    read = LayerConfig.from_hf_config(config)
    found = read_weights(path, read, 1)["q_a_proj"]
    wide = fp8.astype(np.float32)
    np.testing.assert_array_equal(found[:128, :128], wide[:128, :128])
    np.testing.assert_array_equal(found[:128, 128:], wide[:128, 128:] * 2)
    np.testing.assert_array_equal(found[128:, :128], wide[128:, :128] / 2)
    np.testing.assert_array_equal(found[128:, 128:], wide[128:, 128:] * 3)
    write_tensors(path, stored | {f"{PREFIX}q_a_proj.weight_scale_inv": scale[:, :1].copy()}, {})
    with pytest.raises(InputError, match=r"weight_scale_inv is \[2, 1\], expected \[2, 2\]: a scale for each"):
        read_weights(path, read, 1)
    del stored[f"{PREFIX}q_a_proj.weight_scale_inv"]
    write_tensors(path, stored, {})
    with pytest.raises(InputError, match=r"q_a_proj.weight is e4m3 \[130, 200\] and .*weight_scale_inv is missing"):
        read_weights(path, read, 1)


def changed(config, **changes):
    weights = {name.removesuffix(".weight"): w for name, w in random_weights(config).items()}
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del weights[name]
        else:
            weights[name] = value(weights.get(name)) if callable(value) else value
    return weights


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (CONFIG, {"kv_b_proj": None}, "kv_b_proj is missing, expected [84, 32]"),
        (CONFIG, {"q_a_layernorm": None}, "q_a_layernorm is missing, expected [24]"),
        (CONFIG, {"q_a_proj.bias": np.zeros(24)}, "q_a_proj.bias is [24], expected none: the config has no"),
        (CONFIG, {"q_b_proj.bias": np.zeros(72)}, "q_b_proj.bias is [72], expected none: a layer of this config has q"),
        (BIASED, {"o_proj.bias": None}, "o_proj.bias is missing, expected [48]"),
        (BIASED, {"kv_a_proj_with_mqa.bias": np.zeros(32)}, "kv_a_proj_with_mqa.bias is [32], expected [40]"),
        (CONFIG, {"q_proj": np.zeros((72, 48))}, "q_proj is [72, 48], expected none"),
        (DIRECT, {"q_a_proj": np.zeros((24, 48))}, "q_a_proj is [24, 48], expected none"),
        (CONFIG, {"q_a_proj": lambda w: w.T}, "q_a_proj is [48, 24], expected [24, 48]: it is transposed"),
        (CONFIG, {"kv_b_proj": lambda w: w.T}, "kv_b_proj is [32, 84], expected [84, 32]: it is transposed"),
        (CONFIG, {"o_proj": lambda w: w.T}, "o_proj is [36, 48], expected [48, 36]: it is transposed"),
        (CONFIG, {"q_b_proj": lambda w: w[:48]}, "q_b_proj is [48, 24], expected [72, 24]: 2 heads where"),
        (CONFIG, {"o_proj": lambda w: w[:, :12]}, "o_proj is [48, 12], expected [48, 36]: 1 heads where"),
        (CONFIG, {"kv_b_proj": lambda w: w[:56]}, "kv_b_proj is [56, 32], expected [84, 32]: 2 heads where"),
        (CONFIG, {"q_b_proj": lambda w: w[:48].T}, "is [24, 48], expected [72, 24]: it is transposed, and of 2 heads"),
        (CONFIG, {"o_proj": lambda w: w[:, :24].T}, "is [24, 48], expected [48, 36]: it is transposed, and of 2 heads"),
        (
            CONFIG,
            {"kv_a_proj_with_mqa": lambda w: w[:39]},
            "kv_a_proj_with_mqa is [39, 48], expected [40, 48]: (kv_lora_rank + qk_rope_head_dim) x hidden_size of the",
        ),
        (CONFIG, {"kv_a_layernorm": np.ones(40)}, "kv_a_layernorm is [40], expected [32]: kv_lora_rank of the config"),
        (INDEXED, {"indexer.wk": np.zeros((8, 48))}, "wk is [8, 48], expected [16, 48]: index_head_dim x hidden_size"),
        (CONFIG, {"q_a_proj": np.zeros((24, 48), np.int8)}, "q_a_proj is i8, expected f32 or f16 or bf16 or f64"),
        (CONFIG, {"q_a_layernorm": np.array([1.0] * 23 + [np.nan])}, "q_a_layernorm[23] is nan, expected a number"),
        (INDEXED, {"indexer.wk": lambda w: w.T}, "indexer.wk is [48, 16], expected [16, 48]: it is transposed"),
        (INDEXED, {"indexer.k_norm.bias": None}, "indexer.k_norm.bias is missing, expected [16]"),
        (POOLED, {"indexer.index_kpool_compress_ape": np.zeros((4, 16))}, "compress_ape is [4, 16], expected [2, 16]"),
        (CONFIG, {"indexer.wk": np.zeros((16, 48))}, "indexer.wk is [16, 48], expected none"),
    ],
)
def test_weights_that_contradict_the_config_are_told_in_one_line(config, changes, said):
    with pytest.raises(InputError) as caught:
        check_weights(changed(config, **changes), LayerConfig.from_hf_config(config))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_files_own_name_is_told(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = named(CONFIG)
    weights[f"{PREFIX}q_a_proj.weight"] = np.ascontiguousarray(weights[f"{PREFIX}q_a_proj.weight"].T)
    save_file(weights, path)
    with pytest.raises(InputError) as caught:
        read_weights(path, LayerConfig.from_hf_config(CONFIG), 1)
    expected = "model.layers.1.self_attn.q_a_proj.weight is [48, 24], expected [24, 48]: it is transposed"
    assert str(caught.value) == expected
    del weights[f"{PREFIX}o_proj.weight"]
    weights[f"{PREFIX}q_a_proj.weight"] = np.ascontiguousarray(weights[f"{PREFIX}q_a_proj.weight"].T)
    save_file(weights | {f"{PREFIX}rotary_emb.inv_freq": np.zeros(4, np.float32)}, path)
    with pytest.raises(InputError, match=r"^model.layers.1.self_attn.o_proj.weight is missing, expected \[48, 36\]$"):
        read_weights(path, LayerConfig.from_hf_config(CONFIG), 1)


def test_a_gguf_file_without_its_package_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingError, match="a GGUF file needs the package gguf: pip install 'mla-oracle"):
        read_weights(tmp_path / "model.gguf", LayerConfig.from_hf_config(CONFIG), 0)


def test_files_that_are_none_are_told(tmp_path):
    read = LayerConfig.from_hf_config(CONFIG)
    with pytest.raises(InputError, match=r"holds neither model.safetensors.index.json nor model.safetensors"):
        read_weights(tmp_path, read, 0)
    with pytest.raises(InputError, match=r"cannot read .*none.safetensors: No such file"):
        read_weights(tmp_path / "none.safetensors", read, 0)
    path = tmp_path / "model.safetensors"
    save_file(named(CONFIG), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="the data has"):
        read_weights(path, read, 1)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(InputError, match="weight_map is 3, expected an object"):
        read_weights(tmp_path, read, 1)


@pytest.mark.parametrize("config", [CONFIG, DIRECT, INDEXED, POOLED], ids=["v3", "direct", "v3.2", "pooled"])
def test_what_a_weight_is_made_of_is_its_shape(config):
    sizes = config | {"num_attention_heads": 3}
    read = LayerConfig.from_hf_config(config)
    for name, shape in shapes(read).items():
        if name in MADE_OF:
            axes = [re.sub(r"([\w)]) ([\w(])", r"\1 * \2", axis) for axis in MADE_OF[name].split(" x ")]
            assert tuple(eval(axis, {}, sizes) for axis in axes) == shape, name
