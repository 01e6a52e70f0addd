# SPDX-License-Identifier: Apache-2.0
"""Suites of cases beyond the plain problem: their sets, the command, and an engine with a bug over them."""

import json

import numpy as np
import pytest

from mla_oracle import generate, load_case
from mla_oracle.cli import main
from mla_oracle.errors import InputError
from mla_oracle.mutants import find
from mla_oracle.oracle import expected
from mla_oracle.suites.extended import GROUPS, SETS, extended, names_like, names_of
from mla_oracle.suites.run import run_one, run_suite

SIZES = "heads=4,row=24,value=16,scale=0.3"
HOW = ["--geometry", SIZES, "--dtype", "f32", "--block", "4"]


def engine(name):
    """A kernel with the bug `name`, or without one."""

    def run(case):
        results = expected(case) if name is None or find(name).applies(case) else find(name).run(case)
        return {n: x.astype(np.float32) for n, x in results.items()}

    return run


def test_a_suite_with_windows_is_of_windows(tmp_path, capsys):
    folder = tmp_path / "suite"
    assert main(["suite", *HOW, "--with", "window", "-o", str(folder)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["with"] == "window" and answer["unseen"] == [] and answer["cases"]
    for entry in answer["cases"]:
        case = load_case(str(folder / entry["file"]))
        assert case.window_left is not None or case.window_right is not None
        assert case.id == entry["case"]


def test_a_set_that_is_not_known_is_refused(capsys):
    assert main(["suite", *HOW, "--with", "windows+sinks"]) == 2
    said = json.loads(capsys.readouterr().out)["error"]["message"]
    assert said.startswith("with has 'windows', expected formats, all, sparse, ")
    with pytest.raises(InputError):
        names_of("")


def test_groups_are_taken_apart():
    assert names_of("window+formats")[0] == "window" and set(names_of("all")) == set(SETS)
    assert set(GROUPS["formats"]) <= set(SETS)


def test_sizes_that_a_set_cannot_have_are_left_out():
    odd = extended("heads=3,row=16,value=16,scale=0.3", ("layout",), block=4)
    assert odd and not any("kv_heads" in case_id or "kpe" in case_id for case_id in odd)
    v3 = extended("geometry=deepseek-v3,dtype=bf16", ("sparse-fp8",))
    assert all(names_like(generate(case_id)) for case_id in v3)


@pytest.mark.parametrize(
    ("of", "name"), [("window", "sight.window-left-none"), ("sinks", "sink.twice"), ("ragged", "temperature.double")]
)
def test_an_engine_with_a_bug_is_named(of, name):
    ids = extended(f"{SIZES},dtype=f32", (of,), block=4)
    outcome = run_one(ids[0], engine(name))
    assert (outcome.verdict, outcome.suspected) == ("fail", find(name).family)


def test_a_right_engine_passes_and_its_report_is_written():
    ids = extended(f"{SIZES},dtype=f32", ("layout",), block=4)
    report = run_suite(ids, engine(None))
    assert report.passed and len(report.outcomes) == len(ids)


def test_all_failures_together_name_one_bug():
    ids = extended(f"{SIZES},dtype=f32", ("window",), block=4)[:2]
    report = run_suite(ids, engine("sight.window-left-none"))
    assert not report.passed and "window" in report.summary
