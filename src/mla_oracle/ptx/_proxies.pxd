# SPDX-License-Identifier: Apache-2.0
# What reads shared memory asynchronously: wgmma and bulk copies out. Their proxy sees what was written by threads, or
# by cp.async, only behind a fence.proxy.async (8.6); and until they are waited for nobody may write what they read.
#
# Their reads are in further columns of Shadow.reads: one for each warpgroup, stamped with the group of wgmma, and one
# for bulk copies out, stamped with the copy.
from libc.stdint cimport int32_t, int64_t, uint32_t

from mla_oracle.ptx._block cimport Block, Shadow, fail
from mla_oracle.ptx._clocks cimport gather, proxy_columns
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._order cimport BULK, IN_FLIGHT, accuse

# What was found to be seen already: most chunks were written by the same thread as the one before.
cdef struct Seen:
    uint32_t record
    uint32_t handed


cdef inline bint sees(
    Block* b, Py_ssize_t lane, const uint32_t* view, uint32_t address, Seen* seen, Py_ssize_t column, uint32_t ordinal,
) noexcept nogil:
    """16 bytes are read by what was issued with the knowledge of `view` (a row of Shadow.told); false: a fault."""
    cdef Shadow* s = &b.shadow
    cdef uint32_t granule = b.launch.granule, per_span = 16 // granule, span = address >> 4, at, record, when = 0
    cdef uint32_t* cells
    if s.written[span] != 0xFFFF:
        return fail(b, NEVER_WRITTEN, lane, address, 16, SHARED)
    for at in range(span * per_span, (span + 1) * per_span):
        record = s.writes[at]
        if record >> 11 == IN_FLIGHT:
            when = s.handed[at]
        if record == seen.record and when == seen.handed:
            continue
        if not visible(b, lane, view, address, record, when):
            return False
        seen.record, seen.handed = record, when
    s.last_read[span] = IN_FLIGHT
    cells = s.reads + (<Py_ssize_t>span * s.read_columns + b.launch.warps + column) * per_span
    for at in range(per_span):
        cells[at] = ordinal
    return True


cdef inline bint visible(
    Block* b, Py_ssize_t lane, const uint32_t* view, uint32_t address, uint32_t record, uint32_t when,
) noexcept nogil:
    """May what `record` (of Shadow.writes) says was written be read?"""
    cdef uint32_t stamp = record >> 11, other = record & 1023, column = other, behind
    cdef int32_t race = RACE_WRITE_READ
    if stamp == IN_FLIGHT:
        column, race = <uint32_t>b.launch.lanes + (other >> 5), IN_FLIGHT_READ
        stamp = when & ~<uint32_t>BULK
    if stamp == 0 and when == 0 and race == RACE_WRITE_READ:    # before clocks were renewed
        return True
    if view[column] <= stamp or (race == IN_FLIGHT_READ and when == 0):
        return accuse(b, race, lane, other, address, 16)
    behind = view[proxy_columns(b) + column]
    if behind <= stamp and not when & BULK:
        return accuse(b, UNFENCED, lane, other, address, 16)
    return True


cdef inline void look(Block* b, Py_ssize_t first, Py_ssize_t n, uint32_t* view) noexcept nogil:
    """view: what lanes [first, first + n) of the block know together."""
    cdef Py_ssize_t k
    for k in range(b.shadow.columns):
        view[k] = 0
    for k in range(first, first + n):
        gather(b, <uint32_t>k, view, b.shadow.stamp[k >> 5] + 1)
