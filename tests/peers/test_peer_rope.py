# SPDX-License-Identifier: Apache-2.0
"""Rope against the rotary embeddings of Hugging Face transformers, as its MLA layers apply them.

transformers computes the angles in f32 whatever the model's dtype is, and in the order this package calls closed:
position * base^(-2j/n). So in f64 the layers are off by that; the bound counts it from the exact angles.

Its interleaved rope writes the rotated row de-interleaved (DeepSeek-V2's does not): `to_neox` of ours. Queries and
keys are permuted alike, so their dot products agree as they are.
"""

import numpy as np
import pytest
from hooked_mla import DEEPSEEK_SIZES, FAMILIES, GLM_SIZES, YARN, YARN_AMPLIFIED, Layer, record
from peer_bounds import UNIT

from mla_oracle.rope import ANGLES, rope_interleaved, rope_neox, to_neox

NOPE = ("kimi_linear", "glm5_next_text")
LAYERS = [
    *(Layer(family) for family in FAMILIES if family not in NOPE),
    Layer("deepseek_v2", "yarn", DEEPSEEK_SIZES | {"rope_parameters": YARN}),
    Layer("deepseek_v3", "interleaved", DEEPSEEK_SIZES),
    Layer("deepseek_v3", "neox", DEEPSEEK_SIZES | {"rope_interleave": False}),
    Layer("deepseek_v3", "yarn", DEEPSEEK_SIZES | {"rope_parameters": YARN}),
    Layer("deepseek_v3", "amplitude", DEEPSEEK_SIZES | {"rope_parameters": YARN_AMPLIFIED}),
    Layer("deepseek_v3", "yarn-neox", DEEPSEEK_SIZES | {"rope_parameters": YARN, "rope_interleave": False}),
    Layer("glm_moe_dsa", "real", GLM_SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}),
]


@pytest.mark.parametrize("start", [0, 100_000])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_rotated_queries_and_keys_are_the_layers(layer, dtype, start):
    run = record(layer, dtype=dtype, core="sdpa", start=start)
    for step in run.steps:
        for precision in {dtype, "f64"}:
            q_pe, q_bound = rotated(run, step.q_pe_before * run.geometry.mla_scale_q_lora, step, precision)
            k_pe, k_bound = rotated(run, step.k_pe_before[:, None], step, precision)
            scale = long_context_scale(run.geometry, step.positions)
            q_pe, q_bound = q_pe * scale, q_bound * scale
            seen = step.k_pe[-len(step.positions) :, None]  # [t_q, 1, R]
            assert np.all(np.abs(layout(run, q_pe) - step.q_pe) <= layout(run, q_bound))
            assert np.all(np.abs(layout(run, k_pe) - seen) <= layout(run, k_bound))

            # [t_q, H, R] with [t_q, 1, R]
            ours, theirs = dots(q_pe, k_pe), dots(step.q_pe, seen)
            sizes = dots(np.abs(q_pe), k_bound) + dots(q_bound, np.abs(k_pe)) + dots(q_bound, k_bound)
            sums = 4 * UNIT[dtype] * dots(np.abs(q_pe), np.abs(k_pe))
            assert np.all(np.abs(ours - theirs) <= sizes + sums)


@pytest.mark.parametrize("family", NOPE)
def test_layers_without_rope_rotate_nothing(family):
    run = record(Layer(family), dtype="f32", core="sdpa")
    assert run.geometry.rope_theta is None
    for step in run.steps:
        assert step.q_pe.shape[-1] == run.geometry.qk_rope_head_dim
        np.testing.assert_array_equal(step.q_pe, step.q_pe_before)
        np.testing.assert_array_equal(step.k_pe[-len(step.positions) :], step.k_pe_before)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer.name != "small"], ids=str)
def test_closed_is_the_angle_mode_nearest_to_the_layers(layer):
    run = record(layer, dtype="f32", core="sdpa", start=100_000)
    (step, *_) = run.steps
    distance = {
        angles: np.abs(layout(run, rope(run, step.q_pe_before, step, "f32", angles)) - step.q_pe).max()
        for angles in ANGLES
    }
    assert min(distance, key=distance.get) == "closed"


def rope(run, x, step, precision, angles="closed"):
    """x [t_q, H, R] rotated by our function, in its own layout."""
    rotate = rope_interleaved if run.geometry.rope_interleave else rope_neox
    conventions = {"base": run.geometry.rope_theta, "yarn": run.geometry.yarn}
    return rotate(x, step.positions, angles=angles, precision=precision, **conventions)


def rotated(run, x, step, precision):
    """x rotated, and how far the layer may be from that, both [t_q, H, R].

    The layer's angle is off by 10 units of the angle YaRN starts from: 4 for the power, its reciprocal and the
    product with the position, 6 more for YaRN's ramp and blend; the first angle is the position itself. Cosine,
    sine, products and sum add 8 units of the pair. YaRN's amplitude, below 1.2 here, makes that 12 and 10. Ours in
    f32 may be off by as much again.
    """
    pairs = x.shape[-1] // 2
    theta = np.abs(step.positions)[:, None] * run.geometry.rope_theta ** (-np.arange(pairs) / pairs)  # [t_q, R/2]
    theta[:, 0] = 0
    out = rope(run, x, step, precision)
    unit = UNIT["f32"] * (12 * theta + 10) * (2 if precision == "f32" else 1)  # [t_q, R/2]
    if run.geometry.rope_interleave:
        size = np.abs(x[..., 0::2]) + np.abs(x[..., 1::2])
        return out, np.repeat(size * unit[:, None], 2, axis=-1)
    size = np.abs(x[..., :pairs]) + np.abs(x[..., pairs:])
    return out, np.concatenate([size * unit[:, None]] * 2, axis=-1)


def layout(run, x):
    """x, in our layout, as the layer writes it."""
    permutes = run.geometry.rope_interleave and run.config["model_type"] != "deepseek_v2"
    return to_neox(x) if permutes else x


def long_context_scale(geometry, positions):
    """What Mistral 4 multiplies its queries by, [t_q, 1, 1]: 1 for the others."""
    if geometry.llama_4_scaling_beta == 0:
        return 1.0
    turns = positions // geometry.yarn.original_max_position_embeddings
    return (1 + geometry.llama_4_scaling_beta * np.log1p(turns))[:, None, None]


def dots(a, b):
    return (a.astype(np.float64) * b).sum(axis=-1)
