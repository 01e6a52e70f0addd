# SPDX-License-Identifier: Apache-2.0
"""Whether two cases ask the same: the same queries see the same rows in the same order, bit for bit, scored alike.

How an LSE is given (base, axes, empty rows, whether a sink counts) is not part of the question; nor are the axes of
q, the shape of pages and tables, and what lies in rows that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, dtype_name
from ..canonical import Problem, bias_at, checked, gather
from ..cases import Case, PagedCase


def difference(one: Case, other: Case) -> str | None:
    """None, or in which field `other` differs from `one`, with both values."""
    if not isinstance(one, PagedCase) or not isinstance(other, PagedCase):
        return _of_fields(one, other)
    for name in ("q", "kv_cache"):
        kinds = [dtype_name(name, getattr(case, name)) for case in (one, other)]
        if kinds[0] != kinds[1] and (name == "q" or one.cache_format is None):
            return f"{name} is {kinds[0]}, it has {kinds[1]}"
    for name in ("cache_format", "q_scale", "output_scale", "softcap", "softmax_scale"):
        values = [getattr(case, name) for case in (one, other)]
        if values[0] != values[1]:
            return f"{name} is {values[0]}, it has {values[1]}"
    readers = [_reader(case) for case in (one, other)]
    if readers[0] != readers[1]:
        return f"cache_reader is {readers[0]!r}, it has {readers[1]!r}"
    by_request = one.topk_by == other.topk_by == "position"
    return _of_problems(checked(one, "f64"), checked(other, "f64"), by_request)


def empty_rows(case: PagedCase) -> Array:
    """bool [*rows]: the queries that see no key."""
    counts = [np.diff(seen.starts) for seen in checked(case, "f64").seen]
    empty: Array = np.concatenate([np.zeros(0, np.int64), *counts]).reshape(case.q.shape[:-2]) == 0
    return empty


def _of_problems(one: Problem, other: Problem, by_request: bool) -> str | None:
    counts = [[int(n) for n in np.diff(problem.queries.starts)] for problem in (one, other)]
    if by_request and counts[0] != counts[1]:
        return f"requests have {counts[0]} query tokens, it has {counts[1]}"
    if not _equal(one.q, other.q):
        return "q differs"
    if one.value != other.value:
        columns = [f"{value.start} to {value.stop - 1}" for value in (one.value, other.value)]
        return f"a value is columns {columns[0]} (value_offset, head_dim_v), it has {columns[1]}"
    if not _equal(one.sinks, other.sinks):
        return "sinks differ"
    for mine, theirs in zip(_asked(one), _asked(other), strict=True):
        if mine.keys != theirs.keys:
            return f"{mine.place} sees {mine.keys} keys, it says {theirs.keys}"
        if mine.rows != theirs.rows:
            return f"the rows that {mine.place} sees differ"
        if mine.bias != theirs.bias:
            return f"the bias of {mine.place} differs"
    return None


class Asked(NamedTuple):
    """What one query sees; rows and bias by their hash."""

    place: str
    keys: int
    rows: bytes
    bias: bytes


def _asked(problem: Problem) -> Iterator[Asked]:
    """Of every query in turn; by slot, requests are nothing but a shape."""
    for b, seen in enumerate(problem.seen):
        rows, keys = gather(problem, seen)
        bias = bias_at(problem, b, seen)  # [H, M]
        for t, (first, last) in enumerate(pairwise(seen.starts)):
            own = rows[:, keys[first:last]]
            hashes = (sha256(x.tobytes()).digest() for x in (own, bias[:, first:last]))
            yield Asked(f"query {t} of request {b}", int(last - first), *hashes)


def _of_fields(one: Case, other: Case) -> str | None:
    if one.kind != other.kind:
        return f"kind is {one.kind}, it has {other.kind}"
    if one.conventions() != other.conventions():
        return f"conventions are {one.conventions()}, it has {other.conventions()}"
    theirs = other.tensors()
    for name, array in one.tensors().items():
        if array.dtype != theirs[name].dtype or not _equal(array, theirs[name]):
            return f"{name} differs"
    return None


def _equal(one: Array, other: Array) -> bool:
    """Bit for bit."""
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _reader(case: PagedCase) -> Any:
    from .. import formats

    return formats.get(case.cache_format).reader_of(case.cache_reader)
