# SPDX-License-Identifier: Apache-2.0
"""Registers that are never needed at the same time share a row.

Liveness is per thread, so it holds however lanes diverge: each lane walks one path through the code, and its part of
a row belongs to that lane alone. A register is needed from where it is written to its last reader; a write under a
predicate keeps the old value. Rows are then given out in order of first need (linear scan).
"""

from __future__ import annotations

from heapq import heappop, heappush

from mla_oracle.ptx.program import Draft


def share(
    drafts: list[Draft], successors: list[list[int]], widths: dict[str, int], first: int
) -> tuple[dict[str, int], int]:
    """(register -> row, rows in all) for instructions `drafts`; rows below `first` are taken."""
    numbers: dict[str, int] = {}
    for draft in drafts:
        for name in (*draft.written, *draft.registers):
            numbers.setdefault(name, len(numbers))
    begin, end = _ranges(drafts, successors, numbers)
    rows: dict[str, int] = {}
    free: dict[int, list[int]] = {1: [], 2: []}
    active: list[tuple[int, int, int]] = []  # (end, row, size)
    total = first
    for name in sorted(numbers, key=lambda name: (begin[numbers[name]], numbers[name])):
        number, size = numbers[name], 2 if widths[name] == 8 else 1
        while active and active[0][0] < begin[number]:
            _, row, room = heappop(active)
            heappush(free[room], row)
        if free[size]:
            rows[name] = heappop(free[size])
        else:
            rows[name] = total
            total += size
        heappush(active, (end[number], rows[name], size))
    return rows, total


def _ranges(drafts: list[Draft], successors: list[list[int]], numbers: dict[str, int]) -> tuple[list[int], list[int]]:
    """First and last instruction at which each register holds something needed. Sets of registers are bits."""
    uses = [_bits(draft.registers, numbers) for draft in drafts]
    writes = [_bits(draft.written, numbers) for draft in drafts]
    live = [0] * (len(drafts) + 1)
    changed = True
    while changed:
        changed = False
        for index in range(len(drafts) - 1, -1, -1):
            after = 0
            for successor in successors[index]:
                after |= live[successor]
            before = uses[index] | (after if drafts[index].guard else after & ~writes[index])
            if before != live[index]:
                live[index], changed = before, True
    begin, end = [len(drafts)] * len(numbers), [0] * len(numbers)
    for index in range(len(drafts)):
        here = live[index] | writes[index]
        while here:
            number = (here & -here).bit_length() - 1
            here &= here - 1
            begin[number] = min(begin[number], index)
            end[number] = max(end[number], index)
    return begin, end


def _bits(names: list[str], numbers: dict[str, int]) -> int:
    return sum(1 << number for number in {numbers[name] for name in names})
