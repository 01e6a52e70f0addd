# SPDX-License-Identifier: Apache-2.0
"""Wrong sinks and soft caps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .list_edits import of_case
from .list_steps import in_denominator, lane_bias
from .listed import Listed
from .mutant import Edit, Maker, Mutant
from .needs import Need
from .plan import Plan
from .problem import Problem

SINKS, CAP = "sink multiplicity", "soft cap"
sinks = of_case("sinks", lambda p: p.case.sinks is not None)
finite = Need("a finite sink", lambda p: _has(p, np.isfinite))
capped_case = of_case("a softcap", lambda p: p.canonical.softcap > 0)


def _has(problem: Problem, test: Callable[[Array], Array]) -> bool:
    return isinstance(problem, Listed) and problem.case.sinks is not None and bool(test(problem.canonical.sinks).any())


def sink(of: Callable[[Listed, Plan, Array], Array]) -> Edit:
    """Other logits [H] of a plan."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and plan.sinks is not None
        return replace(plan, sinks=of(problem, plan, plan.sinks))

    return edit


def _heads(order: Callable[[Array], Array]) -> Edit:
    """The sinks in another order of all heads."""

    def of(problem: Listed, plan: Plan, own: Array) -> Array:
        g = plan.b % problem.KV
        return order(problem.canonical.sinks)[g * problem.H : (g + 1) * problem.H]

    return sink(of)


def _unshifted(p: Plan, out: Array, m: Array, z: Array) -> tuple[Array, Array]:
    """e^sink beside a sum of e^(s - m)."""
    assert p.sinks is not None
    whole = z + np.exp(p.sinks)
    return out * (z / whole)[..., None], whole if p.sinks_in_lse else z


def _linear(p: Plan, out: Array, m: Array, z: Array) -> tuple[Array, Array]:
    assert p.sinks is not None
    whole = z + p.sinks * np.exp(-m)
    return out * (z / whole)[..., None], whole if p.sinks_in_lse else z


def _lse_alone(p: Plan, out: Array, m: Array, z: Array) -> tuple[Array, Array]:
    return out, in_denominator(p, out, m, z)[1]


def _out_alone(p: Plan, out: Array, m: Array, z: Array) -> tuple[Array, Array]:
    return in_denominator(p, out, m, z)[0], z


def _overflows(p: Plan, out: Array, m: Array, z: Array) -> tuple[Array, Array]:
    """sink log2 e is infinite in f32, and inf - inf is not a number."""
    assert p.sinks is not None
    with np.errstate(all="ignore"):
        lost = np.isinf((p.sinks * np.log2(np.e)).astype(np.float32)) & (p.sinks > 0)
    out, z = in_denominator(p, out, m, z)
    return np.where(lost[:, None], np.nan, out), z


def adds(act: Callable[[Plan, Array, Array, Array], tuple[Array, Array]], **how: bool) -> Edit:
    return lambda problem, plan: replace(plan, add_sinks=act, **how)  # type: ignore[arg-type]


def _empty(problem: Problem, plan: Plan) -> Plan:
    """An empty row has the sink as its only key: the LSE is its logit."""
    if plan.length or plan.sinks is None:
        return plan
    return replace(plan, empty_lse=plan.sinks * plan.unit)  # type: ignore[arg-type]


def per_split(count: int) -> Mutant:
    return _mutant(
        f"per-split-{count}",
        SINKS,
        f"Z <- Z + {count} e^sink, once for each of {count} splits",
        finite,
        edit=sink(lambda p, plan, x: x + math.log(count)),
        splits=count,
        refs="ROCm/rocm-libraries#12227",
    )


def score(of: Callable[[Plan, Array], Array]) -> Edit:
    """of(plan, q . key) in the place of the scores."""
    return lambda problem, plan: replace(plan, score=of)


def _cap(p: Plan, s: Array) -> Array:
    return p.softcap * np.tanh(s / p.softcap)


