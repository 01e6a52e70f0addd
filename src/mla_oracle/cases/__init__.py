# SPDX-License-Identifier: Apache-2.0
"""A case: one complete problem, arrays and the conventions that give them meaning.

One frozen dataclass per kind. A field that is an array is a tensor of the case file; every other field is a
convention, one string of its metadata. Adding a convention is adding a field with a default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays import Array, dtype_name
from ..errors import InputError
from .extensions import Extensions

ABSENT: Any = None  # of a tensor that is there in every plain case

@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Base of every kind of case. `id` regenerates the case where it was generated, else it is None."""

    kind: ClassVar[str]
    results: ClassVar[tuple[str, ...]] = ("out",)
    id: str | None = None

    def tensors(self) -> dict[str, Array]:
        """The arrays of the case by name; optional ones that are absent are left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if _is_tensor(f)}
        return {name: array for name, array in fields.items() if array is not None}

    def conventions(self) -> dict[str, Any]:
        """What gives the arrays their meaning; a convention that is None is left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not _is_tensor(f)}
        return {name: value for name, value in fields.items() if value is not None and name != "id"}

    @property
    def name(self) -> str:
        """What messages call the case."""
        return self.id or f"a {self.kind} case"


def _is_tensor(field: dataclasses.Field[Any]) -> bool:
    return str(field.type).startswith("Array")


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseCase(Case):
    """q_nope [t_q, H, P], q_pe [t_q, H, R], c_kv [t_kv, L], k_pe [t_kv, R], w_uk [H, P, L], w_uv [H, V, L].

    softmax_scale None is 1/sqrt(P + R).
    """

    q_nope: Array
    q_pe: Array
    c_kv: Array
    k_pe: Array
    w_uk: Array
    w_uv: Array
    softmax_scale: float | None = None


class NaiveCase(DenseCase):
    kind = "naive"


class AbsorbedCase(DenseCase):
    kind = "absorbed"


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedCase(Case, Extensions):
    """q [B, T, H, D] or [B, H, D], kv_cache [pages, block_size, D], block_table [B, max_blocks], seq_lens [B].

    Such a case is plain; `extensions` names what makes another one more than that. kv_cache is then also
    [num_blocks, block_size, KV, D], head h reading KV head h // (H // KV), or the bytes of a cache_format; q and
    kv_cache may be e4m3; with topk_by "slot" block_table and seq_lens are None.

    Without page_ids, page i of kv_cache is block i. With page_ids [pages], it is block page_ids[i] of a cache of
    `num_blocks` blocks that are `block_stride` bytes apart: huge ids and strides without the gigabytes.

    With shards > 1 the tokens of every request are owned by that many ranks: "contiguous" gives rank s the s-th run of
    ceil(seq_len / shards) tokens, "interleaved" gives it tokens s, s + shards, ... Each rank has a partial state.
    """

    kind = "paged"
    results = ("out", "lse")

    q: Array
    kv_cache: Array
    block_table: Array = ABSENT
    seq_lens: Array = ABSENT
    page_ids: Array | None = None
    softmax_scale: float
    head_dim_v: int
    causal: bool = True
    lse_base: str = "e"
    empty_lse: float = -math.inf
    num_blocks: int | None = None
    block_stride: int | None = None
    shards: int = 1
    shard_layout: str = "contiguous"

    def __post_init__(self) -> None:
        for name in ("block_table", "seq_lens"):
            if getattr(self, name) is None and self.topk_by != "slot":
                raise InputError(f"tensor {name} is missing from the paged case")

    def conventions(self) -> dict[str, Any]:
        unused = {f.name for f in dataclasses.fields(Extensions)} - set(self.set_extensions())
        return {name: value for name, value in super().conventions().items() if name not in unused}

    def extensions(self) -> tuple[str, ...]:
        """What of the case is not plain: "num_kv_heads", a tensor in e4m3, the fields of Extensions in use."""
        dense = self.cache_format is None
        found = ["num_kv_heads"] if dense and self.kv_cache.ndim == 4 else []
        for name in ("q", "kv_cache")[: 1 + dense]:
            if dtype_name(name, getattr(self, name)) == "e4m3":
                found.append(f"e4m3 {name}")
        return (*found, *self.set_extensions())


@dataclass(frozen=True, kw_only=True, eq=False)
class MergeCase(Case):
    """partial_out [S, ..., V], partial_lse [S, ...]: states over disjoint keys, to be joined."""

    kind = "merge"
    results = ("out", "lse")

    partial_out: Array
    partial_lse: Array
    lse_base: str = "e"
    empty_lse: float = -math.inf


