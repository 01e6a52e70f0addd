# SPDX-License-Identifier: Apache-2.0
# bar.sync, bar.arrive and bar.red (9.7.13.1): sixteen barriers, each for the whole block or a number of threads.
#
# A lane that arrives stops (AT_BARRIER) until as many lanes have arrived as are expected. Exited lanes are expected by
# nobody: hardware lets the others pass, but Block.warned then names the instruction. A barrier of the whole block must
# be the same instruction for all: if it is not, threads meet that should not.
from libc.stdint cimport int32_t, uint32_t

from mla_oracle.ptx._block cimport (
    AT_BARRIER, AT_COLLECTIVE, AT_MBARRIER, BARRIERS, RUNNING, Barrier, Block, Instr, fail, row,
)
from mla_oracle.ptx._clocks cimport tell_all, tell_warps
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._races cimport meet_all, meet_warps


cdef inline int32_t live_lanes(const Block* b) noexcept nogil:
    cdef Py_ssize_t k
    cdef int32_t count = 0
    for k in range(b.launch.lanes):
        count += b.live[k] & 1
    return count


cdef inline bint delayed(Block* b, uint32_t* mask, Py_ssize_t first) noexcept nogil:
    """Does a lane of this warp wait at an mbarrier? Then those that are here wait for it, and leave the group."""
    cdef Py_ssize_t k
    cdef bint result = False
    for k in range(first, first + 32):
        result = result or b.states[b.low + k] == AT_MBARRIER
    for k in range(first, first + 32):
        if result and mask[k]:
            b.states[b.low + k], b.pcs[b.low + k], mask[k] = AT_COLLECTIVE, b.pc, 0
    return result


cdef inline void stand_back(Block* b, const Instr* i, uint32_t* mask, int32_t which, int32_t count) noexcept nogil:
    """Lanes that come to another barrier with the same instruction leave the group, to come again."""
    cdef Py_ssize_t k
    for k in range(b.n):
        if mask[k] and (number_of(b, i, k) != which or count_of(b, i, k) != count):
            b.pcs[b.low + k], mask[k] = b.pc, 0


cdef inline int32_t number_of(Block* b, const Instr* i, Py_ssize_t k) noexcept nogil:
    return <int32_t>i.imm if i.operand[1] < 0 else (<int32_t*>row(b, i.operand[1]))[k]


cdef inline int32_t count_of(Block* b, const Instr* i, Py_ssize_t k) noexcept nogil:
    return i.second if i.operand[2] < 0 else (<int32_t*>row(b, i.operand[2]))[k]


cdef inline bint whole_warps(Block* b, const Instr* i, uint32_t* mask) noexcept nogil:
    """An aligned barrier: a warp whose lanes are not all here diverged before it."""
    cdef Py_ssize_t k, first
    cdef uint32_t here
    for first in range(0, b.n, 32):
        here = 0
        for k in range(first, first + 32):
            here |= mask[k]
        if not here:
            continue
        for k in range(first, first + 32):
            if b.live[b.low + k] and not mask[k]:
                if delayed(b, mask, first):
                    break
                if b.states[b.low + k] == AT_COLLECTIVE:    # there lies the cause
                    b.pc = b.pcs[b.low + k]
                    return fail(b, DIVERGENT_WARP, b.low + k, 0, 0, 0)
                fail(b, DIVERGENT_BARRIER, b.low + first, i.imm, 0, 0)
                b.fault_other = <int32_t>(b.low + k)
                return False
    return True


cdef inline void release(Block* b, int32_t which) noexcept nogil:
    """The barrier is complete: lanes that wait at it run on behind their own instruction."""
    cdef Barrier* bar = &b.barriers[which]
    cdef const Instr* their
    cdef Py_ssize_t k
    cdef uint32_t result
    cdef int32_t lanes = b.launch.lanes
    for k in range(lanes):
        if b.states[k] != AT_BARRIER:
            continue
        their = b.launch.code + b.pcs[k]
        if b.barrier_of[k] != which:
            continue
        if their.op >= BAR_RED_POPC:
            result = (<uint32_t>bar.n_true if their.op == BAR_RED_POPC else
                      0xFFFFFFFFU if bar.n_true == bar.arrived else 0)
            if their.op == BAR_RED_OR:
                result = 0xFFFFFFFFU if bar.n_true else 0
            (<uint32_t*>(b.rows + <Py_ssize_t>their.operand[0] * lanes * 4))[k] = result
        b.states[k] = RUNNING
        b.pcs[k] += 1
    bar.arrived, bar.n_true, bar.waiting, bar.arriving = 0, 0, 0, 0


cdef inline bint arrive(Block* b, const Instr* i, uint32_t* mask) noexcept nogil:
    """The group's lanes come to a barrier: number in i.imm, or operand 1; how many lanes in i.second, or operand 2
    (0: all). They are released if that completes it. Operand 0: bar.red's result, operand 3 its predicate."""
    cdef Py_ssize_t k, first = 0
    cdef int32_t which, count, lane
    cdef Barrier* bar
    if not i.kind and not whole_warps(b, i, mask):
        return False
    while first < b.n and not mask[first]:
        first += 1
    if first == b.n:
        return True
    which, count = number_of(b, i, first), count_of(b, i, first)
    if i.operand[1] >= 0 or i.operand[2] >= 0:
        stand_back(b, i, mask, which, count)
    if not 0 <= which < BARRIERS or count & 31 or count < 0:
        return fail(b, BAD_BARRIER, b.low + first, which, count, 0)
    b.idle = 0
    bar = &b.barriers[which]
    if bar.arrived and (bar.count != count or (count == 0 and bar.pc != b.pc)):
        fail(b, DIVERGENT_BARRIER, b.low + first, which, count, 0)
        b.fault_extra = bar.pc + 1
        return False
    if not bar.arrived:
        bar.pc, bar.count = b.pc, count
    for k in range(b.n):
        if not mask[k]:
            continue
        lane = <int32_t>(b.low + k)
        bar.arrived += 1
        if i.op >= BAR_RED_POPC:
            bar.n_true += (<uint32_t*>row(b, i.operand[3]))[k] & 1
        if i.op == BAR_ARRIVE:
            bar.arriving |= <uint32_t>1 << (lane >> 5)
            b.pcs[lane] = b.pc + 1
        else:
            bar.waiting |= <uint32_t>1 << (lane >> 5)
            b.states[lane], b.pcs[lane], b.barrier_of[lane] = AT_BARRIER, b.pc, which
    return complete(b, which)


cdef inline bint complete(Block* b, int32_t which) noexcept nogil:
    """Release the barrier if all have come; False after a fault."""
    cdef Barrier* bar = &b.barriers[which]
    cdef int32_t live = live_lanes(b), expected = bar.count if bar.count else live
    if bar.arrived < expected:
        return True
    if bar.arrived > expected:
        return fail(b, BAD_BARRIER, b.low, which, bar.arrived, 0)
    if bar.count == 0 and live < b.launch.threads:
        b.warned = bar.pc + 1
    if b.launch.checks:
        if expected == live and not bar.arriving:
            meet_all(b)
            tell_all(b)
        else:
            meet_warps(b, bar.waiting, bar.arriving)
            tell_warps(b, bar.waiting, bar.arriving)
    release(b, which)
    return True
