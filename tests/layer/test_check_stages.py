# SPDX-License-Identifier: Apache-2.0
"""check_stages against an engine that shares no code with it: honest ones pass, wrong ones fail where they go wrong."""

import ml_dtypes
import numpy as np
import pytest
from engine import (
    BIASED,
    CONFIG,
    DIRECT,
    GLM,
    INDEXED,
    LONGCAT,
    PLAIN,
    POOLED,
    Engine,
    TransformedEngine,
    random_states,
    random_weights,
)
from wrong_layers import WRONG, IndexWithoutRelu, KeysNotRotated, NoLatentNorm, ScaleWithoutMscale

from mla_oracle import InputError
from mla_oracle.layer import LayerConfig, check_stages, check_weights
from mla_oracle.layer.limits import limit

TOKENS = 9
FAMILIES = {
    "yarn": CONFIG, "plain": PLAIN, "direct": DIRECT, "longcat": LONGCAT, "v3.2": INDEXED, "glm": GLM, "pooled": POOLED,
    "biased": BIASED, "direct-biased": {**DIRECT, "attention_bias": True},
}  # fmt: skip


def layer_of(config, weights, **conventions):
    """Our side of it."""
    read = LayerConfig.from_hf_config(config, **conventions)
    return read, check_weights({name.removesuffix(".weight"): w for name, w in weights.items()}, read)


def judged(config, engine, *, naive=True, dtype="f32", size=1.0, keep=None, past=True, conventions=None, **how):
    """The verdict on what `engine` dumps for the last tokens of a sequence, its first ones cached by an honest one."""
    weights = random_weights(config)
    states = random_states(config, TOKENS + 2 if past else TOKENS, size=size)
    positions = np.arange(len(states))
    inputs = {"hidden_states": states, "positions": positions}
    if past:
        honest = TransformedEngine if issubclass(engine, TransformedEngine) else Engine
        before = honest(config, weights, dtype)(states[:2], positions[:2])
        rank = config["kv_lora_rank"]
        inputs = {
            "hidden_states": states[2:],
            "positions": positions[2:],
            "past_c_kv": before["kv_cache"][:, :rank],
            "past_k_pe": before["kv_cache"][:, rank:],
        } | {f"past_{name}": before[name] for name in ("index_k", "index_gate") if name in before}
    if dtype == "bf16":
        inputs["hidden_states"] = inputs["hidden_states"].astype(engine(config, weights, "bf16").dtype)
    dump = engine(config, weights, dtype, naive)(
        inputs["hidden_states"], inputs["positions"], {k: v for k, v in inputs.items() if k.startswith("past")}
    )
    read, checked = layer_of(config, weights, **(conventions or {}))
    if keep is not None:
        dump = {name: array for name, array in dump.items() if name in keep}
        how = {"rope_layout": "interleaved"} | how if past else how
    return check_stages(read, checked, inputs, dump, **how)


@pytest.mark.parametrize("past", [False, True], ids=["first-tokens", "after-others"])
@pytest.mark.parametrize("naive", [True, False], ids=["naive", "absorbed"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_engine_passes(family, dtype, naive, past):
    verdict = judged(FAMILIES[family], Engine, dtype=dtype, naive=naive, past=past)
    assert verdict.passed, verdict.reason
    assert len(verdict.stages) >= 12


FEW = [("out",), ("attn",), ("lse",), ("o_lat",), ("kv_cache", "attn"), ("q_pe", "kv_cache", "out")]


@pytest.mark.parametrize("keep", FEW)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_engine_passes_that_dumps_little(family, dtype, keep):
    naive = keep != ("o_lat",)
    more = ("topk",) if "index_topk" in FAMILIES[family] else ()
    verdict = judged(FAMILIES[family], Engine, dtype=dtype, naive=naive, keep=keep + more)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w.engine.__name__}-{w.config['model_type']}-{w.dtype}")
def test_a_wrong_engine_fails_at_the_stage_that_is_wrong(wrong):
    verdict = judged(wrong.config, wrong.engine, dtype=wrong.dtype, naive=wrong.naive, size=wrong.size, past=False)
    assert not verdict.passed
    assert (verdict.first, verdict.row) == (wrong.first, wrong.row), verdict.reason
    assert verdict.position == wrong.row  # the first token is at position 0
    before = [finding for finding in verdict.stages if finding.stage == verdict.first or finding.passed]
    assert verdict.stages[: verdict.stages.index(before[-1])]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("engine", "config", "keep", "first"),
    [
        (NoLatentNorm, CONFIG, ("out",), "out"),
        (NoLatentNorm, CONFIG, ("kv_a", "kv_cache", "out"), "kv_cache"),
        (KeysNotRotated, PLAIN, ("kv_cache", "out"), "kv_cache"),
        (ScaleWithoutMscale, CONFIG, ("attn", "out"), "attn"),
        (ScaleWithoutMscale, CONFIG, ("q_nope", "q_pe", "kv_cache", "lse"), "lse"),
        (ScaleWithoutMscale, CONFIG, ("out",), "out"),
        (IndexWithoutRelu, INDEXED, ("topk", "out"), "topk"),
    ],
)
def test_a_wrong_engine_that_dumps_little_fails_at_the_first_stage_after_it(engine, config, keep, first, dtype):
    verdict = judged(config, engine, keep=keep, dtype=dtype)
    assert verdict.first == first, verdict.reason


