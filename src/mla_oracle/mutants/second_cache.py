# SPDX-License-Identifier: Apache-2.0
"""A second cache that is read wrongly, or attended apart from the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .list_edits import of_case, second, selected
from .list_steps import extra_keys, joined, relisted, taken
from .listed import Listed
from .mutant import Edit, Maker
from .plan import Joined, Keys, Parts, Plan
from .problem import Problem

EXTRA_CACHE = "second cache"


def _extra(of: Callable[[Listed, Plan, Keys], Keys]) -> Edit:
    """The keys of the second cache changed."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and plan.keys is not None
        return relisted(plan, joined(taken(plan, plan.keys.source == 0), of(problem, plan, extra_keys(plan))))

    return edit


def _extra_lies(where: Callable[[Listed, int, Array], Array], source: int = 1) -> Edit:
    def of(problem: Listed, plan: Plan, keys: Keys) -> Keys:
        slot = where(problem, int(problem.request[problem.row(plan)]), keys.place)
        made = problem.keys_of(plan, keys.place, slot, source)
        return made._replace(source=keys.source, bias=keys.bias)

    return _extra(of)


def _extra_length_ignored(problem: Listed, plan: Plan, keys: Keys) -> Keys:
    n = problem.row(plan)
    chosen = problem.selection(n, 1)
    assert chosen is not None
    place = chosen.entries[(chosen.entries >= 0) & (chosen.entries < chosen.capacity)]
    return problem.keys_of(plan, place, problem.slots(int(problem.request[n]), place, 1), 1)


def _own_softmax(weighted: bool) -> Edit:
    """The second cache's keys in a softmax of their own, whose output is added, or averaged with the main one's."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        def parts(own: Plan) -> Parts:
            assert own.keys is not None
            held = own.lanes < len(own.keys.source)
            return Parts(np.where(held, own.keys.source[np.where(held, own.lanes, 0)], 0), 2)

        def join(m: Array, d: Array) -> Joined:
            inverse = np.where(d > 0, 1 / np.where(d > 0, d, 1), 0)
            count = np.maximum((d > 0).sum(-1, keepdims=True), 1) if weighted else 1
            first = np.where(d[..., 0] > 0, 0, 1)[..., None]
            top, z = (np.take_along_axis(x, first, -1)[..., 0] for x in (m, d))
            return Joined(inverse / count, top, z)

        return plan if not len(plan.lanes) else replace(plan, parts=parts, join=join)

    return edit


_mutant = Maker("topk.", (selected, second))

MUTANTS = (
    _mutant(
        "extra-ignored",
        EXTRA_CACHE,
        "the second cache's keys are left out",
        edit=_extra(lambda p, plan, keys: Keys(*(a[..., :0] for a in keys))),
    ),
    _mutant(
        "main-ignored",
        EXTRA_CACHE,
        "the main cache's keys are left out",
        edit=lambda p, plan: relisted(plan, extra_keys(plan)),
    ),
    _mutant(
        "extra-in-main",
        EXTRA_CACHE,
        "the second cache's indices are looked up in the main one",
        edit=_extra_lies(lambda p, b, place: p.slots(b, place), 0),
    ),
    _mutant(
        "extra-page-size",
        EXTRA_CACHE,
        "the second cache has the pages of the main one",
        of_case(
            "two page sizes, by position", lambda p: len({c.block_size for c in p.store.caches}) > 1 and not p.by_slot
        ),
        edit=_extra_lies(lambda p, b, place: p.slots(b, place, 1, block=p.block)),
    ),
    _mutant(
        "extra-length-ignored",
        EXTRA_CACHE,
        "extra_topk_length is ignored",
        of_case("an extra_topk_length", lambda p: p.case.extra_topk_length is not None),
        edit=_extra(_extra_length_ignored),
    ),
    _mutant(
        "extra-added",
        "softmax of its own",
        "o = o_main + o_extra, each with its own denominator; lse of the main",
        edit=_own_softmax(False),
    ),
    _mutant(
        "extra-averaged",
        "softmax of its own",
        "o = (o_main + o_extra) / 2; lse of the main",
        edit=_own_softmax(True),
    ),
)
