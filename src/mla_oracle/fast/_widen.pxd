# SPDX-License-Identifier: Apache-2.0
# Stored rows to rows of `real`: exact, except f64 to float, which rounds. Branch-free, so that it vectorises.
from libc.stdint cimport uint32_t

from mla_oracle.fast._tiles cimport real, stored_double, stored_float, stored_half, stored_real
from mla_oracle.reference._common cimport STORED_BF16, STORED_F16, STORED_F32, STORED_F64, from_bits


cdef inline float of_half(uint32_t half) noexcept nogil:
    # The exponent moves by 112; the product also normalises subnormals. All ones stays all ones.
    cdef float x = from_bits((half & 0x7FFF) << 13) * <float>5.192296858534827628530496329220096e33  # 2^112
    cdef float special = from_bits(((half & 0x7FFF) << 13) | 0x7F800000)
    x = special if (half & 0x7C00) == 0x7C00 else x
    return -x if half & 0x8000 else x


cdef inline void widen(const unsigned char* stored, int dtype, real* row, Py_ssize_t n) noexcept nogil:
    # stored: n values at any alignment; row: [n]
    cdef Py_ssize_t d
    if dtype == STORED_F32:
        for d in range(n):
            row[d] = (<const stored_float*>stored)[d]
    elif dtype == STORED_F16:
        for d in range(n):
            row[d] = of_half((<const stored_half*>stored)[d])
    elif dtype == STORED_BF16:
        for d in range(n):
            row[d] = from_bits(<uint32_t>(<const stored_half*>stored)[d] << 16)
    else:
        for d in range(n):
            row[d] = <real>(<const stored_double*>stored)[d]


cdef inline bint is_real(int dtype) noexcept nogil:
    return dtype == (STORED_F64 if sizeof(real) == 8 else STORED_F32)


cdef inline Py_ssize_t size_of(int dtype) noexcept nogil:
    # of one number
    return 4 if dtype == STORED_F32 else 8 if dtype == STORED_F64 else 2


cdef inline const stored_real* numbers_at(
    const unsigned char* stored, int dtype, real* room, Py_ssize_t n,
) noexcept nogil:
    """n numbers as `real`: where they lie if they are stored so, else widened into `room` [n]."""
    if is_real(dtype):
        return <const stored_real*>stored
    widen(stored, dtype, room, n)
    return <const stored_real*>room
