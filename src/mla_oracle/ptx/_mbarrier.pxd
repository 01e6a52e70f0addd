# SPDX-License-Identifier: Apache-2.0
# mbarrier objects (9.7.13.15) and fence.proxy.async. An object lives beside shared memory, found by its address; its
# own eight bytes count as never written while it lives, so that a load of them, or a store over them, is found out.
#
# A phase is complete when no arrivals and no bytes are pending. A wait that would fail puts its lane AT_MBARRIER until
# the phase is complete, or nobody else can run (_deadlock.pxd). What is asynchronous has happened when it is issued: a
# copy has arrived, its bytes have been counted.
# Operands: [the state or a predicate], address, then a count, bytes, a state or a parity; bytes.
# A state is the number of its phase << 32 | the arrivals that were pending.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, realloc
from libc.string cimport memcpy, memset

from mla_oracle.ptx._access cimport find_addresses, find_space, fits_shared
from mla_oracle.ptx._async cimport hand_over
from mla_oracle.ptx._block cimport AT_MBARRIER, RUNNING, Block, Instr, MBarrier, fail, row, sized
from mla_oracle.ptx._clocks cimport fence_lane, gather, learn, proxy_columns, tick
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._order cimport ordered
from mla_oracle.ptx._races cimport span_bits, writes

cdef enum:
    MOST = (1 << 20) - 1    # arrivals, and bytes either way

# Instr.second
cdef enum MBarrierFlag:
    EXPECTS = 1         # arrive: and some bytes are expected
    NEVER_LAST = 2      # .noComplete
    RELAXED = 4
    PARITY = 8
    COUNTED = 16        # .noinc


cdef inline MBarrier* mbarrier_at(Block* b, Py_ssize_t lane, uint64_t address) noexcept nogil:
    """The object there that `lane` may use, or NULL after a fault."""
    cdef int32_t k
    cdef MBarrier* m = NULL
    if not fits_shared(b, lane, address, 8):
        return NULL
    for k in range(b.n_mbarriers):
        if b.mbarriers[k].address == address:
            m = b.mbarriers + k
    if m == NULL or m.expected == 0:
        fail(b, MBAR_NONE, lane, address, 8, SHARED)
        return NULL
    if not b.launch.checks:
        return m
    if b.shadow.written[address >> 4] & span_bits(<uint32_t>address, 8):
        fail(b, MBAR_OVERWRITTEN, lane, address, 8, SHARED)
        return NULL
    if m.lane != lane and m.stamp >= b.shadow.floor and not ordered(&b.shadow, <uint32_t>lane, m.lane, m.stamp):
        fail(b, MBAR_UNSEEN, lane, address, 8, SHARED)
        b.fault_other = <int32_t>m.lane
        return NULL
    return m


cdef inline bint initialise(Block* b, Py_ssize_t lane, uint64_t address, uint32_t count) noexcept nogil:
    cdef int32_t k, columns = b.shadow.columns
    cdef MBarrier* m = NULL
    cdef void* larger
    if not fits_shared(b, lane, address, 8):
        return False
    if not 0 < count <= MOST:
        return fail(b, MBAR_COUNT, lane, address, count, SHARED)
    for k in range(b.n_mbarriers):
        if b.mbarriers[k].address == address:
            m = b.mbarriers + k
    if m != NULL and m.expected:
        return fail(b, MBAR_LIVE, lane, address, 8, SHARED)
    if m == NULL:
        if b.n_mbarriers == b.mbarrier_room:
            larger = realloc(b.mbarriers, <size_t>(2 * b.mbarrier_room + 16) * sizeof(MBarrier))
            if larger == NULL:
                return fail(b, NO_ROOM, lane, address, 8, SHARED)
            b.mbarriers = <MBarrier*>larger
            memset(b.mbarriers + b.mbarrier_room, 0, <size_t>(b.mbarrier_room + 16) * sizeof(MBarrier))
            b.mbarrier_room = 2 * b.mbarrier_room + 16
        m = b.mbarriers + b.n_mbarriers
        b.n_mbarriers += 1
        if m.gathered == NULL:
            m.gathered = <uint32_t*>calloc(2 * columns + 1, 4)
        if m.gathered == NULL:
            return fail(b, NO_ROOM, lane, address, 8, SHARED)
    m.done = m.gathered + columns
    memset(m.gathered, 0, <size_t>columns * 8)
    m.address, m.phase, m.bytes, m.expected, m.pending = <uint32_t>address, 0, 0, <int32_t>count, <int32_t>count
    m.lane, m.stamp = <uint32_t>lane, b.shadow.stamp[lane >> 5]
    if b.launch.checks:
        if not writes(b, <uint32_t>lane, <uint32_t>address, 8, NULL, 0):
            return False
        b.shadow.written[address >> 4] &= ~span_bits(<uint32_t>address, 8)
    return True


cdef inline bint settle(Block* b, MBarrier* m) noexcept nogil:
    """After a change: is the phase complete? Then those that wait for it go on."""
    cdef Py_ssize_t k
    b.idle = 0
    if m.pending or m.bytes:
        return False
    m.phase += 1
    m.pending = m.expected
    memcpy(m.done, m.gathered, <size_t>b.shadow.columns * 4)
    for k in range(b.launch.lanes):
        if b.states[k] == AT_MBARRIER and b.barrier_of[k] == m - b.mbarriers:
            b.states[k] = RUNNING
    return True


cdef inline bint expect(Block* b, MBarrier* m, Py_ssize_t lane, int64_t bytes) noexcept nogil:
    """`bytes` more are to come, or have (less than 0)."""
    m.bytes += bytes
    if not -MOST <= m.bytes <= MOST:
        return fail(b, MBAR_BYTES, lane, m.address, m.bytes, SHARED)
    return True


