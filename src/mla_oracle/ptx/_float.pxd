# SPDX-License-Identifier: Apache-2.0
# Floating-point arithmetic and comparison. Section numbers are those of PTX ISA 9.0.
#
# add, sub, mul, fma, div.rn, sqrt.rn and rcp.rn round once, as the ISA asks; directed rounding is the processor's own.
# The approximate functions (ex2, lg2, rsqrt, sin, cos, tanh, div.full, rcp.approx ...) are computed in double and
# rounded once. Hardware differs by what the ISA states: 2 ulp for ex2 and div.full, 1 for rcp, 2^-22.9 relative for
# rsqrt, 2^-22 absolute for lg2 near 1, 2^-20.5 absolute for sin and cos in [-pi, pi].
from libc.math cimport copysign, cos, exp2, fabs, fma, fmaf, log2, sin, sqrt, sqrtf, tanh
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from mla_oracle.ptx._block cimport Instr
from mla_oracle.ptx._formats cimport quiet
from mla_oracle.ptx._half cimport INVERT, NAN_WINS, greater, half_arithmetic, lesser
from mla_oracle.ptx._opcodes cimport *

cdef inline double lesser_double(double a, double b) noexcept nogil:
    if a != a:
        return b
    if b != b:
        return a
    if a == b:
        return a if copysign(1, a) < 0 else b
    return a if a < b else b


cdef inline double greater_double(double a, double b) noexcept nogil:
    return -lesser_double(-a, -b)


cdef inline void floating(const Instr* i, uint8_t* out, uint8_t** args, Py_ssize_t n) noexcept nogil:
    """out[lane] = op(args[0][lane], ...) for n lanes."""
    cdef int op = i.op
    cdef Py_ssize_t k
    cdef bint nan_wins = (i.flags & NAN_WINS) != 0
    cdef uint32_t flip = 0xFFFFFFFFU if i.flags & INVERT else 0
    cdef float* d4 = <float*>out
    cdef float* a4 = <float*>args[0]
    cdef float* b4 = <float*>args[1]
    cdef float* c4 = <float*>args[2]
    cdef double* d8 = <double*>out
    cdef double* a8 = <double*>args[0]
    cdef double* b8 = <double*>args[1]
    cdef double* c8 = <double*>args[2]
    cdef uint32_t* p = <uint32_t*>out
    cdef uint64_t* q = <uint64_t*>out
    n *= i.count    # f16x2, bf16x2, f32x2
    # f32 (9.7.3.3 - 9.7.3.21)
    if op == ADD_F32:
        for k in range(n):
            d4[k] = quiet(a4[k] + b4[k])
    elif op == SUB_F32:
        for k in range(n):
            d4[k] = quiet(a4[k] - b4[k])
    elif op == MUL_F32:
        for k in range(n):
            d4[k] = quiet(a4[k] * b4[k])
    elif op == FMA_F32:
        for k in range(n):
            d4[k] = quiet(fmaf(a4[k], b4[k], c4[k]))
    elif op == DIV_F32:
        for k in range(n):
            d4[k] = quiet(a4[k] / b4[k])
    elif op == SQRT_F32:
        for k in range(n):
            d4[k] = quiet(sqrtf(a4[k]))
    elif op == RCP_F32:
        for k in range(n):
            d4[k] = quiet(1 / a4[k])
    elif op == MIN_F32:
        for k in range(n):
            d4[k] = lesser(a4[k], b4[k], nan_wins)
    elif op == MAX_F32:
        for k in range(n):
            d4[k] = greater(a4[k], b4[k], nan_wins)
    elif op == ABS_F32:
        for k in range(n):
            p[k] = (<uint32_t*>a4)[k] & 0x7FFFFFFF
    elif op == NEG_F32:
        for k in range(n):
            p[k] = (<uint32_t*>a4)[k] ^ 0x80000000U
    elif op == COPYSIGN_F32:    # the sign of a on b
        for k in range(n):
            p[k] = (<uint32_t*>a4)[k] & 0x80000000U | (<uint32_t*>b4)[k] & 0x7FFFFFFF
    elif op == EX2_F32:
        for k in range(n):
            d4[k] = quiet(<float>exp2(a4[k]))
    elif op == LG2_F32:
        for k in range(n):
            d4[k] = quiet(<float>log2(a4[k]))
    elif op == RSQRT_F32:
        for k in range(n):
            d4[k] = quiet(<float>(1 / sqrt(<double>a4[k])))
    elif op == SIN_F32:
        for k in range(n):
            d4[k] = quiet(<float>sin(a4[k]))
    elif op == COS_F32:
        for k in range(n):
            d4[k] = quiet(<float>cos(a4[k]))
    elif op == TANH_F32:
        for k in range(n):
            d4[k] = quiet(<float>tanh(a4[k]))
    # f64
    elif op == ADD_F64:
        for k in range(n):
            d8[k] = a8[k] + b8[k]
    elif op == SUB_F64:
        for k in range(n):
            d8[k] = a8[k] - b8[k]
    elif op == MUL_F64:
        for k in range(n):
            d8[k] = a8[k] * b8[k]
    elif op == FMA_F64:
        for k in range(n):
            d8[k] = fma(a8[k], b8[k], c8[k])
    elif op == DIV_F64:
        for k in range(n):
            d8[k] = a8[k] / b8[k]
    elif op == SQRT_F64:
        for k in range(n):
            d8[k] = sqrt(a8[k])
    elif op == RCP_F64:
        for k in range(n):
            d8[k] = 1 / a8[k]
    elif op == RSQRT_F64:
        for k in range(n):
            d8[k] = 1 / sqrt(a8[k])
    elif op == MIN_F64:
        for k in range(n):
            d8[k] = lesser_double(a8[k], b8[k])
    elif op == MAX_F64:
        for k in range(n):
            d8[k] = greater_double(a8[k], b8[k])
    elif op == ABS_F64:
        for k in range(n):
            q[k] = (<uint64_t*>a8)[k] & 0x7FFFFFFFFFFFFFFFULL
    elif op == NEG_F64:
        for k in range(n):
            q[k] = (<uint64_t*>a8)[k] ^ <uint64_t>1 << 63
    elif op == COPYSIGN_F64:
        for k in range(n):
            d8[k] = copysign(b8[k], a8[k])
    # setp (9.7.6.2), from ==, <, <=, <> and "both are numbers" alone
    elif op == EQ_F32:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a4[k] == b4[k] else 0) ^ flip
    elif op == LT_F32:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a4[k] < b4[k] else 0) ^ flip
    elif op == LE_F32:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a4[k] <= b4[k] else 0) ^ flip
    elif op == LG_F32:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a4[k] < b4[k] or a4[k] > b4[k] else 0) ^ flip
    elif op == NUM_F32:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a4[k] == a4[k] and b4[k] == b4[k] else 0) ^ flip
    elif op == EQ_F64:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a8[k] == b8[k] else 0) ^ flip
    elif op == LT_F64:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a8[k] < b8[k] else 0) ^ flip
    elif op == LE_F64:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a8[k] <= b8[k] else 0) ^ flip
    elif op == LG_F64:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a8[k] < b8[k] or a8[k] > b8[k] else 0) ^ flip
    elif op == NUM_F64:
        for k in range(n):
            p[k] = (0xFFFFFFFFU if a8[k] == a8[k] and b8[k] == b8[k] else 0) ^ flip
    else:
        half_arithmetic(i, <uint16_t*>out, args, n)
