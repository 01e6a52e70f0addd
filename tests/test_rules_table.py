# SPDX-License-Identifier: Apache-2.0
"""The README's table of published rules is what benchmarks/rules.py measured, and measures still."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from mla_oracle.mutants import bank
from mla_oracle.verdict.rules import RULES

ROOT = Path(__file__).parents[1]
CLEAR = 1.25  # figures this far from 1 are the same on every machine


@pytest.fixture(scope="module")
def rules():
    """benchmarks/rules.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("rules")


@pytest.fixture(scope="module")
def measured(rules):
    return rules.read()


def test_the_readme_shows_the_file(rules, measured) -> None:
    lines = list(rules.table(measured))
    assert len(lines) == 2 + len(RULES) + 1 == 11
    assert "\n".join(lines) in (ROOT / "README.md").read_text()


def test_the_file_is_of_every_rule_and_of_mutants_that_are_there(measured) -> None:
    assert list(measured["rules"]) == list(RULES)
    assert set(measured["mutants"]) <= {mutant.name for mutant in bank()}
    assert len(measured["mutants"]) > 330


def test_no_rule_sees_what_the_suite_does(rules, measured) -> None:
    assert measured["suite"]["unseen"] == []
    for name in RULES:
        absent, accepted, _ = rules.counts(measured, name)
        assert absent + accepted > 20, name


@pytest.mark.parametrize("name", RULES)
def test_a_sample_measured_again_is_the_same(rules, measured, name: str) -> None:
    before = measured["rules"][name]["figures"]
    rng = np.random.default_rng(list(RULES).index(name))
    accepted = [m for m, figure in before.items() if figure is not None and figure < 1 / CLEAR]
    rejected = [m for m, figure in before.items() if figure is not None and figure > CLEAR]
    absent = [m for m, figure in before.items() if figure is None]
    chosen = {str(m) for group in (accepted, rejected, absent) for m in rng.permutation(group)[:3]}
    again = rules.figures(name, tuple(m for m in bank() if m.name in chosen), ("figures",))["figures"]
    assert set(again) == chosen and len(chosen) == 9
    for mutant, figure in again.items():
        if figure is None or before[mutant] is None:
            assert figure is before[mutant] is None, mutant
        else:
            assert (figure <= 1) == (before[mutant] <= 1), (mutant, figure, before[mutant])
            assert min(figure, 1e9) == pytest.approx(before[mutant], rel=0.1, abs=1e-3), mutant
