# SPDX-License-Identifier: Apache-2.0
"""What runs in a part's process: python -m mla_oracle.gpu.check.part MODULE MACHINE SECONDS, a finding a line.

The findings have the standard output for themselves: whatever else is printed goes with the errors.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mla_oracle.errors import OracleError
from mla_oracle.gpu.machine import Machine


@dataclass
class Bench:
    """What the parts run on. `small`: the interpreter stands in for a GPU, so that shapes are tiny."""

    backend: str  # "cuda" or "ptx"
    seconds: float = math.inf
    began: float = field(default_factory=time.monotonic)

    @property
    def small(self) -> bool:
        return self.backend == "ptx"

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.began + self.seconds - time.monotonic()

    @cached_property
    def machine(self) -> Machine:
        """Raises MissingError."""
        if self.backend == "cuda":
            from mla_oracle.gpu.device import Device

            return Device()
        from mla_oracle.ptx import Interpreter

        return Interpreter("sm_90a")


def main(module: str, backend: str, seconds: str) -> int:
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    bench = Bench(backend, float(seconds))
    try:
        for finding in importlib.import_module(module).findings(bench):
            lines.write(json.dumps(_plain(finding), allow_nan=False) + "\n")
            lines.flush()
    except OracleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _plain(x: Any) -> Any:
    """What JSON has: numpy's numbers as Python's, those that are not finite as words."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    x = x.item() if hasattr(x, "item") else x
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
