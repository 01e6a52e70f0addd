# SPDX-License-Identifier: Apache-2.0
"""Verdicts on cases that are not plain: an LSE in its own axes, places in words."""

import dataclasses
import json

import numpy as np
import pytest
from ids import IDS, SMALL, made

from mla_oracle import (
    UnsupportedError,
    check,
    cli,
    commands,
    diagnosis,
    expected,
    read_case,
    serve,
    write_case,
    write_result,
)
from mla_oracle.pytest_plugin import Oracle
from mla_oracle.verdict.locate import locate

BHT = "tokens=2,lse_axes=BHT"


def results(case, precision="f32"):
    return {name: array.copy() for name, array in expected(case, precision=precision).items()}


def test_an_lse_in_the_axes_bht_is_judged_by_its_budget():
    case = made(BHT)
    truth = expected(case)
    verdict = check(case, results(case), truth)
    assert verdict.passed and truth["lse"].shape == (6, 4, 2)
    assert "within budget" in verdict.reason and {"out", "lse"} == set(verdict.figures)
    plain = made("tokens=2")
    judged = check(plain, results(plain), expected(plain))
    for name in ("out", "lse"):
        assert verdict.figures[name].units == judged.figures[name].units


def test_an_error_in_an_lse_in_the_axes_bht_is_placed_by_request_query_and_head():
    case = made(BHT)
    truth, actual = expected(case), results(case)
    actual["lse"][4, 3, 1] += 0.5
    verdict = check(case, actual, truth)
    assert not verdict.passed
    worst = verdict.figures["lse"].worst
    assert (worst["request"], worst["query"], worst["head"]) == (4, 1, 3) and worst["index"] == [4, 3, 1]
    assert worst["actual"] == actual["lse"][4, 3, 1] and worst["expected"] == truth["lse"][4, 3, 1]
    assert verdict.reason.startswith("lse is ") and "request 4, query 1, head 3" in verdict.reason
    actual["lse"][4, 3, 1] = np.nan
    assert "request 4, query 1, head 3" in check(case, actual, truth).reason


def test_an_lse_in_other_axes_than_the_case_says_is_a_wrong_shape():
    case, plain = made(BHT), made("tokens=2")
    for one, other in ((case, plain), (plain, case)):
        verdict = check(one, results(other), expected(one))
        assert not verdict.passed
        shapes = list(expected(other)["lse"].shape), list(expected(one)["lse"].shape)
        assert f"lse is {shapes[0]}, expected {shapes[1]}" in verdict.reason


def test_a_failure_in_the_axes_bht_is_diagnosed(tmp_path):
    case = made("tokens=2,lse_axes=BHT,unread=numbers")
    actual = results(case)
    actual["lse"] /= np.float32(np.log(2))
    write_case(tmp_path / "case", case)
    write_result(tmp_path / "actual", actual, {})
    answer = commands.check(str(tmp_path / "case"), str(tmp_path / "actual"), diagnose=True)
    assert answer["verdict"] == "fail" and "diagnosis" in answer
    assert "base" in str(answer["diagnosis"])


@pytest.mark.parametrize("options", IDS)
def test_every_case_is_judged_by_its_budget(options):
    case = made(options)
    truth = expected(case)
    actual = results(case)
    verdict = check(case, actual, truth)
    assert verdict.passed and "within budget" in verdict.reason
    b, *rest = np.unravel_index(int(np.abs(truth["out"]).argmax()), truth["out"].shape)
    actual["out"][(b, *rest)] *= 1.3
    verdict = check(case, actual, truth)
    assert not verdict.passed and verdict.figures["out"].worst["index"] == [int(b), *(int(i) for i in rest)]
    assert verdict.figures["out"].worst["column"] == rest[-1]


def test_a_row_is_placed_by_its_request_and_the_last_of_its_keys():
    case = made("ragged=2+1+0+3+1+2")
    page = case.block_table[3, 1]
    assert locate(case, "out", (5, 2, 7))["text"] == (
        f"request 3, query 2, head 2, column 7, keys 5, token 4, page {page}, slot 0"
    )
    first = "request 3, query 0, head 1, keys 3, token 2"
    assert locate(case, "lse", (3, 1))["text"] == f"{first}, page {case.block_table[3, 0]}, slot 2"
    assert locate(case, "lse", (0, 1))["text"] == "request 0, query 0, head 1, keys 0"


