# SPDX-License-Identifier: Apache-2.0
"""What assembler.py makes and the machine runs: instructions as drafts, whose operands are names, then as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mla_oracle.arrays import Array
from mla_oracle.ptx.syntax import Source, Variable

OPERANDS = 16
_FIELDS = "op kind flags guard negated results width size count line second suspects"
# struct Instr in _block.pxd
INSTR = np.dtype([(name, np.int32) for name in _FIELDS.split()] + [("imm", np.int64), ("operand", np.int32, OPERANDS)])

# enum Special in _machine.pyx
_LANES = "%tid.x %tid.y %tid.z %laneid %warpid %lanemask_eq %lanemask_lt %lanemask_le %lanemask_gt %lanemask_ge"
SPECIAL = [*_LANES.split(), "%ctaid.x", "%ctaid.y", "%ctaid.z"]
# Special registers that are the same all over a launch; clocks stand still.
LAUNCHED = {f"%{name}.{axis}" for name in ("ntid", "nctaid") for axis in "xyz"}
LAUNCHED |= {"%nwarpid", "%dynamic_smem_size", "%total_smem_size", "%clock", "%clock64", "%smid", "%globaltimer"}


class Constant(NamedTuple):
    """A row that no instruction writes, of `width` bytes per lane.

    kind "value": `value` are its bits; "special": an index of SPECIAL; "launch": a name in LAUNCHED; "param": `size`
    bytes of the kernel's parameters from `value`; "memory": the address of the module's variable `value`; "dynamic":
    where dynamic shared memory begins.
    """

    width: int
    kind: str
    value: Any
    size: int = 0


@dataclass(slots=True)
class Draft:
    """An instruction. An operand is a register's name, a Constant, or None: nothing in this place."""

    op: int
    results: list[str | None]
    args: list[str | Constant | None]
    guard: str | None
    negated: bool
    width: int  # bytes per lane of a result
    size: int  # and of an argument, or of an element in memory
    kind: int
    flags: int
    count: int
    imm: int
    second: int
    target: str | None  # a label or a table of labels
    line: int
    source: Source
    opcode: str
    accumulators: list[str]  # both read and written, beside the others

    @property
    def registers(self) -> list[str]:
        """Those it reads."""
        return [arg for arg in (*self.args, self.guard, *self.accumulators) if isinstance(arg, str)]

    @property
    def written(self) -> list[str]:
        return [*(result for result in self.results if result is not None), *self.accumulators]


@dataclass(slots=True)
class Program:
    """A kernel the machine can run."""

    name: str
    params: list[tuple[int, int]]  # (offset, size)
    code: Array  # [n] of INSTR
    sources: list[Source]  # of each instruction
    opcodes: list[str]
    targets: Array  # tables of brx.idx, and the rows of wgmma's accumulators
    constants: dict[Constant, int]  # the row of each
    constant_rows: int
    rows: int
    static_shared: int
    local: int
    granule: int  # bytes: the smallest access to shared memory
    max_threads: int | None
    memory: list[Variable]
    asynchronous: bool  # it has mbarriers, wgmma or bulk copies
