# SPDX-License-Identifier: Apache-2.0
"""Two bugs at once: the second on top of the first, in the order in which a kernel makes them."""

import numpy as np
import pytest
from buggy import run

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import diagnose
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.diagnosis.pairs import on_top, orders, pairs
from mla_oracle.diagnosis.report import evidence_of
from mla_oracle.mutants import compose, find, lengths
from mla_oracle.oracle import expected

CASE = generate("paged:heads=2,row=96,value=64,scale=0.15,lens=65+0+32+131+60,block=16,unread=numbers,dtype=bf16")
TRUTH = expected(CASE, precision="f64")
DROPPED, ONE_LESS, WHOLE_PAGES = (find(name) for name in ("rope.dropped", "length.minus-one", "length.whole-pages"))


def evidence(actual):
    measure = Measure(CASE, TRUTH, {"out": "bf16", "lse": "f32"})
    units = {name: measure.units(name, array, TRUTH[name]) for name, array in actual.items()}
    return evidence_of(CASE, actual, TRUTH, measure, units)[0]


@pytest.mark.parametrize("second", [ONE_LESS, lengths.shift(-3)], ids=["of the bank", "with a constant of its own"])
def test_a_second_bug_that_explains_nothing_alone_is_found_on_top_of_the_first(second):
    actual = run(CASE, compose(DROPPED, second))
    assert evidence(actual).fits([second])[0].share < 0.1
    found = diagnose(CASE, actual["out"], actual["lse"], truth=TRUTH, separate=False)
    best = found.classes[0]
    assert found.named and best.share > 0.99
    assert f"{DROPPED.name} + {second.name}" in (best.mutant.name, *best.variants)
    assert found.classes[1].mutant.name == DROPPED.name


def names(mutants):
    return [mutant.name for mutant in mutants]


def test_both_orders_are_tried_of_two_that_do_not_commute():
    for order in ((WHOLE_PAGES, ONE_LESS), (ONE_LESS, WHOLE_PAGES)):
        wrong = evidence(run(CASE, compose(*order)))
        fits = wrong.fits([WHOLE_PAGES, ONE_LESS, DROPPED])
        both = {f"{WHOLE_PAGES.name} + {ONE_LESS.name}", f"{ONE_LESS.name} + {WHOLE_PAGES.name}"}
        assert both <= set(names(pairs(wrong, fits)))
        assert compose(*order).name in names(on_top(wrong, fits[:1], 0))
    one, two = (compose(*order).run(CASE) for order in ((WHOLE_PAGES, ONE_LESS), (ONE_LESS, WHOLE_PAGES)))
    assert not np.allclose(one["lse"], two["lse"])


def test_one_order_is_tried_of_two_that_commute():
    wrong = evidence(run(CASE, DROPPED))
    assert names(orders(wrong, DROPPED, ONE_LESS)) == [f"{DROPPED.name} + {ONE_LESS.name}"]
    fits = wrong.fits([WHOLE_PAGES, ONE_LESS, DROPPED])
    tried = names(on_top(wrong, fits, 0))
    assert f"{DROPPED.name} + {ONE_LESS.name}" in tried and f"{ONE_LESS.name} + {DROPPED.name}" not in tried

