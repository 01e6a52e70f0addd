# SPDX-License-Identifier: Apache-2.0
"""The rest of operations.py: memory, warps, tensor cores, barriers, branches and calls.

What only steers caches or the memory model is dropped: the interpreter has no caches, and orders shared memory by
barriers, mbarriers and fence.proxy.async alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_oracle.ptx._opcodes import Atomic, Op, Space
from mla_oracle.ptx.operations import HANDLERS, handles, typed, unsupported
from mla_oracle.ptx.syntax import SIZES, Address, Pair, Statement

if TYPE_CHECKING:
    from mla_oracle.ptx.assembler import Assembler

WIDE_ADDRESS, SIGNED, WIDE_SHARED = 1, 2, 4
SPACES = {
    "global": Space.GLOBAL, "const": Space.GLOBAL, "shared": Space.SHARED, "shared::cta": Space.SHARED,
    "local": Space.LOCAL,
}  # fmt: skip
IGNORED = {
    "volatile", "relaxed", "acquire", "release", "acq_rel", "weak", "gpu", "cta", "sys", "nc", "noftz",
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "unified",
}  # fmt: skip


def _access(s: Statement, modifiers: list[str]) -> tuple[int, int, str]:
    """The space, elements per lane and type of a load, store or atomic."""
    modifiers, kind = typed(modifiers)
    space, count = Space.GENERIC, 1
    for modifier in modifiers:
        if modifier in SPACES:
            space = SPACES[modifier]
        elif modifier in ("v2", "v4", "v8"):
            count = int(modifier[1])
        elif modifier not in IGNORED and not modifier.startswith(("L1::", "L2::")):
            raise unsupported(s)
    return space, count, kind


def address_of(asm: Assembler, address: Address) -> tuple[tuple[str | int, int], int, int]:
    """(operand and its width, the offset, WIDE_ADDRESS or 0)."""
    wide = asm.width_of(address.base, 8) == 8
    return (address.base, 8 if wide else 4), address.offset, WIDE_ADDRESS if wide else 0


@handles("ld", "ldu")
def load(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    result, address = s.operands[:2]
    results = result if isinstance(result, tuple) else (result,)
    if modifiers[0] == "param" or modifiers[0].startswith("param::"):
        asm.load_parameter(results, address, typed(modifiers)[1])
        return
    space, count, kind = _access(s, modifiers)
    base, offset, flags = address_of(asm, address)
    width = max(SIZES[kind], *(asm.width_of(r) for r in results if r != "_"))
    if kind[0] == "s" and SIZES[kind] < width:
        flags |= SIGNED
    asm.emit(Op.LOAD, results, [base], kind=space, width=width, size=SIZES[kind], count=count, imm=offset, flags=flags)


@handles("st")
def store(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    address, value = s.operands[:2]
    values = value if isinstance(value, tuple) else (value,)
    if modifiers[0] == "param" or modifiers[0].startswith("param::"):
        asm.store_parameter(values, address, typed(modifiers)[1])
        return
    space, count, kind = _access(s, modifiers)
    base, offset, flags = address_of(asm, address)
    size = SIZES[kind]
    width = max(asm.width_of(v, max(size, 2)) for v in values)
    asm.emit(
        Op.STORE, (), [base, *((v, width) for v in values)], kind=space, width=width, size=size, count=count,
        imm=offset, flags=flags,
    )  # fmt: skip


@handles("atom", "red")
def atomic(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    names = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}
    (name,) = (m for m in modifiers if m in names)
    space, count, kind = _access(s, [m for m in modifiers if m != name])
    size = SIZES[kind]
    if count != 1 or size not in (4, 8) or (kind[0] == "f" and name not in ("add", "exch")) or kind == "f16x2":
        raise unsupported(s)
    operands = list(s.operands)
    results = (operands.pop(0),) if s.opcode.startswith("atom") else ()
    base, offset, flags = address_of(asm, operands.pop(0))
    suffix = "_F" if kind[0] == "f" and name == "add" else ""
    if name in ("min", "max"):
        suffix = "_S" if kind[0] == "s" else "_U"
    asm.emit(
        Op.ATOM if results else Op.RED, results, [base, *((v, size) for v in operands)], kind=space, width=size,
        size=size, imm=offset, flags=flags, second=Atomic[f"ATOM_{name.upper()}{suffix}"],
    )  # fmt: skip


@handles("cp")
def copy(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    if modifiers[:1] != ["async"]:
        raise unsupported(s)
    rest = modifiers[1:]
    if rest[:2] == ["mbarrier", "arrive"]:
        HANDLERS["mbarrier"](asm, s, ["copies", *rest[2:]])
    elif rest[:1] == ["bulk"]:
        HANDLERS["bulk"](asm, s, rest[1:])
    elif rest == ["commit_group"]:
        asm.emit(Op.CP_COMMIT, (), [])
    elif rest == ["wait_group"]:
        asm.emit(Op.CP_WAIT_GROUP, (), [], imm=s.operands[0])
    elif rest == ["wait_all"]:
        asm.emit(Op.CP_WAIT_ALL, (), [])
    elif rest[0] in ("ca", "cg") and rest[1] in ("shared", "shared::cta") and rest[2] == "global":
        hinted = "L2::cache_hint" in rest
        shared, source, size, *more = s.operands
        if len(more) > 1 + hinted or (more and asm.is_predicate(more[0])):
            raise unsupported(s)
        target, offset, wide = address_of(asm, shared)
        base, imm, _ = address_of(asm, source)
        sizes = [(more[0], 4)] if len(more) > hinted else []
        asm.emit(
            Op.CP_ASYNC, (), [target, base, *sizes], size=size, imm=imm, second=offset, width=4,
            flags=WIDE_SHARED if wide else 0,
        )  # fmt: skip
    else:
        raise unsupported(s)


@handles("ldmatrix", "stmatrix")
def matrices(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    if not set(modifiers) <= known or not {"m8n8", "b16"} <= set(modifiers):
        raise unsupported(s)
    loading = s.opcode.startswith("ld")
    registers, address = s.operands if loading else s.operands[::-1]
    registers = registers if isinstance(registers, tuple) else (registers,)
    base, offset, flags = address_of(asm, address)
    op = Op[f"{s.opcode[:2].upper()}MATRIX{'_TRANS' if 'trans' in modifiers else ''}"]
    if len(registers) != next(int(m[1]) for m in modifiers if m in ("x1", "x2", "x4")):
        raise unsupported(s)
    args = [base] if loading else [base, *((r, 4) for r in registers)]
    asm.emit(op, registers if loading else (), args, count=len(registers), imm=offset, flags=flags)


@handles("mma", "movmatrix")
def multiply(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    if s.opcode == "movmatrix.sync.aligned.m8n8.trans.b16":
        asm.emit(Op.MOVMATRIX, s.operands[0], s.operands[1:])
        return
    shape, types = ["sync", "aligned", "m16n8k16", "row", "col", "f32"], modifiers[6:]
    if modifiers[:6] != shape or types not in (["f16", "f16", "f32"], ["bf16", "bf16", "f32"]):
        raise unsupported(s)
    d, a, b, c = s.operands
    if [len(part) for part in (d, a, b, c)] != [4, 4, 2, 4]:
        raise unsupported(s)
    asm.emit(Op.MMA_F16 if types[0] == "f16" else Op.MMA_BF16, d, [*a, *b, *c])


@handles("shfl", "vote", "redux", "activemask", "elect", "match")
def warp(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    base = s.opcode.split(".")[0]
    result, *args = s.operands
    results = tuple(result) if isinstance(result, Pair) else (result,)
    results = tuple(asm.temporary(4) if name == "_" else name for name in results)
    if base == "activemask":
        asm.emit(Op.ACTIVEMASK, results, [])
        return
    if base == "match" and modifiers in (["any", "sync", "b32"], ["all", "sync", "b32"]):
        asm.emit(Op[f"MATCH_{modifiers[0].upper()}"], results, args)
    elif modifiers[0] != "sync":
        raise unsupported(s)
    elif base == "shfl" and modifiers[2:] == ["b32"]:
        asm.emit(Op[f"SHFL_{modifiers[1].upper()}"], results, args)
    elif base == "vote" and modifiers[1:] == ["ballot", "b32"]:
        asm.emit(Op.BALLOT, results, args)
    elif base == "vote" and modifiers[2:] == ["pred"]:
        asm.emit(Op[f"VOTE_{modifiers[1].upper()}"], results, args)
    elif base == "redux" and modifiers[1] in ("add", "and", "or", "xor") and modifiers[2][1:] == "32":
        asm.emit(Op[f"REDUX_{modifiers[1].upper()}"], results, args)
    elif base == "redux" and modifiers[1] in ("min", "max") and modifiers[2] in ("s32", "u32"):
        asm.emit(Op[f"REDUX_{modifiers[1].upper()}_{modifiers[2][0].upper()}"], results, args)
    elif base == "elect":
        asm.emit(Op.ELECT, results, args)
    else:
        raise unsupported(s)


@handles("bar", "barrier")
def barrier(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    modifiers = [m for m in modifiers if m != "cta"]
    if modifiers == ["warp", "sync"]:
        asm.emit(Op.BAR_WARP, (), s.operands)
        return
    aligned = s.opcode.startswith("bar.") or "aligned" in modifiers
    modifiers = [m for m in modifiers if m != "aligned"]
    result: Any = None
    operands, predicate = list(s.operands), []
    if modifiers == ["sync"]:
        op = Op.BAR_SYNC
    elif modifiers == ["arrive"] and len(operands) == 2:
        op = Op.BAR_ARRIVE
    elif modifiers[0] == "red" and modifiers[2] in ("u32", "pred"):
        op = Op[f"BAR_RED_{modifiers[1].upper()}"]
        result, predicate = operands.pop(0), [operands.pop()]
    else:
        raise unsupported(s)
    operands = [*operands, 0, 0][:2]
    number, count = (value if isinstance(value, int) else 0 for value in operands)
    places = [None if isinstance(value, int) else value for value in operands]
    asm.emit_barrier(op, result, [*places, *predicate], kind=int(not aligned), imm=number, second=count)


@handles("bra", "brx", "ret", "exit", "trap", "brkpt")
def branch(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    base = s.opcode.split(".")[0]
    if base == "bra":
        asm.emit(Op.BRA, (), [], target=s.operands[0])
    elif base == "brx":
        asm.emit(Op.BRX, (), s.operands[:1], target=s.operands[1])
    elif base == "ret":
        asm.emit_return()
    else:
        asm.emit(Op.EXIT if base == "exit" else Op.TRAP, (), [])


@handles("call")
def call(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    parts = list(s.operands)
    results = parts.pop(0) if isinstance(parts[0], tuple) else ()
    asm.call(s, parts[0], results, parts[1] if len(parts) > 1 else ())


@handles("fence")
def fence(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    """Of fences, the interpreter knows those between shared memory's proxies."""
    crosses = modifiers[:1] == ["proxy"] and modifiers[1].startswith("async") and "global" not in modifiers
    asm.emit(Op.FENCE_ASYNC if crosses else Op.FENCE, (), [])


@handles("membar", "prefetch", "prefetchu", "nanosleep", "pmevent", "griddepcontrol", "discard")
def nothing(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    asm.emit(Op.FENCE, (), [])


@handles("createpolicy")
def policy(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    asm.emit(Op.MOV_64, s.operands[0], [0], width=8)
