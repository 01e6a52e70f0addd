# SPDX-License-Identifier: Apache-2.0
"""A report as JUnit XML: a case is a testcase, a wrong result a failure, a crash or a hang an error."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from .outcome import Outcome, Report


def junit(report: Report) -> str:
    counts = f'tests="{len(report.outcomes)}" failures="{report.count("fail")}"'
    errors = report.count("crash") + report.count("hang")
    seconds = sum(outcome.seconds for outcome in report.outcomes)
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuites><testsuite name="mla-oracle" {counts} errors="{errors}" time="{seconds:.3f}">',
        *(_testcase(outcome) for outcome in report.outcomes),
        "</testsuite></testsuites>",
    ]
    return "\n".join(lines) + "\n"


def _testcase(outcome: Outcome) -> str:
    head = f'<testcase classname="mla-oracle" name={quoteattr(_clean(outcome.case))} time="{outcome.seconds:.3f}"'
    if outcome.verdict == "pass":
        return f"{head}/>"
    tag = "failure" if outcome.verdict == "fail" else "error"
    text = "\n".join([outcome.reason, *outcome.facts, outcome.summary]).strip()
    message = quoteattr(_clean(outcome.summary or outcome.reason))
    body = f'<{tag} type="{outcome.verdict}" message={message}>{escape(_clean(text))}</{tag}>'
    said = f"<system-err>{escape(_clean(outcome.stderr))}</system-err>" if outcome.stderr else ""
    return f"{head}>{body}{said}</testcase>"


def _clean(text: str) -> str:
    """Without the characters that XML has no room for."""
    return "".join(c for c in text if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c < "\ufffe"))
