# SPDX-License-Identifier: Apache-2.0
"""The stages of a layer by closed forms: identity projections, norms of constants, quarter turns, flat softmax."""

import dataclasses
import math
import re

import numpy as np
import pytest
from engine import CONFIG, DIRECT, GLM, INDEXED, LONGCAT, PLAIN, POOLED, Engine, random_states, random_weights

from mla_oracle import Geometry, InputError, UnsupportedError, attend_absorbed, rope_interleaved, rope_neox
from mla_oracle.geometry.presets import PRESETS
from mla_oracle.layer import STAGES, LayerConfig, LongRope, check_weights, run, stages, stages_of
from mla_oracle.layer.state import prepare
from mla_oracle.layer.weights import shapes

H, P, R, V, L, Q, C = 3, 16, 8, 12, 32, 24, 48


def eye(rows, columns):
    return np.eye(rows, columns, dtype=np.float64)


def identity_weights(config=PLAIN):
    """Every projection hands its first elements on; norms have weight 1."""
    return {
        "q_a_proj": eye(Q, C),
        "q_a_layernorm": np.ones(Q),
        "q_b_proj": eye(H * (P + R), Q),
        "kv_a_proj_with_mqa": eye(L + R, C),
        "kv_a_layernorm": np.ones(L),
        "kv_b_proj": eye(H * (P + V), L),
        "o_proj": eye(C, H * V),
    }


def run_with(weights, states, config=PLAIN, positions=None, **how):
    read = LayerConfig.from_hf_config(config)
    positions = np.arange(len(states)) if positions is None else positions
    return run(read, check_weights(weights, read), {"hidden_states": states, "positions": positions}, **how)


def test_identity_projections_hand_on_what_they_get():
    x = np.arange(2.0 * C).reshape(2, C)
    found = run_with(identity_weights(), x)
    np.testing.assert_array_equal(found["q_a"], x[:, :Q])
    np.testing.assert_array_equal(found["kv_a"], x[:, : L + R])
    np.testing.assert_array_equal(found["q"].reshape(2, -1)[:, :Q], found["q_a_norm"])
    np.testing.assert_array_equal(found["q"].reshape(2, -1)[:, Q:], 0)


def test_the_norm_of_a_constant_row_is_its_sign_less_what_eps_takes():
    x = np.ones((3, C)) * np.array([2.0, -0.5, 1e-3])[:, None]
    found = run_with(identity_weights(), x)
    expected = np.array([2 / math.sqrt(4 + 1e-6), -0.5 / math.sqrt(0.25 + 1e-6), 1e-3 / math.sqrt(1e-6 + 1e-6)])
    np.testing.assert_allclose(found["kv_a_norm"], np.broadcast_to(expected[:, None], (3, L)), rtol=1e-15)
    np.testing.assert_allclose(found["q_a_norm"], np.broadcast_to(expected[:, None], (3, Q)), rtol=1e-15)


def test_norm_weights_multiply_and_rope_rows_are_not_normed():
    weights = identity_weights()
    weights["kv_a_layernorm"] = np.arange(1.0, L + 1)
    found = run_with(weights, np.full((1, C), 4.0))
    np.testing.assert_allclose(found["c_kv"][0], np.arange(1.0, L + 1) * 4 / math.sqrt(16 + 1e-6), rtol=1e-15)
    np.testing.assert_array_equal(found["k_pe"][0], 4.0)  # position 0


def test_a_first_pair_turns_by_its_position_in_radians():
    found = run_with(identity_weights(), np.ones((2, C)), positions=np.array([0, 3]))
    row = found["k_pe"][1]
    np.testing.assert_allclose(row[:2], [math.cos(3) - math.sin(3), math.sin(3) + math.cos(3)], rtol=1e-14)


