# SPDX-License-Identifier: Apache-2.0
"""One process, many questions: every line is answered, errors too, and the process lives on."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

CASE = "paged:heads=2,row=40,value=32,lens=0+1+17,block=16,scale=0.5"


def serve(*lines: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "mla_oracle", "serve"], input="\n".join(lines), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_case_is_made_run_and_checked(tmp_path: Path) -> None:
    case, out = str(tmp_path / "case"), str(tmp_path / "out")
    answers = serve(
        json.dumps({"id": 1, "op": "case", "case": CASE, "out": case}),
        json.dumps({"id": "two", "op": "run", "case": case, "out": out, "precision": "f32"}),
        json.dumps({"id": None, "op": "check", "case": case, "actual": out}),
        json.dumps({"id": 4, "op": "check", "case": case, "actual": out, "tol": 0}),
        json.dumps({"id": 5, "op": "check", "case": case, "actual": out, "numerics": "strict", "rules": "all"}),
    )
    assert [answer["id"] for answer in answers] == [1, "two", None, 4, 5]
    assert [answer["exit_code"] for answer in answers] == [0, 0, 0, 0, 0]
    assert "preset strict" in answers[4]["result"]["reason"] and len(answers[4]["result"]["rules"]) == 8
    assert answers[2]["result"]["verdict"] == answers[3]["result"]["verdict"] == "pass"
    assert not answers[3]["result"]["rules"]["tol"]["accepts"]


def test_an_answer_comes_before_the_next_question() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "mla_oracle", "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    ) as process:
        for number in range(3):
            process.stdin.write(f'{{"id": {number}, "op": "info"}}\n')
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60)[0]
            assert json.loads(process.stdout.readline())["id"] == number
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", None),
        ("not json", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[1]", "expected an object"),
        ('{"id": NaN, "op": "info"}', "not JSON"),
        ('{"id": 1e999, "op": "info"}', "not JSON"),
        ('{"op": "check", "case": "x", "actual": "y", "tol": 1' + "0" * 400 + "}", "more than 64 bits"),
        ('{"op": "frob"}', "op is 'frob'"),
        ('{"op": ["run"]}', "op is"),
        ('{"op": "run"}', "run needs case"),
        ('{"op": "run", "case": 7}', "case is 7"),
        ('{"op": "run", "case": "x", "frob": 1}', "does not take frob"),
        ('{"op": "run", "case": "nowhere"}', "nowhere"),
        ('{"op": "check", "case": "' + CASE + '", "actual": "nowhere", "tol": true}', "tol is True"),
        ('{"op": "run", "case": "x", "threads": "2"}', "threads is '2', expected an integer"),
        ('{"op": "run", "case": "x", "isa": 3}', "isa is 3, expected a string"),
        ('{"op": "run", "case": "\\u0000:"}', ""),
    ],
)
def test_a_bad_line_is_answered_and_survived(line: str, said: str | None) -> None:
    *bad, good = serve(line, json.dumps({"id": 9, "op": "run", "case": CASE}))
    assert good["id"] == 9 and good["ok"]
    assert len(bad) == (said is not None)
    for answer in bad:
        assert not answer["ok"] and answer["error"]["code"] == 2 and said in answer["error"]["message"]
        assert "\n" not in answer["error"]["message"]


def test_bytes_that_are_not_utf8_are_answered() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mla_oracle", "serve"], input=b"\xff\xfe\n", capture_output=True
    )
    assert json.loads(done.stdout)["error"]["code"] == 2
