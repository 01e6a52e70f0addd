# SPDX-License-Identifier: Apache-2.0
"""The printable id of a generated case: `kind:key=value,key=value,...`, one frozen dataclass per kind.

    paged:geometry=glm-5.2,lens=4096,block=64,dtype=bf16,seed=7
    absorbed:heads=4,nope=24,rope=8,value=32,rank=64,queries=5,cached=9,inputs=xorshift,seed=42

A field left out has its default; `str(recipe)` leaves it out again, so an id and its recipe are one to one. Lists are
joined by `+`, and `256x4` is 256 four times. Nothing in an id needs quoting in a shell.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from .cases import format_convention, parse_bool, parse_choice, parse_float, parse_positive
from .errors import InputError
from .geometry import Geometry

DENSE_INPUTS = ("normal", "xorshift")
PAGED_INPUTS = ("normal", "peaked", "flat", "position", "onehot", "tailed", "rising", "lcg")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of every kind of recipe."""

    kind: ClassVar[str]
    geometry: str | None = None
    dtype: str = "f32"
    seed: int = 1

    def __str__(self) -> str:
        given = [
            f"{f.name}={_format(value)}"
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return f"{self.kind}:{','.join(given)}"

    def preset(self) -> Geometry | None:
        return None if self.geometry is None else Geometry.preset(self.geometry)

    def size(self, name: str, of_geometry: Callable[[Geometry], int]) -> int:
        """The size `name`: as written in the id, else the geometry's."""
        value: int | None = getattr(self, name)
        geometry = self.preset()
        if value is not None:
            return value
        if geometry is None:
            raise InputError(f"case id {str(self)!r} has neither {name} nor geometry, expected one of them")
        return of_geometry(geometry)


@dataclass(frozen=True, kw_only=True)
class DenseRecipe(Recipe):
    """Sizes H, P, R, V, L; the last `queries` of `cached` rows are the queries."""

    heads: int | None = None
    nope: int | None = None
    rope: int | None = None
    value: int | None = None
    rank: int | None = None
    queries: int = 1
    cached: int = 17
    scale: float | None = None
    inputs: str = "normal"


class NaiveRecipe(DenseRecipe):
    kind = "naive"


class AbsorbedRecipe(DenseRecipe):
    kind = "absorbed"


@dataclass(frozen=True, kw_only=True)
class PagedRecipe(Recipe):
    """Rows of `row` elements, the first `value` of them the value; one request per entry of `lens`.

    `tokens` None is a q without token axis. `pages` places the blocks: shuffled, descending, strided (pages with a gap
    of their own size between them), or huge (ids and byte strides beyond 32 bits). scale: a number, or the geometry's.
    `unread`: "nan" in slots nobody may read and table entries that exist nowhere, or "numbers" and pages that exist, so
    that what a wrong kernel reads there can be told.
    """

    kind = "paged"
    heads: int | None = None
    row: int | None = None
    value: int | None = None
    lens: tuple[int, ...] = (1, 63, 64, 65)
    tokens: int | None = None
    block: int = 64
    scale: float | None = None
    causal: bool = True
    lse_base: str = "e"
    empty_lse: float = -math.inf
    inputs: str = "normal"
    pages: str = "shuffled"
    unread: str = "nan"
    shards: int = 1
    shard_layout: str = "contiguous"


@dataclass(frozen=True, kw_only=True)
class MergeRecipe(Recipe):
    """`states` partial results of `rows` x `heads` rows of `value` elements; some are empty."""

    kind = "merge"
    states: int = 3
    rows: int = 4
    heads: int = 8
    value: int = 64
    lse_base: str = "e"
    empty_lse: float = -math.inf


@dataclass(frozen=True, kw_only=True)
class RopeRecipe(Recipe):
    """One row of `heads` x `rope` elements per position; pairing, base and YaRN: as written, else the geometry's."""

    kind = "rope"
    heads: int = 1
    rope: int | None = None
    positions: tuple[int, ...] = (0, 1, 17, 4096, 1000000)
    pairing: str | None = None
    base: float | None = None
    angles: str = "recurrence"


@dataclass(frozen=True, kw_only=True)
class AppendRecipe(Recipe):
    """`tokens` new rows of rank + rope elements into `blocks` blocks of `block`; every third slot is -1."""

    kind = "append"
    rank: int | None = None
    rope: int | None = None
    tokens: int = 9
    blocks: int = 4
    block: int = 16


RECIPES: dict[str, type[Recipe]] = {
    cls.kind: cls for cls in (NaiveRecipe, AbsorbedRecipe, PagedRecipe, MergeRecipe, RopeRecipe, AppendRecipe)
}


def parse_id(text: str) -> Recipe:
    """The recipe that `text` is the id of. Raises InputError naming the field."""
    if not text.isprintable():
        raise InputError(f"case id {text!r} has an unprintable character, expected none")
    kind, _, rest = text.partition(":")
    if kind not in RECIPES:
        raise InputError(f"case id {text!r} is of kind {kind!r}, expected {', '.join(RECIPES)}")
    cls = RECIPES[kind]
    fields = {f.name for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in rest.split(",") if rest else ():
        name, equals, value = item.partition("=")
        if name not in fields or not equals:
            raise InputError(f"case id {text!r} has {item!r}, expected key=value with key {', '.join(sorted(fields))}")
        if name in values:
            raise InputError(f"case id {text!r} gives {name} twice")
        try:
            values[name] = _parser(cls, name)(value)
        except ValueError as error:
            raise InputError(f"case id {text!r} has {name}={value}, expected {error}") from None
    return cls(**values)


def _parser(cls: type[Recipe], name: str) -> Callable[[str], Any]:
    if name == "inputs":
        return parse_choice(*(PAGED_INPUTS if cls is PagedRecipe else DENSE_INPUTS))
    return PARSERS.get(name, _parse_size)


def _parse_size(text: str) -> int:
    if (size := parse_positive(text)) >= 2**31:
        raise ValueError("a positive integer below 2^31")
    return size


def _parse_natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= 2**64:
        raise ValueError("an integer from 0 to 2^64 - 1")
    return int(text)


def _parse_scale(text: str) -> float:
    if not 0 < (scale := parse_float(text)) < math.inf:
        raise ValueError("a positive finite number")
    return scale


def _parse_naturals(text: str) -> tuple[int, ...]:
    parts = []
    for part in text.split("+") if text else ():
        value, x, times = part.partition("x")
        parts.append((_parse_natural(value), _parse_natural(times) if x else 1))
    if sum(times for _, times in parts) > 1_000_000 or any(value >= 2**31 for value, _ in parts):
        raise ValueError("at most 1000000 integers below 2^31")
    return tuple(value for value, times in parts for _ in range(times))


def _format(value: Any) -> str:
    if isinstance(value, tuple):
        runs = [(v, len(list(run))) for v, run in itertools.groupby(value)]
        return "+".join(f"{v}x{n}" if n > 1 else str(v) for v, n in runs)
    return format_convention(value)


PARSERS: dict[str, Callable[[str], Any]] = {
    "geometry": str,
    "dtype": parse_choice("f32", "f16", "bf16"),
    "seed": _parse_natural,
    "rope": _parse_natural,
    "lens": _parse_naturals,
    "positions": _parse_naturals,
    "scale": _parse_scale,
    "base": _parse_scale,
    "causal": parse_bool,
    "lse_base": parse_choice("e", "2"),
    "empty_lse": parse_float,
    "unread": parse_choice("nan", "numbers"),
    "pages": parse_choice("shuffled", "descending", "huge", "strided"),
    "shard_layout": parse_choice("contiguous", "interleaved"),
    "pairing": parse_choice("interleaved", "neox"),
    "angles": parse_choice("recurrence", "power", "closed", "table"),
}
