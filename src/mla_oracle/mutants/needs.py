# SPDX-License-Identifier: Apache-2.0
"""What a case must have for a mutant to mean something on it, in words and as a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .problem import Problem


@dataclass(frozen=True, eq=False)
class Need:
    """`met` returns True, False, or a sentence that says more than `words`."""

    words: str
    met: Callable[[Problem], bool | str]


def _longest(problem: Problem) -> int:
    return int(problem.lens.max(initial=0))


paged = Need("a paged case", lambda p: p.paged)
dense = Need("an absorbed or naive case", lambda p: not p.paged)
lse = Need("a form with an lse", lambda p: p.paged)
one_key = Need("a request with a key", lambda p: _longest(p) >= 1)
two_keys = Need("a row that sees two keys", lambda p: _longest(p) >= 2)
two_pages = Need("a request of two pages", lambda p: p.paged and _longest(p) > p.block)
three_pages = Need("a request of three pages", lambda p: p.paged and _longest(p) > 2 * p.block)
partial_page = Need("a length that is no multiple of the page", lambda p: p.paged and bool(np.any(p.lens % p.block)))
two_requests = Need("two requests", lambda p: p.B >= 2)
two_lengths = Need("two requests of different lengths", lambda p: len(np.unique(p.lens)) >= 2)
two_tokens = Need("two query tokens of one request", lambda p: p.T >= 2)
two_heads = Need("two heads", lambda p: p.H >= 2)
causal = Need("two query tokens and causal", lambda p: p.causal and p.T >= 2)
not_causal = Need("two query tokens, not causal", lambda p: not p.causal and p.T >= 2)
rope = Need("rope elements", lambda p: p.split < p.D)
rope_pairs = Need("an even number of rope elements", lambda p: p.split < p.D and (p.D - p.split) % 2 == 0)
angles = Need(
    "the angles of its rope: of the geometry its id names, else assumed to be of pairs (2j, 2j + 1) with base 10000",
    lambda p: p.rotation if isinstance(p.rotation, str) else True,
)
geometry = Need("an id that names a geometry", lambda p: p.geometry is not None)
yarn = Need(
    "an id that names a geometry with YaRN", lambda p: p.geometry is not None and p.geometry.softmax_mscale != 1
)
sharded = Need("shards", lambda p: p.shards >= 2)
unsharded = Need("no shards", lambda p: p.shards == 1)
empty_row = Need("a query token that sees nothing", lambda p: bool(np.any(p.lens < (p.T if p.causal else 1))))
full_value = Need(
    "a value that is the whole row, with 64 rope elements or those of the geometry",
    lambda p: p.paged and p.V == p.D and p.split < p.D,
)


def longer_than(n: int) -> Need:
    return Need(f"more than {n} keys", lambda p: _longest(p) > n)


def more_heads_than(n: int) -> Need:
    return Need(f"more than {n} heads", lambda p: n < p.H)


def fewer_heads_than(n: int) -> Need:
    return Need(f"two query rows, of fewer than {n} heads", lambda p: n > p.H and p.B * p.T >= 2)
