# SPDX-License-Identifier: Apache-2.0
"""Engines: what computes a case. Any callable case -> {"out": ..., "lse": ...} or (out, lse), or a command.

Command("my-kernel {case} {out}", timeout=60)       # reads a case file, writes a result file
Command("my-kernel {case} {out}", dialect="flashmla-dense")  # reads a call, writes what it returned
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import Array, as_array
from ..cases import Case
from ..errors import InputError

TAIL = 4096  # bytes of stderr that are kept


class EngineCrash(Exception):
    """The engine ended without results: how, and the last it said."""

    def __init__(self, reason: str, stderr: str = "") -> None:
        super().__init__(reason)
        self.stderr = stderr


class EngineHang(EngineCrash):
    """The engine did not end in its time."""


class NoEngine(InputError):
    """There is no such engine: no case can be run."""


@dataclass(frozen=True)
class Command:
    """A command line in which {case} and {out} stand for files; no shell reads it. timeout in seconds, None: none.

    With a dialect the files are a call and what it returned; the cases are those of calls (dialects.files.load_call).
    """

    line: str
    timeout: float | None = None
    dialect: str | None = None

    def __post_init__(self) -> None:
        for name in ("{case}", "{out}"):
            if name not in self.line:
                raise InputError(f"the command is {self.line!r}, expected one with {name}")
        try:
            shlex.split(self.line)
        except ValueError as error:
            raise InputError(f"the command is {self.line!r}, expected words as in a shell: {error}") from None

    def __call__(self, case: Case) -> dict[str, Array]:
        """The results that the command writes. Raises EngineCrash, EngineHang, NoEngine."""
        with _folder() as folder:
            files = {"{case}": f"{folder}/case.safetensors", "{out}": f"{folder}/out.safetensors"}
            self._write(files["{case}"], case)
            words = shlex.split(self.line)
            for mark, path in files.items():
                words = [word.replace(mark, path) for word in words]
            code, stderr = self._run(words, folder)
            if code is None:
                raise EngineHang(f"no result in {self.timeout:g} s", stderr)
            if code:
                last = stderr.rpartition("\n")[2][:300]
                raise EngineCrash(f"{_ending(code)}{': ' if last else ''}{last}", stderr)
            if not os.path.lexists(files["{out}"]):
                raise EngineCrash("exit code 0, but no result file was written", stderr)
            try:
                return self._read(files["{out}"], case)
            except InputError as error:
                raise EngineCrash(str(error).replace(files["{out}"], "the result file"), stderr) from None

    def _write(self, path: str, case: Case) -> None:
        if self.dialect is None:
            from ..files.exchange import write_case

            return write_case(path, case)
        from ..dialects import files, get

        files.write_call(path, get(self.dialect), case)

    def _read(self, path: str, case: Case) -> dict[str, Array]:
        from ..files.exchange import read_result

        results = read_result(path)
        if self.dialect is None:
            return results
        from ..dialects import get

        return get(self.dialect).read(case, results)

    def _run(self, words: list[str], folder: str) -> tuple[int | None, str]:
        """Exit code, None after the timeout, and the end of stderr; the command and its group are gone afterwards."""
        process = _start(words, folder)
        assert process.stderr is not None
        pipe = process.stderr.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        end = None if self.timeout is None else time.monotonic() + self.timeout
        tail, closed = b"", False
        try:
            while process.poll() is None and (end is None or time.monotonic() < end):
                if closed:
                    time.sleep(0.01)
                elif poll.poll(50):
                    chunk = os.read(pipe, 1 << 16)
                    tail, closed = (tail + chunk)[-TAIL:], not chunk
            code = process.poll()
        finally:
            _kill(process.pid)
            process.wait()
        # What it left in the pipe; a child in another session may hold it open, and go on writing.
        os.set_blocking(pipe, False)
        with process.stderr, contextlib.suppress(BlockingIOError):
            for _ in range(64):
                tail = (tail + os.read(pipe, 1 << 16))[-TAIL:]
        return code, _printable(tail)


_live: dict[str, int | None] = {}  # folders of commands, and the process in each
_changing = threading.Lock()


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    with _changing:
        folder = tempfile.mkdtemp(prefix="mla-oracle-")
        _live[folder] = None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        del _live[folder]


def _start(words: list[str], folder: str) -> subprocess.Popen[bytes]:
    try:
        with _changing:
            process = subprocess.Popen(
                words,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            _live[folder] = process.pid
    except OSError as error:
        raise NoEngine(f"the command {words[0]!r} cannot be run: {error.strerror}") from None
    return process


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def abandon() -> None:
    """End every command at once and remove its folder, for a process that ends itself next."""
    _changing.acquire()  # for good: nothing starts any more
    for folder, group in list(_live.items()):
        if group is not None:
            _kill(group)
        shutil.rmtree(folder, ignore_errors=True)


def _printable(text: bytes) -> str:
    """Whole lines without control characters."""
    lines = text.decode(errors="replace").strip().split("\n")
    return "\n".join("".join(c if c.isprintable() else " " for c in line).strip() for line in lines)


def results_of(case: Case, returned: Any) -> dict[str, Array]:
    """Arrays by name of what an engine returned. Raises InputError."""
    if isinstance(returned, Mapping):
        named = dict(returned)
    elif isinstance(returned, (tuple, list)):
        if len(returned) > len(case.results):
            raise InputError(f"the engine returned {len(returned)} results, expected {', '.join(case.results)}")
        named = dict(zip(case.results, returned, strict=False))
    else:
        named = {case.results[0]: returned}
    return {name: as_array(name, value) for name, value in named.items() if value is not None}


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"ended by signal {-code}"
    return f"exit code {code}"
