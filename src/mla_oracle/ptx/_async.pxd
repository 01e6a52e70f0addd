# SPDX-License-Identifier: Apache-2.0
# cp.async (9.7.9.25.3): the bytes move at once, but are IN_FLIGHT (_races.pxd) until the lane that asked has waited
# for their group; handed to an mbarrier, until who reads them has waited for its phase.
# Operands: shared address, global address, optionally how many bytes to read (the rest are zeros).
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memchr, memcpy, memset

from mla_oracle.ptx._access cimport WIDE_ADDRESS, fits_shared, piece_of
from mla_oracle.ptx._block cimport Block, Copies, Copy, Instr, Piece, fail, row, sized
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._order cimport IN_FLIGHT, copies_of
from mla_oracle.ptx._races cimport lands, writes

cdef enum:
    WIDE_SHARED = 4     # a flag: the shared address has 64 bits


cdef inline bint remember(Block* b, uint32_t lane, uint32_t address, uint32_t size) noexcept nogil:
    cdef Copies* c = &b.copies[lane >> 5]
    cdef void* larger
    if c.length == c.room:
        larger = realloc(c.items, (2 * c.room + 256) * sizeof(Copy))
        if larger == NULL:
            return fail(b, NO_ROOM, lane, address, size, SHARED)
        c.items, c.room = <Copy*>larger, 2 * c.room + 256
    c.items[c.length] = Copy(address, <uint16_t>lane, <uint16_t>size, b.committed[lane])
    c.length += 1
    return True


cdef inline bint copy(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    cdef uint32_t* narrow = <uint32_t*>row(b, i.operand[0])
    cdef uint64_t* wide = <uint64_t*>sized(b, i.operand[0], 8)
    cdef uint64_t* sources = <uint64_t*>sized(b, i.operand[1], 8)
    cdef uint32_t* sizes = <uint32_t*>row(b, i.operand[2]) if i.operand[2] >= 0 else NULL
    cdef uint32_t size = i.size, n = i.size, lane
    cdef uint64_t target, source
    cdef const Piece* piece = b.launch.pieces + b.last_piece[b.pc] if b.launch.n_pieces else NULL
    cdef Py_ssize_t k
    for k in range(b.n):
        if not mask[k]:
            continue
        lane = <uint32_t>(b.low + k)
        target = wide[k] + <uint64_t>i.second if i.flags & WIDE_SHARED else <uint32_t>(narrow[k] + <uint32_t>i.second)
        source = sources[k] + <uint64_t>i.imm
        if sizes != NULL:
            n = min(sizes[k], size)
        if not fits_shared(b, lane, target, size):
            return False
        if n:
            if piece == NULL or source < piece.low or source + n > piece.high:
                piece = piece_of(b, source)
                if piece == NULL or source + n > piece.high:
                    return fail(b, OUT_OF_BOUNDS, lane, source, n, GLOBAL)
                b.last_piece[b.pc] = <int32_t>(piece - b.launch.pieces)
            if source & (size - 1):
                return fail(b, MISALIGNED, lane, source, size, GLOBAL)
            if b.launch.checks and piece.written != NULL:
                if memchr(piece.written + (source - piece.low), 0, n) != NULL:
                    return fail(b, NEVER_WRITTEN, lane, source, n, GLOBAL)
        if b.launch.checks:
            if not writes(b, lane, <uint32_t>target, size, NULL, <uint32_t>IN_FLIGHT << 11):
                return False
            if not remember(b, lane, <uint32_t>target, size):
                return False
            if b.shadow.told != NULL:
                hand(b, <uint32_t>target, size, 0)
        if n:
            memcpy(b.shared + target, piece.host + (source - piece.low), n)
        if n < size:
            memset(b.shared + target + n, 0, size - n)
    return True


cdef inline void hand(Block* b, uint32_t address, uint32_t size, uint32_t when) noexcept nogil:
    """A copy in flight is handed to an mbarrier, 0: begins."""
    cdef uint32_t granule = b.launch.granule, at
    for at in range(address // granule, (address + size) // granule):
        b.shadow.handed[at] = when


cdef inline void hand_over(Block* b, uint32_t lane, uint32_t when) noexcept nogil:
    """All that `lane` has in flight."""
    cdef Copies* c = &b.copies[lane >> 5]
    cdef Py_ssize_t k, kept = 0
    for k in range(c.length):
        if c.items[k].lane == lane:
            hand(b, c.items[k].address, c.items[k].size, when)
        else:
            c.items[kept] = c.items[k]
            kept += 1
    c.length = kept


cdef inline void commit(Block* b, const uint32_t* mask) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(b.n):
        b.committed[b.low + k] += mask[k] & 1


cdef inline void wait(Block* b, const uint32_t* mask, uint32_t pending, bint everything) noexcept nogil:
    """All but each lane's `pending` youngest groups, or everything, have landed."""
    cdef Py_ssize_t first, k, kept
    cdef Copies* c
    cdef Copy* item
    for first in range(0, b.n, 32):
        c = &b.copies[(b.low + first) >> 5]
        kept = 0
        for k in range(c.length):
            item = c.items + k
            if mask[item.lane - b.low] and (everything or item.group + pending < b.committed[item.lane]):
                lands(b, item.lane, item.address, item.size)
            else:
                c.items[kept] = item[0]
                kept += 1
        c.length = kept
    if b.shadow.told != NULL and (everything or pending == 0):
        for k in range(b.n):
            if mask[k]:     # those handed to an mbarrier as well
                b.shadow.told[copies_of(b, <uint32_t>(b.low + k), <uint32_t>(b.low + k))] = b.shadow.now + 1


cdef inline bint none_unfinished(Block* b, const uint32_t* mask) noexcept nogil:
    """Before the lanes in `mask` exit."""
    cdef Py_ssize_t first, k
    cdef Copies* c
    for first in range(0, b.n, 32):
        c = &b.copies[(b.low + first) >> 5]
        for k in range(c.length):
            if mask[c.items[k].lane - b.low]:
                return fail(b, UNFINISHED, c.items[k].lane, c.items[k].address, c.items[k].size, SHARED)
    return True
