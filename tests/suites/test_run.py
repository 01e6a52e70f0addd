# SPDX-License-Identifier: Apache-2.0
"""An engine over a suite: right, wrong, crashing and hanging ones; executors; the reports."""

import json
import os
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from mla_oracle.cases import PagedCase
from mla_oracle.cases.inputs import generate
from mla_oracle.cases.recipes import parse_id
from mla_oracle.cli import main
from mla_oracle.errors import InputError
from mla_oracle.mutants import find
from mla_oracle.oracle import expected
from mla_oracle.suites import run_suite
from mla_oracle.suites.command import write_text
from mla_oracle.suites.junit import junit
from mla_oracle.suites.outcome import Outcome, Report

SIZES = "heads=3,row=20,value=12,scale=0.3"
IDS = [
    str(parse_id(case_id))
    for case_id in (
        f"paged:{SIZES},lens=5+0+1+11+8+2,tokens=3,block=4,unread=numbers",
        f"paged:{SIZES},lens=9+5,block=4",
        f"paged:{SIZES},lens=12+3,tokens=2,block=1,unread=numbers",
    )
]


def right(case):
    return {name: array.astype(np.float32) for name, array in expected(case, precision="f64").items()}


def unmasked(case):
    mutant = find("causal.none")
    results = mutant.run(case) if mutant.applies(case) is None else right(case)
    return results["out"].astype(np.float32), results["lse"].astype(np.float32)


def raising(case):
    raise ValueError("no such\nlayout")


def dying(case):
    if case.kv_cache.shape[1] == 1:
        os._exit(3)
    return right(case)


def test_a_right_engine_passes_everywhere():
    report = run_suite(IDS, right)
    assert [o.verdict for o in report.outcomes] == ["pass"] * 3
    assert report.passed and report.summary == ""
    assert report.table().splitlines()[0].split() == ["case", "verdict", "suspected", "class", "where"]
    assert report.table().splitlines()[-1] == "3 pass"


def test_a_wrong_engine_fails_where_the_bug_shows_and_its_class_is_named():
    told = []
    report = run_suite(IDS, unmasked, progress=lambda outcome, done, total: told.append((outcome.case, done, total)))
    assert [o.verdict for o in report.outcomes] == ["fail", "pass", "fail"]
    assert {o.suspected for o in report.outcomes} == {"no causal bound", ""}
    assert report.outcomes[0].where == "only queries 0, 1 of 3 are wrong"
    assert report.summary.startswith("suspected over all cases: no causal bound (causal.none")
    assert [done for _, done, _ in told] == [1, 2, 3]
    assert all(o.case == case for o, case in zip(report.outcomes, IDS, strict=True))
    cube = np.array(report.outcomes[0].errors["out"])
    assert cube.shape == (6, 3, 3)
    assert (cube[3, 2] <= 1).all() and (cube[3, 0] > 1).all()


def test_cases_that_pass_although_the_suspected_class_would_fail_them_are_told():
    report = run_suite(IDS, lambda case: unmasked(case) if case.kv_cache.shape[1] == 1 else right(case))
    assert [o.verdict for o in report.outcomes] == ["pass", "pass", "fail"]
    assert report.summary.endswith("1 failing case; 1 case passes that it would fail")


def test_failures_that_no_class_explains_have_none_named_over_all():
    def noisy(case):
        rng, results = np.random.default_rng(0), right(case)
        return results | {"out": results["out"] + rng.normal(size=results["out"].shape).astype(np.float32)}

    report = run_suite(IDS[1:2], noisy)
    assert [(o.verdict, o.suspected) for o in report.outcomes] == [("fail", "")]
    assert report.summary == "no class explains 1 failing case"


def test_a_crash_and_a_hang_are_errors_of_junit():
    outcomes = [Outcome(verdict, verdict, "words") for verdict in ("pass", "fail", "crash", "hang", "hang")]
    suite = ET.fromstring(junit(Report(outcomes)))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "3")
    assert [child.tag for case in suite for child in case] == ["failure", "error", "error", "error"]


def test_an_engine_that_raises_is_a_crash_and_not_an_end():
    report = run_suite(IDS[:2], raising)
    assert [(o.verdict, o.reason) for o in report.outcomes] == [("crash", "ValueError: no such layout")] * 2


