# SPDX-License-Identifier: Apache-2.0
"""Calls in files: one safetensors file, tensors under the names of the call's arguments, its numbers in the metadata.

    schema    mla-oracle-call/1
    dialect   the dialect's name
    case      the id of the case it was spelled from, if it has one
    ...       every number, truth value and word that is given: softmax_scale 0.07, causal true

A result file has the call's results under the call's own names, with or without metadata.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arrays import Array
from ..cases import Case, format_convention, parse_bool, parse_float
from ..errors import InputError
from ..files.exchange import CASE_SCHEMA, load_case, read_result
from ..files.tensorfile import read_tensors, write_tensors
from . import get
from .dialect import Dialect

CALL_SCHEMA = "mla-oracle-call/1"


@dataclass(frozen=True)
class Call:
    """A call that was read: its dialect, and its case, whose id is that in the file."""

    dialect: Dialect
    case: Case

    def results(self, path: str | Path) -> dict[str, Array]:
        """out and lse of the case, from the file of the call's results. Raises InputError."""
        return self.dialect.read(self.case, read_result(path))


def write_call(path: str | Path, dialect: Dialect, case: Case) -> dict[str, Any]:
    """Write the call that is `case` to the file `path`, whole or not at all; its arguments.

    Raises UnsupportedError for a case that the dialect cannot say, InputError.
    """
    arguments = dialect.from_case(case)
    tensors = {name: value for name, value in arguments.items() if dialect.arguments[name].is_tensor}
    metadata = {name: format_convention(value) for name, value in arguments.items() if name not in tensors}
    if case.id is not None:
        metadata["case"] = case.id
    write_tensors(path, tensors, {"schema": CALL_SCHEMA, "dialect": dialect.name, **metadata})
    return arguments


def load_call(source: str | Path, name: str) -> Call:
    """The call of dialect `name` in a file, or that of a case: a case file or an id. Raises InputError, and
    UnsupportedError for a case that the dialect cannot say.
    """
    dialect = get(name)
    if os.path.isfile(source):
        tensors, metadata = read_tensors(Path(source))
        if metadata.get("schema") != CASE_SCHEMA:
            return _call(Path(source), dialect, tensors, metadata)
    case = load_case(source)
    return Call(dialect, dataclasses.replace(dialect.to_case(**dialect.from_case(case)), id=case.id))


def _call(path: Path, dialect: Dialect, tensors: dict[str, Array], metadata: dict[str, str]) -> Call:
    for key, wanted in (("schema", CALL_SCHEMA), ("dialect", dialect.name)):
        if metadata.get(key) != wanted:
            raise InputError(f"{path}: {key} is {metadata.get(key)!r}, expected {wanted!r}")
    left = {key: text for key, text in metadata.items() if key not in ("schema", "dialect", "case")}
    identity = metadata.get("case")
    try:
        if not (identity or "").isprintable():
            raise InputError(f"metadata case is {identity!r}, expected printable characters")
        case = dialect.to_case(**tensors, **_values(dialect, left, tensors))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return Call(dialect, dataclasses.replace(case, id=identity))


def _values(dialect: Dialect, metadata: dict[str, str], tensors: dict[str, Array]) -> dict[str, Any]:
    """The numbers, truth values and words of the metadata; of an argument the dialect has not, the text."""
    values: dict[str, Any] = {}
    for name, text in metadata.items():
        if name in tensors:
            raise InputError(f"{name} is a tensor and in the metadata, expected one of them")
        argument = dialect.arguments.get(name)
        kind = type(dialect.fixed[name]) if name in dialect.fixed else str if argument is None else argument.kind
        if argument is not None and argument.is_tensor:
            raise InputError(f"metadata {name} is {text!r}, expected a tensor of that name")
        try:
            values[name] = _PARSERS.get(kind, str)(text)
        except ValueError as error:
            raise InputError(f"metadata {name} is {text!r}, expected {error}") from None
    return values


def _parse_int(text: str) -> int:
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 19):
        raise ValueError("an integer")
    return int(text)


_PARSERS: dict[type, Any] = {bool: parse_bool, float: parse_float, int: _parse_int, str: str}
