# SPDX-License-Identifier: Apache-2.0
"""Right rows stored in the place of others, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .needs import (
    Need,
    fewer_heads_than,
    one_key,
    paged,
    two_heads,
    two_requests,
    two_tokens,
    unsharded,
)
from .plan import Plan
from .problem import Problem, Results
from .queries import query_mutant

more_rows_than_64 = Need("more than 64 query rows (tokens x heads) of one request", lambda p: p.T * p.H > 64)
heads_of_16 = Need("heads that are no multiple of 16", lambda p: p.H % 16 != 0)


def _moved(results: Results, names: tuple[str, ...], act: Callable[[Array], Array]) -> Results:
    """The results [B, T, H, ...] of these names changed."""
    return {name: act(value) if name in names else value for name, value in results.items()}


def _output(act: Callable[[Problem, Array], Array]) -> Callable[[Problem, Results], Results]:
    return lambda problem, results: _moved(results, ("out", "lse"), lambda x: act(problem, x))


def _zeroed(where: Callable[[Problem], Array]) -> Callable[[Problem, Array], Array]:
    """Rows [T, H] where `where` holds were never written: zeros."""

    def act(problem: Problem, x: Array) -> Array:
        x = x.copy()
        x[:, where(problem)] = 0
        return x

    return act


def _transposed(problem: Problem, x: Array) -> Array:
    """[T, H] rows stored as [H, T]."""
    return np.swapaxes(x, 1, 2).reshape(x.shape)


def _padded(problem: Problem, x: Array) -> Array:
    """Rows of H heads taken from a buffer that has 128 a row, zeros past the H-th."""
    B, T, H = x.shape[:3]
    buffer = np.zeros((B * T, 128, *x.shape[3:]))
    buffer[:, :H] = x.reshape(B * T, H, *x.shape[3:])
    return buffer.reshape(-1, *x.shape[3:])[: B * T * H].reshape(x.shape)


def _order(problem: Problem) -> Array:
    return np.argsort(-problem.lens, kind="stable")


unsorted = Need(
    "requests that are not in the order of falling lengths",
    lambda p: p.paged and bool(np.any(_order(p) != np.arange(p.B))),
)


def padded_tokens(problem: Problem) -> int:
    """T up to a power of two."""
    return 1 << (problem.T - 1).bit_length()


def _padded_rows(problem: Problem, plan: Plan) -> list[Plan]:
    """Row i of the packed B T takes the keys of request i // T' and of token i mod T' of it."""
    plans = []
    for i, t in enumerate(plan.t):
        other, token = divmod(plan.b * problem.T + int(t), padded_tokens(problem))
        right = problem.plan(other)
        length = right.length + (token - int(t) if right.causal else 0)
        plans.append(
            replace(
                right,
                b=plan.b,
                t=plan.t[i : i + 1],
                q_latent=plan.q_latent[i : i + 1],
                q_rope=None if plan.q_rope is None else plan.q_rope[i : i + 1],
                length=length,
            )
        )
    return plans


def _not_written(problem: Problem, x: Array) -> Array:
    """Rows of tokens that no request has are 0."""
    rows = x.reshape(problem.B * problem.T, *x.shape[2:]).copy()
    rows[np.arange(len(rows)) % padded_tokens(problem) >= problem.T] = 0
    return rows.reshape(x.shape)


MUTANTS = (
    query_mutant(
        "padded-tokens",
        "row i of q and out is token i mod T' of request i // T', T' = T up to a power of two",
        "flashinfer-ai/flashinfer#4059",
        Need("query tokens that are no power of two", lambda p: padded_tokens(p) != p.T),
        one_key,
        paged,
        unsharded,
        edit=_padded_rows,
        finish=_output(_not_written),
    ),
    query_mutant(
        "broadcast",
        "o_t <- o_0",
        "ROCm/aiter#2720",
        two_tokens,
        one_key,
        finish=_output(lambda _, x: np.broadcast_to(x[:, :1], x.shape).copy()),
    ),
    query_mutant(
        "output-sorted",
        "requests worked on by falling length, stored in that order",
        "",
        unsorted,
        one_key,
        finish=_output(lambda p, x: x[_order(p)]),
    ),
    query_mutant(
        "output-heads-128",
        "row (b T + t) H + h of out and lse read where rows have 128 heads, zeros past the H-th",
        "",
        fewer_heads_than(128),
        one_key,
        finish=_output(_padded),
    ),
    query_mutant(
        "output-transposed",
        "out and lse stored [H, T] in the place of [T, H]",
        "",
        two_tokens,
        two_heads,
        one_key,
        finish=_output(_transposed),
    ),
    query_mutant(
        "output-next-head",
        "out and lse of head h stored at head h + 1",
        "",
        two_heads,
        one_key,
        finish=_output(lambda _, x: np.roll(x, 1, 2)),
    ),
    query_mutant(
        "weights-next-head",
        "o_h = sum w_(h+1) v, the lse right",
        "",
        paged,
        two_heads,
        one_key,
        finish=lambda _, results: _moved(results, ("out",), lambda x: np.roll(x, -1, 2)),
        family="weights of another row",
    ),
    query_mutant(
        "tail-heads",
        "the last H mod 16 heads are not computed: zeros",
        "",
        heads_of_16,
        one_key,
        finish=_output(_zeroed(lambda p: np.broadcast_to(np.arange(p.H) >= p.H // 16 * 16, (p.T, p.H)))),
        family="rows not computed",
    ),
    query_mutant(
        "tail-rows",
        "query rows t H + h from 64 on are not computed: zeros",
        "flashinfer-ai/flashinfer#5095",
        more_rows_than_64,
        one_key,
        finish=_output(_zeroed(lambda p: (np.arange(p.T)[:, None] * p.H + np.arange(p.H)) >= 64)),
        family="rows not computed",
    ),
    query_mutant(
        "last-request",
        "the last request is not computed: zeros",
        "",
        two_requests,
        one_key,
        finish=_output(lambda p, x: x * (np.arange(p.B) < p.B - 1).reshape(-1, *[1] * (x.ndim - 1))),
        family="rows not computed",
    ),
)
