# SPDX-License-Identifier: Apache-2.0
# wgmma.mma_async.m64nNk16 (9.7.15.5): the product of four warps, computed when it is issued.
#
# Lane L of a warp has g = L / 4 and t = L % 4; warp w of the four has rows 16 w to 16 w + 15.
#     D [64][N]: d[4 j], d[4 j + 1] = D[16 w + g][8 j + 2 t..], d[4 j + 2], d[4 j + 3] = D[16 w + g + 8][8 j + 2 t..]
#     A [64][16] in registers: as mma's (_tensor.pxd)
# A matrix in shared memory (9.7.15.5.1.2) lies in chunks of 16 bytes, eight numbers along K, or along M or N if it is
# turned. Its descriptor has the first chunk's address, two offsets and a swizzle: rows of 32, 64 or 128 bytes whose
# chunks change places by the row's number among eight, which is bits 7 to 9 of the address.
# Sums are in the order and the rounding of mma's.
from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from mla_oracle.ptx._block cimport EXITED, Block, Instr, fail, row, sized
from mla_oracle.ptx._flights cimport A_IN_REGISTERS, GROUP, NEGATED, TURNED_A, TURNED_B, settle_products, take_off
from mla_oracle.ptx._formats cimport widen_f16
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._proxies cimport Seen, look, sees
from mla_oracle.ptx._tensor cimport eight, joined, parted, split

cdef extern from "_tensor.h" nogil:
    void add_products(const float* a, const eight* b, eight* sums)

cdef enum:
    WIDEST = 256        # N

# A matrix in shared memory, as its descriptor says (9.7.15.5.1.2.2); bytes.
cdef struct Matrix:
    uint32_t start
    uint32_t leading
    uint32_t stride
    uint32_t base           # the row of `start` in its pattern of eight
    uint32_t width          # of a row that is swizzled, 16: none is
    int32_t turned


cdef inline Matrix described(uint64_t descriptor, bint turned) noexcept nogil:
    cdef Matrix m
    cdef uint32_t swizzle = <uint32_t>(descriptor >> 62)
    m.start = <uint32_t>(descriptor & 0x3FFF) << 4
    m.leading = <uint32_t>(descriptor >> 16 & 0x3FFF) << 4
    m.stride = <uint32_t>(descriptor >> 32 & 0x3FFF) << 4
    m.base = <uint32_t>(descriptor >> 49 & 7)
    m.width = 256 >> swizzle if swizzle else 16
    m.turned = turned
    return m


cdef inline uint32_t chunk_of(const Matrix* m, uint32_t i, uint32_t k) noexcept nogil:
    """Where the chunk with element (i, k) lies; i: in M or N."""
    cdef uint32_t at, chunks = m.width // 16
    if m.turned:
        at = m.start + k % 8 * m.width
        i //= 8
        if chunks == 1:
            return at + i * m.stride + k // 8 * m.leading
        at += i % chunks * 16 + i // chunks * m.leading + k // 8 * m.stride
    else:
        at = m.start + i % 8 * m.width + i // 8 * m.stride
        if chunks == 1:
            return at + k // 8 * m.leading
        at += k // 8 * 16
    return at ^ (((at >> 7) - m.base) & (chunks - 1)) << 4


# Who reads, for _proxies.pxd.
cdef struct Reader:
    Py_ssize_t lane
    const uint32_t* view    # NULL: nothing is checked
    Seen seen
    uint32_t group


