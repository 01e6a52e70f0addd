# SPDX-License-Identifier: Apache-2.0
"""Weights in GGUF files that the package gguf wrote: names, transpositions, split or whole, quantised; bad files."""

import numpy as np
import pytest
from engine import BIASED, CONFIG, DIRECT, INDEXED, random_weights

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

from mla_oracle import InputError, UnsupportedError  # noqa: E402
from mla_oracle.layer import LayerConfig, read_weights  # noqa: E402

Kind = gguf.GGMLQuantizationType
NAMES = {
    "q_proj.weight": "attn_q.weight",
    "q_a_proj.weight": "attn_q_a.weight",
    "q_a_layernorm.weight": "attn_q_a_norm.weight",
    "q_b_proj.weight": "attn_q_b.weight",
    "kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "kv_b_proj.weight": "attn_kv_b.weight",
    "o_proj.weight": "attn_output.weight",
    "q_a_proj.bias": "attn_q_a.bias",
    "kv_a_proj_with_mqa.bias": "attn_kv_a_mqa.bias",
    "o_proj.bias": "attn_output.bias",
    "indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "indexer.wk.weight": "indexer.attn_k.weight",
    "indexer.k_norm.weight": "indexer.k_norm.weight",
    "indexer.k_norm.bias": "indexer.k_norm.bias",
    "indexer.weights_proj.weight": "indexer.proj.weight",
}


def tensors(config, split=True, layer=1):
    """As a converter writes them: kv_b in two, its key part transposed within each head."""
    weights = random_weights(config)
    found = {f"blk.{layer}.{NAMES[name]}": w for name, w in weights.items() if name != "kv_b_proj.weight" or not split}
    if split:
        both = weights["kv_b_proj.weight"].reshape(3, 16 + 12, 32)
        found[f"blk.{layer}.attn_k_b.weight"] = np.ascontiguousarray(both[:, :16].transpose(0, 2, 1))
        found[f"blk.{layer}.attn_v_b.weight"] = np.ascontiguousarray(both[:, 16:])
    found[f"blk.{layer}.attn_norm.weight"] = np.ones(48, np.float32)
    found[f"blk.{layer}.ffn_up.weight"] = np.ones((8, 48), np.float32)
    found[f"blk.{layer + 1}.attn_q.weight"] = np.ones((8, 48), np.float32)
    return found


def write(path, held, architecture="deepseek2", heads=3, kinds=None, facts=None):
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in (facts or {}).items():
        getattr(writer, add)(value)
    if heads is not None:
        writer.add_head_count(heads)
    for name, array in held.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(read, config):
    weights = random_weights(config)
    for name, array in read.arrays.items():
        if name not in ("w_uk", "w_uv"):
            np.testing.assert_array_equal(array, weights[name] if name in weights else weights[f"{name}.weight"])
    both = weights["kv_b_proj.weight"].reshape(3, 16 + 12, 32)
    np.testing.assert_array_equal(read["w_uk"], both[:, :16])
    np.testing.assert_array_equal(read["w_uv"], both[:, 16:])


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("config", [CONFIG, DIRECT, INDEXED, BIASED], ids=["v3", "direct", "v3.2", "biased"])
def test_a_file_that_its_own_package_wrote_is_read(tmp_path, config, split):
    architecture = "deepseek32" if config is INDEXED else "deepseek2"
    path = write(tmp_path / "model.gguf", tensors(config, split), architecture)
    same(read_weights(path, LayerConfig.from_hf_config(config), 1), config)


def test_axes_are_told_innermost_first_in_the_file(tmp_path):
    path = write(tmp_path / "model.gguf", tensors(CONFIG))
    shapes = {tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(path).tensors}
    assert shapes["blk.1.attn_k_b.weight"] == [16, 32, 3]  # {P, L, H}
    assert shapes["blk.1.attn_v_b.weight"] == [32, 12, 3]  # {L, V, H}
    assert shapes["blk.1.attn_q_a.weight"] == [48, 24]


def test_the_whole_beside_its_parts_must_be_alike(tmp_path):
    both = tensors(CONFIG) | {"blk.1.attn_kv_b.weight": random_weights(CONFIG)["kv_b_proj.weight"]}
    read = LayerConfig.from_hf_config(CONFIG)
    same(read_weights(write(tmp_path / "a.gguf", both), read, 1), CONFIG)
    both["blk.1.attn_v_b.weight"] = both["blk.1.attn_v_b.weight"] + 1
    with pytest.raises(InputError, match=r"attn_v_b.weight is \[3, 12, 32\] and not the part of blk.1.attn_kv_b"):
        read_weights(write(tmp_path / "b.gguf", both), read, 1)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.BF16, Kind.F16], ids=lambda kind: kind.name)
