# SPDX-License-Identifier: Apache-2.0
"""mov, cvta and cvt, in the manner of operations.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_oracle.ptx._opcodes import Op
from mla_oracle.ptx.operations import HALF, PAIRS8, flags_of, handles, unsupported
from mla_oracle.ptx.syntax import SIZES, Pair, Statement

if TYPE_CHECKING:
    from mla_oracle.ptx.assembler import Assembler


@handles("mov")
def move(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    (kind,) = modifiers
    width = SIZES[kind]
    target, value = s.operands
    if isinstance(target, tuple) and not isinstance(target, Pair):
        part = width // len(target)
        for index, result in enumerate(target):
            if result != "_":
                op = Op[f"UNPACK_{len(target)}X{8 * part}"]
                asm.emit(op, result, [(value, width)], width=part, size=width, kind=index)
    elif isinstance(value, tuple):
        part = width // len(value)
        asm.emit(Op[f"PACK_{len(value)}X{8 * part}"], target, [(v, part) for v in value], width=width, size=part)
    else:
        asm.emit(Op[f"MOV_{8 * width}"], target, [value], width=width)


@handles("cvta")
def address_space(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    to = modifiers[0] == "to"
    space = modifiers[1 if to else 0].split("::")[0]
    if space in ("global", "const", "param"):
        asm.emit(Op.MOV_64, s.operands[0], s.operands[1:], width=8)
    else:
        base = {"shared": 1 << 40, "local": 1 << 41}[space]
        asm.emit(Op.SUB_64 if to else Op.ADD_64, s.operands[0], [s.operands[1], base], width=8)


@handles("cvt")
def convert(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    *modifiers, to, source = modifiers
    result, *args = s.operands
    if to in PAIRS8 and source == "f32":
        flags = flags_of(s, modifiers, "rn satfinite relu")
        asm.emit(Op.CVT_2E_2F32, result, args, width=2, size=4, kind=PAIRS8[to], flags=flags)
    elif source in PAIRS8 and to == "f16x2":
        flags_of(s, modifiers, "rn")
        asm.emit(Op.CVT_2F16_2E, result, args, width=4, size=2, kind=PAIRS8[source])
    elif to in ("f16x2", "bf16x2"):
        flags = flags_of(s, modifiers, "rn rz relu satfinite")
        asm.emit(Op.CVT_2H_2F32, result, {"f32": args}[source], kind=HALF[to], flags=flags)
    elif to[0] in "us" and source[0] in "us":
        flags_of(s, modifiers, "sat")
        code = _code(to) if modifiers and _code(to) != _code(source) else 0
        width, size = asm.width_of(result), asm.width_of(args[0], SIZES[source])
        asm.emit(Op.CVT_INT, result, args, width=width, size=size, kind=_code(source), count=code)
        if SIZES[to] < width:
            asm.emit(Op.CVT_INT, result, [result], width=width, kind=_code(to), count=0)
    elif to[0] in "us":
        _to_integer(asm, s, modifiers, to, source)
    elif source[0] in "us":
        _from_integer(asm, s, modifiers, to, source)
    else:
        _between_floats(asm, s, modifiers, to, source)


def _code(kind: str) -> int:
    """An integer type as the machine has it: twice its bytes, one more if signed."""
    return 2 * SIZES[kind] + (kind[0] == "s")


def _to_integer(asm: Assembler, s: Statement, modifiers: list[str], to: str, source: str) -> None:
    integral = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
    flags = flags_of(s, [integral.get(m, m) for m in modifiers], "rn rz rm rp ftz sat") & 3
    result, value = s.operands
    if source in HALF:
        value = asm.temporary(4)
        asm.emit(Op.CVT_F32_H, value, [(s.operands[1], 2)], size=2, kind=HALF[source])
        source = "f32"
    asm.emit(
        Op.CVT_INT_FLOAT, result, [(value, SIZES[source])], width=asm.width_of(result), size=SIZES[source],
        kind=_code(to), flags=flags,
    )  # fmt: skip


def _from_integer(asm: Assembler, s: Statement, modifiers: list[str], to: str, source: str) -> None:
    flags = flags_of(s, modifiers, "rn rz rm rp")
    result, value = s.operands
    size = asm.width_of(value, SIZES[source])
    if to in HALF:
        exact = asm.temporary(8)
        asm.emit(Op.CVT_FLOAT_INT, exact, [(value, size)], width=8, size=size, kind=_code(source))
        asm.emit(Op.CVT_H_F64, result, [(exact, 8)], width=2, size=8, kind=HALF[to], flags=flags)
    elif (to, source, flags, size) == ("f32", "s32", 0, 4):
        asm.emit(Op.CVT_F32_S32, result, [value])
    else:
        asm.emit(Op.CVT_FLOAT_INT, result, [(value, size)], width=SIZES[to], size=size, kind=_code(source), flags=flags)


def _between_floats(asm: Assembler, s: Statement, modifiers: list[str], to: str, source: str) -> None:
    result, value = s.operands
    integral = [m for m in modifiers if m in ("rni", "rzi", "rmi", "rpi")]
    flags = flags_of(s, [m[:2] if m in integral else m for m in modifiers], "rn rz rm rp ftz sat relu satfinite")
    if to in HALF and source in ("f32", "f64"):
        op = Op[f"CVT_H_{source.upper()}"]
        asm.emit(op, result, [(value, SIZES[source])], width=2, size=SIZES[source], kind=HALF[to], flags=flags & ~4)
    elif source in HALF and to in ("f32", "f64"):
        asm.emit(Op[f"CVT_{to.upper()}_H"], result, [(value, 2)], width=SIZES[to], size=2, kind=HALF[source])
    elif to == source and integral:
        asm.emit(Op[f"CVT_ROUND_{to.upper()}"], result, [value], width=SIZES[to], flags=flags)
    elif to == source and to in ("f32", "f64"):
        asm.emit(Op.MOV_64 if to == "f64" else Op.MUL_F32, result, [value, 0x3F800000], width=SIZES[to], flags=flags)
    elif (to, source) in (("f32", "f64"), ("f64", "f32")):
        flags &= ~4 if to == "f64" else ~0
        asm.emit(Op[f"CVT_{to.upper()}_{source.upper()}"], result, [(value, SIZES[source])], width=SIZES[to],
                 size=SIZES[source], flags=flags)  # fmt: skip
    else:
        raise unsupported(s)
