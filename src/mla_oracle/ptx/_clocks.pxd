# SPDX-License-Identifier: Apache-2.0
# What lanes know of each other by more than barriers: mbarriers, fences and what runs asynchronously.
#
# Shadow.told has a row for each lane, in columns. Its number in a column says: the lane knows all that happened there
# stamped before it. Columns [0, lanes) are what lanes did, as in _races.pxd; [lanes, lanes + warps) copies that lanes
# of a warp handed to an mbarrier. Then come the same once more: what is known to lie before a fence.proxy.async, so
# that the asynchronous proxy sees it (8.6, proxies). The rest have clocks of their own: what each warpgroup's wgmma
# read, by groups of wgmma, and last what bulk copies out read, by copies.
# An mbarrier gathers the rows of those who arrive, and gives them to those who wait for that phase; the arrival of
# copies tells of those copies alone, not of what their thread did or knew before (8.9.1.1).
# Of copies and asynchronous reads, what one lane of a warp (or warpgroup, or block) waited for counts for all of it.
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memset

from mla_oracle.ptx._block cimport MAX_WARPS, Block, Shadow
from mla_oracle.ptx._order cimport IN_FLIGHT
from mla_oracle.ptx._races cimport renew


cdef inline uint32_t* told_of(const Block* b, Py_ssize_t lane) noexcept nogil:
    return b.shadow.told + lane * b.shadow.columns


cdef inline int32_t proxy_columns(const Block* b) noexcept nogil:
    """Columns of one kind: where those behind a fence begin."""
    return b.launch.lanes + b.launch.warps


cdef inline uint32_t tick(Block* b) noexcept nogil:
    """A new time; what was done so far is stamped earlier."""
    if b.shadow.now >= IN_FLIGHT - 1:
        renew(b)
    b.shadow.now += 1
    b.shadow.version += 1
    return b.shadow.now


cdef inline void raise_to(uint32_t* row, const uint32_t* other, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        row[k] = max(row[k], other[k])


cdef inline void gather(Block* b, uint32_t lane, uint32_t* row, uint32_t own) noexcept nogil:
    """Raise `row` to all that `lane` knows; what it did itself is known up to `own`."""
    cdef Shadow* s = &b.shadow
    cdef Py_ssize_t warp = lane >> 5, k, v
    cdef uint32_t known
    raise_to(row, told_of(b, lane), s.columns)
    for v in range(b.launch.warps):
        if v == warp:
            for k in range(32 * v, 32 * v + 32):
                row[k] = max(row[k], max(s.floor, min(s.seen[lane], s.seen[k])))
        else:
            known = max(s.floor, s.known[warp][v])
            for k in range(32 * v, 32 * v + 32):
                row[k] = max(row[k], known)
    row[lane] = max(row[lane], own)


cdef inline void learn(Block* b, uint32_t lane, const uint32_t* row) noexcept nogil:
    raise_to(told_of(b, lane), row, b.shadow.columns)


cdef inline void fence_lane(Block* b, uint32_t lane, uint32_t now) noexcept nogil:
    """fence.proxy.async: all that the lane knows is now known to lie before a fence."""
    cdef uint32_t* told = told_of(b, lane)
    gather(b, lane, told, now)
    raise_to(told + proxy_columns(b), told, proxy_columns(b))


cdef inline void tell(
    Block* b, Py_ssize_t first, Py_ssize_t n, const uint32_t* gives, const uint32_t* takes,
) noexcept nogil:
    """Of lanes [first, first + n), those of the warps in `takes` learn what those of the warps in `gives` were told."""
    cdef Py_ssize_t k
    memset(b.shadow.sum, 0, <size_t>b.shadow.columns * 4)
    for k in range(first, first + n):
        if gives[k >> 5] >> (k & 31) & 1:
            raise_to(b.shadow.sum, told_of(b, k), b.shadow.columns)
    for k in range(first, first + n):
        if takes[k >> 5] >> (k & 31) & 1:
            learn(b, <uint32_t>k, b.shadow.sum)


cdef inline void tell_all(Block* b) noexcept nogil:
    """After a barrier of the whole block."""
    tell_warps(b, 0xFFFFFFFFU, 0)


cdef inline void tell_warps(Block* b, uint32_t waiting, uint32_t arriving) noexcept nogil:
    """After a barrier of some warps."""
    cdef uint32_t gives[MAX_WARPS]
    cdef uint32_t takes[MAX_WARPS]
    cdef int w
    if b.shadow.told == NULL:
        return
    for w in range(b.launch.warps):
        gives[w] = 0xFFFFFFFFU if (waiting | arriving) >> w & 1 else 0
        takes[w] = 0xFFFFFFFFU if waiting >> w & 1 else 0
    tell(b, 0, b.launch.lanes, gives, takes)


cdef inline void tell_lanes(Block* b, uint32_t warp, uint32_t members) noexcept nogil:
    """After bar.warp.sync of these lanes."""
    cdef uint32_t lanes[MAX_WARPS]
    if b.shadow.told != NULL:
        lanes[warp] = members
        tell(b, 32 * warp, 32, lanes, lanes)
