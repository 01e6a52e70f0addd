# SPDX-License-Identifier: Apache-2.0
"""The dialects in a table, made of the adapters: what each call takes, with its defaults, and what it returns."""

from __future__ import annotations

import math
from typing import Any

from . import NAMES, get
from .dialect import Dialect

HEAD = ("dialect", "call", "tensors", "values and their defaults", "keys seen by", "results", "read from")


def describe() -> dict[str, Any]:
    """Every dialect as JSON."""
    return {"count": len(NAMES), "dialects": [_entry(get(name)) for name in NAMES]}


def table() -> str:
    """Every dialect as a table of markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for dialect in map(get, NAMES):
        arguments = dialect.arguments.items()
        cells = (
            f"`{dialect.name}`",
            f"`{dialect.call}`",
            ", ".join(f"`{name}` {argument.spelling}" for name, argument in arguments if argument.is_tensor),
            ", ".join(f"`{name}`{argument.spelling}" for name, argument in arguments if not argument.is_tensor),
            dialect.masks,
            _results(dialect),
            dialect.source,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _entry(dialect: Dialect) -> dict[str, Any]:
    return {
        "dialect": dialect.name,
        "call": dialect.call,
        "tensors": {
            name: {
                "axes": [list(axes) for axes in argument.axes],
                "dtypes": [_dtype(dialect, dtype) for dtype in argument.dtypes],
                "required": argument.default is not None,
            }
            for name, argument in dialect.arguments.items()
            if argument.is_tensor
        },
        "values": {
            name: {"type": argument.kind.__name__, "default": argument.spelling.removeprefix("=") or None}
            for name, argument in dialect.arguments.items()
            if not argument.is_tensor
        },
        "ignored": list(dialect.launch),
        "fixed": dict(dialect.fixed),
        "keys": dialect.masks,
        "results": {
            "out": {"name": dialect.out, "axes": dialect.out_axes.split(), "empty": dialect.empty_out},
            "lse": None if dialect.lse is None else {
                "name": dialect.lse,
                "axes": dialect.lse_axes.split(),
                "base": dialect.lse_base,
                "empty": _number(dialect.empty_lse),
                "sink": dialect.sinks_in_lse,
            },
        },
        "source": dialect.source,
    }  # fmt: skip


def _dtype(dialect: Dialect, dtype: str) -> str:
    return f"as {dtype[1:]}" if dtype.startswith("=") else dtype


def _results(dialect: Dialect) -> str:
    empty = "0 or NaN" if dialect.empty_out == "nan" else "0"
    out = f"`{dialect.out}` {_axes(dialect.out_axes)}, empty {empty}"
    if dialect.lse is None:
        return out
    sink = ", with the sink" if dialect.sinks_in_lse else ""
    empty = _number(dialect.empty_lse)
    return f"{out}; `{dialect.lse}` {_axes(dialect.lse_axes)} base {dialect.lse_base}, empty {empty}{sink}"


def _axes(letters: str) -> str:
    return f"[{','.join(letters.split())}]"


def _number(value: float) -> str:
    return {math.inf: "+inf", -math.inf: "-inf"}.get(value, f"{value:g}")
