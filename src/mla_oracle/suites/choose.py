# SPDX-License-Identifier: Apache-2.0
"""The choice of a suite: few cases that together see every mutant, and tell those of different classes apart.

Greedy: the case that adds most to what is seen and told apart, again and again. Coverage is computed with the budgets
of the numerics given, so that a mutant counts as seen where a kernel that has it fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import DenseCase, PagedCase
from ..cases.inputs import generate
from ..diagnosis.discrimination import SURE, largest, usual_kinds
from ..diagnosis.measure import Measure
from ..diagnosis.suspects import Suspects
from ..mutants import Mutant, bank
from ..oracle import expected
from ..verdict.locate import in_row_axes

ELEMENTS = 4096  # of a result that a print takes
APART = 3.0  # budgets between two prints
HEADS = 8  # of so many heads one is looked at first: what it shows is seen
SILENT = 20.0  # seconds, after which it is said how far a case is


@dataclass(frozen=True)
class Suite:
    """`cases` in the order they were chosen; `seen` names the mutants each is the first to see."""

    cases: list[str]
    seen: dict[str, list[str]]
    unseen: list[str]  # mutants that apply to a case and are seen by none
    never: list[str]  # mutants that no case has what they need for
    alike: list[list[str]]  # mutants of more than one class that no case tells apart
    candidates: int

    def as_json(self) -> dict[str, Any]:
        covered = sum(len(names) for names in self.seen.values())
        return {
            "cases": [{"case": case, "first_seen": len(self.seen[case])} for case in self.cases],
            "seen": covered,
            "applicable": covered + len(self.unseen),
            "unseen": self.unseen,
            "never_applicable": self.never,
            "alike": self.alike,
            "candidates": self.candidates,
        }


@dataclass
class _Candidate:
    """What one case shows: the error of each mutant, and a print of its results."""

    errors: dict[str, float] = field(default_factory=dict)
    prints: dict[str, Array] = field(default_factory=dict)
    truth: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    parts: dict[tuple[str, ...], int] = field(default_factory=dict)

    def print_of(self, name: str) -> Array:
        return self.prints.get(name, self.truth)


def choose(
    candidates: Sequence[str],
    numerics: Any = None,
    *,
    mutants: Sequence[Mutant] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Suite:
    """The suite chosen from `candidates`, ids; the first of them is always in it. Raises InputError."""
    asked = tuple(bank() if mutants is None else mutants)
    family = {mutant.name: mutant.family for mutant in asked}
    kinds = {case_id.partition(":")[0] for case_id in candidates}
    asked = tuple(mutant for mutant in asked if kinds & set(mutant.kinds))
    progress(f"{len(candidates)} candidates, {len(asked)} mutants")
    first = _look(candidates[0], numerics, asked, progress)
    chosen = [candidates[0]]
    seen = {candidates[0]: [name for name, error in first.errors.items() if error > SURE]}
    left = set(family) & {m.name for m in asked} - set(seen[candidates[0]])
    groups = _split([[mutant.name for mutant in asked]], first)
    applied = set(first.errors)
    progress(f"{candidates[0]}: sees {len(seen[candidates[0]])} mutants")

    looks: dict[str, _Candidate] = {}
    for i, case_id in enumerate(candidates[1:], 2):
        wanted = left | {name for group in _mixed(groups, family) for name in group}
        looks[case_id] = _look(case_id, numerics, tuple(m for m in asked if m.name in wanted), progress)
        progress(f"{i} of {len(candidates)} candidates looked at")
        applied |= set(looks[case_id].errors)
    while looks:
        gains = {case_id: _gain(look, left, groups, family) for case_id, look in looks.items()}
        best = max(gains, key=lambda case_id: gains[case_id])
        if not gains[best]:
            break
        look = looks.pop(best)
        new = [name for name in left if look.errors.get(name, 0.0) > SURE]
        chosen.append(best)
        seen[best] = sorted(new)
        left -= set(new)
        groups = _split(groups, look)
        progress(f"{best}: sees {len(new)} more")
    mixed = _mixed(groups, family)
    return Suite(
        chosen,
        seen,
        sorted(left & applied),
        sorted(left - applied),
        [
            group
            for group in ([n for n in group if n in applied] for group in mixed)
            if len({family[name] for name in group}) > 1
        ],
        len(candidates),
    )


def _look(
    case_id: str, numerics: Any, mutants: tuple[Mutant, ...], progress: Callable[[str], None] = lambda line: None
) -> _Candidate:
    case = generate(case_id)
    case, truth = in_row_axes(case, expected(case, precision="f64"))
    own = numerics if isinstance(case, (PagedCase, DenseCase)) else None
    measure = Measure(case, truth, usual_kinds(case, truth, own), own)
    suspects = Suspects(case, truth)
    suspects._room = 0
    take = {name: _elements(array) for name, array in truth.items()}
    found = _Candidate(truth=_print(measure, truth, take))
    said = time.monotonic()
    for i, mutant in enumerate(mutants):
        if time.monotonic() - said >= SILENT:
            progress(f"{case_id}: {i} of {len(mutants)} mutants")
            said = time.monotonic()
        if suspects.applies(mutant):
            few = _of_some_heads(suspects, measure, mutant)
            found.errors[mutant.name] = few if few > SURE else largest(suspects, measure, mutant)
            found.prints[mutant.name] = _print(measure, suspects.results(mutant), take)
    return found


def _of_some_heads(suspects: Suspects, measure: Measure, mutant: Mutant) -> float:
    """`largest` of every eighth head; 0 where that is one of few, or of no head."""
    found = [0.0]
    given = suspects.results(mutant)
    for name in measure.kinds if isinstance(suspects.case, PagedCase) else ():
        array = suspects.truth[name]
        axis = array.ndim - (1 if name.endswith("lse") else 2)
        if array.shape[axis] >= 2 * HEADS:
            some = (*(slice(None),) * axis, slice(None, None, HEADS))
            found.append(float(measure.units(name, given[name][some], array[some], some).max(initial=0)))
    return max(found)


def _elements(array: Array) -> Array:
    """Flat indices that reach every row, and every column if there are rows enough."""
    size = array.size
    if size <= ELEMENTS:
        return np.arange(size)
    step = size / ELEMENTS
    return (np.arange(ELEMENTS) * step).astype(np.int64) + np.arange(ELEMENTS) % max(int(step), 1)


def _print(measure: Measure, results: dict[str, Array], take: dict[str, Array]) -> Array:
    """Some elements of results, in budgets around the truth; what is not finite as numbers far away."""
    parts = []
    for name, index in take.items():
        scale = measure.scale_of(name).ravel()[index]
        with np.errstate(all="ignore"):
            w, g = measure.truth[name].ravel()[index], results[name].ravel()[index]
            z = np.where(scale > 0, (g - w) / scale, np.where(g == w, 0.0, 1e6 * g))
        z = np.clip(np.nan_to_num(z, nan=3e7, posinf=1e7, neginf=-1e7), -1e7, 1e7) + np.where(np.isnan(z), 2e7, 0)
        parts.append(z)
    return np.concatenate(parts).astype(np.float32)


def _split(groups: list[list[str]], look: _Candidate) -> list[list[str]]:
    """Groups of mutants that no case so far tells apart, by one case more."""
    found = []
    for group in groups:
        if len(group) == 1:
            found.append(group)
            continue
        heads: list[Array] = []
        made: list[list[str]] = []
        for name in group:
            mine = look.print_of(name)
            for head, members in zip(heads, made, strict=True):
                if _alike(mine, head):
                    members.append(name)
                    break
            else:
                heads.append(mine)
                made.append([name])
        found += made
    return found


def _alike(a: Array, b: Array) -> bool:
    """Within APART budgets, or a hundredth where both are far from the truth."""
    return bool((np.abs(a - b) <= np.maximum(APART, 0.01 * np.minimum(np.abs(a), np.abs(b)))).all())


def _mixed(groups: list[list[str]], family: dict[str, str]) -> list[list[str]]:
    return [group for group in groups if len({family[name] for name in group}) > 1]


def _gain(look: _Candidate, left: set[str], groups: list[list[str]], family: dict[str, str]) -> int:
    """Mutants that are seen for the first time, and groups of several classes that fall apart."""
    new = sum(look.errors.get(name, 0.0) > SURE for name in left)
    return new + sum(_parts(look, group) - 1 for group in _mixed(groups, family))


def _parts(look: _Candidate, group: list[str]) -> int:
    """How many groups `group` falls into; most are asked about again after every choice."""
    key = tuple(group)
    if key not in look.parts:
        look.parts[key] = len(_split([group], look))
    return look.parts[key]
