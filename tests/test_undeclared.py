# SPDX-License-Identifier: Apache-2.0
"""Right kernels that round what nobody declared: they fail, no class is named, and what to declare is said."""

import honest
import numpy as np
import pytest

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import diagnose
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.diagnosis.undeclared import ROUNDINGS, undeclared
from mla_oracle.mutants import find
from mla_oracle.oracle import expected
from mla_oracle.verdict.compare import check

CASE = generate("paged:heads=2,row=40,value=32,scale=0.2,lens=33+0+140,block=16,unread=numbers")
TRUTH = expected(CASE, precision="f64")
HONEST = {
    "p=bf16": (honest.two_pass("bf16"), {}),
    "p=f16": (honest.online(32, "f16"), {}),
    "p=e4m3,p_scale=256": (honest.online(32, "e4m3", p_scale=256.0), {}),
    "partials=bf16": (honest.online(16, split=3, partials="bf16"), {}),
    "scores=bf16": (honest.eager(scores="bf16"), {}),
    "value_accumulator=mma-f16": (honest.online(16, sums=honest.half), {}),
    "value_accumulator=f16": (honest.half_accumulator, {}),
    "out=bf16": (honest.two_pass(), {"out": "bf16"}),
    "lse=bf16": (honest.two_pass(), {"lse": "bf16"}),
    "query=tf32,cache=tf32,p=tf32": (honest.two_pass("tf32"), {"inputs": "tf32"}),
    "query=bf16,cache=bf16,p=bf16": (honest.two_pass("bf16"), {"inputs": "bf16"}),
}


def results_of(kernel, how):
    """What it returns, in f32 whatever it rounds to."""
    return {name: x.astype(np.float32) for name, x in honest.over_rows(CASE, kernel, **how).items()}


def facts(results):
    measure = Measure(CASE, TRUTH, {"out": "f32", "lse": "f32"})
    return undeclared(measure, results, {n: measure.units(n, x, TRUTH[n]) for n, x in results.items()})


@pytest.mark.parametrize("rounding", HONEST)
def test_the_rounding_that_is_not_declared_is_among_those_it_would_pass_with(rounding):
    results = results_of(*HONEST[rounding])
    assert not check(CASE, results, TRUTH).passed
    (fact,) = facts(results)
    assert rounding in fact.data["numerics"], fact.text
    assert check(CASE, results, TRUTH, numerics=rounding).passed


def test_a_query_that_is_scaled_and_rounded_first_has_to_say_so():
    case = generate("paged:heads=4,row=80,value=64,scale=0.13,block=16,seed=5,lens=60+133+1,tokens=2,dtype=bf16")
    results = honest.over_rows(case, honest.q_scaled(honest.online(32, "bf16"), "bf16"), out="bf16")
    truth = expected(case, precision="f64")
    assert not check(case, results, truth).passed
    assert check(case, results, truth, numerics="scaled=q").passed
    found = diagnose(case, results["out"], results["lse"], separate=False)
    assert found.summary.startswith("unknown: ") and "would pass with scaled=q" in found.summary


def test_an_honest_kernel_stays_unknown_and_its_rounding_is_said():
    results = results_of(*HONEST["p=bf16"])
    found = diagnose(CASE, results["out"], results["lse"], truth=TRUTH, separate=False)
    assert not found.named and found.summary.startswith("unknown: ")
    assert "; would pass with p=bf16 or " in found.summary and found.summary.endswith(", which is not declared")
    assert found.as_json()["facts"][-1]["numerics"][0] == "p=bf16"


def test_a_bug_that_is_named_is_not_told_as_a_rounding():
    wrong = {name: x.astype(np.float32) for name, x in find("temperature.half").run(CASE).items()}
    found = diagnose(CASE, wrong["out"], wrong["lse"], truth=TRUTH, separate=False)
    assert found.named and "would pass" not in found.summary + str(found.facts)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 3.0])
def test_what_no_rounding_makes_would_pass_with_none(wrong):
    results = {name: x.astype(np.float32) for name, x in TRUTH.items()}
    results["out"][2, 1] = wrong * results["out"][2, 0]
    assert facts(results) == []


def test_a_rounding_that_is_declared_is_not_told_again():
    results = results_of(*HONEST["p=bf16"])
    measure = Measure(CASE, TRUTH, {"out": "f32", "lse": "f32"}, "p=e4m3")
    (fact,) = undeclared(measure, results, {"out": np.full(1, 2.0)})
    assert "p=e4m3" in ROUNDINGS and "p=e4m3" not in fact.data["numerics"]