@dataclass(frozen=True, kw_only=True, eq=False)
class RopeCase(Case):
    """x [T, H, R] or [T, R], positions [T] i64: the first rotary_dim elements are rotated (None: all of them).

    pairing is "interleaved" (2j, 2j + 1) or "neox" (j, j + rotary_dim / 2); angles says how they are computed.
    yarn is a JSON object of YaRN's parameters, or None.
    """

    kind = "rope"

    x: Array
    positions: Array
    pairing: str
    base: float
    angles: str
    rotary_dim: int | None = None
    yarn: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class AppendCase(Case):
    """c_kv [T, L] and k_pe [T, R] go to the slots slot_mapping [n] of kv_cache [num_blocks, block_size, L + R]."""

    kind = "append"
    results = ("kv_cache",)

    kv_cache: Array
    c_kv: Array
    k_pe: Array
    slot_mapping: Array


KINDS: dict[str, type[Case]] = {
    cls.kind: cls for cls in (NaiveCase, AbsorbedCase, PagedCase, MergeCase, RopeCase, AppendCase)
}


def parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def parse_positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and text.strip("0")):
        raise ValueError("a positive integer")
    if len(text) > 18:
        raise ValueError("a positive integer below 10^18")
    return int(text)


def parse_count(text: str) -> int:
    try:
        return 0 if text == "0" else parse_positive(text)
    except ValueError:
        raise ValueError("an integer of 0 or more") from None


def parse_bound(text: str) -> int:
    try:
        return -1 if text == "-1" else parse_count(text)
    except ValueError:
        raise ValueError("an integer of -1 or more") from None


def parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def parse_choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(" or ".join(choices))
        return text

    return parse


PARSERS: dict[str, Callable[[str], Any]] = {
    "softmax_scale": parse_float,
    "head_dim_v": parse_positive,
    "causal": parse_bool,
    "lse_base": parse_choice("e", "2"),
    "empty_lse": parse_float,
    "num_blocks": parse_positive,
    "block_stride": parse_positive,
    "shards": parse_positive,
    "shard_layout": parse_choice("contiguous", "interleaved"),
    "topk_by": parse_choice("position", "slot"),
    "topk_outside": parse_choice("error", "skip"),
    "window_left": parse_bound,
    "window_right": parse_bound,
    "window_first": parse_count,
    "softcap": parse_float,
    "sinks_in_lse": parse_bool,
    "value_offset": parse_count,
    "q_scale": parse_float,
    "output_scale": parse_float,
    "lse_axes": parse_choice("BTH", "BHT"),
    "cache_format": str,
    "cache_reader": str,
    "extra_cache_format": str,
    "pairing": parse_choice("interleaved", "neox"),
    "base": parse_float,
    "angles": parse_choice("recurrence", "power", "closed", "table"),
    "rotary_dim": parse_positive,
    "yarn": str,
}


def format_convention(value: Any) -> str:
    """The text of a convention in a file or an id; PARSERS reads it back."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    return repr(float(value)) if isinstance(value, (float, np.floating)) else str(value)


def from_parts(tensors: dict[str, Array], metadata: dict[str, str]) -> Case:
    """The case of these tensors and metadata (kind, id, conventions). InputError for a missing or extra one."""
    kind = metadata.get("kind")
    if kind not in KINDS:
        raise InputError(f"kind is {kind!r}, expected {', '.join(KINDS)}")
    cls = KINDS[kind]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    wanted = {name for name, f in fields.items() if _is_tensor(f)}
    for name in tensors:
        if name not in wanted:
            raise InputError(f"tensor {name} does not belong to a {kind} case, expected {', '.join(sorted(wanted))}")
    values: dict[str, Any] = {**tensors, "id": metadata.get("id")}
    if not (values["id"] or "").isprintable():
        raise InputError(f"metadata id is {values['id']!r}, expected printable characters")
    for name, text in metadata.items():
        if name in ("schema", "kind", "id"):
            continue
        if name not in fields or name in wanted:
            raise InputError(
                f"metadata {name} does not belong to a {kind} case, expected"
                f" {', '.join(sorted(set(fields) - wanted - {'id'})) or 'none'}"
            )
        try:
            values[name] = PARSERS[name](text)
        except ValueError as error:
            raise InputError(f"metadata {name} is {text!r}, expected {error}") from None
    for name in sorted(required - set(values)):
        what = "tensor" if name in wanted else "metadata"
        raise InputError(f"{what} {name} is missing from the {kind} case")
    return cls(**values)