def test_quantised_weights_are_what_the_package_dequantises(tmp_path, kind):
    held = tensors(CONFIG, split=False)
    name = "blk.1.attn_kv_b.weight"
    path = write(tmp_path / "model.gguf", held, kinds={name: kind})
    read = read_weights(path, LayerConfig.from_hf_config(CONFIG), 1)
    expected = gguf.dequantize(gguf.quantize(held[name], kind), kind).reshape(3, 28, 32)
    np.testing.assert_array_equal(read["w_uk"], expected[:, :16])
    assert np.any(expected != held[name].reshape(3, 28, 32))
    assert read["w_uk"].dtype == (np.float16 if kind == Kind.F16 else np.float32)


def test_f16_tensors_stay_f16(tmp_path):
    held = {name: w.astype(np.float16) if w.ndim > 1 else w for name, w in tensors(CONFIG).items()}
    read = read_weights(write(tmp_path / "model.gguf", held), LayerConfig.from_hf_config(CONFIG), 1)
    assert read.dtypes()["q_a_proj"] == "f16" and read.dtypes()["q_a_layernorm"] == "f32"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attn_q_a.weight": None}, "blk.1.attn_q_a.weight is missing, expected [24, 48]"),
        ({"attn_k_b.weight": None}, "blk.1.attn_k_b.weight is missing, expected [3, 32, 16]"),
        ({"attn_v_b.weight": None}, "blk.1.attn_v_b.weight is missing, expected [3, 12, 32]"),
        ({"attn_q_a.bias": np.zeros(24, np.float32)}, "attn_q_a.bias is [24], expected none: the config has no"),
        ({"attn_sinks.weight": np.zeros(3, np.float32)}, "blk.1.attn_sinks.weight is [3], expected none"),
        (
            {"attn_k_b.weight": lambda w: w.transpose(0, 2, 1)},
            "blk.1.attn_k_b.weight is [3, 16, 32], expected [3, 32, 16]: it is transposed within each head",
        ),
        (
            {"attn_v_b.weight": lambda w: w.transpose(0, 2, 1)},
            "blk.1.attn_v_b.weight is [3, 32, 12], expected [3, 12, 32]: it is transposed within each head",
        ),
        ({"attn_k_b.weight": lambda w: w[:2]}, "is [2, 32, 16], expected [3, 32, 16]: 2 heads where the config has 3"),
        ({"attn_q_b.weight": lambda w: w.T}, "blk.1.attn_q_b.weight is [24, 72], expected [72, 24]: it is transposed"),
    ],
)
def test_weights_that_contradict_the_config_are_told_in_one_line(tmp_path, change, said):
    held = tensors(CONFIG)
    for name, value in change.items():
        name = f"blk.1.{name}"
        if value is None:
            del held[name]
        else:
            held[name] = np.ascontiguousarray(value(held[name])) if callable(value) else value
    with pytest.raises(InputError) as caught:
        read_weights(write(tmp_path / "model.gguf", held), LayerConfig.from_hf_config(CONFIG), 1)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_files_metadata_may_contradict_the_config(tmp_path):
    read = LayerConfig.from_hf_config(CONFIG)
    path = write(tmp_path / "a.gguf", tensors(CONFIG), heads=4)
    with pytest.raises(InputError, match=r"^deepseek2.attention.head_count is 4, expected 3: the config's num_heads$"):
        read_weights(path, read, 1)
    path = write(tmp_path / "b.gguf", tensors(CONFIG), "llama")
    with pytest.raises(UnsupportedError, match=r"general.architecture is 'llama', expected deepseek2"):
        read_weights(path, read, 1)
    path = write(tmp_path / "c.gguf", tensors(CONFIG))
    with pytest.raises(InputError, match=r"holds no tensor blk.0.attn_\*, expected a layer's weights"):
        read_weights(path, read, 0)
    with pytest.raises(InputError, match="prefix is 'x', expected none for a GGUF file"):
        read_weights(path, read, 1, prefix="x")


