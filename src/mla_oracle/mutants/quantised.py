# SPDX-License-Identifier: Apache-2.0
"""Wrong readings of a quantised cache: those of formats/misread.py, of keys and values, or of values alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from ..formats.misread import KINDS, misread
from .layouts import reading, space_of
from .list_edits import of_case
from .listed import Listed, Reader
from .mutant import Edit, Maker, Mutant
from .needs import Need
from .plan import Plan
from .problem import Problem

FAMILY, POWER, INVERTED, V_SCALE = "quantised cache", "scale rounded to 2^k", "inverted scale", "missing V descale"
FAMILIES = {
    "scale-exponent": POWER,
    "scale-nearest-power": POWER,
    "scale-twice": INVERTED,
    "scale-divided": INVERTED,
    "packed-as-plain": "record layout",
}
REFERENCES = {
    "scale-twice": "vllm-project/vllm-xpu-kernels#475",
    "scale-divided": "vllm-project/vllm#36297",
    "scale-exponent": "vllm-project/vllm#54563 vllm-project/vllm#49435",
    "scale-nearest-power": "deepseek-ai/FlashMLA#184",
    "scale-ignored": "vllm-project/vllm#37054",
    "packed-as-plain": "vllm-project/vllm#48611",
}


def misreader(how: str) -> Callable[[Listed], Reader]:
    """The caches whose format it says something of, read by a misreading; the others as they are."""

    def of(problem: Listed) -> Reader:
        def read(source: int, slots: Array) -> Array:
            cache = problem.store.caches[source]
            if cache.format is None or cache.tensors is None or cache.format not in KINDS[how][1]:
                return cache.read(slots)
            blocks, offsets = np.divmod(slots, cache.block_size)
            found = misread(
                how, cache.format, cache.tensors, blocks, offsets, block_size=cache.block_size, reader=cache.reader
            )
            return found.astype(np.float64)[None]

        return read

    return of


def stored_as(how: str) -> Need:
    """A cache that the misreading is of, with rows that it reads otherwise."""
    formats = KINDS[how][1]

    def test(problem: Listed) -> bool:
        return any(
            cache.format in formats and _differs(problem, source) for source, cache in enumerate(problem.store.caches)
        )

    def _differs(problem: Listed, source: int) -> bool:
        found = [seen.slot[seen.source == source] for seen in problem.seen]
        slots = np.unique(np.concatenate([np.zeros(0, np.int64), *found]))
        right, wrong = problem.store.caches[source].read(slots), misreader(how)(problem)(source, slots)
        return not np.array_equal(right, wrong, equal_nan=True)

    return of_case(f"rows in {' or '.join(formats)} that are read otherwise", test)


def values_alone(how: str) -> Edit:
    """Keys are right."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        space, right = space_of(problem, how, misreader(how)), plan.value_address or plan.address

        def address(own: Plan, lanes: Array) -> Array:
            at = right(own, lanes)
            return np.where(at < 0, at, at + space)

        return replace(plan, value_address=address)

    return edit


def keys_alone(how: str) -> Edit:
    """Values are right."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        right = plan.value_address or plan.address
        made = reading(how, misreader(how))(problem, plan)
        assert isinstance(made, Plan)
        return replace(made, value_address=lambda own, lanes: right(plan, lanes))

    return edit


def _whole(how: str) -> Mutant:
    formula = " ".join((KINDS[how][0].__doc__ or "").split()).rstrip(".")
    return _mutant(
        how,
        FAMILIES.get(how, FAMILY),
        formula,
        stored_as(how),
        edit=reading(how, misreader(how)),
        refs=REFERENCES.get(how, ""),
    )


_mutant = Maker("format.")
MUTANTS = (
    *(_whole(how) for how in KINDS),
    _mutant(
        "value-scale-ignored",
        V_SCALE,
        "values are the codes, keys are right",
        stored_as("scale-ignored"),
        edit=values_alone("scale-ignored"),
        refs="sgl-project/sglang#34765",
    ),
    _mutant(
        "value-scale-twice",
        "scale misuse",
        "values times the scale once more, keys are right",
        stored_as("scale-twice"),
        edit=values_alone("scale-twice"),
        refs="vllm-project/vllm#37054",
    ),
    _mutant(
        "key-scale-ignored",
        "scale misuse",
        "keys are the codes, values are right",
        stored_as("scale-ignored"),
        edit=keys_alone("scale-ignored"),
        refs="vllm-project/vllm#37054",
    ),
)
