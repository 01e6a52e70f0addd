# SPDX-License-Identifier: Apache-2.0
"""Which instructions may touch registers of a wgmma in flight, and which products may lack their wgmma.fence.

Both are data flow over the code, whatever the paths taken: sets of registers are bits, as in rows.py. An instruction
that may touch such a register is looked at again when it runs (_flights.pxd), so that only real ones are faults.
A move carries what its source is: NVRTC copies accumulators that ptxas leaves where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_oracle.ptx._opcodes import Op
from mla_oracle.ptx.program import Draft

OLDEST = 8  # groups that are told apart; wait_group of more is as one of OLDEST
A_IN_REGISTERS = 8  # in Draft.flags, as in warpgroup.py
PRODUCTS = (Op.WGMMA_F16, Op.WGMMA_BF16)


@dataclass(slots=True)
class _State:
    """`fenced`: registers not written after the last wgmma.fence, on any path; flight[n]: those that a wgmma may still
    use that was issued n commits ago."""

    fenced: int
    flight: list[int]

    def join(self, other: _State) -> bool:
        """Take in another path; did that change anything?"""
        before = (self.fenced, self.flight)
        self.fenced &= other.fenced
        self.flight = [a | b for a, b in zip(self.flight, other.flight, strict=True)]
        return before != (self.fenced, self.flight)

    def copy(self) -> _State:
        return _State(self.fenced, list(self.flight))


class _Flow:
    def __init__(self, drafts: list[Draft]) -> None:
        self.drafts = drafts
        self.numbers: dict[str, int] = {}
        for draft in drafts:
            for name in (*draft.written, *draft.registers):
                self.numbers.setdefault(name, len(self.numbers))
        self.all = (1 << len(self.numbers)) - 1

    def bits(self, names: list[str]) -> int:
        return sum(1 << number for number in {self.numbers[name] for name in names})

    def step(self, index: int, state: _State) -> int:
        """Change `state` by an instruction; its suspects: of operands, bit by bit, or of a product 1: not fenced."""
        draft, suspects = self.drafts[index], 0
        if draft.op in PRODUCTS:
            a = draft.args[:4] if draft.flags & A_IN_REGISTERS else []
            used = self.bits([*draft.accumulators, *(name for name in a if isinstance(name, str))])
            state.flight[0] |= used
            return int(used & ~state.fenced != 0)
        if draft.op == Op.WGMMA_FENCE:
            state.fenced = self.all
        elif draft.op == Op.WGMMA_COMMIT:
            oldest = state.flight[OLDEST - 1] | state.flight[OLDEST]
            state.flight = [0, *state.flight[: OLDEST - 1], oldest]
        elif draft.op == Op.WGMMA_WAIT:
            state.flight = [bits if age <= draft.imm or not age else 0 for age, bits in enumerate(state.flight)]
        else:
            flying = 0
            for bits in state.flight:
                flying |= bits
            for place, operand in enumerate((*draft.results, *draft.args)):
                if isinstance(operand, str) and flying >> self.numbers[operand] & 1:
                    suspects |= 1 << place
            self._write(draft, state)
        return suspects

    def _write(self, draft: Draft, state: _State) -> None:
        written = self.bits(draft.written)
        source = draft.args[0] if draft.op == Op.MOV_32 else None
        number = self.numbers[source] if isinstance(source, str) else None
        clean = number is not None and state.fenced >> number & 1
        if not clean:
            state.fenced &= ~written
        elif not draft.guard:
            state.fenced |= written
        for age, bits in enumerate(state.flight):
            kept = bits if draft.guard else bits & ~written
            state.flight[age] = kept | (written if number is not None and bits >> number & 1 else 0)


def suspects(drafts: list[Draft], successors: list[list[int]]) -> list[int]:
    """For each instruction what `_Flow.step` says, over all paths to it."""
    result = [0] * len(drafts)
    if not any(draft.op in PRODUCTS for draft in drafts):
        return result
    flow = _Flow(drafts)
    jumped = {target for index, following in enumerate(successors) for target in following if target != index + 1}
    jumped |= {index + 1 for index, following in enumerate(successors) if following != [index + 1]}
    starts = {0: _State(0, [0] * (OLDEST + 1))}
    waiting = [0]
    while waiting:
        index = waiting.pop()
        state = starts[index].copy()
        while True:
            result[index] |= flow.step(index, state)
            following = successors[index]
            if following == [index + 1] and index + 1 not in jumped:
                index += 1
                continue
            break
        for target in following:
            if target not in starts:
                starts[target] = state.copy()
            elif not starts[target].join(state):
                continue
            waiting.append(target)
    return result