cdef inline bint fetch(Block* b, Reader* reader, uint32_t at, float* numbers, bint bf16) noexcept nogil:
    """The eight numbers of a chunk."""
    cdef uint16_t bits[8]
    cdef int k
    if at + 16 > b.launch.shared_size:
        return fail(b, OUT_OF_BOUNDS, reader.lane, at, 16, SHARED)
    if reader.view != NULL:
        if not sees(b, reader.lane, reader.view, at, &reader.seen, reader.lane // GROUP, reader.group):
            return False
    memcpy(bits, b.shared + at, 16)
    for k in range(8):
        if bf16:
            (<uint32_t*>numbers)[k] = <uint32_t>bits[k] << 16
        else:
            numbers[k] = widen_f16(bits[k])
    return True


cdef inline bint fetch_a(Block* b, const Matrix* m, Reader* reader, float* a, bint bf16) noexcept nogil:
    """a: [64][16]."""
    cdef float numbers[8]
    cdef uint32_t i, k, e
    if m.turned:
        for i in range(0, 64, 8):
            for k in range(16):
                if not fetch(b, reader, chunk_of(m, i, k), numbers, bf16):
                    return False
                for e in range(8):
                    a[16 * (i + e) + k] = numbers[e]
        return True
    for i in range(64):
        for k in range(0, 16, 8):
            if not fetch(b, reader, chunk_of(m, i, k), a + 16 * i + k, bf16):
                return False
    return True


cdef inline int place(int column) noexcept nogil:
    """Of eight columns, in the order of two registers of D side by side: 0 2 4 6 1 3 5 7."""
    return column // 2 + 4 * (column & 1)


cdef inline bint fetch_b(Block* b, const Matrix* m, Reader* reader, uint32_t n, float* d, bint bf16) noexcept nogil:
    """d: [n / 8][16][8], the last in the order of `place`."""
    cdef float numbers[8]
    cdef uint32_t i, k, e
    if m.turned:
        for i in range(0, n, 8):
            for k in range(16):
                if not fetch(b, reader, chunk_of(m, i, k), numbers, bf16):
                    return False
                for e in range(8):
                    d[16 * i + 8 * k + place(e)] = numbers[e]
        return True
    for i in range(n):
        for k in range(0, 16, 8):
            if not fetch(b, reader, chunk_of(m, i, k), numbers, bf16):
                return False
            for e in range(8):
                d[16 * (i & ~7) + 8 * (k + e) + place(i & 7)] = numbers[e]
    return True


cdef inline void take_registers(Block* b, const Instr* i, Py_ssize_t first, float* a) noexcept nogil:
    """A of one warp, a: [16][16]."""
    cdef float part[2][32]
    cdef int register, half, lane
    for register in range(4):
        split(<uint32_t*>row(b, i.operand[register]) + first, part[0], part[1], i.op == WGMMA_BF16)
        for half in range(2):
            for lane in range(32):
                a[16 * (lane // 4 + 8 * (register & 1)) + lane % 4 * 2 + half + 8 * (register >> 1)] = part[half][lane]


cdef inline void multiply_warp(
    Block* b, const Instr* i, Py_ssize_t first, const float* A, const float* B, bint adds,
) noexcept nogil:
    """D of one warp. A: [16][16], B: as fetch_b's."""
    cdef const int32_t* units = b.launch.targets + i.imm
    cdef float* d[4]
    cdef eight sums[8]
    cdef int j, k, r, half
    for j in range(i.count // 8):
        for k in range(4):
            d[k] = <float*>row(b, units[4 * j + k]) + first
        for half in range(2):   # rows 0 to 7, 8 to 15
            memset(sums, 0, sizeof(sums))
            for r in range(8):
                if adds:
                    sums[r] = joined(d[2 * half] + 4 * r, d[2 * half + 1] + 4 * r)
            add_products(A + 128 * half, <const eight*>B + 16 * j, sums)
            for r in range(8):
                parted(sums[r], d[2 * half] + 4 * r, d[2 * half + 1] + 4 * r)


cdef inline const uint32_t* viewed(Block* b, Py_ssize_t lane) noexcept nogil:
    """What all four warps from `lane` know: a lane of each is enough."""
    cdef uint32_t* view = b.shadow.view + lane // GROUP * b.shadow.columns
    cdef uint32_t* part = b.shadow.sum
    cdef Py_ssize_t warp, k
    if b.shadow.viewed[lane // GROUP] == b.shadow.version:
        return view
    look(b, lane, 32, view)
    for warp in range(1, 4):
        look(b, lane + 32 * warp, 32, part)
        for k in range(b.shadow.columns):
            view[k] = min(view[k], part[k])
    b.shadow.viewed[lane // GROUP] = b.shadow.version
    return view


cdef inline bint the_same(Block* b, const Instr* i, int operand, Py_ssize_t first) noexcept nogil:
    """Do all threads of a warpgroup name the same matrix? The contents of a descriptor must be (9.7.15.5.2)."""
    cdef const uint64_t* descriptor = <uint64_t*>sized(b, i.operand[operand], 8) + first
    cdef Py_ssize_t lane
    for lane in range(1, GROUP):
        if descriptor[lane] != descriptor[0]:
            fail(b, DIFFERENT_MATRICES, b.low + first + lane, 0, 0, 0)
            b.fault_other = <int32_t>(b.low + first)
            return False
    return True


cdef inline bint multiply_group(Block* b, const Instr* i, Py_ssize_t first) noexcept nogil:
    """One warpgroup."""
    cdef float A[64 * 16]
    cdef float B[WIDEST * 16]
    cdef bint bf16 = i.op == WGMMA_BF16
    cdef int held = 4 if i.flags & A_IN_REGISTERS else 1
    cdef Matrix m = described((<uint64_t*>sized(b, i.operand[held], 8))[first], i.flags & TURNED_B)
    cdef Py_ssize_t k, warp
    cdef Reader reader
    reader.lane, reader.view, reader.seen, reader.group = b.low + first, NULL, Seen(0, 0), 0
    if b.shadow.told != NULL:
        if not the_same(b, i, held, first) or (held == 1 and not the_same(b, i, 0, first)):
            return False
        reader.view, reader.group = viewed(b, b.low + first), b.products[reader.lane >> 5].committed + 1
        for warp in range(4):
            b.products[(reader.lane >> 5) + warp].issued = reader.group
            if not take_off(b, i, reader.lane + 32 * warp, reader.group):
                return False
    if not fetch_b(b, &m, &reader, i.count, B, bf16):
        return False
    if held == 1:
        m = described((<uint64_t*>sized(b, i.operand[0], 8))[first], i.flags & TURNED_A)
        if not fetch_a(b, &m, &reader, A, bf16):
            return False
    for warp in range(4):
        if held == 4:
            take_registers(b, i, first + 32 * warp, A + 256 * warp)
    if i.flags & NEGATED:
        for k in range(64 * 16):
            A[k] = -A[k]
    for warp in range(4):
        multiply_warp(b, i, first + 32 * warp, A + 256 * warp, B, (<uint32_t*>row(b, i.operand[held + 1]))[first])
    return True


cdef inline int whole_groups(Block* b, const uint32_t* mask, uint32_t* waiting) noexcept nogil:
    """As _warp.ready: are all warps of each warpgroup here?"""
    cdef Py_ssize_t first, k, base
    cdef int result = 1
    for first in range(0, b.n, 32):
        if not mask[first]:
            continue
        base = ((b.low + first) & ~<Py_ssize_t>(GROUP - 1)) - b.low
        for k in range(base, base + GROUP):
            if 0 <= k < b.n and mask[k]:
                continue
            if b.low + k >= b.launch.lanes or b.states[b.low + k] == EXITED:
                fail(b, PARTIAL_WARPGROUP, b.low + first, 0, 0, 0)
                b.fault_other = <int32_t>(b.low + k)
                return -1
            waiting[(b.low + first) >> 5] = 1
            result = 0
    return result


cdef inline bint warpgroup(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    """All warpgroups of the group, or warps if it is no product; each is whole."""
    cdef Py_ssize_t first = (GROUP - b.low % GROUP) % GROUP
    if i.op > WGMMA_BF16 and b.shadow.told != NULL:
        for first in range(0, b.n, 32):
            if mask[first]:
                settle_products(b, i, b.low + first)
    while i.op <= WGMMA_BF16 and first < b.n:
        if mask[first] and not multiply_group(b, i, first):
            return False
        first += GROUP
    return True