def test_an_error_is_told_where_it_is_made_and_nowhere_after():
    verdict = judged(CONFIG, KeysNotRotated)
    assert [finding.stage for finding in verdict.stages if not finding.passed] == ["k_pe"]
    assert verdict.row == 0 and verdict.position == 2
    assert "at query 0, position 2" in verdict.reason


def test_rotated_rows_may_have_their_pairs_parted_if_all_have():
    class Parted(Engine):
        def rope_q(self, x, positions):
            turned = self.rope(x, positions)
            return np.concatenate([turned[..., 0::2], turned[..., 1::2]], -1)

        rope_k = rope_q

    assert judged(CONFIG, Parted, past=False).conventions["rope_layout"] == "neox"
    assert judged(CONFIG, Parted, past=False).passed
    assert judged(CONFIG, Parted, past=False, keep=("kv_cache", "attn")).passed
    told = judged(CONFIG, Parted, past=False, rope_layout="interleaved")
    assert (told.first, told.passed) == ("q_pe", False)
    assert judged(CONFIG, Parted, past=False, rope_layout="neox").passed
    assert not judged(CONFIG, Engine, past=False, rope_layout="neox").passed


def test_cached_rows_whose_layout_nothing_tells_are_refused():
    with pytest.raises(InputError) as caught:
        judged(CONFIG, Engine, keep=("out",), rope_layout=None)
    assert str(caught.value) == (
        "rope_layout is not given, expected interleaved or neox: past_k_pe is rotated and the dump, which might tell,"
        " holds none of q_pe, k_pe, kv_cache"
    )
    with pytest.raises(InputError, match="past_index_k is rotated"):
        judged(GLM, Engine, keep=("q_pe", "topk"), rope_layout=None)
    assert judged(INDEXED, Engine, keep=("q_pe", "topk"), rope_layout=None).passed  # rotated by halves


def test_f32_numbers_of_a_bf16_engine_are_judged_as_bf16():
    class Widened(Engine):
        def __call__(self, *args):
            return {name: np.asarray(x, np.float32) for name, x in super().__call__(*args).items()}

    verdict = judged(CONFIG, Widened, dtype="bf16")
    assert verdict.passed, verdict.reason
    assert {finding.dtype for finding in verdict.stages} == {"bf16", "f32"}  # scores and lse are f32


def test_a_value_that_is_no_number_fails():
    class Broken(Engine):
        def append(self, past, new):
            rows = np.concatenate([past, new])
            rows[4, 3] = np.nan
            return rows

    verdict = judged(CONFIG, Broken, past=False)
    assert (verdict.first, verdict.row) == ("kv_cache", 4)
    assert verdict.stages[[f.stage for f in verdict.stages].index("kv_cache")].units == np.inf


