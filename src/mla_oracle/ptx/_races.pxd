# SPDX-License-Identifier: Apache-2.0
# Is shared memory read and written in an order that barriers fix?
#
# Time counts the block's synchronisations. A warp stamps what it does with the time it last synchronised; an access
# of warp v stamped s is ordered before what warp w does now if w has seen v beyond s (known[w][v] > s), which only
# barriers bring about. Lanes of one warp are ordered by bar.warp.sync and by barriers alone: a shuffle moves
# registers and orders no memory. After a barrier of the whole block nothing older need be looked at: that is `floor`,
# and two comparisons per 16 bytes are then all there is to do.
# The clock has room for two million synchronisations; then all that came before counts as ordered.
# A bar.warp.sync of part of a warp counts as one of all of it: a race with a lane that is left out is missed.
# cp.async writes at its wait: until then its bytes are IN_FLIGHT, which is ordered with nothing.
# Two lanes that write the same value (or both atomically) do not race.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from mla_oracle.ptx._block cimport MAX_WARPS, Block, Copy, Shadow, fail
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._order cimport BULK, IN_FLIGHT, accuse, copies_of, none_read, ordered, told_of_warp

cdef enum:
    RENEW = 0x100000        # when to start counting again
    ATOMIC = 1 << 10


cdef inline uint16_t span_bits(uint32_t address, uint32_t size) noexcept nogil:
    return <uint16_t>(((<uint32_t>1 << size) - 1) << (address & 15))


