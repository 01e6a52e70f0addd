# SPDX-License-Identifier: Apache-2.0
"""What a PTX text consists of, as parser.py reads it.

An opcode stays text; an operand is
    str             a register, label, variable or special register, by a name unique in its function
    int             an immediate; 0fXXXXXXXX and 0dXXXXXXXXXXXXXXXX are their bits
    float           an immediate written as a decimal
    Address         [base + offset]
    tuple           {a, b, ...}, "_" for a result that is dropped
    Pair            a|b
    Negated         !p
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

SIZES = {f"{kind}{bits}": bits // 8 for kind in "bsuf" for bits in (8, 16, 32, 64)} | {"pred": 4, "b128": 16}
SIZES |= {"f16x2": 4, "bf16": 2, "bf16x2": 4}


class Address(NamedTuple):
    base: str | int
    offset: int


class Pair(NamedTuple):
    first: str
    second: str


class Negated(NamedTuple):
    predicate: str


class Source(NamedTuple):
    """A place in the kernel's own source, from .loc; `caller` is where the code around it was inlined, or None."""

    file: int
    line: int
    caller: tuple[int, int] | None = None


@dataclass(slots=True)
class Statement:
    line: int
    source: Source
    guard: str | None
    negated: bool
    opcode: str
    operands: list[Any]


@dataclass(slots=True)
class Variable:
    name: str
    size: int
    align: int
    initial: bytes | None = None
    extern: bool = False
    constant: bool = False


@dataclass(slots=True)
class Function:
    name: str
    entry: bool
    params: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # unique name -> type
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    arguments: list[Variable] = field(default_factory=list)  # .param variables of its calls
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)  # .branchtargets
    max_threads: int | None = None


@dataclass(slots=True)
class Module:
    target: str = ""
    files: dict[int, str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    memory: list[Variable] = field(default_factory=list)  # .global and .const
