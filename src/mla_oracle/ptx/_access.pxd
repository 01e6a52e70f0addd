# SPDX-License-Identifier: Apache-2.0
# ld and st (9.7.9.8 - 9.7.9.11): first the address of every lane, checked, becomes a place on the host (b.where);
# then the numbers move. Bounds are always checked, the rest if Launch.checks.
#
# Addresses: shared and local memory have windows in the generic address space (SHARED_BASE, LOCAL_BASE); pieces of
# device memory lie higher, far apart. Operands of LOAD: [results], address; of STORE: address, [values].
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy, memset

from mla_oracle.ptx._block cimport Block, Instr, Launch, Piece, fail, row, sized
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._races cimport reads, writes

cdef extern from *:
    """
    #define SHARED_BASE ((uint64_t)1 << 40)
    #define LOCAL_BASE ((uint64_t)1 << 41)
    #define WINDOW ((uint64_t)1 << 40)
    """
    const uint64_t SHARED_BASE, LOCAL_BASE, WINDOW

# Instr.flags of memory instructions.
cdef enum AccessFlag:
    WIDE_ADDRESS = 1
    SIGNED = 2


cdef inline void find_addresses(Block* b, const Instr* i, int32_t unit) noexcept nogil:
    """b.where[lane] = the lane's address register + the offset."""
    cdef Py_ssize_t k
    cdef uint64_t* wide
    cdef uint32_t* narrow
    if i.flags & WIDE_ADDRESS:
        wide = <uint64_t*>sized(b, unit, 8)
        for k in range(b.n):
            b.where[k] = wide[k] + <uint64_t>i.imm
    else:
        narrow = <uint32_t*>row(b, unit)
        for k in range(b.n):
            b.where[k] = <uint32_t>(narrow[k] + <uint32_t>i.imm)


