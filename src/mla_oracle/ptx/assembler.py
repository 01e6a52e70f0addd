# SPDX-License-Identifier: Apache-2.0
"""A kernel's statements -> Program.

operations.py and movement.py say what a statement does, by calling `emit`. Calls are expanded where they stand, each
with registers and labels of its own, which begin with its prefix. An operand is a register or a constant: immediates,
kernel parameters, special registers and addresses of variables are constants alike.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.ptx._opcodes import Op
from mla_oracle.ptx.encoder import Labels, asynchronous, encode, granule
from mla_oracle.ptx.operations import lower
from mla_oracle.ptx.program import LAUNCHED, SPECIAL, Constant, Draft, Program
from mla_oracle.ptx.syntax import SIZES, Address, Function, Module, Negated, Source, Statement, Variable

DEEPEST = 16  # calls within calls


@dataclass(slots=True)
class _Frame:
    """A function being expanded."""

    function: Function
    prefix: str
    alias: dict[str, str]  # its .param variables -> the caller's, by full name


class _Slot(str):
    """A register's name that is complete already."""

    __slots__ = ()


class Assembler:
    def __init__(self, module: Module, kernel: Function):
        self.module, self.kernel = module, kernel
        self.drafts: list[Draft] = []
        self.labels = Labels()
        self.widths: dict[str, int] = {}  # of registers, bytes per lane
        self.shared = {variable.name: variable for variable in _shared(module, kernel)}
        self.shared_at: dict[str, int] = {}  # where those that are used lie
        self.local: dict[str, int] = {}
        self.memory = {variable.name for variable in module.memory}
        self.shared_end = self.local_end = self.expanded = 0
        self.dynamic_align = 1
        self.frame = _Frame(kernel, "", {})
        self.depth = 0
        self.statement = Statement(0, Source(0, 0), None, False, "exit", [])
        self.params: dict[str, int] = {}
        self.layout: list[tuple[int, int]] = []
        offset = 0
        for param in kernel.params:
            offset = _aligned(offset, param.align)
            self.params[param.name] = offset
            self.layout.append((offset, param.size))
            offset += param.size

    def program(self) -> Program:
        self._expand(self.frame)
        self.statement = Statement(self.statement.line, self.statement.source, None, False, "exit", [])
        self.emit(Op.EXIT, [], [])
        self.shared_end = _aligned(self.shared_end, self.dynamic_align)
        code, targets, constants, taken, rows = encode(self.drafts, self.labels, self.widths)
        return Program(
            self.kernel.name, self.layout, code, [d.source for d in self.drafts], [d.opcode for d in self.drafts],
            targets, constants, taken, rows, self.shared_end, self.local_end, granule(self.drafts),
            self.kernel.max_threads, self.module.memory, asynchronous(self.drafts),
        )  # fmt: skip

    def emit(
        self, op: int, results: Any, args: Sequence[Any], *, width: int = 4, size: int = 0, kind: int = 0,
        flags: int = 0, count: int = 1, imm: int = 0, second: int = 0, target: str | None = None,
        accumulators: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Append an instruction. `results`: one or several; an argument is an operand of `size` bytes per lane, or
        (operand, bytes); accumulators have 4."""
        size = size or width
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        pairs = [arg if type(arg) is tuple else (arg, size) for arg in args]
        operands = [self._operand(arg, bytes_) for arg, bytes_ in pairs]
        s = self.statement
        for operand, (_, bytes_) in zip(operands, pairs, strict=True):
            if isinstance(operand, str):
                self._holds(operand, bytes_)
        for result in results:
            if result not in (None, "_"):
                self._holds(self._full(result), width)
        for register in accumulators:
            self._holds(self._full(register), 4)
        if s.guard:
            self._holds(self._full(s.guard), 1)
        self.drafts.append(
            Draft(
                op, [None if r in (None, "_") else self._full(r) for r in results], operands,
                self._full(s.guard) if s.guard else None, s.negated, width, size, int(kind), int(flags), count, imm,
                int(second), self.frame.prefix + target if target else None, s.line, s.source, s.opcode,
                [self._full(register) for register in accumulators],
            )
        )  # fmt: skip

    def emit_barrier(self, op: int, result: Any, places: list[Any], *, kind: int, imm: int, second: int) -> None:
        """Operands in fixed places: result, number, count, predicate."""
        self.emit(op, [result], [(place, 4) for place in places], kind=kind, imm=imm, second=second)

    def emit_return(self) -> None:
        if self.frame.prefix:
            self.emit(Op.BRA, [], [], target="@end")
        else:
            self.emit(Op.EXIT, [], [])

    def temporary(self, width: int) -> str:
        name = _Slot(f"@{len(self.widths)}")
        self.widths[name] = width
        return name

    def lower_as(self, s: Statement, operands: list[Any]) -> None:
        """The same instruction on other operands."""
        lower(self, Statement(s.line, s.source, s.guard, s.negated, s.opcode, operands))

    def width_of(self, operand: Any, default: int = 0) -> int:
        """Bytes per lane of a register; `default` for anything else."""
        return self.widths.get(self._full(operand), default) if isinstance(operand, str) else default

    def is_predicate(self, operand: Any) -> bool:
        return isinstance(operand, str) and self.frame.function.registers.get(operand) == "pred"

    def load_parameter(self, results: Sequence[str], address: Address, kind: str) -> None:
        size = SIZES[kind]
        for index, result in enumerate(results):
            offset = address.offset + index * size
            width, stored = self.width_of(result), max(size, 2)
            value: Any = self._slot(address.base, offset, stored)
            if not self.frame.prefix and address.base in self.params:
                value = Constant(stored, "param", self.params[str(address.base)] + offset, size)
            if size == width:
                self.emit(Op[f"MOV_{8 * width}"], result, [value], width=width)
            else:
                code = 2 * size + (kind[0] == "s")
                self.emit(Op.CVT_INT, result, [value], width=width, size=stored, kind=code, count=0)

    def store_parameter(self, values: Sequence[Any], address: Address, kind: str) -> None:
        size = max(SIZES[kind], 2)
        for index, value in enumerate(values):
            slot = self._slot(address.base, address.offset + index * SIZES[kind], size)
            width = self.width_of(value, size)
            if width == size:
                self.emit(Op[f"MOV_{8 * size}"], slot, [value], width=size)
            else:
                self.emit(Op.CVT_INT, slot, [value], width=size, size=width, kind=2 * min(width, size), count=0)

    def call(self, s: Statement, name: str, results: Sequence[str], arguments: Sequence[str]) -> None:
        """Expand a device function: its parameters are the caller's .param variables."""
        function = self.module.functions.get(name)
        if name == "__assertfail":
            self.emit(Op.TRAP, [], [])
            return
        if function is None or s.guard or self.depth >= DEEPEST:
            raise UnsupportedError(f"PTX line {s.line}: a call of {name} is not supported by the interpreter")
        caller, self.expanded = self.frame, self.expanded + 1
        passed = [caller.alias.get(v, caller.prefix + v) for v in (*results, *arguments)]
        own = [variable.name for variable in (*function.results, *function.params)]
        self.frame = _Frame(function, f"{function.name}#{self.expanded}:", dict(zip(own, passed, strict=True)))
        self.depth += 1
        self._expand(self.frame)
        self.frame, self.depth = caller, self.depth - 1

    def _expand(self, frame: _Frame) -> None:
        function, prefix = frame.function, frame.prefix
        for variable in function.local:
            self.local[prefix + variable.name] = _aligned(self.local_end, variable.align)
            self.local_end = self.local[prefix + variable.name] + variable.size
        self.widths |= {prefix + register: SIZES[kind] for register, kind in function.registers.items()}
        at: dict[int, list[str]] = {}
        for label, index in function.labels.items():
            at.setdefault(index, []).append(label)
        for label, names in function.targets.items():
            self.labels.tables[prefix + label] = [prefix + name for name in names]
        for index, statement in enumerate(function.statements):
            self._place(prefix, at.get(index, []))
            self.statement = statement
            lower(self, statement)
        self._place(prefix, [*at.get(len(function.statements), []), "@end"])

    def _place(self, prefix: str, labels: list[str]) -> None:
        for label in labels:
            self.labels.positions[prefix + label] = len(self.drafts)

    def _full(self, name: str) -> str:
        """A register's name among all functions."""
        return name if isinstance(name, _Slot) else self.frame.prefix + name

    def _slot(self, variable: str | int, offset: int, size: int) -> str:
        """The register that stands for bytes of a .param variable."""
        variable = str(variable)
        name = _Slot(f"{self.frame.alias.get(variable, self.frame.prefix + variable)}+{offset}")
        if self.widths.setdefault(name, size) != size:
            raise UnsupportedError(f"PTX line {self.statement.line}: {variable} is accessed with two widths")
        return name

    def _holds(self, register: str, width: int) -> None:
        """Raise InputError for a register that is not declared, or has fewer than `width` bytes."""
        s, name = self.statement, register.rpartition(":")[2]
        if register not in self.widths:
            raise InputError(f"PTX line {s.line}: register {name} of {s.opcode} is not declared")
        if self.widths[register] < width:
            held = 8 * self.widths[register]
            raise InputError(f"PTX line {s.line}: register {name} of {s.opcode} has {held} bits, expected {8 * width}")

    def _operand(self, operand: Any, width: int) -> str | Constant | None:
        """A register's full name, or a constant of `width` bytes."""
        if operand is None or isinstance(operand, Constant):
            return operand
        if isinstance(operand, Negated):
            result = self.temporary(4)
            self.emit(Op.NOT_32, result, [operand.predicate])
            return result
        if isinstance(operand, float):
            operand = int.from_bytes(struct.pack({4: "<f", 8: "<d"}[width], operand), "little")
        if isinstance(operand, int):
            return Constant(width, "value", operand % (1 << 8 * width))
        full = self._full(operand)
        if full in self.widths:
            return full
        if full in self.local:
            return Constant(width, "value", self.local[full])
        if operand in self.shared:
            return self._shared_address(self.shared[operand], width)
        if operand in self.memory:
            return Constant(width, "memory", operand)
        if operand in SPECIAL:
            return Constant(width, "special", SPECIAL.index(operand))
        if operand in LAUNCHED:
            return Constant(width, "launch", operand)
        if operand in self.params or operand.startswith("%"):
            raise UnsupportedError(f"PTX line {self.statement.line}: {operand} is not supported by the interpreter")
        raise InputError(f"PTX line {self.statement.line}: {operand} is not declared")

    def _shared_address(self, variable: Variable, width: int) -> Constant:
        """Variables lie in the order in which they are first used; the dynamic ones begin where those end."""
        if variable.extern:
            self.dynamic_align = max(self.dynamic_align, variable.align, 16)
            return Constant(width, "dynamic", 0)
        if variable.name not in self.shared_at:
            self.shared_at[variable.name] = _aligned(self.shared_end, variable.align)
            self.shared_end = self.shared_at[variable.name] + variable.size
        return Constant(width, "value", self.shared_at[variable.name])


def _shared(module: Module, kernel: Function) -> list[Variable]:
    """The variables in shared memory that a kernel may name."""
    functions = [function for function in module.functions.values() if not function.entry]
    return [*module.shared, *kernel.shared, *(v for function in functions for v in function.shared)]


def _aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align


def assemble(module: Module, name: str) -> Program:
    """The kernel `name` of `module`. Raises InputError if there is none, UnsupportedError for what it cannot run."""
    from mla_oracle.ptx import bulk, conversions, mbarriers, movement, warpgroup  # noqa: F401  they register their instructions

    kernel = module.functions.get(name)
    if kernel is None or not kernel.entry:
        kernels = ", ".join(f.name for f in module.functions.values() if f.entry)
        raise InputError(f"there is no kernel {name}, the module has {kernels or 'none'}")
    return Assembler(module, kernel).program()
