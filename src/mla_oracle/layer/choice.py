# SPDX-License-Identifier: Apache-2.0
"""The verdict on a choice of tokens: whether those that an engine chose have the largest scores.

Scores may be off by what the stages before them are; two tokens whose scores are nearer than that may change places.
Tokens that a query does not see are masked, chosen or not, and do not count.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..errors import InputError
from . import indexer
from .limits import limit
from .spread import Spread


def check_tokens(topk: Array, count: int, first: int = 0) -> None:
    """Raise InputError unless topk [T, k], whose rows begin at `first`, holds tokens below `count`, and -1."""
    for t, i in np.argwhere((topk < -1) | (topk >= count))[:1]:
        raise InputError(f"topk[{t + first}, {i}] is {topk[t, i]}, expected -1 or a token below {count}")


def differences(spread: Spread, theirs: Array, ours: Array) -> dict[int, str]:
    """By query, how the tokens chosen are not the ones with the largest scores; theirs and ours [T, k], -1 is none."""
    state = spread.state
    scores, size = state["index_scores"], state.indexer.kpool or 1
    seen = state.seen
    masks = [indexer.selected(topk, seen.shape[1]) & seen for topk in (theirs, ours)]
    off = spread.errors.get("index_scores", np.zeros_like(scores))
    off = off * limit(off[..., None]).largest
    found = {}
    for t, (mine, wanted) in enumerate(zip(*masks, strict=True)):
        if mine.sum() != wanted.sum():
            found[t] = f"{int(mine.sum())} tokens are chosen where {int(wanted.sum())} are expected"
            continue
        extra, lacking = np.flatnonzero(mine & ~wanted), np.flatnonzero(wanted & ~mine)
        if not extra.size:
            continue
        if max(extra[-1], lacking[-1]) >= scores.shape[1] * size:  # of no whole pool
            found[t] = f"token {extra[-1]} is chosen and token {lacking[-1]} is not"
            continue
        low = extra[np.argmin(scores[t, extra // size])]
        high = lacking[np.argmax(scores[t, lacking // size])]
        a, b = scores[t, low // size], scores[t, high // size]
        if b - a > off[t, low // size] + off[t, high // size]:
            found[t] = f"token {low} of score {a:.6g} is chosen and token {high} of score {b:.6g} is not"
    return found
