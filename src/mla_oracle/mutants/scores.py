# SPDX-License-Identifier: Apache-2.0
"""Wrong scores: elements of the row left out, taken twice or in another order; a sign, a bias, a cap too many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .joins import exact
from .mutant import Mutant
from .needs import Need, one_key, paged, rope, two_heads, two_keys, unsharded
from .permutations import hadamard, transposed_tiles
from .plan import Plan
from .problem import Problem

power_of_two = Need("latent elements that are a power of two", lambda p: p.split & (p.split - 1) == 0)
two_chunks = Need("rows of 128 elements or more", lambda p: p.D >= 128)
one_tile = Need("rows of 64 elements or more", lambda p: p.split >= 64)
wide = Need("rows of more than 32 elements", lambda p: p.D > 32)


def query(change: Callable[[Problem, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """The query [T, H, D] changed as a whole. A score is q . key, so this is a key read in another way, too."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert plan.q_rope is not None
        q = change(problem, np.concatenate([plan.q_latent, plan.q_rope], -1))
        return replace(plan, q_latent=q[..., : problem.split].copy(), q_rope=q[..., problem.split :].copy())

    return edit


def latent(change: Callable[[Array], Array]) -> Callable[[Problem, Plan], Plan]:
    return lambda problem, plan: replace(plan, q_latent=change(plan.q_latent))


def _without(first: Callable[[Problem], int], last: Callable[[Problem], int]) -> Callable[[Problem, Plan], Plan]:
    def change(problem: Problem, q: Array) -> Array:
        q = q.copy()
        q[..., first(problem) : last(problem)] = 0
        return q

    return query(change)


def _chunk_repeated(problem: Problem, q: Array) -> Array:
    """The second 64 elements of q and key are the first again."""
    q = q.copy()
    q[..., :64] *= 2
    q[..., 64:128] = 0
    return q


def _rope_first(problem: Problem, q: Array) -> Array:
    """q [latent | rope] against keys read as [rope | latent]: q's latent meets row[R:], q's rope meets row[:R]."""
    width = problem.D - problem.split
    return np.concatenate([q[..., problem.split :], q[..., : problem.split]], -1) if width else q


def _rope_first_query(problem: Problem, q: Array) -> Array:
    width = problem.D - problem.split
    return np.concatenate([q[..., width:], q[..., :width]], -1)


