# SPDX-License-Identifier: Apache-2.0
"""wgmma and setmaxnreg, in the manner of operations.py."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mla_oracle.errors import InputError
from mla_oracle.ptx._opcodes import Op
from mla_oracle.ptx.operations import handles, unsupported
from mla_oracle.ptx.syntax import Statement

if TYPE_CHECKING:
    from mla_oracle.ptx.assembler import Assembler

NEGATED, TURNED_A, TURNED_B, A_IN_REGISTERS = 1, 2, 4, 8  # flags, as in _flights.pxd


@handles("wgmma")
def warpgroup(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    if modifiers[1:3] != ["sync", "aligned"]:
        raise unsupported(s)
    if modifiers[0] == "mma_async":
        _multiply(asm, s, modifiers[3:])
    elif modifiers[0] == "wait_group":
        asm.emit(Op.WGMMA_WAIT, (), [], imm=s.operands[0])
    else:
        asm.emit({"fence": Op.WGMMA_FENCE, "commit_group": Op.WGMMA_COMMIT}[modifiers[0]], (), [])


@handles("setmaxnreg")
def registers(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    (count,) = s.operands
    if modifiers[0] not in ("inc", "dec") or modifiers[1:] != ["sync", "aligned", "u32"]:
        raise unsupported(s)
    if not 24 <= count <= 256 or count % 8:
        raise InputError(f"PTX line {s.line}: {s.opcode} of {count}, expected a multiple of 8 from 24 to 256")
    asm.emit(Op.SETMAXNREG, (), [])


def _multiply(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    """Operands of the machine: a's registers or descriptor, b's descriptor, a predicate: add to d."""
    shape, *types = modifiers
    found = re.fullmatch(r"m64n(\d+)k16", shape)
    if found is None or types not in (["f32", "f16", "f16"], ["f32", "bf16", "bf16"]):
        raise unsupported(s)
    n, (d, a, b, adds, *immediates) = int(found[1]), s.operands
    held = isinstance(a, tuple)
    scale_a, scale_b, *turned = immediates
    if n % 8 or not 8 <= n <= 256 or len(d) != n // 2 or (held and len(a) != 4):
        raise unsupported(s)
    if {scale_a, scale_b} - {1, -1} or set(turned) - {0, 1} or len(turned) != (1 if held else 2):
        raise unsupported(s)
    flags = (NEGATED if scale_a != scale_b else 0) | (TURNED_B if turned[-1] else 0)
    flags |= A_IN_REGISTERS if held else TURNED_A if turned[0] else 0
    if isinstance(adds, int):
        adds = -1 if adds else 0
    asm.emit(
        Op.WGMMA_F16 if types[1] == "f16" else Op.WGMMA_BF16, (),
        [*((x, 4) for x in (a if held else ())), *(() if held else ((a, 8),)), (b, 8), (adds, 4)],
        count=n, flags=flags, accumulators=d,
    )  # fmt: skip
