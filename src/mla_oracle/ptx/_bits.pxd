# SPDX-License-Identifier: Apache-2.0
# Logic, shifts, fields of bits, packing. Section numbers are those of PTX ISA 9.0.
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from mla_oracle.ptx._block cimport Instr
from mla_oracle.ptx._opcodes cimport *

cdef extern from * nogil:
    """
    static inline int32_t count_ones(uint64_t x) { return __builtin_popcountll(x); }
    static inline int32_t leading_zeros(uint64_t x) { return x ? __builtin_clzll(x) : 64; }
    """
    int32_t count_ones(uint64_t x)
    int32_t leading_zeros(uint64_t x)


cdef inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t control, int mode) noexcept nogil:
    # 9.7.9.7 prmt: byte k of the result is byte (control >> 4k) & 7 of b:a, or its sign eight times.
    cdef uint64_t both = <uint64_t>b << 32 | a
    cdef uint32_t result = 0, byte, pick, c = control & 3
    cdef int k
    for k in range(4):
        if mode == 0:
            pick = control >> (4 * k)
        elif mode == 1:     # f4e
            pick = (c + k) & 7
        elif mode == 2:     # b4e
            pick = (c - k) & 7
        elif mode == 3:     # rc8
            pick = c
        elif mode == 4:     # ecl
            pick = max(<uint32_t>k, c)
        elif mode == 5:     # ecr
            pick = min(<uint32_t>k, c)
        else:               # rc16
            pick = (k & 1) + 2 * (c & 1)
        byte = <uint32_t>(both >> (8 * (pick & 7))) & 0xFF
        if mode == 0 and pick & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * k)
    return result


cdef inline uint64_t field(uint64_t a, uint32_t start, uint32_t length, int bits, bint signed) noexcept nogil:
    # 9.7.1.19 bfe: beyond the field, and beyond the number, its sign: the top bit of the field, or of the number.
    cdef uint64_t result = 0, sign
    cdef uint32_t top
    start &= 0xFF
    length &= 0xFF
    if length == 0:
        return 0
    top = min(start + length - 1, <uint32_t>bits - 1)
    sign = a >> top & 1 if signed else 0
    if start < <uint32_t>bits:
        result = a >> start
    if length < 64:
        result &= (<uint64_t>1 << length) - 1
    if sign:
        length = min(length, max(<uint32_t>bits, start) - start)
        if length < 64:
            result |= ~<uint64_t>0 << length
    return result


cdef inline uint64_t inserted(uint64_t a, uint64_t b, uint32_t start, uint32_t length, int bits) noexcept nogil:
    # 9.7.1.20 bfi: `length` low bits of a, put into b at `start`.
    cdef uint64_t mask
    start &= 0xFF
    length &= 0xFF
    if start >= <uint32_t>bits or length == 0:
        return b
    mask = ~<uint64_t>0 if length >= 64 else (<uint64_t>1 << length) - 1
    return b & ~(mask << start) | (a & mask) << start


cdef inline uint32_t table3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) noexcept nogil:
    # 9.7.8.6 lop3: bit (a, b, c) of the table, a the highest.
    cdef uint32_t result = 0
    cdef int k
    for k in range(8):
        if table >> k & 1:
            result |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return result


cdef inline uint64_t reversed_bits(uint64_t x, int bits) noexcept nogil:
    cdef uint64_t result = 0
    cdef int k
    for k in range(bits):
        result |= (x >> k & 1) << (bits - 1 - k)
    return result


