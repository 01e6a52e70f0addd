# SPDX-License-Identifier: Apache-2.0
"""What a case cannot tell from rounding, and the words for it."""

import numpy as np

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import discrimination
from mla_oracle.dtypes import round_to
from mla_oracle.mutants import columns, find, temperature
from mla_oracle.oracle import expected
from mla_oracle.verdict.compare import check

SIZES = "heads=3,row=20,value=12,scale=0.3"


def test_a_scale_within_the_rounding_of_bf16_is_not_seen_and_one_beyond_it_is():
    case = generate(f"paged:{SIZES},lens=9+5,dtype=bf16")
    asked = (columns.factor(1.002), columns.factor(1.05), find("causal.none"))
    found = discrimination(case, mutants=asked)
    assert (found.seen, found.blind, found.same) == (("value.factor-1.05",), ("value.factor-1.002",), ())
    assert found.sentences == [
        "this case cannot tell missing V descale (value.factor-1.002) from rounding",
    ]


def test_what_is_seen_is_rejected_and_what_is_not_may_pass():
    case = generate(f"paged:{SIZES},lens=40+5,tokens=2,dtype=bf16,unread=numbers")
    truth = expected(case, precision="f64")
    found = discrimination(case)
    assert len(found.seen) > 150
    for name in [*found.seen[::8], *found.blind]:
        with np.errstate(all="ignore"):
            results = find(name).run(case)
            actual = {"out": round_to(results["out"], "bf16"), "lse": round_to(results["lse"], "f32")}
        assert check(case, actual, truth).passed == (name in found.blind and found.units[name] <= 1), name


def test_a_case_of_single_keys_shows_no_temperature_in_out_alone():
    case = generate(f"paged:{SIZES},lens=1+1")
    truth = {"out": expected(case, precision="f64")["out"]}
    found = discrimination(case, kinds={"out": "f32"}, truth=truth, mutants=(temperature.factor(2.0),))
    assert (found.seen, found.blind, found.same) == ((), (), ())  # it needs two keys, and says so
    case = generate(f"paged:{SIZES},lens=2+2,inputs=flat")
    truth = {"out": expected(case, precision="f64")["out"]}
    found = discrimination(case, kinds={"out": "f32"}, truth=truth, mutants=(temperature.factor(2.0),))
    assert found.same == ("temperature.factor-2",)
    assert found.sentences == ["this case does not show 1 mutants at all: temperature.factor-2"]


def test_wider_numerics_see_less():
    case = generate(f"paged:{SIZES},lens=40+5,tokens=2,dtype=bf16")
    wide, narrow = (discrimination(case, numerics) for numerics in (None, "p=e4m3,p_scale=256"))
    assert set(narrow.seen) < set(wide.seen)
    assert "p=e4m3" in narrow.numerics
