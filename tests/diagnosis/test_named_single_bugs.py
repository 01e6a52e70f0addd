# SPDX-License-Identifier: Apache-2.0
"""Single bugs that no mutant of the bank has the constants of: a tile, a page, a period, the heads they hold in."""

import numpy as np
import pytest
from buggy import run

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import diagnose
from mla_oracle.diagnosis.variants import tiled
from mla_oracle.mutants import columns, find, paging
from mla_oracle.oracle import expected

SIZES = "paged:heads=4,row=80,value=64,scale=0.13,block=16,seed=5"
CASE = generate(f"{SIZES},lens=330+201+1,unread=numbers,dtype=bf16")
TRUTH = expected(CASE, precision="f64")


def named(actual, case=CASE):
    return diagnose(case, actual["out"], actual["lse"], separate=False)


@pytest.mark.parametrize("tile", [80, 112])
def test_the_tile_before_the_last_of_which_an_lse_was_taken_is_read_off(tile):
    best = named(run(CASE, tiled(find("online.lse-stale"), tile))).classes[0]
    assert (best.family, best.mutant.parameters["tile"]) == ("LSE value", tile)
    assert best.share > 0.99


@pytest.mark.parametrize("zero", [False, True], ids=["as it is", "as zeros"])
def test_a_page_that_is_exchanged_with_the_last_one_is_found(zero):
    case = generate(f"{SIZES},lens=330+201+1,dtype=bf16") if zero else CASE
    best = named(run(case, paging.last_swapped(3, zero=zero)), case).classes[0]
    assert (best.family, best.mutant.parameters["page"]) == ("table entry", 3)


def test_the_period_of_columns_that_are_copies_is_found():
    best = named(run(CASE, columns.repeated(32))).classes[0]
    assert (best.family, best.mutant.name) == ("columns not computed", "value.repeated-32")


def test_weights_over_the_heads_are_named_though_one_head_alone_has_them():
    wrong = run(CASE, find("score.softmax-over-heads"))
    out = np.where(np.arange(4)[:, None] == 3, wrong["out"], TRUTH["out"]).astype(wrong["out"].dtype)
    best = named({"out": out, "lse": TRUTH["lse"].astype(np.float32)}).classes[0]
    assert (best.family, best.where) == ("softmax axis", "in head 3 only")


@pytest.mark.parametrize("lens", ["8+4+72", "8+5+71"])
@pytest.mark.parametrize("which", [range(3), [2]], ids=["every request", "the last request"])
def test_what_is_nan_alone_was_not_computed_whatever_may_have_read_it(lens, which):
    case = generate(f"paged:heads=3,row=20,value=12,scale=0.3,lens={lens},block=4,dtype=bf16")
    truth = expected(case, precision="f64")
    lost = np.isin(np.arange(3), which)
    out = np.where(lost[:, None, None], np.nan, truth["out"]).astype(np.float32)
    lse = np.where(lost[:, None], np.nan, truth["lse"]).astype(np.float32)
    found = diagnose(case, out, lse, separate=False)
    assert found.named and found.classes[0].family == "rows not computed"
    assert len(found.classes) > 1
