# SPDX-License-Identifier: Apache-2.0
"""Which mutants of plain cases say the same of a row that has a list of keys: those of scores, softmax and values.

Lengths are then those of lists, and a tile is a tile of a list. Those of pages, tables, tokens and requests are not.
"""

from __future__ import annotations

NEW = ("topk", "sight", "sink", "cap", "bias", "layout", "scale", "format")
SHARED = ("temperature", "score", "key", "pad", "state", "online", "merge", "value", "lse", "range", "empty")
ROPE = ("rope.dropped", "rope.zero-rows")
QUERIES = (
    "query.head-0",
    "query.head-shift",
    "query.heads-reversed",
    "query.heads-of-other-half",
    "query.output-next-head",
)
NOT = frozenset(
    (
        "score.distance-bias-0.00390625",
        "score.softmax-over-heads",
        "key.new-as-zero",
        "key.first-page-as-zero",
        "key.last-page-as-zero",
        "pad.lanes-page",
        "pad.rows-32",
        "pad.rows-64",
        "pad.masked-as-zero",
        "state.carried",
        "value.page-frozen",
        "value.page-skips",
        "value.page-behind",
        "value.slot-of-request-0",
        "value.row-factor-1.21",
        "lse.next-to-empty",
        "lse.heads-first",
        "lse.request-last",
        "lse.first-token",
        "empty.row-above",
        "empty.first-key",
        "empty.last-entry",
        "empty.mean",
        "empty.work-shifted",
        "merge.states-transposed",
    )
)


def of_lists(name: str) -> bool:
    """Whether the mutant `name`, or each part of a composition, means something where rows have lists of keys."""
    return all(_one(part) for part in name.split(" + "))


def _one(name: str) -> bool:
    prefix = name.partition(".")[0]
    if name in NOT:
        return False
    return prefix in NEW or prefix in SHARED or name in (*ROPE, *QUERIES)
