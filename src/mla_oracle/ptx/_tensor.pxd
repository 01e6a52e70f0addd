# SPDX-License-Identifier: Apache-2.0
# ldmatrix, stmatrix, movmatrix and mma.sync.m16n8k16 (9.7.14.5), one warp at a time; every lane takes part.
#
# Lane L of a fragment has g = L / 4 and t = L % 4. An 8x8 matrix of 16-bit numbers gives lane L row g, columns 2t and
# 2t + 1 in one register: the warp's register is then the matrix itself, row after row.
#     A [16][16]: a0 = A[g][2t..], a1 = A[g + 8][2t..], a2 = A[g][2t + 8..], a3 = A[g + 8][2t + 8..]
#     B [16][8]:  b0 = B[2t..][g], b1 = B[2t + 8..][g]
#     C, D [16][8]: c0, c1 = C[g][2t..], c2, c3 = C[g + 8][2t..]
# Products are exact and D = C + sum over k ascending, each addition rounded to f32 (fmaf). Hardware adds several
# products at once and may truncate: no bound used with this may depend on the order or on rounding to nearest.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from mla_oracle.ptx._access cimport find_addresses, fits_shared
from mla_oracle.ptx._block cimport Block, Instr, row
from mla_oracle.ptx._formats cimport widen_f16
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._races cimport reads, writes

cdef extern from "_tensor.h" nogil:
    ctypedef struct eight:
        pass
    eight fused(float a, const eight* b, eight c)
    eight joined(const float* low, const float* high)
    void parted(eight x, float* low, float* high)


cdef inline void transpose(const uint16_t* a, uint16_t* d) noexcept nogil:
    cdef int r, c
    for r in range(8):
        for c in range(8):
            d[c * 8 + r] = a[r * 8 + c]


cdef inline bint load_matrices(Block* b, const Instr* i, Py_ssize_t first) noexcept nogil:
    """ldmatrix: lane 8 m + r has the address of row r of matrix m. Operands: i.count results, address."""
    cdef uint16_t rows[64]
    cdef uint8_t* d
    cdef int m, r
    cdef Py_ssize_t lane
    cdef uint64_t address
    for m in range(i.count):
        d = <uint8_t*>(<uint32_t*>row(b, i.operand[m]) + first)
        for r in range(8):
            lane = first + 8 * m + r
            address = b.where[lane]
            if not fits_shared(b, b.low + lane, address, 16):
                return False
            if b.launch.checks and not reads(b, <uint32_t>(b.low + lane), <uint32_t>address, 16, True):
                return False
            memcpy((<uint8_t*>rows if i.op == LDMATRIX_TRANS else d) + 16 * r, b.shared + address, 16)
        if i.op == LDMATRIX_TRANS:
            transpose(rows, <uint16_t*>d)
    return True


cdef inline bint store_matrices(Block* b, const Instr* i, Py_ssize_t first) noexcept nogil:
    """stmatrix: the same the other way round. Operands: address, i.count values."""
    cdef uint16_t rows[64]
    cdef uint8_t* a
    cdef int m, r
    cdef Py_ssize_t lane
    cdef uint64_t address
    for m in range(i.count):
        a = <uint8_t*>(<uint32_t*>row(b, i.operand[1 + m]) + first)
        if i.op == STMATRIX_TRANS:
            transpose(<uint16_t*>a, rows)
            a = <uint8_t*>rows
        for r in range(8):
            lane = first + 8 * m + r
            address = b.where[lane]
            if not fits_shared(b, b.low + lane, address, 16):
                return False
            if b.launch.checks and not writes(b, <uint32_t>(b.low + lane), <uint32_t>address, 16, a + 16 * r, 0):
                return False
            memcpy(b.shared + address, a + 16 * r, 16)
    return True


cdef inline void split(const uint32_t* pairs, float* low, float* high, bint bf16) noexcept nogil:
    """The numbers in the lower and the upper halves of 32 registers."""
    cdef int k
    if bf16:
        for k in range(32):
            (<uint32_t*>low)[k] = pairs[k] << 16
            (<uint32_t*>high)[k] = pairs[k] & 0xFFFF0000U
    else:
        for k in range(32):
            low[k] = widen_f16(pairs[k] & 0xFFFF)
            high[k] = widen_f16(pairs[k] >> 16)


cdef inline void turn(const float* a, eight* d) noexcept nogil:
    """[8][4] -> 4 times 8, columns 0 2 4 6 1 3 5 7: the order of two registers of C side by side."""
    cdef int t, j
    cdef float* out
    for t in range(4):
        out = <float*>(d + t)
        for j in range(4):
            out[j], out[4 + j] = a[8 * j + t], a[8 * j + 4 + t]


cdef inline void multiply(Block* b, const Instr* i, Py_ssize_t first) noexcept nogil:
    """mma: operands d0..d3, a0..a3, b0, b1, c0..c3. A[r][k] is the `k & 1` half of lane 4 (r % 8) + k % 8 / 2."""
    cdef float A[2][4][32]  # half, register, lane
    cdef float part[2][32]
    cdef eight B[2][2][4]   # B[k], by k / 8, half, k % 8 / 2
    cdef eight acc[2]
    cdef const float* low
    cdef const float* high
    cdef const eight* column
    cdef float* c[4]
    cdef float* d[4]
    cdef int register, r, k, t
    for register in range(4):
        c[register] = <float*>row(b, i.operand[10 + register]) + first
        d[register] = <float*>row(b, i.operand[register]) + first
        split(<uint32_t*>row(b, i.operand[4 + register]) + first, A[0][register], A[1][register], i.op == MMA_BF16)
    for register in range(2):
        split(<uint32_t*>row(b, i.operand[8 + register]) + first, part[0], part[1], i.op == MMA_BF16)
        turn(part[0], B[register][0])
        turn(part[1], B[register][1])
    for r in range(8):      # rows r and r + 8
        acc[0], acc[1] = joined(c[0] + 4 * r, c[1] + 4 * r), joined(c[2] + 4 * r, c[3] + 4 * r)
        for k in range(2):
            low, high = A[0][2 * k] + 4 * r, A[1][2 * k] + 4 * r
            for t in range(4):
                column = &B[k][0][t]
                acc[0], acc[1] = fused(low[t], column, acc[0]), fused(low[32 + t], column, acc[1])
                column = &B[k][1][t]
                acc[0], acc[1] = fused(high[t], column, acc[0]), fused(high[32 + t], column, acc[1])
        parted(acc[0], d[0] + 4 * r, d[1] + 4 * r)
        parted(acc[1], d[2] + 4 * r, d[3] + 4 * r)


cdef inline bint matrices(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    """All warps of the group; each is whole."""
    cdef Py_ssize_t first
    cdef uint16_t turned[64]
    if i.op <= STMATRIX_TRANS:
        find_addresses(b, i, i.operand[i.results])
    for first in range(0, b.n, 32):
        if not mask[first]:
            continue
        if i.op <= LDMATRIX_TRANS:
            if not load_matrices(b, i, first):
                return False
        elif i.op <= STMATRIX_TRANS:
            if not store_matrices(b, i, first):
                return False
        elif i.op == MOVMATRIX:
            transpose(<uint16_t*>(<uint32_t*>row(b, i.operand[1]) + first), turned)
            memcpy(<uint32_t*>row(b, i.operand[0]) + first, turned, 128)
        else:
            multiply(b, i, first)
    return True
