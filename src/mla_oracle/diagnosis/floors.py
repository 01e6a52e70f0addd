# SPDX-License-Identifier: Apache-2.0
"""Lengths that are cut to whole tiles, L' = n floor(L / n): the tile n is read off how many keys were counted.

The lse of the last query token says L' of the longest wrong requests; n divides each, and is more than L - L'. Of an
lse that is stale beside a right out, L' = n floor((L - 1) / n).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..mutants import Mutant, find, lengths
from .samples import Sample, count, samples
from .score import WITHIN, Evidence
from .variants import tiled

MOST = 4  # tiles that say the same of these requests
USUAL = 8  # of one length alone, multiples of this


def floors(evidence: Evidence) -> Iterator[Mutant]:
    """Tiles that all of a few wrong requests were cut to, and that the right ones are whole multiples of."""
    problem = evidence.suspects.problem
    known = samples(evidence, longest=True)
    if problem is None or not known or any(k.lse is None for k in known):
        return
    kept = {k.length: _kept(k) for k in known}
    requests = evidence.suspects.requests or list(range(problem.B))
    wrong = np.zeros(len(requests), bool)
    for name, error in evidence.error.items():
        if not name.startswith("partial_"):
            wrong |= (error > WITHIN).reshape(len(requests), -1).any(1)
    kept |= {int(n): int(n) for n in problem.lens[requests][~wrong]}
    least = max(length - n for length, n in kept.items()) + 1
    tiles = (n for n in range(least, max(kept) + 1) if all(length // n * n == k for length, k in kept.items()))
    alone = len(kept) == 1
    for tile, _ in zip((n for n in tiles if not alone or n % USUAL == 0), range(MOST), strict=False):
        yield lengths.whole_tiles(tile)
        if problem.T > 1:
            yield lengths.tail_lost(tile)


def stale(evidence: Evidence) -> Iterator[Mutant]:
    """Tiles before the last of which the lse of a few requests was taken, where out is right."""
    problem = evidence.suspects.problem
    if problem is None or bool((evidence.error.get("out", np.ones(1)) > WITHIN).any()):
        return
    known = samples(evidence, longest=True)
    kept = {k.length: _kept(k) for k in known if k.lse is not None}
    least = max((length - n for length, n in kept.items()), default=0)
    if not kept or least <= 0:
        return
    tiles = (n for n in range(least, max(kept)) if all((length - 1) // n * n == k for length, k in kept.items()))
    for tile, _ in zip((n for n in tiles if len(kept) > 1 or n % USUAL == 0), range(MOST), strict=False):
        yield tiled(find("online.lse-stale"), tile)


def _kept(k: Sample) -> int:
    """How many keys the last query token counted; 0 where it has no lse that is a number."""
    assert k.lse is not None
    last = (k.seen == k.seen.max()) & np.isfinite(k.lse)
    return int(np.median(count(k.s[last], k.lse[last]))) if last.any() else 0
