# SPDX-License-Identifier: Apache-2.0
"""What a dump would not tell is said of it, and no more is allowed than an honest engine needs."""

import numpy as np
import pytest
from engine import CONFIG, PLAIN, Engine, random_states, random_weights

from mla_oracle import rope_interleaved
from mla_oracle.layer import LayerConfig, check_stages, check_weights

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
