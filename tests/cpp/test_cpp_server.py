# SPDX-License-Identifier: Apache-2.0
"""What `Server`, one process for all questions, makes of a command that answers, lies or dies."""

import os
from pathlib import Path

import pytest
from fakes import ANSWER, CHECK, PASS, READ, Fake, Run

SERVER_DEATHS = {
    "it never starts": ("exit 70", "and ended with exit code 70"),
    "it reads and exits": (READ + "echo MemoryError >&2; exit 1", "and ended with exit code 1: MemoryError"),
    "it is killed": (READ + "kill -9 $$", "and was killed by signal 9"),
    "it is killed in the middle of its answer": (
        READ + "printf '{\"id\": 1'; kill -9 $$",
        "and was killed by signal 9",
    ),
    "it ends in the middle of its answer": (READ + f"printf '{ANSWER}'", "and ended with exit code 0"),
    "it ends well, saying nothing": (READ + "exit 0", "and ended with exit code 0"),
    "it closes its stdin and stays": ("exec 0<&-; exec sleep 60", "and was killed by signal 9"),
    "it closes its stdout and stays": (READ + "exec 1>&-; exec sleep 60", "and was killed by signal 9"),
}


@pytest.mark.parametrize("death", SERVER_DEATHS)
def test_a_server_that_dies_is_a_crash_and_stays_one(probe: Run, fake: Fake, death: str) -> None:
    body, words = SERVER_DEATHS[death]
    ready, said, again = probe("ask", "server", fake(body), f"{CHECK}|backend=@1000000", CHECK).stdout.splitlines()
    assert (ready, said) == ("ready", f"Crash: mla-oracle serve gave no valid answer {words}")
    assert again == "Crash: mla-oracle serve is gone since its last crash"


LYING_ANSWERS = {
    "garbage": "garbage",
    "an empty line": "",
    "half an object": '{"id": 1',
    "a list": "[1]",
    "no ok": f'{{"id": 1, "exit_code": 0, "result": {PASS}}}',
    "ok is a word": ANSWER.replace("true", '"true"'),
    "no id": ANSWER.replace('"id": 1, ', ""),
    "another id": ANSWER.replace('"id": 1', '"id": 2'),
    "the id null": ANSWER.replace('"id": 1', '"id": null'),
    "no result": '{"id": 1, "ok": true, "exit_code": 0}',
    "no exit code": ANSWER.replace('"exit_code": 0, ', ""),
    "pass and exit code 1": ANSWER.replace('"exit_code": 0', '"exit_code": 1'),
    "fail and exit code 0": ANSWER.replace('"pass"', '"fail"'),
    "no verdict and exit code 1": '{"id": 1, "ok": true, "exit_code": 1, "result": {}}',
    "an error to another question": '{"id": 2, "ok": false, "error": {"code": 2, "message": "no"}}',
    "an error without a code": '{"id": 1, "ok": false, "error": {"message": "no"}}',
    "an error that is a word": '{"id": 1, "ok": false, "error": "no"}',
}


@pytest.mark.parametrize("lie", LYING_ANSWERS)
def test_an_answer_of_the_server_that_lies_is_a_crash(probe: Run, fake: Fake, lie: str) -> None:
    body = f"{READ}echo '{LYING_ANSWERS[lie]}'; exec sleep 60"
    _, said, again = probe("ask", "server", fake(body), CHECK, CHECK).stdout.splitlines()
    assert said.startswith("Crash: mla-oracle serve gave no valid answer: ")
    assert again == "Crash: mla-oracle serve is gone since its last crash"


def test_an_answered_error_is_its_class_and_the_server_goes_on(probe: Run, fake: Fake) -> None:
    errors = [(2, "BadInput"), (3, "Unsupported"), (4, "Environment"), (70, "Crash"), (1, "Crash"), (0, "Crash")]
    lines = [f'{{"id": {i}, "ok": false, "error": {{"code": {code}, "message": "line {i}"}}}}'
             for i, (code, _) in enumerate(errors, 1)]  # fmt: skip
    lines.append('{"id": null, "ok": false, "error": {"code": 2, "message": "not JSON"}}')
    lines.append(ANSWER.replace('"id": 1', '"id": 8'))
    body = "\n".join(f"{READ}echo '{line}'" for line in lines)
    said = probe("ask", "server", fake(body), *[CHECK] * len(lines)).stdout.splitlines()
    assert said[1:-2] == [f"{name}: line {i}" for i, (_, name) in enumerate(errors, 1)]
    assert said[-2:] == ["BadInput: not JSON", f"pass as it should be | {PASS}"]


def test_the_server_is_gone_when_its_owner_is_done(probe: Run, fake: Fake, tmp_path: Path) -> None:
    for name, body in [("heeds", "exec cat >/dev/null"), ("ignores", "exec sleep 60")]:
        pid_file = tmp_path / name
        command = fake(f"echo $$ > '{pid_file}'; {READ}echo '{ANSWER}'; {body}")
        assert probe("ask", "server", command, CHECK).stdout.splitlines()[1].startswith("pass")
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)
