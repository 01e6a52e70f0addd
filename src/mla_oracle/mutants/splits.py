# SPDX-License-Identifier: Apache-2.0
"""Wrong merges of partial states: of splits of the keys, of the ranks of a sharded case, of a merge case's states.

A join takes the maximum and the sum of each part (for a state m = lse, d = 1); `weighted` says with which weight each
partial output enters. Paged cases without shards are cut into runs of ceil(keys / splits).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .evaluate import evaluate
from .joins import exact, inverse, last_of, log_parts, powers, weighted
from .mutant import Join, Mutant
from .needs import Need, paged, two_heads, two_keys, unsharded
from .plan import Joined, Part, Parts, Plan
from .problem import Problem

SPLITS = 4


def cut(splits: int) -> Callable[[Plan], Parts]:
    """Runs of ceil(keys / splits) lanes; the last ones may be short or empty."""

    def parts(plan: Plan) -> Parts:
        size = max(-(-len(plan.lanes) // splits), 1)
        return Parts(np.arange(len(plan.lanes)) // size, splits)

    return parts


def split(problem: Problem, plan: Plan, splits: int, join: Join) -> Plan:
    """The plan cut into splits, or into the ranks that the case has, and joined by `join`."""
    return replace(plan, parts=plan.parts if problem.shards > 1 else cut(splits), join=join)


def softmax(x: Array) -> Array:
    """e^x / sum e^x over the last axis, 0 where x is -inf."""
    e = powers(x)[1]
    return e * inverse(e.sum(-1))[..., None]


def log_sum_exp(x: Array) -> Array:
    top, e = powers(x)
    return np.where(top == -np.inf, top, top + np.log(e.sum(-1)))


def by(
    weights: Callable[[Array, Array, Array], Array], lse: Callable[[Array, Array, Array], Array] | None = None
) -> Join:
    """out = sum w_i out_i with w = weights(lse_i, m_i, l_i); the lse right, or lse(...) as it is stored."""

    def join(m: Array, d: Array) -> Joined:
        logs = log_parts(m, d)
        return weighted(weights(logs, m, d), d, exact(m, d), None if lse is None else lse(logs, m, d))

    return join


def natural(weights: Callable[[Array, Array, Array], Array], lse: Callable[[Array, Array, Array], Array]) -> Join:
    """As `by`, with a natural lse(...) [T, H], stored in the case's unit."""

    def join(m: Array, d: Array) -> Joined:
        logs = log_parts(m, d)
        own, seen = lse(logs, m, d), exact(m, d)
        return Joined(weighted(weights(logs, m, d), d, seen).coef, own, np.where(seen.z == 0, 0.0, 1.0))

    return join


def _right(logs: Array, m: Array, d: Array) -> Array:
    return softmax(logs)


def _equal(logs: Array, m: Array, d: Array) -> Array:
    return (d > 0) * inverse((d > 0).sum(-1))[..., None]


def _base_2_as_e(logs: Array, m: Array, d: Array) -> Array:
    return softmax(logs / math.log(2))


def _e_as_base_2(logs: Array, m: Array, d: Array) -> Array:
    return softmax(logs * math.log(2))


def keep(which: Callable[[Array], Array]) -> Join:
    """Only the parts i where which(d) holds, d [T, H, parts]."""

    def join(m: Array, d: Array) -> Joined:
        kept = which(d)
        return exact(np.where(kept, m, -np.inf), np.where(kept, d, 0.0))

    return join


def _nth(d: Array, n: int) -> Array:
    return np.broadcast_to(np.arange(d.shape[-1]) == n % d.shape[-1], d.shape)


def _last_twice(m: Array, d: Array) -> Joined:
    """The last state that is not empty enters twice."""
    last = d.shape[-1] - 1 - np.argmax((d > 0)[..., ::-1], -1)
    twice = 1.0 + (np.arange(d.shape[-1]) == last[..., None])
    top, c = powers(m)
    z = (c * d * twice).sum(-1)
    return Joined(c * twice * inverse(z)[..., None], top, z)


