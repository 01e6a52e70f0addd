# SPDX-License-Identifier: Apache-2.0
"""Public bugs outside the log: rejected by the suite, and the class of each named first on the case that rejects it."""

from functools import cache

import pytest
from buggy import Judged
from public_kernels import PUBLIC, RIGHT

from mla_oracle import dtypes
from mla_oracle.cases.inputs import generate
from mla_oracle.oracle import expected
from mla_oracle.suites import choose, probes
from mla_oracle.verdict.compare import check


@pytest.fixture(scope="module")
def suite():
    """id -> (case, truth)"""
    ids = choose(probes("heads=3,row=20,value=12,scale=0.3,dtype=f32", block=4, max_tokens=300)).cases
    return {case_id: prepared(case_id) for case_id in ids}


def prepared(case_id):
    case = generate(case_id)
    return case, {name: x for name, x in expected(case).items() if not name.startswith("partial_")}


def rejected(name, suite):
    """The first case that rejects a bug, and what the bug gives there."""
    bug = PUBLIC[name]
    for case_id in bug.cases or suite:
        case, truth = suite.get(case_id) or prepared(case_id)
        results = bug.run(case)
        if not check(case, results, truth, complete=True).passed:
            return case, results
    raise AssertionError(f"{name} is accepted")


@cache
def judged(case_id, kinds):
    return Judged(generate(case_id), dict(kinds))


def diagnosis(case, results):
    kinds = tuple((name, dtypes.name_of(array.dtype)) for name, array in results.items())
    return judged(case.id, kinds).diagnose(results)


def test_there_are_twenty_five_and_more():
    assert len(PUBLIC) >= 25


@pytest.mark.parametrize("kind", RIGHT)
def test_the_same_code_without_a_bug_is_accepted(kind, suite):
    own = {case_id for bug in PUBLIC.values() for case_id in bug.cases if case_id.startswith(kind)}
    for case_id in (*suite, *own) if kind == "paged" else own:
        case, truth = suite.get(case_id) or prepared(case_id)
        verdict = check(case, RIGHT[kind](case), truth, complete=True)
        assert verdict.passed, (case_id, verdict.reason)


@pytest.mark.parametrize("name", [name for name, bug in PUBLIC.items() if bug.family])
def test_a_public_bug_is_rejected_and_named(name, suite):
    found = diagnosis(*rejected(name, suite))
    assert found.named, found.summary
    assert found.classes[0].family == PUBLIC[name].family, found.summary


@pytest.mark.parametrize("name", [name for name, bug in PUBLIC.items() if not bug.family])
def test_a_public_bug_without_a_class_is_rejected_and_unknown(name, suite):
    found = diagnosis(*rejected(name, suite))
    assert not found.named and found.facts, found.summary