cdef inline bint arrive_at(Block* b, const Instr* i, MBarrier* m, Py_ssize_t lane, uint32_t count) noexcept nogil:
    if not 0 < count <= <uint32_t>m.pending or (i.second & NEVER_LAST and count == <uint32_t>m.pending):
        fail(b, MBAR_COUNT, lane, m.address, count, SHARED)
        b.fault_extra = m.pending
        return False
    m.pending -= <int32_t>count
    return True


cdef inline bint wait_at(Block* b, const Instr* i, MBarrier* m, Py_ssize_t k, bint* over) noexcept nogil:
    """Lane k of the group; over: its phase is complete."""
    cdef uint64_t state
    if i.second & PARITY:
        over[0] = (m.phase ^ (<uint32_t*>row(b, i.operand[2]))[k]) & 1
        return True
    state = (<uint64_t*>sized(b, i.operand[2], 8))[k] >> 32
    over[0] = state != m.phase
    if state != m.phase and state + 1 != m.phase:
        return fail(b, MBAR_PHASE, b.low + k, m.address, <int64_t>state, SHARED)
    return True


cdef inline uint32_t number(Block* b, const Instr* i, int place, Py_ssize_t k) noexcept nogil:
    return (<uint32_t*>row(b, i.operand[place]))[k]


cdef inline bint change(Block* b, const Instr* i, Py_ssize_t k, uint32_t now, bint* woken) noexcept nogil:
    """Lane k of the group: everything but waits."""
    cdef Py_ssize_t lane = b.low + k
    cdef uint64_t address = b.where[k]
    cdef uint32_t count = 1
    cdef MBarrier* m
    if i.op == MBAR_INIT:
        return initialise(b, lane, address, number(b, i, 2, k))
    m = mbarrier_at(b, lane, address)
    if m == NULL:
        return False
    if i.op == MBAR_INVAL:
        m.expected = 0
        return True
    if i.op == MBAR_ARRIVE:
        if i.operand[0] >= 0:
            (<uint64_t*>sized(b, i.operand[0], 8))[k] = <uint64_t>m.phase << 32 | <uint32_t>m.pending
        if i.second & EXPECTS and not expect(b, m, lane, number(b, i, 3, k)):
            return False
        if i.operand[2] >= 0:
            count = number(b, i, 2, k)
    elif i.op == MBAR_COPIES:
        if not i.second & COUNTED:
            m.pending += 1
        if b.shadow.told != NULL:
            hand_over(b, <uint32_t>lane, now - 1)
            m.gathered[b.launch.lanes + (lane >> 5)] = now
    elif not expect(b, m, lane, number(b, i, 2, k) if i.op == MBAR_EXPECT else -<int64_t>number(b, i, 2, k)):
        return False
    if i.op == MBAR_ARRIVE or i.op == MBAR_COPIES:
        if i.op == MBAR_ARRIVE and b.shadow.told != NULL and not i.second & RELAXED:
            gather(b, <uint32_t>lane, m.gathered, now)
        if not arrive_at(b, i, m, lane, count):
            return False
    woken[0] = settle(b, m) or woken[0]
    return True


cdef inline bint await_phase(Block* b, const Instr* i, Py_ssize_t k, bint* woken) noexcept nogil:
    """Lane k of the group: its predicate, or it stops here."""
    cdef Py_ssize_t lane = b.low + k
    cdef MBarrier* m = mbarrier_at(b, lane, b.where[k])
    cdef bint over
    if m == NULL or not wait_at(b, i, m, k, &over):
        return False
    if over or b.refused[lane]:
        if over and b.shadow.told != NULL and not i.second & RELAXED:
            learn(b, <uint32_t>lane, m.done)
        if i.operand[0] >= 0:
            (<uint32_t*>row(b, i.operand[0]))[k] = 0xFFFFFFFFU if over else 0
    else:
        b.states[lane], b.pcs[lane], b.barrier_of[lane] = AT_MBARRIER, b.pc, <int32_t>(m - b.mbarriers)
        woken[0] = True
    b.refused[lane] = 0
    return True


cdef inline int mbarrier(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    """-1: a fault; 1: lanes stopped or go on elsewhere; 0: nothing of that."""
    cdef Py_ssize_t k
    cdef bint woken = False
    cdef uint32_t now = 0
    if b.shadow.told != NULL:
        now = tick(b)
    if i.op != FENCE_ASYNC:
        find_addresses(b, i, i.operand[1])
        if i.kind == GENERIC and find_space(b, i, mask) != SHARED:
            if not b.fault:
                fail(b, WRONG_SPACE, b.low, b.where[0], 8, SHARED)
            return -1
    for k in range(b.n):
        if not mask[k]:
            continue
        if i.op == FENCE_ASYNC:
            if b.shadow.told != NULL:
                fence_lane(b, <uint32_t>(b.low + k), now)
        elif not (await_phase(b, i, k, &woken) if i.op == MBAR_WAIT else change(b, i, k, now, &woken)):
            return -1
    return resume_all(b, mask, now, woken)


cdef inline int resume_all(Block* b, const uint32_t* mask, uint32_t now, bint woken) noexcept nogil:
    """What the lanes in `mask` do from here on is stamped `now`; if any were woken, all are to be grouped anew."""
    cdef Py_ssize_t k
    for k in range(b.n):
        if mask[k] and now:
            b.shadow.stamp[(b.low + k) >> 5] = now
        if mask[k] and woken and b.states[b.low + k] != AT_MBARRIER:
            b.pcs[b.low + k] = b.pc + 1
    return woken
