# SPDX-License-Identifier: Apache-2.0
# Nobody can run, and some wait at an mbarrier (_mbarrier.pxd): they are told that their waits failed, IDLE times while
# nothing happens; then it is a deadlock.
from libc.stdint cimport int32_t

from mla_oracle.ptx._block cimport AT_COLLECTIVE, AT_MBARRIER, RUNNING, Block, MBarrier, fail
from mla_oracle.ptx._opcodes cimport *

cdef enum:
    IDLE = 16


cdef inline bint refuse(Block* b) noexcept nogil:
    """Nobody runs: those that wait at an mbarrier learn that their wait failed. False: nobody waits, or a deadlock."""
    cdef Py_ssize_t k
    cdef bint some = False
    for k in range(b.launch.lanes):
        if b.states[k] != AT_MBARRIER:
            continue
        if b.idle == IDLE:
            return deadlock(b, k)
        b.states[k], b.refused[k], some = RUNNING, 1, True
    b.idle += some
    return some


cdef inline bint deadlock(Block* b, Py_ssize_t first) noexcept nogil:
    """Name the likeliest cause: lanes whose warps wait for others that wait at no mbarrier; an mbarrier at which some
    have arrived; or where lane `first` waits."""
    cdef Py_ssize_t k, j, unit
    cdef MBarrier* m
    cdef bint apart
    b.low = 0
    for k in range(b.launch.lanes):
        if b.states[k] == AT_COLLECTIVE:
            unit = 128 if b.launch.code[b.pcs[k]].op in (WGMMA_F16, WGMMA_BF16, SETMAXNREG) else 32
            apart = True
            for j in range(k & -unit, min((k & -unit) + unit, <Py_ssize_t>b.launch.lanes)):
                apart = apart and b.states[j] != AT_MBARRIER
            if apart:
                b.pc = b.pcs[k]
                return fail(b, DIVERGENT_WARP, k, 0, 0, 0)
    for k in range(b.launch.lanes):
        m = b.mbarriers + b.barrier_of[k]
        if b.states[k] == AT_MBARRIER and (m.pending < m.expected or m.bytes):
            first = k
            break
    m = b.mbarriers + b.barrier_of[first]
    b.pc = b.pcs[first]
    fail(b, MBAR_DEADLOCK, first, m.address, m.pending, SHARED)
    b.fault_extra = <int32_t>m.bytes
    return False
