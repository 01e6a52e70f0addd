# SPDX-License-Identifier: Apache-2.0
"""PTX text -> syntax.Module: kernels and functions as lists of statements, their registers and variables.

Nothing is interpreted here. The grammar is that of the PTX ISA's chapters 4, 5 and 11, as far as NVRTC and inline
assembly use it.
"""

from __future__ import annotations

import re
from typing import Any

from mla_oracle.errors import InputError, OracleError, UnsupportedError
from mla_oracle.ptx.syntax import SIZES, Address, Function, Module, Negated, Pair, Source, Statement, Variable

_LINES = {".loc", ".file", ".version", ".target", ".address_size"}  # directives that end with their line
MOST_REGISTERS = 1 << 20  # of one declaration
MOST_BYTES = 1 << 40
_NUMBER = re.compile(r"[-+]?(0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_LABEL = re.compile(r"\s*([$\w]+)\s*:(?!:)")
_DECIMAL = re.compile(r"[-+]?\d+\.\d*([eE][-+]?\d+)?$")
_DECLARED = re.compile(
    r"(?:\.align\s+(\d+)\s+)?(?:\.ptr\s+)?(?:\.(?:global|shared|const|local)\s+)?(?:\.align\s+(\d+)\s+)?"
    r"\.(?:v(\d)\s+\.)?(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([$%\w]+)\s*((?:\[\d*\]\s*)*)(?:=\s*(.*))?$",
    re.S,
)


def _number(text: str) -> int:
    negative, digits = text.startswith("-"), text.lstrip("+-").rstrip("U")
    value = int(digits[2:], 16) if digits[:2].lower() in ("0f", "0d") else int(digits, 0)
    if value >= 1 << 64:
        raise ValueError(f"{text} has more than 64 bits")
    return -value if negative else value


def parse(text: str) -> Module:
    """The module in `text`. Raises InputError for text that is not PTX, UnsupportedError for what is not read."""
    reader = _Reader()
    try:
        return reader.module(text)
    except OracleError:
        raise
    except (AttributeError, IndexError, KeyError, RecursionError, StopIteration, TypeError, ValueError) as error:
        raise InputError(f"PTX line {reader.line}: not PTX ({type(error).__name__}: {error})") from error


class _Reader:
    def __init__(self) -> None:
        self.result = Module()
        self.function: Function | None = None
        self.scopes: list[dict[str, str]] = []  # registers and parameters
        self.marks: list[tuple[int, dict[str, str]]] = []  # of each scope its first statement and its labels
        self.source = Source(0, 0)
        self.line = 0
        self.skip = 0  # depth of braces inside a .section

    def module(self, text: str) -> Module:
        pending, start = "", 1
        for number, raw in enumerate(text.splitlines(), 1):
            self.line = number
            line = raw.split("//", 1)[0] if '"' not in raw else raw
            if self.skip:
                self.skip += line.count("{") - line.count("}")
                continue
            if not pending.strip() and line.split()[:1] and line.split()[0] in _LINES:
                self._directive(line.split(), line)
                continue
            for piece in re.split(r"([;{}])", line):
                if not pending.strip():
                    while found := _LABEL.match(piece):
                        self._label(found[1])
                        piece = piece[found.end() :]
                    pending, start = "", number
                if piece == ";":
                    self._statement(pending.strip(), start)
                    pending = ""
                elif piece == "{" and self._opens(pending):
                    self._open(pending.strip(), start)
                    pending = ""
                elif piece == "}" and not pending.strip():
                    self._close(start)
                else:
                    pending += piece
            pending += "\n" if pending.strip() else ""
        if self.function or pending.strip():
            raise InputError(f"PTX line {start}: the text ends inside {pending.split()[:1] or 'a function'}")
        return self.result

    def _opens(self, pending: str) -> bool:
        head = pending.split(None, 1)[0] if pending.strip() else ""
        return not head or head == ".section" or re.search(r"\.(entry|func)\b", pending) is not None

    def _directive(self, words: list[str], line: str) -> None:
        if words[0] == ".loc":
            inlined = re.search(r"inlined_at\s+(\d+)\s+(\d+)", line)
            caller = (int(inlined[1]), int(inlined[2])) if inlined else None
            here = Source(int(words[1]), int(words[2]), caller)
            if caller and self._foreign(here.file):
                here = Source(*caller)
            if here.line and not self._foreign(here.file):
                self.source = here
        elif words[0] == ".file":
            self.result.files[int(words[1])] = re.findall(r'"([^"]*)"', line)[-1]
        elif words[0] == ".target":
            self.result.target = words[1].rstrip(",")

    def _foreign(self, file: int) -> bool:
        return (
            re.search(r"(cuda_\w+|sm_\d+_\w+|device_\w+|crt/\w+)\.hp?p?$", self.result.files.get(file, "")) is not None
        )

    def _label(self, name: str) -> None:
        if self.function:
            unique = name if len(self.marks) == 1 else f"{name}@{len(self.function.labels)}"
            self.marks[-1][1][name] = unique
            self.function.labels[unique] = len(self.function.statements)

    def _open(self, head: str, line: int) -> None:
        if head.startswith(".section"):
            self.skip = 1
        elif head:
            self._header(head, line)
            self.scopes, self.marks = [{}], [(0, {})]
        else:
            self.scopes.append({})
            self.marks.append((len(self.function.statements) if self.function else 0, {}))

    def _close(self, line: int) -> None:
        if not self.scopes:
            raise InputError(f"PTX line {line}: '}}' without '{{'")
        self.scopes.pop()
        first, labels = self.marks.pop()
        for statement in self.function.statements[first:] if self.function and labels else ():
            if statement.opcode.startswith("bra") and statement.operands[0] in labels:
                statement.operands[0] = labels[statement.operands[0]]
        if not self.scopes:
            self.function = None

    def _header(self, head: str, line: int) -> None:
        found = re.match(
            r"(?:\.\w+\s+)*?\.(entry|func)\s*(?:\(([^)]*)\)\s*)?([$\w]+)\s*(?:\(([^)]*)\))?(.*)", head, re.S
        )
        if not found:
            raise InputError(f"PTX line {line}: not a function: {head.split()}")
        self.function = Function(found[3], found[1] == "entry")
        self.function.results = [_variable(part, line) for part in _parts(found[2] or "")]
        self.function.params = [_variable(part, line) for part in _parts(found[4] or "")]
        if limit := re.search(r"\.(?:maxntid|reqntid)\s+([\d, ]+)", found[5]):
            self.function.max_threads = 1
            for size in limit[1].split(","):
                self.function.max_threads *= int(size)
        self.result.functions[found[3]] = self.function

    def _statement(self, text: str, line: int) -> None:
        if not text:
            return
        text = " ".join(text.split()) if "\n" in text else text  # messages that quote it have one line
        if text.startswith("."):
            self._declaration(text, line)
        elif self.function is None:
            raise InputError(f"PTX line {line}: not PTX: {text.split()[0]}")
        elif found := re.match(r"(?:@(!?)([$%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S):
            negated, guard, opcode, operands = found.groups()
            values = [self._operand(part, line) for part in _parts(operands)]
            guard = self._name(guard) if guard else None
            self.function.statements.append(Statement(line, self.source, guard, bool(negated), opcode, values))
        else:
            raise InputError(f"PTX line {line}: not an instruction: {text.split()[0]}")

    def _declaration(self, text: str, line: int) -> None:
        head = next(word for word in text.split() if word not in (".visible", ".extern", ".weak", ".common"))
        extern = ".extern" in text.split()
        function = self.function
        body = text[text.index(head) + len(head) :].strip()
        if head == ".reg" and function:
            kind, _, names = body.removeprefix(".").partition(" " if " " in body else "\t")
            for name in _parts(names):
                self._register(function, name, kind.strip())
        elif head in (".shared", ".global", ".const", ".local", ".param"):
            variable = _variable(body, line, extern)
            if head in (".global", ".const"):
                variable.constant = head == ".const"
                self.result.memory.append(variable)
            elif function is None:
                self.result.shared.append(variable)
            else:
                if head == ".param":
                    self.scopes[-1][variable.name] = variable.name = f"{variable.name}@{len(function.arguments)}"
                lists = {".shared": function.shared, ".local": function.local, ".param": function.arguments}
                lists[head].append(variable)
        elif head == ".branchtargets" and function:
            label = next(name for name, at in reversed(function.labels.items()) if at == len(function.statements))
            function.targets[label] = [part.strip() for part in body.split(",")]
        elif head not in (".pragma", ".func", ".noreturn", ".callprototype", ".maxntid", ".alias"):
            raise UnsupportedError(f"PTX line {line}: {head} is not supported by the interpreter")

    def _register(self, function: Function, name: str, kind: str) -> None:
        if kind not in SIZES:
            raise UnsupportedError(f"PTX line {self.line}: .reg .{kind} is not supported by the interpreter")
        names = [name]
        if found := re.match(r"([$%\w]+)<(\d{1,18})>$", name):
            if int(found[2]) > MOST_REGISTERS:
                raise InputError(f"{name} are more than {MOST_REGISTERS} registers")
            names = [f"{found[1]}{index}" for index in range(int(found[2]))]
        for name in names:
            unique = name if len(self.scopes) == 1 else f"{name}@{len(function.registers)}"
            self.scopes[-1][name] = unique
            function.registers[unique] = kind

    def _name(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def _operand(self, text: str, line: int) -> Any:
        if text.startswith("[") and text.endswith("]"):
            base, _, offset = (part.strip() for part in re.sub(r"\+\s*-", "+-", text[1:-1]).partition("+"))
            far = _number(offset) if offset else 0
            far -= 1 << 64 if far >= 1 << 63 else 0
            return Address(_number(base) if _NUMBER.match(base) else self._name(base), far)
        if text[0] in "{(":
            return tuple(self._operand(part, line) for part in _parts(text[1:-1]))
        if _NUMBER.match(text):
            return _number(text)
        if _DECIMAL.match(text):
            return float(text)
        if "|" in text:
            return Pair(*(self._name(part.strip()) for part in text.split("|")))
        if text.startswith("!"):
            return Negated(self._name(text[1:].strip()))
        return self._name(text)


def _parts(text: str) -> list[str]:
    """`text` cut at the commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and not depth:
            parts.append(text[begin:at].strip())
            begin = at + 1
    return [part for part in (*parts, text[begin:].strip()) if part]


def _variable(text: str, line: int, extern: bool = False) -> Variable:
    text = re.sub(r"^\.param\s+", "", text.strip())
    found = _DECLARED.match(text)
    if not found or found[4] not in SIZES:
        raise UnsupportedError(f"PTX line {line}: the declaration {' '.join(text.split())!r} is not read")
    element = SIZES[found[4]]
    count = int(found[3] or 1)
    for size in re.findall(r"\[(\d*)\]", found[6]):
        count *= int(size or 0)
    align = int(found[1] or found[2] or element * int(found[3] or 1))
    if align < 1 or align & (align - 1):
        raise InputError(f"PTX line {line}: {found[5]} is aligned to {align} bytes, expected a power of two")
    if element * count > MOST_BYTES:
        raise InputError(f"PTX line {line}: {found[5]} is {element * count} bytes, expected at most {MOST_BYTES}")
    initial = _initial(found[7], element, count, line) if found[7] else None
    return Variable(found[5], element * count, align, initial, extern)


def _initial(text: str, element: int, count: int, line: int) -> bytes:
    values = [part.strip() for part in text.strip().strip("{}").split(",") if part.strip()]
    if not all(_NUMBER.match(value) for value in values):
        raise UnsupportedError(f"PTX line {line}: an initial value that is no number is not supported")
    stored = b"".join((_number(value) % (1 << 8 * element)).to_bytes(element, "little") for value in values)
    return stored.ljust(element * count, b"\0")
