# SPDX-License-Identifier: Apache-2.0
"""Rows that take another row's query, length, table or place. The log's class "query row mapping"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Edit, Finish, Maker, Mutant
from .needs import (
    Need,
    fewer_heads_than,
    more_heads_than,
    one_key,
    paged,
    two_heads,
    two_keys,
    two_requests,
    two_tokens,
)
from .plan import Plan
from .problem import Problem

FAMILY = "query row mapping"


several_rows = Need("two query tokens of two requests", lambda p: p.B >= 2 and p.T >= 2)


def rows(index: Callable[[Problem, Array, Array, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """Row (b, t, h) takes the query of row `index` of the flattened B T H rows, NaN where there is none."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        flat = problem.q.reshape(-1, problem.D)
        t, h = plan.t[:, None], np.arange(problem.H)
        at = index(problem, np.full_like(t, plan.b), t, h) + 0 * (t + h)
        inside = (at >= 0) & (at < len(flat))
        q = np.where(inside[..., None], flat[np.where(inside, at, 0)], np.nan)
        return replace(plan, q_latent=q[..., : problem.split].copy(), q_rope=q[..., problem.split :].copy())

    return edit


def _flat(problem: Problem, b: Array, t: Array, h: Array) -> Array:
    return (b * problem.T + t) * problem.H + h


def _table_rows(problem: Problem, plan: Plan) -> list[Plan]:
    """Query row (b, t) takes length and table of request b T + t."""
    plans = []
    for i, t in enumerate(plan.t):
        other = plan.b * problem.T + int(t)
        known = other < problem.B
        length = int(problem.lens[other]) if known else 0
        plans.append(
            replace(
                plan,
                t=plan.t[i : i + 1],
                q_latent=plan.q_latent[i : i + 1],
                q_rope=None if plan.q_rope is None else plan.q_rope[i : i + 1],
                length=length,
                lanes=np.arange(length),
                table=problem.table[other] if known else plan.table,
                empty_out=plan.empty_out if known else np.nan,
                empty_lse=plan.empty_lse if known else np.nan,
            )
        )
    return plans


def query_mutant(
    name: str,
    formula: str,
    refs: str,
    *needs: Need,
    edit: Edit | None = None,
    finish: Finish | None = None,
    family: str = FAMILY,
) -> Mutant:
    """Of this file and of outputs.py."""
    return Maker("query.")(name, family, formula, *needs, edit=edit, finish=finish, refs=refs)


def _misread(problem: Problem, plan: Plan) -> Plan:
    """The bits of an f16 query read as bf16, or the other way round."""
    import ml_dtypes

    q = problem.case.tensors()["q"]
    other = ml_dtypes.bfloat16 if q.dtype == np.float16 else np.float16
    bits = (
        np.ascontiguousarray(q).view(np.uint16).view(other).astype(np.float64).reshape(problem.q.shape)[plan.b, plan.t]
    )
    return replace(plan, q_latent=bits[..., : problem.split].copy(), q_rope=bits[..., problem.split :].copy())


half_query = Need("a query of f16 or bf16", lambda p: p.paged and p.case.tensors()["q"].dtype.itemsize == 2)


MUTANTS = (
    query_mutant(
        "first-token",
        "q_t <- q_0, with the keys that t sees",
        "",
        two_tokens,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, 0 * t, h)),
    ),
    query_mutant(
        "last-token",
        "q_t <- q_(T-1), with the keys that t sees",
        "",
        two_tokens,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, 0 * t + p.T - 1, h)),
    ),
    query_mutant(
        "tokens-reversed",
        "q_t <- q_(T-1-t)",
        "",
        two_tokens,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, p.T - 1 - t, h)),
    ),
    query_mutant(
        "table-row",
        "row (b, t) takes length and table of request b T + t, unknown from B on",
        "vllm-project/vllm#51848 vllm-project/vllm#51065 flashinfer-ai/flashinfer#4503",
        two_tokens,
        one_key,
        paged,
        edit=_table_rows,
    ),
    query_mutant(
        "heads-128",
        "row (b, t, h) reads q row (b T + t) 128 + h, tiles of 128 heads",
        "flashinfer-ai/flashinfer#2750",
        fewer_heads_than(128),
        one_key,
        edit=rows(lambda p, b, t, h: (b * p.T + t) * 128 + h),
    ),
    query_mutant(
        "heads-64",
        "row (b, t, h) reads q row (b T + t) 64 + h, tiles of 64 heads",
        "",
        fewer_heads_than(64),
        one_key,
        edit=rows(lambda p, b, t, h: (b * p.T + t) * 64 + h),
    ),
    query_mutant(
        "request-0",
        "q of request 0 for every request",
        "",
        two_requests,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, 0 * b, t, h)),
    ),
    query_mutant(
        "next-request",
        "q of request b + 1, of the last one request 0",
        "",
        two_requests,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, (b + 1) % p.B, t, h)),
    ),
    query_mutant(
        "head-0",
        "q of head 0 for every head",
        "",
        two_heads,
        two_keys,
        edit=rows(lambda p, b, t, h: _flat(p, b, t, 0 * h)),
    ),
    query_mutant(
        "head-shift",
        "q of head h + 1, of the last one head 0",
        "",
        two_heads,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, t, (h + 1) % p.H)),
    ),
    query_mutant(
        "heads-reversed",
        "q of head H - 1 - h",
        "",
        two_heads,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, t, p.H - 1 - h)),
    ),
    query_mutant(
        "heads-swapped",
        "q of head h xor 1, of the last of an odd number its own",
        "",
        two_heads,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, t, np.where(h ^ 1 < p.H, h ^ 1, h))),
    ),
    query_mutant(
        "heads-interleaved",
        "q of head h / 2 + (h mod 2) H / 2, two groups of heads dealt out in turn",
        "",
        Need("an even number of heads, four or more", lambda p: p.H >= 4 and p.H % 2 == 0),
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, t, h // 2 + h % 2 * (p.H // 2))),
    ),
    query_mutant(
        "heads-of-other-half",
        "q of head (h + H / 2) mod H, another rank's heads",
        "",
        two_heads,
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, t, (h + p.H // 2) % p.H)),
    ),
    query_mutant(
        "head-mod-16",
        "q of head h mod 16",
        "",
        more_heads_than(16),
        one_key,
        edit=rows(lambda p, b, t, h: _flat(p, b, t, h % 16)),
    ),
    query_mutant(
        "transposed",
        "q stored [T, H] read as [H, T]",
        "",
        two_tokens,
        two_heads,
        one_key,
        edit=rows(lambda p, b, t, h: b * p.T * p.H + h * p.T + t),
    ),
    query_mutant(
        "misread",
        "bits of f16 read as bf16, or the other way round",
        "",
        half_query,
        one_key,
        edit=_misread,
        family="dtype misread",
    ),
)
