# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page: the table, what did not pass first, and for every failure facts and heat maps.

It needs no network and no script, and its own policy lets a browser load nothing.
"""

from __future__ import annotations

from html import escape

from .heatmap import legend, maps
from .outcome import VERDICTS, Outcome, Report

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #cf222e; --link: #0969da; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #ff7b72; --link: #79b8ff; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
a { color: var(--link); } code, pre { font-family: ui-monospace, monospace; font-size: 13px; }
code { overflow-wrap: anywhere; } pre { overflow-x: auto; padding: .5rem; border: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); }
th:first-child { max-width: 45%; } .pass { color: var(--good); }
.fail, .crash, .hang { color: var(--bad); font-weight: 600; }
section { margin-top: 2rem; border-top: 1px solid var(--line); } h2 { font-size: 1rem; }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; vertical-align: top; max-width: 100%; overflow-x: auto; }
figure.legend { margin-top: 1.5rem; } figcaption { font-size: 13px; }
svg { display: block; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
@media (max-width: 45rem) { thead tr { display: block; } th:not(:first-child) { display: none; }
tbody tr { display: grid; padding: .4rem 0; border-bottom: 1px solid var(--line); } th, td { border: 0; padding: 0; }
td:nth-child(2) { order: -1; } td:empty { display: none; } section ul { padding-left: 1.2rem; } }
"""


def page(report: Report, title: str = "mla-oracle suite") -> str:
    """The page of a report, as HTML."""
    order = sorted(range(len(report.outcomes)), key=lambda i: report.outcomes[i].verdict == "pass")
    common = shared_start([outcome.case for outcome in report.outcomes])
    rows = "\n".join(_row(i, report.outcomes[i], common) for i in order)
    sections = "\n".join(_section(i, o) for i, o in enumerate(report.outcomes) if o.verdict != "pass")
    counts = ", ".join(f'<span class="{v}">{report.count(v)} {v}</span>' for v in VERDICTS if report.count(v))
    words = "".join(f"<br>{escape(line)}" for line in report.remarks())
    head = f"case <code>{_breakable(common)}…</code>" if common else "case"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p><strong>{counts or "no cases"}</strong>{words}</p>
<table><thead><tr><th>{head}</th><th>verdict</th><th>suspected class</th><th>where</th></tr></thead><tbody>
{rows}
</tbody></table>
{legend() if any(o.errors for o in report.outcomes) else ""}
{sections}
</body></html>
"""


def shared_start(names: list[str]) -> str:
    """What all names start with, whole fields of ids; empty where that is little."""
    if len(names) < 2:
        return ""
    low, high = min(names), max(names)
    start = low[: next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))]
    start = start[: max(start.rfind(","), start.rfind(":"), start.rfind("/")) + 1]
    return start if len(start) >= 12 else ""


def _breakable(name: str) -> str:
    """A name that a browser may break after a field."""
    return escape(name).replace(",", ",<wbr>").replace("/", "/<wbr>")


def _row(i: int, o: Outcome, common: str) -> str:
    name = f"<code>{_breakable(o.case[len(common) :])}</code>"
    name = name if o.verdict == "pass" else f'<a href="#case{i}">{name}</a>'
    cells = "".join(f"<td>{escape(text)}</td>" for text in (o.suspicion, o.place))
    return f'<tr><td>{name}</td><td class="{o.verdict}">{o.verdict}</td>{cells}</tr>'


def _section(i: int, o: Outcome) -> str:
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in o.facts)
    figures = "".join(maps(name, cube, o.lens) for name, cube in o.errors.items())
    summary = f"<p><strong>{escape(o.summary)}</strong></p>" if o.summary else ""
    stderr = f"<p>the end of stderr:</p><pre>{escape(o.stderr)}</pre>" if o.stderr else ""
    return (
        f'<section id="case{i}"><h2><code>{_breakable(o.case)}</code></h2><p><span class="{o.verdict}">{o.verdict}'
        f"</span>: {escape(o.reason)}</p>{summary}{f'<ul>{facts}</ul>' if facts else ''}{stderr}{figures}</section>"
    )
