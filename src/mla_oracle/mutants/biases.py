# SPDX-License-Identifier: Apache-2.0
"""Wrong additive biases: scaled, in another base, of another key, a mask that is a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .list_edits import of_case, two_tokens
from .list_steps import capped, extra_keys, joined, lane_bias, relisted
from .listed import Listed
from .mutant import Edit, Maker
from .needs import Need
from .plan import Keys, Plan
from .problem import Problem
from .sinks import score

BIAS, MASK = "bias value", "mask value"
biased = of_case("a bias", lambda p: p.case.bias is not None)


def _values(problem: Problem) -> Array:
    """The biases of keys that rows see, as they are added."""
    assert isinstance(problem, Listed)
    found = [problem._plan(b).keys for b in range(problem.B)]
    return np.concatenate([keys.bias.ravel() for keys in found if keys is not None] or [np.zeros(0)])


def _counts(bias: Array) -> Array:
    """Which biases are finite and change a score."""
    counts: Array = np.isfinite(bias) & (bias != 0)
    return counts


valued = Need(
    "a finite bias other than 0",
    lambda p: isinstance(p, Listed) and p.canonical.bias is not None and bool(_counts(_values(p)).any()),
)
per_head = of_case("a bias of each head", lambda p: p.canonical.bias is not None and p.canonical.bias.shape[1] > 1)
hidden = of_case(
    "a key that is hidden", lambda p: p.canonical.bias is not None and bool((p.canonical.bias == -np.inf).any())
)


def keys(of: Callable[[Listed, int, Array], Array]) -> Edit:
    """The bias of each key is of(problem, row, place) [H, M]; which keys are seen stays."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and plan.keys is not None
        main = plan.keys.source == 0
        g = plan.b % problem.KV
        found = np.broadcast_to(of(problem, problem.row(plan), plan.keys.place), (problem.all_heads, len(main)))
        bias = np.where(main, found[g * problem.H : (g + 1) * problem.H], 0.0)
        return replace(plan, keys=plan.keys._replace(bias=bias))

    return edit


def at(problem: Listed, n: int, place: Array) -> Array:
    """The bias of row n [H or 1, M] at these columns, 0 outside."""
    assert problem.canonical.bias is not None
    known = (place >= 0) & (place < problem.canonical.bias.shape[2])
    return np.where(known, problem.canonical.bias[n][:, np.where(known, place, 0)], 0.0)


