# SPDX-License-Identifier: Apache-2.0
"""config.json to Geometry: the published models in both spellings, and what is refused."""

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.geometry import Geometry, Yarn
from mla_oracle.geometry.presets import PRESETS


def config(model_type, heads, nope, rope, value, rank, hidden, q_rank, **more):
    """The keys of a config.json that say something about the geometry, and some that seem to."""
    sizes = {
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "kv_lora_rank": rank,
        "hidden_size": hidden,
        "q_lora_rank": q_rank,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
    }
    return sizes | more


def yarn(factor, mscale, original=4096, beta_fast=32, **more):
    values = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    values |= {"beta_fast": beta_fast, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale}
    return values | more


V2_YARN, V3_YARN = yarn(40, 0.707), yarn(40, 1.0)
LONGROPE = {
    "type": "longrope",
    "long_factor": [1.0591234137867171] * 16,
    "short_factor": [1.0591234137867171] * 16,
    "original_max_position_embeddings": 32768,
}
MISTRAL_YARN = yarn(
    128.0,
    1.0,
    original=8192,
    rope_type="yarn",
    rope_theta=10000.0,
    max_position_embeddings=1048576,
    llama_4_scaling_beta=0.1,
    partial_rotary_factor=0.5,
)

# As the models are published: rope_theta at the top, rope_scaling with `type`.
PUBLISHED = {
    "deepseek-v2-lite": config(
        "deepseek_v2", 16, 128, 64, 128, 512, 2048, None, rope_theta=10000, rope_scaling=V2_YARN
    ),
    "deepseek-v2": config(
        "deepseek_v2", 128, 128, 64, 128, 512, 5120, 1536, rope_theta=10000, rope_scaling=V2_YARN
    ),
    "deepseek-v3": config(
        "deepseek_v3", 128, 128, 64, 128, 512, 7168, 1536, rope_theta=10000, rope_scaling=V3_YARN
    ),
    "deepseek-v3.2": config(
        "deepseek_v32", 128, 128, 64, 128, 512, 7168, 1536, rope_theta=10000, rope_scaling=V3_YARN
    ),
    "kimi-k2": config(
        "kimi_k2", 64, 128, 64, 128, 512, 7168, 1536, rope_theta=5e4, rope_scaling=yarn(32, 1.0, beta_fast=1)
    ),
    "kimi-linear": config(
        "kimi_linear", 32, 128, 64, 128, 512, 2304, None, rope_theta=1e4, rope_scaling=None, mla_use_nope=True
    ),
    "glm-4.7-flash": config(
        "glm4_moe_lite", 20, 192, 64, 256, 512, 2048, 768, rope_theta=1e6, partial_rotary_factor=1.0
    ),
    "minicpm3": config("minicpm3", 40, 64, 32, None, 256, 2560, 768, rope_scaling=LONGROPE, head_dim=96),
    "longcat-flash": config("longcat_flash", 64, 128, 64, 128, 512, 6144, 1536, rope_theta=1e7)
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
}
# As transformers 5 writes them: everything in rope_parameters.
WRITTEN_BY_TRANSFORMERS_5 = {
    "glm-5.2": config(
        "glm_moe_dsa",
        *(64, 192, 64, 256, 512, 6144, 2048),
        rope_parameters={"rope_theta": 8000000, "rope_type": "default"},
        rope_interleave=True,
        indexer_rope_interleave=True,
        head_dim=192,
        qk_head_dim=256,
    ),
    "glm-5.3-flash": config("glm5_next", 64, 256, 0, 256, 512, 4096, 1536, mla_use_nope=True, head_dim=192),
    "mistral-4": config("mistral4", 32, 64, 64, 128, 256, 4096, 1024, rope_parameters=MISTRAL_YARN),
}
CONFIGS = PUBLISHED | WRITTEN_BY_TRANSFORMERS_5
LONGCAT, MINICPM = PUBLISHED["longcat-flash"], PUBLISHED["minicpm3"]


def respelled(content):
    """The same content as transformers 5 writes it."""
    content = copy.deepcopy(content)
    rope = dict(content.pop("rope_scaling", None) or {})
    rope["rope_type"] = rope.pop("type", "default")
    if "rope_theta" in content:
        rope["rope_theta"] = content.pop("rope_theta")
    return content | {"rope_parameters": rope}