@pytest.mark.parametrize(("mask", "said"), [(0.0, "is 0 where -inf"), (np.nan, "is nan where -inf"), (-1e4, None)])
def test_scores_of_keys_that_are_not_seen_may_be_any_large_negative_number(mask, said):
    class Masked(Engine):
        def __call__(self, *args):
            stages = super().__call__(*args)
            return stages | {"scores": np.where(np.isneginf(stages["scores"]), np.float32(mask), stages["scores"])}

    verdict = judged(CONFIG, Masked, past=False)
    assert verdict.passed if said is None else (verdict.first == "scores" and said in verdict.reason)


def test_an_error_of_every_element_is_told_where_each_alone_would_pass():
    limits = limit(np.ones((TOKENS, 32)))
    error = np.zeros((TOKENS, 32))
    error[3, 7] = 4.0
    assert (limits.units(error, np.zeros_like(error)) < 1).all()
    assert (limits.units(np.full_like(error, 4.0), np.zeros_like(error)) > 1).all()


def test_far_positions_under_yarn_are_allowed_no_more_than_f32_may_be_off():
    class Stretched(Engine):
        def angles(self, positions):
            return super().angles(positions * (1 + 5e-5))

    read, weights = layer_of(CONFIG, random_weights(CONFIG))
    inputs = {"hidden_states": random_states(CONFIG, TOKENS), "positions": 20_000 + np.arange(TOKENS)}
    for engine, first in ((Engine, None), (Stretched, "q_pe")):
        dump = engine(CONFIG, random_weights(CONFIG))(*inputs.values())
        assert check_stages(read, weights, inputs, dump).first == first


def test_lse_in_base_two_is_a_convention():
    class BaseTwo(Engine):
        def __call__(self, *args):
            stages = super().__call__(*args)
            return stages | {"lse": stages["lse"] / np.float32(np.log(2))}

    assert judged(CONFIG, BaseTwo).first == "lse"
    assert judged(CONFIG, BaseTwo, lse_base="2").passed


@pytest.mark.parametrize("angles", ["recurrence", "power", "closed", "table"])
def test_far_positions_are_allowed_the_error_of_their_angle_mode(angles):
    from mla_oracle import rope_interleaved

    class Far(Engine):
        def rope_q(self, x, positions):
            return rope_interleaved(x, positions, base=self.config["rope_theta"], angles=angles)

        rope_k = rope_q

    start = 300_000
    read, weights = layer_of(PLAIN, random_weights(PLAIN))
    states = random_states(PLAIN, TOKENS)
    positions = start + np.arange(TOKENS)
    dump = Far(PLAIN, random_weights(PLAIN))(states, positions)

    def verdict(mode):
        return check_stages(read, weights, {"hidden_states": states, "positions": positions}, dump, angles=mode)

    assert verdict("any").passed
    assert verdict(angles).passed
    if angles != "table":  # in f32 the angle is off by more than a table allows
        assert verdict("table").first == "q_pe"


@pytest.mark.parametrize(
    ("dump", "said"),
    [
        ({}, "the dump holds no stage, expected one or more of q_a, q_a_norm"),
        ({"q_b": np.zeros((2, 3), np.float32)}, "the dump holds q_b, expected stages: q_a, q_a_norm"),
        ({"topk": np.zeros((9, 3), np.int64)}, "the layer has no such stage"),
        ({"q": np.zeros((9, 3, 23), np.float32)}, "q is [9, 3, 23], expected [9, 3, 24]: [T, H, P+R]"),
        ({"out": np.zeros((9, 48), np.int32)}, "out is i32, expected f32 or f16 or bf16 or f64"),
    ],
)
def test_a_dump_that_is_none_is_told_in_one_line(dump, said):
    read, weights = layer_of(CONFIG, random_weights(CONFIG))
    with pytest.raises(InputError) as caught:
        check_stages(read, weights, {"hidden_states": random_states(CONFIG, 9), "positions": np.arange(9)}, dump)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_heads_may_be_joined_and_a_batch_of_one_may_lead():
    class Flat(Engine):
        def __call__(self, *args):
            stages = super().__call__(*args)
            return {name: stages[name].reshape(1, len(stages[name]), -1) for name in ("q", "q_nope", "attn", "out")}

    verdict = judged(CONFIG, Flat, past=False)
    assert verdict.passed and len(verdict.stages) == 4


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_indexer_with_hadamard_and_fp8_passes_by_its_conventions_and_by_no_others(dtype, past):
    how = {"dtype": dtype, "past": past}
    own = {"index_hadamard": True, "index_scores": "fp8"}
    assert judged(INDEXED, TransformedEngine, conventions=own, **how).passed
    assert judged(INDEXED, TransformedEngine, conventions={"index_hadamard": True}, **how).first == "index_scores"
    assert judged(INDEXED, TransformedEngine, conventions={"index_scores": "fp8"}, **how).first == "index_q"
    assert judged(INDEXED, Engine, conventions=own, **how).first == "index_q"
    few = ("topk", "out")  # ours may round to the neighbours of theirs
    assert judged(INDEXED, TransformedEngine, conventions=own, keep=few, **how).passed


