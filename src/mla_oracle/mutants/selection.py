# SPDX-License-Identifier: Apache-2.0
"""Wrong lists of keys: invalid indices, lengths of lists, positions for slots, pages, the second cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .listed import Listed, Selection, extra_keys, joined, relisted, taken
from .memory import ZERO
from .mutant import Edit, Maker, Mutant
from .needs import Need
from .plan import MISSING, Keys, Part, Plan
from .problem import Problem

VALID, LENGTH, UNITS, ROWS = "-1 treated as valid", "lanes beyond length", "positions and slots", "selection row"
EXTRA_CACHE = "second cache"


def lists(test: Callable[[Listed, Selection], Array | bool], extra: bool = False) -> Callable[[Problem], bool]:
    """Whether a row's selection has what test(problem, selection) says."""

    def met(problem: Problem) -> bool:
        if not isinstance(problem, Listed):
            return False
        found = (problem.selection(n, int(extra)) for n in range(problem.rows))
        return any(bool(np.any(test(problem, chosen))) for chosen in found if chosen is not None)

    return met


def of_case(words: str, test: Callable[[Listed], bool]) -> Need:
    return Need(words, lambda p: isinstance(p, Listed) and test(p))


selected = of_case("a selection", lambda p: p.case.topk_indices is not None)
by_position = of_case("no selection by slot", lambda p: not p.by_slot)
by_slot = of_case("a selection by slot", lambda p: p.by_slot)
holes = Need("a -1 within a list", lists(lambda _, s: s.within & (s.entries < 0)))
inner_holes = Need(
    "a key after a -1 in a list", lists(lambda _, s: s.valid & np.logical_or.accumulate(s.within & ~s.valid))
)
lengths = of_case("a topk_length below the width of its list", lambda p: p.case.topk_length is not None)
outside = Need("an index at or above the capacity", lists(lambda _, s: s.within & (s.entries >= s.capacity)))
twice = Need("an index twice in a list", lists(lambda _, s: len(np.unique(s.entries[s.valid])) < int(s.valid.sum())))
empty_list = Need(
    "a list without keys of a request with some", lists(lambda _, s: not s.valid.any() and s.capacity > 0)
)
second = of_case("a second cache", lambda p: p.case.extra_kv_cache is not None)
two_tokens = of_case("two query tokens of one request", lambda p: bool((np.diff(p.starts) > 1).any()))
two_rows = of_case("two query rows", lambda p: p.rows > 1)


