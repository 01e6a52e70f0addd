# SPDX-License-Identifier: Apache-2.0
"""Wrong causality, windows and lengths of rows that have lists of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .list_edits import by_position, of_case, two_rows, two_tokens
from .list_steps import extra_keys, joined, relisted
from .listed import Listed
from .mutant import Edit, Maker
from .plan import Plan
from .problem import Problem

NO_BOUND, BOUND = "no causal bound", "causal bound"


def seen_by(
    rules: Callable[[Listed, int], Mapping[str, object]] | None = None,
    *,
    more: Callable[[Listed, int, Array], Array] | None = None,
    twice: Callable[[Listed, int, Array], Array] | None = None,
) -> Edit:
    """The places that a row sees by the `rules` of `Listed.sight`; of them those of `more`; those of `twice` again."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        n = problem.row(plan)
        place, valid = problem.candidates(n)
        seen = problem.sight(n, place, **({} if rules is None else rules(problem, n)))  # type: ignore[arg-type]
        place = place[valid & seen]
        if more is not None:
            place = place[more(problem, n, place)]
        if twice is not None:
            place = np.concatenate([place, place[twice(problem, n, place)]])
        return relisted(plan, joined(problem.main_keys(plan, place), extra_keys(plan)))

    return edit


def at(of: Callable[[Listed, int], int], causal_too: bool = False) -> Edit:
    """The window measured from of(problem, n); causality from there too, or from the row's own position."""

    def more(problem: Listed, n: int, place: Array) -> Array:
        own: Array = place <= problem.position(n)
        return own if problem.case.causal and not causal_too else np.ones(len(place), bool)

    return seen_by(lambda p, n: {"position": of(p, n)} | ({} if causal_too else {"causal": False}), more=more)


def of_request(other: Callable[[Listed, int], int]) -> Edit:
    """Row n sees the keys that a row at its place in the list of queries of request other(n) has."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        n = problem.row(plan)
        b = other(problem, n)
        if b == problem.request[n]:
            return plan
        length = problem.length(b)
        position = length - problem.tokens_of(b) + n - int(problem.starts[b])
        place = np.arange(length)
        place = place[problem.sight(n, place, position=min(position, length - 1))]
        return relisted(plan, problem.keys_of(plan, place, problem.slots(b, place)))

    return edit


def _padded_position(problem: Listed, n: int) -> int:
    b = int(problem.request[n])
    return problem.length(b) - int(np.diff(problem.starts).max()) + int(problem.token[n])


def _next_count(problem: Listed, n: int) -> int:
    b = int(problem.request[n])
    return problem.length(b) - problem.tokens_of((b + 1) % len(problem.seen)) + int(problem.token[n])


def last_of(problem: Listed, n: int) -> int:
    return problem.length(int(problem.request[n])) - 1


def query(of: Callable[[Listed, int], int]) -> Edit:
    """The query of row of(problem, n)."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        q = problem.q[of(problem, problem.row(plan)) * problem.KV + plan.b % problem.KV]
        return replace(plan, q_latent=q[..., : problem.split].copy(), q_rope=q[..., problem.split :].copy())

    return edit


causal = of_case("causal, by position", lambda p: p.case.causal and not p.by_slot)
not_causal = of_case("by position, not causal", lambda p: not p.case.causal and not p.by_slot)
ragged = of_case(
    "requests of different numbers of query tokens",
    lambda p: p.case.qo_indptr is not None and len(np.unique(np.diff(p.starts))) > 1,
)
dense = of_case("no selection", lambda p: p.case.topk_indices is None)
bounded = of_case("a causal bound or a window", lambda p: p.case.causal or p.window[:2] != (None, None))
_mutant = Maker("sight.", (by_position,))
_MISSING = "lightseekorg/tokenspeed#469 ROCm/aiter#3046 ROCm/aiter#3993"

MUTANTS = (
    _mutant(
        "causal-none",
        NO_BOUND,
        "S(t) is not bounded by L - T + t",
        causal,
        two_tokens,
        edit=seen_by(lambda p, n: {"causal": False}),
        refs=_MISSING,
    ),
    _mutant(
        "causal-unwanted",
        "unwanted causal bound",
        "S(t) = 0..L-T+t though all are asked for",
        not_causal,
        edit=seen_by(lambda p, n: {"causal": True}),
        refs="ROCm/aiter#4565",
    ),
    _mutant(
        "causal-strict",
        BOUND,
        "S(t) = 0..L-T+t-1, its own key is not seen",
        causal,
        edit=seen_by(more=lambda p, n, place: place < p.position(n)),
    ),
    _mutant(
        "causal-one-more",
        BOUND,
        "S(t) = 0..L-T+t+1, one key more",
        causal,
        two_tokens,
        edit=at(lambda p, n: p.position(n) + 1, causal_too=True),
    ),
    _mutant(
        "length-minus-one",
        "length metadata",
        "the last key of each request is not seen",
        edit=seen_by(more=lambda p, n, place: place < last_of(p, n)),
    ),
    _mutant(
        "ragged-padded",
        "query length",
        "i = L - max T + t, of queries padded to the longest",
        ragged,
        bounded,
        edit=seen_by(lambda p, n: {"position": _padded_position(p, n)}),
    ),
    _mutant(
        "ragged-next-length",
        "query length",
        "i = L - T(b + 1) + t, T of the next request",
        ragged,
        bounded,
        edit=seen_by(lambda p, n: {"position": _next_count(p, n)}),
    ),
    _mutant(
        "ragged-first-to-previous",
        "request of a query",
        "indptr + 1: a request's first query is the last of the one before",
        ragged,
        dense,
        edit=of_request(lambda p, n: max(int(p.request[n]) - 1, 0) if p.token[n] == 0 else int(p.request[n])),
    ),
    _mutant(
        "ragged-even",
        "request of a query",
        "request floor(n B / N) of query n",
        ragged,
        dense,
        edit=of_request(lambda p, n: n * len(p.seen) // p.rows),
    ),
    _mutant(
        "query-of-first-token",
        "query row mapping",
        "q of token 0 for every token of a request",
        two_tokens,
        edit=query(lambda p, n: int(p.starts[p.request[n]])),
    ),
    _mutant(
        "query-of-row-before",
        "query row mapping",
        "q of the row before",
        two_rows,
        edit=query(lambda p, n: max(n - 1, 0)),
    ),
)
