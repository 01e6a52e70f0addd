# SPDX-License-Identifier: Apache-2.0
"""How many wrong kernels eight published acceptance rules let through: python benchmarks/rules.py [--json FILE]

Every mutant of unsharded paged decode, with the roundings of an honest kernel on top, meets each rule on that rule's
own usual inputs (usual.py): a rule lets a mutant through if it accepts it on all of them, or if none of them has what
the mutant needs to differ. Beside it stands what the budget says on the same inputs, and what a suite of `mla-oracle
suite` does.
Prints the table that stands in the README, from FILE alone with --print. A minute or two of one core.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from usual import USUAL, Setting

from mla_oracle import dtypes
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.diagnosis.suspects import Suspects
from mla_oracle.mutants import Mutant, bank
from mla_oracle.oracle import expected
from mla_oracle.suites import choose, probes
from mla_oracle.verdict import budget
from mla_oracle.verdict.numerics import infer
from mla_oracle.verdict.rules import RULES, told

COMMITTED = Path(__file__).with_suffix(".json")
SUITE = ("heads=4,row=576,value=512,scale=0.0417,dtype=bf16", 1200)  # sizes, most tokens of a case
Figures = dict[str, float | None]  # by mutant, in units of what is allowed; None: no case has what it needs


class Judge:
    """One case of a rule's usual inputs: what the rule and the budget say of a mutant there."""

    def __init__(self, rule: str, setting: Setting) -> None:
        self.rule, self.setting = rule, setting
        self.truth = expected(setting.case, precision="f64")
        self.kinds = {"out": setting.out, "lse": "f32"}
        self.suspects = Suspects(setting.case, self.truth)
        numerics = infer(setting.case, self.kinds)
        honest = budget.emulate(setting.case, numerics, np.random.default_rng(1))
        with np.errstate(invalid="ignore"):
            self.noise = {n: np.where(np.isfinite(x - self.truth[n]), x - self.truth[n], 0) for n, x in honest.items()}

    @functools.cached_property
    def measure(self) -> Measure:
        return Measure(self.setting.case, self.truth, self.kinds)

    def stored(self, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a kernel stores that computes `results`; whole numbers are of rows that it does not compute."""
        with np.errstate(all="ignore"):
            return {
                name: dtypes.round_to(np.where(x == np.round(x), x, x + self.noise[name]), self.kinds[name])
                for name, x in ((name, results[name]) for name in self.kinds)
            }

    def of_rule(self, actual: Mapping[str, np.ndarray]) -> float:
        """The rule's figure: above 1, it rejects."""
        with np.errstate(all="ignore"):
            seen = {name: self.setting.seen(name, x.astype(np.float64)) for name, x in actual.items()}
            right = {name: self.setting.seen(name, x) for name, x in self.truth.items()}
            return max(told(self.rule, seen, right)[self.rule]["figures"].values())

    def of_budget(self, actual: Mapping[str, np.ndarray]) -> float:
        return max(float(self.measure.units(n, x, self.truth[n]).max(initial=0)) for n, x in actual.items())


def figures(
    rule: str, mutants: tuple[Mutant, ...], judges: tuple[str, ...] = ("figures", "budget")
) -> dict[str, Figures]:
    """What the rule ("figures") and the budget say of each mutant, the worst over the rule's usual cases."""
    found: dict[str, Figures] = {name: dict.fromkeys((m.name for m in mutants), None) for name in judges}
    for setting in USUAL[rule].settings():
        judge = Judge(rule, setting)
        says = {"figures": judge.of_rule, "budget": judge.of_budget}
        right = judge.stored(judge.truth)
        for name in judges:
            assert says[name](right) <= 1, f"{rule}: {name} rejects a right kernel: {says[name](right)}"
        for mutant in filter(judge.suspects.applies, mutants):
            actual = judge.stored(judge.suspects.results(mutant))
            for name in judges:
                found[name][mutant.name] = max(found[name][mutant.name] or 0.0, says[name](actual))
    return found


def measured(say: Any) -> dict[str, Any]:
    """The file: what the suite sees, and the figures of every rule."""
    sizes, most = SUITE
    cases = [case_id for case_id in probes(sizes, max_tokens=most) if "shards" not in case_id]
    suite = choose(cases)
    seen = [name for case in suite.cases for name in suite.seen[case]]
    names = [mutant.name for mutant in bank() if mutant.name in {*seen, *suite.unseen}]
    say(f"suite: {len(suite.cases)} cases see {len(seen)} of {len(names)} mutants")
    found: dict[str, Any] = {"mutants": names, "suite": {"cases": suite.cases, "unseen": suite.unseen}, "rules": {}}
    for rule in USUAL:
        found["rules"][rule] = figures(rule, tuple(mutant for mutant in bank() if mutant.name in names))
        say(f"{rule}: {counts(found, rule)}")
    return found


def through(found: Figures) -> list[str]:
    """The mutants that have what they need and are accepted."""
    return [name for name, figure in found.items() if figure is not None and figure <= 1]


def counts(found: Mapping[str, Any], rule: str) -> tuple[int, int, int]:
    """Mutants that the inputs do not touch, that the rule accepts, that the budget accepts on the same inputs."""
    of_rule, of_budget = (found["rules"][rule][name] for name in ("figures", "budget"))
    return sum(x is None for x in of_rule.values()), len(through(of_rule)), len(through(of_budget))


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """The README's lines."""
    N, suite = len(found["mutants"]), found["suite"]
    yield f"| rule | on its usual inputs | lets through, of {N} | accepted | cannot show there | budget accepts there |"
    yield "|---|---|---|---|---|---|"
    for rule, usual in USUAL.items():
        absent, accepted, ours = counts(found, rule)
        yield f"| {usual.rule} | {usual.inputs} | {absent + accepted} | {accepted} | {absent} | {ours} |"
    unseen = len(suite["unseen"])
    yield f"| the budget | a suite of {len(suite['cases'])} cases | **{unseen}** | {unseen} | 0 | {unseen} |"


def write(found: Mapping[str, Any], path: Path) -> None:
    """Figures in the order of the mutants."""
    short = {
        rule: {name: [_short(x) for x in of.values()] for name, of in both.items()}
        for rule, both in found["rules"].items()
    }
    lines = json.dumps({**found, "rules": short}).replace("], ", "],\n").replace("}, ", "},\n")
    path.write_text(lines + "\n")


def _short(x: float | None) -> float | None:
    """Two digits, on the same side of 1; at most 1e9, as JSON has no infinity."""
    if x is None:
        return None
    return max(float(f"{min(x, 1e9):.2g}"), 1.1 if x > 1 else 0.0)


def read(path: Path = COMMITTED) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    names = found["mutants"]
    for both in found["rules"].values():
        both.update({name: dict(zip(names, of, strict=True)) for name, of in both.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=COMMITTED, metavar="FILE", help="default: the committed one")
    parser.add_argument("--print", action="store_true", help="print the table of FILE, measure nothing")
    args = parser.parse_args()
    assert set(USUAL) == set(RULES)
    if not args.print:
        found = measured(lambda line: print(line, file=sys.stderr, flush=True))
        write(found, args.json)
    print("\n".join(table(read(args.json))))


if __name__ == "__main__":
    main()