def refusal(error, content):
    with pytest.raises(error) as caught:
        Geometry.from_hf_config(content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_there_is_a_config_for_every_preset():
    assert CONFIGS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_published_config_gives_the_preset(name):
    assert Geometry.from_hf_config(CONFIGS[name]) == PRESETS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_spelling_of_transformers_5_gives_the_same(name):
    assert Geometry.from_hf_config(respelled(PUBLISHED[name])) == PRESETS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_text_config_of_a_vision_language_model_gives_the_same(name):
    outer = {"model_type": "kimi_k25", "hidden_size": 1, "text_config": CONFIGS[name], "vision_config": {}}
    assert Geometry.from_hf_config(outer) == PRESETS[name]


def test_file_folder_and_dict_give_the_same(tmp_path):
    content = CONFIGS["deepseek-v3"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    for given_as in (path, str(path), tmp_path, str(tmp_path), content):
        assert Geometry.from_hf_config(given_as) == PRESETS["deepseek-v3"]


def test_config_is_left_as_it_was():
    content = copy.deepcopy(CONFIGS["mistral-4"])
    Geometry.from_hf_config(content)
    assert content == CONFIGS["mistral-4"]


def v3(**changes):
    """DeepSeek-V3's config with these keys changed, and without those that are `...`."""
    content = PUBLISHED["deepseek-v3"] | changes
    return {key: value for key, value in content.items() if value is not ...}


def v3_yarn(**changes):
    rope = V3_YARN | changes
    return v3(rope_scaling={key: value for key, value in rope.items() if value is not ...})


def test_scale_without_yarn_is_the_plain_one():
    for scaling in (None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 10000}):
        geometry = Geometry.from_hf_config(v3(rope_scaling=scaling))
        assert (geometry.yarn, geometry.softmax_scale) == (None, 1 / math.sqrt(192))


def test_scale_takes_mscale_all_dim_and_not_mscale():
    # m(40, 0.5) = 1.1844439727; the amplitude of the rotation is then not 1, and both fields are kept.
    geometry = Geometry.from_hf_config(v3_yarn(mscale_all_dim=0.5))
    assert (geometry.yarn.mscale, geometry.yarn.mscale_all_dim) == (1, 0.5)
    assert geometry.softmax_scale == pytest.approx(1.1844439727**2 / math.sqrt(192), rel=1e-9)


def test_yarn_scaling_switched_off_leaves_the_plain_scale():
    geometry = Geometry.from_hf_config(v3_yarn(apply_yarn_scaling=False))
    assert geometry.softmax_scale == 1 / math.sqrt(192)


def test_attention_factor_of_one_without_mscale_is_no_magnitude_at_all():
    geometry = Geometry.from_hf_config(v3_yarn(mscale=..., mscale_all_dim=..., attention_factor=1.0))
    assert (geometry.yarn.mscale, geometry.yarn.mscale_all_dim, geometry.softmax_mscale) == (0, 0, 1)


def test_yarn_without_mscale_has_deepseeks_defaults():
    geometry = Geometry.from_hf_config(v3_yarn(mscale=..., mscale_all_dim=..., beta_fast=None, beta_slow=...))
    assert geometry.yarn == Yarn(factor=40, original_max_position_embeddings=4096)
    assert geometry.softmax_mscale == 1


def test_yarn_keeps_every_number_of_the_file():
    kept = {"factor": 2, "beta_fast": 8, "beta_slow": 3, "mscale": 0.5, "mscale_all_dim": 1}
    content = v3(rope_scaling={"type": "deepseek_yarn"} | kept, original_max_position_embeddings=100)
    assert Geometry.from_hf_config(content).yarn == Yarn(original_max_position_embeddings=100, **kept)


def test_base_left_out_is_that_of_the_architecture():
    assert Geometry.from_hf_config(v3(rope_theta=...)).rope_theta == 10000
    assert Geometry.from_hf_config(LONGCAT | {"rope_theta": None}).rope_theta == 10000000


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "glm-4.7-flash", "mistral-4"])
def test_rope_interleave_is_true_unless_the_config_says_false(name):
    assert Geometry.from_hf_config(CONFIGS[name] | {"rope_interleave": True}) == PRESETS[name]
    assert not Geometry.from_hf_config(CONFIGS[name] | {"rope_interleave": False}).rope_interleave


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deepseek-v2", False),
        ("deepseek-v3.2", False),
        ("glm-5.2", False),
        ("longcat-flash", False),
        ("minicpm3", True),
    ],
)
def test_pairing_the_architecture_does_not_have_is_refused(name, value):
    content = CONFIGS[name] | {"rope_interleave": value}
    assert refusal(UnsupportedError, content) == (
        f"rope_interleave is {value}, expected {not value} with {content['model_type']}"
    )


