# SPDX-License-Identifier: Apache-2.0
"""mbarrier, in the manner of operations.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_oracle.ptx._opcodes import Op, Space
from mla_oracle.ptx.movement import address_of
from mla_oracle.ptx.operations import handles, unsupported
from mla_oracle.ptx.syntax import Statement

if TYPE_CHECKING:
    from mla_oracle.ptx.assembler import Assembler

# Instr.second, as in _mbarrier.pxd
EXPECTS = 1
FLAGS = {"noComplete": 2, "relaxed": 4, "parity": 8, "noinc": 16}
SPACES = {"shared", "shared::cta", "shared::cluster"}
# operation -> what else may follow it
KNOWN = {
    "init": SPACES, "inval": SPACES, "arrive": {*SPACES, "release", "relaxed", "cta", "cluster", "noComplete"},
    "expect_tx": {*SPACES, "relaxed", "cta", "cluster"}, "complete_tx": {*SPACES, "relaxed", "cta", "cluster"},
    "test_wait": {*SPACES, "acquire", "relaxed", "cta", "cluster", "parity"}, "copies": {*SPACES, "noinc"},
}  # fmt: skip
KNOWN["try_wait"] = KNOWN["test_wait"]
OPERATIONS = {
    "init": Op.MBAR_INIT, "inval": Op.MBAR_INVAL, "arrive": Op.MBAR_ARRIVE, "expect_tx": Op.MBAR_EXPECT,
    "complete_tx": Op.MBAR_COMPLETE, "test_wait": Op.MBAR_WAIT, "try_wait": Op.MBAR_WAIT, "copies": Op.MBAR_COPIES,
}  # fmt: skip


@handles("mbarrier")
def mbarrier(asm: Assembler, s: Statement, modifiers: list[str]) -> None:
    """cp.async.mbarrier.arrive has "copies" for its name."""
    name, *rest, kind = modifiers
    if name == "pending_count" and not rest and kind == "b64":
        asm.emit(Op.UNPACK_2X32, s.operands[0], [(s.operands[1], 8)], width=4, size=8, kind=0)
        return
    expects = name == "arrive" and "expect_tx" in rest
    rest = [modifier for modifier in rest if not (expects and modifier == "expect_tx")]
    if kind != "b64" or not set(rest) <= KNOWN[name]:
        raise unsupported(s)
    operands = list(s.operands)
    result: Any = operands.pop(0) if name in ("arrive", "test_wait", "try_wait") else None
    place, *more = operands
    flags = sum(FLAGS.get(modifier, 0) for modifier in rest)
    base, offset, wide = address_of(asm, place)
    if expects:
        (bytes_,) = more
        values = [(None, 4), (bytes_, 4)]
    elif name in ("test_wait", "try_wait"):
        if len(more) > (1 if name == "test_wait" else 2):
            raise unsupported(s)
        values = [(more[0], 4 if "parity" in rest else 8)]
    else:
        expected = {"inval": (0,), "copies": (0,), "arrive": (0, 1)}.get(name, (1,))
        if len(more) not in expected:
            raise unsupported(s)
        values = [(value, 4) for value in more]
    asm.emit(
        OPERATIONS[name], [result], [base, *values], width=8 if name == "arrive" else 4, size=8, flags=wide,
        kind=Space.SHARED if SPACES & set(rest) else Space.GENERIC, imm=offset,
        second=flags | (EXPECTS if expects else 0),
    )  # fmt: skip