def _empty_as_zero(m: Array, d: Array) -> Joined:
    """An empty part has out 0 and lse 0: it takes weight e^0. Nothing changes where every part is empty."""
    none = (d > 0).sum(-1, keepdims=True) == 0
    phantom = (d == 0) & ~none
    top, c = powers(np.where(phantom, 0.0, m))
    z = (c * np.where(phantom, 1.0, d)).sum(-1)
    return Joined(np.where(phantom, 0, c) * inverse(z)[..., None], top, z)


def _empty_as_nan(m: Array, d: Array) -> Joined:
    """An empty part holds NaN, which its weight 0 does not remove."""
    right = exact(m, d)
    nan = (d == 0).any(-1) & (d > 0).any(-1)
    return right._replace(coef=np.where(nan[..., None], np.nan, right.coef))


def _one_in_base_2(logs: Array, m: Array, d: Array) -> Array:
    """The lse of part 0 alone is in base 2."""
    return softmax(np.where(_nth(d, 0), logs / math.log(2), logs))


def _states_transposed(problem: Problem, plan: Plan) -> Plan:
    """State i of request b, stored at [b, i], read at [i, b]: it is that of another request."""
    states = []
    for i in range(SPLITS):
        part, b = divmod(plan.b * SPLITS + i, problem.B)
        rows, base = problem.state(b)
        own = evaluate(replace(base.plan, parts=cut(SPLITS), keeps_parts=True), rows, base)
        lse = np.where(own.d == 0, -np.inf, own.m + np.log(own.d))[..., part]
        states.append(Part(own.partials()[0][part][plan.t], lse[plan.t]))
    return replace(
        plan, extras=tuple(states), join=keep(lambda d: np.broadcast_to(np.arange(d.shape[-1]) > 0, d.shape))
    )


def _rounded(dtype: str) -> Callable[[Array, Array, Array], Array]:
    def weights(logs: Array, m: Array, d: Array) -> Array:
        import ml_dtypes

        kind = ml_dtypes.bfloat16 if dtype == "bf16" else np.float16
        return softmax(logs.astype(kind).astype(np.float64))

    return weights


def _overflowing(logs: Array, m: Array, d: Array) -> Array:
    """e^lse in f32, the maximum not taken out."""
    e = np.exp(logs).astype(np.float32).astype(np.float64)
    weights: Array = e / e.sum(-1, keepdims=True)
    return weights


def _of_head_0(logs: Array, m: Array, d: Array) -> Array:
    return np.broadcast_to(softmax(logs)[..., :1, :], logs.shape)


def _mutant(
    name: str,
    family: str,
    formula: str,
    join: Join,
    *needs: Need,
    refs: str = "",
    splits: int = SPLITS,
    states: bool = True,
) -> Mutant:
    """`states`: it means something for states whose parts are unknown, too."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        return split(problem, plan, splits, join)

    return Mutant(
        name=f"merge.{name}",
        family=family,
        formula=formula,
        references=tuple(refs.split()),
        parameters={"splits": splits},
        conditions=(paged, two_keys, *needs),
        edit=edit,
        join=join if states else None,
    )


def boundary(name: str, formula: str, lost: bool) -> Mutant:
    """The key at each split's edge is in no split, or in two."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        size = max(-(-len(plan.lanes) // SPLITS), 1)
        edges = plan.lanes[size::size]
        lanes = np.setdiff1d(plan.lanes, edges) if lost else np.sort(np.concatenate([plan.lanes, edges]))
        return replace(plan, lanes=lanes)

    return Mutant(
        name=f"merge.{name}",
        family="split boundary",
        formula=formula,
        parameters={"splits": SPLITS},
        conditions=(paged, two_keys, unsharded),
        edit=edit,
    )


def _idle_splits(problem: Problem, plan: Plan) -> Plan:
    """As many splits as lanes and one more: the last has nothing, out 0 and lse 0."""
    shape = (len(plan.t), problem.H)
    return replace(plan, extras=(Part(np.zeros((*shape, problem.V)), np.zeros(shape)),))