def _score(act: Callable[[Problem, Plan, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """Scores, already scaled, changed by `act`."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        before = plan.score
        return replace(plan, score=lambda own, raw: act(problem, own, before(own, raw)))

    return edit


def soft_cap(cap: float) -> Mutant:
    """cap tanh(s / cap)."""
    return _mutant(
        f"soft-cap-{cap:g}",
        "unwanted soft cap",
        f"s <- {cap:g} tanh(s / {cap:g})",
        _score(lambda _, p, s: cap * np.tanh(s / cap)),
        two_keys,
        cap=cap,
    )


def clipped(limit: float) -> Mutant:
    return _mutant(
        f"clipped-{limit:g}",
        "unwanted soft cap",
        f"s <- min(s, {limit:g})",
        _score(lambda _, p, s: np.minimum(s, limit)),
        two_keys,
        limit=limit,
    )


def distance_bias(slope: float) -> Mutant:
    """An ALiBi bias of the same slope for every head."""
    return _mutant(
        f"distance-bias-{slope:g}",
        "unwanted bias",
        f"s_j <- s_j + {slope:g} (j - L + 1)",
        _score(lambda _, p, s: s + slope * (p.lanes - p.length + 1)),
        two_keys,
        slope=slope,
    )


def _over_heads(problem: Problem, plan: Plan) -> Plan:
    """Each key's weights add up to 1 over the heads; the lse is the right one."""
    inner, lse = plan.score, problem.state(plan.b)[1].lse  # [T, H]

    def score(own: Plan, s: Array) -> Array:
        made = inner(own, s)
        return made - np.logaddexp.reduce(made, 1, keepdims=True)

    return replace(
        plan,
        score=score,
        join=lambda m, d: exact(m, d)._replace(coef=np.exp(m)),
        log_sum=lambda own, m, z: np.asarray(lse[own.t]),
    )


def _mutant(
    name: str,
    family: str,
    formula: str,
    edit: Callable[[Problem, Plan], Plan],
    *needs: Need,
    refs: str = "",
    **parameters: float,
) -> Mutant:
    return Mutant(
        name=f"score.{name}",
        family=family,
        formula=formula,
        references=tuple(refs.split()),
        parameters=parameters,
        conditions=needs,
        edit=edit,
    )


MUTANTS = (
    _mutant(
        "latent-dropped",
        "elements left out",
        "s = scale <r, k>",
        _without(lambda p: 0, lambda p: p.split),
        two_keys,
        rope,
    ),
    _mutant(
        "last-32",
        "elements left out",
        "the last 32 elements of the row are not in the score",
        _without(lambda p: p.D - 32, lambda p: p.D),
        two_keys,
        wide,
    ),
    _mutant(
        "last-16-latent",
        "elements left out",
        "the last 16 latent elements are not in the score",
        _without(lambda p: max(p.split - 16, 0), lambda p: p.split),
        two_keys,
    ),
    _mutant(
        "one-element",
        "elements left out",
        "the row's last element is not in the score",
        _without(lambda p: p.D - 1, lambda p: p.D),
        two_keys,
    ),
    _mutant(
        "first-chunk",
        "elements left out",
        "the first 64 elements are not in the score",
        _without(lambda p: 0, lambda p: 64),
        two_keys,
        two_chunks,
    ),
    _mutant(
        "chunk-repeated",
        "elements left out",
        "q and key elements 64..127 are 0..63 again",
        query(_chunk_repeated),
        two_keys,
        two_chunks,
    ),
    _mutant(
        "next-head",
        "row width",
        "s_h = scale (<q_h, k> + <q_(h+1), k>), a kernel of twice the head width",
        query(lambda _, q: q + np.roll(q, -1, 1) * (np.arange(q.shape[1]) < q.shape[1] - 1)[:, None]),
        one_key,
        two_heads,
        refs="Avarok-Cybersecurity/atlas#69",
    ),
    _mutant(
        "rope-first-keys",
        "rope first",
        "key = [k_r | c] where the row is [c | k_r]",
        query(_rope_first_query),
        two_keys,
        rope,
        refs="ggml-org/llama.cpp#18986",
    ),
    _mutant("rope-first-query", "rope first", "q read as [rope | latent]", query(_rope_first), two_keys, rope),
    _mutant(
        "halves-swapped",
        "element order",
        "the two halves of the latent key exchanged",
        latent(lambda q: np.roll(q, q.shape[-1] // 2, -1)),
        two_keys,
    ),
    _mutant(
        "tile-transposed",
        "element order",
        "8 x 8 of each 64 latent elements transposed in the key, not in q",
        latent(lambda q: q[..., transposed_tiles(q.shape[-1])]),
        two_keys,
        one_tile,
        refs="flashinfer-ai/flashinfer#2689",
    ),
    _mutant(
        "key-basis",
        "rotated basis",
        "latent keys rotated by a Hadamard matrix, q not",
        latent(hadamard),
        two_keys,
        power_of_two,
        refs="ggml-org/llama.cpp#25382",
    ),
    _mutant("negated", "sign", "s <- -s", _score(lambda _, p, s: -s), one_key),
    _mutant(
        "softmax-over-heads",
        "softmax axis",
        "w_hj = e^(s_hj) / sum over h of e^(s_hj), lse right",
        _over_heads,
        paged,
        two_heads,
        one_key,
        unsharded,
    ),
    soft_cap(50.0),
    soft_cap(30.0),
    clipped(10.0),
    distance_bias(2.0**-8),
)
