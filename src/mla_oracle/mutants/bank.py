# SPDX-License-Identifier: Apache-2.0
"""The catalogue of mutants, and which of them a case can show."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from ..cases import Case
from ..errors import InputError
from . import (
    absorption,
    addresses,
    append,
    biases,
    causal,
    columns,
    combine,
    controls,
    empty,
    keys,
    layouts,
    lengths,
    lse,
    newest,
    outputs,
    paging,
    places,
    positions,
    quantised,
    queries,
    ranges,
    recurrence,
    rope,
    scores,
    second_cache,
    selection,
    shards,
    sight,
    sinks,
    slots,
    split_plans,
    splits,
    tail,
    temperature,
    values,
    warps,
    windows,
)
from .mutant import Mutant, compose
from .problem import problem_of

SECTIONS = (
    temperature,
    rope,
    positions,
    newest,
    scores,
    queries,
    paging,
    slots,
    addresses,
    lengths,
    keys,
    tail,
    causal,
    recurrence,
    warps,
    splits,
    combine,
    split_plans,
    shards,
    values,
    columns,
    outputs,
    lse,
    empty,
    ranges,
    absorption,
    append,
    selection,
    places,
    second_cache,
    sight,
    windows,
    sinks,
    biases,
    layouts,
    quantised,
)


COMPOSED = (  # huggingface/optimum-intel#1877: the scale is the default one, and the pairing the other one
    ("temperature.no-mscale", "rope.pairing"),
    ("temperature.row-width", "rope.pairing"),
)


@cache
def bank() -> tuple[Mutant, ...]:
    """Every mutant, in the order a kernel walks: scale, rope, scores, rows, pages, keys, softmax, merge, output."""
    single = {mutant.name: mutant for section in SECTIONS for mutant in section.MUTANTS}
    return (*single.values(), *(compose(*(single[name] for name in names)) for names in COMPOSED))


def equivalences() -> tuple[Mutant, ...]:
    """The controls: changes that must leave the results as they are."""
    return controls.CONTROLS


def find(name: str) -> Mutant:
    """The mutant of this name; "a + b" is the composition of two. Raises InputError."""
    known = {mutant.name: mutant for mutant in (*bank(), *equivalences())}
    if name in known:
        return known[name]
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in known:
            raise InputError(f"mutant {part!r} is not known (see mla-oracle mutants)")
    return compose(*(known[part] for part in parts))


def applicable(case: Case, mutants: Iterable[Mutant] | None = None) -> tuple[Mutant, ...]:
    """The mutants that `case` can show. Raises InputError for a case that is not valid."""
    among = bank() if mutants is None else tuple(mutants)
    problem = problem_of(case)
    if problem is None:
        return tuple(mutant for mutant in among if case.kind in mutant.kinds)
    return tuple(mutant for mutant in among if mutant.lacks(problem) is None)
