# SPDX-License-Identifier: Apache-2.0
"""What a failing kernel computed instead: where it differs, and the wrong functions that give what it gave.

    found = diagnose(case, out, lse)
    found.summary                   # one line
    found.facts, found.classes      # where it differs; ranked classes with their evidence

measure.py counts errors in budgets, suspects.py computes what mutants give, score.py compares, facts.py localises,
samples.py, curves.py and constants.py estimate free constants, pairs.py composes, search.py puts them together,
undeclared.py tries other roundings, joint.py searches over several cases, separate.py finds cases that tell rivals
apart, discrimination.py says what a case is blind to.
"""

from .discrimination import Blindness, discrimination
from .report import Diagnosis, diagnose

__all__ = ["Blindness", "Diagnosis", "diagnose", "discrimination"]
