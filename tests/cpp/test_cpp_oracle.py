# SPDX-License-Identifier: Apache-2.0
"""What `Oracle`, a process per question, makes of a command that answers, lies or dies."""

import json
import os
from pathlib import Path

import pytest
from fakes import CHECK, CLIENTS, FAIL, PASS, Fake, Run, answering, python

DEATHS = {
    "exit 70": ("exit 70", "Crash: mla-oracle check gave no valid answer and ended with exit code 70"),
    "exit 70 with its line": (
        'echo "mla-oracle: internal error: boom" >&2; exit 70',
        "Crash: internal error: boom",
    ),
    "a segmentation fault": (
        "kill -SEGV $$",
        "Crash: mla-oracle check gave no valid answer and was killed by signal 11",
    ),
    "killed": ("kill -9 $$", "Crash: mla-oracle check gave no valid answer and was killed by signal 9"),
    "killed after its verdict": (
        f"echo '{FAIL}'; kill -9 $$",
        "Crash: mla-oracle check gave no valid answer and was killed by signal 9",
    ),
    "nothing": ("exit 0", "Crash: mla-oracle check gave no valid answer and ended with exit code 0"),
    "garbage": ("echo garbage", "Crash: mla-oracle check gave no valid answer and ended with exit code 0"),
    "exit 1, no JSON": (
        "echo Traceback >&2; echo MemoryError >&2; exit 1",
        "Crash: mla-oracle check gave no valid answer and ended with exit code 1: MemoryError",
    ),
    "exit 1 after a pass": (f"echo '{PASS}'; exit 1", "Crash: "),
    "exit 0 after a fail": (f"echo '{FAIL}'; exit 0", "Crash: "),
    "exit 3 after a fail": (f"echo '{FAIL}'; echo no kernel >&2; exit 3", "Unsupported: no kernel"),
    "exit 1 and half a verdict": ('echo \'{"verdict": "fail"\'; exit 1', "Crash: "),
    "exit 1 and two verdicts": (f"echo '{FAIL}{FAIL}'; exit 1", "Crash: "),
    "exit 1 and a list": ('echo \'["verdict", "fail"]\'; exit 1', "Crash: "),
    "exit 1 and a word": ("echo '\"fail\"'; exit 1", "Crash: "),
    "exit 1 and no verdict": ('echo \'{"reason": "fail"}\'; exit 1', "Crash: "),
    "exit 1 and another verdict": ('echo \'{"verdict": "failed"}\'; exit 1', "Crash: "),
    "exit 1 and an error": (
        'echo \'{"error": {"code": 2, "message": "q is bad"}}\'; exit 1',
        "Crash: mla-oracle check gave no valid answer and ended with exit code 1: q is bad",
    ),
    "bad input": (
        'echo \'{"error": {"code": 2, "message": "seq_lens[3] is -1"}}\'; echo "mla-oracle: seq_lens[3]" >&2; exit 2',
        "BadInput: seq_lens[3] is -1",
    ),
    "bad input, only words": ('echo note >&2; echo "mla-oracle: usage" >&2; exit 2', "BadInput: usage"),
    "bad input, no words": ("exit 2", "BadInput: mla-oracle check gave no valid answer and ended with exit code 2"),
    "unsupported": ('echo "mla-oracle: no fp4" >&2; exit 3', "Unsupported: no fp4"),
    "environment": ('echo "mla-oracle: no GPU" >&2; exit 4', "Environment: no GPU"),
    "a wrapper without its command": ("exec nothing-of-this-name", "Environment: "),
}


@pytest.mark.parametrize("death", DEATHS)
def test_only_a_verdict_is_a_verdict(probe: Run, fake: Fake, death: str) -> None:
    body, words = DEATHS[death]
    ready, said = probe("ask", "oracle", fake(body), CHECK).stdout.splitlines()
    assert ready == "ready" and said.startswith(words)


def test_a_verdict_needs_exit_code_and_json(probe: Run, fake: Fake) -> None:
    for verdict, code, line in [(PASS, 0, "pass as it should be"), (FAIL, 1, "fail row 3 is off")]:
        said = probe("ask", "oracle", fake(f"echo '{verdict}'; exit {code}"), CHECK).stdout.splitlines()
        assert said[1] == f"{line} | {verdict}"
        engine = probe("engine", "--oracle", fake(f"echo '{verdict}'; exit {code}"), code=code)
        assert engine.stdout.startswith(("pass: ", "mismatch: ")[code])