@pytest.mark.parametrize(
    ("say", "told"),
    [
        ({"add_q_lora_rank": 25}, "attention.q_lora_rank is 25, expected 24: the config's q_lora_rank"),
        ({"add_kv_lora_rank": 33}, "attention.kv_lora_rank is 33, expected 32: the config's kv_lora_rank"),
        ({"add_key_length_mla": 25}, "attention.key_length_mla is 25, expected 24: the config's qk_head_dim"),
        ({"add_value_length_mla": 13}, "attention.value_length_mla is 13, expected 12: the config's v_head_dim"),
        ({"add_rope_dimension_count": 4}, "rope.dimension_count is 4, expected 8: the config's qk_rope_head_dim"),
        ({"add_rope_freq_base": 5e5}, "rope.freq_base is 500000, expected 10000: the config's rope_theta"),
        ({"add_layer_norm_rms_eps": 1e-5},
         "attention.layer_norm_rms_epsilon is 1e-05, expected 1e-06: the config's rms_norm_eps"),
        ({"add_rope_scaling_factor": 32.0}, "rope.scaling.factor is 32, expected 40: the config's factor of YaRN"),
    ],
)  # fmt: skip
def test_what_a_converter_writes_of_the_layer_must_be_the_configs(tmp_path, say, told):
    read = LayerConfig.from_hf_config(CONFIG)
    right = {"add_q_lora_rank": 24, "add_kv_lora_rank": 32, "add_key_length_mla": 24, "add_value_length_mla": 12,
             "add_rope_dimension_count": 8, "add_rope_freq_base": 1e4, "add_rope_scaling_factor": 40.0,
             "add_layer_norm_rms_eps": 1e-6}  # fmt: skip
    same(read_weights(write(tmp_path / "a.gguf", tensors(CONFIG), facts=right), read, 1), CONFIG)
    with pytest.raises(InputError, match=f"^deepseek2.{told}$"):
        read_weights(write(tmp_path / "b.gguf", tensors(CONFIG), facts=right | say), read, 1)
    other = LayerConfig.from_hf_config(CONFIG, norm_eps=1e-5)  # as an engine has it, whatever the files say
    same(read_weights(tmp_path / "a.gguf", other, 1), CONFIG)


def test_a_file_cut_in_its_data_is_told_with_the_tensor_it_lacks_and_both_sizes(tmp_path):
    path = write(tmp_path / "model.gguf", {"blk.1.attn_q.weight": np.ones((6, 32), np.float32)})
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(InputError) as caught:
        read_weights(path, LayerConfig.from_hf_config(DIRECT), 1)
    begin = len(data) - 6 * 32 * 4
    assert str(caught.value) == (
        f"{path}: blk.1.attn_q.weight [6, 32] is 768 bytes from byte {begin} on, and the file has 668 of them: it is"
        " truncated"
    )


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (0, "has 0 bytes, expected a GGUF file's 24 or more"),
        (23, "has 23 bytes, expected a GGUF file's 24 or more"),
        (30, "has 30 bytes, and metadata 1 of 2 needs 32 or more: it is truncated"),
        (64, "has 64 bytes, and metadata 1 of 2 needs 73 or more: it is truncated"),
        (80, "has 80 bytes, and metadata 2 of 2 (general.architecture is before it) needs 81 or more: it is"
         " truncated"),
        (120, "has 120 bytes, and the entry of tensor 1 of 11 needs 127 or more: it is truncated"),
        (200, "has 200 bytes, and the entry of tensor 2 of 11 (blk.1.attn_q_a.weight is before it) needs 214 or more:"
         " it is truncated"),
        (500, "has 500 bytes, and the entry of tensor 7 of 11 (blk.1.attn_output.weight is before it) needs 517 or"
         " more: it is truncated"),
    ],
)  # fmt: skip
def test_a_file_cut_in_its_header_is_told_with_what_it_lacks_and_its_size(tmp_path, length, said):
    path = write(tmp_path / "model.gguf", tensors(CONFIG))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(InputError) as caught:
        read_weights(path, LayerConfig.from_hf_config(CONFIG), 1)
    assert str(caught.value) == f"{path} {said}"


def test_a_file_cut_anywhere_is_told(tmp_path):
    path = write(tmp_path / "model.gguf", tensors(CONFIG))
    data, read = path.read_bytes(), LayerConfig.from_hf_config(CONFIG)
    for length in range(0, 1200, 7):
        path.write_bytes(data[:length])
        with pytest.raises(InputError, match=r"truncated$|or more$"):
            read_weights(path, read, 1)


def test_a_damaged_header_is_told_or_changes_nothing_that_is_read(tmp_path):
    path = write(tmp_path / "model.gguf", tensors(CONFIG))
    data = path.read_bytes()
    read = LayerConfig.from_hf_config(CONFIG)
    rng = np.random.default_rng(1)
    told = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.integers(1400)] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            read_weights(path, read, 1)
        except (InputError, UnsupportedError) as error:
            assert "\n" not in str(error)
            told += 1
    assert told > 100


def test_a_file_that_is_none_is_told(tmp_path):
    read = LayerConfig.from_hf_config(CONFIG)
    with pytest.raises(InputError, match=r"cannot read .*none.gguf: No such file"):
        read_weights(tmp_path / "none.gguf", read, 0)
    (tmp_path / "x.gguf").write_bytes(b"not a GGUF file, whatever it is called" * 3)
    with pytest.raises(InputError, match="is not a whole GGUF file: GGUF magic invalid"):
        read_weights(tmp_path / "x.gguf", read, 0)
