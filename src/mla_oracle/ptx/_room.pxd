# SPDX-License-Identifier: Apache-2.0
# The memory that a worker needs for its blocks, taken once for a launch.
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from mla_oracle.ptx._block cimport OPERANDS, PIECE, Block, Bulk, Launch


cdef inline bint take_room(Block* b, const Launch* launch) noexcept nogil:
    """All the memory a worker needs, zeros; False: there is not enough."""
    cdef size_t lanes = launch.lanes, spans = launch.spans
    cdef size_t cells = 16 // launch.granule
    memset(b, 0, sizeof(Block))
    b.launch = launch
    b.rows = <uint8_t*>calloc(lanes * 4, launch.rows)
    b.live = <uint32_t*>calloc(lanes, 4)
    b.mask = <uint32_t*>calloc(lanes, 4)
    b.guarded = <uint32_t*>calloc(lanes, 4)
    b.pcs = <int32_t*>calloc(lanes, 4)
    b.states = <int32_t*>calloc(lanes, 4)
    b.barrier_of = <int32_t*>calloc(lanes, 4)
    b.refused = <uint8_t*>calloc(lanes, 1)
    b.where = <uint64_t*>calloc(lanes, 8)
    b.scratch = <uint8_t*>calloc(OPERANDS, PIECE)
    b.shared = <uint8_t*>calloc(spans + 1, 16)
    b.local = <uint8_t*>calloc(lanes, launch.local_size + 1)
    b.local_written = <uint8_t*>calloc(lanes, launch.local_size + 1)
    b.last_piece = <int32_t*>calloc(launch.length, 4)
    b.shadow.writes = <uint32_t*>calloc(spans * cells + 1, 4)
    b.shadow.read_columns = launch.warps
    if launch.asynchronous:
        b.shadow.read_columns += (launch.warps + 3) // 4 + 1
    b.shadow.reads = <uint32_t*>calloc(spans * cells * b.shadow.read_columns + 1, 4)
    b.bulk = <Bulk*>calloc(lanes if launch.asynchronous else 1, sizeof(Bulk))
    b.in_flight = <uint32_t*>calloc(launch.warps * launch.rows if launch.asynchronous else 1, 4)
    b.shadow.last_write = <uint32_t*>calloc(spans + 1, 4)
    b.shadow.last_read = <uint32_t*>calloc(spans + 1, 4)
    b.shadow.written = <uint16_t*>calloc(spans + 1, 2)
    if launch.asynchronous and launch.checks:
        b.shadow.columns = 2 * (launch.lanes + launch.warps) + (launch.warps + 3) // 4 + 1
        b.shadow.told = <uint32_t*>calloc(lanes * b.shadow.columns, 4)
        b.shadow.sum = <uint32_t*>calloc(b.shadow.columns, 4)
        b.shadow.view = <uint32_t*>calloc((launch.warps + 3) // 4 * b.shadow.columns, 4)
        b.shadow.version = 1
        b.shadow.handed = <uint32_t*>calloc(spans * cells + 1, 4)
        if b.shadow.told == NULL or b.shadow.sum == NULL or b.shadow.view == NULL or b.shadow.handed == NULL:
            return False
    return not (
        b.rows == NULL or b.live == NULL or b.mask == NULL or b.guarded == NULL or b.pcs == NULL
        or b.states == NULL or b.barrier_of == NULL or b.refused == NULL or b.where == NULL or b.scratch == NULL
        or b.shared == NULL or b.local == NULL or b.local_written == NULL or b.last_piece == NULL
        or b.shadow.writes == NULL
        or b.shadow.reads == NULL or b.shadow.last_write == NULL or b.shadow.last_read == NULL
        or b.shadow.written == NULL or b.bulk == NULL or b.in_flight == NULL
    )


cdef inline void give_back(Block* b) noexcept nogil:
    cdef int w
    for w in range(b.launch.warps):
        free(b.copies[w].items)
    for w in range(b.mbarrier_room):
        free(b.mbarriers[w].gathered)
    free(b.mbarriers)
    free(b.refused)
    free(b.bulk)
    free(b.in_flight)
    free(b.rows)
    free(b.live)
    free(b.mask)
    free(b.guarded)
    free(b.pcs)
    free(b.states)
    free(b.barrier_of)
    free(b.where)
    free(b.scratch)
    free(b.shared)
    free(b.local)
    free(b.local_written)
    free(b.last_piece)
    free(b.shadow.writes)
    free(b.shadow.reads)
    free(b.shadow.last_write)
    free(b.shadow.last_read)
    free(b.shadow.written)
    free(b.shadow.told)
    free(b.shadow.sum)
    free(b.shadow.view)
    free(b.shadow.handed)