def test_an_engine_exits_with_the_code_of_the_error(probe: Run, fake: Fake) -> None:
    for code in (2, 3, 4, 70):
        done = probe("engine", "--oracle", fake(f'echo "mla-oracle: line {code}" >&2; exit {code}'), code=code)
        assert done.stderr == f"engine: line {code}\n"


def test_a_run_that_ends_well_without_its_file_is_a_crash(probe: Run, fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = probe("ask", "oracle", fake("echo '{}'"), f"run|case|{out}").stdout.splitlines()[1]
    assert said == f"Crash: mla-oracle run ended well, but {out}: cannot be read: No such file or directory"
    said = probe("ask", "oracle", fake(f"echo '{FAIL}'; exit 1"), f"run|case|{out}").stdout.splitlines()[1]
    assert said.startswith("Crash: mla-oracle run gave no valid answer and ended with exit code 1")


@CLIENTS
def test_a_command_that_cannot_start_is_the_environments_fault(
    probe: Run, fake: Fake, tmp_path: Path, client: str
) -> None:
    unreadable, stale = tmp_path / "not executable", fake("#!/nowhere/python\n", "stale")
    unreadable.write_text("#!/bin/sh\n")
    for command, why in [
        (tmp_path / "nothing", "No such file or directory"),
        (unreadable, "Permission denied"),
        (stale, "No such file or directory"),
        (tmp_path, "Permission denied"),
    ]:
        assert (
            probe("ask", client, command, CHECK).stdout.splitlines()[-1]
            == f"Environment: cannot start {command}: {why}"
        )


@CLIENTS
def test_the_command_is_the_argument_else_the_variable_else_on_path(
    probe: Run, fake: Fake, tmp_path: Path, client: str
) -> None:
    fakes = {
        name: fake(answering(f'{{"verdict": "pass", "reason": "{name}"}}'), name) for name in ("a", "b", "mla-oracle")
    }
    on_path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    on_path.pop("MLA_ORACLE", None)
    for command, environment, who in [
        (fakes["a"], {**on_path, "MLA_ORACLE": str(fakes["b"])}, "a"),
        ("", {**on_path, "MLA_ORACLE": str(fakes["b"])}, "b"),
        ("", {**on_path, "MLA_ORACLE": ""}, "mla-oracle"),
        ("", on_path, "mla-oracle"),
    ]:
        assert f"pass {who} |" in probe("ask", client, command, CHECK, env=environment).stdout


ECHO = python("""
if sys.argv[1] == "serve":
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"verdict": "pass", "reason": json.dumps(request)}
        print(json.dumps({"id": request["id"], "ok": True, "exit_code": 0, "result": answer}), flush=True)
else:
    print(json.dumps({"verdict": "pass", "reason": json.dumps(sys.argv[1:])}))
""")


def test_files_are_absolute_ids_are_verbatim_and_options_are_passed(probe: Run, fake: Fake, tmp_path: Path) -> None:
    odd = tmp_path / "-o $(touch oops)"
    odd.write_text("")
    asked = [
        f"check|{odd.name}|actual|tol=0.001|rtol=0",
        "check|paged:heads=2,lens=4|actual",
        "check|nowhere/x|actual|out_dtype=a b",
    ]
    absolute = f"{tmp_path}/actual"
    wanted = [
        (["check", str(odd), absolute, "--tol=0.001", "--rtol=0"], {"case": str(odd), "tol": 0.001, "rtol": 0}),
        (["check", "paged:heads=2,lens=4", absolute], {"case": "paged:heads=2,lens=4"}),
        (["check", "nowhere/x", absolute, "--out-dtype=a b"], {"case": "nowhere/x", "out_dtype": "a b"}),
    ]
    for client in ("oracle", "server"):
        lines = probe("ask", client, fake(ECHO), *asked, cwd=tmp_path).stdout
        for i, (line, (argv, request)) in enumerate(zip(lines.splitlines()[1:], wanted, strict=True)):
            told = json.loads(json.loads(line.split(" | ", 1)[1])["reason"])
            request = {"id": i + 1, "op": "check", "actual": absolute, **request}
            assert told == (argv if client == "oracle" else request)
    assert not (tmp_path / "oops").exists()
