# SPDX-License-Identifier: Apache-2.0
"""Which wrong functions a case can tell from the roundings of an honest kernel, and which it is blind to.

blind = discrimination(case, "flashmla")
blind.seen          # mutants that the budget of this case rejects
blind.blind         # mutants inside it: "this case cannot tell a 5 % scale error from rounding"
blind.same          # mutants whose results are the truth on this case
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import Array
from ..cases import Case, DenseCase, PagedCase
from ..mutants import Mutant
from ..mutants.effect import effect
from .measure import Measure
from .suspects import Suspects, choose_requests, count_requests

SURE = 2.0  # budgets: the mutant's own roundings may take one back


@dataclass(frozen=True)
class Blindness:
    """Names of the applicable mutants of a case; `units` of each is its largest error in budgets."""

    case: str
    numerics: str
    seen: tuple[str, ...]
    blind: tuple[str, ...]
    same: tuple[str, ...]
    units: Mapping[str, float]
    families: Mapping[str, str]

    @property
    def sentences(self) -> list[str]:
        """What the case cannot tell, class by class."""
        by_family: dict[str, list[str]] = {}
        for name in self.blind:
            by_family.setdefault(self.families[name], []).append(name)
        said = [
            f"this case cannot tell {family} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}) from rounding"
            for family, names in by_family.items()
        ]
        if self.same:
            said.append(
                f"this case does not show {len(self.same)} mutants at all: {', '.join(self.same[:8])}"
                f"{', ...' if len(self.same) > 8 else ''}"
            )
        return said

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "numerics": self.numerics,
            "applicable": len(self.seen) + len(self.blind) + len(self.same),
            "seen": len(self.seen),
            "blind": [{"mutant": n, "class": self.families[n], "units": _short(self.units[n])} for n in self.blind],
            "same": list(self.same),
            "sentences": self.sentences,
        }


def discrimination(
    case: Case,
    numerics: Any = None,
    *,
    kinds: Mapping[str, str] | None = None,
    truth: Mapping[str, Array] | None = None,
    mutants: tuple[Mutant, ...] | None = None,
) -> Blindness:
    """What `case` can tell; an LSE of `truth` has its axes in the order of out's rows.

    `kinds`: the dtypes of the results, default those of the case for out and f32 for an lse.

    `mutants`: those that are asked about, default all. Of a large case, some requests are computed. Raises InputError.
    """
    import numpy as np

    from ..oracle import expected
    from ..verdict.locate import in_row_axes
    from .fewer import of_requests

    right = dict(expected(case, precision="f64") if truth is None else truth)
    case, right = in_row_axes(case, right) if truth is None else (case, right)
    own = numerics if isinstance(case, (PagedCase, DenseCase)) else None
    kinds = usual_kinds(case, right, own) if kinds is None else kinds
    right = {name: right[name] for name in kinds}
    requests = choose_requests(case, np.ones(count_requests(case), bool))
    if requests is not None and isinstance(case, PagedCase) and case.extensions():
        case, right = of_requests(case, requests, right)
        requests = None
    measure = Measure(case, right, kinds, own)
    suspects = Suspects(case, right, requests)
    asked = suspects.applicable() if mutants is None else tuple(m for m in mutants if suspects.applies(m))
    return of_suspects(suspects, measure, asked)


def of_suspects(suspects: Suspects, measure: Measure, asked: tuple[Mutant, ...]) -> Blindness:
    """`discrimination` with results and budgets that are known."""
    seen, blind, same, units = [], [], [], {}
    for mutant in asked:
        units[mutant.name] = error = largest(suspects, measure, mutant)
        if error > SURE:
            seen.append(mutant.name)
        elif error > 0 and _differs(suspects, mutant):
            blind.append(mutant.name)
        else:
            same.append(mutant.name)
    rounds = "" if measure.numerics is None else f"{measure.numerics.origin}: {measure.numerics}"
    families = {mutant.name: mutant.family for mutant in asked}
    return Blindness(suspects.case.name, rounds, tuple(seen), tuple(blind), tuple(same), units, families)


def largest(suspects: Suspects, measure: Measure, mutant: Mutant) -> float:
    """The largest error of a mutant's rows, in budgets around the truth."""
    given = suspects.results(mutant)
    found = [0.0]
    for name in measure.kinds:
        rows = suspects.cut(name)
        found.append(float(measure.units(name, given[name], suspects.truth[name][rows], rows).max(initial=0)))
    return max(found)


def _differs(suspects: Suspects, mutant: Mutant) -> bool:
    given = suspects.results(mutant)
    truth = {name: array[suspects.cut(name)] for name, array in suspects.truth.items()}
    return effect({name: given[name] for name in truth}, truth).differs


def usual_kinds(case: Case, truth: Mapping[str, Array], numerics: Any = None) -> dict[str, str]:
    """The dtypes that results of this case usually have, or those declared: of its own rows, an lse f32."""
    from .. import dtypes
    from ..verdict.numerics import parse

    tensors = case.tensors()
    names: tuple[str, ...] = ("kv_cache", "c_kv", "partial_out", "x")
    if isinstance(case, PagedCase) and case.extensions():
        names = ("q",)
    main = next(tensors[n] for n in names if n in tensors)
    own = dtypes.name_of(main.dtype)
    own = own if own in ("f32", "bf16", "f16") else "f32"
    given = parse(numerics) if isinstance(numerics, str) else numerics if isinstance(numerics, Mapping) else {}
    return {name: given.get(name, "f32" if name.endswith("lse") else own) for name in truth}


def _short(x: float) -> float:
    return float(f"{x:.3g}")
