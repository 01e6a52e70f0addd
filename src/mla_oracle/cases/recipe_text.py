# SPDX-License-Identifier: Apache-2.0
"""The text of the fields of an id: PARSERS by field, and `format_field` back. A size (`heads=16`) needs no entry."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

from . import format_convention, parse_bool, parse_bound, parse_choice, parse_float, parse_positive


def parse_size(text: str) -> int:
    if (size := parse_positive(text)) >= 2**31:
        raise ValueError("a positive integer below 2^31")
    return size


def _parse_name(text: str) -> str:
    if not re.fullmatch(r"[\w.]+", text, re.ASCII):
        raise ValueError("a name of letters, digits, _ and .")
    return text


def _parse_natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) >= 2**64:
        raise ValueError("an integer from 0 to 2^64 - 1")
    return int(text)


def _parse_scale(text: str) -> float:
    if not 0 < (scale := parse_float(text)) < math.inf:
        raise ValueError("a positive finite number")
    return scale


def _parse_window(text: str) -> tuple[int, ...]:
    """The bounds to the left and, where given, to the right; -1 is none."""
    try:
        bounds = tuple(parse_bound(part) for part in text.split("+"))
    except ValueError:
        bounds = ()
    if len(bounds) not in (1, 2) or max(bounds) >= 2**31:
        raise ValueError("left or left+right, each -1 (no bound) or more, below 2^31")
    return bounds


def _parse_count(text: str) -> int:
    if (count := _parse_natural(text)) >= 2**31:
        raise ValueError("an integer from 0 to 2^31 - 1")
    return count


def _parse_naturals(text: str) -> tuple[int, ...]:
    parts = []
    for part in text.split("+") if text else ():
        value, x, times = part.partition("x")
        parts.append((_parse_natural(value), _parse_natural(times) if x else 1))
    if sum(times for _, times in parts) > 1_000_000 or any(value >= 2**31 for value, _ in parts):
        raise ValueError("at most 1000000 integers below 2^31")
    return tuple(value for value, times in parts for _ in range(times))


def format_field(value: Any) -> str:
    """The text of a field in an id; PARSERS reads it back."""
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
    "window": _parse_window,
    "first": _parse_count,
    "topk_by": parse_choice("position", "slot"),
    "topk_outside": parse_choice("error", "skip"),
    "topk_length": parse_choice("request", "query"),
    "invalid": parse_choice("none", "some", "rows"),
    "duplicates": parse_bool,
    "extra": _parse_naturals,
    "bias": parse_choice("normal", "mask", "alibi"),
    "sinks": parse_choice("normal", "infinite"),
    "sinks_in_lse": parse_bool,
    "softcap": _parse_scale,
    "ragged": _parse_naturals,
    "kpe": _parse_count,
    "value_offset": _parse_count,
    "lse_axes": parse_choice("BTH", "BHT"),
    "q_dtype": parse_choice("f32", "f16", "bf16", "e4m3"),
    "q_scale": _parse_scale,
    "output_scale": _parse_scale,
    "format": _parse_name,
    "extra_format": _parse_name,
    "writer": _parse_name,
    "reader": _parse_name,
    "angles": parse_choice("recurrence", "power", "closed", "table"),
}
