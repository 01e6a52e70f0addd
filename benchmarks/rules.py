# SPDX-License-Identifier: Apache-2.0
"""How many wrong kernels eight published acceptance rules let through: python benchmarks/rules.py [--json FILE]

Every mutant of unsharded paged decode, with the roundings of an honest kernel on top, meets each rule on that rule's own
usual inputs (usual.py): a rule lets a mutant through if it accepts it on all of them, or if none has what the mutant
needs to differ. Beside it stands what the budget says on the same inputs, and what a suite of `mla-oracle suite` does.
Prints the table that stands in the README, from FILE alone with --print. A few minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from usual import USUAL, Setting

from mla_oracle import budget, dtypes
from mla_oracle.diagnosis.measure import Measure
from mla_oracle.diagnosis.suspects import Suspects
from mla_oracle.mutants import Mutant, bank
from mla_oracle.numerics import infer
from mla_oracle.oracle import expected
from mla_oracle.rules import RULES, told
from mla_oracle.suites import choose, probes

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
        self.measure = Measure(setting.case, self.truth, self.kinds)
        numerics = infer(setting.case, self.kinds)
        honest = budget.emulate(setting.case, numerics, np.random.default_rng(1))
        with np.errstate(invalid="ignore"):
            self.noise = {n: np.where(np.isfinite(x - self.truth[n]), x - self.truth[n], 0) for n, x in honest.items()}

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


def figures(rule: str, mutants: tuple[Mutant, ...]) -> tuple[Figures, Figures]:
    """What the rule and what the budget say of each mutant, the worst over the rule's usual cases."""
    of_rule: Figures = dict.fromkeys((mutant.name for mutant in mutants), None)
    of_budget = dict(of_rule)
    for setting in USUAL[rule].settings():
        judge = Judge(rule, setting)
        right = judge.stored(judge.truth)
        assert judge.of_rule(right) <= 1 and judge.of_budget(right) <= 1, (rule, judge.of_rule(right))
        for mutant in mutants:
            if judge.suspects.applies(mutant):
                actual = judge.stored(judge.suspects.results(mutant))
                for found, says in ((of_rule, judge.of_rule), (of_budget, judge.of_budget)):
                    found[mutant.name] = max(found[mutant.name] or 0.0, says(actual))
        judge.suspects = None
    return of_rule, of_budget


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
        of_rule, of_budget = figures(rule, tuple(mutant for mutant in bank() if mutant.name in names))
        found["rules"][rule] = {"figures": of_rule, "budget": of_budget}
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


def plain(x: Any) -> Any:
    """Figures of three digits; JSON has no infinity."""
    if isinstance(x, Mapping):
        return {key: plain(value) for key, value in x.items()}
    return ("inf" if math.isinf(x) else float(f"{x:.3g}")) if isinstance(x, float) else x


def read(path: Path = COMMITTED) -> dict[str, Any]:
    return json.loads(path.read_text(), object_hook=lambda d: {k: math.inf if v == "inf" else v for k, v in d.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=COMMITTED, metavar="FILE", help="default: the committed one")
    parser.add_argument("--print", action="store_true", help="print the table of FILE, measure nothing")
    args = parser.parse_args()
    assert set(USUAL) == set(RULES)
    if not args.print:
        found = measured(lambda line: print(line, file=sys.stderr, flush=True))
        args.json.write_text(json.dumps(plain(found), indent=0) + "\n")
    print("\n".join(table(read(args.json))))


if __name__ == "__main__":
    main()