_mutant = Maker("sink.", (sinks,))
cap = Maker("cap.", (capped_case,))
MUTANTS = (
    _mutant(
        "missing",
        SINKS,
        "o and lse without the sink",
        edit=lambda _, plan: replace(plan, sinks=None),
        refs="vllm-project/vllm#54568",
    ),
    _mutant(
        "twice",
        SINKS,
        "Z <- Z + 2 e^sink",
        finite,
        edit=sink(lambda p, plan, x: x + math.log(2)),
        refs="ROCm/rocm-libraries#12227",
    ),
    per_split(3),
    per_split(4),
    per_split(8),
    _mutant(
        "in-lse",
        "sink in the lse",
        "lse counts the sink, o does too",
        of_case("an lse that does not count its sinks", lambda p: not p.case.sinks_in_lse),
        edit=lambda _, plan: replace(plan, sinks_in_lse=True),
    ),
    _mutant(
        "not-in-lse",
        "sink in the lse",
        "lse does not count the sink",
        of_case("an lse that counts its sinks", lambda p: p.case.sinks_in_lse),
        edit=adds(_out_alone),
    ),
    _mutant(
        "lse-alone",
        SINKS,
        "lse counts the sink, o does not",
        of_case("an lse that counts its sinks", lambda p: p.case.sinks_in_lse),
        edit=adds(_lse_alone),
    ),
    _mutant(
        "base-e-as-2",
        "sink value",
        "2^sink beside 2^(s log2 e): sink <- ln 2 sink",
        finite,
        edit=sink(lambda p, plan, x: x * math.log(2)),
    ),
    _mutant(
        "log2e-twice", "sink value", "sink <- log2 e sink", finite, edit=sink(lambda p, plan, x: x * np.log2(np.e))
    ),
    _mutant(
        "scaled",
        "sink value",
        "sink <- softmax_scale sink",
        finite,
        edit=sink(lambda p, plan, x: x * p.case.softmax_scale),
    ),
    _mutant(
        "unscaled",
        "sink value",
        "sink <- sink / softmax_scale",
        finite,
        edit=sink(lambda p, plan, x: x / p.case.softmax_scale),
    ),
    _mutant("negated", "sink value", "sink <- -sink", finite, edit=sink(lambda p, plan, x: -x)),
    _mutant(
        "zero", "sink value", "sink <- 0, one more lane with score 0", edit=sink(lambda p, plan, x: np.zeros_like(x))
    ),
    _mutant("without-maximum", "sink value", "Z = sum e^(s - m) + e^sink", finite, edit=adds(_unshifted)),
    _mutant("linear", "sink value", "Z = sum e^s + sink, no exponential", finite, edit=adds(_linear)),
    _mutant(
        "of-head-0", "sink of another head", "the sink of head 0 for all", edit=_heads(lambda x: np.full_like(x, x[0]))
    ),
    _mutant("of-next-head", "sink of another head", "the sink of head h + 1", edit=_heads(lambda x: np.roll(x, -1))),
    _mutant("heads-reversed", "sink of another head", "the sink of head H - 1 - h", edit=_heads(lambda x: x[::-1])),
    _mutant(
        "on-empty-rows",
        "sink of an empty row",
        "lse of an empty row is its sink",
        finite,
        Need("a row without keys", lambda p: bool((p.lens == 0).any())),
        edit=_empty,
    ),
    _mutant(
        "overflow",
        "sink range",
        "inf - inf: sink log2 e overflows in f32, or the sink is infinite",
        Need("a sink above 2.3e38", lambda p: _has(p, lambda x: x > 2.3e38)),
        edit=adds(_overflows),
        refs="flashinfer-ai/flashinfer#5119",
    ),
    cap("missing", CAP, "the scores are not capped", edit=lambda _, plan: replace(plan, softcap=0.0)),
    cap("twice", CAP, "c tanh(tanh(s / c))", edit=score(lambda p, s: _cap(p, _cap(p, s * p.scale)) + lane_bias(p))),
    cap("not-divided", CAP, "c tanh(s)", edit=score(lambda p, s: p.softcap * np.tanh(s * p.scale) + lane_bias(p))),
    cap("not-multiplied", CAP, "tanh(s / c)", edit=score(lambda p, s: np.tanh(s * p.scale / p.softcap) + lane_bias(p))),
    cap("before-scale", CAP, "scale c tanh(q k / c)", edit=score(lambda p, s: _cap(p, s) * p.scale + lane_bias(p))),
    cap(
        "clipped",
        CAP,
        "min(max(s, -c), c)",
        edit=score(lambda p, s: np.clip(s * p.scale, -p.softcap, p.softcap) + lane_bias(p)),
    ),
    cap(
        "after-bias",
        CAP,
        "c tanh((s + bias) / c)",
        of_case("a bias", lambda p: p.case.bias is not None),
        edit=score(lambda p, s: _cap(p, s * p.scale + lane_bias(p))),
    ),
    cap(
        "base-2",
        CAP,
        "c tanh(s log2 e / c) in base 2",
        edit=score(lambda p, s: _cap(p, s * p.scale * np.log2(np.e)) * math.log(2) + lane_bias(p)),
    ),
)
