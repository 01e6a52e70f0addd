# SPDX-License-Identifier: Apache-2.0
"""What became of one case of a suite: a verdict, or how the engine ended without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERDICTS = ("pass", "fail", "crash", "hang")


@dataclass(frozen=True)
class Outcome:
    """`errors`: [requests, queries, heads] of the largest error in budgets, by result. All of it can be pickled."""

    case: str
    verdict: str
    reason: str
    seconds: float = 0.0  # of the engine
    named: bool = False
    suspected: str = ""  # the class, where one is named
    mutant: str = ""
    summary: str = ""  # of the diagnosis
    where: str = ""  # the fact that says most about the place
    facts: tuple[str, ...] = ()
    stderr: str = ""  # the end of what a command that crashed or hung said
    missing: tuple[str, ...] = ()  # results that are not there and so not judged
    lens: tuple[int, ...] = ()
    errors: Mapping[str, list[list[list[float]]]] = field(default_factory=dict)
    sums: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of every mutant (diagnosis.joint)

    @property
    def suspicion(self) -> str:
        return self.suspected or ("unknown" if self.verdict == "fail" else "")

    @property
    def place(self) -> str:
        """Where it fails, or how the engine ended."""
        return {"pass": "", "fail": self.where or self.reason}.get(self.verdict, self.reason)

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["sums"], fields["errors"]
        return fields


@dataclass(frozen=True)
class Report:
    """`outcomes` in the order of the cases; `summary` is what explains all of them, empty where all pass."""

    outcomes: list[Outcome]
    summary: str = ""

    @property
    def passed(self) -> bool:
        return all(outcome.verdict == "pass" for outcome in self.outcomes)

    def count(self, verdict: str) -> int:
        return sum(outcome.verdict == verdict for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": "pass" if self.passed else "fail",
            **{verdict: self.count(verdict) for verdict in VERDICTS},
            "summary": self.summary,
            "cases": [outcome.as_json() for outcome in self.outcomes],
        }

    def table(self) -> str:
        """case, verdict, suspected class, where."""
        rows = [("case", "verdict", "suspected class", "where")]
        rows += [(o.case, o.verdict, o.suspicion, o.place) for o in self.outcomes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[3]
            for row in rows
        ]
        counts = ", ".join(f"{self.count(v)} {v}" for v in VERDICTS if self.count(v))
        return "\n".join([*(line.rstrip() for line in lines), counts, *self.remarks()])

    def remarks(self) -> list[str]:
        """Lines on all cases together: what is suspected, what was not judged."""
        found = [self.summary] if self.summary else []
        for name in dict.fromkeys(name for outcome in self.outcomes for name in outcome.missing):
            n = sum(name in outcome.missing for outcome in self.outcomes)
            found.append(f"not judged: {name}, missing from the results of {n} case{'s' * (n > 1)}")
        return found