def test_a_norm_that_fails_is_told_the_eps_it_would_pass_with():
    class Small(Engine):
        def eps(self):
            return 1e-5

    verdict = judged(CONFIG, Small, size=0.03)
    assert verdict.first == "q_a_norm"
    assert "; with norm_eps 1e-05 in the place of 1e-06 it is within its budget" in verdict.reason
    told = judged(CONFIG, NoLatentNorm, size=0.03)
    assert told.first == "kv_a_norm" and "norm_eps" not in told.reason


def test_a_choice_of_nothing_fails_and_no_stage_after_it():
    class Nothing(Engine):
        def __call__(self, *args):
            stages = super().__call__(*args)
            stages["topk"][5] = -1
            return stages

    verdict = judged(INDEXED, Nothing, past=False)
    assert (verdict.first, verdict.row) == ("topk", 5)
    assert "0 tokens are chosen where 4 are expected, at query 5, position 5 (1 of 9 rows)" in verdict.reason
    assert [finding.stage for finding in verdict.stages if not finding.passed] == ["topk"]


def test_one_token_of_one_head_passes():
    """Every axis is 1: whether a batch leads cannot be told from the shape, and need not be."""
    config = {**INDEXED, "num_attention_heads": 1, "index_n_heads": 1}
    weights, states = random_weights(config), random_states(config, 1)
    dump = Engine(config, weights)(states, np.arange(1))
    read, checked = layer_of(config, weights)
    for stages in (dump, {name: stage[None] for name, stage in dump.items()}):
        verdict = check_stages(read, checked, {"hidden_states": states, "positions": np.arange(1)}, stages)
        assert verdict.passed, verdict.reason


@pytest.mark.parametrize("naive", [True, False])
def test_attention_that_is_not_dumped_is_allowed_its_kernels_roundings(naive):
    config = {**PLAIN, "qk_nope_head_dim": 128, "v_head_dim": 24, "num_attention_heads": 1, "kv_lora_rank": 16}
    keep = ("q_nope", "q_pe", "kv_cache", "out")
    verdict = judged(config, Engine, naive=naive, dtype="bf16", keep=keep, past=False)
    assert verdict.passed, verdict.reason


def test_sums_of_more_terms_than_the_latent_has_are_allowed_their_roundings():
    config = {**PLAIN, "qk_nope_head_dim": 512, "kv_lora_rank": 8}
    verdict = judged(config, Engine, naive=False)
    assert verdict.passed, verdict.reason


def test_what_is_not_dumped_is_rounded_as_it_is_stored():
    """Of gates of 16 and more bf16 has steps of 1/8: pools of a layer that stores them are off by that alone."""
    weights = random_weights(POOLED)
    weights["indexer.index_kpool_compress_gate"] *= 24
    weights = {name: w.astype(ml_dtypes.bfloat16) for name, w in weights.items()}
    read, checked = layer_of(POOLED, weights)
    inputs = {"hidden_states": random_states(POOLED, TOKENS).astype(ml_dtypes.bfloat16), "positions": np.arange(TOKENS)}
    dump = dict(Engine(POOLED, weights, "bf16")(*inputs.values()))
    assert np.abs(dump.pop("index_gate").astype(np.float64)).max() > 32
    verdict = check_stages(read, checked, inputs, dump)
    assert verdict.passed, verdict.reason
