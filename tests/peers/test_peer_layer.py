# SPDX-License-Identifier: Apache-2.0
"""Whole attention layers of Hugging Face transformers, stage by stage: a prefill, a decode step, three tokens at once.

Each layer runs in f64, f32 and bf16, its submodules hooked; every stage it stored is held to its budget, computed from
the stages before it. Its weights are read back from the file that its own package wrote.
"""

import numpy as np
import pytest
from hooked_mla import DEEPSEEK_SIZES, GLM_SIZES, YARN, YARN_AMPLIFIED, Layer
from safetensors.numpy import save_file
from staged_mla import INDEXED, POOLED, dump

from mla_oracle.files.tensorfile import write_tensors
from mla_oracle.layer import STAGES, LayerConfig, check_stages, check_weights, read_weights, run, stages_of

GLM_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}
LITE_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
REAL_INDEX = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 4}
LAYERS = [
    Layer("deepseek_v2"),
    Layer("deepseek_v2", "lite", {"rope_parameters": LITE_YARN, "q_lora_rank": None}),
    Layer("deepseek_v3"),
    Layer("deepseek_v3", "yarn", {"rope_parameters": YARN}),
    Layer("deepseek_v3", "yarn-neox", {"rope_parameters": YARN_AMPLIFIED, "rope_interleave": False}),
    Layer("deepseek_v3", "real", DEEPSEEK_SIZES | {"rope_parameters": YARN, "q_lora_rank": 256, "hidden_size": 320}),
    Layer("deepseek_v3", "biased", {"rope_parameters": YARN, "attention_bias": True}),
    Layer("deepseek_v2", "lite-biased", {"q_lora_rank": None, "attention_bias": True}),
    Layer("deepseek_v32", "indexed", INDEXED | {"rope_parameters": YARN}),
    Layer("deepseek_v32", "real-index", REAL_INDEX | DEEPSEEK_SIZES),
    Layer("glm4_moe_lite"),
    Layer("glm_moe_dsa", "indexed", INDEXED),
    Layer("glm_moe_dsa", "biased", INDEXED | {"attention_bias": True}),
    Layer("glm_moe_dsa", "real-index", REAL_INDEX | GLM_SIZES | GLM_ROPE),
    Layer("glm5_next_text", "pooled", INDEXED | POOLED),
    Layer("longcat_flash"),
    Layer("minicpm3"),
    Layer("mistral4"),
    Layer("youtu"),
    Layer("kimi_linear"),
]
# transformers has 1e-6 in the latent norms whatever rms_norm_eps is, but in glm5_next.
EPS = {"glm5_next_text": None}
# What no submodule of these layers returns.
UNSEEN = {"index_q", "index_keys", "index_scores", "q_lat", "scores", "lse", "o_lat"}
# A layer hands its scores on in its own dtype, and its softmax is in f32.
NUMERICS = "torch-eager"


def ours(layer, dtype, start=0, core="eager"):
    """What the layer dumped, and our side of it."""
    dumped = dump(layer, dtype=dtype, core=core, start=start)
    config = LayerConfig.from_hf_config(dumped.config, norm_eps=EPS.get(layer.model_type, 1e-6))
    weights = check_weights({name.removesuffix(".weight"): w for name, w in dumped.weights.items()}, config)
    return dumped, config, weights


@pytest.mark.parametrize("start", [0, 9000])
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_stage_is_within_its_budget(layer, dtype, start):
    dumped, config, weights = ours(layer, dtype, start)
    for call in dumped.calls:
        numerics = NUMERICS if dtype == "bf16" else None
        verdict = check_stages(config, weights, call.inputs, call.stages, numerics=numerics)
        assert verdict.passed, verdict.reason
        judged = {finding.stage for finding in verdict.stages}
        assert set(stages_of(config)) - judged <= UNSEEN


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_output_alone_is_within_its_budget(layer, dtype):
    dumped, config, weights = ours(layer, dtype)
    for call in dumped.calls:
        few = {name: call.stages[name] for name in ("out", "topk") if name in call.stages}
        parts = config.geometry.rope_interleave and layer.model_type != "deepseek_v2"
        how = {"held": dtype, "rope_layout": "neox" if parts else "interleaved"}
        verdict = check_stages(config, weights, call.inputs, few, **how)
        assert verdict.passed, verdict.reason