def test_queries_of_zero_attend_to_the_mean_of_what_they_see():
    weights = {name: w * (0 if name == "q_b_proj" else 1) for name, w in identity_weights().items()}
    states = random_states(PLAIN, 5)
    found = run_with(weights, states)
    for t in range(5):
        mean = found["v"][: t + 1].mean(axis=0)  # [H, V]
        np.testing.assert_allclose(found["attn"][t], mean, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(found["lse"], np.log(np.arange(1, 6))[:, None] * np.ones(H), atol=1e-14)
    np.testing.assert_allclose(found["p"][4], 1 / 5, rtol=1e-14)
    np.testing.assert_array_equal(np.isneginf(found["scores"][1, :, 2:]), True)


def test_one_token_attends_to_its_own_value():
    found = run_with(identity_weights(), np.ones((1, C)))
    np.testing.assert_allclose(found["attn"], found["v"], rtol=1e-15)
    np.testing.assert_allclose(found["out"][0, : H * V], found["attn"].ravel(), rtol=1e-15)


def test_heads_of_kv_b_are_keys_then_values_one_head_after_the_other():
    weights = identity_weights()
    weights["kv_b_proj"] = np.repeat(np.arange(H * (P + V), dtype=float)[:, None], L, axis=1)
    checked = check_weights(weights, LayerConfig.from_hf_config(PLAIN))
    np.testing.assert_array_equal(checked["w_uk"][1, :, 0], np.arange(P + V, P + V + P))
    np.testing.assert_array_equal(checked["w_uv"][1, :, 0], np.arange(P + V + P, 2 * (P + V)))


def test_longcat_scales_queries_and_cached_latents():
    found = run_with(identity_weights(), np.full((1, C), 2.0), LONGCAT)
    np.testing.assert_allclose(found["c_kv"], found["kv_a_norm"] * math.sqrt(48 / 32), rtol=1e-15)
    np.testing.assert_allclose(found["q_nope"], found["q"][..., :P] * math.sqrt(48 / 24), rtol=1e-15)
    np.testing.assert_allclose(found["q_pe"], found["q"][..., P:] * math.sqrt(48 / 24), rtol=1e-15)
    np.testing.assert_array_equal(found["k_pe"], found["kv_a"][:, L:])


def test_mistral_multiplies_far_queries():
    rope = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1}
    config = {**PLAIN, "model_type": "mistral4", "rope_scaling": rope | {"mscale": 1, "mscale_all_dim": 1}}
    found = run_with(identity_weights(), np.ones((2, C)), config, positions=np.array([8191, 3 * 8192]))
    np.testing.assert_allclose(found["q_nope"][0], found["q"][0, :, :P], rtol=1e-15)
    np.testing.assert_allclose(found["q_nope"][1], found["q"][1, :, :P] * (1 + 0.1 * math.log(4)), rtol=1e-15)


def test_longrope_takes_the_long_table_beyond_the_original_context():
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [2.0, 2.0, 2.0, 2.0],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    config = {**PLAIN, "model_type": "minicpm3", "rope_scaling": rope, "v_head_dim": V}
    amplitude = math.sqrt(1 + math.log(4) / math.log(64))
    for last, factor in ((63, 1.0), (64, 2.0)):
        found = run_with(identity_weights(), np.ones((1, C)), config, positions=np.array([last]))
        theta = last / factor * 10000.0 ** (-np.arange(4) / 4)
        expected = amplitude * np.concatenate([np.cos(theta) - np.sin(theta), np.sin(theta) + np.cos(theta)])
        np.testing.assert_allclose(found["k_pe"][0], expected, rtol=1e-12)


@pytest.mark.parametrize("angles", ["recurrence", "power", "closed", "table"])
@pytest.mark.parametrize("interleave", [True, False])
def test_rope_is_the_public_forms_in_every_angle_mode(angles, interleave):
    weights = {name.removesuffix(".weight"): w for name, w in random_weights(CONFIG).items()}
    config = {**CONFIG, "rope_interleave": interleave}
    positions = np.arange(5) + 70_000
    found = run_with(weights, random_states(CONFIG, 5), config, positions=positions, precision="f32", angles=angles)
    turn = rope_interleaved if interleave else rope_neox
    how = {"base": 1e4, "yarn": LayerConfig.from_hf_config(config).geometry.yarn, "angles": angles}
    np.testing.assert_array_equal(found["q_pe"], turn(found["q"][..., P:], positions, **how))
    np.testing.assert_array_equal(found["k_pe"], turn(found["kv_a"][:, L:], positions, **how))


