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

from .joins import inverse, last_of, powers
from .mutant import Join, Mutant
from .needs import Need, paged, two_heads, two_keys
from .plan import Parts, Plan
from .problem import Problem
from .weights import (
    base_2_as_e,
    by,
    e_as_base_2,
    empty_as_infinite,
    empty_as_nan,
    empty_as_zero,
    equal,
    keep,
    last_twice,
    log_sum_exp,
    natural,
    nth,
    of_head_0,
    of_neighbour,
    one_in_base_2,
    overflowing,
    right,
    rounded,
    softmax,
)

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


BASE, WEIGHTS, COVERAGE, PHANTOM, LSE = "LSE base", "merge weights", "combine coverage", "phantom split", "merged LSE"


empty_split = Need(
    "4 splits or ranks of which one is empty for a row that has keys",
    lambda p: bool(np.any((p.lens > 0) & (p.lens < SPLITS)) or (p.causal and p.T > 1) or p.shards > 1),
)


MUTANTS = (
    _mutant("equal", "equal weights", "o = mean of the partial outputs", by(equal)),
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
        by(base_2_as_e, lambda logs, m, d: log_sum_exp(logs / math.log(2))),
        refs="vllm-project/vllm#47079 vllm-project/vllm#28840 flashinfer-ai/flashinfer#2113 sgl-project/sglang#35045",
    ),
    _mutant(
        "e-as-base-2",
        BASE,
        "w_i ~ 2^(ln Z_i)",
        by(e_as_base_2, lambda logs, m, d: log_sum_exp(logs * math.log(2)) / math.log(2)),
        refs="sgl-project/sglang#33064",
    ),
    _mutant("one-in-base-2", BASE, "w_i right but for part 0, the lse of which is in base 2", by(one_in_base_2)),
    _mutant(
        "maximum-twice",
        WEIGHTS,
        "w_i ~ e^(m_i) Z_i, the maximum in both",
        by(lambda logs, m, d: softmax(logs + m)),
        states=False,
    ),
    _mutant("reversed", WEIGHTS, "w_i of part S - 1 - i", by(lambda logs, m, d: softmax(logs)[..., ::-1])),
    _mutant("of-next-part", WEIGHTS, "w_i ~ e^(lse_(i+1)), of the last part that of the first", by(of_neighbour(1))),
    _mutant("of-part-before", WEIGHTS, "w_i ~ e^(lse_(i-1)), of the first part that of the last", by(of_neighbour(-1))),
    _mutant("of-head-0", "weights of another row", "w_i of head 0 for every head", by(of_head_0), two_heads),
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
    _mutant("first-lost", COVERAGE, "part 0 is not merged", keep(lambda d: ~nth(d, 0))),
    _mutant("last-lost", COVERAGE, "the last part is not merged", keep(lambda d: ~nth(d, -1))),
    _mutant("first-only", COVERAGE, "part 0 alone", keep(lambda d: nth(d, 0))),
    _mutant(
        "last-only",
        COVERAGE,
        "the last part alone: it was written last",
        keep(lambda d: nth(d, -1)),
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
        last_twice,
        refs="sgl-project/sglang#22688",
    ),
    _mutant(
        "empty-as-zero",
        PHANTOM,
        "an empty part counts with out 0, lse 0",
        empty_as_zero,
        empty_split,
        refs="ROCm/aiter#3641 sgl-project/sglang#2465 sgl-project/sglang#2479 vllm-project/vllm#49294",
    ),
    _mutant(
        "empty-as-nan",
        "0·NaN split",
        "an empty part holds NaN: 0 NaN",
        empty_as_nan,
        empty_split,
        refs="ROCm/aiter#4711",
    ),
    _mutant(
        "empty-as-infinite",
        "-inf merge",
        "an empty part's lse of +inf is taken for a number: w = e^(inf - inf)",
        empty_as_infinite,
        empty_split,
        refs="vllm-project/vllm#15492",
    ),
    _mutant("lse-last", LSE, "lse of the last part, out right", natural(right, lambda logs, m, d: last_of(logs, d))),
    _mutant("lse-maximum", LSE, "lse = max lse_i, out right", natural(right, lambda logs, m, d: logs.max(-1))),
    _mutant(
        "lse-sum",
        LSE,
        "lse = sum lse_i, out right",
        natural(right, lambda logs, m, d: np.where(d > 0, logs, 0).sum(-1)),
    ),
    _mutant(
        "lse-mean",
        LSE,
        "lse = log mean e^(lse_i), out right",
        natural(right, lambda logs, m, d: log_sum_exp(logs) - math.log(max(logs.shape[-1], 1))),
    ),
    _mutant(
        "lse-log2",
        LSE,
        "lse = max lse_i + log2 sum e^(lse_i - max), out right",
        natural(right, lambda logs, m, d: logs.max(-1) + (log_sum_exp(logs) - logs.max(-1)) / math.log(2)),
    ),
    _mutant(
        "lse-bf16",
        "merge precision",
        "lse_i rounded to bf16 before they weigh",
        by(rounded("bf16")),
        refs="PaddlePaddle/FastDeploy#5541",
    ),
    _mutant(
        "lse-f16",
        "merge precision",
        "lse_i rounded to f16 before they weigh",
        by(rounded("f16")),
        refs="PaddlePaddle/FastDeploy#5541",
    ),
    _mutant(
        "overflow",
        "LSE overflow",
        "w_i = e^(lse_i) / sum in f32, no maximum taken out",
        by(overflowing),
        refs="NVIDIA/cutlass#2274 sgl-project/sglang#6101 flashinfer-ai/flashinfer#1055 vllm-project/vllm#17745",
    ),
)
