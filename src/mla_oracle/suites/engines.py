# SPDX-License-Identifier: Apache-2.0
"""Engines: what computes a case. Any callable case -> {"out": ..., "lse": ...} or (out, lse), or a command.

Command("my-kernel {case} {out}", timeout=60)       # reads a case file, writes a result file
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import Array, as_array
from ..cases import Case
from ..errors import InputError


class EngineCrash(Exception):
    """The engine ended without results: how, and the last it said."""


class EngineHang(Exception):
    """The engine did not end in its time."""


@dataclass(frozen=True)
class Command:
    """A command line in which {case} and {out} stand for files; no shell reads it. timeout in seconds, None: none."""

    line: str
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name in ("{case}", "{out}"):
            if name not in self.line:
                raise InputError(f"the command is {self.line!r}, expected one with {name}")

    def __call__(self, case: Case) -> dict[str, Array]:
        """The results that the command writes. Raises EngineCrash, EngineHang."""
        from ..exchange import read_result, write_case

        with tempfile.TemporaryDirectory(prefix="mla-oracle-") as folder:
            files = {"{case}": f"{folder}/case.safetensors", "{out}": f"{folder}/out.safetensors"}
            write_case(files["{case}"], case)
            words = shlex.split(self.line)
            for mark, path in files.items():
                words = [word.replace(mark, path) for word in words]
            code, said = self._run(words)
            if code:
                raise EngineCrash(f"{_ending(code)}{': ' if said else ''}{said}")
            if not os.path.exists(files["{out}"]):
                raise EngineCrash("exit code 0, but no result file was written")
            return read_result(files["{out}"])

    def _run(self, words: list[str]) -> tuple[int, str]:
        """Exit code, and the last line of stderr; the command and what it started are gone afterwards."""
        try:
            process = subprocess.Popen(
                words,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"the command {words[0]!r} cannot be run: {error.strerror}") from None
        try:
            _, stderr = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            raise EngineHang(f"no result in {self.timeout:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        lines = stderr.decode(errors="replace").strip().splitlines()
        return process.returncode, lines[-1][:300] if lines else ""


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
