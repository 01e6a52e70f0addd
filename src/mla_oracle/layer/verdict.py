# SPDX-License-Identifier: Apache-2.0
"""What is found of every stage of a dump, and the verdict that it adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What was measured of one stage, whose rows are the dump's and whose position is the sequence's.

    `worst` is the element that decides; `row` the first query over the budget.
    """

    stage: str
    passed: bool
    dtype: str  # that holds it
    units: float | None  # the largest error over its budget
    rows_over: int
    rows: int
    reason: str = ""
    row: int | None = None
    position: int | None = None
    worst: dict[str, Any] = field(default_factory=dict)
    sequence: int = 0  # of which these are
    blind: str = ""  # what a stage within its budget does not tell


@dataclass(frozen=True)
class LayerVerdict:
    """Pass or fail, the first stage that fails and its first query, and what was found of every stage of the dump."""

    passed: bool
    reason: str
    first: str | None
    sequence: int | None
    row: int | None
    position: int | None
    stages: list[Finding]
    missing: list[str]
    conventions: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        for finding in fields["stages"]:
            finding["verdict"] = "pass" if finding.pop("passed") else "fail"
        return {"verdict": "pass" if fields.pop("passed") else "fail", **fields}


def merged(found: Sequence[Finding]) -> Finding:
    """One finding of a stage, of those of every sequence: the first that fails, else the nearest to its budget."""
    failed = [finding for finding in found if not finding.passed]
    told = failed[0] if failed else max(found, key=lambda finding: finding.units or 0.0)
    units = max(finding.units or 0.0 for finding in found)
    over, rows = (sum(getattr(finding, name) for finding in found) for name in ("rows_over", "rows"))
    blind = next((finding.blind for finding in found if finding.blind), "")
    return replace(told, units=units, rows_over=over, rows=rows, blind=blind)


def reason(findings: list[Finding], first: Finding | None) -> str:
    if first is None:
        largest = max(findings, key=lambda finding: finding.units or 0.0)
        most = f"at most {largest.units or 0.0:.3g} of it, {largest.stage}"
        return f"{len(findings)} stages are within their budgets ({most})"
    others = [finding.stage for finding in findings if not finding.passed and finding is not first]
    after = f"; after it {', '.join(others)}" if others else ""
    return f"{first.stage} is the first stage that leaves its budget: {first.reason}{after}"
