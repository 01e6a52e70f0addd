# SPDX-License-Identifier: Apache-2.0
# Runs blocks of threads: the entry of the interpreter's compiled half.
#
# _schedule.pxd decides which lanes execute, _execute.pxd computes, _access.pxd and its neighbours move memory,
# _races.pxd watches it, in the room that _room.pxd takes. This file turns findings into numbers for faults.py.
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memset

from mla_oracle.ptx._block cimport (
    EXITED, RUNNING, WARP, Block, Bulk, Instr, Launch, Piece, fail,
)
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._races cimport forget
from mla_oracle.ptx._room cimport give_back, take_room
from mla_oracle.ptx._schedule cimport FAULTY, PAUSED, run_block

cdef extern from * nogil:
    int64_t fetch_add "__atomic_fetch_add"(int64_t* address, int64_t by, int order)
    int RELAXED "__ATOMIC_RELAXED"

cdef enum:
    BREATH = 1 << 15    # instructions from one look at signals to the next
    AT_ONCE = 2         # the second of the shared state: stop within blocks, too

# Rows that differ from lane to lane or from block to block; program.SPECIAL has the same order.
cdef enum Special:
    TID_X, TID_Y, TID_Z, LANEID, WARPID, MASK_EQ, MASK_LT, MASK_LE, MASK_GT, MASK_GE, CTAID_X, CTAID_Y, CTAID_Z


cdef void fill(Block* b, const int64_t* constants, Py_ssize_t n) noexcept nogil:
    """Constant rows. constants: [n][4] of row, bytes per lane, special or -1, value."""
    cdef Py_ssize_t k, lane, lanes = b.launch.lanes
    cdef int64_t value
    cdef uint8_t* row
    for k in range(n):
        row = b.rows + constants[4 * k] * lanes * 4
        for lane in range(lanes):
            value = constants[4 * k + 3]
            if constants[4 * k + 2] >= 0:
                value = special(b, <int>constants[4 * k + 2], lane)
            if constants[4 * k + 1] == 8:
                (<int64_t*>row)[lane] = value
            elif constants[4 * k + 1] == 4:
                (<int32_t*>row)[lane] = <int32_t>value
            else:
                (<uint16_t*>row)[lane] = <uint16_t>value


cdef int64_t special(const Block* b, int which, Py_ssize_t lane) noexcept nogil:
    # 10: special registers
    cdef const Launch* launch = b.launch
    cdef int32_t x = launch.block[0], y = launch.block[1], grid_x = launch.grid[0], grid_y = launch.grid[1]
    cdef uint32_t bit = <uint32_t>1 << (lane & 31)
    if which == TID_X:
        return lane % x
    if which == TID_Y:
        return lane // x % y
    if which == TID_Z:
        return lane // x // y
    if which == LANEID:
        return lane & 31
    if which == WARPID:
        return lane >> 5
    if which == MASK_EQ:
        return bit
    if which == MASK_LT:
        return bit - 1
    if which == MASK_LE:
        return bit | (bit - 1)
    if which == MASK_GT:
        return <uint32_t>~(bit | (bit - 1))
    if which == MASK_GE:
        return <uint32_t>~(bit - 1)
    if which == CTAID_X:
        return b.index % grid_x
    if which == CTAID_Y:
        return b.index // grid_x % grid_y
    return b.index // grid_x // grid_y


cdef void begin(Block* b, int64_t index) noexcept nogil:
    """Block `index` is about to run. Shared memory and registers start as the same bytes whoever ran here before."""
    cdef const Launch* launch = b.launch
    cdef Py_ssize_t k
    b.index = index
    memset(b.shared, 0xFF, <size_t>launch.spans * 16)
    memset(b.local, 0xFF, <size_t>launch.local_size * launch.lanes)
    memset(b.local_written, 0, <size_t>launch.local_size * launch.lanes)
    memset(b.rows + <Py_ssize_t>launch.constants * launch.lanes * 4, 0,
           <size_t>(launch.rows - launch.constants) * launch.lanes * 4)
    memset(b.barriers, 0, sizeof(b.barriers))
    memset(b.committed, 0, sizeof(b.committed))
    for k in range(launch.lanes):
        b.live[k] = 0xFFFFFFFF if k < launch.threads else 0
        b.states[k] = RUNNING if k < launch.threads else EXITED
        b.pcs[k] = 0
    for k in range(launch.warps):
        b.copies[k].length = 0
    b.steps = b.n_mbarriers = b.idle = 0
    memset(b.refused, 0, launch.lanes)
    if b.shadow.told != NULL:
        memset(b.shadow.told, 0, <size_t>launch.lanes * b.shadow.columns * 4)
        memset(b.bulk, 0, launch.lanes * sizeof(Bulk))
        memset(b.products, 0, sizeof(b.products))
        memset(b.in_flight, 0, <size_t>launch.warps * launch.rows * 4)
        b.bulk_copies = 0
    if launch.checks:
        forget(b)