cdef inline void bits(const Instr* i, uint8_t* out, uint8_t** args, Py_ssize_t n) noexcept nogil:
    """out[lane] = op(args[0][lane], ...) for n lanes."""
    cdef int op = i.op
    cdef Py_ssize_t k
    cdef uint16_t* d2 = <uint16_t*>out
    cdef uint16_t* a2 = <uint16_t*>args[0]
    cdef uint16_t* b2 = <uint16_t*>args[1]
    cdef int16_t* sa2 = <int16_t*>args[0]
    cdef uint32_t* d4 = <uint32_t*>out
    cdef uint32_t* a4 = <uint32_t*>args[0]
    cdef uint32_t* b4 = <uint32_t*>args[1]
    cdef uint32_t* c4 = <uint32_t*>args[2]
    cdef int32_t* sa4 = <int32_t*>args[0]
    cdef uint64_t* d8 = <uint64_t*>out
    cdef uint64_t* a8 = <uint64_t*>args[0]
    cdef uint64_t* b8 = <uint64_t*>args[1]
    cdef int64_t* sa8 = <int64_t*>args[0]
    # and, or, xor, not, shl, shr, shf, lop3 (9.7.8); a shift by the width or more leaves nothing, or the sign
    if op == AND_16:
        for k in range(n):
            d2[k] = a2[k] & b2[k]
    elif op == AND_32:
        for k in range(n):
            d4[k] = a4[k] & b4[k]
    elif op == AND_64:
        for k in range(n):
            d8[k] = a8[k] & b8[k]
    elif op == OR_16:
        for k in range(n):
            d2[k] = a2[k] | b2[k]
    elif op == OR_32:
        for k in range(n):
            d4[k] = a4[k] | b4[k]
    elif op == OR_64:
        for k in range(n):
            d8[k] = a8[k] | b8[k]
    elif op == XOR_16:
        for k in range(n):
            d2[k] = a2[k] ^ b2[k]
    elif op == XOR_32:
        for k in range(n):
            d4[k] = a4[k] ^ b4[k]
    elif op == XOR_64:
        for k in range(n):
            d8[k] = a8[k] ^ b8[k]
    elif op == NOT_16:
        for k in range(n):
            d2[k] = <uint16_t>~a2[k]
    elif op == NOT_32:
        for k in range(n):
            d4[k] = <uint32_t>~a4[k]
    elif op == NOT_64:
        for k in range(n):
            d8[k] = <uint64_t>~a8[k]
    elif op == SHL_16:
        for k in range(n):
            d2[k] = <uint16_t>(<uint32_t>a2[k] << b4[k]) if b4[k] < 16 else 0
    elif op == SHR_S16:
        for k in range(n):
            d2[k] = <uint16_t>(sa2[k] >> (b4[k] if b4[k] < 16 else 15))
    elif op == SHR_U16:
        for k in range(n):
            d2[k] = <uint16_t>(a2[k] >> b4[k]) if b4[k] < 16 else 0
    elif op == SHL_32:
        for k in range(n):
            d4[k] = a4[k] << b4[k] if b4[k] < 32 else 0
    elif op == SHR_S32:
        for k in range(n):
            d4[k] = <uint32_t>(sa4[k] >> (b4[k] if b4[k] < 32 else 31))
    elif op == SHR_U32:
        for k in range(n):
            d4[k] = <uint32_t>(a4[k] >> b4[k]) if b4[k] < 32 else 0
    elif op == SHL_64:
        for k in range(n):
            d8[k] = a8[k] << b4[k] if b4[k] < 64 else 0
    elif op == SHR_S64:
        for k in range(n):
            d8[k] = <uint64_t>(sa8[k] >> (b4[k] if b4[k] < 64 else 63))
    elif op == SHR_U64:
        for k in range(n):
            d8[k] = <uint64_t>(a8[k] >> b4[k]) if b4[k] < 64 else 0
    elif op == SHF_L_WRAP:
        for k in range(n):
            d4[k] = <uint32_t>((<uint64_t>b4[k] << 32 | a4[k]) << (c4[k] & 31) >> 32)
    elif op == SHF_L_CLAMP:
        for k in range(n):
            d4[k] = <uint32_t>((<uint64_t>b4[k] << 32 | a4[k]) << min(c4[k], <uint32_t>32) >> 32)
    elif op == SHF_R_WRAP:
        for k in range(n):
            d4[k] = <uint32_t>((<uint64_t>b4[k] << 32 | a4[k]) >> (c4[k] & 31))
    elif op == SHF_R_CLAMP:
        for k in range(n):
            d4[k] = <uint32_t>((<uint64_t>b4[k] << 32 | a4[k]) >> min(c4[k], <uint32_t>32))
    elif op == LOP3:
        for k in range(n):
            d4[k] = table3(a4[k], b4[k], c4[k], <uint32_t>i.imm)
    # prmt (9.7.9.7), popc, clz, bfind, brev, bfe, bfi (9.7.1.14 - 9.7.1.20); i.width tells 32 bits from 64
    elif op == PRMT:
        for k in range(n):
            d4[k] = permuted(a4[k], b4[k], c4[k], i.kind)
    elif op == BFE_U or op == BFE_S:
        for k in range(n):
            if i.width == 4:
                d4[k] = <uint32_t>field(a4[k], b4[k], c4[k], 32, op == BFE_S)
            else:
                d8[k] = field(a8[k], b4[k], c4[k], 64, op == BFE_S)
    elif op == BFI:
        for k in range(n):
            if i.width == 4:
                d4[k] = <uint32_t>inserted(a4[k], b4[k], c4[k], (<uint32_t*>args[3])[k], 32)
            else:
                d8[k] = inserted(a8[k], b8[k], c4[k], (<uint32_t*>args[3])[k], 64)
    elif op == POPC_32:
        for k in range(n):
            d4[k] = count_ones(a4[k])
    elif op == POPC_64:
        for k in range(n):
            d4[k] = count_ones(a8[k])
    elif op == CLZ_32:
        for k in range(n):
            d4[k] = leading_zeros(a4[k]) - 32
    elif op == CLZ_64:
        for k in range(n):
            d4[k] = leading_zeros(a8[k])
    elif op == BREV_32:
        for k in range(n):
            d4[k] = <uint32_t>reversed_bits(a4[k], 32)
    elif op == BREV_64:
        for k in range(n):
            d8[k] = reversed_bits(a8[k], 64)
    elif op == BFIND_U:
        for k in range(n):
            d4[k] = <uint32_t>(63 - leading_zeros(a4[k]))
    elif op == BFIND_S:
        for k in range(n):
            d4[k] = <uint32_t>(63 - leading_zeros(~a4[k] if sa4[k] < 0 else a4[k]))
    # pack and unpack (9.7.9.4): element 0 lies in the lowest bits
    elif op == PACK_2X16:
        for k in range(n):
            d4[k] = a2[k] | <uint32_t>b2[k] << 16
    elif op == PACK_2X32:
        for k in range(n):
            d8[k] = a4[k] | <uint64_t>b4[k] << 32
    elif op == PACK_4X16:
        for k in range(n):
            d8[k] = (a2[k] | <uint64_t>b2[k] << 16 | <uint64_t>(<uint16_t*>args[2])[k] << 32
                     | <uint64_t>(<uint16_t*>args[3])[k] << 48)
    elif op == UNPACK_2X16:     # i.kind: which element
        for k in range(n):
            d2[k] = <uint16_t>(a4[k] >> (16 * i.kind))
    elif op == UNPACK_4X16:
        for k in range(n):
            d2[k] = <uint16_t>(a8[k] >> (16 * i.kind))
    elif op == UNPACK_2X32:
        for k in range(n):
            d4[k] = <uint32_t>(a8[k] >> (32 * i.kind))
