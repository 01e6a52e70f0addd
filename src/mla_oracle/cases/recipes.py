# SPDX-License-Identifier: Apache-2.0
"""The printable id of a generated case: `kind:key=value,key=value,...`, one frozen dataclass per kind.

    paged:geometry=glm-5.2,lens=4096,block=64,dtype=bf16,seed=7
    absorbed:heads=4,nope=24,rope=8,value=32,rank=64,queries=5,cached=9,inputs=xorshift,seed=42

A field left out has its default; `str(recipe)` leaves it out again, so an id and its recipe are one to one. Lists are
joined by `+`, and `256x4` is 256 four times. Nothing in an id needs quoting in a shell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import InputError
from ..geometry import Geometry
from . import parse_choice
from .recipe_text import PARSERS, format_field, parse_size

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
            f"{f.name}={format_field(value)}"
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

    Beyond the plain problem, each on its own:
    keys      `window` left or left+right, `first` kept tokens; `bias` normal, mask or alibi (per head);
              `topk` indices a query by `topk_by`, shuffled, with -1 anywhere (`invalid`: rows, and every third query
              selects nothing; none, and -1 only follows too few keys), `duplicates`, `topk_length` per request or
              query with garbage beyond, `topk_outside` skip with indices that are too large;
              `extra` lens of a second cache with pages of `extra_block`, `extra_topk` indices and an
              `extra_format` (none: the first's).
              By slot nothing is causal. Rows that no query sees are unread.
    scores    `softcap`; `sinks` normal, or infinite ones among them
    layout    `ragged` query tokens of each request; `kv_heads`; `kpe` columns in a cache of their own; `value_offset`
    numbers   `q_dtype`, `q_scale`, `output_scale`; `format` of the cache by a `writer` and a `reader` (formats/)
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
    window: tuple[int, ...] | None = None
    first: int = 0
    bias: str | None = None
    topk: int | None = None
    topk_by: str = "position"
    topk_outside: str = "error"
    topk_length: str | None = None
    invalid: str = "some"
    duplicates: bool = False
    extra: tuple[int, ...] | None = None
    extra_topk: int | None = None
    extra_block: int = 16
    extra_format: str | None = None
    softcap: float | None = None
    sinks: str | None = None
    sinks_in_lse: bool = False
    ragged: tuple[int, ...] | None = None
    kv_heads: int = 1
    kpe: int = 0
    value_offset: int = 0
    lse_axes: str = "BTH"
    q_dtype: str | None = None
    q_scale: float | None = None
    output_scale: float | None = None
    format: str | None = None
    writer: str | None = None
    reader: str | None = None

    def check(self) -> None:
        """Raise InputError for fields that say nothing, or that contradict each other."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name, needed in NEEDED.items():
            if getattr(self, name) != defaults[name] and getattr(self, needed) == defaults[needed]:
                raise InputError(f"case id {str(self)!r} has {name} without {needed}")
        for name, other, why in CONTRADICTIONS:
            if getattr(self, name) != defaults[name] and getattr(self, other) != defaults[other]:
                raise InputError(f"case id {str(self)!r} has {name} and {other}: {why}")


# A field of a paged id that says nothing without another, and two that contradict each other.
NEEDED = {
    **dict.fromkeys(("topk_by", "topk_outside", "topk_length", "invalid", "duplicates", "extra"), "topk"),
    **dict.fromkeys(("extra_topk", "extra_block", "extra_format"), "extra"),
    **dict.fromkeys(("writer", "reader"), "format"),
    "sinks_in_lse": "sinks",
    "lse_axes": "tokens",
}
CONTRADICTIONS = (
    ("window", "topk_by", "by slot there are no positions"),
    ("first", "topk_by", "by slot there are no positions"),
    ("bias", "topk_by", "by slot there are no positions"),
    ("ragged", "tokens", "one of them counts the query tokens"),
    ("format", "kpe", "a format says itself whether it is split"),
    ("format", "kv_heads", "a format has one head"),
)


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
    if name == "dtype" and cls is PagedRecipe:
        return PARSERS["q_dtype"]
    return PARSERS.get(name, parse_size)
