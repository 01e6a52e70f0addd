# SPDX-License-Identifier: Apache-2.0
"""What the machine found wrong, in one line: what, the kernel's source line, the PTX line, the block, the thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mla_oracle.errors import InputError
from mla_oracle.ptx._opcodes import Fault as Code
from mla_oracle.ptx._opcodes import Space
from mla_oracle.ptx.memory import Memory


class Fault(InputError):
    """A kernel did what no kernel may. `what` is the text before the place."""

    def __init__(self, message: str, what: str = ""):
        super().__init__(message)
        self.what = what


class Found(NamedTuple):
    """As _machine.run returns it."""

    block: int
    instruction: int
    code: int
    lane: int
    other: int
    address: int
    size: int
    space: int
    extra: int


def describe(
    found: Found,
    opcode: str,
    block: tuple[int, int, int],
    memory: Memory,
    shared_size: int,
    place: Callable[[int], str],
) -> str:
    """What happened. `place(instruction)` names a place in the source; `block` is the block's shape."""
    other = position(found.other, block)
    space = {Space.SHARED: "shared", Space.LOCAL: "local"}.get(found.space, "global")
    access = f"{opcode} of {found.size} bytes at {space} {found.address:#x}"
    match found.code:
        case Code.OUT_OF_BOUNDS:
            return f"out of bounds: {access}, {_beyond(found, memory, shared_size)}"
        case Code.MISALIGNED:
            return f"misaligned: {access}"
        case Code.NEVER_WRITTEN:
            return f"never written: {access}{_offset(found, memory)} reads bytes that nothing has written"
        case Code.RACE_WRITE_READ:
            return f"race: {access} reads what thread {other} wrote, no barrier between"
        case Code.RACE_READ:
            return f"race: {access} overwrites what thread {other} read, no barrier between"
        case Code.RACE_WRITE_WRITE:
            return f"race: {access} overwrites what thread {other} wrote, no barrier between"
        case Code.IN_FLIGHT_READ:
            return f"cp.async not waited for: {access} reads what thread {other} is still copying"
        case Code.IN_FLIGHT_WRITE:
            return f"cp.async not waited for: {access} overwrites what thread {other} is still copying"
        case Code.UNFINISHED:
            copied = f"{found.size} bytes to shared {found.address:#x}"
            return f"cp.async not waited for: thread exits with {copied} in flight"
        case Code.DIVERGENT_BARRIER if found.extra:
            there = place(found.extra - 1)
            return f"divergent barrier: {opcode} {found.address} meets threads that wait for it at {there}"
        case Code.DIVERGENT_BARRIER:
            return f"divergent barrier: {opcode} without thread {other} of the same warp"
        case Code.BARRIER_DEADLOCK:
            some = f"{found.size} threads only"
            return f"divergent barrier: {opcode} {found.address} is reached by {some}, nobody else runs"
        case Code.BAD_BARRIER:
            return f"bad barrier: {opcode} with barrier {found.address} and {found.size} threads"
        case Code.DIVERGENT_WARP:
            return f"divergent warp: {opcode} waits for lanes of its warp that never come"
        case Code.EXITED_LANES:
            return f"divergent warp: {opcode} names lanes that have exited ({found.address:#x}), thread {other} for one"
        case Code.NOT_IN_MASK:
            what = "its own lane" if found.other < 0 else f"thread {other}, which it takes from"
            return f"divergent warp: {opcode} with member mask {found.address:#x} without {what}"
        case Code.DIFFERENT_MASKS:
            return f"divergent warp: {opcode} with member mask {found.address:#x}, other lanes in it have another"
        case Code.PARTIAL_WARPGROUP:
            missing = f"thread {other}" if found.other < block[0] * block[1] * block[2] else "the last"
            return f"divergent warp: {opcode} without {missing} of the same four warps"
        case Code.MBAR_NONE:
            return f"no mbarrier: {opcode} at shared {found.address:#x}, where none was initialised"
        case Code.MBAR_LIVE:
            return f"bad mbarrier: {opcode} at shared {found.address:#x}, where one is in use"
        case Code.MBAR_UNSEEN:
            there = f"{opcode} at shared {found.address:#x}"
            return f"race: {there} uses what thread {other} initialised, no barrier between"
        case Code.MBAR_OVERWRITTEN:
            return f"bad mbarrier: {opcode} at shared {found.address:#x}, which was written over"
        case Code.MBAR_COUNT:
            pending = f", {found.extra} pending" if found.extra else ""
            return f"bad mbarrier: {opcode} at shared {found.address:#x} with {found.size} arrivals{pending}"
        case Code.MBAR_BYTES:
            there = f"{opcode} at shared {found.address:#x}"
            return f"bad mbarrier: {there} makes it {found.size} bytes pending (2^20 or more)"
        case Code.MBAR_PHASE:
            there = f"{opcode} at shared {found.address:#x}"
            return f"bad mbarrier: {there} with the state of phase {found.size}, long over"
        case Code.MBAR_DEADLOCK:
            lacks = f"{found.size} arrivals and {found.extra} bytes"
            return f"deadlock: {opcode} at shared {found.address:#x} waits for {lacks}, nobody else runs"
        case Code.UNFENCED:
            return f"no proxy fence: {access} reads what thread {other} wrote, no fence.proxy.async between"
        case Code.ASYNC_READ:
            return f"race: {access} overwrites what {_reader(found, block)} may still read"
        case Code.BULK_SIZE:
            return f"misaligned: {opcode} of {found.size} bytes, expected a multiple of 16"
        case Code.BULK_UNFINISHED:
            return "cp.async.bulk not waited for: thread exits with copies that may still read shared memory"
        case Code.WGMMA_UNFINISHED:
            return "wgmma not waited for: thread exits with products in flight"
        case Code.WGMMA_UNFENCED:
            return f"no wgmma.fence: {opcode} uses registers that may have been written after the last wgmma.fence"
        case Code.IN_USE:
            return f"wgmma not waited for: {opcode} touches a register that a wgmma in flight still uses"
        case Code.DIFFERENT_MATRICES:
            return f"divergent warp: {opcode} with another matrix descriptor than thread {other} of the same four warps"
        case Code.TRAPPED:
            return "trap: the kernel stopped itself (trap or assert)"
        case Code.RUNAWAY:
            return (
                "runaway: no end in sight; threads that wait in a loop for others never meet them here"
            )
        case Code.WRONG_SPACE:
            return f"mixed spaces: {opcode} at {found.address:#x} is in another state space than other lanes'"
        case Code.READ_ONLY:
            return f"read-only: {access} writes to constant memory"
    return f"no memory for what {opcode} has in flight"


def position(lane: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    return lane % shape[0], lane // shape[0] % shape[1], lane // shape[0] // shape[1]


def _reader(found: Found, block: tuple[int, int, int]) -> str:
    """`other` is the first thread of a warpgroup, or one that no block has."""
    if found.other < block[0] * block[1] * block[2]:
        return f"wgmma of thread {position(found.other, block)}"
    return "cp.async.bulk"


def _beyond(found: Found, memory: Memory, shared_size: int) -> str:
    if found.space == Space.SHARED:
        return f"the block has {shared_size} bytes"
    if found.space == Space.LOCAL:
        return "beyond the thread's stack"
    piece = memory.nearest(found.address)
    if piece is None:
        return "a null pointer or no pointer at all"
    return f"{found.address - piece.low} bytes into an array of {piece.host.nbytes}"


def _offset(found: Found, memory: Memory) -> str:
    piece = memory.nearest(found.address) if found.space == Space.GLOBAL else None
    return f" ({found.address - piece.low} bytes into an array of {piece.host.nbytes})" if piece else ""
