# SPDX-License-Identifier: Apache-2.0
"""A bank of named wrong functions: what kernels have been seen, or may be expected, to compute instead.

    for mutant in applicable(case):
        wrong = mutant.run(case)        # {"out": f64, "lse": f64}, what a kernel with this bug gives
    find("temperature.row-width + rope.pairing").run(case)

plan.py says what one attention consists of, evaluate.py computes it, a file per family changes it. A mutant that a
case cannot show says why (`Mutant.applies`); the classes of public bugs that have none stand in absent.py.
"""

from .bank import applicable, bank, equivalences, find
from .mutant import Mutant, compose
from .problem import Problem

__all__ = ["Mutant", "Problem", "applicable", "bank", "compose", "equivalences", "find"]
