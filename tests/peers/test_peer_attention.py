# SPDX-License-Identifier: Apache-2.0
"""The dense forms and the softmax scale against the MLA layers of Hugging Face transformers.

Each layer runs in f32 and in f64, with two attention cores of its own: "sdpa" is f64 throughout, "eager" takes the
softmax in f32 whatever the model's dtype is. What the hooks caught before the core goes into our forms; what they
caught after it must come out.
"""

import numpy as np
import pytest
from hooked_mla import DEEPSEEK_SIZES, FAMILIES, GLM_SIZES, YARN, YARN_AMPLIFIED, Layer, record
from peer_bounds import UNIT, out_bound

from mla_oracle import attend_absorbed, attend_naive

LAYERS = [
    *(Layer(family) for family in FAMILIES),
    Layer("deepseek_v2", "yarn", {"rope_parameters": YARN}),
    Layer("deepseek_v3", "neox", {"rope_interleave": False}),
    Layer("deepseek_v3", "yarn", {"rope_parameters": YARN}),
    Layer("deepseek_v3", "yarn-neox", {"rope_parameters": YARN_AMPLIFIED, "rope_interleave": False}),
    Layer("deepseek_v3", "without-q_lora", {"q_lora_rank": None}),
    Layer("deepseek_v3", "real", DEEPSEEK_SIZES | {"rope_parameters": YARN}),
    Layer("deepseek_v3", "real-neox", DEEPSEEK_SIZES | {"rope_interleave": False}),
    Layer("glm_moe_dsa", "real", GLM_SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}),
]
MODELS = [("f64", "sdpa"), ("f64", "eager"), ("f32", "sdpa"), ("f32", "eager")]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_softmax_scale_read_from_the_config_is_the_layers(layer):
    run = record(layer, dtype="f64", core="sdpa")
    assert run.geometry.softmax_scale == pytest.approx(run.scaling, rel=1e-15)


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
@pytest.mark.parametrize(("dtype", "core"), MODELS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_output_is_the_layers(layer, dtype, core, attend):
    run = record(layer, dtype=dtype, core=core)
    for step in run.steps:
        inputs = (step.q_nope, step.q_pe, step.c_kv, step.k_pe, run.w_uk, run.w_uv)
        bound = _bound(*inputs, run.scaling, UNIT[dtype], UNIT["f32" if core == "eager" else dtype])
        for precision in {dtype, "f64"}:
            out = attend(run.geometry, *inputs, precision=precision)
            assert out.shape == step.out.shape
            assert np.all(np.abs(out - step.out) <= bound)


def _bound(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, scale, unit, softmax_unit):
    """The bound of out [t_q, H, V]."""

    def scores(q_nope, q_pe, c_kv, k_pe, w_uk):
        k_nope = np.einsum("hpl,tl->htp", w_uk, c_kv)
        return scale * (np.einsum("ihp,htp->iht", q_nope, k_nope) + np.einsum("ihr,tr->iht", q_pe, k_pe))

    inputs = [array.astype(np.float64) for array in (q_nope, q_pe, c_kv, k_pe, w_uk)]
    t_q, t_kv = len(q_nope), len(c_kv)
    seen = np.tri(t_q, t_kv, t_kv - t_q, dtype=bool)[:, None]  # [t_q, 1, t_kv]
    value_size = np.einsum("hvl,tl->htv", np.abs(w_uv), np.abs(c_kv), dtype=np.float64)
    return out_bound(
        np.where(seen, scores(*inputs), -np.inf),
        scores(*map(np.abs, inputs)),
        value_size,
        unit=unit,
        softmax_unit=softmax_unit,
    )