def test_what_an_engine_returns_in_the_wrong_form_fails_with_the_form():
    def short(case):
        return right(case)["out"][:1]

    def integers(case):
        return {"out": right(case)["out"].astype(np.int32)}

    def foreign(case):
        return {"out": right(case)["out"], "weights": np.zeros(3)}

    for engine, words in (
        (short, "out is [1, 3, 12], expected"),
        (integers, "out is i32, expected"),
        (foreign, "the actual results hold weights"),
    ):
        outcome = run_suite(IDS[1:2], engine).outcomes[0]
        assert outcome.verdict == "fail" and outcome.reason.startswith(words), outcome.reason


@pytest.mark.parametrize("numerics", ["bogus", "p=foo", {"rows": "f32"}])
def test_numerics_that_are_none_are_refused_and_not_the_engines_failure(numerics):
    ran = []
    with pytest.raises(InputError, match="numerics"):
        run_suite(IDS[:1], lambda case: ran.append(case) or right(case), numerics=numerics)
    assert not ran


def test_threads_and_processes_give_the_same_report():
    alone = run_suite(IDS, unmasked)
    with ThreadPoolExecutor(2) as threads:
        threaded = run_suite(IDS, unmasked, threads)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        spread = run_suite(IDS, unmasked, processes)
    assert alone.table() == threaded.table() == spread.table()


def test_a_case_that_ends_its_worker_is_a_crash_and_takes_none_with_it():
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes,
        pytest.warns(RuntimeWarning, match="the executor broke"),
    ):
        report = run_suite([IDS[2], *IDS[:2]], dying, processes)
    assert [(o.case, o.verdict) for o in report.outcomes] == [(IDS[2], "crash"), (IDS[0], "pass"), (IDS[1], "pass")]
    assert "BrokenProcessPool" in report.outcomes[0].reason


def test_an_engine_that_exits_is_a_crash():
    outcome = run_suite(IDS[1:2], lambda case: sys.exit("no device")).outcomes[0]
    assert (outcome.verdict, outcome.reason) == ("crash", "SystemExit: no device")


ENGINE = """
import sys, os
from mla_oracle.files.exchange import load_case, write_result
from mla_oracle.oracle import expected
case = load_case(sys.argv[1])
if case.q.ndim == 3: os.abort()
write_result(sys.argv[2], {k: v.astype("f4") for k, v in expected(case, precision="f64").items()}, {})
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "my engine.py").write_text(ENGINE)
    return f"{sys.executable} '{tmp_path / 'my engine.py'}' {{case}} {{out}}"


def test_the_command_line_writes_every_report(tmp_path, command, capsys):
    files = {name: tmp_path / f"report.{name}" for name in ("junit", "json", "html")}
    options = [f"--{name}={path}" for name, path in files.items()]
    code = main(["suite", "run", *IDS[:2], "--exec", command, "--jobs", "2", "--timeout", "60", *options])
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert code == 1
    assert (answer["pass"], answer["crash"]) == (1, 1)
    assert "[2/2]" in err and err.splitlines()[-1] == "1 pass, 1 crash"
    assert json.loads(files["json"].read_text()) == answer
    tree = ET.fromstring(files["junit"].read_text())
    assert [(s.get("tests"), s.get("errors")) for s in tree] == [("2", "1")]
    assert "ended by SIGABRT" in files["html"].read_text()


def test_a_result_that_is_missing_is_said():
    report = run_suite(IDS[:2], lambda case: {"out": right(case)["out"]})
    assert report.passed and [o.missing for o in report.outcomes] == [("lse",)] * 2
    assert report.table().splitlines()[-1] == "not judged: lse, missing from the results of 2 cases"


def test_a_report_that_finds_no_room_costs_no_other(tmp_path, command, capsys):
    options = ["--json", "/dev/full", "--junit", str(tmp_path / "junit.xml"), "--timeout", "300"]
    code = main(["suite", "run", IDS[0], "--exec", command, *options])
    out, err = capsys.readouterr()
    assert code == 2
    assert json.loads(out)["error"]["message"] == "/dev/full cannot be written: No space left on device"
    assert err.splitlines()[-2] == "1 pass"
    assert ET.parse(tmp_path / "junit.xml").getroot()[0].get("tests") == "1"


def test_a_report_replaces_what_was_there_whole_and_through_links(tmp_path, monkeypatch):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(str(link), "new")
    assert (target.read_text(), link.is_symlink()) == ("new", True)

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="target cannot be written: No space left on device"):
        write_text(str(target), "newer")
    assert target.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_cases_can_be_given_as_they_are():
    case = generate(IDS[1])
    assert isinstance(case, PagedCase)
    assert run_suite([case], right).outcomes[0].case == IDS[1]
