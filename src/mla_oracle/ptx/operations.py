# SPDX-License-Identifier: Apache-2.0
"""One PTX instruction -> the machine's operations: `lower(assembler, statement)`.

One function per family of instructions, found by the opcode's first word. Each takes the modifiers it knows and
refuses the rest: an instruction that is not fully understood is an UnsupportedError, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.ptx._opcodes import Format, Op
from mla_oracle.ptx.syntax import SIZES, Pair, Statement

if TYPE_CHECKING:
    from mla_oracle.ptx.assembler import Assembler

Handler = Callable[["Assembler", Statement, list[str]], None]
HANDLERS: dict[str, Handler] = {}

ROUNDING = {"rn": 0, "rz": 1, "rm": 2, "rp": 3}
FLAGS = ROUNDING | {"ftz": 4, "sat": 8, "NaN": 32, "relu": 64, "satfinite": 128}
INVERT, INVERT_INTEGER = 16, 1
HALF = {"f16": Format.F16, "f16x2": Format.F16, "bf16": Format.BF16, "bf16x2": Format.BF16}
PAIRS8 = {"e4m3x2": Format.E4M3, "e5m2x2": Format.E5M2}
TYPES = {*SIZES, *HALF, *PAIRS8, "f32x2"}


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def lower(asm: Assembler, s: Statement) -> None:
    """Emit what `s` does. Raises UnsupportedError, which names the instruction and its line."""
    base, *modifiers = s.opcode.split(".")
    handler = HANDLERS.get(base)
    if handler is None:
        raise unsupported(s)
    try:
        handler(asm, s, modifiers)
    except InputError:
        raise
    except (IndexError, KeyError, AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedError(f"{unsupported(s)} ({type(error).__name__}: {error})") from error


def unsupported(s: Statement) -> UnsupportedError:
    return UnsupportedError(f"PTX line {s.line}: {s.opcode} is not supported by the interpreter")


def flags_of(s: Statement, modifiers: list[str], known: str) -> int:
    """The flags of the modifiers, all of which must be among `known`."""
    if not set(modifiers) <= set(known.split()):
        raise unsupported(s)
    return sum(FLAGS.get(modifier, 0) for modifier in modifiers)


def typed(modifiers: list[str]) -> tuple[list[str], str]:
    """The modifiers without the type they end in, and that type."""
    if modifiers[-1] not in TYPES:
        raise KeyError(modifiers[-1])
    return modifiers[:-1], modifiers[-1]


def half(asm: Assembler, s: Statement, name: str, kind: str, flags: int) -> None:
    width = 4 if kind.endswith("x2") else 2
    asm.emit(
        Op[f"{name}_H"], s.operands[0], s.operands[1:], width=width, kind=HALF[kind], count=width // 2, flags=flags
    )


@handles("add", "sub", "min", "max", "abs", "neg", "copysign")
def arithmetic(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    modifiers, kind = typed(modifiers)
    name = s.opcode.split(".")[0].upper()
    if name in ("MIN", "MAX") and len(s.operands) == 4:
        middle = asm.temporary(SIZES[kind])
        asm.lower_as(s, [middle, *s.operands[1:3]])
        asm.lower_as(s, [s.operands[0], middle, s.operands[3]])
    elif kind in HALF:
        half(asm, s, name, kind, flags_of(s, modifiers, "rn NaN"))
    elif kind[0] == "f":
        floating(asm, s, name, modifiers, kind)
    else:
        flags_of(s, modifiers, "")
        sign = kind[0].upper() if name in ("MIN", "MAX", "ABS") else ""
        width = SIZES[kind]
        asm.emit(Op[f"{name}_{sign}{8 * width}"], s.operands[0], s.operands[1:], width=width)


def floating(asm: Assembler, s: Statement, name: str, modifiers: list[str], kind: str) -> None:
    flags = flags_of(s, modifiers, "rn rz rm rp ftz sat approx full" + (" NaN" if name in ("MIN", "MAX") else ""))
    if kind == "f32x2":
        asm.emit(Op[f"{name}_F32"], s.operands[0], s.operands[1:], width=8, count=2, flags=flags)
    else:
        asm.emit(Op[f"{name}_{kind.upper()}"], s.operands[0], s.operands[1:], width=SIZES[kind], flags=flags)


@handles("fma", "div", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "rem")
def functions(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    modifiers, kind = typed(modifiers)
    name = s.opcode.split(".")[0].upper()
    if kind in HALF:
        flags = flags_of(s, [m for m in modifiers if m != "ftz" or kind[0] != "b"], "rn relu approx")
        half(asm, s, name, kind, flags)
    elif kind[0] == "f" and not (kind == "f64" and "approx" in modifiers and name != "RSQRT"):
        floating(asm, s, name, modifiers, kind)
    else:
        flags_of(s, modifiers, "")
        width = SIZES[kind]
        asm.emit(Op[f"{name}_{kind[0].upper()}{8 * width}"], s.operands[0], s.operands[1:], width=width)


@handles("mul", "mad")
def product(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    modifiers, kind = typed(modifiers)
    result, a, b, *addend = s.operands
    if kind in HALF:
        half(asm, s, "FMA" if addend else "MUL", kind, flags_of(s, modifiers, "rn"))
        return
    if kind[0] == "f":
        floating(asm, s, "FMA" if addend else "MUL", modifiers, kind)
        return
    (mode,) = modifiers
    size = SIZES[kind]
    width = 2 * size if mode == "wide" else size
    op = Op[f"MUL_LO_{8 * size}"] if mode == "lo" else Op[f"MUL_{mode.upper()}_{kind[0].upper()}{8 * size}"]
    target = asm.temporary(width) if addend else result
    asm.emit(op, target, [a, b], width=width, size=size)
    if addend:
        asm.emit(Op[f"ADD_{8 * width}"], result, [target, *addend], width=width)


@handles("and", "or", "xor", "not", "shl", "shr")
def logic(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    (kind,) = modifiers
    width = SIZES[kind]
    name = s.opcode.split(".")[0].upper()
    sign = "" if name != "SHR" else "S" if kind[0] == "s" else "U"
    name = f"{name}_{sign}{8 * width}"
    args = s.operands[1:]
    if name[:2] == "SH":
        asm.emit(Op[name], s.operands[0], [(args[0], width), (args[1], 4)], width=width)
    else:
        asm.emit(Op[name], s.operands[0], args, width=width)


@handles("shf", "lop3", "prmt", "bfe", "bfi", "popc", "clz", "brev", "bfind", "slct")
def bits(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    base, name = s.opcode.split(".")[0], s.opcode.upper()
    result, *args = s.operands
    if base == "shf":
        asm.emit(Op["_".join(name.split(".")[:3])], result, args)
    elif base == "lop3":
        flags_of(s, modifiers, "b32")
        asm.emit(Op.LOP3, result, args[:3], imm=args[3])
    elif base == "prmt":
        modes = ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"]
        mode = modes.index(modifiers[1]) + 1 if len(modifiers) == 2 else 0
        asm.emit(Op.PRMT, result, args, kind=mode)
    elif base == "slct":
        flags_of(s, modifiers[1:], "s32")
        asm.emit(Op.SLCT_32, result, args)
    else:
        (kind,) = modifiers
        size = SIZES[kind]
        if base == "bfe":
            op = Op.BFE_S if kind[0] == "s" else Op.BFE_U
            asm.emit(op, result, [(args[0], size), (args[1], 4), (args[2], 4)], width=size)
        elif base == "bfi":
            asm.emit(Op.BFI, result, [*((a, size) for a in args[:2]), *((a, 4) for a in args[2:])], width=size)
        elif base == "bfind":
            asm.emit(Op.BFIND_S if kind == "s32" else {"u32": Op.BFIND_U}[kind], result, args)
        else:
            width = size if base == "brev" else 4
            asm.emit(Op[f"{base.upper()}_{8 * size}"], result, args, width=width, size=size)


# comparison -> (from which, arguments swapped, inverted)
_INTEGER = {
    "eq": ("EQ", False, False), "ne": ("EQ", False, True), "lt": ("LT", False, False),
    "ge": ("LT", False, True), "gt": ("LT", True, False), "le": ("LT", True, True),
}  # fmt: skip
_FLOAT = {
    "eq": ("EQ", False, False), "ne": ("LG", False, False), "lt": ("LT", False, False), "le": ("LE", False, False),
    "gt": ("LT", True, False), "ge": ("LE", True, False), "equ": ("LG", False, True), "neu": ("EQ", False, True),
    "ltu": ("LE", True, True), "leu": ("LT", True, True), "gtu": ("LE", False, True), "geu": ("LT", False, True),
    "num": ("NUM", False, False), "nan": ("NUM", False, True),
}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@handles("setp")
def compare(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    (relation, *modifiers), kind = typed(modifiers)
    target, a, b, *third = s.operands
    first, second = target if isinstance(target, Pair) else (target, "_")
    combine = [m for m in modifiers if m in ("and", "or", "xor")]
    flags = flags_of(s, [m for m in modifiers if m not in combine], "ftz")
    if kind in ("f16", "bf16"):
        wide = [asm.temporary(4), asm.temporary(4)]
        for temporary, arg in zip(wide, (a, b), strict=True):
            asm.emit(Op.CVT_F32_H, temporary, [(arg, 2)], size=2, kind=HALF[kind])
        (a, b), kind = wide, "f32"
    if kind[0] == "f":
        name, swapped, inverted = _FLOAT[relation]
        op, flags = Op[f"{name}_{kind.upper()}"], flags | (INVERT if inverted else 0)
    else:
        if relation in _UNSIGNED:
            relation, kind = _UNSIGNED[relation], "u" + kind[1:]
        name, swapped, inverted = _INTEGER[relation]
        sign = "" if name == "EQ" else "S" if kind[0] == "s" else "U"
        op, flags = Op[f"{name}_{sign}{8 * SIZES[kind]}"], INVERT_INTEGER if inverted else 0
    size = SIZES[kind]
    plain = asm.temporary(4) if third or second != "_" else first
    asm.emit(op, plain, [(b, size), (a, size)] if swapped else [(a, size), (b, size)], size=size, flags=flags)
    if plain == first:
        return
    inverse = asm.temporary(4)
    asm.emit(Op.NOT_32, inverse, [plain])
    for result, value in ((first, plain), (second, inverse)):
        if result != "_" and third:
            asm.emit(Op[f"{combine[0].upper()}_32"], result, [value, third[0]])
        elif result != "_":
            asm.emit(Op.MOV_32, result, [value])


@handles("selp")
def select(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    (kind,) = modifiers
    width = SIZES[kind]
    result, a, b, p = s.operands
    asm.emit(Op[f"SELECT_{8 * width}"], result, [(a, width), (b, width), (p, 4)], width=width)
