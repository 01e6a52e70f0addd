# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while blocks run: the interpreter answers within a block, on every thread."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from snippets import text

LANE = np.arange(32, dtype=np.uint32)

# Runs the command on its arguments, where no block is ever given up, and says when the machine begins.
INTERRUPTED = r"""
import functools, sys, types
from mla_oracle import cli
from mla_oracle.ptx import command, interpreter
machine = interpreter._machine()
def run(*args):
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    return machine.run(*args)
interpreter._machine = lambda: types.SimpleNamespace(run=run)
command.Interpreter = functools.partial(interpreter.Interpreter, patience=1 << 60)
sys.exit(cli.main(sys.argv[1:]))
"""

# Two threads: the caller's has done block 1 when the interrupt comes, the other stays in block 0.
LEFT = """
import sys, threading, time, types
import numpy as np
from mla_oracle.fast import threads
from mla_oracle.ptx import Interpreter, interpreter
machine, inside = interpreter._machine(), threading.Event()
def run(*args):
    if threading.current_thread() is threading.main_thread():
        inside.wait()
        time.sleep(0.2)
        print("begun", flush=True)
    inside.set()
    return machine.run(*args)
interpreter._machine = lambda: types.SimpleNamespace(run=run)
device = Interpreter("sm_90", threads=2, patience=1 << 60)
arrays = [device.upload(np.zeros(32, np.uint32)) for _ in range(2)]
try:
    device.launch(device.load(open(sys.argv[1]).read(), "snippet"), (2, 1, 1), (32, 1, 1), 0, *arrays)
except KeyboardInterrupt:
    while not threads._idle:
        time.sleep(0.01)
    sys.exit("all are back")
"""
ENDLESS = "mov.u32 r1, %ctaid.x; FOREVER: setp.eq.u32 p1, r1, 0; @p1 bra FOREVER; mov.u32 x, a;"


def interrupted(script, *args):
    """(exit code, what it said) of a script that is interrupted a little after it said it had begun."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, words = process.communicate(timeout=60)
        finally:
            process.kill()
        return process.returncode, words


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_ends_the_command_within_a_block(threads, tmp_path):
    file = tmp_path / "x.ptx"
    file.write_text(text(ENDLESS.replace("%ctaid.x", "0"), {"x": np.uint32}, {"a": LANE}))
    launch = ["--kernel", "snippet", "--grid", "2", "--block", "32", "--args", "zeros:u32:32 zeros:u32:32"]
    answer = interrupted(INTERRUPTED, "ptx", "run", file, *launch, "--threads", threads)
    assert answer == (130, "mla-oracle: interrupted\n")


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_ends_a_launch_of_many_short_blocks(threads, tmp_path):
    file = tmp_path / "x.ptx"
    file.write_text(text("mov.u32 x, a;", {"x": np.uint32}, {"a": LANE}))
    launch = ["--kernel", "snippet", "--grid", "2147483647", "--block", "32", "--args", "zeros:u32:32 zeros:u32:32"]
    answer = interrupted(INTERRUPTED, "ptx", "run", file, *launch, "--threads", threads)
    assert answer == (130, "mla-oracle: interrupted\n")


def test_an_interrupt_stops_the_other_threads_too(tmp_path):
    file = tmp_path / "x.ptx"
    file.write_text(text(ENDLESS, {"x": np.uint32}, {"a": LANE}))
    assert interrupted(LEFT, file) == (1, "all are back\n")
