# SPDX-License-Identifier: Apache-2.0
"""What a dump would not tell is said of it, and no more is allowed than an honest engine needs."""

import numpy as np
import pytest
from engine import CONFIG, INDEXED, PLAIN, STORED, Engine, TransformedEngine, random_states, random_weights

from mla_oracle import rope_interleaved
from mla_oracle.layer import LayerConfig, check_stages, check_weights
from mla_oracle.layer.indexer import fp8_apart

TOKENS = 6
MODES = ("recurrence", "power", "closed", "table")


def judged(start, angles, *, config=CONFIG, off=0, keep=None, engine=Engine, **inputs):
    """The verdict on what an engine dumps at positions `start` and on, whose own positions are `off` more."""
    weights = random_weights(config)
    read = LayerConfig.from_hf_config(config)
    checked = check_weights({name.removesuffix(".weight"): w for name, w in weights.items()}, read)
    states, positions = random_states(config, TOKENS), start + np.arange(TOKENS)
    dump = engine(config, weights)(states, positions + off, inputs)
    dump = {name: stage for name, stage in dump.items() if keep is None or name in keep}
    given = {"hidden_states": states, "positions": positions, **inputs}
    return check_stages(read, checked, given, dump, angles=angles, rope_layout="interleaved" if inputs else None)


def blind(verdict):
    return {finding.stage: finding.blind for finding in verdict.stages if finding.blind}


@pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["yarn", "plain"])
@pytest.mark.parametrize("angles", MODES)
@pytest.mark.parametrize("start", [100_000, 1_000_000, 10_000_000])
def test_a_declared_angle_tells_a_position_from_the_next_as_far_as_f32_counts(start, angles, config):
    honest = judged(start, angles, config=config)
    assert honest.passed and not blind(honest)
    assert judged(start, angles, config=config, off=1).first == "q_pe"


def test_a_shift_of_a_hundred_is_told_at_a_thousand_million():
    assert judged(10**9, "closed").passed
    assert judged(10**9, "closed", off=-100).first == "q_pe"
    assert judged(10**9, "table", off=1).first == "q_pe"


@pytest.mark.parametrize("angles", MODES)
@pytest.mark.parametrize("start", [1_000_000, 20_000_001, 10**9 + 3])
def test_angles_in_f32_are_allowed_what_they_lose(start, angles):
    class Far(Engine):
        def rope_q(self, x, positions):
            return rope_interleaved(x, positions, base=self.config["rope_theta"], angles=angles)

        rope_k = rope_q

    verdict = judged(start, angles, config=PLAIN, engine=Far)
    assert verdict.passed or angles == "table", verdict.reason
    assert judged(start, "any", config=PLAIN, engine=Far).passed


def test_angles_that_cannot_tell_a_position_from_the_next_are_said_to():
    said = "q_pe would be within its budget were every position one more, at query 0, position 1000000 (6 of 6 rows)"
    verdict = judged(1_000_000, "any", off=1)
    assert verdict.passed and blind(verdict) == {"q_pe": said, "k_pe": said.replace("q_pe", "k_pe")}
    assert not blind(judged(100_000, "any"))
    # 20000000 and every second number after it are f32's: a query at an odd one may have the next one's angles.
    assert blind(judged(20_000_000, "closed"))["q_pe"].endswith("at query 1, position 20000001 (3 of 6 rows)")
    assert blind(judged(1_000_000, "any", keep=("kv_cache", "out"))).keys() == {"kv_cache"}


def test_attention_alone_tells_differences_of_positions_alone():
    for keep, first in ((("attn", "out"), "attn"), (("lse",), "lse"), (("out",), "out")):
        verdict = judged(5, "any", off=1, keep=keep)
        assert verdict.passed and blind(verdict).keys() == {first}
    past = {"past_c_kv": random_states({"hidden_size": 32}, 3), "past_k_pe": random_states({"hidden_size": 8}, 3)}
    for keep in ("attn", "out", "kv_cache"):
        assert not blind(judged(5, "any", keep=(keep,), **past))
    assert judged(5, "any", off=1, keep=("attn",), **past).first == "attn"


UNSEEN = ("index_q", "index_k", "index_keys")


def scored(engine, scores, *, without=UNSEEN, dtype="f32", tokens=24, **how):
    weights = random_weights(INDEXED)
    read = LayerConfig.from_hf_config(INDEXED, index_scores=scores, index_hadamard=engine is not Engine)
    checked = check_weights({name.removesuffix(".weight"): w for name, w in weights.items()}, read)
    inputs = {"hidden_states": random_states(INDEXED, tokens).astype(STORED[dtype]), "positions": np.arange(tokens)}
    dump = engine(INDEXED, weights, dtype)(*inputs.values())
    return check_stages(read, checked, inputs, {k: v for k, v in dump.items() if k not in without}, **how)


def test_scores_in_f32_are_told_from_fp8_where_what_they_multiply_is_not_dumped():
    for engine, own, other in ((Engine, "f32", "fp8"), (TransformedEngine, "fp8", "f32")):
        right = scored(engine, own)
        assert right.passed, right.reason
        assert all("(1 of 24 rows)" in said for said in blind(right).values())
        assert scored(engine, other).first == "index_scores"
        assert scored(engine, other, without=()).first == "index_scores"


def test_scores_in_bf16_that_may_be_fp8_are_said_to():
    said = "index_scores would be within its budget were index scores in f32, at query 0, position 0 (24 of 24 rows)"
    right = scored(TransformedEngine, "fp8", dtype="bf16")
    assert right.passed and blind(right) == {"index_scores": said}
    assert not blind(scored(TransformedEngine, "fp8", dtype="bf16", without=()))
    of_choice = scored(TransformedEngine, "fp8", dtype="bf16", without=(*UNSEEN, "index_scores"))
    assert of_choice.passed and blind(of_choice) == {"topk": "topk would be right were index scores in f32"}


def test_a_row_rounds_on_where_it_may_be_off_over_the_middle_of_two_or_into_another_scale():
    x = np.array([[448.0, 17.0, 16.2, 0.0015]])  # steps of 2 from 16 on, and of 2^-9 below 2^-6
    off = np.array([[0.0, 0.1, 0.5, 0.0]])
    assert fp8_apart(x, off).tolist() == [[0, 2, 0, 0]]
    off[0, 0] = 1.0  # 449 has a scale of 2: 0.0015 is 0.38 steps, and were 0.77
    assert fp8_apart(x, off).tolist() == [[0, 2, 0, 2.0**-9]]
