# SPDX-License-Identifier: Apache-2.0
"""Registers that are never needed at the same time share a row.

Liveness is per thread, so it holds however lanes diverge: each lane walks one path through the code, and its part of
a row belongs to that lane alone. A register is needed from where it is written to its last reader; a write under a
predicate keeps the old value. Rows are then given out in order of first need (linear scan).
"""

from __future__ import annotations

from heapq import heappop, heappush


def share(drafts: list, successors: list[list[int]], widths: dict[str, int], first: int) -> tuple[dict[str, int], int]:
    """(register -> row, rows in all) for instructions `drafts`; rows below `first` are taken."""
    numbers: dict[str, int] = {}
    for draft in drafts:
        for name in _touched(draft, widths):
            numbers.setdefault(name, len(numbers))
    begin, end = _ranges(drafts, successors, widths, numbers)
    rows: dict[str, int] = {}
    free: dict[int, list[int]] = {1: [], 2: []}
    active: list[tuple[int, int, int]] = []
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


def _touched(draft, widths: dict[str, int]) -> list[str]:
    names = [*draft.results, *(arg for arg, _ in draft.args), draft.guard]
    return [name for name in names if isinstance(name, str) and name in widths]


def _ranges(drafts: list, successors: list[list[int]], widths: dict[str, int], numbers: dict[str, int]):
    """First and last instruction at which each register holds something needed. Sets of registers are bits."""
    uses, kills = [], []
    for draft in drafts:
        read = [arg for arg, _ in draft.args if isinstance(arg, str) and arg in widths]
        read += [draft.guard] if draft.guard else []
        written = [r for r in draft.results if isinstance(r, str) and r in widths]
        uses.append(sum(1 << n for n in {numbers[name] for name in read}))
        kills.append(0 if draft.guard else sum(1 << n for n in {numbers[name] for name in written}))
    live = [0] * (len(drafts) + 1)
    changed = True
    while changed:
        changed = False
        for index in range(len(drafts) - 1, -1, -1):
            after = 0
            for successor in successors[index]:
                after |= live[successor]
            before = uses[index] | (after & ~kills[index])
            if before != live[index]:
                live[index], changed = before, True
    begin, end = [len(drafts)] * len(numbers), [0] * len(numbers)
    for index, draft in enumerate(drafts):
        here = live[index]
        for name in _touched(draft, widths):
            here |= 1 << numbers[name]
        while here:
            number = (here & -here).bit_length() - 1
            here &= here - 1
            begin[number] = min(begin[number], index)
            end[number] = max(end[number], index)
    return begin, end