cdef bint run_whole(Block* b, int64_t patience, const int64_t* stop) except -1 nogil:
    """Run a block that has begun. False: b.fault says what is wrong. Raises what a signal's handler does."""
    cdef int outcome = PAUSED
    while outcome == PAUSED and stop[0] != AT_ONCE:
        b.pause = min(b.steps + BREATH, patience)
        outcome = run_block(b)
        if outcome == PAUSED:
            if b.steps >= patience:
                return fail(b, RUNAWAY, b.low, 0, 0, 0)
            with gil:
                PyErr_CheckSignals()
    return outcome != FAULTY


def run(
    const uint8_t[::1] code,            # [n] of program.INSTR
    const int32_t[::1] targets,         # of brx.idx, and rows of wgmma's accumulators
    const int64_t[:, ::1] constants,    # [n][4]: row, bytes per lane, special or -1, value
    const uint8_t[::1] pieces,          # [n] of memory.PIECE, by address
    const int32_t[::1] shape,           # grid x y z, block x y z, rows, constant rows, granule, checks, async
    int64_t patience,                   # instructions before a block is given up
    Py_ssize_t shared_size,
    Py_ssize_t local_size,
    int64_t[::1] shared_state,          # the next block to run; 1: begin none, 2: stop. Zeros at first.
):
    """Run blocks until none is left or one has failed. Each thread of a launch calls this with the same arguments.

    Returns (block, instruction, fault, lane, other lane, address, size, space, extra) of this worker's first fault
    or None, and the instructions at which lanes that had exited were missing from a barrier. What a signal's handler
    raises is raised within a block, and the other workers stop.
    """
    cdef Launch launch
    cdef Block block
    cdef int64_t index, blocks, breath = 0
    cdef bint well = True
    cdef int k
    launch.code, launch.length = <const Instr*>&code[0], code.shape[0] // sizeof(Instr)
    launch.pieces = <const Piece*>&pieces[0] if pieces.shape[0] else NULL
    launch.n_pieces = pieces.shape[0] // sizeof(Piece)
    launch.targets = &targets[0] if targets.shape[0] else NULL
    for k in range(3):
        launch.grid[k], launch.block[k] = shape[k], shape[3 + k]
    launch.rows, launch.constants, launch.granule, launch.checks = shape[6], shape[7], shape[8], shape[9]
    launch.asynchronous = shape[10]
    launch.threads = launch.block[0] * launch.block[1] * launch.block[2]
    launch.warps = (launch.threads + WARP - 1) // WARP
    launch.lanes = launch.warps * WARP
    launch.shared_size, launch.spans = <uint32_t>shared_size, <uint32_t>((shared_size + 15) // 16)
    launch.local_size = <uint32_t>local_size
    blocks = <int64_t>launch.grid[0] * launch.grid[1] * launch.grid[2]
    warned = set()
    try:
        if not take_room(&block, &launch):
            raise MemoryError('no memory for a block of threads')
        with nogil:
            fill(&block, &constants[0, 0] if constants.shape[0] else NULL, constants.shape[0])
            while not shared_state[1]:
                index = fetch_add(&shared_state[0], 1, RELAXED)
                if index >= blocks:
                    break
                begin(&block, index)
                refill(&block, &constants[0, 0] if constants.shape[0] else NULL, constants.shape[0])
                well = run_whole(&block, patience, &shared_state[1])
                if block.warned:
                    with gil:
                        warned.add(block.warned - 1)
                    block.warned = 0
                if not well:
                    shared_state[1] = 1
                    break
                breath += block.steps + BREATH // 256  # a block too short to look at signals, and what it begins with
                if breath >= BREATH:
                    breath = 0
                    with gil:
                        PyErr_CheckSignals()
    except BaseException:
        shared_state[1] = AT_ONCE
        raise
    finally:
        give_back(&block)
    if well:
        return None, warned
    return (
        block.index, block.fault_pc, block.fault, block.fault_lane, block.fault_other, block.fault_address,
        block.fault_size, block.fault_space, block.fault_extra,
    ), warned


cdef void refill(Block* b, const int64_t* constants, Py_ssize_t n) noexcept nogil:
    """The rows that change from block to block."""
    cdef Py_ssize_t k
    for k in range(n):
        if constants[4 * k + 2] >= CTAID_X:
            fill(b, constants + 4 * k, 1)


def sizes():
    """(bytes of an instruction, bytes of a piece of memory), to hold program.INSTR and memory.PIECE against."""
    return sizeof(Instr), sizeof(Piece)
