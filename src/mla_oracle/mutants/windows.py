# SPDX-License-Identifier: Apache-2.0
"""Wrong windows of rows that have lists of keys, and of the tokens that are kept beside them."""

from __future__ import annotations

from collections.abc import Callable

from ..arrays import Array
from .list_edits import by_position, of_case, two_tokens
from .listed import Listed, Window
from .mutant import Edit, Maker
from .needs import Need
from .sight import at, last_of, not_causal, seen_by

WINDOW = "window"


def window(of: Callable[[Listed, Window], Window]) -> Edit:
    return seen_by(lambda p, n: {"window": of(p, p.window)})


def _in_first(problem: Listed, n: int, place: Array) -> Array:
    """Kept first tokens that lie in the window too."""
    left = problem.window[0]
    inside = place >= (problem.position(n) - left if left is not None else 0)
    return inside & (place < problem.window[2])


def _page_start(problem: Listed, n: int, place: Array) -> Array:
    left = problem.window[0] or 0
    start = max(problem.position(n) - left, 0) // problem.block * problem.block
    return (place >= start) | (place < problem.window[2])


left = of_case("a window to the left", lambda p: p.window[0] is not None)
right = of_case("a window to the right", lambda p: p.window[1] is not None)
right_too = of_case("a window to the right, not causal", lambda p: p.window[1] is not None and not p.case.causal)
first = of_case("kept first tokens", lambda p: p.window[2] > 0 and p.window[0] is not None)
page = of_case("pages of two rows and more", lambda p: p.block >= 2)
_mutant = Maker("sight.", (by_position,))

MUTANTS = (
    _mutant(
        "window-left-one-more", WINDOW, "left <- left + 1", left, edit=window(lambda p, w: ((w[0] or 0) + 1, *w[1:]))
    ),
    _mutant(
        "window-left-one-less",
        WINDOW,
        "left <- left - 1",
        left,
        of_case("a window of one key and more", lambda p: (p.window[0] or 0) > 0),
        edit=window(lambda p, w: ((w[0] or 0) - 1, *w[1:])),
    ),
    _mutant(
        "window-left-none",
        WINDOW,
        "no bound to the left",
        left,
        edit=window(lambda p, w: (None, *w[1:])),
        refs="onnxruntime/mobius#596",
    ),
    _mutant(
        "window-padded",
        WINDOW,
        "left <- its next multiple of 64",
        left,
        edit=window(lambda p, w: (-(-((w[0] or 0) + 1) // 64) * 64 - 1, *w[1:])),
        refs="local-inference-lab/vllm#623",
    ),
    _mutant(
        "window-page",
        WINDOW,
        "the window begins with a page",
        left,
        page,
        edit=seen_by(lambda p, n: {"window": (None, *p.window[1:])}, more=_page_start),
    ),
    _mutant(
        "window-right-one-more",
        WINDOW,
        "right <- right + 1",
        right_too,
        edit=window(lambda p, w: (w[0], (w[1] or 0) + 1, w[2])),
    ),
    _mutant(
        "window-right-one-less",
        WINDOW,
        "right <- right - 1",
        right_too,
        of_case("a window to the right of one key and more", lambda p: (p.window[1] or 0) > 0),
        edit=window(lambda p, w: (w[0], (w[1] or 0) - 1, w[2])),
    ),
    _mutant(
        "window-right-none", WINDOW, "no bound to the right", right_too, edit=window(lambda p, w: (w[0], None, w[2]))
    ),
    _mutant(
        "window-left-minus-one-as-0",
        WINDOW,
        "left -1, no bound, read as 0",
        of_case("a window to the right alone", lambda p: p.window[0] is None and p.window[1] is not None),
        edit=window(lambda p, w: (0, *w[1:])),
    ),
    _mutant(
        "window-right-minus-one-as-0",
        WINDOW,
        "right -1, no bound, read as 0",
        left,
        not_causal,
        of_case("a window to the left alone", lambda p: p.window[1] is None),
        edit=window(lambda p, w: (w[0], 0, w[2])),
    ),
    _mutant("window-symmetric", WINDOW, "right <- left", right_too, edit=window(lambda p, w: (w[0], w[0], w[2]))),
    _mutant(
        "window-from-last",
        "window of another token",
        "i = L - 1 for every query token",
        left,
        two_tokens,
        edit=at(last_of),
    ),
    _mutant(
        "window-from-first",
        "window of another token",
        "i = L - T for every query token",
        left,
        two_tokens,
        edit=at(lambda p, n: p.position(n) - int(p.token[n])),
    ),
    _mutant(
        "first-ignored",
        "kept first tokens",
        "the first tokens are not kept",
        first,
        edit=window(lambda p, w: (*w[:2], 0)),
    ),
    _mutant(
        "first-one-more",
        "kept first tokens",
        "one token more is kept",
        first,
        edit=window(lambda p, w: (*w[:2], w[2] + 1)),
    ),
    _mutant(
        "first-one-less",
        "kept first tokens",
        "one token fewer is kept",
        first,
        edit=window(lambda p, w: (*w[:2], w[2] - 1)),
    ),
    _mutant(
        "first-twice",
        "kept first tokens",
        "kept tokens that lie in the window count twice",
        first,
        Need("a kept token in a window", lambda p: isinstance(p, Listed) and _any_first(p)),
        edit=seen_by(twice=_in_first),
    ),
)


def _any_first(problem: Listed) -> bool:
    for n in range(problem.rows):
        place, valid = problem.candidates(n)
        if _in_first(problem, n, place[valid & problem.sight(n, place)]).any():
            return True
    return False