def relist(of: Callable[[Listed, Plan, Selection], tuple[Array, Array]]) -> Edit:
    """The main cache's keys are the places [K] of `of` where its mask [K] holds and the row may see them."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        n = problem.row(plan)
        chosen = problem.selection(n)
        if chosen is None:
            return plan
        place, live = of(problem, plan, chosen)
        place = place[live & problem.sight(n, place)]
        return relisted(plan, joined(problem.main_keys(plan, place), extra_keys(plan)))

    return edit


def list_of(other: Callable[[Listed, int], int]) -> Edit:
    """The list of row other(problem, n); a place past the request's own is not known."""

    def of(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
        found = problem.selection(other(problem, problem.row(plan)))
        assert found is not None
        return found.entries, found.valid

    return relist(of)


def _zero_keys(problem: Problem, plan: Plan) -> Plan:
    """Every invalid place of the list is a key of zeros."""
    assert isinstance(problem, Listed)
    chosen = problem.selection(problem.row(plan))
    count = 0 if chosen is None else int((chosen.within & ~chosen.valid).sum())
    assert plan.keys is not None
    zeros = np.full(count, ZERO), np.full(count, -1), np.zeros(count, np.int64)
    return relisted(plan, joined(plan.keys, Keys(*zeros, np.zeros((problem.H, count)))))


def _gathered(problem: Problem, plan: Plan) -> Plan:
    """A row before the cache, NaN, is multiplied by the weight 0 where the list has a -1."""
    assert isinstance(problem, Listed) and plan.keys is not None
    chosen = problem.selection(problem.row(plan))
    if chosen is None or not (chosen.within & (chosen.entries < 0)).any():
        return plan
    n, sees = plan.length, plan.sees
    row = Keys(np.array([MISSING]), np.array([-1]), np.zeros(1, np.int64), np.zeros((problem.H, 1)))
    longer = relisted(plan, joined(plan.keys, row))
    return replace(longer, touches_masked=True, sees=lambda own: sees(own) & (own.lanes < n))


def _hole_ends(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
    return chosen.entries, chosen.valid & ~np.logical_or.accumulate(chosen.within & ~chosen.valid)


def _prefix(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
    return chosen.entries, chosen.valid & (np.arange(len(chosen.entries)) < int(chosen.valid.sum()))


def _longer(by: int | None) -> Edit:
    """`by` entries more than topk_length says, None: all."""

    def of(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
        most = len(chosen.entries) if by is None else int(chosen.within.sum()) + by
        known = (chosen.entries >= 0) & (chosen.entries < chosen.capacity)
        return chosen.entries, known & (np.arange(len(chosen.entries)) < most)

    return relist(of)


def _length_of(row: Callable[[Listed, int], int]) -> Edit:
    """topk_length of another row."""

    def of(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
        other = problem.selection(row(problem, problem.row(plan)))
        known = (chosen.entries >= 0) & (chosen.entries < chosen.capacity)
        return chosen.entries, known & (True if other is None else other.within)

    return relist(of)


def _distinct(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
    first = np.zeros(len(chosen.entries), bool)
    keep = np.flatnonzero(chosen.valid)
    first[keep[np.unique(chosen.entries[keep], return_index=True)[1]]] = True
    return chosen.entries, first


def _lies(where: Callable[[Listed, int, Array], Array]) -> Edit:
    """The keys of the list lie at the slots where(problem, request, place)."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed) and plan.keys is not None
        main = taken(plan, plan.keys.source == 0)
        slot = where(problem, int(problem.request[problem.row(plan)]), main.place)
        keys = problem.keys_of(plan, main.place, slot)
        return relisted(plan, joined(keys, extra_keys(plan)))

    return edit


def _page(size: Callable[[Listed], int]) -> Edit:
    return _lies(lambda p, b, place: p.slots(b, place, block=size(p)))


def _whole(tile: int) -> Edit:
    """The list is cut to whole tiles, where it has one."""

    def of(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
        count = int(chosen.within.sum())
        most = count // tile * tile or count
        return chosen.entries, chosen.valid & (np.arange(len(chosen.entries)) < most)

    return relist(of)


def _causal_by_place(problem: Listed, plan: Plan, chosen: Selection) -> tuple[Array, Array]:
    return chosen.entries, chosen.valid & (np.arange(len(chosen.entries)) <= problem.position(problem.row(plan)))


def _dense(only_empty: bool) -> Edit:
    def edit(problem: Problem, plan: Plan) -> Plan:
        assert isinstance(problem, Listed)
        n = problem.row(plan)
        chosen = problem.selection(n)
        if chosen is None or (only_empty and chosen.valid.any()):
            return plan
        place = np.arange(chosen.capacity)
        place = place[problem.sight(n, place)]
        return relisted(plan, joined(problem.main_keys(plan, place), extra_keys(plan)))

    return edit


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
        from .plan import Joined, Parts

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


def _phantom(problem: Problem, plan: Plan) -> Plan:
    """An empty list leaves a state m = 0, l = 1, acc = 0."""
    assert isinstance(problem, Listed)
    if plan.length or not problem.length(int(problem.request[problem.row(plan)])):
        return plan
    zero = Part(np.zeros((1, problem.H, problem.V)), np.zeros((1, problem.H)))
    return replace(plan, extras=(*plan.extras, zero))


def whole_tiles(tile: int) -> Mutant:
    return _mutant(
        f"whole-tiles-{tile}",
        "list cut",
        f"n <- {tile} floor(n / {tile}) entries of a list, where it has so many",
        Need(f"a list of {tile} entries and more, no multiple", lists(lambda _, s: _rest(s, tile))),
        edit=_whole(tile),
        tile=tile,
    )


def _rest(chosen: Selection, tile: int) -> bool:
    count = int(chosen.within.sum())
    return count > tile and bool(chosen.valid[count // tile * tile : count].any())


def _valid_as(index: Callable[[Selection], Array]) -> Edit:
    return relist(lambda problem, plan, s: (np.where(s.within & (s.entries < 0), index(s), s.entries), s.within))


def _token_0(problem: Listed, n: int) -> int:
    return int(problem.starts[problem.request[n]])


_mutant = Maker("topk.", (selected,))
_SPARSE = "vllm-project/vllm#45324"
_LENGTH = "vllm-project/vllm#36616 vllm-project/vllm#36524 flashinfer-ai/flashinfer#5095"
_PAGES = "sgl-project/sglang#25556 sgl-project/sglang-jax#1074"
other_page = of_case("pages that have not 64 rows", lambda p: p.block != 64)
pages_of_two = of_case("pages of two rows and more", lambda p: p.block >= 2)

MUTANTS = (
    _mutant(
        "minus-one-as-first",
        VALID,
        "-1 -> 0, row 0 once for each",
        holes,
        edit=_valid_as(lambda s: s.entries * 0),
        refs=_SPARSE,
    ),
    _mutant(
        "minus-one-as-last",
        VALID,
        "-1 -> the last row, as an array from its end",
        holes,
        edit=_valid_as(lambda s: s.entries * 0 + s.capacity - 1),
        refs=_SPARSE,
    ),
    _mutant(
        "minus-one-as-zero-key",
        "-1 treated as zero key",
        "Z <- Z + n_invalid e^0",
        holes,
        edit=_zero_keys,
        refs="hw-native-sys/pypto-lib#1014",
    ),
    _mutant(
        "minus-one-gathered",
        "-1 gather",
        "0 NaN, the row before the cache times the weight 0",
        holes,
        edit=_gathered,
        refs="radixark/miles#2079",
    ),
    _mutant(
        "ends-at-hole",
        "lane prefix",
        "the list ends at its first -1",
        inner_holes,
        edit=relist(_hole_ends),
        refs="vllm-project/vllm#55692",
    ),
    _mutant(
        "prefix-of-valid",
        "lane prefix",
        "S = the first n places, holes among them, n the valid ones",
        inner_holes,
        edit=relist(_prefix),
        refs="vllm-project/vllm#55692",
    ),
    _mutant("length-ignored", LENGTH, "S = all places", lengths, edit=_longer(None), refs=_LENGTH),
    _mutant("length-plus-one", LENGTH, "one place more", lengths, edit=_longer(1), refs=_LENGTH),
    _mutant("length-minus-one", "list cut", "the last place of a list is lost", edit=_longer(-1)),
    _mutant(
        "length-of-first-token",
        "length of another list",
        "topk_length[b, 0] for every query token of b",
        lengths,
        two_tokens,
        of_case(
            "a topk_length of each query", lambda p: p.case.topk_length is not None and p.case.topk_length.ndim == 2
        ),
        edit=_length_of(_token_0),
    ),
    _mutant(
        "length-of-request-0",
        "length of another list",
        "topk_length of the first row for all",
        lengths,
        two_rows,
        edit=_length_of(lambda p, n: 0),
    ),
    _mutant(
        "length-by-row",
        "length of another list",
        "topk_length[r] of query row r, though it is of requests",
        lengths,
        two_tokens,
        of_case(
            "a topk_length of each request",
            lambda p: p.case.topk_length is not None and p.case.q.ndim == 4 and p.case.topk_length.ndim == 1,
        ),
        edit=_length_of(lambda p, n: int(p.starts[min(n, len(p.starts) - 2)])),
    ),
    _mutant("duplicates-dropped", "duplicates", "an index counts once", twice, edit=relist(_distinct)),
    _mutant(
        "cut-by-capacity",
        "top-k set",
        "candidates beyond three quarters of a list are dropped",
        edit=relist(lambda p, plan, s: (s.entries, s.valid & (np.arange(len(s.entries)) < len(s.entries) * 3 // 4))),
        refs="sgl-project/sglang#36807 vllm-project/vllm#51782 vllm-project/vllm#55314",
    ),
    _mutant(
        "dense",
        "dense instead of sparse",
        "S = 0 .. L-1, the list is not looked at",
        by_position,
        edit=_dense(False),
        refs="vllm-project/vllm-gaudi#1777",
    ),
    _mutant(
        "empty-as-dense",
        "empty list",
        "a list without keys: all of them",
        by_position,
        empty_list,
        edit=_dense(True),
        refs="vllm-project/vllm#52512",
    ),
    _mutant(
        "empty-as-zero-key",
        "empty list",
        "a list without keys leaves m = 0, l = 1",
        empty_list,
        edit=_phantom,
        refs="vllm-project/vllm#52512",
    ),
    _mutant(
        "positions-as-slots",
        UNITS,
        "slot = index, a position taken for one",
        by_position,
        edit=_lies(lambda p, b, place: p.slots(b, place, by_slot=True)),
        refs="vllm-project/vllm#55692",
    ),
    _mutant(
        "slots-as-pages",
        UNITS,
        "slot = index block, a slot taken for a page",
        by_slot,
        pages_of_two,
        edit=_lies(lambda p, b, place: p.slots(b, place * p.block)),
        refs=_PAGES,
    ),
    _mutant(
        "offsets-lost",
        UNITS,
        "slot = block floor(index / block), the page's first row",
        pages_of_two,
        edit=_lies(lambda p, b, place: p.slots(b, place // p.block * p.block)),
    ),
    _mutant(
        "page-size-64",
        "page-size semantics",
        "slot = table[index / 64] 64 + index mod 64",
        by_position,
        other_page,
        edit=_page(lambda p: 64),
        refs=_PAGES,
    ),
    _mutant(
        "page-size-halved",
        "page-size semantics",
        "pages of half the rows",
        by_position,
        pages_of_two,
        edit=_page(lambda p: p.block // 2),
        refs=_PAGES,
    ),
    _mutant(
        "page-size-1",
        "page-size semantics",
        "slot = table[index]",
        by_position,
        pages_of_two,
        edit=_page(lambda p: 1),
        refs=_PAGES,
    ),
    _mutant(
        "outside-clamped",
        "OOB index",
        "an index at or above the capacity -> the last row",
        outside,
        edit=relist(lambda p, plan, s: (np.minimum(s.entries, s.capacity - 1), s.within & (s.entries >= 0))),
        refs="deepseek-ai/FlashMLA#184",
    ),
    _mutant(
        "outside-read",
        "OOB index",
        "an index at or above the capacity is read, whatever lies there",
        outside,
        edit=relist(lambda p, plan, s: (s.entries, s.within & (s.entries >= 0))),
        refs="deepseek-ai/FlashMLA#184",
    ),
    _mutant(
        "outside-as-first",
        "OOB index",
        "an index at or above the capacity -> 0",
        outside,
        edit=relist(lambda p, plan, s: (np.where(s.entries < s.capacity, s.entries, 0), s.within & (s.entries >= 0))),
    ),
    _mutant(
        "causal-by-place",
        "causal by place",
        "place k of the list is seen where k <= L - T + t",
        of_case("causal", lambda p: p.case.causal),
        Need("a list longer than the position of its query", lambda p: isinstance(p, Listed) and _late(p)),
        edit=relist(_causal_by_place),
    ),
    _mutant(
        "of-first-token", ROWS, "the list of query token 0 for all of a request", two_tokens, edit=list_of(_token_0)
    ),
    _mutant("of-row-0", ROWS, "the list of the first query row for all", two_rows, edit=list_of(lambda p, n: 0)),
    _mutant(
        "of-row-before", ROWS, "the list of the query row before", two_rows, edit=list_of(lambda p, n: max(n - 1, 0))
    ),
    whole_tiles(64),
    whole_tiles(32),
    whole_tiles(8),
    whole_tiles(4),
    _mutant(
        "extra-ignored",
        EXTRA_CACHE,
        "the second cache's keys are left out",
        second,
        edit=_extra(lambda p, plan, keys: Keys(*(a[..., :0] for a in keys))),
    ),
    _mutant(
        "main-ignored",
        EXTRA_CACHE,
        "the main cache's keys are left out",
        second,
        edit=lambda p, plan: relisted(plan, extra_keys(plan)),
    ),
    _mutant(
        "extra-in-main",
        EXTRA_CACHE,
        "the second cache's indices are looked up in the main one",
        second,
        edit=_extra_lies(lambda p, b, place: p.slots(b, place), 0),
    ),
    _mutant(
        "extra-page-size",
        EXTRA_CACHE,
        "the second cache has the pages of the main one",
        second,
        of_case(
            "two page sizes, by position", lambda p: len({c.block_size for c in p.store.caches}) > 1 and not p.by_slot
        ),
        edit=_extra_lies(lambda p, b, place: p.slots(b, place, 1, block=p.block)),
    ),
    _mutant(
        "extra-length-ignored",
        EXTRA_CACHE,
        "extra_topk_length is ignored",
        second,
        of_case("an extra_topk_length", lambda p: p.case.extra_topk_length is not None),
        edit=_extra(_extra_length_ignored),
    ),
    _mutant(
        "extra-added",
        "softmax of its own",
        "o = o_main + o_extra, each with its own denominator; lse of the main",
        second,
        edit=_own_softmax(False),
    ),
    _mutant(
        "extra-averaged",
        "softmax of its own",
        "o = (o_main + o_extra) / 2; lse of the main",
        second,
        edit=_own_softmax(True),
    ),
)


def _late(problem: Listed) -> bool:
    for n in range(problem.rows):
        chosen = problem.selection(n)
        if chosen is not None and chosen.valid[max(problem.position(n) + 1, 0) :].any():
            return True
    return False
