# SPDX-License-Identifier: Apache-2.0
# What a block of threads is made of. A register is a row: one number per lane, [lanes] of 2, 4 or 8 bytes, so that
# an instruction is one loop over contiguous memory. Rows are counted in units of 4 bytes per lane.
# Predicates are 32-bit rows of 0 and ~0, so that they are masks.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    WARP = 32
    MAX_LANES = 1024
    MAX_WARPS = 32
    OPERANDS = 16
    BARRIERS = 16
    PIECE = 8 * MAX_LANES   # bytes of one scratch row


# One instruction, as assembler.py writes it. `operand` holds rows: results first, then arguments.
cdef struct Instr:
    int32_t op
    int32_t kind            # what the operation's own file says: a space, a format, a table ...
    int32_t flags           # rounding, or what the operation's own file says
    int32_t guard           # row of the predicate, -1: none
    int32_t negated
    int32_t results         # how many of the operands are results
    int32_t width           # bytes per lane of a result
    int32_t size            # bytes of one element in memory, or of an argument
    int32_t count           # elements per lane
    int32_t line            # in the PTX text
    int32_t second          # offset of a second address
    int32_t suspects        # operands that a wgmma in flight may use, bit by bit; see flights.py
    int64_t imm             # address offset, branch target, ...
    int32_t operand[OPERANDS]


# A piece of device memory: addresses [low, high) stand for host[0 : high - low].
cdef struct Piece:
    uint64_t low
    uint64_t high
    uint8_t* host
    uint8_t* written        # one byte per byte, 0: nothing was ever written there; NULL: all of it was
    int32_t read_only


# The state of one lane.
cdef enum Lane:
    EXITED, RUNNING, AT_BARRIER, AT_COLLECTIVE, AT_MBARRIER


# What all blocks of a launch share.
cdef struct Launch:
    const Instr* code
    Py_ssize_t length
    const Piece* pieces
    Py_ssize_t n_pieces
    int32_t checks
    int32_t block[3]
    int32_t grid[3]
    int32_t threads         # in a block
    int32_t lanes           # the same, rounded up to whole warps
    int32_t warps
    int32_t rows
    int32_t constants       # rows of them that hold constants
    uint32_t shared_size
    uint32_t spans          # of 16 bytes of shared memory
    uint32_t local_size
    int32_t granule         # bytes: the smallest access to shared memory in the code
    int32_t asynchronous    # the code has mbarriers, wgmma or bulk copies
    const int32_t* targets  # tables of brx.idx, and the rows of wgmma's accumulators


cdef struct Barrier:
    int32_t arrived         # lanes, 0: the barrier is not in use
    int32_t count           # lanes it waits for, 0: the whole block
    int32_t pc              # of the first to arrive
    int32_t n_true          # bar.red
    uint32_t waiting        # warps
    uint32_t arriving       # warps, by bar.arrive


# Who touched shared memory when; see _races.pxd. A span is 16 bytes, a granule Launch.granule bytes.
cdef struct Shadow:
    uint32_t* writes        # [granules] the last: stamp << 11 | atomic << 10 | lane
    uint32_t* reads         # [spans][read_columns][granules of a span] the last: stamp << 6 | several lanes << 5 | lane
    int32_t read_columns    # warps, and others: see _proxies.pxd
    uint32_t* last_write    # [spans] no granule's stamp is later
    uint32_t* last_read     # [spans]
    uint16_t* written       # [spans] a bit per byte
    uint32_t now
    uint32_t floor          # everything stamped before it is ordered before everything that follows
    uint32_t stamp[MAX_WARPS]
    uint32_t known[MAX_WARPS][MAX_WARPS]    # [w][v]: w has seen all of v stamped before
    uint32_t seen[MAX_LANES]                # when the lane last met others of its warp
    # see _clocks.pxd; NULL unless Launch.asynchronous
    uint32_t* told          # [lanes][columns]
    uint32_t* handed        # [granules] when a copy in flight was handed to an mbarrier | BULK, 0: it was not
    uint32_t* sum           # [columns] room
    uint32_t* view          # [warpgroups][columns] what each knew when `version` was `viewed`
    uint32_t viewed[MAX_WARPS]
    uint32_t version        # grows when anybody learns anything
    int32_t columns


# A cp.async that has not been waited for.
cdef struct Copy:
    uint32_t address
    uint16_t lane
    uint16_t size
    uint32_t group


