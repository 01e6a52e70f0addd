# SPDX-License-Identifier: Apache-2.0
# cp.async.bulk (9.7.9.25.4): a run of bytes to shared memory, counted by an mbarrier, or from it, waited for by groups.
# The bytes move at once; those that come are in flight (_races.pxd) for all who have not waited for their phase, those
# that go are being read (_proxies.pxd) until a wait.
# Operands: of a load: none, shared address, global address, size, mbarrier; of a store: none, global, shared, size.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy, memset

from mla_oracle.ptx._access cimport piece_of
from mla_oracle.ptx._async cimport hand
from mla_oracle.ptx._block cimport Block, Bulk, Instr, MBarrier, Piece, fail, row, sized
from mla_oracle.ptx._clocks cimport proxy_columns, tick, told_of
from mla_oracle.ptx._mbarrier cimport expect, mbarrier_at, resume_all, settle
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._order cimport BULK, IN_FLIGHT
from mla_oracle.ptx._proxies cimport Seen, look, sees
from mla_oracle.ptx._races cimport writes


cdef inline const Piece* place_of(Block* b, Py_ssize_t lane, uint64_t address, uint32_t size, bint read) noexcept nogil:
    """Where global memory has these bytes, or NULL after a fault."""
    cdef const Piece* piece = piece_of(b, address)
    if piece == NULL or address + size > piece.high:
        fail(b, OUT_OF_BOUNDS, lane, address, size, GLOBAL)
        return NULL
    if address & 15:
        fail(b, MISALIGNED, lane, address, size, GLOBAL)
        return NULL
    if not read and piece.read_only:
        fail(b, READ_ONLY, lane, address, size, GLOBAL)
        return NULL
    if b.launch.checks and read and piece.written != NULL:
        if memchr(piece.written + (address - piece.low), 0, size) != NULL:
            fail(b, NEVER_WRITTEN, lane, address, size, GLOBAL)
            return NULL
    return piece


cdef inline bint fits(Block* b, Py_ssize_t lane, uint32_t address, uint32_t size) noexcept nogil:
    if size & 15:
        return fail(b, BULK_SIZE, lane, address, size, SHARED)
    if address > b.launch.shared_size or size > b.launch.shared_size - address:
        return fail(b, OUT_OF_BOUNDS, lane, address, size, SHARED)
    if address & 15:
        return fail(b, MISALIGNED, lane, address, size, SHARED)
    return True


cdef inline bint bulk_load(Block* b, const Instr* i, Py_ssize_t k, uint32_t now, bint* woken) noexcept nogil:
    """Lane k of the group."""
    cdef Py_ssize_t lane = b.low + k, column = b.launch.lanes + (lane >> 5)
    cdef uint32_t target = (<uint32_t*>row(b, i.operand[1]))[k], size = (<uint32_t*>row(b, i.operand[3]))[k], at
    cdef uint64_t source = (<uint64_t*>sized(b, i.operand[2], 8))[k]
    cdef const Piece* piece
    cdef MBarrier* m = mbarrier_at(b, lane, (<uint32_t*>row(b, i.operand[4]))[k])
    if m == NULL or not fits(b, lane, target, size):
        return False
    piece = place_of(b, lane, source, size, True)
    if piece == NULL:
        return False
    if b.shadow.told != NULL:
        for at in range(target, target + size, 16):
            if not writes(b, <uint32_t>lane, at, 16, NULL, <uint32_t>IN_FLIGHT << 11):
                return False
        hand(b, target, size, (now - 1) | BULK)
        m.gathered[column] = now
    memcpy(b.shared + target, piece.host + (source - piece.low), size)
    if not expect(b, m, lane, -<int64_t>size):
        return False
    woken[0] = settle(b, m) or woken[0]
    return True


cdef inline bint bulk_store(Block* b, const Instr* i, Py_ssize_t k) noexcept nogil:
    """Lane k of the group."""
    cdef Py_ssize_t lane = b.low + k
    cdef uint32_t source = (<uint32_t*>row(b, i.operand[2]))[k], size = (<uint32_t*>row(b, i.operand[3]))[k], at
    cdef uint64_t target = (<uint64_t*>sized(b, i.operand[1], 8))[k]
    cdef const Piece* piece
    cdef Seen seen = Seen(0, 0)
    if not fits(b, lane, source, size):
        return False
    piece = place_of(b, lane, target, size, False)
    if piece == NULL:
        return False
    b.bulk_copies += 1
    b.bulk[lane].open = b.bulk_copies
    if b.shadow.told != NULL:
        look(b, lane, 1, b.shadow.sum)
        for at in range(source, source + size, 16):
            if not sees(b, lane, b.shadow.sum, at, &seen, (b.launch.warps + 3) // 4, b.bulk_copies):
                return False
    memcpy(piece.host + (target - piece.low), b.shared + source, size)
    if piece.written != NULL:
        memset(piece.written + (target - piece.low), 1, size)
    return True


cdef inline void wait_for_bulk(Block* b, Py_ssize_t lane, uint32_t pending) noexcept nogil:
    """All but the lane's `pending` youngest groups have read what they copy."""
    cdef Bulk* mine = b.bulk + lane
    if mine.committed <= pending or pending > 7:
        return
    mine.waited = max(mine.waited, mine.last[(mine.committed - pending - 1) & 7])
    if b.shadow.told != NULL:
        told_of(b, lane)[b.shadow.columns - 1] = max(told_of(b, lane)[b.shadow.columns - 1], mine.waited + 1)
        b.shadow.version += 1


cdef inline int bulk(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    """As _mbarrier.mbarrier."""
    cdef Py_ssize_t k
    cdef bint woken = False
    cdef Bulk* mine
    cdef uint32_t now = tick(b) if b.shadow.told != NULL else 0
    for k in range(b.n):
        if not mask[k]:
            continue
        mine = b.bulk + b.low + k
        if i.op == BULK_COMMIT:
            mine.last[mine.committed & 7] = max(mine.open, mine.last[(mine.committed - 1) & 7])
            mine.committed += 1
        elif i.op == BULK_WAIT:
            wait_for_bulk(b, b.low + k, <uint32_t>i.imm)
        elif not (bulk_load(b, i, k, now, &woken) if i.op == BULK_LOAD else bulk_store(b, i, k)):
            return -1
    return resume_all(b, mask, now, woken)


cdef inline bint none_copied(Block* b, const uint32_t* mask) noexcept nogil:
    """Before the lanes in `mask` exit: may copies still read the block's memory?"""
    cdef Py_ssize_t k
    for k in range(b.n):
        if mask[k] and b.bulk[b.low + k].open > b.bulk[b.low + k].waited:
            return fail(b, BULK_UNFINISHED, b.low + k, 0, 0, 0)
    return True