def in_a_row(parts, axes=None):
    """Arrays of several calls one after the other; columns are as many as the longest has."""
    if axes is not None and axes.split()[-1] in ("N", "k"):
        width = max(part.shape[-1] for part in parts)
        pads = [[(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])] for part in parts]
        parts = [np.pad(part, pad, constant_values=-1) for part, pad in zip(parts, pads, strict=True)]
    return np.concatenate(parts)


@pytest.mark.parametrize("layer", [LAYERS[3], LAYERS[8]], ids=str)
def test_calls_of_a_layer_are_sequences_of_one_case(layer):
    dumped, config, weights = ours(layer, "bf16")
    calls = dumped.calls
    past = [name for name in calls[1].inputs if name.startswith("past")]
    inputs = {name: in_a_row([call.inputs[name] for call in calls]) for name in ("hidden_states", "positions")}
    empty = {name: calls[1].inputs[name][:0] for name in past}
    rows = [empty | {name: call.inputs[name] for name in past if name in call.inputs} for call in calls]
    inputs |= {name: in_a_row([of[name] for of in rows]) for name in past}
    for name, counts in (
        ("qo_indptr", [len(call.inputs["positions"]) for call in calls]),
        ("past_indptr", [len(of["past_c_kv"]) for of in rows]),
    ):
        inputs[name] = np.concatenate([[0], np.cumsum(counts)])
    stages = {name: in_a_row([c.stages[name] for c in calls], STAGES[name].axes) for name in calls[0].stages}
    verdict = check_stages(config, weights, inputs, stages, numerics=NUMERICS)
    assert verdict.passed, verdict.reason
    turned = inputs["positions"].copy()
    turned[-1] += 1
    verdict = check_stages(config, weights, inputs | {"positions": turned}, stages, numerics=NUMERICS)
    assert (verdict.first, verdict.sequence, verdict.row) == ("q_pe", len(calls) - 1, len(turned) - 1)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_layer_from_hidden_states_to_output_is_the_models(layer):
    """No stage taken from the dump: f64 against f64, apart by the f32 that the model has in norms and angles."""
    dumped, config, weights = ours(layer, "f64")
    (prefill, *_) = dumped.calls
    found = run(config, weights, prefill.inputs)
    np.testing.assert_allclose(found["out"], prefill.stages["out"], rtol=2e-5, atol=2e-6)
    if "topk" in found:
        for t, row in enumerate(prefill.stages["topk"]):
            assert set(row[(row >= 0) & (row <= t)]) == set(found["topk"][t][found["topk"][t] >= 0])


@pytest.mark.parametrize(
    ("layer", "changes", "first"),
    [
        (Layer("deepseek_v3", "yarn", {"rope_parameters": YARN}), {"rope_parameters": None}, "q_pe"),
        (Layer("deepseek_v3"), {"rope_interleave": False}, "q_pe"),
        (Layer("deepseek_v3", "yarn", {"rope_parameters": YARN}), {"rope_parameters": YARN | {"factor": 32.0}}, "q_pe"),
        (Layer("longcat_flash"), {"model_type": "deepseek_v3"}, "c_kv"),
    ],
)
def test_a_config_that_is_not_the_models_is_told_at_the_stage_it_changes(layer, changes, first):
    dumped, _, weights = ours(layer, "f32")
    config = {key: value for key, value in (dumped.config | changes).items() if value is not None}
    for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        config.pop(key, None)
    read = LayerConfig.from_hf_config(config, norm_eps=1e-6)
    verdict = check_stages(read, weights, dumped.calls[0].inputs, dumped.calls[0].stages)
    assert verdict.first == first, verdict.reason


def test_weights_are_read_from_the_file_that_their_package_wrote(tmp_path):
    for layer, dtype in ((Layer("deepseek_v3"), "f32"), (Layer("deepseek_v32", "indexed", INDEXED), "bf16")):
        dumped, config, weights = ours(layer, dtype)
        held = {f"model.layers.0.self_attn.{name}": np.ascontiguousarray(w) for name, w in dumped.weights.items()}
        path = tmp_path / f"{layer}.safetensors"
        save = save_file if dtype == "f32" else lambda tensors, path: write_tensors(path, tensors, {})
        save(held, path)
        read = read_weights(path, config, 0)
        assert read.arrays.keys() == weights.arrays.keys()
        for name in weights.arrays:
            np.testing.assert_array_equal(read[name], weights[name])