def unhidden(of: Callable[[Array], Array], zero_score: bool = False) -> Edit:
    """Hidden keys are seen, with of(bias) for their bias; with a score of 0."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        n = problem.row(plan)
        place, valid = problem.candidates(n)
        main = problem.main_keys(plan, place[valid & problem.sight(n, place, biased=False)])
        lost = main.bias == -np.inf
        changed: Keys = joined(main._replace(bias=of(main.bias)), extra_keys(plan))
        made = relisted(plan, changed)
        if not zero_score:
            return made
        return replace(
            made, score=lambda own, s: np.where(_at(lost, own.lanes), 0.0, capped(own, s * own.scale)) + lane_bias(own)
        )

    return edit


def _at(mask: Array, lanes: Array) -> Array:
    """mask [H, M] at the lanes, False outside."""
    inside = (lanes >= 0) & (lanes < mask.shape[1])
    return (
        np.zeros((len(mask), len(lanes)), bool) if not mask.shape[1] else inside & mask[:, np.where(inside, lanes, 0)]
    )


def _in_scores(of: Callable[[Plan, Array], Array]) -> Edit:
    """Scores of(plan, bias of each lane)."""
    return score(lambda p, s: capped(p, s * p.scale) + of(p, lane_bias(p)))


_mutant = Maker("bias.", (biased,))
MUTANTS = (
    _mutant(
        "missing",
        BIAS,
        "the bias is not added; keys it hides stay hidden",
        valued,
        edit=keys(lambda p, n, place: np.where(at(p, n, place) == -np.inf, -np.inf, 0.0)),
    ),
    _mutant("ignored", MASK, "neither added nor hiding a key", hidden, edit=unhidden(np.zeros_like)),
    _mutant(
        "scaled",
        "mask scaled",
        "s = scale (q k + bias)",
        valued,
        edit=_in_scores(lambda p, bias: bias * p.scale),
        refs="tenstorrent/tt-metal#55333 tenstorrent/tt-metal#43239 tenstorrent/tt-metal#55337",
    ),
    _mutant(
        "unscaled",
        "mask scaled",
        "s = scale q k + bias / scale",
        valued,
        edit=_in_scores(lambda p, bias: bias / p.scale),
    ),
    _mutant(
        "base-2",
        BIAS,
        "2^(s log2 e + bias): bias <- ln 2 bias",
        valued,
        edit=_in_scores(lambda p, bias: bias * math.log(2)),
    ),
    _mutant("log2e-twice", BIAS, "bias <- log2 e bias", valued, edit=_in_scores(lambda p, bias: bias * np.log2(np.e))),
    _mutant("twice", BIAS, "bias <- 2 bias", valued, edit=_in_scores(lambda p, bias: 2 * bias)),
    _mutant(
        "negated",
        BIAS,
        "bias <- -bias; hidden keys stay hidden",
        valued,
        edit=_in_scores(lambda p, bias: np.where(np.isfinite(bias), -bias, bias)),
    ),
    _mutant(
        "heads-reversed",
        "bias of another row",
        "slopes of heads in reverse",
        per_head,
        edit=keys(lambda p, n, place: at(p, n, place)[::-1]),
    ),
    _mutant(
        "of-head-0",
        "bias of another row",
        "the bias of head 0 for all",
        per_head,
        edit=keys(lambda p, n, place: at(p, n, place)[:1]),
    ),
    _mutant(
        "of-first-token",
        "bias of another row",
        "the bias of query token 0 for every one",
        two_tokens,
        edit=keys(lambda p, n, place: at(p, int(p.starts[p.request[n]]), place)),
    ),
    _mutant(
        "of-row-0",
        "bias of another row",
        "the bias of the first query row for all",
        edit=keys(lambda p, n, place: at(p, 0, place)),
    ),
    _mutant(
        "next-column",
        "bias of another key",
        "the bias of key j + 1",
        edit=keys(lambda p, n, place: at(p, n, place + 1)),
    ),
    _mutant(
        "by-place",
        "bias of another key",
        "bias[k] of place k of a list",
        of_case("a selection", lambda p: p.case.topk_indices is not None),
        edit=keys(lambda p, n, place: at(p, n, np.arange(len(place)))),
    ),
    _mutant(
        "by-slot",
        "bias of another key",
        "bias[slot] of a key, 0 past the last column",
        edit=keys(lambda p, n, place: at(p, n, p.slots(int(p.request[n]), place))),
    ),
    _mutant(
        "hidden-as-zero",
        MASK,
        "the mask is multiplied: hidden keys have score 0",
        hidden,
        edit=unhidden(lambda x: np.where(x == -np.inf, 0.0, x), zero_score=True),
    ),
    _mutant(
        "hidden-as-10000",
        MASK,
        "-inf <- -1e4: a row of hidden keys takes their mean",
        hidden,
        edit=unhidden(lambda x: np.where(x == -np.inf, -1e4, x)),
    ),
    _mutant("hidden-as-30", MASK, "-inf <- -30", hidden, edit=unhidden(lambda x: np.where(x == -np.inf, -30.0, x))),
    _mutant(
        "hidden-as-1",
        MASK,
        "a boolean mask added as a number: -inf <- 0, 0 <- 1",
        hidden,
        edit=unhidden(lambda x: np.where(x == -np.inf, 0.0, x + 1)),
    ),
)
