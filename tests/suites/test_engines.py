# SPDX-License-Identifier: Apache-2.0
"""Commands as engines: what ill-behaved ones do is an outcome, and nothing of them stays behind."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from mla_oracle.cases.recipes import parse_id
from mla_oracle.errors import InputError
from mla_oracle.suites import Command, run_suite
from mla_oracle.suites.engines import TAIL
from mla_oracle.suites.workers import THREADS, workers

ID = str(parse_id("paged:heads=2,row=12,value=8,scale=0.3,lens=5+3,block=4"))
RIGHT = """
from mla_oracle.files.exchange import load_case, write_result
from mla_oracle.oracle import expected
def right():
    results = expected(load_case(case), precision="f64")
    write_result(out, {name: array.astype("f4") for name, array in results.items()}, {})
"""


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """The outcome of a script with `case` and `out`; the folder of temporary files is empty afterwards."""

    def run(script):
        folder = tmp_path / "tmp"
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        (tmp_path / "my engine.py").write_text(f"import os, sys, time\ncase, out = sys.argv[1:]\n{script}")
        line = f"{sys.executable} {shlex.quote(str(tmp_path / 'my engine.py'))} {{case}} {{out}}"
        (found,) = run_suite([ID], Command(line, timeout=300)).outcomes
        assert list(folder.iterdir()) == []
        return found

    return run


def gone(pid):
    """Whether the process ends, soon or later; a zombie that nobody waits for counts as ended."""
    for _ in range(600):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "script, words",
    [
        ("os.abort()", "ended by SIGABRT"),
        ("sys.exit('no device')", "exit code 1: no device"),
        ("sys.stderr.write('first\\nno\\x1b[31m device\\a\\n'); sys.exit(9)", "exit code 9: no [31m device"),
        ("open(out, 'wb').write(b'garbage!' * 9)", "cannot read the result file: header length is "),
        ("open(out, 'wb')", "cannot read the result file: it has 0 bytes, expected at least 8: a header length"),
        ("os.mkfifo(out)", "cannot read the result file: it is a device or a pipe, expected a regular file"),
        ("os.mkdir(out)", "cannot read the result file/manifest.json: "),
        ("", "exit code 0, but no result file was written"),
        (RIGHT + "right()\nsys.exit(7)", "exit code 7"),
    ],
)
def test_an_engine_without_results_is_a_crash_that_says_how(outcome, script, words):
    found = outcome(script)
    assert found.verdict == "crash" and found.reason.startswith(words)


def test_a_hang_says_what_the_engine_said_last():
    command = Command("sh -c 'echo at step 3 >&2; exec sleep 1000' {case} {out}", timeout=5)
    (found,) = run_suite([ID], command).outcomes
    assert (found.verdict, found.reason, found.stderr) == ("hang", "no result in 5 s", "at step 3")


def test_of_a_loud_engine_the_end_is_kept(outcome):
    found = outcome("for i in range(40): sys.stderr.write('x' * 1_000_000 + '\\n')\nsys.exit('at the end')")
    assert found.reason == "exit code 1: at the end"
    assert len(found.stderr) <= TAIL


@pytest.mark.parametrize("session", (False, True), ids=("same", "own"))
def test_a_child_that_keeps_stderr_open_holds_nothing_up(outcome, tmp_path, session):
    sleeper = f"subprocess.Popen(['sleep', '1000'], start_new_session={session}).pid"
    found = outcome(f"{RIGHT}\nimport subprocess\nopen({str(tmp_path / 'pid')!r}, 'w').write(str({sleeper}))\nright()")
    assert found.verdict == "pass"
    pid = int((tmp_path / "pid").read_text())
    if session:
        os.kill(pid, signal.SIGKILL)
    else:
        assert gone(pid)


def test_a_command_that_cannot_be_run_is_bad_input():
    with pytest.raises(InputError, match=r"expected one with \{out\}"):
        Command("kernel {case}")
    with pytest.raises(InputError, match="cannot be run: No such file"):
        run_suite([ID], Command("/nowhere/kernel {case} {out}"))


@pytest.mark.parametrize("jobs", (1, 2))
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), ids=lambda number: number.name)
def test_a_run_that_is_ended_in_the_middle_leaves_nothing(tmp_path, number, jobs):
    for name in ("pids", "tmp"):
        (tmp_path / name).mkdir()
    engine = f"import os, time; open(f'{tmp_path}/pids/{{os.getpid()}}', 'w'); time.sleep(1000) # {{case}} {{out}}"
    line = shlex.join([sys.executable, "-c", engine])
    reports = [f"--{name}={tmp_path / name}" for name in ("json", "html", "junit")]
    run = subprocess.Popen(
        [sys.executable, "-m", "mla_oracle", "suite", "run", *[ID] * 4, "--exec", line, "--jobs", str(jobs), *reports],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    try:
        while len(pids := os.listdir(tmp_path / "pids")) < jobs and run.poll() is None:
            time.sleep(0.1)
        if number == signal.SIGINT:
            os.killpg(run.pid, number)  # as a terminal does; the commands have sessions of their own
        else:
            run.send_signal(number)
        out, err = run.communicate()
        assert (run.returncode, out) == (130 if number == signal.SIGINT else -number, b"")
        if number == signal.SIGINT:
            assert err == b"mla-oracle: interrupted\n"
        assert len(pids) == jobs and all(gone(pid) for pid in pids)
    finally:
        for pid in [run.pid, *map(int, os.listdir(tmp_path / "pids"))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for _ in range(600):  # the workers remove what is theirs after the commands are gone
        if not list((tmp_path / "tmp").iterdir()):
            break
        time.sleep(0.1)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pids", "tmp"]


def test_workers_share_the_cores_and_commands_are_not_told(monkeypatch):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    with workers(2) as pool, pool() as executor:
        assert os.environ["OMP_NUM_THREADS"] == "3"
        told = executor.submit(subprocess.check_output, [sys.executable, "-c", SAY], text=True).result()
    assert told == "[None, None, None]\n"
    assert not any(name in os.environ for name in THREADS)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with workers(2) as pool, pool() as executor:
        told = executor.submit(subprocess.check_output, [sys.executable, "-c", SAY], text=True).result()
    assert told == "[None, '5', None]\n"


SAY = f"import os; print([os.environ.get(name) for name in {THREADS}])"
