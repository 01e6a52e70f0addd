# SPDX-License-Identifier: Apache-2.0
"""An engine over the cases of a suite: one after the other, or on any concurrent.futures executor.

    report = run_suite(["paged:...", "case.safetensors"], engine)
    report = run_suite(suite.cases, Command("my-kernel {case} {out}", timeout=60), ProcessPoolExecutor(4))
    print(report.table())

On processes the engine must be one that pickle can send. A crash or a hang is an outcome like any other, and so is a
case that ends its worker; what dies with a worker for no fault of its own runs again (spread.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from .. import dtypes
from ..arrays import Array
from ..cases import Case, DenseCase, PagedCase
from ..errors import InputError
from ..mutants import Mutant
from .engines import EngineCrash, EngineHang, NoEngine, results_of
from .outcome import Outcome, Report

Engine = Callable[[Case], Any]
PLACES = ("length", "multiple", "one key", "queries", "requests", "heads", "columns", "keys lost", "keys twice")


def run_suite(
    cases: Iterable[Case | str],
    engine: Engine,
    executor: Executor | Callable[[], Executor] | None = None,
    *,
    numerics: Any = None,
    progress: Callable[[Outcome, int, int], None] = lambda outcome, done, total: None,
) -> Report:
    """The outcome of `engine` on every case (a Case, an id or a file), in their order, and what explains them all.

    `executor`: one that runs the cases, or a function that makes one. The latter is called again where a pool breaks;
    otherwise what a broken pool lost runs one at a time in a process of its own. A case is a crash where it alone
    ends its worker. `progress` is told of every outcome as it comes, with how many there are and will be.
    """
    given = list(cases)
    done: dict[int, Outcome] = {}

    def finish(i: int, outcome: Outcome) -> None:
        done[i] = outcome
        progress(outcome, len(done), len(given))

    if executor is None:
        for i, case in enumerate(given):
            finish(i, run_one(case, engine, numerics))
    else:
        from .spread import Lost, spread

        def take(i: int, answer: Outcome | Lost) -> None:
            finish(i, Outcome(_name(given[i]), "crash", answer.reason) if isinstance(answer, Lost) else answer)

        spread(run_one, [(case, engine, numerics) for case in given], executor, take)
    outcomes = [done[i] for i in range(len(given))]
    return Report([replace(o, sums={}) for o in outcomes], explain_all(outcomes, given))


def _name(case: Case | str) -> str:
    return case if isinstance(case, str) else case.name


def run_one(case: Case | str, engine: Engine, numerics: Any = None) -> Outcome:
    """The outcome of one case. Raises InputError for a case that cannot be read, no numerics, no command to run."""
    from ..files.exchange import load_case
    from ..verdict.numerics import resolve

    name = _name(case)
    problem = load_case(case) if isinstance(case, str) else case
    name = problem.id or name
    if isinstance(problem, (PagedCase, DenseCase)):
        resolve(numerics, problem, {})
    start = time.perf_counter()
    try:
        returned = engine(problem)
        seconds = time.perf_counter() - start
        actual = results_of(problem, returned)
    except EngineCrash as error:
        verdict = "hang" if isinstance(error, EngineHang) else "crash"
        return Outcome(name, verdict, str(error), time.perf_counter() - start, stderr=error.stderr)
    except NoEngine:
        raise
    except InputError as error:
        return Outcome(name, "crash", str(error), time.perf_counter() - start)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome(name, "crash", said[:400], time.perf_counter() - start)
    return judge(name, problem, actual, numerics, seconds)


def judge(name: str, case: Case, actual: dict[str, Array], numerics: Any, seconds: float) -> Outcome:
    """The verdict on results, and if they fail the diagnosis."""
    from ..diagnosis.measure import Measure
    from ..oracle import expected
    from ..verdict.compare import check, form
    from ..verdict.locate import in_row_axes

    truth = expected(case, precision="f64")
    declared = numerics if isinstance(case, (PagedCase, DenseCase)) else None
    try:
        verdict = check(case, actual, truth, numerics=declared)
    except InputError as error:
        return Outcome(name, "fail", str(error), seconds)
    listed = isinstance(case, PagedCase) and bool(case.extensions())
    lens = tuple(int(n) for n in case.seq_lens) if isinstance(case, PagedCase) and not listed else ()
    found = Outcome(
        name, "pass" if verdict.passed else "fail", verdict.reason, seconds, lens=lens, missing=tuple(verdict.missing)
    )
    if verdict.passed or any(form(n, array, truth[n], case) for n, array in actual.items()):
        return found
    _, actual = in_row_axes(case, actual)
    case, truth = in_row_axes(case, truth)
    right = {n: truth[n] for n in actual}
    measure = Measure(case, right, {n: dtypes.name_of(array.dtype) for n, array in actual.items()}, declared)
    return _diagnosed(found, case, actual, right, measure)


def _diagnosed(
    outcome: Outcome, case: Case, actual: dict[str, Array], truth: dict[str, Array], measure: Any
) -> Outcome:
    from ..diagnosis.joint import sums_of
    from ..diagnosis.report import evidence_of, of_measured

    found = of_measured(case, actual, truth, measure, separate=False)
    best = found.classes[0] if found.named else None
    units = {n: measure.units(n, array, truth[n]) for n, array in actual.items()}
    evidence, _ = evidence_of(case, actual, truth, measure, units)
    places = [fact.text for kind in PLACES for fact in found.facts if fact.name == kind]
    wrong = [fact.text for fact in found.facts if fact.name.endswith("wrong")]
    return replace(
        outcome,
        named=found.named,
        suspected=best.family if best else "",
        mutant=best.mutant.name if best else "",
        summary=found.summary,
        where=(places or wrong or [""])[0],
        facts=tuple(fact.text for fact in found.facts),
        errors={n: _map(case, u) for n, u in units.items() if not n.startswith("partial_")},
        sums=sums_of(evidence),
    )


def _map(case: Case, units: Array) -> list[list[list[float]]]:
    """[requests, queries, heads] of a paged or dense case, the rows of others as heads."""
    if isinstance(case, PagedCase):
        shaped = units if units.ndim == 3 else units[:, None]
    elif isinstance(case, DenseCase):
        shaped = units[None]
    else:
        shaped = units.reshape(1, 1, -1)
    return [[[float(f"{x:.3g}") for x in row] for row in request] for request in shaped.tolist()]


def explain_all(outcomes: list[Outcome], cases: Sequence[Case | str]) -> str:
    """The mutant that explains every failure and no pass, in a line; empty where nothing fails."""
    from ..diagnosis.joint import together
    from ..diagnosis.search import LEAST
    from ..mutants import bank

    failed = [o for o in outcomes if o.verdict == "fail"]
    judged = [o for o in failed if o.sums]
    if not failed:
        return ""
    if judged:
        names = {name for o in judged for name in o.sums}
        ranked = together([m for m in bank() if m.name in names], [o.sums for o in judged])  # type: ignore[misc]
        if ranked and ranked[0].share >= LEAST:
            best = ranked[0]
            share = f"{100 * best.share:.3g} %"
            said = f"suspected over all cases: {best.mutant.family} ({best.mutant.name}: {best.mutant.formula})"
            rivals = _predicted(best.mutant, [c for o, c in zip(outcomes, cases, strict=True) if o.verdict == "pass"])
            return f"{said}, explains {share} of the error of {_failing(len(judged))}{rivals}"
    named = [o.suspected for o in judged if o.named]
    if named:
        usual = max(dict.fromkeys(named), key=named.count)
        return f"suspected in {named.count(usual)} of {_failing(len(failed))}: {usual}"
    return f"no class explains {_failing(len(failed))}"


def _failing(n: int) -> str:
    return f"{n} failing case{'s' * (n > 1)}"


def _predicted(mutant: Mutant, passing: list[Case | str]) -> str:
    """Words on cases that pass although the mutant would fail them."""
    from ..diagnosis import discrimination
    from ..files.exchange import load_case

    loaded = [load_case(case) if isinstance(case, str) else case for case in passing]
    against = sum(bool(discrimination(case, mutants=(mutant,)).seen) for case in loaded)
    return f"; {against} case{'s pass' if against > 1 else ' passes'} that it would fail" if against else ""
