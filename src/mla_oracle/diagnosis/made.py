# SPDX-License-Identifier: Apache-2.0
"""Mutants that only an estimate makes: their constant has no usual value, so that the bank has none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..mutants import Mutant, Problem, scores
from ..mutants import temperature as bank_temperature
from ..mutants.keys import lanes
from ..mutants.lse import FAMILY as LSE_VALUE
from ..mutants.needs import longer_than, lse, one_key, two_keys, unsharded
from ..mutants.plan import Part, Plan
from ..mutants.problem import Results

NOT_COMPUTED = "rows not computed"


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


def period(unit: int, m: int, r: int, *, twice: bool) -> Mutant:
    """Keys j with j // unit = r mod m are not seen, or counted twice."""

    def change(plan: Plan) -> np.ndarray:
        inside = (plan.lanes // unit) % m == r
        return np.concatenate([plan.lanes, plan.lanes[inside]]) if twice else plan.lanes[~inside]

    what, name = ("counted twice", "twice") if twice else ("not seen", "lost")
    index = "j" if unit == 1 else f"floor(j / {unit})"
    return Mutant(
        name=f"key.every-{m}th-{'' if unit == 1 else f'{unit}-'}{name}-from-{r}",
        family="key lost or repeated",
        formula=f"keys j with {index} = {r} mod {m} are {what}",
        parameters={"unit": unit, "period": m, "first": r},
        conditions=(two_keys,),
        edit=lanes(change),
    )


def rope_scaled(value: float) -> Mutant:
    return _part("rope", _short(value), lambda p, x: replace(p, q_rope=None if p.q_rope is None else p.q_rope * x))


def latent_scaled(value: float) -> Mutant:
    return _part("latent", _short(value), lambda p, x: replace(p, q_latent=p.q_latent * x))


def _part(name: str, value: float, act: Callable[[Plan, float], Plan]) -> Mutant:
    return Mutant(
        name=f"temperature.{name}-{value:g}",
        family="scale of one part",
        formula=f"the {name} part of the scores times {value:g}",
        parameters={"factor": value},
        conditions=(two_keys,),
        edit=lambda problem, plan: act(plan, value),
    )


def rows_moved(to: np.ndarray, source: np.ndarray, rule: str, names: tuple[str, ...]) -> Mutant:
    """Rows `to` [n, 3] of out (request, query, head), and of an lse, hold the right ones of `source`."""

    def finish(problem: Problem, results: Results) -> Results:
        moved = dict(results)
        for name in names:
            moved[name] = results[name].copy()
            moved[name][tuple(to.T)] = results[name][tuple(source.T)]
        return moved

    return Mutant(
        name=f"rows.moved-{'-'.join(names)}",
        family="query row mapping",
        formula=f"{' and '.join(names)} of {rule}",
        conditions=(one_key,),
        finish=finish,
    )


def rows_held(to: np.ndarray, value: float, names: tuple[str, ...]) -> Mutant:
    """Rows `to` [n, 3] of out (request, query, head), and of an lse, hold one number."""

    def finish(problem: Problem, results: Results) -> Results:
        held = dict(results)
        for name in names:
            held[name] = results[name].copy()
            held[name][tuple(to.T)] = value
        return held

    return Mutant(
        name=f"rows.{'zero' if value == 0 else f'{value:g}'}{'-lse' * (len(names) > 1)}",
        family=NOT_COMPUTED,
        formula=f"{' = '.join('o' if name == 'out' else name for name in names)} = {value:g} in {len(to)} rows",
        conditions=(one_key,),
        finish=finish,
    )


def rolled(by: int) -> Mutant:
    """Column c + by holds column c."""
    return Mutant(
        name=f"value.rolled-{by}",
        family="output permutation",
        formula=f"o[c] <- o[c - {by}], around the end",
        parameters={"by": by},
        conditions=(one_key,),
        finish=lambda problem, results: {**results, "out": np.roll(results["out"], by, -1)},
    )


def columns_moved(order: np.ndarray) -> Mutant:
    """Column c holds column order[c]."""
    places = np.arange(len(order))
    by = int(order[0])
    if np.array_equal(order, places ^ by):
        rule = f"o[c] <- o[c xor {by}]"
    else:
        first = int(np.flatnonzero(order != places)[0])
        rule = f"{int((order != places).sum())} columns permuted: o[{first}] <- o[{int(order[first])}], ..."
    return Mutant(
        name="value.columns-moved",
        family="output permutation",
        formula=rule,
        conditions=(one_key,),
        finish=lambda problem, results: {**results, "out": results["out"][..., order]},
    )


def value_shifted(by: int) -> Mutant:
    """The value of the key `by` further on, of the last one past it."""
    return Mutant(
        name=f"value.shifted-{by}",
        family="value row off by one" if abs(by) == 1 else "K/V step mismatch",
        formula=f"o = sum w_j v_(j {'+-'[by < 0]} {abs(by)})",
        parameters={"by": by},
        conditions=(two_keys,),
        edit=lambda problem, plan: replace(plan, value_lanes=np.clip(plan.lanes + by, 0, max(plan.length - 1, 0))),
    )


def last_twice(count: int) -> Mutant:
    """The last `count` keys are counted twice."""
    return Mutant(
        name=f"key.last-{count}-twice",
        family="key lost or repeated",
        formula=f"the last {count} keys are counted twice",
        parameters={"count": count},
        conditions=(longer_than(count),),
        edit=lanes(lambda p: np.concatenate([p.lanes, p.lanes[-count:]])),
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
        family=NOT_COMPUTED,
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
