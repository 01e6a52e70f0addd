# SPDX-License-Identifier: Apache-2.0
"""A paged case that is not plain cut to some of its requests, and how many keys each query row has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import Array
from ..canonical.queries import queries_of
from ..cases import PagedCase

OF_REQUESTS = ("block_table", "seq_lens", "extra_block_table", "extra_seq_lens")
OF_QUERIES = ("topk_indices", "topk_length", "extra_topk_indices", "extra_topk_length", "bias")
QUERY_DTYPES = ("f64", "f32", "f16", "bf16", "e4m3")


def starts_of(case: PagedCase) -> Array:
    """[B + 1]: request b has the query rows starts[b] .. starts[b + 1]."""
    return queries_of(case, QUERY_DTYPES).starts


def shape_of(case: PagedCase) -> tuple[int, int, int]:
    """(requests, query tokens, heads) of the rows of a result; of ragged queries every row is a request."""
    rows = case.q.shape[:-1]
    return (rows[0], 1, rows[1]) if len(rows) == 2 else (rows[0], rows[1], rows[2])


def of_requests(
    case: PagedCase, requests: list[int], results: Mapping[str, Array]
) -> tuple[PagedCase, dict[str, Array]]:
    """The case of these requests alone, and the results of their rows."""
    starts = starts_of(case)
    rows = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in requests])
    ragged = case.qo_indptr is not None
    index: Any = rows if ragged else requests
    changed: dict[str, Any] = {"q": case.q[index]}
    for name in (*OF_REQUESTS, *OF_QUERIES):
        array = getattr(case, name)
        if array is not None:
            changed[name] = array[requests if name in OF_REQUESTS else index]
    if ragged:
        counts = np.diff(starts)[requests]
        changed["qo_indptr"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return dataclasses.replace(case, **changed), {name: array[index] for name, array in results.items()}
