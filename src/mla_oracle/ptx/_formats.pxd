# SPDX-License-Identifier: Apache-2.0
# Narrow floating-point numbers: exact widening, rounding once from double.
#
# narrow() writes any of them from one formula: with e the exponent of |x|, or of the smallest normal number if that
# is larger, and m = |x| 2^(digits - e) rounded to an integer, the code is (e - lowest) 2^digits + m.
from libc.math cimport floor, ldexp, rint
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from mla_oracle.ptx._opcodes cimport BF16, E4M3, E5M2, F16
from mla_oracle.reference._common cimport from_bits, from_half


cdef inline uint32_t to_bits(float x) noexcept nogil:
    cdef uint32_t bits
    memcpy(&bits, &x, 4)
    return bits


cdef inline float quiet(float x) noexcept nogil:
    # 9.7.3: a NaN result of f32 arithmetic is the canonical one, 0x7FFFFFFF.
    return x if x == x else from_bits(0x7FFFFFFF)


cdef inline uint32_t narrow(double x, int format, bint towards_zero, bint finite) noexcept nogil:
    """x as f16, bf16, e4m3 or e5m2; `finite`: too large becomes the largest (.satfinite), NaN stays NaN."""
    cdef int digits, lowest, exponent
    cdef uint32_t largest, infinite, nan, sign, code
    cdef uint64_t bits
    cdef double scaled
    if format == F16:
        digits, lowest, largest, infinite, nan, sign = 10, -14, 0x7BFF, 0x7C00, 0x7FFF, 0x8000
    elif format == BF16:
        digits, lowest, largest, infinite, nan, sign = 7, -126, 0x7F7F, 0x7F80, 0x7FFF, 0x8000
    elif format == E4M3:
        digits, lowest, largest, infinite, nan, sign = 3, -6, 0x7E, 0x7F, 0x7F, 0x80
    else:
        digits, lowest, largest, infinite, nan, sign = 2, -14, 0x7B, 0x7C, 0x7F, 0x80
    memcpy(&bits, &x, 8)
    if x != x:
        return nan
    sign = sign if bits >> 63 else 0
    exponent = <int>(bits >> 52 & 0x7FF) - 1023
    if exponent == 1024:
        return sign | (largest if finite else infinite)
    exponent = max(exponent, lowest)
    scaled = ldexp(x if x > 0 else -x, digits - exponent)
    code = <uint32_t>((exponent - lowest) << digits) + <uint32_t>(floor(scaled) if towards_zero else rint(scaled))
    if code > largest:
        code = largest if finite or towards_zero else infinite
    return sign | code


cdef inline uint32_t narrow_bf16(float x) noexcept nogil:
    """To nearest even, in integers, so that the loop over it vectorises."""
    cdef uint32_t bits = to_bits(x)
    return 0x7FFF if x != x else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


cdef inline float widen_f16(uint32_t code) noexcept nogil:
    """In integers and one product, so that the loop over it vectorises: f16 laid over f32's fields, times 2^112."""
    cdef uint32_t sign = (code & 0x8000) << 16
    cdef uint32_t bits = to_bits(from_bits((code & 0x7FFF) << 13) * <float>5.192296858534828e33)
    return from_bits(sign | bits | (0x7F800000 if code & 0x7C00 == 0x7C00 else 0))


cdef inline float widen(uint32_t code, int format) noexcept nogil:
    cdef float x
    if format == F16:
        return from_half(<uint16_t>code)
    if format == BF16:
        return from_bits(code << 16)
    if format == E5M2:
        return from_half(<uint16_t>(code << 8))
    if code & 0x7F == 0x7F:
        return from_bits(0x7FFFFFFF)
    # e4m3 laid over f32's fields is the number times 2^-120, subnormals included.
    x = from_bits((code & 0x7F) << 20) * <float>1.329227995784916e36
    return -x if code & 0x80 else x
