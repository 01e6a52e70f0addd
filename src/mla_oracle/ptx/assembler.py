# SPDX-License-Identifier: Apache-2.0
"""A kernel's statements -> Program: what the machine runs.

Calls are expanded where they stand. Every operand becomes a row: registers, and constants, which are immediates,
kernel parameters, special registers and addresses of variables alike. Registers share rows when they are never
needed at the same time (rows.py), so that a block's rows stay in the cache.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.ptx._opcodes import Op, Space
from mla_oracle.ptx.operations import lower
from mla_oracle.ptx.parser import SIZES, Address, Function, Module, Negated, Source, Statement, Variable
from mla_oracle.ptx.rows import share

OPERANDS = 16
# struct Instr in _block.pxd
INSTR = np.dtype(
    [(name, np.int32) for name in "op kind flags guard negated results width size count line second unused".split()]
    + [("imm", np.int64), ("operand", np.int32, OPERANDS)]
)
# enum Special in _machine.pyx
SPECIAL = "%tid.x %tid.y %tid.z %laneid %warpid %lanemask_eq %lanemask_lt %lanemask_le %lanemask_gt %lanemask_ge"
SPECIAL = [*SPECIAL.split(), "%ctaid.x", "%ctaid.y", "%ctaid.z"]
LAUNCHED = {f"%{name}.{axis}" for name in ("ntid", "nctaid") for axis in "xyz"}
LAUNCHED |= {"%nwarpid", "%dynamic_smem_size", "%total_smem_size", "%clock", "%clock64", "%smid", "%globaltimer"}


@dataclass(slots=True)
class Draft:
    """An instruction whose operands are names still."""

    op: Op
    results: tuple
    args: list[tuple]  # (operand, bytes per lane), or None: no operand in this place
    guard: str | None
    negated: bool
    width: int
    size: int
    kind: int
    flags: int
    count: int
    imm: int
    second: int
    target: str | None
    line: int
    source: Source
    opcode: str


@dataclass(slots=True)
class Program:
    """A kernel the machine can run. Constants: (row, bytes, kind, value) with kind "value", "param", "special",
    "launch" or "memory": what Interpreter.launch fills in."""

    name: str
    params: list[tuple[int, int]]  # (offset, size)
    code: np.ndarray  # [n] of INSTR
    sources: list[Source]  # of each instruction
    opcodes: list[str]
    targets: np.ndarray
    constants: list[tuple[int, int, str, int | str]]
    constant_rows: int
    rows: int
    static_shared: int
    local: int
    granule: int
    max_threads: int | None
    memory: list[Variable] = field(default_factory=list)


class Assembler:
    def __init__(self, module: Module, kernel: Function):
        self.module, self.kernel = module, kernel
        self.drafts: list[Draft] = []
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}  # of registers, bytes per lane
        self.shared: dict[str, int] = {}
        self.local: dict[str, int] = {}
        self.shared_end = self.local_end = self.calls = 0
        self.statement = Statement(0, Source(0, 0), None, False, "exit", [])
        self.tables: dict[str, list[str]] = {}
        self.frames: list[_Frame] = []
        self.params: dict[str, int] = {}
        offset = 0
        self.layout = []
        for param in kernel.params:
            offset = -(-offset // param.align) * param.align
            self.params[param.name] = offset
            self.layout.append((offset, param.size))
            offset += param.size

    def program(self) -> Program:
        for variable in (v for v in self.module.shared if not v.extern):
            self._place_shared(variable)
        self._expand(self.kernel, {})
        for name in (v.name for v in self.module.shared if v.extern):
            self.shared[name] = -1
        end = len(self.drafts)
        self.emit(Op.EXIT, (), [])
        return self._encode(end)

    # What operations.py and movement.py call.

    def emit(
        self, op: Op, results, args: list, *, width: int = 4, size: int = 0, kind: int = 0, flags: int = 0,
        count: int = 1, imm: int = 0, second: int = 0, target: str | None = None,
    ) -> None:  # fmt: skip
        """Append an instruction; an argument is an operand, of `size` bytes, or (operand, bytes)."""
        frame, s = self.frames[-1] if self.frames else None, self.statement
        size = size or width
        results = tuple(results) if isinstance(results, tuple) else (results,)
        pairs = [arg if type(arg) is tuple else (arg, size) for arg in args]
        pairs = [(self._inverse(arg), w) if isinstance(arg, Negated) else (arg, w) for arg, w in pairs]
        self.drafts.append(
            Draft(
                op, tuple(self._local_name(r) for r in results), [(self._local_name(a), w) for a, w in pairs],
                self._local_name(s.guard) if s.guard else None, s.negated, width, size, int(kind), int(flags), count,
                imm, int(second), frame.prefix + target if target and frame else target, s.line, s.source, s.opcode,
            )
        )  # fmt: skip

    def _inverse(self, operand: Negated) -> str:
        result = self.temporary(4)
        self.emit(Op.NOT_32, result, [operand.predicate])
        return result

    def emit_barrier(self, op: Op, result, operands: list, predicate: list, *, number: int, count: int, kind: int) -> None:
        """Operands in fixed places: result, number, count, predicate; a constant number or count is none."""
        places = [(o, 4) if isinstance(o, str) else (None, 4) for o in (*operands, 0, 0)][:2]
        places += [(p, 4) for p in predicate]
        self.emit(op, (result or None,), places, kind=kind, imm=number, second=count)

    def emit_return(self) -> None:
        frame = self.frames[-1]
        if frame.prefix:
            self.emit(Op.BRA, (), [], target="@end")
        else:
            self.emit(Op.EXIT, (), [])

    def temporary(self, width: int) -> str:
        name = f"@{len(self.widths)}"
        self.widths[self.frames[-1].prefix + name] = width
        return name

    def lower_as(self, s: Statement, operands: list) -> None:
        """The same instruction on other operands."""
        lower(self, Statement(s.line, s.source, s.guard, s.negated, s.opcode, operands))

    def width_of(self, operand, default: int = 0) -> int:
        """Bytes per lane of a register; `default` for anything else."""
        name = self._local_name(operand)
        return self.widths.get(name, default) if isinstance(name, str) else default

    def is_predicate(self, operand) -> bool:
        return isinstance(operand, str) and self.frames[-1].function.registers.get(operand) == "pred"

    def load_parameter(self, s: Statement, results: tuple, address: Address, kind: str) -> None:
        size = SIZES[kind]
        for index, result in enumerate(results):
            offset = address.offset + index * size
            width = self.width_of(result)
            if address.base in self.params and not self.frames[-1].prefix:
                value = _Constant("param", self.params[address.base] + offset, size)
            else:
                value = self._slot(address.base, offset, max(size, 2))
            if size == width:
                self.emit(Op[f"MOV_{8 * width}"], result, [value], width=width)
            else:
                code = 2 * size + (kind[0] == "s")
                self.emit(Op.CVT_INT, result, [(value, max(size, 2))], width=width, size=max(size, 2), kind=code, count=0)

    def store_parameter(self, s: Statement, values: tuple, address: Address, kind: str) -> None:
        size = max(SIZES[kind], 2)
        for index, value in enumerate(values):
            slot = self._slot(address.base, address.offset + index * SIZES[kind], size)
            width = self.width_of(value, size)
            if width == size:
                self.emit(Op[f"MOV_{8 * size}"], slot, [value], width=size)
            else:
                self.emit(Op.CVT_INT, slot, [(value, width)], width=size, size=width, kind=2 * min(width, size), count=0)

    def call(self, s: Statement, name: str, results: tuple, arguments: tuple) -> None:
        """Expand a device function: its parameters are the caller's .param variables."""
        function = self.module.functions.get(name)
        if name == "__assertfail":
            self.emit(Op.TRAP, (), [])
            return
        if function is None or s.guard or len(self.frames) > 16:
            raise UnsupportedError(f"PTX line {s.line}: a call of {name} is not supported by the interpreter")
        frame = self.frames[-1]
        caller = [frame.alias.get(v, frame.prefix + v) for v in (*results, *arguments)]
        own = [variable.name for variable in (*function.results, *function.params)]
        self._expand(function, dict(zip(own, caller, strict=True)))

    # Names.

    def _expand(self, function: Function, alias: dict[str, str]) -> None:
        prefix = f"{function.name}#{self.calls}:" if self.frames else ""
        self.calls += 1
        frame = _Frame(function, prefix, alias)
        for variable in function.shared:
            self._place_shared(variable)
        for variable in function.local:
            start = -(-self.local_end // variable.align) * variable.align
            self.local[prefix + variable.name] = start
            self.local_end = start + variable.size
        for register, kind in function.registers.items():
            self.widths[prefix + register] = SIZES[kind]
        self.frames.append(frame)
        at: dict[int, list[str]] = {}
        for label, index in function.labels.items():
            at.setdefault(index, []).append(label)
        self.tables |= {prefix + label: [prefix + t for t in names] for label, names in function.targets.items()}
        for index, statement in enumerate(function.statements):
            for label in at.get(index, ()):
                self.labels[prefix + label] = len(self.drafts)
            self.statement = statement
            lower(self, statement)
        for label in (*at.get(len(function.statements), ()), "@end"):
            self.labels[prefix + label] = len(self.drafts)
        self.frames.pop()

    def _place_shared(self, variable: Variable) -> None:
        if variable.extern:
            self.shared[variable.name] = -1
        elif variable.name not in self.shared:
            start = -(-self.shared_end // variable.align) * variable.align
            self.shared[variable.name] = start
            self.shared_end = start + variable.size

    def _local_name(self, operand):
        if not isinstance(operand, str) or operand == "_":
            return operand
        frame = self.frames[-1] if self.frames else None
        if frame and frame.prefix + operand in self.widths:
            return frame.prefix + operand
        if frame and frame.prefix + operand in self.local:
            return _Constant("value", self.local[frame.prefix + operand], 8)
        return operand

    def _slot(self, variable: str, offset: int, size: int) -> str:
        """The register that stands for bytes of a .param variable."""
        frame = self.frames[-1]
        name = f"{frame.alias.get(variable, frame.prefix + variable)}+{offset}"
        if self.widths.setdefault(name, size) != size:
            raise UnsupportedError(f"PTX line {self.statement.line}: {variable} is accessed with two widths")
        return _Slot(name)

    # Rows.

    def _encode(self, end: int) -> Program:
        constants: dict[tuple, int] = {}
        dynamic = max([16, *(v.align for v in self.module.shared if v.extern)])
        static = -(-self.shared_end // dynamic) * dynamic if -1 in self.shared.values() else self.shared_end
        values = [[self._constant(arg, width, static) for arg, width in draft.args] for draft in self.drafts]
        rows = 0
        for draft, row in zip(self.drafts, values, strict=True):
            for key in row:
                if isinstance(key, tuple) and key not in constants:
                    constants[key] = rows
                    rows += 2 if key[0] == 8 else 1
        constant_rows = rows
        registers, rows = share(self.drafts, self._successors(end), self.widths, constant_rows)
        code = np.zeros(len(self.drafts), INSTR)
        targets: list[int] = []
        code["guard"], code["operand"] = -1, -1
        for index, (draft, row) in enumerate(zip(self.drafts, values, strict=True)):
            item = code[index]
            for name in "op kind flags negated width size count line second imm".split():
                item[name] = getattr(draft, name)
            item["results"] = len([r for r in draft.results if r is not None])
            if draft.guard:
                item["guard"] = registers[draft.guard]
            operands = [registers[r] if isinstance(r, str) and r != "_" else -1 for r in draft.results]
            operands += [constants[v] if isinstance(v, tuple) else -1 if v is None else registers[v] for v in row]
            item["operand"][: len(operands)] = operands
            if draft.op == Op.BRA:
                item["imm"] = self._label(draft.target, draft.line)
            elif draft.op == Op.BRX:
                table = self.tables[draft.target]
                item["imm"], item["second"] = len(targets), len(table)
                targets += [self._label(name, draft.line) for name in table]
        return Program(
            self.kernel.name, self.layout, code, [d.source for d in self.drafts], [d.opcode for d in self.drafts], np.array(targets, np.int32),
            [(row, key[0], key[1], key[2]) for key, row in constants.items()], constant_rows, rows, static,
            self.local_end, self._granule(), self.kernel.max_threads, self.module.memory,
        )  # fmt: skip

    def _constant(self, operand, width: int, static: int):
        """A register's name, None, or a constant as (bytes, kind, value)."""
        if operand is None or (isinstance(operand, str) and operand in self.widths):
            return operand
        if isinstance(operand, _Constant):
            return (width, operand.kind, operand.value if operand.kind == "value" else (operand.value, operand.size))
        if isinstance(operand, float):
            operand = int.from_bytes(struct.pack({4: "<f", 8: "<d"}[width], operand), "little")
        if isinstance(operand, int):
            return (width, "value", operand % (1 << 8 * width))
        if operand in SPECIAL:
            return (width, "special", SPECIAL.index(operand))
        if operand in LAUNCHED:
            return (width, "launch", operand)
        if operand in self.shared:
            return (width, "value", self.shared[operand] if self.shared[operand] >= 0 else static)
        if any(v.name == operand for v in self.module.memory):
            return (width, "memory", operand)
        if operand in self.params:
            raise UnsupportedError(f"{self.kernel.name}: the address of a kernel parameter is not supported")
        raise InputError(f"{self.kernel.name}: {operand} is not declared")

    def _label(self, name: str, line: int) -> int:
        if name not in self.labels:
            raise InputError(f"PTX line {line}: no label {name}")
        return self.labels[name]

    def _successors(self, end: int) -> list[list[int]]:
        result = []
        for index, draft in enumerate(self.drafts):
            following = [index + 1] if index < end else []
            if draft.op == Op.BRA:
                result.append([self._label(draft.target, draft.line), *(following if draft.guard else [])])
            elif draft.op == Op.BRX:
                result.append([self._label(n, draft.line) for n in self.tables[draft.target]] + following)
            elif draft.op == Op.EXIT and not draft.guard:
                result.append([])
            else:
                result.append(following)
        return result

    def _granule(self) -> int:
        """The bytes of the smallest access that may touch shared memory: 1, 2 or 4."""
        sizes = [
            d.size for d in self.drafts
            if d.op in (Op.LOAD, Op.STORE, Op.ATOM, Op.RED) and d.kind in (Space.SHARED, Space.GENERIC)
        ]  # fmt: skip
        return min([4, *sizes])


@dataclass(slots=True)
class _Frame:
    """A function being expanded."""

    function: Function
    prefix: str
    alias: dict[str, str]  # its .param variables -> the caller's, by full name


class _Slot(str):
    """A register's name that is complete already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Constant:
    kind: str
    value: int
    size: int


def assemble(module: Module, name: str) -> Program:
    """The kernel `name` of `module`. Raises InputError if there is none, UnsupportedError for what it cannot run."""
    import mla_oracle.ptx.movement  # noqa: F401  registers its instructions

    kernel = module.functions.get(name)
    if kernel is None or not kernel.entry:
        kernels = ", ".join(f.name for f in module.functions.values() if f.entry)
        raise InputError(f"there is no kernel {name}, the module has {kernels or 'none'}")
    return Assembler(module, kernel).program()
