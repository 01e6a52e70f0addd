# SPDX-License-Identifier: Apache-2.0
# What the strict forms share: the number type, libm's exp and log, the softmax, the widening of stored rows.
#
# `float` reproduces the documents' bits: every sum starts at 0 and runs in ascending order, products are
# rounded before they are added (-ffp-contract=off), exp and log are libm's.
# `double` is the truth. It differs from `float` in one rule: a score of -inf has weight 0, and its value
# is not touched; a row of nothing else is an empty row. NaN still spreads.
from libc.math cimport INFINITY, exp, expf, isnan, log, logf
from libc.stdint cimport int32_t, uint16_t, uint32_t
from libc.string cimport memcpy

ctypedef fused real:
    float
    double

# How a row is stored; the order is that of dtypes.STORED.
cdef enum Stored:
    STORED_F32
    STORED_F16
    STORED_BF16
    STORED_F64


cdef inline real exp_of(real x) noexcept nogil:
    if real is float:
        return expf(x)
    else:
        return exp(x)


cdef inline real log_of(real x) noexcept nogil:
    if real is float:
        return logf(x)
    else:
        return log(x)


cdef inline void softmax(real* s, Py_ssize_t n) noexcept nogil:
    # s: [n], scores in, weights out. NaN never becomes the maximum, but spreads through the sum.
    cdef Py_ssize_t t
    cdef real m = -INFINITY, total = 0, inverse
    for t in range(n):
        if s[t] > m:
            m = s[t]
    for t in range(n):
        if real is double and s[t] == -INFINITY:
            s[t] = 0
            continue
        s[t] = exp_of(s[t] - m)
        total += s[t]
    if real is double and total == 0:
        return
    inverse = 1 / total
    for t in range(n):
        s[t] *= inverse


cdef inline float from_bits(uint32_t bits) noexcept nogil:
    cdef float x
    memcpy(&x, &bits, sizeof(x))
    return x


cdef inline float from_half(uint16_t half) noexcept nogil:
    cdef uint32_t sign = <uint32_t>(half & 0x8000) << 16
    cdef uint32_t exponent = (half >> 10) & 0x1F, mantissa = half & 0x3FF
    if exponent == 0:
        return (-1 if sign else 1) * (<float>mantissa * <float>5.9604644775390625e-08)  # 2^-24
    if exponent == 0x1F:
        return from_bits(sign | 0x7F800000 | mantissa << 13)
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13)


cdef inline void load_row(const unsigned char* stored, Stored dtype, real* row, Py_ssize_t n) noexcept nogil:
    # stored: n values at any alignment; row: [n]. Widening is exact, except f64 to float, which rounds.
    cdef Py_ssize_t d
    cdef float f
    cdef double g
    cdef uint16_t u
    if dtype == STORED_F32:
        for d in range(n):
            memcpy(&f, stored + 4 * d, 4)
            row[d] = f
    elif dtype == STORED_F16:
        for d in range(n):
            memcpy(&u, stored + 2 * d, 2)
            row[d] = from_half(u)
    elif dtype == STORED_BF16:
        for d in range(n):
            memcpy(&u, stored + 2 * d, 2)
            row[d] = from_bits(<uint32_t>u << 16)
    else:
        for d in range(n):
            memcpy(&g, stored + 8 * d, 8)
            row[d] = <real>g
