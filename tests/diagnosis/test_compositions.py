# SPDX-License-Identifier: Apache-2.0
"""Two bugs at once: the second on top of the first, in the order in which a kernel makes them."""

import numpy as np
import pytest
from buggy import run

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import diagnose, made
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.diagnosis.pairs import on_top, orders, pairs
from mla_oracle.diagnosis.report import evidence_of
from mla_oracle.mutants import causal, compose, find, lengths
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



SMALL = generate("paged:heads=4,row=80,value=64,scale=0.13,block=16,seed=5,lens=61+40,dtype=bf16")
SEVERAL = generate("paged:geometry=deepseek-v3,heads=4,lens=200+64+1,tokens=2,dtype=bf16,seed=3")


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        (SMALL, made.run(17, 18, twice=False), find("lse.base-2")),
        (SMALL, causal.window(32), made.temperature(0.9)),
        (SMALL, lengths.at_most(23), made.temperature(1.3)),
        (SMALL, find("query.heads-swapped"), made.temperature(0.9)),
        (SEVERAL, find("length.last-of-several"), find("lse.base-2")),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_two_bugs_of_which_one_has_a_constant_are_named_together(case, first, second):
    actual = run(case, compose(first, second))
    found = diagnose(case, actual["out"], actual["lse"], separate=False)
    best = found.classes[0].mutant.name.split(" + ")
    assert found.named and found.classes[0].share > 0.99
    assert {name.partition("-")[0] for name in best} == {m.name.partition("-")[0] for m in (first, second)}


def test_what_a_large_bug_leaves_is_searched_for_a_smaller_one():
    actual = run(SEVERAL, compose(find("causal.page-granular"), find("temperature.row-width")))
    found = diagnose(SEVERAL, actual["out"], actual["lse"], separate=False)
    best = found.classes[0]
    assert "temperature.row-width" in best.mutant.name.split(" + ") and "causal." in best.mutant.name
    assert " still beyond" not in found.summary
    large = next(c for c in found.classes if c.family == "uniform temperature")
    assert large.share > 0.9 and large.over > 0.1


def test_the_rows_that_a_named_class_leaves_are_counted():
    actual = run(SEVERAL, find("temperature.row-width"))
    rng = np.random.default_rng(2)
    actual["out"][0, 1, 2] += rng.standard_normal(512).astype(actual["out"].dtype)
    found = diagnose(SEVERAL, actual["out"], actual["lse"], separate=False)
    assert found.named and found.classes[0].mutant.name == "temperature.row-width"
    share = 100 * found.classes[0].over
    assert share > 2 and f", {share:.3g} % of the rows are still beyond their budgets" in found.summary
