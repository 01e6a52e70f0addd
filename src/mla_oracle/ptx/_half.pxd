# SPDX-License-Identifier: Apache-2.0
# Arithmetic of f16 and bf16 (PTX ISA 9.7.4), one or two (x2) to a lane: exact in double, then rounded once.
from libc.math cimport exp2, tanh
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy

from mla_oracle.ptx._block cimport Instr
from mla_oracle.ptx._formats cimport narrow, quiet, to_bits, widen
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.reference._common cimport from_bits

# Instr.flags of a floating-point operation.
cdef enum FloatFlag:
    ROUNDING = 3
    FLUSH = 4           # .ftz: subnormal arguments and results are zeros of their sign
    SATURATE = 8        # .sat: into [0, 1], NaN to 0
    INVERT = 16         # of a comparison
    NAN_WINS = 32       # min.NaN, max.NaN
    RELU = 64
    FINITE = 128        # .satfinite


cdef inline float lesser(float a, float b, bint nan_wins) noexcept nogil:
    # 9.7.3.11 min: a number beats NaN, -0 is below +0.
    if a != a or b != b:
        return quiet(a if (a != a) == nan_wins else b)
    if a == b:
        return from_bits(to_bits(a) | to_bits(b))
    return a if a < b else b


cdef inline float greater(float a, float b, bint nan_wins) noexcept nogil:
    if a != a or b != b:
        return quiet(a if (a != a) == nan_wins else b)
    if a == b:
        return from_bits(to_bits(a) & to_bits(b))
    return a if a > b else b


cdef inline double odd_sum(double p, double c) noexcept nogil:
    """p + c for a second rounding: where it is inexact, the neighbour with an odd last bit, which no tie mistakes."""
    cdef double s = p + c, part = s - p, rest = (p - (s - part)) + (c - part)
    cdef int64_t bits
    if rest != 0 and rest == rest:
        memcpy(&bits, &s, 8)
        if not bits & 1:
            bits += 1 if (rest > 0) == (s > 0) else -1
            memcpy(&s, &bits, 8)
    return s


cdef inline void half_arithmetic(const Instr* i, uint16_t* d, uint8_t** args, Py_ssize_t n) noexcept nogil:
    """9.7.4: f16 and bf16, one or two (x2) per lane: exact in double, then rounded once."""
    cdef int op = i.op, format = i.kind
    cdef bint nan_wins = (i.flags & NAN_WINS) != 0
    cdef uint16_t* a = <uint16_t*>args[0]
    cdef uint16_t* b = <uint16_t*>args[1]
    cdef uint16_t* c = <uint16_t*>args[2]
    cdef Py_ssize_t k
    cdef double x
    if op == NEG_H or op == ABS_H:
        for k in range(n):
            d[k] = a[k] ^ 0x8000 if op == NEG_H else a[k] & 0x7FFF
        return
    for k in range(n):
        x = widen(a[k], format)
        if op == ADD_H:
            x = x + widen(b[k], format)
        elif op == SUB_H:
            x = x - widen(b[k], format)
        elif op == MUL_H:
            x = x * widen(b[k], format)
        elif op == FMA_H:
            x = odd_sum(x * widen(b[k], format), widen(c[k], format))
        elif op == MIN_H:
            x = lesser(<float>x, widen(b[k], format), nan_wins)
        elif op == MAX_H:
            x = greater(<float>x, widen(b[k], format), nan_wins)
        elif op == EX2_H:   # of bf16 it is always .ftz
            x = exp2(x)
            if format == BF16 and x < 2.0**-126:
                x = 0
        else:
            x = tanh(x)
        if i.flags & RELU and not x > 0:
            x = x if x != x else 0
        d[k] = <uint16_t>narrow(x, format, False, False)