cdef inline bint after_writes(
    Block* b, uint32_t lane, uint32_t address, uint32_t size, int32_t race, int32_t flight, const uint8_t* value,
) noexcept nogil:
    """May `lane` touch these bytes, seen who wrote them last? Called if last_write is not before floor."""
    cdef Shadow* s = &b.shadow
    cdef uint32_t granule = b.launch.granule, at, stamp, other, record
    for at in range(address // granule, (address + size) // granule):
        record = s.writes[at]
        stamp, other = record >> 11, record & 1023
        if stamp < s.floor:
            continue
        if stamp == IN_FLIGHT:
            if s.told != NULL and s.handed[at] and s.told[copies_of(b, lane, other)] > s.handed[at] & ~<uint32_t>BULK:
                continue
            return accuse(b, flight, lane, other, address, size)
        if other == lane or ordered(s, lane, other, stamp):
            continue
        if record & ATOMIC and b.launch.code[b.pc].op in (ATOM, RED):
            continue
        if value != NULL and not memcmp(value, b.shared + address, size):
            continue
        return accuse(b, race, lane, other, address, size)
    return True


cdef inline bint after_reads(Block* b, uint32_t lane, uint32_t address, uint32_t size) noexcept nogil:
    """May `lane` write these bytes, seen who read them last? Called if last_read is not before floor."""
    cdef Shadow* s = &b.shadow
    cdef uint32_t granule = b.launch.granule, per_span = 16 // granule, v, at, record, stamp, other
    cdef uint32_t begin = (address & 15) // granule, end = begin + size // granule
    cdef const uint32_t* cells = s.reads + <Py_ssize_t>(address >> 4) * s.read_columns * per_span
    for v in range(<uint32_t>b.launch.warps):
        for at in range(begin, end):
            record = cells[v * per_span + at]
            stamp, other = record >> 6, v * 32 + (record & 31)
            if stamp < s.floor:
                continue
            if record & 32:
                if (s.seen[lane] if v == lane >> 5 else s.known[lane >> 5][v]) > stamp:
                    continue
                if told_of_warp(s, lane, v, stamp):
                    continue
                if v == lane >> 5:
                    other = v * 32 + ((lane + 1) & 31)
                return accuse(b, RACE_READ, lane, other, address, size)
            elif other != lane and not ordered(s, lane, other, stamp):
                return accuse(b, RACE_READ, lane, other, address, size)
    return True


cdef inline bint reads(Block* b, uint32_t lane, uint32_t address, uint32_t size, bint together) noexcept nogil:
    """`lane` reads shared memory, `together`: for its whole warp."""
    cdef Shadow* s = &b.shadow
    cdef uint32_t granule = b.launch.granule, per_span = 16 // granule, warp = lane >> 5, at, record
    cdef uint32_t begin, end, span = address >> 4
    cdef uint32_t stamp = s.stamp[warp]
    cdef uint32_t* cells
    cdef uint16_t bits = span_bits(address, size)
    if s.written[span] & bits != bits:
        return fail(b, NEVER_WRITTEN, lane, address, size, SHARED)
    if s.last_write[span] >= s.floor:
        if not after_writes(b, lane, address, size, RACE_WRITE_READ, IN_FLIGHT_READ, NULL):
            return False
    s.last_read[span] = max(s.last_read[span], stamp)
    cells = s.reads + (<Py_ssize_t>span * s.read_columns + warp) * per_span
    begin = (address & 15) // granule
    end = begin + size // granule
    record = stamp << 6 | lane & 31 | (32 if together else 0)
    for at in range(begin, end):
        cells[at] = record | 32 if cells[at] >> 6 == stamp and cells[at] != record else record
    return True


cdef inline bint writes(
    Block* b, uint32_t lane, uint32_t address, uint32_t size, const uint8_t* value, uint32_t flight,
) noexcept nogil:
    """`lane` writes `value` to shared memory (NULL: unknown); flight: ATOMIC, IN_FLIGHT << 11 (cp.async) or 0."""
    cdef Shadow* s = &b.shadow
    cdef uint32_t granule = b.launch.granule, at, span = address >> 4, stamp = s.stamp[lane >> 5]
    cdef uint32_t record = stamp << 11 | flight | lane
    if s.last_write[span] >= s.floor:
        if not after_writes(b, lane, address, size, RACE_WRITE_WRITE, IN_FLIGHT_WRITE, value):
            return False
    if s.last_read[span] >= s.floor:
        if not after_reads(b, lane, address, size) or (s.told != NULL and not none_read(b, lane, address, size)):
            return False
    s.written[span] |= span_bits(address, size)
    s.last_write[span] = IN_FLIGHT if flight >> 11 else max(s.last_write[span], stamp)
    for at in range(address // granule, (address + size) // granule):
        s.writes[at] = record
    return True


cdef inline void lands(Block* b, uint32_t lane, uint32_t address, uint32_t size) noexcept nogil:
    """A copy that was in flight is waited for by the lane that asked for it."""
    cdef Shadow* s = &b.shadow
    cdef uint32_t granule = b.launch.granule, at, span = address >> 4, stamp = s.stamp[lane >> 5]
    for at in range(address // granule, (address + size) // granule):
        s.writes[at] = stamp << 11 | lane
    if size < 16:
        for at in range(span * 16 // granule, (span + 1) * 16 // granule):
            stamp = max(stamp, s.writes[at] >> 11)
    s.last_write[span] = stamp


cdef inline void forget(Block* b) noexcept nogil:
    """Before a block begins: nothing is written, and all that came before is ordered."""
    cdef Shadow* s = &b.shadow
    cdef size_t spans = b.launch.spans, granules = spans * (16 // b.launch.granule)
    memset(s.written, 0, spans * 2)
    if s.told != NULL:  # what is asynchronous is not older than a floor
        memset(s.last_write, 0, spans * 4)
        memset(s.last_read, 0, spans * 4)
        memset(s.writes, 0, granules * 4)
        memset(s.reads, 0, granules * s.read_columns * 4)
    meet_all(b)


cdef inline void renew(Block* b) noexcept nogil:
    """Start counting again, all that came before being ordered; what is in flight stays so."""
    cdef Shadow* s = &b.shadow
    cdef Py_ssize_t spans = b.launch.spans, w, k
    cdef uint32_t granule = b.launch.granule, at
    cdef Copy* c
    memset(s.writes, 0, spans * 16 // granule * 4)
    memset(s.reads, 0, spans * s.read_columns * (16 // granule) * 4)
    memset(s.last_write, 0, spans * 4)
    memset(s.last_read, 0, spans * 4)
    memset(s.known, 0, sizeof(s.known))
    memset(s.seen, 0, sizeof(s.seen))
    if s.told != NULL:
        memset(s.told, 0, <size_t>b.launch.lanes * s.columns * 4)
        for w in range(b.n_mbarriers):
            memset(b.mbarriers[w].gathered, 0, <size_t>s.columns * 4)
            memset(b.mbarriers[w].done, 0, <size_t>s.columns * 4)
            b.mbarriers[w].stamp = 0
    for w in range(b.launch.warps):
        for k in range(b.copies[w].length):
            c = b.copies[w].items + k
            s.last_write[c.address >> 4] = IN_FLIGHT
            for at in range(c.address // granule, (c.address + c.size) // granule):
                s.writes[at] = <uint32_t>IN_FLIGHT << 11 | c.lane
    s.now = s.floor = 1
    for w in range(b.launch.warps):
        s.stamp[w] = 1


cdef inline void meet_all(Block* b) noexcept nogil:
    """A barrier of the whole block."""
    cdef Shadow* s = &b.shadow
    cdef Py_ssize_t w
    if s.now > RENEW:
        renew(b)
    s.now += 1
    s.version += 1
    s.floor = s.now
    for w in range(b.launch.warps):
        s.stamp[w] = s.now


cdef inline void meet_warps(Block* b, uint32_t waiting, uint32_t arriving) noexcept nogil:
    """A barrier of some warps: those that wait have then seen all that any of them, and those that arrive, had."""
    cdef Shadow* s = &b.shadow
    cdef uint32_t joint[MAX_WARPS]
    cdef int w, v
    if s.now >= IN_FLIGHT - 1:
        renew(b)
    s.now += 1
    s.version += 1
    memset(joint, 0, sizeof(joint))
    for w in range(b.launch.warps):
        if (waiting | arriving) >> w & 1:
            for v in range(b.launch.warps):
                joint[v] = max(joint[v], s.known[w][v])
    for w in range(b.launch.warps):
        if (waiting | arriving) >> w & 1:
            joint[w] = s.now
            s.stamp[w] = s.now
    for w in range(b.launch.warps):
        if waiting >> w & 1:
            for v in range(b.launch.warps):
                s.known[w][v] = joint[v]
            for v in range(32):
                s.seen[w * 32 + v] = s.now


cdef inline void meet_lanes(Block* b, uint32_t warp, uint32_t members) noexcept nogil:
    """bar.warp.sync of these lanes."""
    cdef Shadow* s = &b.shadow
    cdef uint32_t k
    if s.now >= IN_FLIGHT - 1:
        renew(b)
    s.now += 1
    s.version += 1
    s.stamp[warp] = s.now
    for k in range(32):
        if members >> k & 1:
            s.seen[warp * 32 + k] = s.now
