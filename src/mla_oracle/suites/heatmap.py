# SPDX-License-Identifier: Apache-2.0
"""Heat maps of errors in budgets, as SVG inside HTML: heads by requests, query tokens by requests, heads by positions.

Within the budget a cell is faint, in whatever colour the text has; above it goes from yellow to red on a log
scale; violet is what no number measures. A cell says on hover what it is; those of a long axis are joined by the worst.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

MOST = 128  # cells of an axis
SMALL, LARGE = 5, 20  # pixels of a cell
LEFT, TOP = 44, 16  # pixels beside the cells, for numbers and the axis' name
RIGHT, BOTTOM = 24, 30
Name = Callable[[int], str]


def maps(name: str, cube: list[list[list[float]]], lens: Sequence[int]) -> str:
    """The maps of one result; cube [requests, queries, heads], lens [requests] or empty."""
    if not cube or not cube[0] or not cube[0][0]:
        return ""
    B, T, H = len(cube), len(cube[0]), len(cube[0][0])

    def request(b: int) -> str:
        return f"request {b}{f' ({lens[b]} keys)' if b < len(lens) else ''}"

    def head(h: int) -> str:
        return f"head {h}"

    heads = [[max((query[h] for query in of), key=_size) for of in cube] for h in range(H)]
    found = [_figure(f"{name}: heads by requests", heads, ("head", "request"), (head, request))]
    if T > 1:
        tokens = [[max(of[t], key=_size) for of in cube] for t in range(T)]
        names = (lambda t: f"query {t}", request)
        found.append(_figure(f"{name}: query tokens by requests", tokens, ("query", "request"), names))
    places = sorted((lens[b] - T + t, b, t) for b in range(min(B, len(lens))) for t in range(T) if lens[b] >= T - t)
    if len({position for position, _, _ in places}) > 1:
        grid = [[cube[b][t][h] for _, b, t in places] for h in range(H)]

        def place(i: int) -> str:
            position, b, t = places[i]
            return f"position {position} of {request(b)}{f', query {t}' if T > 1 else ''}"

        numbers = [position for position, _, _ in places]
        title = f"{name}: heads by positions, in their order"
        found.append(_figure(title, grid, ("head", "position"), (head, place), numbers))
    return "".join(found)


def _figure(
    caption: str,
    grid: list[list[float]],
    axes: tuple[str, str],
    names: tuple[Name, Name],
    numbers: Sequence[int] | None = None,
) -> str:
    """A map of grid [rows, columns]; `numbers` are those of the columns, their indices if None."""
    rows, columns = _bins(len(grid)), _bins(len(grid[0]))
    cell = max(SMALL, min(LARGE, 240 // max(len(rows), len(columns))))
    cells = []
    for y, own_rows in enumerate(rows):
        for x, own_columns in enumerate(columns):
            value, r, c = max(((grid[r][c], r, c) for r in own_rows for c in own_columns), key=lambda at: _size(at[0]))
            said = escape(f"{names[0](r)}, {names[1](c)}: {figure(value)}")
            cells.append(
                f'<rect x="{LEFT + x * cell}" y="{TOP + y * cell}" width="{cell}" height="{cell}" {paint(value)}>'
                f"<title>{said}</title></rect>"
            )
    shown = numbers or range(len(grid[0]))
    width, height = LEFT + cell * len(columns) + RIGHT, TOP + cell * len(rows) + BOTTOM
    down = "".join(
        f'<text x="{LEFT - 4}" y="{TOP + y * cell + cell / 2 + 4:g}" text-anchor="end">{rows[y][0]}</text>'
        for y in _ticks(len(rows), 14 / cell)
    )
    widest = max(len(str(n)) for n in shown)
    across = "".join(
        f'<text x="{LEFT + x * cell + cell / 2:g}" y="{height - BOTTOM + 12}" text-anchor="middle">'
        f"{shown[columns[x][0]]}</text>"
        for x in _ticks(len(columns), (7 * widest + 6) / cell)
    )
    titles = f'<text x="{LEFT - 4}" y="10" text-anchor="end">{axes[0]}</text>'
    titles += f'<text x="{LEFT}" y="{height - 4}">{axes[1]}</text>'
    width = max(width, LEFT + 70)
    opening = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
    worst = max((value for row in grid for value in row), key=_size)
    label = escape(f"{caption}, worst: {figure(worst)}")
    svg = f'{opening} aria-label="{label}">{"".join(cells)}{down}{across}{titles}</svg>'
    return f"<figure><figcaption>{label}</figcaption>{svg}</figure>"


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _bins(n: int) -> list[range]:
    size = -(-n // MOST)
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def _ticks(n: int, least: float) -> range:
    """Every 1st, 2nd, 4th, 8th ... of n, at least `least` apart."""
    step = 1
    while step < least:
        step *= 2
    return range(0, n, step)


def paint(units: float) -> str:
    """The attributes of a cell that is off by so many budgets."""
    if math.isinf(units) or math.isnan(units):
        return 'fill="#8a3ffc"'
    if units <= 1:
        return f'fill="currentColor" fill-opacity="{0.07 + 0.15 * max(units, 0.0):.2g}"'
    t = min(math.log10(units) / 4, 1.0)
    return f'fill="rgb({255 - round(45 * t)},{round(215 * (1 - t))},{round(60 - 15 * t)})"'


def figure(units: float) -> str:
    if math.isinf(units) or math.isnan(units):
        return "beyond any number"
    return f"{units:.3g} budgets"


def legend() -> str:
    marks = ((0, "0"), (1, "1"), (3, "3"), (10, "10"), (100, "100"), (1e3, "1,000"), (1e4, "10,000"), (math.inf, "∞"))
    cells = "".join(
        f'<rect x="{i * 40}" width="40" height="14" {paint(value)}/>'
        f'<text x="{i * 40 + 20}" y="27" text-anchor="middle">{text}</text>'
        for i, (value, text) in enumerate(marks)
    )
    svg = f'<svg width="320" height="30" viewBox="0 0 320 30" role="img" aria-label="colours of budgets">{cells}</svg>'
    words = "Error of a row in budgets. Up to 1 is what rounding explains; ∞ is a NaN, or a wrong row that is exact."
    return f'<figure class="legend">{svg}<figcaption>{words}</figcaption></figure>'