@pytest.mark.parametrize("config", [CONFIG, PLAIN, DIRECT, LONGCAT, INDEXED, GLM, POOLED])
def test_every_stage_is_that_of_an_engine_that_shares_no_code(config):
    weights = random_weights(config)
    states = random_states(config, 9)
    given = {name.removesuffix(".weight"): w for name, w in weights.items()}
    found = run_with(given, states, config)
    for naive in (True, False):
        theirs = Engine(config, weights, "f64", naive)(states, np.arange(9))
        assert len(theirs) > 12
        for name, stage in theirs.items():
            if name == "topk":
                np.testing.assert_array_equal(found[name][:, : stage.shape[1]], stage[:, : found[name].shape[1]])
            else:
                np.testing.assert_allclose(found[name], stage, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("config", [CONFIG, DIRECT, LONGCAT, INDEXED, POOLED], ids=lambda c: c["model_type"])
def test_tokens_one_by_one_over_the_cache_are_tokens_at_once(config):
    weights = {name.removesuffix(".weight"): w for name, w in random_weights(config).items()}
    read = LayerConfig.from_hf_config(config)
    checked = check_weights(weights, read)
    states = random_states(config, 8)
    whole = run(read, checked, {"hidden_states": states, "positions": np.arange(8)})
    past = {}
    for t in range(8):
        step = run(read, checked, {"hidden_states": states[t : t + 1], "positions": np.array([t]), **past})
        np.testing.assert_allclose(step["out"], whole["out"][t : t + 1], rtol=1e-11, atol=1e-13)
        past = {"past_c_kv": step["kv_cache"][:, :L], "past_k_pe": step["kv_cache"][:, L:]}
        if "index_k" in whole:
            past["past_index_k"] = whole["index_k"][: t + 1]
        if "index_gate" in whole:
            past["past_index_gate"] = whole["index_gate"][: t + 1]


def test_f32_is_near_f64_and_both_forms_agree():
    weights = {name.removesuffix(".weight"): w for name, w in random_weights(CONFIG).items()}
    states = random_states(CONFIG, 6)
    truth = run_with(weights, states, CONFIG)
    for form in ("naive", "absorbed"):
        found = run_with(weights, states, CONFIG, precision="f32", form=form)
        for name in STAGES:
            if name in found:
                assert found[name].dtype == np.float32
                finite = np.isfinite(truth[name])
                size = np.abs(truth[name][finite]).max()
                np.testing.assert_allclose(found[name][finite], truth[name][finite], atol=4e-6 * size, err_msg=name)
    read = LayerConfig.from_hf_config(CONFIG)
    checked = check_weights(weights, read)
    found = run_with(weights, states, CONFIG, precision="f32", form="absorbed", backend="strict")
    parts = found["q_nope"], found["q_pe"], found["c_kv"], found["k_pe"], checked["w_uk"], checked["w_uv"]
    np.testing.assert_array_equal(found["attn"], attend_absorbed(read.geometry, *parts, backend="strict"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_layer_of_every_preset_from_its_geometry(name):
    sizes = {"num_heads": 2, "hidden_size": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 4}
    preset = Geometry.preset(name)
    rank = None if preset.q_lora_rank is None else 12
    rope = min(preset.qk_rope_head_dim, 8)
    geometry = dataclasses.replace(preset, **sizes, q_lora_rank=rank, qk_rope_head_dim=rope)
    tables = {"short": np.ones(4), "long": np.ones(4), "original_max_position_embeddings": 64, "amplitude": 1.0}
    longrope = LongRope(base=1e4, **tables) if preset.longrope else None
    config = LayerConfig(geometry=geometry, norm_eps=1e-6, longrope=longrope)
    rng = np.random.default_rng(0)
    weights = {key: rng.standard_normal(shape) for key, shape in shapes(config).items()}
    inputs = {"hidden_states": rng.standard_normal((3, 24)), "positions": np.array([1, 2, 5])}
    found = run(config, check_weights(weights, config), inputs)
    assert found["out"].shape == (3, 24) and np.isfinite(found["out"]).all()
    assert set(found) == set(stages_of(config))


def test_the_docstring_lists_every_stage_with_its_axes():
    for name, stage in STAGES.items():
        assert re.search(rf"\b{name} \[{re.escape(', '.join(stage.axes.split()))}\]", stages.__doc__), name


def test_stages_are_those_the_config_has():
    assert "q_a" not in stages_of(LayerConfig.from_hf_config(DIRECT))
    assert "index_gate" in stages_of(LayerConfig.from_hf_config(POOLED))
    shared = LayerConfig.from_hf_config({**GLM, "indexer_types": ["full", "shared"]}, layer=1)
    assert "index_q" not in stages_of(shared) and shared.indexer.shared


def test_norm_eps_is_the_files_unless_it_is_given():
    config = {**PLAIN, "rms_norm_eps": 1e-5}
    assert LayerConfig.from_hf_config(config).norm_eps == 1e-5
    assert LayerConfig.from_hf_config(config, norm_eps=1e-6).norm_eps == 1e-6
    del config["rms_norm_eps"]
    with pytest.raises(InputError, match="rms_norm_eps is missing"):
        LayerConfig.from_hf_config(config)


@pytest.mark.parametrize(
    ("config", "layer", "kind", "said"),
    [
        ({**PLAIN, "model_type": "llama"}, 0, UnsupportedError, "model_type is 'llama', expected deepseek_v2"),
        ({**PLAIN, "attention_bias": 1}, 0, InputError, "attention_bias is 1, expected true or false"),
        (PLAIN, 2, InputError, "layer is 2, expected below num_hidden_layers, 2"),
        (PLAIN, -1, InputError, "layer is -1, expected an integer from 0"),
        ({**GLM, "indexer_types": ["full", "some"]}, 1, InputError, "indexer_types[1] is 'some', expected full or"),
        ({**GLM, "indexer_types": ["full"]}, 1, InputError, "indexer_types is a list, expected one entry a layer"),
        ({**POOLED, "index_kpool": 3}, 0, InputError, "index_kpool is 3, expected a divisor of top-k, 4"),
        ({**POOLED, "index_kpool_always_select_tail": False}, 0, UnsupportedError, "tail is False, expected True"),
        ({k: v for k, v in GLM.items() if k != "index_topk"}, 0, InputError, "index_topk is missing"),
        ({**INDEXED, "q_lora_rank": None}, 0, InputError, "q_lora_rank is None, expected an integer with an indexer"),
    ],
)
def test_a_config_that_is_none_is_told_in_one_line(config, layer, kind, said):
    with pytest.raises(kind) as caught:
        LayerConfig.from_hf_config(config, layer)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_states": None}, "hidden_states is missing, expected [T, C]"),
        ({"positions": None}, "positions is missing, expected [T]"),
        ({"hidden_states": np.zeros((4, 47))}, "hidden_states is [4, 47], expected [T, C] with C = 48 on axis 1"),
        ({"hidden_states": np.zeros((0, 48)), "positions": np.arange(0)}, "hidden_states has 0 tokens"),
        ({"hidden_states": np.full((4, C), np.nan)}, "hidden_states[0, 0] is nan, expected a number"),
        ({"past_c_kv": np.zeros((2, L)), "past_k_pe": np.full((2, R), np.inf)}, "past_k_pe[0, 0] is inf"),
        ({"positions": np.arange(3)}, "positions is [3], expected [T] with T = 4"),
        ({"positions": np.zeros(4)}, "positions is f64, expected i64"),
        ({"past_c_kv": np.zeros((2, L))}, "past_k_pe is missing, expected 2 rows, as past_c_kv has"),
        ({"topk": np.zeros((4, 2), np.int64)}, "topk is given, expected hidden_states, positions"),
    ],
)
def test_inputs_that_do_not_fit_are_told_in_one_line(change, said):
    inputs = {"hidden_states": np.zeros((4, C)), "positions": np.arange(4)} | change
    read = LayerConfig.from_hf_config(PLAIN)
    with pytest.raises(InputError) as caught:
        prepare(read, check_weights(identity_weights(), read), {k: v for k, v in inputs.items() if v is not None})
    assert said in str(caught.value) and "\n" not in str(caught.value)
