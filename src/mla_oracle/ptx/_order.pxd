# SPDX-License-Identifier: Apache-2.0
# What is ordered before what a lane does now, and who is accused if it is not; see _races.pxd and _clocks.pxd.
from libc.stdint cimport int32_t, uint32_t

from mla_oracle.ptx._block cimport Block, Shadow, fail
from mla_oracle.ptx._opcodes cimport *

cdef enum:
    IN_FLIGHT = 0x1FFFFF    # a stamp later than all others
    BULK = 1 << 30          # in Shadow.handed: a bulk copy


cdef inline bint accuse(
    Block* b, int32_t fault, Py_ssize_t lane, uint32_t other, uint32_t address, uint32_t size,
) noexcept nogil:
    fail(b, fault, lane, address, size, SHARED)
    b.fault_other = <int32_t>other
    return False


cdef inline bint ordered(const Shadow* s, uint32_t lane, uint32_t other, uint32_t stamp) noexcept nogil:
    """Is what lane `other` did at `stamp` before what `lane` does now?"""
    if lane >> 5 == other >> 5:
        if s.seen[lane] > stamp and s.seen[other] > stamp:
            return True
    elif s.known[lane >> 5][other >> 5] > stamp:
        return True
    return s.told != NULL and s.told[<Py_ssize_t>lane * s.columns + other] > stamp


cdef inline bint told_of_warp(const Shadow* s, uint32_t lane, uint32_t warp, uint32_t stamp) noexcept nogil:
    """Does `lane` know by mbarriers what all lanes of `warp` did at `stamp`?"""
    cdef uint32_t k
    if s.told == NULL:
        return False
    for k in range(32 * warp, 32 * warp + 32):
        if k != lane and s.told[<Py_ssize_t>lane * s.columns + k] <= stamp:
            return False
    return True


cdef inline Py_ssize_t copies_of(const Block* b, uint32_t lane, uint32_t other) noexcept nogil:
    """Where Shadow.told has what `lane` knows of copies by the warp of `other`."""
    return <Py_ssize_t>lane * b.shadow.columns + b.launch.lanes + (other >> 5)


cdef inline bint none_read(Block* b, uint32_t lane, uint32_t address, uint32_t size) noexcept nogil:
    """May `lane` write these bytes, seen what reads them asynchronously?"""
    cdef Shadow* s = &b.shadow
    cdef uint32_t granule = b.launch.granule, per_span = 16 // granule, at, v, ordinal
    cdef const uint32_t* told = s.told + <Py_ssize_t>lane * s.columns + 2 * (b.launch.lanes + b.launch.warps)
    cdef const uint32_t* cells = s.reads + <Py_ssize_t>(address >> 4) * s.read_columns * per_span
    for v in range(<uint32_t>b.launch.warps, <uint32_t>s.read_columns):
        for at in range((address & 15) // granule, ((address & 15) + size) // granule):
            ordinal = cells[v * per_span + at]
            if ordinal and told[v - b.launch.warps] <= ordinal:
                return accuse(b, ASYNC_READ, lane, 128 * (v - b.launch.warps), address, size)
    return True