cdef struct Copies:
    Copy* items
    Py_ssize_t length
    Py_ssize_t room


# An mbarrier object; see _mbarrier.pxd.
cdef struct MBarrier:
    uint32_t address
    uint32_t phase          # how many are complete
    int32_t expected        # arrivals of a phase
    int32_t pending         # of them, those to come
    int64_t bytes           # to come: the tx-count
    uint32_t lane           # that made it, and when
    uint32_t stamp
    uint32_t* gathered      # [columns] what those who have arrived know
    uint32_t* done          # [columns] the same, of the phases that are complete


# What a lane has asked of bulk copies out; copies are counted in the block.
cdef struct Bulk:
    uint32_t open           # the last copy of the group that is not committed
    uint32_t committed      # groups
    uint32_t last[8]        # the last copy of each of the last eight groups
    uint32_t waited         # the last copy that it has waited for


# What a warp has asked of wgmma; groups are counted from 1.
cdef struct Products:
    uint32_t committed
    uint32_t waited         # the last group that it has waited for
    uint32_t issued         # the last group with a product in it


# One block as it runs, with the room it needs; a worker uses it for one block after the other.
cdef struct Block:
    const Launch* launch
    int64_t index           # in the grid
    uint8_t* rows           # [rows][lanes] x 4 bytes
    uint32_t* live          # [lanes], ~0: exists and has not exited
    uint32_t* mask          # [lanes], ~0: executes now
    uint32_t* guarded       # [lanes], the same under the instruction's predicate
    int32_t* pcs            # [lanes]
    int32_t* states         # [lanes]
    int32_t* barrier_of     # [lanes], where a lane AT_BARRIER or AT_MBARRIER waits
    uint8_t* refused        # [lanes], 1: a lane that was AT_MBARRIER is to learn that its wait has failed
    uint64_t* where         # [lanes], addresses
    uint8_t* scratch        # [OPERANDS] pieces: results before they are masked, flushed arguments
    uint8_t* shared         # [shared_size]
    uint8_t* local          # [lanes][local_size]
    uint8_t* local_written  # the same
    int32_t* last_piece     # [length], where an instruction last found its memory
    Barrier barriers[BARRIERS]
    MBarrier* mbarriers
    int32_t n_mbarriers
    int32_t mbarrier_room
    Bulk* bulk              # [lanes], NULL unless Launch.asynchronous
    uint32_t bulk_copies
    Products products[MAX_WARPS]
    uint32_t* in_flight     # [warps][rows] how a wgmma last used the row: group << 10 | N, or | 1 as A
    int32_t idle            # how often all that wait were refused since something last happened
    Shadow shadow
    Copies copies[MAX_WARPS]
    uint32_t committed[MAX_LANES]   # groups of cp.async
    # the group of lanes that executes: warps [first, last), lanes [low, low + n)
    int32_t pc
    int32_t other           # the lowest pc of the lanes that run elsewhere, or ahead wait for lanes of their warp
    Py_ssize_t low
    Py_ssize_t n
    int32_t full            # every live lane between low and low + n is
    int32_t dense           # every lane between low and low + n is
    int64_t steps           # instructions so far
    int64_t pause           # how many there may be until the block pauses
    int32_t warned          # lanes had exited where others met a barrier: its instruction + 1
    # the first thing found wrong
    int32_t fault
    int32_t fault_pc
    int32_t fault_lane
    int32_t fault_other     # another lane, or -1
    int64_t fault_address
    int64_t fault_size
    int32_t fault_space
    int32_t fault_extra


cdef inline uint8_t* row(const Block* b, int32_t unit) noexcept nogil:
    """The lanes of the group in a row of 4-byte elements."""
    return b.rows + (<Py_ssize_t>unit * b.launch.lanes + b.low) * 4


cdef inline uint8_t* sized(const Block* b, int32_t unit, int width) noexcept nogil:
    """The lanes of the group in a row of elements of `width` bytes."""
    return b.rows + <Py_ssize_t>unit * b.launch.lanes * 4 + b.low * width


cdef inline bint fail(
    Block* b, int32_t fault, Py_ssize_t lane, int64_t address, int64_t size, int32_t space,
) noexcept nogil:
    """Note a fault of `lane` (counted in the block); always False."""
    b.fault, b.fault_pc, b.fault_lane, b.fault_other = fault, b.pc, <int32_t>lane, -1
    b.fault_address, b.fault_size, b.fault_space = address, size, space
    return False