cdef inline Py_ssize_t first_lane(const uint32_t* mask, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k = 0
    while k < n - 1 and not mask[k]:
        k += 1
    return k


cdef inline int find_space(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    """What a generic address means (5.4): all lanes must agree. Shared and local addresses lose their base."""
    cdef Py_ssize_t k = first_lane(mask, b.n)
    cdef uint64_t window = b.where[k] & ~(WINDOW - 1)
    cdef uint64_t address = b.where[k]
    if window != SHARED_BASE and window != LOCAL_BASE:
        window = 0
    for k in range(b.n):
        if mask[k]:
            address = b.where[k] & ~(WINDOW - 1)
            if (address if address == SHARED_BASE or address == LOCAL_BASE else 0) != window:
                fail(b, WRONG_SPACE, b.low + k, b.where[k], i.size * i.count, GENERIC)
                return -1
            b.where[k] -= window
    return SHARED if window == SHARED_BASE else LOCAL if window == LOCAL_BASE else GLOBAL


cdef inline const Piece* piece_of(Block* b, uint64_t address) noexcept nogil:
    """The piece of memory that holds `address`, or the last one below it, or NULL."""
    cdef Py_ssize_t low = 0, high = b.launch.n_pieces, middle
    while low < high:
        middle = (low + high) // 2
        if b.launch.pieces[middle].low <= address:
            low = middle + 1
        else:
            high = middle
    return b.launch.pieces + low - 1 if low else NULL


cdef inline bint in_global(Block* b, const Instr* i, const uint32_t* mask, bint read, bint write) noexcept nogil:
    cdef Py_ssize_t k, n = b.n
    cdef uint64_t bytes = i.size * i.count, address, low = ~<uint64_t>0, high = 0, bits = 0
    cdef const Piece* piece = b.launch.pieces + b.last_piece[b.pc]
    if b.launch.n_pieces == 0:
        piece = NULL
    elif b.dense and mask == b.mask + b.low and not (write and piece.read_only) and piece.written == NULL:
        for k in range(n):
            low = min(low, b.where[k])
            high = max(high, b.where[k])
            bits |= b.where[k]
        if low >= piece.low and high + bytes <= piece.high and not bits & (bytes - 1):
            for k in range(n):
                b.where[k] += <uint64_t>piece.host - piece.low
            return True
    for k in range(n):
        if not mask[k]:
            continue
        address = b.where[k]
        if piece == NULL or address < piece.low or address + bytes > piece.high:
            piece = piece_of(b, address)
            if piece == NULL or address + bytes > piece.high or address + bytes < address:
                return fail(b, OUT_OF_BOUNDS, b.low + k, address, bytes, GLOBAL)
            b.last_piece[b.pc] = <int32_t>(piece - b.launch.pieces)
        if address & (bytes - 1):
            return fail(b, MISALIGNED, b.low + k, address, bytes, GLOBAL)
        if write and piece.read_only:
            return fail(b, READ_ONLY, b.low + k, address, bytes, GLOBAL)
        if piece.written != NULL and b.launch.checks:
            if read and memchr(piece.written + (address - piece.low), 0, bytes) != NULL:
                return fail(b, NEVER_WRITTEN, b.low + k, address, bytes, GLOBAL)
            if write:
                memset(piece.written + (address - piece.low), 1, bytes)
        b.where[k] = <uint64_t>(piece.host + (address - piece.low))
    return True


cdef inline bint in_local(Block* b, const Instr* i, const uint32_t* mask, bint read, bint write) noexcept nogil:
    cdef Py_ssize_t k
    cdef uint64_t bytes = i.size * i.count, address, at
    for k in range(b.n):
        if not mask[k]:
            continue
        address = b.where[k]
        if address + bytes > b.launch.local_size or address + bytes < address:
            return fail(b, OUT_OF_BOUNDS, b.low + k, address, bytes, LOCAL)
        if address & (bytes - 1):
            return fail(b, MISALIGNED, b.low + k, address, bytes, LOCAL)
        at = <uint64_t>(b.low + k) * b.launch.local_size + address
        if b.launch.checks:
            if read and memchr(b.local_written + at, 0, bytes) != NULL:
                return fail(b, NEVER_WRITTEN, b.low + k, address, bytes, LOCAL)
            if write:
                memset(b.local_written + at, 1, bytes)
        b.where[k] = <uint64_t>(b.local + at)
    return True


cdef inline bint fits_shared(Block* b, Py_ssize_t lane, uint64_t address, uint64_t bytes) noexcept nogil:
    if address + bytes > b.launch.shared_size or address + bytes < address:
        return fail(b, OUT_OF_BOUNDS, lane, address, bytes, SHARED)
    if address & (bytes - 1):
        return fail(b, MISALIGNED, lane, address, bytes, SHARED)
    return True


cdef inline bint in_shared(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    """For reading."""
    cdef Py_ssize_t k
    cdef uint32_t bytes = i.size * i.count
    for k in range(b.n):
        if not mask[k]:
            continue
        if not fits_shared(b, b.low + k, b.where[k], bytes):
            return False
        if b.launch.checks and not reads(b, <uint32_t>(b.low + k), <uint32_t>b.where[k], bytes, False):
            return False
        b.where[k] = <uint64_t>(b.shared + b.where[k])
    return True


cdef inline uint64_t element(uint64_t place, int size, bint signed) noexcept nogil:
    """The number at a place on the host, its sign or zeros above it."""
    cdef uint8_t one
    cdef uint16_t two
    cdef uint32_t four
    cdef uint64_t eight
    if size == 4:
        memcpy(&four, <void*>place, 4)
        return <uint64_t><int64_t><int32_t>four if signed else four
    if size == 2:
        memcpy(&two, <void*>place, 2)
        return <uint64_t><int64_t><int16_t>two if signed else two
    if size == 1:
        one = (<uint8_t*>place)[0]
        return <uint64_t><int64_t><int8_t>one if signed else one
    memcpy(&eight, <void*>place, 8)
    return eight


cdef inline bint load(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    cdef int space = i.kind, e
    cdef Py_ssize_t k, stray = 0
    cdef uint8_t* out
    cdef bint signed = i.flags & SIGNED
    find_addresses(b, i, i.operand[i.results])
    if space == GENERIC:
        space = find_space(b, i, mask)
    if space < 0:
        return False
    if space == GLOBAL and not in_global(b, i, mask, True, False):
        return False
    if space == SHARED and not in_shared(b, i, mask):
        return False
    if space == LOCAL and not in_local(b, i, mask, True, False):
        return False
    if b.dense and mask == b.mask + b.low and i.count == 1 and i.size == i.width:
        for k in range(b.n):
            stray += b.where[k] != b.where[0] + <uint64_t>(k * i.size)
        if not stray:
            memcpy(sized(b, i.operand[0], i.width), <void*>b.where[0], b.n * i.size)
            return True
    for e in range(i.count):
        if i.operand[e] < 0:
            continue
        out = sized(b, i.operand[e], i.width)
        if i.width == 4:
            for k in range(b.n):
                if mask[k]:
                    (<uint32_t*>out)[k] = <uint32_t>element(b.where[k] + e * i.size, i.size, signed)
        elif i.width == 8:
            for k in range(b.n):
                if mask[k]:
                    (<uint64_t*>out)[k] = element(b.where[k] + e * i.size, i.size, signed)
        else:
            for k in range(b.n):
                if mask[k]:
                    (<uint16_t*>out)[k] = <uint16_t>element(b.where[k] + e * i.size, i.size, signed)
    return True


cdef inline void gather(Block* b, const Instr* i, Py_ssize_t k, uint8_t* value) noexcept nogil:
    """The elements lane k stores, side by side; the first operand is the address."""
    cdef int e
    for e in range(i.count):
        memcpy(value + e * i.size, sized(b, i.operand[1 + e], i.width) + k * i.width, i.size)


cdef inline bint store(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    cdef int space = i.kind, bytes = i.size * i.count
    cdef Py_ssize_t k, stray = 0
    cdef uint8_t value[64]
    find_addresses(b, i, i.operand[0])
    if space == GENERIC:
        space = find_space(b, i, mask)
    if space < 0:
        return False
    if space == SHARED:
        for k in range(b.n):
            if mask[k]:
                if not fits_shared(b, b.low + k, b.where[k], bytes):
                    return False
                gather(b, i, k, value)
                if b.launch.checks and not writes(b, <uint32_t>(b.low + k), <uint32_t>b.where[k], bytes, value, 0):
                    return False
                memcpy(b.shared + b.where[k], value, bytes)
        return True
    if space == GLOBAL and not in_global(b, i, mask, False, True):
        return False
    if space == LOCAL and not in_local(b, i, mask, False, True):
        return False
    if b.dense and mask == b.mask + b.low and i.count == 1 and i.size == i.width:
        for k in range(b.n):
            stray += b.where[k] != b.where[0] + <uint64_t>(k * i.size)
        if not stray:
            memcpy(<void*>b.where[0], sized(b, i.operand[1], i.width), b.n * i.size)
            return True
    for k in range(b.n):
        if mask[k]:
            gather(b, i, k, <uint8_t*>b.where[k])
    return True
