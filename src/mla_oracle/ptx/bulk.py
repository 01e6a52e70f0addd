# SPDX-License-Identifier: Apache-2.0
"""cp.async.bulk, in the manner of operations.py; `bulk` is what it is found by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_oracle.ptx._opcodes import Op
from mla_oracle.ptx.operations import handles, unsupported
from mla_oracle.ptx.syntax import Address, Statement

if TYPE_CHECKING:
    from mla_oracle.ptx.assembler import Assembler

LOADS = [[space, "global", "mbarrier::complete_tx::bytes"] for space in ("shared::cluster", "shared::cta")]
STORE = ["global", "shared::cta", "bulk_group"]


@handles("bulk")
def bulk(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    operands = list(s.operands)
    if modifiers[-1] == "L2::cache_hint":
        modifiers = modifiers[:-1]
        operands.pop()
    if modifiers == ["commit_group"]:
        asm.emit(Op.BULK_COMMIT, (), [])
    elif modifiers in (["wait_group"], ["wait_group", "read"]):
        asm.emit(Op.BULK_WAIT, (), [], imm=operands[0])
    elif modifiers in LOADS:
        target, source, size, barrier = operands
        places = [(_plain(asm, target, 4), 4), (_plain(asm, source, 8), 8), (size, 4), (_plain(asm, barrier, 4), 4)]
        asm.emit(Op.BULK_LOAD, [None], places)
    elif modifiers == STORE:
        target, source, size = operands
        asm.emit(Op.BULK_STORE, [None], [(_plain(asm, target, 8), 8), (_plain(asm, source, 4), 4), (size, 4)])
    else:
        raise unsupported(s)


def _plain(asm: Assembler, address: Address, width: int) -> Any:
    """The address as one operand of `width` bytes."""
    base: Any = address.base
    if asm.width_of(base, width) != width:
        narrow = asm.temporary(width)
        asm.emit(Op.CVT_INT, narrow, [(base, 12 - width)], width=width, size=12 - width, kind=8, count=0)
        base = narrow
    if not address.offset:
        return base
    moved = asm.temporary(width)
    asm.emit(Op[f"ADD_{8 * width}"], moved, [base, address.offset], width=width)
    return moved
