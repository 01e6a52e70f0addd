# SPDX-License-Identifier: Apache-2.0
"""Mutants that only an estimate makes: their constant has no usual value, so that the bank has none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..mutants import Mutant, Problem, scores
from ..mutants import temperature as bank_temperature
from ..mutants.keys import lanes
from ..mutants.lse import FAMILY as LSE_VALUE
from ..mutants.needs import longer_than, lse, one_key, two_keys, unsharded
from ..mutants.plan import Part, Plan
from ..mutants.problem import Results


def temperature(value: float) -> Mutant:
    """Every score times `value`."""
    made = bank_temperature.factor(_short(value))
    return replace(made, name=f"temperature.estimated-{value:.4g}")


def soft_cap(cap: float) -> Mutant:
    return scores.soft_cap(_short(cap))


def clipped(limit: float) -> Mutant:
    return scores.clipped(_short(limit))


def distance_bias(slope: float) -> Mutant:
    return scores.distance_bias(_short(slope))


def skipped(count: int) -> Mutant:
    """The first `count` keys are not seen."""
    return Mutant(
        name=f"key.first-{count}-lost",
        family="key lost or repeated",
        formula=f"keys 0 .. {count - 1} are not seen",
        parameters={"count": count},
        conditions=(longer_than(count),),
        edit=lanes(lambda p: p.lanes[p.lanes >= count]),
    )


def run(start: int, end: int, *, twice: bool) -> Mutant:
    """Keys start .. end - 1 are not seen, or counted twice."""
    what, name = ("counted twice", "twice") if twice else ("not seen", "lost")

    def change(plan: Plan) -> np.ndarray:
        inside = (plan.lanes >= start) & (plan.lanes < end)
        return np.concatenate([plan.lanes, plan.lanes[inside]]) if twice else plan.lanes[~inside]

    keys = f"key {start} is" if end == start + 1 else f"keys {start} .. {end - 1} are"
    return Mutant(
        name=f"key.{start}-to-{end - 1}-{name}",
        family="key lost or repeated",
        formula=f"{keys} {what}",
        parameters={"first": start, "last": end - 1},
        conditions=(longer_than(start),),
        edit=lanes(change),
    )


def sink(logit: float) -> Mutant:
    """One more key of score `logit` and value 0."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        T, H = len(plan.t), plan.q_latent.shape[1]
        state = Part(np.zeros((T, H, problem.V)), np.full((T, H), logit))
        return replace(plan, extras=(*plan.extras, state))

    return Mutant(
        name=f"sink.{logit:.4g}",
        family="sink multiplicity",
        formula=f"Z <- Z + e^{logit:.4g}",
        parameters={"logit": logit},
        conditions=(one_key, unsharded),
        edit=edit,
    )


def unwritten(values: Mapping[str, float]) -> Mutant:
    """Results that hold one number each."""

    def finish(problem: Problem, results: Results) -> Results:
        return results | {name: np.full_like(results[name], value) for name, value in values.items()}

    said = ", ".join(f"{name} = {value:g}" for name, value in values.items())
    return Mutant(
        name="unwritten." + "-".join(values),
        family="rows not computed",
        formula=f"{said} everywhere",
        parameters=dict(values),
        conditions=(one_key,),
        finish=finish,
    )


def lse_plus(value: float) -> Mutant:
    return _lse(f"plus-{value:g}", f"lse <- lse + {value:g}", lambda x: x + value, value)


def lse_times(value: float) -> Mutant:
    return _lse(f"times-{value:g}", f"lse <- {value:g} lse", lambda x: x * value, value)


def _lse(name: str, formula: str, act: object, value: float) -> Mutant:
    def finish(problem: Problem, results: Results) -> Results:
        old = results["lse"]
        return {**results, "lse": np.where(np.isfinite(old), act(old), old)}  # type: ignore[operator]

    return Mutant(
        name=f"lse.{name}",
        family=LSE_VALUE,
        formula=formula,
        parameters={"value": value},
        conditions=(lse, two_keys),
        finish=finish,
    )


def _short(x: float) -> float:
    return float(f"{x:.5g}")
