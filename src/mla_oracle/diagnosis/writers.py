# SPDX-License-Identifier: Apache-2.0
"""Where the new rows of an append case were found in the cache that was returned: slots off by a constant."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..arrays import Array
from ..cases import AppendCase
from ..mutants import Mutant
from ..mutants.append import FAMILY, write
from .score import Evidence

MOST = 0.8  # of the rows that were found


def shifted(by: int) -> Mutant:
    """Row i at its slot + by."""

    def act(case: AppendCase) -> Array:
        return write(case, np.where(case.slot_mapping < 0, -1, case.slot_mapping + by))

    return Mutant(
        name=f"append.slot-{by:+d}",
        family=FAMILY,
        formula=f"row i at slot {'+-'[by < 0]} {abs(by)}",
        parameters={"by": by},
        write=act,
    )


def found(evidence: Evidence) -> Iterator[Mutant]:
    """The shift that most rows have, where they are in the cache at all."""
    case = evidence.suspects.case
    if not isinstance(case, AppendCase):
        return
    slots = case.slot_mapping
    rows = np.concatenate([case.c_kv, case.k_pe], -1)[: len(slots)].astype(np.float64)
    flat = evidence.actual["kv_cache"].reshape(-1, rows.shape[-1]).astype(np.float64)
    steps = []
    for row, slot in zip(rows, slots, strict=True):
        at = np.flatnonzero((flat == row).all(-1))
        steps += [int(at[0]) - int(slot)] if slot >= 0 and len(at) == 1 else []
    if steps:
        values, counts = np.unique(steps, return_counts=True)
        if (by := int(values[counts.argmax()])) and counts.max() >= MOST * len(steps):
            yield shifted(by)
