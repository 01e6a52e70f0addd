# SPDX-License-Identifier: Apache-2.0
"""Fake oracles: scripts that answer, lie or die on request. Most are `sh`; `fake` (conftest.py) makes them files."""

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

Fake = Callable[[str], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]

COMMAND = Path(sysconfig.get_path("scripts")) / "mla-oracle"  # the real one
CLIENTS = pytest.mark.parametrize("client", ["oracle", "server"])
CHECK = "check|case|actual"
PASS = '{"verdict": "pass", "reason": "as it should be"}'
FAIL = '{"verdict": "fail", "reason": "row 3 is off"}'
READ = "read -r line; "
ANSWER = f'{{"id": 1, "ok": true, "exit_code": 0, "result": {PASS}}}'


def python(body: str) -> str:
    return f"#!{sys.executable}\nimport json, os, signal, sys\n{body}\n"


def answering(result: str) -> str:
    """A fake that gives every check the same verdict, asked either way."""
    return f"""
if [ "$1" = serve ]; then
  while read -r line; do
    id=${{line#*:}}
    echo '{{"id": '${{id%%,*}}', "ok": true, "exit_code": 0, "result": {result}}}'
  done
else
  echo '{result}'
fi"""