def test_a_row_over_a_list_is_placed_by_the_last_slot_it_names():
    case = made("topk=3,topk_by=slot,tokens=2")
    for b, t in ((4, 0), (5, 1)):
        named = [k for k in case.topk_indices[b, t] if k >= 0]
        page, slot = divmod(int(named[-1]), 4)
        assert locate(case, "out", (b, t, 2, 3))["text"] == (
            f"request {b}, query {t}, head 2, column 3, keys {len(named)}, page {page}, slot {slot}"
        )
    case = made("topk=4,extra=3+0+9+17+2+40,extra_topk=5,extra_block=2,tokens=2")
    place = locate(case, "out", (5, 1, 0, 3))
    token = [k for k in case.extra_topk_indices[5, 1] if k >= 0][-1]
    assert place["extra token"] == token and place["extra page"] == case.extra_block_table[5, token // 2]
    assert place["slot"] == token % 2


@pytest.fixture
def failing(tmp_path):
    """The files of a case with a softcap and lists, and of results of a kernel that ignores the softcap."""
    case = made("softcap=3,topk=6,tokens=2,unread=numbers")
    write_case(tmp_path / "case", case)
    write_result(tmp_path / "actual", results(dataclasses.replace(case, softcap=None)), {})
    return str(tmp_path / "case"), str(tmp_path / "actual")


UNTOLD = "nothing is suspected: softcap is not supported by the diagnosis"


@pytest.fixture
def refusing(monkeypatch):
    """A diagnosis that does not take the case."""

    def refuse(*args, **how):
        raise UnsupportedError("softcap is not supported by the diagnosis")

    for name in ("diagnose", "discrimination"):
        monkeypatch.setattr(diagnosis, name, refuse)


def test_a_failure_is_diagnosed_in_the_command_and_in_the_fixture(failing):
    found = commands.check(*failing, diagnose=True)
    assert found["verdict"] == "fail" and found["diagnosis"]["facts"]
    assert "nothing is suspected" not in found["diagnosis"]["summary"]


def test_a_failure_that_nothing_is_suspected_of_is_a_verdict_all_the_same(failing, refusing, capsys):
    assert cli.main(["check", *failing, "--diagnose", "--blind"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["verdict"] == "fail" and found["diagnosis"]["summary"] == UNTOLD
    assert not found["diagnosis"]["named"] and found["diagnosis"]["classes"] == []
    assert found["discrimination"]["sentences"] == [UNTOLD]
    assert said.err.count(UNTOLD) == 2 and "request " in said.err and "keys " in said.err
    right = commands.check(failing[0], failing[1], numerics="scores=bf16")
    assert right["verdict"] == "fail"


def test_the_server_answers_with_the_same_verdict(failing, refusing):
    case, actual = failing
    request = {"id": 3, "op": "check", "case": case, "actual": actual, "diagnose": True}
    found = serve.answer(json.dumps(request).encode())
    assert found["ok"] and found["exit_code"] == 1 and found["result"]["diagnosis"]["summary"] == UNTOLD


def test_the_fixture_says_what_is_not_suspected(failing, refusing):
    case = read_case(failing[0])
    oracle = Oracle(None, None)
    right = results(case)
    assert oracle.check(case, right["out"], right["lse"]).passed
    wrong = results(dataclasses.replace(case, softcap=None))
    with pytest.raises(pytest.fail.Exception) as error:
        oracle.check(case, wrong["out"], wrong["lse"])
    assert str(error.value).splitlines()[1] == UNTOLD


@pytest.mark.parametrize("options", ["kpe=3", "topk=40,invalid=none,topk_by=slot", "kv_heads=2", "softcap=9"])
def test_a_number_that_is_not_finite_is_placed_in_the_cache(options):
    case = made(options)
    rows = case.kv_cache.copy()
    seen = np.argwhere(np.isfinite(rows.reshape(*rows.shape[:2], -1)).all(axis=2))
    block, offset = seen[7]
    rows[block, offset, ..., 5] = np.inf
    case = dataclasses.replace(case, kv_cache=rows)
    found = check(case, results(case), expected(case)).nonfinite_inputs
    assert [f["tensor"].rpartition(" ")[2] for f in found] == ["kv_cache"]
    assert found[0]["index"] == [block, offset, 5] and found[0]["value"] == "inf"
    assert found[0]["count"] == (2 if "kv_heads" in options else 1)


def test_the_commands_take_a_case_that_is_not_plain(tmp_path):
    name = f"{SMALL},topk=6,topk_by=slot,tokens=2,sinks=normal"
    commands.make_case(name, str(tmp_path / "case"))
    answer = commands.run(str(tmp_path / "case"), str(tmp_path / "actual"))
    assert answer["backend"] in ("strict", "fast")
    assert commands.check(str(tmp_path / "case"), str(tmp_path / "actual"))["verdict"] == "pass"
    with pytest.raises(UnsupportedError, match=r"^softcap is not supported by backend 'ptx'$"):
        commands.run(f"{name},softcap=2", backend="ptx")