AMPLITUDE = "rope_scaling.mscale and mscale_all_dim make the rotation's amplitude"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (v3(model_type="llama"), "model_type is 'llama', expected deepseek_v2, "),
        (v3(model_type="deepseek_v4"), "model_type is 'deepseek_v4', expected deepseek_v2, "),
        (v3(rope_scaling={"type": "linear", "factor": 4}), "rope_scaling.type is 'linear', expected default"),
        (v3(rope_scaling={"rope_type": "dynamic", "factor": 4}), "rope_scaling.rope_type is 'dynamic',"),
        (v3(rope_scaling=LONGROPE), "rope_scaling.type is 'longrope', expected default or yarn with"),
        (v3(rope_parameters={"full_attention": {}}), "rope_parameters has 'full_attention', expected only "),
        (v3_yarn(mscale=0.707, mscale_all_dim=...), f"{AMPLITUDE} 1.260804 in DeepSeek's code and 1.368"),
        (v3_yarn(mscale=...), f"{AMPLITUDE} 1 in DeepSeek's code and 1.368888 in transformers, expected one"),
        (v3_yarn(attention_factor=1.2), f"{AMPLITUDE} 1 in DeepSeek's code and 1.2 in transformers,"),
        (v3_yarn(mscale=0.5, apply_yarn_scaling=False), "rope_scaling.mscale_all_dim is 1, expected mscale"),
        (MINICPM | {"rope_scaling": LONGROPE | {"mscale_all_dim": 1}}, "rope_scaling.mscale_all_dim is"),
        (v3_yarn(truncate=False), "rope_scaling.truncate is False, expected true"),
        (v3_yarn(llama_4_scaling_beta=0.1), "rope_scaling.llama_4_scaling_beta is 0.1, expected 0"),
        (v3(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5, expected 1 or 0.333333"),
        (v3(qk_rope_head_dim=0), "rope_scaling.type is 'yarn', expected default: no rope elements"),
        (v3(mla_use_nope=True), "mla_use_nope is True, expected False with deepseek_v3"),
        (PUBLISHED["kimi-linear"] | {"mla_use_nope": False}, "mla_use_nope is False, expected True"),
        (LONGCAT | {"mla_scale_kv_lora": False}, "mla_scale_kv_lora is False, expected True with"),
        (v3(mla_scale_q_lora=True), "mla_scale_q_lora is True, expected False with deepseek_v3"),
    ],
)
def test_what_engines_would_read_differently_is_unsupported(content, message):
    assert refusal(UnsupportedError, content).startswith(message)


NEEDED = ["num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"]
NEEDED += ["hidden_size", "q_lora_rank"]


