# SPDX-License-Identifier: Apache-2.0
"""The bias of a problem as the fast tier takes it: a number for each listed key, in the order of the lists.

What all heads skip is in no list; what some heads skip has -inf for these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Array
from ..checks import number_type, widen

if TYPE_CHECKING:
    from . import Problem
    from .visible import Lists

WHOLE = 16  # heads: a multiple of the lanes of every register


def listed_bias(problem: Problem, heads: slice, keys: Lists) -> Array | None:
    """[N, K, 1], or [N, K, heads] in whole registers where heads differ; None where there is none but 0."""
    if problem.bias is None:
        return None
    bias = problem.bias if problem.bias.shape[1] == 1 else problem.bias[:, heads]
    (N, count, _), K = bias.shape, keys.at.shape[2]
    found = np.zeros((N, K, 1 if count == 1 else -(-count // WHOLE) * WHOLE), number_type(problem.main.precision)[0])
    query, entry = np.nonzero(np.arange(K) < keys.main[:, None])
    found[query, entry, :count] = widen(bias[query, :, keys.positions[query, entry]], found.dtype)
    return found if found.any() else None
