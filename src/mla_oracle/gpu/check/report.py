# SPDX-License-Identifier: Apache-2.0
"""The report: findings by part, in a file that is whole whenever it is read, and as a short table."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEMA = "mla-oracle-gpu-check/1"
Finding = dict[str, Any]
CORES = ("paged mma bf16", "paged wgmma bf16")
MAIN = (*CORES, *(f"{name} filling" for name in CORES))  # the subjects of which the table has every timing
ENDS = ("done", "out of time", "failed", "interrupted")  # how a part can end


class Report:
    """What was found so far; every `add` and `end` writes the file anew, under another name first."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.parts: dict[str, dict[str, Any]] = {}
        self.about = {"schema": SCHEMA, **about}
        self._began = time.monotonic()
        self.write()

    def begin(self, part: str, budget: float) -> None:
        self.parts[part] = {"status": "running", "seconds": 0.0, "budget": round(budget, 1), "note": "", "findings": []}
        self.write()

    def add(self, part: str, finding: Finding) -> None:
        self.parts[part]["findings"].append(finding)
        self.write()

    def end(self, part: str, status: str, seconds: float, note: str = "") -> None:
        """`status`: one of ENDS."""
        self.parts[part] |= {"status": status, "seconds": round(seconds, 1), "note": note}
        self.write()

    @property
    def good(self) -> bool:
        """Whether every part came to its end and nothing differed."""
        return all(part["status"] == "done" for part in self.parts.values()) and not self.differing()

    def differing(self) -> list[Finding]:
        return [finding for part in self.parts.values() for finding in part["findings"] if finding["ok"] is False]

    def as_json(self) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._began, 1)
        return {**self.about, "good": self.good, "seconds": seconds, "parts": self.parts}

    def write(self) -> None:
        """Raises OSError where the file cannot be written."""
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.as_json(), file, indent=1)
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise

    def table(self) -> str:
        lines = [f"{'part':14}{'status':14}{'seconds':>8}{'good':>7}{'differ':>8}{'told':>7}"]
        for name, part in self.parts.items():
            verdicts = [finding["ok"] for finding in part["findings"]]
            counts = [verdicts.count(verdict) for verdict in (True, False, None)]
            lines.append(f"{name:14}{part['status']:14}{part['seconds']:8.1f}{counts[0]:7}{counts[1]:8}{counts[2]:7}")
            if part["note"]:
                lines.append(f"  {part['note']}")
        differing = self.differing()
        lines += [f"differs: {finding['name']}: {finding.get('reason', '')}" for finding in differing[:20]]
        if len(differing) > 20:
            lines.append(f"differs: {len(differing) - 20} more, see the report")
        rows = [finding for part in self.parts.values() for finding in part["findings"]]
        lines += [f"{row['name']}: {row['reason']}" for row in rows if row["ok"] is None and row.get("reason")]
        lines += [f"{row['name']}: {row['told']}" for row in rows if "told" in row]
        return "\n".join([*lines, *_timings(rows)])


def _timings(rows: Iterable[Finding]) -> list[str]:
    """A line for each timing that is to be shown: every point of some subjects, the largest of the others."""
    timed = [row for row in rows if "microseconds" in row]
    if not timed:
        return []
    last = {row.get("subject"): row for row in timed}
    shown = [row for row in timed if row.get("subject") in (None, *MAIN) or row is last[row["subject"]]]
    head = ("microseconds", "TFLOP/s", "GB/s", "of copy", "of matmul")
    lines = [f"{'':44}" + "".join(f"{column:>13}" for column in head)]
    for row in shown:
        figures = [row.get(column) for column in ("microseconds", "tflops", "gbs", "of_copy", "of_matmul")]
        lines.append(f"{row['name']:44}" + "".join(f"{'-' if x is None else format(x, '.4g'):>13}" for x in figures))
    return lines
