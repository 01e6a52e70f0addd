# SPDX-License-Identifier: Apache-2.0
"""A dialect: one engine's call, in its own words, and the canonical case behind it.

    dialect.to_case(**arguments)         the case of a call; defaults, scale and layout are the call's
    dialect.from_case(case)              the arguments of the call that asks the same, or a refusal in one line
    dialect.results(case, attention)     what the call returns, by its own names, in its own layout
    dialect.read(case, results)          the other way round: out and lse of the case
    dialect.run(**arguments)             the results of a call

A subclass is one call. Its attributes say what can be said without code; `canonical` turns the arguments into fields of
the case and `spell` back. Neither computes: they move, rename and choose. What a call cannot say needs no code either:
`from_case` reads back what was spelled and refuses where it means something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..arrays import Array, as_array
from ..cases import Case, PagedCase
from ..checks import arguments_named
from ..errors import InputError, UnsupportedError
from ..geometry import show
from ..paged import Attention
from .arguments import Argument, Given, Limits, take
from .folded import folded
from .same import difference, empty_rows


class Dialect:
    """One call of one engine."""

    name: ClassVar[str]
    call: ClassVar[str]
    source: ClassVar[str]  # where the contract was read, and the version
    arguments: ClassVar[Mapping[str, Argument]]
    launch: ClassVar[tuple[str, ...]] = ()  # arguments that change no result: they may be anything
    fixed: ClassVar[Mapping[str, Any]] = {}  # arguments that have one value here, which need not be given
    limits: ClassVar[Limits] = {}
    called: ClassVar[Mapping[str, str]] = {}  # fields of the case that messages call otherwise
    itself: ClassVar[str] = ""  # what the call decides whatever it is given, in words
    selects: ClassVar[bool] = False  # its keys are a list of slots: it has no table and no lengths
    folds: ClassVar[bool] = False  # scales of an fp8 query and cache are folded into those of scores and output
    masks: ClassVar[str] = ""  # what decides which keys are seen, in words
    # What the call returns.
    out: ClassVar[str] = "out"
    out_axes: ClassVar[str]
    lse: ClassVar[str | None] = None
    lse_axes: ClassVar[str] = ""
    lse_base: ClassVar[str] = "e"
    empty_lse: ClassVar[float] = -math.inf
    sinks_in_lse: ClassVar[bool] = False
    empty_out: ClassVar[str] = "0"  # "nan": a row that sees no key may hold NaN
    unjudged: ClassVar[tuple[str, ...]] = ()  # results that no case has

    def canonical(self, given: Given) -> dict[str, Any]:
        """The fields of the case of a call; None is absent."""
        raise NotImplementedError

    def spell(self, case: Any) -> dict[str, Any]:
        """The arguments of the call that is `case`; None is absent. What differs is found by reading them back."""
        raise NotImplementedError

    def to_case(self, **arguments: Any) -> Case:
        """The case of a call. Raises InputError in one line that names the argument."""
        given = self.take(arguments)
        with arguments_named(**self.called):
            fields = self.answers() | self.canonical(given)
            case = PagedCase(**{name: value for name, value in fields.items() if value is not None})
            self.check(case)
        return case

    def take(self, arguments: Mapping[str, Any]) -> Given:
        """The declared arguments of a call, checked."""
        left = {name: value for name, value in arguments.items() if name not in self.launch}
        for name, wanted in self.fixed.items():
            value = left.pop(name, wanted)
            plain = isinstance(value, (bool, int, float, str))
            if value is not wanted and not (plain and value == wanted):
                shown = show(value) if plain else "an array" if hasattr(value, "shape") else f"a {type(value).__name__}"
                raise InputError(f"{name} is {shown}, expected {wanted}: {self.name} has no other")
        return take(self.call, self.arguments, self.limits, left)

    def answers(self) -> dict[str, Any]:
        """The conventions of the call's results."""
        axes = "BHT" if self.lse_axes == "b h s_q" else "BTH"
        empty = {"lse_base": self.lse_base, "empty_lse": self.empty_lse, "lse_axes": axes}
        return {**empty, "sinks_in_lse": self.sinks_in_lse}

    def check(self, case: Any) -> None:
        """Raise InputError for a case that is not valid: the whole of it, what each query sees included."""
        from ..canonical import checked

        for _ in checked(case, "f64").seen:
            pass

    def from_case(self, case: Case) -> dict[str, Any]:
        """The arguments of the call whose case is `case`, but for how an LSE is given: that is the call's own.

        UnsupportedError in one line where the call cannot say it; InputError for a case that is not valid.
        """
        who = f"dialect {self.name!r}"
        if not isinstance(case, self.kind()):
            raise UnsupportedError(f"a case of kind {case.kind} is not supported by {who}")
        if isinstance(case, PagedCase):
            for name, used in (("page_ids", case.page_ids is not None), ("shards", case.shards != 1)):
                if used:
                    raise UnsupportedError(f"{name} is not supported by {who}")
            if self.selects and case.topk_indices is None:
                raise UnsupportedError(f"the case cannot be said in {who}: topk_indices is None, expected slots")
            if case.topk_by == "slot" and not self.selects:
                raise UnsupportedError(f"the case cannot be said in {who}: topk_by is 'slot', expected a table")
        self.check(case)
        if self.folds and isinstance(case, PagedCase):
            case = folded(case)
        try:
            arguments = {name: value for name, value in self.spell(case).items() if value is not None}
            again = self.to_case(**arguments)
        except InputError as error:
            raise UnsupportedError(f"the case cannot be said in {who}: {error}") from None
        different = difference(case, again)
        if different is not None:
            raise UnsupportedError(f"the case cannot be said in {who}: {different}")
        return arguments

    @staticmethod
    def kind() -> type[Case]:
        return PagedCase

    def results(self, case: Any, attention: Attention) -> dict[str, Array]:
        """What the call returns where the case's results are `attention`."""
        out, lse = attention
        if self.empty_out == "nan":
            out = out.copy()
            out[empty_rows(case)] = np.nan
        named = {self.out: self.lay_out(case, out)}
        if self.lse is not None and self.judges_lse(case):
            named[self.lse] = self.lay_lse(lse)
        return named

    def lay_out(self, case: Any, out: Array) -> Array:
        """out [*rows, H, V] in the call's layout, which has its elements in the same order."""
        return out

    def lay_lse(self, lse: Array) -> Array:
        """lse, its axes those of the case, in the call's layout."""
        return lse.reshape(-1, lse.shape[-1]) if len(self.lse_axes.split()) == 2 else lse

    def judges_lse(self, case: Any) -> bool:
        """Whether the call says what its LSE is of such a case."""
        return True

    def shapes(self, case: Any) -> dict[str, list[int]]:
        """The shape of every result of the call."""
        from ..meaning import result_shapes

        blank = {name: np.broadcast_to(np.float32(0), shape) for name, shape in result_shapes(case).items()}
        return {name: list(result.shape) for name, result in self.of_case(case, blank).items()}

    def read(self, case: Any, results: Mapping[str, object]) -> dict[str, Array]:
        """out and lse of the case, of what the call returned. Raises InputError for another name or shape."""
        from ..meaning import result_shapes

        shapes = {name: tuple(shape) for name, shape in result_shapes(case).items()}
        expected = self.shapes(case)
        for name in results:
            if name not in expected and name not in (*self.unjudged, self.lse):
                known = ", ".join((*expected, *self.unjudged))
                raise InputError(f"the actual results hold {name}, expected {known}")
        if self.out not in results:
            raise InputError(f"the actual results hold no {self.out}, expected {', '.join(expected)}")
        taken = {}
        for name, wanted in expected.items():
            if results.get(name) is None:
                continue
            array = as_array(name, results[name])
            if list(array.shape) != wanted:
                raise InputError(f"{name} is {list(array.shape)}, expected {wanted}")
            own = "out" if name == self.out else "lse"
            taken[own] = array.reshape(shapes[own])
        return self._without_nan(case, taken) if self.empty_out == "nan" else taken

    def _without_nan(self, case: Any, taken: dict[str, Array]) -> dict[str, Array]:
        """A row that sees no key is right as NaN, and as an empty row of the case."""
        empty = empty_rows(case)
        for name, right in (("out", 0.0), ("lse", case.empty_lse)):
            if name in taken and empty.any():
                mask = empty[..., None, None] if name == "out" else empty[..., None]
                taken[name] = np.where(mask & np.isnan(taken[name]), np.array(right, taken[name].dtype), taken[name])
        return taken

    def run(self, *, precision: str = "f64", backend: str = "auto", **arguments: Any) -> dict[str, Array]:
        """The results of a call, in the call's layout, f64 (or f32 in precision "f32")."""
        from ..oracle import expected

        case = self.to_case(**arguments)
        with arguments_named(**self.called):
            results = expected(case, precision=precision, backend=backend)
        return self.of_case(case, results)

    def of_case(self, case: Case, results: Mapping[str, Array]) -> dict[str, Array]:
        """The results of a case, as the call returns them."""
        return self.results(case, Attention(results["out"], results.get("lse", np.empty(0))))
