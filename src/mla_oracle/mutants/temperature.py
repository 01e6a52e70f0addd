# SPDX-License-Identifier: Apache-2.0
"""Wrong softmax scales: every score times one constant. The log's class "uniform temperature".

A row that sees one key is exact in out; its lse is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .mutant import Mutant
from .needs import Need, geometry, rope, two_keys, yarn
from .plan import Plan
from .problem import Problem

FAMILY = "uniform temperature"
V3_MSCALE = 0.1 * math.log(40) + 1  # YaRN with factor 40


def _mutant(name: str, formula: str, scale: Callable[[Problem], float], refs: str = "", *needs: Need) -> Mutant:
    def edit(problem: Problem, plan: Plan) -> Plan:
        return replace(plan, scale=plan.scale * (scale(problem) / problem.scale))

    return Mutant(
        name=f"temperature.{name}",
        family=FAMILY,
        formula=formula,
        references=tuple(refs.split()),
        conditions=(two_keys, *needs),
        edit=edit,
    )


def factor(value: float, name: str | None = None) -> Mutant:
    """Every score times `value`."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        return replace(plan, scale=plan.scale * value)

    return Mutant(
        name=f"temperature.{name or f'factor-{value:g}'}",
        family=FAMILY,
        formula=f"s <- {value:g} s",
        parameters={"factor": value},
        conditions=(two_keys,),
        edit=edit,
    )


def _mscale(problem: Problem) -> float:
    known = problem.geometry is not None and problem.geometry.softmax_mscale != 1
    return problem.geometry.softmax_mscale if known and problem.geometry else V3_MSCALE


def _latent_only(problem: Problem, plan: Plan) -> Plan:
    assert plan.q_rope is not None
    return replace(plan, q_rope=plan.q_rope / problem.scale)


def _rope_only(problem: Problem, plan: Plan) -> Plan:
    return replace(plan, q_latent=plan.q_latent / problem.scale)


def _exp2(problem: Problem, plan: Plan) -> Plan:
    """The scores are natural, and so is the maximum that is kept."""
    cooled = replace(plan, scale=plan.scale * math.log(2))
    return replace(cooled, log_sum=lambda p, m, z: (m / math.log(2) + np.log(z)) * p.unit)


MUTANTS = (
    _mutant(
        "row-width",
        "scale <- 1/sqrt(row width), sqrt(576) for sqrt(192)",
        lambda p: p.D**-0.5,
        "ollama/ollama#13893 MetaX-MACA/vLLM-metax#113",
    ),
    _mutant("value-width", "scale <- 1/sqrt(value width)", lambda p: p.V**-0.5),
    _mutant(
        "nope-width",
        "scale <- 1/sqrt(qk_nope_head_dim)",
        lambda p: p.geometry.qk_nope_head_dim**-0.5 if p.geometry else math.nan,
        "",
        geometry,
    ),
    _mutant("rope-width", "scale <- 1/sqrt(rope elements)", lambda p: (p.D - p.split) ** -0.5, "", rope),
    _mutant(
        "no-mscale",
        "s <- s / mscale^2, YaRN's correction left out (1.8739 where the id names no YaRN)",
        lambda p: p.scale / _mscale(p) ** 2,
        "onnxruntime/mobius#548 huggingface/transformers#47435 sgl-project/sglang#3785 sgl-project/sglang#3716",
    ),
    _mutant(
        "mscale-once",
        "s <- s / mscale, the correction not squared",
        lambda p: p.scale / _mscale(p),
        "NVIDIA/Megatron-LM#1429",
    ),
    _mutant(
        "extra-mscale",
        "s <- s mscale^2, the correction made twice",
        lambda p: p.scale * _mscale(p) ** 2,
        "AMD-AGI/Primus#928",
    ),
    _mutant(
        "mscale-v2",
        "mscale of the other field, 0.707 for 1",
        lambda p: p.scale * _other_field(p),
        "NVIDIA/Megatron-LM#1429",
        yarn,
    ),
    _mutant("one", "scale <- 1, it is never applied", lambda p: 1.0, "MetaX-MACA/vLLM-metax#113"),
    _mutant(
        "inverted",
        "scale <- 1/scale, multiplied by sqrt(d) instead of divided",
        lambda p: 1 / p.scale,
        "AI-Hypercomputer/maxtext#1370",
    ),
    _mutant("twice", "scale <- scale^2, on q and on the scores", lambda p: p.scale**2),
    _mutant(
        "hidden-width",
        "s <- s sqrt(192/40), scale from hidden_size/heads",
        lambda p: p.scale * (192 / 40) ** 0.5,
        "NVIDIA/Megatron-LM#1501",
    ),
    _mutant("integer-root", "scale <- 1/floor(1/scale)", lambda p: 1 / max(math.floor(1 / p.scale), 1)),
    _mutant("bf16", "scale <- bf16(scale)", lambda p: _bf16(p.scale)),
    factor(math.log(2), "no-log2e"),
    factor(1 / math.log(2), "log2e-twice"),
    Mutant(
        name="temperature.exp2",
        family=FAMILY,
        formula="2^(s - m) for e^(s - m), m natural: s <- 0.693147 s, and m not in the lse",
        parameters={"factor": math.log(2)},
        conditions=(two_keys,),
        edit=_exp2,
    ),
    factor(0.5, "half"),
    factor(2.0, "double"),
    factor(1.05),
    factor(0.95),
    factor(1.01),
    Mutant(
        name="temperature.latent-only",
        family="scale of one part",
        formula="s = scale <latent> + <rope>, the rope part unscaled",
        conditions=(two_keys, rope),
        edit=_latent_only,
    ),
    Mutant(
        name="temperature.rope-only",
        family="scale of one part",
        formula="s = <latent> + scale <rope>, the latent part unscaled",
        conditions=(two_keys, rope),
        edit=_rope_only,
    ),
)


def _other_field(problem: Problem) -> float:
    """(m(other) / m(right))^2 of YaRN's two mscale fields, the other being 0.707, or 1 where the right one is that."""
    assert problem.geometry is not None and problem.geometry.yarn is not None
    known = problem.geometry.yarn
    other = 1.0 if known.mscale_all_dim == 0.707 else 0.707
    return ((0.1 * other * math.log(known.factor) + 1) / problem.geometry.softmax_mscale) ** 2


def _bf16(value: float) -> float:
    import ml_dtypes

    return float(ml_dtypes.bfloat16(value))
