# SPDX-License-Identifier: Apache-2.0
"""A mutant: a named wrong function of a case, executable.

Of attention (paged, absorbed, naive) it edits the plan of each request, the results of all, or both; of the other
kinds it replaces what they do: `join` the states of a merge case, `turn` the rows of a rope case, `write` the rows of
an append case. A mutant has as many of the five as apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ..arrays import Array
from ..cases import AppendCase, Case, DenseCase, MergeCase, PagedCase, RopeCase
from ..geometry import Yarn
from .lists import of_lists
from .needs import Need
from .plan import Joined, Plan
from .problem import Problem, Results, problem_of
from .rotation import Rotation

Edit = Callable[[Problem, Plan], Plan | list[Plan]]
Finish = Callable[[Problem, Results], Results]
Join = Callable[[Array, Array], Joined]
Turn = Callable[[Rotation, Array, Array], Array]  # unrotated x [T, H, R] at positions [T, 1]
Write = Callable[[AppendCase], Array]
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, eq=False)
class Mutant:
    """`name` begins with its class in short, `family` is the class in words."""

    name: str
    family: str
    formula: str
    references: tuple[str, ...] = ()  # owner/repository#number of public threads; none: found by walking the kernel
    parameters: Mapping[str, Any] = field(default_factory=lambda: NONE)
    conditions: tuple[Need, ...] = ()
    control: bool = False  # an equivalence: the results must stay as they are
    edit: Edit | None = None
    finish: Finish | None = None
    join: Join | None = None
    turn: Turn | None = None
    write: Write | None = None

    @property
    def needs(self) -> str:
        """What a case must have to show it, in words."""
        return "; ".join(need.words for need in self.conditions)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of case it applies to."""
        from .needs import dense, paged

        attention: tuple[str, ...] = ("paged",) if dense not in self.conditions else ()
        attention += ("absorbed", "naive") if paged not in self.conditions else ()
        acts = {"merge": self.join, "rope": self.turn, "append": self.write}
        given = attention if self.edit or self.finish else ()
        return given + tuple(kind for kind, act in acts.items() if act is not None)

    def applies(self, case: Case) -> str | None:
        """None, or why the case cannot show this mutant. Raises InputError for a case that is not valid."""
        if case.kind not in self.kinds:
            return f"is of {' and '.join(self.kinds)} cases"
        problem = problem_of(case)
        return None if problem is None else self.lacks(problem)

    def lacks(self, problem: Problem) -> str | None:
        """None, or which condition the problem does not meet."""
        if problem.case.kind not in self.kinds:
            return f"is of {' and '.join(self.kinds)} cases"
        if problem.listed and not of_lists(self.name):
            return "is of plain cases"
        for need in self.conditions:
            met = need.met(problem)
            if isinstance(met, str) or not met:
                return met or f"needs {need.words}"
        return None

    def run(self, case: Case) -> dict[str, Array]:
        """What a kernel with this bug gives, f64: the tensors of `oracle.expected`."""
        match case:
            case PagedCase() | DenseCase():
                problem = problem_of(case)
                assert problem is not None
                return self.solve(problem)
            case MergeCase():
                assert self.join is not None
                return merged(case, self.join)
            case RopeCase():
                assert self.turn is not None
                return {"out": turned(case, self.turn)}
            case AppendCase():
                assert self.write is not None
                return {"kv_cache": self.write(case)}
        raise TypeError(f"no such case: {case!r}")

    def solve(self, problem: Problem) -> Results:
        """`run` of a case whose problem is known: right plans and their states are computed once for all mutants."""
        results = problem.evaluate(p for b in range(problem.B) for p in self.plans(problem, problem.plan(b)))
        if self.finish is not None:
            with np.errstate(all="ignore"):
                results = self.finish(problem, results)
        return problem.shape(results)

    def plans(self, problem: Problem, plan: Plan) -> list[Plan]:
        """The plans this mutant makes of one."""
        if self.edit is None:
            return [plan]
        with np.errstate(all="ignore"):
            made = self.edit(problem, plan)
        return made if isinstance(made, list) else [made]


@dataclass(frozen=True)
class Maker:
    """Makes the mutants of one file: what their names begin with, and what all of them need."""

    prefix: str = ""
    conditions: tuple[Need, ...] = ()

    def __call__(
        self,
        name: str,
        family: str,
        formula: str,
        *needs: Need,
        edit: Edit | None = None,
        finish: Finish | None = None,
        refs: str = "",
        **parameters: Any,
    ) -> Mutant:
        """`refs`: the references, with spaces between."""
        return Mutant(
            name=self.prefix + name,
            family=family,
            formula=formula,
            references=tuple(refs.split()),
            parameters=parameters,
            conditions=(*self.conditions, *needs),
            edit=edit,
            finish=finish,
        )


def compose(*mutants: Mutant) -> Mutant:
    """The mutant "a + b": the plans of one edited by the next, then what each does to the results."""

    def edit(problem: Problem, plan: Plan) -> list[Plan]:
        plans = [plan]
        for mutant in mutants:
            plans = [made for p in plans for made in mutant.plans(problem, p)]
        return plans

    def finish(problem: Problem, results: Results) -> Results:
        for mutant in mutants:
            results = results if mutant.finish is None else mutant.finish(problem, results)
        return results

    return Mutant(
        name=" + ".join(m.name for m in mutants),
        family="composition of two",
        formula=" and ".join(m.formula for m in mutants),
        references=tuple(dict.fromkeys(r for m in mutants for r in m.references)),
        parameters={f"{m.name}.{key}": value for m in mutants for key, value in m.parameters.items()},
        conditions=tuple(dict.fromkeys(need for m in mutants for need in m.conditions)),
        control=all(m.control for m in mutants),
        edit=edit,
        finish=finish,
    )


def merged(case: MergeCase, join: Join) -> dict[str, Array]:
    """out and lse of a merge case with the states joined by `join`."""
    with np.errstate(all="ignore"):
        stored = case.partial_lse.astype(np.float64)  # [S, ...]
        marker = float(np.array(case.empty_lse).astype(case.partial_lse.dtype))
        empty = np.isinf(stored) | (stored == marker)
        unit = 1.0 if case.lse_base == "e" else float(np.log(2))
        m = np.moveaxis(np.where(empty, -np.inf, stored * unit), 0, -1)
        states = np.where(empty[..., None], 0, case.partial_out.astype(np.float64))
        coef, top, z, lse = join(m, np.where(m == -np.inf, 0.0, 1.0))
        out = np.zeros(states.shape[1:])
        for i, state in enumerate(states):
            out = out + coef[..., i, None] * state
        lse = (top + np.log(z)) / unit if lse is None else lse
        return {"out": np.where((z == 0)[..., None], 0, out), "lse": np.where(z == 0, case.empty_lse, lse)}


def turned(case: RopeCase, turn: Turn) -> Array:
    """The rows of a rope case turned by `turn`."""
    x = case.x.astype(np.float64)
    heads = x[:, None] if x.ndim == 2 else x  # [T, H, R]
    n = case.rotary_dim or heads.shape[-1]
    yarn = None if case.yarn is None else Yarn.from_json(case.yarn)
    rotation = Rotation(n, float(case.base), case.pairing == "interleaved", yarn)
    with np.errstate(all="ignore"):
        pairs = heads[..., : n // 2 * 2]
        own = rotation.amplitude * turn(rotation, pairs, case.positions.astype(np.float64)[:, None])
    out = np.concatenate([own, heads[..., n // 2 * 2 :]], -1)
    return out.reshape(x.shape)
