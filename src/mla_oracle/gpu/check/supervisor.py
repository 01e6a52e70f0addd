# SPDX-License-Identifier: Apache-2.0
"""A part of the check in a process of its own: its findings as they come, its end by its budget at the latest.

A kernel that faults spoils the context of its process, and one that hangs cannot be stopped from within: so a part
has a process, and the next one another.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time

from mla_oracle.gpu.check.report import Report


def run(report: Report, part: str, module: str, machine: str, budget: float) -> None:
    """Run `module`'s findings on `machine` for at most `budget` seconds, into the report."""
    report.begin(part, budget)
    began = time.monotonic()
    command = [sys.executable, "-m", "mla_oracle.gpu.check.part", module, machine, str(budget)]
    with tempfile.TemporaryFile("w+", errors="replace") as words:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, start_new_session=True) as child:
            try:
                in_time = _read(child, report, part, began + budget)
            except KeyboardInterrupt:
                report.end(part, "interrupted", time.monotonic() - began)
                raise
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
        words.seek(0)
        said = [line.strip() for line in words if line.strip()]
    seconds = time.monotonic() - began
    if not in_time:
        last = report.parts[part]["findings"][-1:]
        after = f"after {last[0]['name']}" if last else "before its first finding"
        report.end(part, "out of time", seconds, f"ended by its budget of {budget:.0f} s, {after}")
    elif child.returncode:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        report.end(part, "failed", seconds, f"{how}: {said[-1] if said else 'it said nothing'}")
    else:
        report.end(part, "done", seconds)


def _read(child: subprocess.Popen[bytes], report: Report, part: str, deadline: float) -> bool:
    """Take the lines of `child` as findings until it ends; False if it had not ended by the deadline."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                try:
                    child.wait(max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    return False
                return True
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                report.add(part, json.loads(line))
    return False
