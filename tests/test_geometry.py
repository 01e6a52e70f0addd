# SPDX-License-Identifier: Apache-2.0
"""Geometry, Yarn and the presets: the scale by closed forms, published numbers, and what is refused."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_oracle.errors import InputError
from mla_oracle.geometry import Geometry, Yarn, yarn_mscale
from mla_oracle.geometry.presets import PRESETS

SIZES = {
    "num_heads": 4,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
}
YARN = {"factor": 40, "original_max_position_embeddings": 4096}


def refusal(cls, **fields):
    with pytest.raises(InputError) as error:
        cls(**fields)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_five_sizes_make_a_geometry():
    geometry = Geometry(**SIZES)
    assert (geometry.latent_dim, geometry.qk_head_dim) == (72, 32)
    assert geometry.softmax_scale == 1 / math.sqrt(32)
    assert geometry.softmax_mscale == 1


def test_scale_ignores_the_absorbed_width_the_value_and_the_heads():
    for name in ("kv_lora_rank", "v_head_dim", "num_heads"):
        assert Geometry(**SIZES | {name: 512}).softmax_scale == 1 / math.sqrt(32)


@pytest.mark.parametrize("name", ["glm-5.2", "glm-5.3-flash", "glm-4.7-flash"])
def test_glm_scale_is_exactly_a_sixteenth(name):
    assert Geometry.preset(name).softmax_scale == 0.0625


# mscale to 8 digits: 1 + 0.1 m ln(factor), with ln 40 = 3.6888794541, ln 32 = 3.4657359028, ln 128 = 4.8520302639.
@pytest.mark.parametrize(
    ("name", "width", "mscale", "scale"),
    [
        ("deepseek-v2-lite", 192, 1.2608037774, 0.1147214),
        ("deepseek-v2", 192, 1.2608037774, 0.1147214),
        ("deepseek-v3", 192, 1.3688879454, 0.1352338),
        ("deepseek-v3.2", 192, 1.3688879454, 0.1352338),
        ("kimi-k2", 192, 1.3465735903, 0.1308608),
        ("kimi-linear", 192, 1, 0.0721688),
        ("longcat-flash", 192, 1, 0.0721688),
        ("minicpm3", 96, 1, 0.1020621),
        ("mistral-4", 128, 1.4852030264, 0.1949695),
    ],
)
def test_scale_is_mscale_squared_over_the_root_of_the_trained_width(name, width, mscale, scale):
    geometry = Geometry.preset(name)
    assert geometry.softmax_mscale == pytest.approx(mscale, rel=1e-10)
    assert geometry.softmax_scale == pytest.approx(mscale**2 / math.sqrt(width), rel=1e-9)
    assert geometry.softmax_scale == pytest.approx(scale, abs=5e-8)


def test_mscale_of_the_softmax_is_that_of_mscale_all_dim():
    yarn = Yarn(**YARN, mscale=0.3, mscale_all_dim=0.707)
    geometry = Geometry(**SIZES, rope_theta=1e4, yarn=yarn)
    assert geometry.softmax_mscale == yarn_mscale(40, 0.707)
    assert Geometry(**SIZES, rope_theta=1e4, yarn=Yarn(**YARN)).softmax_mscale == 1


def test_yarn_mscale_is_one_for_no_extension_and_grows_with_the_logarithm():
    assert yarn_mscale(1, 1) == yarn_mscale(0.5, 1) == yarn_mscale(40, 0) == 1
    assert yarn_mscale(math.e, 1) == pytest.approx(1.1, rel=1e-15)
    assert yarn_mscale(math.e**2, 0.5) == pytest.approx(1.1, rel=1e-15)


# heads, nope, rope, value, rank, hidden, q rank, theta, interleave
PUBLISHED = {
    "glm-5.2": (64, 192, 64, 256, 512, 6144, 2048, 8000000, True),
    "glm-5.3-flash": (64, 256, 0, 256, 512, 4096, 1536, None, True),
    "glm-4.7-flash": (20, 192, 64, 256, 512, 2048, 768, 1000000, True),
    "deepseek-v2-lite": (16, 128, 64, 128, 512, 2048, None, 10000, True),
    "deepseek-v2": (128, 128, 64, 128, 512, 5120, 1536, 10000, True),
    "deepseek-v3": (128, 128, 64, 128, 512, 7168, 1536, 10000, True),
    "deepseek-v3.2": (128, 128, 64, 128, 512, 7168, 1536, 10000, True),
    "kimi-k2": (64, 128, 64, 128, 512, 7168, 1536, 50000, True),
    "kimi-linear": (32, 128, 64, 128, 512, 2304, None, None, True),
    "minicpm3": (40, 64, 32, 64, 256, 2560, 768, None, False),
    "mistral-4": (32, 64, 64, 128, 256, 4096, 1024, 10000, True),
    "longcat-flash": (64, 128, 64, 128, 512, 6144, 1536, 10000000, True),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_numbers(name):
    geometry = PRESETS[name]
    assert (
        geometry.num_heads,
        geometry.qk_nope_head_dim,
        geometry.qk_rope_head_dim,
        geometry.v_head_dim,
        geometry.kv_lora_rank,
        geometry.hidden_size,
        geometry.q_lora_rank,
        geometry.rope_theta,
        geometry.rope_interleave,
    ) == PUBLISHED[name]


def test_longcat_scales_its_query_by_two_and_its_latent_by_the_root_of_twelve():
    geometry = Geometry.preset("longcat-flash")
    assert geometry.mla_scale_q_lora == 2
    assert geometry.mla_scale_kv_lora**2 == pytest.approx(12, rel=1e-15)


def test_mistral_4_scales_its_query_by_position():
    geometry = Geometry.preset("mistral-4")
    assert (geometry.llama_4_scaling_beta, geometry.yarn.original_max_position_embeddings) == (0.1, 8192)


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["glm-5.2"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["glm-5.2"].num_heads = 1


@pytest.mark.parametrize("name", ["GLM-5.2", "", "deepseek", "x" * 500, None, 3, ["glm-5.2"]])
def test_unknown_preset_is_refused_with_the_list_of_names(name):
    with pytest.raises(InputError, match=r"expected glm-5\.2, .*, longcat-flash$") as error:
        Geometry.preset(name)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", [*SIZES, "hidden_size", "q_lora_rank"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-2, "-2"),
        (True, "True"),
        (4.0, "4.0"),
        (math.nan, "nan"),
        ("64", "'64'"),
        ([64], "a list"),
        (2**31, "2147483648"),
        pytest.param(10**5000, "an integer of more than 64 bits", id="huge"),
        (np.float32(4), "a float32"),
    ],
)
def test_size_that_is_no_positive_integer_is_refused_by_name_and_value(name, value, shown):
    least = 0 if name == "qk_rope_head_dim" else 1
    assert refusal(Geometry, **SIZES | {name: value}) == (
        f"{name} is {shown}, expected an integer from {least} to 2147483647"
    )


def test_zero_is_a_size_for_rope_alone():
    assert Geometry(**SIZES | {"qk_rope_head_dim": 0}).latent_dim == 64
    for name in SIZES.keys() - {"qk_rope_head_dim"}:
        assert refusal(Geometry, **SIZES | {name: 0}).startswith(f"{name} is 0, expected")


def test_odd_rope_is_refused():
    odd = SIZES | {"qk_rope_head_dim": 7}
    assert refusal(Geometry, **odd) == "qk_rope_head_dim is 7, expected an even number"


def test_numpy_integers_are_sizes_and_become_ints():
    geometry = Geometry(**{name: np.int64(value) for name, value in SIZES.items()})
    assert geometry == Geometry(**SIZES)
    assert type(geometry.num_heads) is int


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 0 to 2^53"),
        ({"rope_theta": math.inf}, "rope_theta is inf, expected a number above 0 to 2^53"),
        ({"rope_theta": True}, "rope_theta is True, expected a number above 0 to 2^53"),
        ({"rope_theta": 1, "yarn": Yarn(**YARN)}, "rope_theta is 1, expected a number above 1 to 2^53"),
        ({"yarn": Yarn(**YARN)}, "rope_theta is None, expected a number with yarn"),
        ({"rope_theta": 1e4, "yarn": YARN}, "yarn is a dict, expected a Yarn or None"),
        ({"rope_theta": 2, "longrope": True}, "rope_theta is 2, expected None with longrope"),
        ({"rope_theta": 2, "qk_rope_head_dim": 0}, "rope_theta is 2, expected None with qk_rope_head_dim 0"),
        ({"longrope": True, "qk_rope_head_dim": 0}, "longrope is True, expected false without rope elements"),
        ({"rope_interleave": 1}, "rope_interleave is 1, expected true or false"),
        ({"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta is 0.1, expected 0 without yarn"),
        ({"mla_scale_q_lora": 0}, "mla_scale_q_lora is 0, expected a number above 0 to 2^53"),
    ],
)
def test_rope_that_contradicts_itself_is_refused(fields, message):
    assert refusal(Geometry, **SIZES | fields) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.5}, "factor is 0.5, expected a number from 1 to 2^53"),
        ({"factor": math.nan}, "factor is nan, expected a number from 1 to 2^53"),
        ({"factor": "40"}, "factor is '40', expected a number from 1 to 2^53"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0, expected an int"),
        ({"beta_slow": 0}, "beta_slow is 0, expected a number from 1e-06 to 2^53"),
        ({"beta_fast": 0.5}, "beta_fast is 0.5, below beta_slow, 1"),
        ({"mscale": -1}, "mscale is -1, expected a number from 0 to 2^53"),
        ({"mscale_all_dim": None}, "mscale_all_dim is None, expected a number from 0 to 2^53"),
    ],
)
def test_yarn_out_of_range_is_refused(fields, message):
    assert refusal(Yarn, **YARN | fields).startswith(message)


def test_yarn_as_json_has_every_field_and_comes_back_equal():
    for geometry in PRESETS.values():
        if geometry.yarn is not None:
            assert json.loads(geometry.yarn.to_json()) == dataclasses.asdict(geometry.yarn)
            assert Yarn.from_json(geometry.yarn.to_json()) == geometry.yarn


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "yarn is '', expected a JSON object"),
        ("[40]", "yarn is '[40]', expected a JSON object"),
        (None, "yarn is None, expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"factor": 40}', "yarn has no original_max_position_embeddings, expected a number"),
        ('{"factor": 40, "beta": 1}', "yarn has 'beta', expected factor, "),
        ('{"factor": NaN, "original_max_position_embeddings": 4096}', "factor is nan, expected a number"),
    ],
)
def test_json_that_is_no_yarn_is_refused(text, message):
    with pytest.raises(InputError) as error:
        Yarn.from_json(text)
    assert message in str(error.value)


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.none())


@settings(deadline=None, derandomize=True)
@given(st.fixed_dictionaries({}, optional={field.name: anything for field in dataclasses.fields(Geometry)}))
def test_any_field_value_gives_a_geometry_or_one_line(fields):
    try:
        geometry = Geometry(**SIZES | fields)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert 0 < geometry.softmax_scale < 1


def test_import_takes_no_numpy():
    code = "import sys, mla_oracle.geometry.presets; print('numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