def _stale_split(problem: Problem, plan: Plan) -> Plan:
    """A split without keys still has the state of the request before."""
    state = problem.state(plan.b - 1 if plan.b else problem.B - 1)[1]
    lse = np.where(np.isinf(state.m.max(-1)), -np.inf, state.lse / problem.unit)
    return replace(plan, extras=(Part(state.out[plan.t], lse[plan.t]),))


BASE, WEIGHTS, COVERAGE, PHANTOM, LSE = "LSE base", "merge weights", "combine coverage", "phantom split", "merged LSE"
empty_split = Need(
    "4 splits or ranks of which one is empty for a row that has keys",
    lambda p: bool(np.any((p.lens > 0) & (p.lens < SPLITS)) or (p.causal and p.T > 1) or p.shards > 1),
)
MUTANTS = (
    _mutant("equal", "equal weights", "o = mean of the partial outputs", by(_equal)),
    _mutant("sum", WEIGHTS, "o = sum of the partial outputs", by(lambda logs, m, d: (d > 0) * 1.0)),
    _mutant(
        "without-maximum",
        WEIGHTS,
        "w_i ~ l_i, the factors e^(m_i - M) left out",
        by(lambda logs, m, d: d * inverse(d.sum(-1))[..., None]),
        states=False,
    ),
    _mutant(
        "maximum-only", WEIGHTS, "w_i ~ e^(m_i), the sums left out", by(lambda logs, m, d: softmax(m)), states=False
    ),
    _mutant(
        "linear",
        WEIGHTS,
        "w_i ~ lse_i",
        by(lambda logs, m, d: np.where(d > 0, logs, 0) * inverse(np.where(d > 0, logs, 0).sum(-1))[..., None]),
    ),
    _mutant(
        "base-2-as-e",
        BASE,
        "w_i ~ e^(log2 Z_i)",
        by(_base_2_as_e, lambda logs, m, d: log_sum_exp(logs / math.log(2))),
        refs="vllm-project/vllm#47079 vllm-project/vllm#28840 flashinfer-ai/flashinfer#2113 sgl-project/sglang#35045",
    ),
    _mutant(
        "e-as-base-2",
        BASE,
        "w_i ~ 2^(ln Z_i)",
        by(_e_as_base_2, lambda logs, m, d: log_sum_exp(logs * math.log(2)) / math.log(2)),
        refs="sgl-project/sglang#33064",
    ),
    _mutant("one-in-base-2", BASE, "w_i right but for part 0, the lse of which is in base 2", by(_one_in_base_2)),
    _mutant(
        "maximum-twice",
        WEIGHTS,
        "w_i ~ e^(m_i) Z_i, the maximum in both",
        by(lambda logs, m, d: softmax(logs + m)),
        states=False,
    ),
    _mutant("reversed", WEIGHTS, "w_i of part S - 1 - i", by(lambda logs, m, d: softmax(logs)[..., ::-1])),
    _mutant("of-head-0", "weights of another row", "w_i of head 0 for every head", by(_of_head_0), two_heads),
    _mutant(
        "of-next-head",
        "weights of another row",
        "w_i of head h + 1",
        by(lambda logs, m, d: np.roll(softmax(logs), -1, -2)),
        two_heads,
    ),
    _mutant(
        "not-normalised",
        WEIGHTS,
        "o = sum e^(lse_i - max) o_i, not divided by their sum",
        by(lambda logs, m, d: powers(logs)[1]),
    ),
    _mutant(
        "partials-not-normalised",
        WEIGHTS,
        "w_i right, the partial outputs acc_i not divided by l_i",
        by(lambda logs, m, d: softmax(logs) * d),
        states=False,
    ),
    _mutant(
        "normalised-twice",
        WEIGHTS,
        "w_i right, the partial outputs divided by l_i twice",
        by(lambda logs, m, d: softmax(logs) * inverse(d)),
        states=False,
    ),
    _mutant("first-lost", COVERAGE, "part 0 is not merged", keep(lambda d: ~_nth(d, 0))),
    _mutant("last-lost", COVERAGE, "the last part is not merged", keep(lambda d: ~_nth(d, -1))),
    _mutant("first-only", COVERAGE, "part 0 alone", keep(lambda d: _nth(d, 0))),
    _mutant(
        "last-only",
        COVERAGE,
        "the last part alone: it was written last",
        keep(lambda d: _nth(d, -1)),
        refs="ROCm/aiter#2983",
    ),
    _mutant(
        "first-two",
        COVERAGE,
        "parts 0 and 1 alone, the combine loads no more",
        keep(lambda d: np.broadcast_to(np.arange(d.shape[-1]) < 2, d.shape)),
        refs="ggml-org/llama.cpp#13852 flashinfer-ai/flashinfer#3474 flashinfer-ai/flashinfer#3582",
    ),
    _mutant(
        "last-twice",
        "state merged twice",
        "the last part that has keys enters twice",
        _last_twice,
        refs="sgl-project/sglang#22688",
    ),
    _mutant(
        "empty-as-zero",
        PHANTOM,
        "an empty part counts with out 0, lse 0",
        _empty_as_zero,
        empty_split,
        refs="ROCm/aiter#3641 sgl-project/sglang#2465 sgl-project/sglang#2479 vllm-project/vllm#49294",
    ),
    _mutant(
        "empty-as-nan",
        "0·NaN split",
        "an empty part holds NaN: 0 NaN",
        _empty_as_nan,
        empty_split,
        refs="ROCm/aiter#4711",
    ),
    _mutant("lse-last", LSE, "lse of the last part, out right", natural(_right, lambda logs, m, d: last_of(logs, d))),
    _mutant("lse-maximum", LSE, "lse = max lse_i, out right", natural(_right, lambda logs, m, d: logs.max(-1))),
    _mutant(
        "lse-sum",
        LSE,
        "lse = sum lse_i, out right",
        natural(_right, lambda logs, m, d: np.where(d > 0, logs, 0).sum(-1)),
    ),
    _mutant(
        "lse-mean",
        LSE,
        "lse = log mean e^(lse_i), out right",
        natural(_right, lambda logs, m, d: log_sum_exp(logs) - math.log(max(logs.shape[-1], 1))),
    ),
    _mutant(
        "lse-bf16",
        "merge precision",
        "lse_i rounded to bf16 before they weigh",
        by(_rounded("bf16")),
        refs="PaddlePaddle/FastDeploy#5541",
    ),
    _mutant(
        "lse-f16",
        "merge precision",
        "lse_i rounded to f16 before they weigh",
        by(_rounded("f16")),
        refs="PaddlePaddle/FastDeploy#5541",
    ),
    _mutant(
        "overflow",
        "LSE overflow",
        "w_i = e^(lse_i) / sum in f32, no maximum taken out",
        by(_overflowing),
        refs="NVIDIA/cutlass#2274 sgl-project/sglang#6101 flashinfer-ai/flashinfer#1055 vllm-project/vllm#17745",
    ),
    boundary("edge-lost", "the first key of every split but the first is in none", True),
    boundary("edge-twice", "the first key of every split but the first is in two", False),
    Mutant(
        name="merge.states-transposed",
        family="weights of another row",
        parameters={"splits": SPLITS},
        formula="states stored [B, splits] read as [splits, B]",
        edit=_states_transposed,
        conditions=(paged, two_keys, unsharded, Need("two requests", lambda p: p.B >= 2)),
    ),
    Mutant(
        name="merge.idle-split",
        family=PHANTOM,
        formula="one split more than there is work: out 0, lse 0",
        references=("ROCm/aiter#3641", "vllm-project/vllm#47188"),
        conditions=(paged, two_keys, unsharded),
        edit=_idle_splits,
    ),
    Mutant(
        name="merge.stale-split",
        family=PHANTOM,
        formula="a split without keys has the state of the request before",
        references=("vllm-project/vllm#47188", "ROCm/aiter#2983"),
        conditions=(paged, two_keys, unsharded, Need("two requests", lambda p: p.B >= 2)),
        edit=_stale_split,
    ),
)
