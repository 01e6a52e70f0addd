# SPDX-License-Identifier: Apache-2.0
"""The bank in words: every mutant, the classes that have none, and what a case shows of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..cases import Case
from .absent import ABSENT
from .bank import bank, equivalences
from .effect import effect
from .mutant import Mutant
from .problem import problem_of

JSON = dict[str, Any]


def describe() -> JSON:
    """Every mutant and control, and the classes without one."""
    return {
        "count": len(bank()),
        "families": dict(Counter(mutant.family for mutant in bank())),
        "mutants": [_entry(mutant) for mutant in bank()],
        "controls": [_entry(mutant) for mutant in equivalences()],
        "absent": [{"family": a.family, "reason": a.reason, "references": list(a.references)} for a in ABSENT],
    }


def _entry(mutant: Mutant) -> JSON:
    return {
        "name": mutant.name,
        "family": mutant.family,
        "formula": mutant.formula,
        "kinds": list(mutant.kinds),
        "needs": mutant.needs,
        "parameters": dict(mutant.parameters),
        "references": list(mutant.references),
    }


def shown(case: Case) -> JSON:
    """Which mutants apply to `case`, which differ from the truth on it, and by how much. Raises InputError."""
    from ..oracle import expected

    truth = expected(case, precision="f64")
    problem = problem_of(case)
    entries: list[JSON] = []
    for mutant in (*bank(), *equivalences()):
        if problem is None:
            reason = None if case.kind in mutant.kinds else mutant.applies(case)
        else:
            reason = mutant.lacks(problem)
        entry: JSON = {"name": mutant.name, "family": mutant.family, "applies": reason is None}
        if reason is not None:
            entries.append({**entry, "reason": reason})
            continue
        seen = effect(mutant.run(case) if problem is None else mutant.solve(problem), truth)
        entries.append(
            {
                **entry,
                "differs": seen.differs,
                "rows": _figure(seen.rows),
                "out": _figure(seen.out),
                "lse": _figure(seen.lse),
                "nonfinite": seen.nonfinite,
            }
        )
    mutants = entries[: len(bank())]
    return {
        "case": case.name,
        "applicable": sum(entry["applies"] for entry in mutants),
        "visible": sum(entry.get("differs", False) for entry in mutants),
        "mutants": mutants,
        "controls": entries[len(bank()) :],
    }


def _figure(value: float) -> float:
    """Three digits; below f64's own rounding it is 0."""
    return 0.0 if value < 1e-12 else float(f"{value:.3g}")


def table(answer: JSON) -> str:
    """`describe` or `shown` as lines of text."""
    if "case" not in answer:
        lines = [f"{m['name']:34} {m['family']:28} {m['formula']}" for m in answer["mutants"]]
        lines += [f"{m['name']:34} {m['family']:28} {m['formula']}" for m in answer["controls"]]
        lines += [f"{'(none)':34} {a['family']:28} {a['reason']}" for a in answer["absent"]]
        return "\n".join([*lines, f"{answer['count']} mutants of {len(answer['families'])} classes"])
    lines = [f"{'mutant':34} {'rows':>8} {'out':>10} {'lse':>10} {'not finite':>10}"]
    for m in (*answer["mutants"], *answer["controls"]):
        if m["applies"]:
            seen = f"{m['rows']:8.3g} {m['out']:10.3g} {m['lse']:10.3g} {m['nonfinite']:10}"
            lines.append(f"{m['name']:34} {seen if m['differs'] else '       -  the truth on this case'}")
    lines += [f"{m['name']:34} {m['reason']}" for m in answer["mutants"] if not m["applies"]]
    counts = f"{answer['applicable']} of {len(answer['mutants'])} mutants apply, {answer['visible']} differ"
    return "\n".join([*lines, f"{counts}: {answer['case']}"])
