# SPDX-License-Identifier: Apache-2.0
"""Where a failing result differs, before anything is named: a list of facts, each a sentence with its numbers.

    for fact in localise(case, actual, truth, units): print(fact.text)

`units` are errors of rows in budgets (measure.py). A row is a (request, query, head); a dense case has one request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import Case, DenseCase, PagedCase
from ..checks import widen
from ..verdict.locate import locate
from ..verdict.metrics import nonfinite, of_rows
from .attended import attended
from .sources import sources

TILES = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Fact:
    """`name` is the kind of fact, `data` its numbers for JSON."""

    name: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)


def localise(
    case: Case, actual: Mapping[str, Array], truth: Mapping[str, Array], units: Mapping[str, Array]
) -> list[Fact]:
    """The facts that hold, the plain ones first. No fact where every row is within its budget."""
    wide = {name: widen(array, np.float64) for name, array in actual.items()}
    if not any((u > 1).any() for u in units.values()):
        return []
    facts = list(_counts(case, actual, truth, units))
    if isinstance(case, (PagedCase, DenseCase)):
        rows = {name: _rows(case, u) for name, u in units.items() if not name.startswith("partial_")}
        bad: Array = np.any([u > 1 for u in rows.values()], axis=0)  # [B, T, H]
        listed = isinstance(case, PagedCase) and bool(case.extensions())
        if listed:
            from .listed import count_keys, listed_attended, listed_lengths

            keys = count_keys(case)  # type: ignore[arg-type]
            facts += _axes(bad, np.asarray(keys.any(1)))
            facts += listed_lengths(keys, bad, rows)
        else:
            facts += _axes(bad, case.seq_lens > 0 if isinstance(case, PagedCase) else np.ones(1, bool))
            if isinstance(case, PagedCase):
                facts += _lengths(case, bad, rows)
        if "out" in rows:
            out_bad = rows["out"] > 1
            g, w = (_rows(case, array) for array in (wide["out"], truth["out"]))
            facts += _shape(g, w, out_bad)
            facts += _columns(g, w, out_bad)
            facts += sources(g, w, out_bad)
            facts += (listed_attended if listed else attended)(case, g, w, out_bad)  # type: ignore[arg-type]
        if "lse" in rows:
            facts += _lse(wide["lse"], truth["lse"], units["lse"] > 1)
    return facts


def _rows(case: Case, array: Array) -> Array:
    """[B, T, H, ...] of a result of a paged or dense case; ragged rows are requests."""
    if isinstance(case, PagedCase):
        return array if case.q.ndim == 4 else np.expand_dims(array, 1)
    return array[None]


def _counts(
    case: Case, actual: Mapping[str, Array], truth: Mapping[str, Array], units: Mapping[str, Array]
) -> Iterator[Fact]:
    for name, u in units.items():
        over = int((u > 1).sum())
        if not over:
            yield Fact(f"{name} right", f"{name} is right in all of its {u.size} rows", {"rows": int(u.size)})
            continue
        row = tuple(int(i) for i in np.unravel_index(int(u.argmax()), u.shape))
        first = tuple(int(i) for i in np.argwhere(u > 1)[0])
        data = {"rows_over": over, "rows": int(u.size), "worst": _short(u[row]), "first": list(first)}
        index = first
        if not isinstance(case, (PagedCase, DenseCase)) and not name.endswith("lse"):
            error = np.abs(widen(actual[name][first], np.float64) - truth[name][first])
            index = (*first, int(np.nan_to_num(error, nan=np.inf).argmax()))
        text = f"{name} is wrong in {over} of {u.size} rows, first at {locate(case, name, index)['text']}"
        most = f"at most by {_short(u[row]):g} budgets"
        if not np.isfinite(u[row]):
            most = _beyond(*(np.atleast_1d(widen(x[name][row], np.float64)) for x in (actual, truth)))
        yield Fact(f"{name} wrong", f"{text}, {most}", data)
        empty = getattr(case, "empty_lse", None) if name.endswith("lse") else None
        kinds = nonfinite(actual[name], truth[name], empty)
        if kinds:
            said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            yield Fact("non-finite", f"{name} differs where values are not finite: {said}", kinds)


def _beyond(g: Array, w: Array) -> str:
    """Why no number of budgets says how far a row is off."""
    if np.isfinite(g).all() and np.isfinite(w).all():
        return "some where nothing is rounded, which must be exact"
    if np.isfinite(w).all():
        return "some not finite where a number is expected"
    return "some where what is expected is not a finite number"


def _axes(bad: Array, held: Array) -> Iterator[Fact]:
    """Which requests, query tokens and heads are wrong, where not all are; requests without keys aside."""
    for axis, name in enumerate(("request", "query", "head")):
        other = tuple(i for i in range(3) if i != axis)
        hit = np.asarray(bad.any(axis=other))
        if hit.size > 1 and not (hit if axis else hit[held]).all():
            wrong = [int(i) for i in np.flatnonzero(hit)]
            text = f"only {plural(name, len(wrong))} {ranges(wrong)} of {hit.size} {_are(wrong)} wrong"
            yield Fact(plural(name, 2), text, {"wrong": ranges(wrong), "of": int(hit.size)})


def _lengths(case: PagedCase, bad: Array, rows: Mapping[str, Array]) -> Iterator[Fact]:
    """What the lengths of wrong requests have that those of right ones have not."""
    lens: Array = case.seq_lens.astype(np.int64)
    T = bad.shape[1]
    seen = np.maximum(lens[:, None] - (T - 1 - np.arange(T) if case.causal else 0), 0)  # [B, T]
    if "out" in rows:
        wrong = np.asarray((rows["out"] > 1).any(-1))
        if (seen == 1).any() and not wrong[seen == 1].any() and wrong[seen > 1].any():
            every = "all" if wrong[seen > 1].all() else "some"
            yield Fact("one key", f"rows that see one key are right in out, {every} that see more are wrong")
    hit = np.asarray(bad.any(axis=(1, 2)))
    held = lens > 0
    right, wrong_lens = lens[held & ~hit], lens[held & hit]
    if not len(right) or not len(wrong_lens):
        if not len(wrong_lens):
            yield Fact("empty", "only requests without keys are wrong")
        return
    if right.max() < wrong_lens.min():
        text = f"right up to {right.max()} keys, wrong from {wrong_lens.min()} on"
        yield Fact("length", text, {"right": int(right.max()), "wrong": int(wrong_lens.min())})
    elif wrong_lens.max() < right.min():
        text = f"wrong up to {wrong_lens.max()} keys, right from {right.min()} on"
        yield Fact("length", text, {"wrong": int(wrong_lens.max()), "right": int(right.min())})
    for tile in sorted({*TILES, case.kv_cache.shape[1]}, reverse=True):
        if tile > 1 and not (right % tile).any() and (wrong_lens % tile).all():
            yield Fact("multiple", f"wrong exactly where the length is no multiple of {tile}", {"tile": int(tile)})
            break


def _shape(g: Array, w: Array, bad: Array) -> Iterator[Fact]:
    """Wrong rows that are zero, or parallel to the truth."""
    g, w = g[bad], w[bad]
    finite = np.isfinite(g).all(-1) & np.isfinite(w).all(-1)
    zero = finite & (g == 0).all(-1)
    if zero.any():
        yield Fact("zero", f"{int(zero.sum())} of {len(g)} wrong rows are zero", {"rows": int(zero.sum())})
    g, w = g[finite & ~zero], w[finite & ~zero]
    if len(g) == 0:
        return
    _, cosine, ratio = of_rows(g, w)
    if cosine.min() > 0.9999:
        low, high = float(ratio.min()), float(ratio.max())
        data = {"least": _short(low), "most": _short(high)}
        if high - low <= 0.004 * high:
            yield Fact("parallel", f"wrong rows are the truth times one factor, {_short(np.median(ratio)):g}", data)
        else:
            text = f"wrong rows are parallel to the truth, factor {_short(low):g} to {_short(high):g}"
            yield Fact("parallel", text, data)
    elif np.abs(ratio - 1).max() < 0.004:
        text = f"wrong rows have the size of the truth but another direction (cosine {cosine.min():.2g} at least)"
        yield Fact("turned", text, {"cosine": _short(cosine.min())})


def _columns(g: Array, w: Array, bad: Array) -> Iterator[Fact]:
    """Columns that hold the error, where some hold none."""
    error = np.abs(g[bad] - w[bad])
    finite = np.isfinite(error).all(-1)
    if not finite.any() or error.shape[-1] < 2:
        return
    size = np.sqrt(np.square(error[finite]).mean(0))  # [V]
    wrong = size > 0.05 * size.max()
    if wrong.any() and not wrong.all() and size[~wrong].max() < 0.02 * size.max():
        columns = [int(i) for i in np.flatnonzero(wrong)]
        data = {"wrong": ranges(columns), "of": int(wrong.size)}
        yield Fact("columns", f"only columns {ranges(columns)} of {wrong.size} are wrong", data)


def _lse(g: Array, w: Array, bad: Array) -> Iterator[Fact]:
    """An lse that is off by a constant, or a multiple."""
    g, w = g[bad], w[bad]
    finite = np.isfinite(g) & np.isfinite(w)
    g, w = g[finite], w[finite]
    if len(g) < 2:
        return
    shift = g - w
    if np.ptp(shift) < 1e-3 * abs(shift.mean()):
        text = f"a wrong lse is the truth {'-' if shift.mean() < 0 else '+'} {abs(_short(shift.mean())):g}"
        yield Fact("lse shifted", text, {"shift": _short(shift.mean())})
    with np.errstate(all="ignore"):
        factor = g / w
    if np.isfinite(factor).all() and np.ptp(factor) < 1e-3 * abs(factor.mean()) and np.ptp(w) > 0.01:
        text = f"a wrong lse is the truth times {_short(factor.mean()):g}"
        yield Fact("lse scaled", text, {"factor": _short(factor.mean())})


def ranges(numbers: list[int]) -> str:
    """0-3, 7, 9-10; long lists are cut."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = [f"{a}-{b}" if b > a + 1 else f"{a}, {b}" if b > a else str(a) for a, b in runs]
    return ", ".join([*shown[:6], f"... ({len(numbers)} in all)"] if len(shown) > 6 else shown)


def plural(word: str, count: int) -> str:
    return f"{word}s".replace("querys", "queries") if count != 1 else word


def _are(items: list[int]) -> str:
    return "is" if len(items) == 1 else "are"


def _short(x: Any) -> float:
    return float(f"{float(x):.3g}")
