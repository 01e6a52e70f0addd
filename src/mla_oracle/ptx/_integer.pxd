# SPDX-License-Identifier: Apache-2.0
# Integer arithmetic, comparison and movement; _bits.pxd has the rest. Section numbers are those of PTX ISA 9.0.
#
# Division by zero gives all ones and a remainder the dividend, as hardware does (the ISA leaves both open).
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from mla_oracle.ptx._bits cimport bits
from mla_oracle.ptx._block cimport Instr
from mla_oracle.ptx._opcodes cimport *

cdef extern from * nogil:
    """
    static inline uint64_t high_unsigned(uint64_t a, uint64_t b) { return (unsigned __int128)a * b >> 64; }
    static inline uint64_t high_signed(int64_t a, int64_t b) { return (uint64_t)((__int128)a * b >> 64); }
    """
    uint64_t high_unsigned(uint64_t a, uint64_t b)
    uint64_t high_signed(int64_t a, int64_t b)


cdef inline void integer(const Instr* i, uint8_t* out, uint8_t** args, Py_ssize_t n) noexcept nogil:
    """out[lane] = op(args[0][lane], ...) for n lanes; i.flags inverts the comparisons."""
    cdef int op = i.op
    cdef Py_ssize_t k
    cdef uint16_t* d2 = <uint16_t*>out
    cdef uint16_t* a2 = <uint16_t*>args[0]
    cdef uint16_t* b2 = <uint16_t*>args[1]
    cdef int16_t* sa2 = <int16_t*>args[0]
    cdef int16_t* sb2 = <int16_t*>args[1]
    cdef uint32_t* d4 = <uint32_t*>out
    cdef uint32_t* a4 = <uint32_t*>args[0]
    cdef uint32_t* b4 = <uint32_t*>args[1]
    cdef uint32_t* c4 = <uint32_t*>args[2]
    cdef int32_t* sa4 = <int32_t*>args[0]
    cdef int32_t* sb4 = <int32_t*>args[1]
    cdef uint64_t* d8 = <uint64_t*>out
    cdef uint64_t* a8 = <uint64_t*>args[0]
    cdef uint64_t* b8 = <uint64_t*>args[1]
    cdef int64_t* sa8 = <int64_t*>args[0]
    cdef int64_t* sb8 = <int64_t*>args[1]
    cdef uint32_t flip = 0xFFFFFFFFU if i.flags else 0
    # mov (9.7.9.3)
    if op == MOV_16:
        memcpy(d2, a2, 2 * n)
    elif op == MOV_32:
        memcpy(d4, a4, 4 * n)
    elif op == MOV_64:
        memcpy(d8, a8, 8 * n)
    # add, sub, mul, div, rem, abs, neg, min, max (9.7.1.1 - 9.7.1.13)
    elif op == ADD_16:
        for k in range(n):
            d2[k] = <uint16_t>(a2[k] + b2[k])
    elif op == ADD_32:
        for k in range(n):
            d4[k] = a4[k] + b4[k]
    elif op == ADD_64:
        for k in range(n):
            d8[k] = a8[k] + b8[k]
    elif op == SUB_16:
        for k in range(n):
            d2[k] = <uint16_t>(a2[k] - b2[k])
    elif op == SUB_32:
        for k in range(n):
            d4[k] = a4[k] - b4[k]
    elif op == SUB_64:
        for k in range(n):
            d8[k] = a8[k] - b8[k]
    elif op == MUL_LO_16:
        for k in range(n):
            d2[k] = <uint16_t>(<uint32_t>a2[k] * b2[k])
    elif op == MUL_LO_32:
        for k in range(n):
            d4[k] = a4[k] * b4[k]
    elif op == MUL_LO_64:
        for k in range(n):
            d8[k] = a8[k] * b8[k]
    elif op == MUL_HI_S16:
        for k in range(n):
            d2[k] = <uint16_t>((<int32_t>sa2[k] * <int32_t>sb2[k]) >> 16)
    elif op == MUL_HI_U16:
        for k in range(n):
            d2[k] = <uint16_t>((<uint32_t>a2[k] * <uint32_t>b2[k]) >> 16)
    elif op == MUL_HI_S32:
        for k in range(n):
            d4[k] = <uint32_t>((<int64_t>sa4[k] * sb4[k]) >> 32)
    elif op == MUL_HI_U32:
        for k in range(n):
            d4[k] = <uint32_t>((<uint64_t>a4[k] * b4[k]) >> 32)
    elif op == MUL_HI_S64:
        for k in range(n):
            d8[k] = high_signed(sa8[k], sb8[k])
    elif op == MUL_HI_U64:
        for k in range(n):
            d8[k] = high_unsigned(a8[k], b8[k])
    elif op == MUL_WIDE_S16:
        for k in range(n):
            d4[k] = <uint32_t>(<int32_t>sa2[k] * <int32_t>sb2[k])
    elif op == MUL_WIDE_U16:
        for k in range(n):
            d4[k] = <uint32_t>a2[k] * <uint32_t>b2[k]
    elif op == MUL_WIDE_S32:
        for k in range(n):
            d8[k] = <uint64_t>(<int64_t>sa4[k] * sb4[k])
    elif op == MUL_WIDE_U32:
        for k in range(n):
            d8[k] = <uint64_t>a4[k] * b4[k]
    elif op == DIV_S16:
        for k in range(n):
            d2[k] = <uint16_t>0xFFFF if b2[k] == 0 else <uint16_t>(<int32_t>sa2[k] / <int32_t>sb2[k])
    elif op == DIV_U16:
        for k in range(n):
            d2[k] = <uint16_t>0xFFFF if b2[k] == 0 else <uint16_t>(a2[k] / b2[k])
    elif op == REM_S16:
        for k in range(n):
            d2[k] = a2[k] if b2[k] == 0 else <uint16_t>(<int32_t>sa2[k] % <int32_t>sb2[k])
    elif op == REM_U16:
        for k in range(n):
            d2[k] = a2[k] if b2[k] == 0 else <uint16_t>(a2[k] % b2[k])
    elif op == ABS_S16:
        for k in range(n):
            d2[k] = <uint16_t>-a2[k] if sa2[k] < 0 else a2[k]
    elif op == NEG_16:
        for k in range(n):
            d2[k] = <uint16_t>-a2[k]
    elif op == MIN_S16:
        for k in range(n):
            d2[k] = a2[k] if sa2[k] < sb2[k] else b2[k]
    elif op == MIN_U16:
        for k in range(n):
            d2[k] = a2[k] if a2[k] < b2[k] else b2[k]
    elif op == MAX_S16:
        for k in range(n):
            d2[k] = a2[k] if sa2[k] > sb2[k] else b2[k]
    elif op == MAX_U16:
        for k in range(n):
            d2[k] = a2[k] if a2[k] > b2[k] else b2[k]
    elif op == DIV_S32:
        for k in range(n):
            d4[k] = <uint32_t>-1 if b4[k] == 0 else <uint32_t>-a4[k] if sb4[k] == -1 else <uint32_t>(sa4[k] / sb4[k])
    elif op == DIV_U32:
        for k in range(n):
            d4[k] = <uint32_t>-1 if b4[k] == 0 else a4[k] / b4[k]
    elif op == REM_S32:
        for k in range(n):
            d4[k] = a4[k] if b4[k] == 0 else 0 if sb4[k] == -1 else <uint32_t>(sa4[k] % sb4[k])
    elif op == REM_U32:
        for k in range(n):
            d4[k] = a4[k] if b4[k] == 0 else <uint32_t>(a4[k] % b4[k])
    elif op == ABS_S32:
        for k in range(n):
            d4[k] = <uint32_t>-a4[k] if sa4[k] < 0 else a4[k]
    elif op == NEG_32:
        for k in range(n):
            d4[k] = <uint32_t>-a4[k]
    elif op == MIN_S32:
        for k in range(n):
            d4[k] = a4[k] if sa4[k] < sb4[k] else b4[k]
    elif op == MIN_U32:
        for k in range(n):
            d4[k] = a4[k] if a4[k] < b4[k] else b4[k]
    elif op == MAX_S32:
        for k in range(n):
            d4[k] = a4[k] if sa4[k] > sb4[k] else b4[k]
    elif op == MAX_U32:
        for k in range(n):
            d4[k] = a4[k] if a4[k] > b4[k] else b4[k]
    elif op == DIV_S64:
        for k in range(n):
            d8[k] = <uint64_t>-1 if b8[k] == 0 else <uint64_t>-a8[k] if sb8[k] == -1 else <uint64_t>(sa8[k] / sb8[k])
    elif op == DIV_U64:
        for k in range(n):
            d8[k] = <uint64_t>-1 if b8[k] == 0 else a8[k] / b8[k]
    elif op == REM_S64:
        for k in range(n):
            d8[k] = a8[k] if b8[k] == 0 else 0 if sb8[k] == -1 else <uint64_t>(sa8[k] % sb8[k])
    elif op == REM_U64:
        for k in range(n):
            d8[k] = a8[k] if b8[k] == 0 else <uint64_t>(a8[k] % b8[k])
    elif op == ABS_S64:
        for k in range(n):
            d8[k] = <uint64_t>-a8[k] if sa8[k] < 0 else a8[k]
    elif op == NEG_64:
        for k in range(n):
            d8[k] = <uint64_t>-a8[k]
    elif op == MIN_S64:
        for k in range(n):
            d8[k] = a8[k] if sa8[k] < sb8[k] else b8[k]
    elif op == MIN_U64:
        for k in range(n):
            d8[k] = a8[k] if a8[k] < b8[k] else b8[k]
    elif op == MAX_S64:
        for k in range(n):
            d8[k] = a8[k] if sa8[k] > sb8[k] else b8[k]
    elif op == MAX_U64:
        for k in range(n):
            d8[k] = a8[k] if a8[k] > b8[k] else b8[k]
    # selp, slct (9.7.6.3, 9.7.6.4)
    elif op == SELECT_16:
        for k in range(n):
            d2[k] = a2[k] if c4[k] else b2[k]
    elif op == SELECT_32:
        for k in range(n):
            d4[k] = a4[k] if c4[k] else b4[k]
    elif op == SELECT_64:
        for k in range(n):
            d8[k] = a8[k] if c4[k] else b8[k]
    elif op == SLCT_32:
        for k in range(n):
            d4[k] = a4[k] if <int32_t>c4[k] >= 0 else b4[k]
    # setp (9.7.6.2), from == and < alone
    elif op == EQ_16:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if a2[k] == b2[k] else 0) ^ flip
    elif op == EQ_32:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if a4[k] == b4[k] else 0) ^ flip
    elif op == EQ_64:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if a8[k] == b8[k] else 0) ^ flip
    elif op == LT_S16:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if sa2[k] < sb2[k] else 0) ^ flip
    elif op == LT_U16:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if a2[k] < b2[k] else 0) ^ flip
    elif op == LT_S32:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if sa4[k] < sb4[k] else 0) ^ flip
    elif op == LT_U32:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if a4[k] < b4[k] else 0) ^ flip
    elif op == LT_S64:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if sa8[k] < sb8[k] else 0) ^ flip
    elif op == LT_U64:
        for k in range(n):
            d4[k] = (0xFFFFFFFFU if a8[k] < b8[k] else 0) ^ flip
    else:
        bits(i, out, args, n)
