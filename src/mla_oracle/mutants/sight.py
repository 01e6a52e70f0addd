# SPDX-License-Identifier: Apache-2.0
"""Wrong causality, windows and lengths of rows that have lists of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .listed import Listed, Window, extra_keys, joined, relisted
from .mutant import Edit, Maker
from .needs import Need
from .plan import Plan
from .problem import Problem
from .selection import by_position, of_case, two_rows, two_tokens

WINDOW, NO_BOUND, BOUND = "window", "no causal bound", "causal bound"


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


def window(of: Callable[[Listed, Window], Window]) -> Edit:
    return seen_by(lambda p, n: {"window": of(p, p.window)})


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


def _last(problem: Listed, n: int) -> int:
    return problem.length(int(problem.request[n])) - 1


def _in_first(problem: Listed, n: int, place: Array) -> Array:
    """Kept first tokens that lie in the window too."""
    left = problem.window[0]
    inside = place >= (problem.position(n) - left if left is not None else 0)
    return inside & (place < problem.window[2])


def _page_start(problem: Listed, n: int, place: Array) -> Array:
    left = problem.window[0] or 0
    start = max(problem.position(n) - left, 0) // problem.block * problem.block
    return (place >= start) | (place < problem.window[2])


def query(of: Callable[[Listed, int], int]) -> Edit:
    """The query of row of(problem, n)."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        q = problem.q[of(problem, problem.row(plan)) * problem.KV + plan.b % problem.KV]
        return replace(plan, q_latent=q[..., : problem.split].copy(), q_rope=q[..., problem.split :].copy())

    return edit


left = of_case("a window to the left", lambda p: p.window[0] is not None)
right = of_case("a window to the right", lambda p: p.window[1] is not None)
right_too = of_case("a window to the right, not causal", lambda p: p.window[1] is not None and not p.case.causal)
first = of_case("kept first tokens", lambda p: p.window[2] > 0 and p.window[0] is not None)
causal = of_case("causal, by position", lambda p: p.case.causal and not p.by_slot)
not_causal = of_case("by position, not causal", lambda p: not p.case.causal and not p.by_slot)
ragged = of_case(
    "requests of different numbers of query tokens",
    lambda p: p.case.qo_indptr is not None and len(np.unique(np.diff(p.starts))) > 1,
)
dense = of_case("no selection", lambda p: p.case.topk_indices is None)
bounded = of_case("a causal bound or a window", lambda p: p.case.causal or p.window[:2] != (None, None))
page = of_case("pages of two rows and more", lambda p: p.block >= 2)
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
        edit=seen_by(more=lambda p, n, place: place < _last(p, n)),
    ),
    _mutant(
        "window-left-one-more", WINDOW, "left <- left + 1", left, edit=window(lambda p, w: ((w[0] or 0) + 1, *w[1:]))
    ),
    _mutant(
        "window-left-one-less",
        WINDOW,
        "left <- left - 1",
        left,
        of_case("a window of one key and more", lambda p: (p.window[0] or 0) > 0),
        edit=window(lambda p, w: ((w[0] or 0) - 1, *w[1:])),
    ),
    _mutant(
        "window-left-none",
        WINDOW,
        "no bound to the left",
        left,
        edit=window(lambda p, w: (None, *w[1:])),
        refs="onnxruntime/mobius#596",
    ),
    _mutant(
        "window-padded",
        WINDOW,
        "left <- its next multiple of 64",
        left,
        edit=window(lambda p, w: (-(-((w[0] or 0) + 1) // 64) * 64 - 1, *w[1:])),
        refs="local-inference-lab/vllm#623",
    ),
    _mutant(
        "window-page",
        WINDOW,
        "the window begins with a page",
        left,
        page,
        edit=seen_by(lambda p, n: {"window": (None, *p.window[1:])}, more=_page_start),
    ),
    _mutant(
        "window-right-one-more",
        WINDOW,
        "right <- right + 1",
        right_too,
        edit=window(lambda p, w: (w[0], (w[1] or 0) + 1, w[2])),
    ),
    _mutant(
        "window-right-one-less",
        WINDOW,
        "right <- right - 1",
        right_too,
        of_case("a window to the right of one key and more", lambda p: (p.window[1] or 0) > 0),
        edit=window(lambda p, w: (w[0], (w[1] or 0) - 1, w[2])),
    ),
    _mutant(
        "window-right-none", WINDOW, "no bound to the right", right_too, edit=window(lambda p, w: (w[0], None, w[2]))
    ),
    _mutant(
        "window-left-minus-one-as-0",
        WINDOW,
        "left -1, no bound, read as 0",
        of_case("a window to the right alone", lambda p: p.window[0] is None and p.window[1] is not None),
        edit=window(lambda p, w: (0, *w[1:])),
    ),
    _mutant(
        "window-right-minus-one-as-0",
        WINDOW,
        "right -1, no bound, read as 0",
        left,
        not_causal,
        of_case("a window to the left alone", lambda p: p.window[1] is None),
        edit=window(lambda p, w: (w[0], 0, w[2])),
    ),
    _mutant("window-symmetric", WINDOW, "right <- left", right_too, edit=window(lambda p, w: (w[0], w[0], w[2]))),
    _mutant(
        "window-from-last",
        "window of another token",
        "i = L - 1 for every query token",
        left,
        two_tokens,
        edit=at(_last),
    ),
    _mutant(
        "window-from-first",
        "window of another token",
        "i = L - T for every query token",
        left,
        two_tokens,
        edit=at(lambda p, n: p.position(n) - int(p.token[n])),
    ),
    _mutant(
        "first-ignored",
        "kept first tokens",
        "the first tokens are not kept",
        first,
        edit=window(lambda p, w: (*w[:2], 0)),
    ),
    _mutant(
        "first-one-more",
        "kept first tokens",
        "one token more is kept",
        first,
        edit=window(lambda p, w: (*w[:2], w[2] + 1)),
    ),
    _mutant(
        "first-one-less",
        "kept first tokens",
        "one token fewer is kept",
        first,
        edit=window(lambda p, w: (*w[:2], w[2] - 1)),
    ),
    _mutant(
        "first-twice",
        "kept first tokens",
        "kept tokens that lie in the window count twice",
        first,
        Need("a kept token in a window", lambda p: isinstance(p, Listed) and _any_first(p)),
        edit=seen_by(twice=_in_first),
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


def _any_first(problem: Listed) -> bool:
    for n in range(problem.rows):
        place, valid = problem.candidates(n)
        if _in_first(problem, n, place[valid & problem.sight(n, place)]).any():
            return True
    return False