@pytest.mark.parametrize("key", [*NEEDED, "model_type"])
def test_missing_key_is_refused_by_name(key):
    assert refusal(InputError, v3(**{key: ...})) == f"{key} is missing"
    nested = {"text_config": v3(**{key: ...})}
    assert refusal(InputError, nested) == f"text_config.{key} is missing"


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize(
    ("value", "shown"),
    [(math.nan, "nan"), (512.0, "512.0"), ("512", "'512'"), (True, "True"), (-1, "-1"), ({}, "a dict")],
)
def test_size_of_the_wrong_type_is_refused_by_its_key(key, value, shown):
    assert refusal(InputError, v3(**{key: value})).startswith(f"{key} is {shown}, expected an integer from ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (v3(model_type=None), "model_type is None, expected a string"),
        (v3(kv_lora_rank=None), "kv_lora_rank is None, expected an integer from 1 to 2147483647"),
        (v3(qk_rope_head_dim=63), "qk_rope_head_dim is 63, expected an even number"),
        (v3(qk_head_dim=576), "qk_head_dim is 576, expected nope + rope, 192"),
        (v3(rope_theta=math.nan), "rope_theta is nan, expected a number above 1 to 2^53"),
        (v3(rope_theta="1e4"), "rope_theta is '1e4', expected a number above 1 to 2^53"),
        (v3(rope_interleave=None), "rope_interleave is None, expected true or false"),
        (v3(rope_scaling=[1]), "rope_scaling is a list, expected an object or null"),
        (v3(text_config="deepseek_v3"), "text_config is 'deepseek_v3', expected an object"),
        (v3_yarn(type=4), "rope_scaling.type is 4, expected a string"),
        (v3_yarn(type=...), "rope_scaling.rope_type is missing"),
        (v3_yarn(type=None), "rope_scaling.rope_type is missing"),
        (v3_yarn(rope_type="default"), "rope_scaling.rope_type is 'default', rope_scaling.type 'yarn'"),
        (v3_yarn(factor=...), "rope_scaling.factor is missing"),
        (v3_yarn(factor=None), "rope_scaling.factor is missing"),
        (v3_yarn(factor=math.inf), "rope_scaling.factor is inf, expected a number from 1 to 2^53"),
        (v3_yarn(factor=True), "rope_scaling.factor is True, expected a number from 1 to 2^53"),
        (v3_yarn(original_max_position_embeddings=...), "rope_scaling.original_max_position_embeddings is"),
        (v3_yarn(mscale="1"), "rope_scaling.mscale is '1', expected a number from 0 to 2^53"),
        (v3_yarn(beta_fast=0), "rope_scaling.beta_fast is 0, expected a number from 1e-06 to 2^53"),
        (v3_yarn(rope_theta=50000), "rope_scaling.rope_theta is 50000, rope_theta 10000"),
        (v3(rope_scaling=..., rope_parameters={"type": "yarn"}), "rope_parameters.factor is missing"),
        (v3(original_max_position_embeddings=8192), "rope_scaling.original_max_position_embeddings is 4096"),
        (v3(rope_parameters=V3_YARN | {"factor": 32}), "rope_parameters.factor is 32, rope_scaling"),
        (MINICPM | {"num_attention_heads": 39}, "hidden_size is 2560, expected a multiple"),
        (LONGCAT | {"q_lora_rank": None}, "q_lora_rank is None, expected an integer with longcat_flash"),
    ],
)
def test_bad_value_is_refused_by_its_key(content, message):
    assert refusal(InputError, content).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON: 'Expecting value: line 1 column 1 (char 0)'"),
        (b"{'model_type': 1}", "is not JSON: 'Expecting property name"),
        (b"\xff\xfe\xfd", "is not JSON: "),
        (b"[" * 200_000, "is nested too deeply"),
        (b'{"kv_lora_rank": ' + b"9" * 5000 + b"}", "is not JSON: 'Exceeds the limit"),
        (b"[1]", "holds a list, expected an object"),
        (b"null", "holds None, expected an object"),
        (b'{"model_type": "deepseek_v3", "hidden_size": NaN}', "hidden_size is nan, expected an integer"),
    ],
)
def test_bad_file_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert message in refusal(InputError, path)


def test_path_that_cannot_be_read_is_refused_by_name(tmp_path):
    assert refusal(InputError, tmp_path / "no.json") == (
        f"config {str(tmp_path / 'no.json')!r} cannot be read: No such file or directory"
    )
    assert refusal(InputError, tmp_path).startswith(f"config {str(tmp_path / 'config.json')!r} cannot be")
    assert refusal(InputError, "a\nb") == "config 'a\\nb' cannot be read: No such file or directory"
    assert refusal(InputError, 7) == "config is 7, expected a path or a dict"
    assert refusal(InputError, "a\0b").startswith("config 'a\\x00b' ")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(), v, max_size=2))
TOP_KEYS = sorted({"rope_parameters", "text_config"}.union(*CONFIGS.values()))
ROPE_KEYS = sorted({"attention_factor", "truncate", "apply_yarn_scaling", "long_factor"}.union(MISTRAL_YARN))
ROPE_TYPES = st.sampled_from(["default", "yarn", "longrope", "deepseek_yarn", "llama3"])


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.dictionaries(st.sampled_from(TOP_KEYS), values, max_size=3),
    st.dictionaries(st.sampled_from(ROPE_KEYS), values | ROPE_TYPES, max_size=3),
    st.sampled_from(["rope_scaling", "rope_parameters"]),
)
def test_any_json_gives_a_geometry_or_one_line(name, top, rope, where):
    content = CONFIGS[name] | top
    if rope:
        group = content.get(where)
        content[where] = (group if isinstance(group, dict) else {}) | rope
    try:
        geometry = Geometry.from_hf_config(content)
    except (InputError, UnsupportedError) as error:
        assert "\n" not in str(error)
    else:
        assert 0 < geometry.softmax_scale < math.inf


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=40))
def test_any_bytes_are_refused_in_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_bytes(content)
    refusal(InputError, path)
