# SPDX-License-Identifier: Apache-2.0
"""One kernel on several cases: the function that explains all of them, those it passes among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..mutants import Mutant
from .score import FAR, WITHIN, Evidence, Fit, Sums, joined, ranked


def unexplained(evidence: Evidence) -> Sums:
    """The sums of a mutant that the case cannot have: it gives the truth."""
    error = np.concatenate([u.ravel() for u in evidence.error.values()])
    return 0.0, float((error > WITHIN).sum()), float(np.square(np.minimum(error, FAR)).sum()), float(error.size)


def sums_of(evidence: Evidence, mutants: Iterable[Mutant] | None = None) -> dict[str, Sums]:
    """The sums of every mutant that applies by name, and of what does not under ""."""
    asked = evidence.suspects.applicable() if mutants is None else mutants
    found = {fit.mutant.name: fit.sums for fit in evidence.fits(m for m in asked if evidence.suspects.applies(m))}
    return {**found, "": unexplained(evidence)}


def _even(sums: Sums) -> Sums:
    rows = max(sums[3], 1)
    return sums[0] / rows, sums[1] / rows, sums[2] / rows, sums[3] / rows


def together(mutants: Sequence[Mutant], cases: Sequence[Mapping[str, Sums]]) -> list[Fit]:
    """Every mutant over all cases, best first."""
    # A case counts as much as any other, however many rows it has.
    even = [{name: _even(sums) for name, sums in case.items()} for case in cases]
    return ranked([joined(mutant, [case.get(mutant.name, case[""]) for case in even]) for mutant in mutants])
