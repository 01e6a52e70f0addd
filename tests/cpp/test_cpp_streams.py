# SPDX-License-Identifier: Apache-2.0
"""Streams, signals, descriptors and threads: what a harness has to be spared."""

import os
import signal
import subprocess
import sys

import pytest
from fakes import ANSWER, CHECK, CLIENTS, PASS, READ, Fake, Run, answering, python

FLOOD = "import sys; sys.{0}.write({1!r} * 2_000_000); sys.{0}.flush()"


@CLIENTS
def test_two_megabytes_on_stderr_are_no_deadlock(probe: Run, fake: Fake, client: str) -> None:
    command = fake(f'{sys.executable} -c "{FLOOD.format("stderr", "x")}"\n{answering(PASS)}')
    for question in (CHECK, f"{CHECK}|backend=@100000"):
        assert f"pass as it should be | {PASS}" in probe("ask", client, command, question).stdout


def test_a_server_that_writes_before_it_reads_is_no_deadlock(probe: Run, fake: Fake) -> None:
    command = fake(f"{sys.executable} -c \"{FLOOD.format('stdout', ' ')}\"\necho '{ANSWER}'; {READ}exec cat >/dev/null")
    said = probe("ask", "server", command, f"{CHECK}|backend=@3000000").stdout.splitlines()
    assert said[1] == f"pass as it should be | {PASS}"


def test_an_endless_answer_is_a_crash(probe: Run, fake: Fake) -> None:
    for client, question in [("oracle", CHECK), ("server", CHECK)]:
        said = probe("ask", client, fake("exec tr '\\0' x </dev/zero"), question).stdout.splitlines()
        assert said[1] == "Crash: the oracle printed more than 64 MiB on stdout"


def test_the_log_keeps_the_end_of_stderr(probe: Run, fake: Fake) -> None:
    command = fake(f'{sys.executable} -c "{FLOOD.format("stderr", "x")}"; echo >&2; echo "the end" >&2; exit 70')
    assert probe("ask", "oracle", command, CHECK).stdout.splitlines()[1] == "Crash: the end"


def test_an_oracle_sees_no_blocked_signal_and_the_thread_keeps_its_own(probe: Run, fake: Fake) -> None:
    see = """
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
answer = {"verdict": "pass", "reason": str(len(blocked))}
if sys.argv[1] == "serve":
    sys.stdin.readline()
    answer = {"id": 1, "ok": True, "exit_code": 0, "result": answer}
print(json.dumps(answer), flush=True)
"""
    said = probe("blocked", fake(python(see))).stdout.splitlines()
    assert [line.split(" | ")[0] for line in said] == ["pass 0", "pass 0"]
    dead = probe("blocked", fake("exit 9")).stdout.splitlines()
    assert [line.split(":")[0] for line in dead] == ["Crash", "Crash"]


def test_signals_that_interrupt_every_call_change_no_answer(probe: Run, fake: Fake) -> None:
    said = probe("interrupted", fake(f"sleep 0.2\n{answering(PASS)}\nexec 1>&- 2>&-; sleep 0.2")).stdout.splitlines()
    assert said == [f"pass as it should be | {PASS}"] * 2


def test_threads_ask_at_once_and_no_child_inherits_anothers_pipes(probe: Run, fake: Fake) -> None:
    look = """
links = []
for fd in os.listdir("/proc/self/fd"):
    try:
        links.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    except FileNotFoundError:
        pass
clean = sorted(link for link in links if link in ("pipe", "socket")) == ["pipe", "pipe", "socket"]
answer = {"verdict": "pass" if clean else "fail"}
if sys.argv[1] == "serve":
    for line in sys.stdin:
        answered = {"id": json.loads(line)["id"], "ok": True, "exit_code": 0 if clean else 1, "result": answer}
        print(json.dumps(answered), flush=True)
else:
    print(json.dumps(answer))
    sys.exit(0 if clean else 1)
"""
    probe("threads", fake(python(look)))


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_harness_without_standard_streams_gets_its_verdicts(probe: Run, fake: Fake, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for fd in closed:
            os.close(fd)

    probe("threads", fake(answering(PASS)), preexec_fn=close, stdin=subprocess.DEVNULL)


def test_an_exit_code_taken_by_another_wait_is_a_crash(probe: Run, fake: Fake) -> None:
    def ignore_children() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    said = probe("ask", "oracle", fake(answering(PASS)), CHECK, preexec_fn=ignore_children).stdout.splitlines()[1]
    assert said == "Crash: mla-oracle check gave no valid answer and another wait took its exit code"
