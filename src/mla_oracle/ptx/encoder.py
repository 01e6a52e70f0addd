# SPDX-License-Identifier: Apache-2.0
"""Drafts -> the array of instructions: constants and registers get rows, labels become positions."""

from __future__ import annotations

import numpy as np

from mla_oracle.arrays import Array
from mla_oracle.errors import InputError
from mla_oracle.ptx._opcodes import Op, Space
from mla_oracle.ptx.flights import suspects
from mla_oracle.ptx.program import INSTR, Constant, Draft
from mla_oracle.ptx.rows import share


class Labels:
    """Where labels and tables of labels lead."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}

    def position(self, draft: Draft, name: str) -> int:
        if name not in self.positions:
            raise InputError(f"PTX line {draft.line}: there is no label {name}")
        return self.positions[name]

    def targets(self, draft: Draft) -> list[int]:
        """Where a branch may lead."""
        name = draft.target or ""
        if draft.op == Op.BRA:
            return [self.position(draft, name)]
        if name not in self.tables:
            raise InputError(f"PTX line {draft.line}: there is no table {name}")
        return [self.position(draft, label) for label in self.tables[name]]


def encode(
    drafts: list[Draft], labels: Labels, widths: dict[str, int]
) -> tuple[Array, Array, dict[Constant, int], int, int]:
    """(code [n] of INSTR, tables of targets and rows, the row of each constant, how many those take, rows in all)."""
    constants: dict[Constant, int] = {}
    taken = 0
    for constant in (arg for draft in drafts for arg in draft.args if isinstance(arg, Constant)):
        if constant not in constants:
            constants[constant] = taken
            taken += 2 if constant.width == 8 else 1
    successors = _successors(drafts, labels)
    registers, rows = share(drafts, successors, widths, taken)

    def row(operand: str | Constant | None) -> int:
        if operand is None:
            return -1
        return constants[operand] if isinstance(operand, Constant) else registers[operand]

    code, targets = np.zeros(len(drafts), INSTR), list[int]()
    code["guard"], code["operand"] = -1, -1
    code["suspects"] = suspects(drafts, successors)
    for item, draft in zip(code, drafts, strict=True):
        for name in "op kind flags negated width size count line second imm".split():
            item[name] = getattr(draft, name)
        item["results"] = sum(result is not None for result in draft.results)
        item["guard"] = row(draft.guard)
        operands = [row(operand) for operand in (*draft.results, *draft.args)]
        item["operand"][: len(operands)] = operands
        if draft.op == Op.BRA:
            (item["imm"],) = labels.targets(draft)
        elif draft.op == Op.BRX:
            item["imm"], item["second"] = len(targets), len(labels.targets(draft))
            targets += labels.targets(draft)
        elif draft.accumulators:
            item["imm"], item["second"] = len(targets), len(draft.accumulators)
            targets += [registers[name] for name in draft.accumulators]
    return code, np.array(targets, np.int32), constants, taken, rows


def _successors(drafts: list[Draft], labels: Labels) -> list[list[int]]:
    """What may run after each instruction."""
    result = []
    for index, draft in enumerate(drafts):
        following = [index + 1] if index + 1 < len(drafts) else []
        if draft.op in (Op.BRA, Op.BRX):
            result.append([*labels.targets(draft), *(following if draft.guard or draft.op == Op.BRX else [])])
        else:
            result.append([] if draft.op == Op.EXIT and not draft.guard else following)
    return result


def asynchronous(drafts: list[Draft]) -> bool:
    """Is there anything that happens out of the order of threads and barriers?"""
    return any(Op.WGMMA_F16 <= draft.op <= Op.SETMAXNREG or draft.op > Op.FENCE for draft in drafts)


def granule(drafts: list[Draft]) -> int:
    """The bytes of the smallest access that may touch shared memory: 1, 2 or 4."""
    accesses = (Op.LOAD, Op.STORE, Op.ATOM, Op.RED)
    spaces = (Space.SHARED, Space.GENERIC)
    return min([4, *(draft.size for draft in drafts if draft.op in accesses and draft.kind in spaces)])
