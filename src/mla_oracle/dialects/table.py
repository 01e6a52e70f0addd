# SPDX-License-Identifier: Apache-2.0
"""The dialects in a table, made of the adapters: what each call does where nothing is said, and what it returns."""

from __future__ import annotations

import math
from typing import Any

from . import NAMES, get
from .arguments import REQUIRED
from .dialect import Dialect

HEAD = ("dialect", "call", "left out, it is", "keys", "out", "lse", "read from")


def describe() -> dict[str, Any]:
    """Every dialect as JSON."""
    return {"count": len(NAMES), "dialects": [_entry(get(name)) for name in NAMES]}


def table() -> str:
    """Every dialect as a table of markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for dialect in map(get, NAMES):
        cells = (
            f"`{dialect.name}`",
            f"`{dialect.call}`",
            _defaults(dialect),
            dialect.masks,
            f"`{dialect.out}` {_axes(dialect.out_axes)}{' or NaN' if dialect.empty_out == 'nan' else ''}",
            _lse(dialect),
            dialect.source,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _defaults(dialect: Dialect) -> str:
    """What a call decides where its author does not, and what nobody can change."""
    given = [
        f"`{name}` {argument.words or argument.default}"
        for name, argument in dialect.arguments.items()
        if argument.words or not (argument.is_tensor or argument.default in (REQUIRED, None))
    ]
    return ", ".join([*([dialect.itself] if dialect.itself else []), *given])


def _entry(dialect: Dialect) -> dict[str, Any]:
    return {
        "dialect": dialect.name,
        "call": dialect.call,
        "tensors": {
            name: {
                "axes": [list(axes) for axes in argument.axes],
                "dtypes": [dtype.replace("=", "as ") for dtype in argument.dtypes],
                "required": argument.default is REQUIRED,
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
        "itself": dialect.itself,
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


def _lse(dialect: Dialect) -> str:
    if dialect.lse is None:
        return ""
    sink = ", with the sink" if dialect.sinks_in_lse else ""
    empty = _number(dialect.empty_lse)
    return f"`{dialect.lse}` {_axes(dialect.lse_axes)} base {dialect.lse_base}, empty {empty}{sink}"


def _axes(letters: str) -> str:
    return f"[{','.join(letters.split())}]"


def _number(value: float) -> str:
    return {math.inf: "+inf", -math.inf: "-inf"}.get(value, f"{value:g}")
