# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that needs no network: the table, and for every failure facts and heat maps (inline SVG).

A heat map has a cell per (head, request), the worst of its query tokens, or per (query token, request), the worst of
its heads. Colour is the error in budgets, log scale: up to 1 is within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from .outcome import Outcome, Report

CELL, MOST = 9, 128  # pixels, cells of an axis; more are joined by their worst
STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top; padding: .3rem .6rem;
border-bottom: 1px solid var(--line); } td:first-child, code { font-family: ui-monospace, monospace; font-size: 13px;
overflow-wrap: anywhere; } .pass { color: #1a7f37; } .fail, .crash, .hang { color: #cf222e; font-weight: 600; }
section { margin-top: 2rem; } figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; vertical-align: top; }
figcaption { font-size: 13px; } svg text { font: 10px system-ui, sans-serif; fill: currentColor; }
div.wide { overflow-x: auto; }
"""


def page(report: Report, title: str = "mla-oracle suite") -> str:
    rows = "\n".join(_row(i, outcome) for i, outcome in enumerate(report.outcomes))
    counts = ", ".join(f"{report.count(v)} {v}" for v in ("pass", "fail", "crash", "hang") if report.count(v))
    sections = "\n".join(_section(i, o) for i, o in enumerate(report.outcomes) if o.verdict != "pass")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p><strong>{escape(counts)}</strong>{"<br>" if report.summary else ""}{escape(report.summary)}</p>
<table><thead><tr><th>case</th><th>verdict</th><th>suspected class</th><th>where</th></tr></thead><tbody>
{rows}
</tbody></table>
{_legend() if any(o.errors for o in report.outcomes) else ""}
{sections}
</body></html>
"""


def _row(i: int, o: Outcome) -> str:
    name = escape(o.case)
    name = name if o.verdict == "pass" else f'<a href="#case{i}">{name}</a>'
    suspected = o.suspected or ("unknown" if o.verdict == "fail" else "")
    where = o.where if o.verdict == "fail" else o.reason if o.verdict != "pass" else ""
    cells = "".join(f"<td>{escape(text)}</td>" for text in (suspected, where))
    return f'<tr><td>{name}</td><td class="{o.verdict}">{o.verdict}</td>{cells}</tr>'


def _section(i: int, o: Outcome) -> str:
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in o.facts)
    maps = "".join(_maps(name, cube, o.lens) for name, cube in o.errors.items())
    summary = f"<p><strong>{escape(o.summary)}</strong></p>" if o.summary else ""
    return (
        f'<section id="case{i}"><h2><code>{escape(o.case)}</code></h2><p><span class="{o.verdict}">{o.verdict}</span>: '
        f"{escape(o.reason)}</p>{summary}{f'<ul>{facts}</ul>' if facts else ''}<div class='wide'>{maps}</div></section>"
    )


def _maps(name: str, cube: list[list[list[float]]], lens: Sequence[int]) -> str:
    """Both maps of one result; cube [requests, queries, heads]."""
    if not cube or not cube[0] or not cube[0][0]:
        return ""

    def request(b: int) -> str:
        return f"request {b}{f' ({lens[b]} keys)' if b < len(lens) else ''}"

    def position(t: int, b: int) -> str:
        T = len(cube[0])
        at = f", position {lens[b] - T + t}" if b < len(lens) and lens[b] >= T - t else ""
        return f"query {t}{at}"

    heads = [[max(query[h] for query in request) for request in cube] for h in range(len(cube[0][0]))]
    tokens = [[max(request[t]) for request in cube] for t in range(len(cube[0]))]
    return _map(f"{name}: heads by requests", heads, lambda h, b: f"head {h}", request) + _map(
        f"{name}: query tokens by requests", tokens, position, request
    )


def _map(
    caption: str, grid: list[list[float]], row_name: Callable[[int, int], str], column_name: Callable[[int], str]
) -> str:
    rows, columns = _bins(len(grid)), _bins(len(grid[0]))
    cells = []
    for y, own_rows in enumerate(rows):
        for x, own_columns in enumerate(columns):
            value, r, c = max((grid[r][c], r, c) for r in own_rows for c in own_columns)
            said = escape(f"{row_name(r, c)}, {column_name(c)}: {_figure(value)} budgets")
            cells.append(
                f'<rect x="{30 + x * CELL}" y="{y * CELL}" width="{CELL}" height="{CELL}" fill="{colour(value)}">'
                f"<title>{said}</title></rect>"
            )
    width, height = 40 + CELL * len(columns), CELL * len(rows) + 14
    ends = [(0, rows[0][0]), (len(rows) - 1, rows[-1][-1])] if len(rows) > 1 else [(0, 0)]
    labels = "".join(f'<text x="26" y="{y * CELL + 8}" text-anchor="end">{n}</text>' for y, n in ends)
    labels += f'<text x="30" y="{height - 3}">0</text>'
    if len(columns) > 2:
        labels += f'<text x="{width - 10}" y="{height - 3}" text-anchor="end">{len(grid[0]) - 1}</text>'
    head = f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(caption)}">'
    svg = f"{head}{''.join(cells)}{labels}</svg>"
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _bins(n: int) -> list[range]:
    size = -(-n // MOST)
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def colour(units: float) -> str:
    """Grey within the budget, yellow to dark red up to 10^4 budgets, violet beyond any number."""
    if math.isinf(units) or math.isnan(units):
        return "#7b2fbe"
    if units <= 1:
        level = 235 - round(45 * max(units, 0.0))
        return f"rgb({level},{level},{level})"
    t = min(math.log10(units) / 4, 1.0)
    return f"rgb({255 - round(120 * t * t)},{round(215 * (1 - t))},{round(60 * (1 - t))})"


def _legend() -> str:
    marks = [
        (0.0, "0"),
        (1.0, "1, the budget"),
        (3.0, "3"),
        (30.0, "30"),
        (300.0, "300"),
        (1e4, "10^4"),
        (math.inf, "NaN"),
    ]
    cells = "".join(
        f'<rect x="{i * 80}" width="80" height="12" fill="{colour(value)}"/><text x="{i * 80}" y="24">{text}</text>'
        for i, (value, text) in enumerate(marks)
    )
    svg = f'<svg width="570" height="28" role="img" aria-label="colours">{cells}</svg>'
    return f"<p>error of a row in budgets:<br>{svg}</p>"


def _figure(value: float) -> str:
    return "infinitely many" if math.isinf(value) else f"{value:.3g}"
