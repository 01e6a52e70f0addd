# SPDX-License-Identifier: Apache-2.0
"""Wrong rows of a few requests, with their scores: what constants are read off."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..mutants import Mutant
from ..mutants.evaluate import State, evaluate
from .score import WITHIN, Evidence

ROWS = 48  # rows a fit looks at
REQUESTS = 3
NAMES = ("out", "lse")


class Sample(NamedTuple):
    """Rows of one request: what is known of the truth (or of a mutant) and what was returned."""

    b: int
    length: int
    s: Array  # scores [R, n], -inf where masked
    seen: Array  # keys each row sees [R]
    values: Array  # [n, V]
    lse: Array | None  # returned, natural [R]
    right: Array  # natural lse of s [R]
    out: Array | None  # returned [R, V]
    rope: Array | None  # the rope elements' part of the scores [R, n]; None: there is none, or scores are not sums


def samples(evidence: Evidence, mutant: Mutant | None = None, *, longest: bool = False) -> list[Sample]:
    """Wrong rows of the shortest wrong requests, or of the longest; scores as the mutant has them."""
    problem = evidence.suspects.problem
    if problem is None or problem.up is not None:
        return []
    requests = evidence.suspects.requests or list(range(problem.B))
    found = []
    shape = (len(requests), *problem.q.shape[1:3])
    bad = [(u > WITHIN).reshape(shape) for name, u in evidence.error.items() if name in NAMES]
    wrong: Array = np.any(bad, axis=0)  # [b, T, H]
    order = sorted(range(len(requests)), key=lambda i: problem.lens[requests[i]], reverse=longest)
    for i in (i for i in order if wrong[i].any() and problem.lens[requests[i]] >= 2):
        b = requests[i]
        rows, base = problem.state(b)
        plans = [base.plan] if mutant is None else mutant.plans(problem, base.plan)
        if len(plans) != 1 or plans[0].extras:
            continue
        state = base if mutant is None else evaluate(plans[0], rows, base)
        if not state.s.shape[-1]:
            continue
        pick = np.flatnonzero(wrong[i].ravel())
        pick = pick[:: -(-len(pick) // ROWS)]
        s = state.s.reshape(-1, state.s.shape[-1])[pick]
        values, _ = rows.read(state.plan.address(state.plan, state.plan.lanes))
        with np.errstate(all="ignore"):
            lse, out = (_given(evidence, name, i, pick, len(requests)) for name in ("lse", "out"))
            unit = problem.unit if mutant is None else _unit(state, problem.unit)
            right = log_sum(s)
        found.append(
            Sample(
                b,
                int(problem.lens[b]),
                s,
                (s > -np.inf).sum(-1),
                values[:, : problem.V] if state.plan.value_columns is None else values[:, state.plan.value_columns],
                None if lse is None else lse / unit,
                right,
                out,
                _rope_part(state, pick) if mutant is None else None,
            )
        )
        if len(found) == REQUESTS:
            break
    return found


def _rope_part(state: State, pick: Array) -> Array | None:
    if state.rope is None or np.ndim(state.plan.scale):
        return None
    rope: Array = state.rope.reshape(-1, state.rope.shape[-1])[pick] * state.plan.scale
    return rope


def _unit(state: State, usual: float) -> float:
    """The unit that a mutant stores the lse in, where that is one number."""
    natural = log_sum(state.s.reshape(-1, state.s.shape[-1]))
    known = np.isfinite(natural) & (np.abs(natural) > 0.1)
    unit = state.lse.ravel()[known] / natural[known]
    one = unit.size > 0 and unit.min() > 0 and np.ptp(unit) < 1e-9 * unit.max()
    return float(unit[0]) if one else usual


def _given(evidence: Evidence, name: str, i: int, pick: Array, requests: int) -> Array | None:
    if name not in evidence.actual:
        return None
    array = evidence.actual[name].astype(np.float64)
    rows: Array = array.reshape(requests, -1)[i] if name == "lse" else array.reshape(requests, -1, array.shape[-1])[i]
    return rows[pick]


def count(s: Array, lse: Array) -> Array:
    """How many first keys have this lse [R]."""
    cumulative = np.logaddexp.accumulate(s, axis=-1)
    found: Array = np.abs(cumulative - lse[:, None]).argmin(-1) + 1
    return found


def log_sum(s: Array) -> Array:
    """[..., R] of [..., R, n]"""
    top = s.max(-1, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0)
    found: Array = safe + np.log(np.exp(s - safe[..., None]).sum(-1))
    return found
