# SPDX-License-Identifier: Apache-2.0
# A packed cache row to numbers: codes of a few bits, a scale for every group of them, the rest as it is.
#
#   row[d] = numbers[code d] * scale of d's group, in f32, rounded to bf16 where the reader does so
#
# What a code and a one-byte scale stand for are tables of 256 (see fast/packing.py), so that one loop reads e4m3,
# e2m1, int8 and all their readers. The product of two such numbers is the one rounding before bf16's.
from libc.stdint cimport int32_t, uint16_t, uint32_t
from libc.string cimport memcpy

from mla_oracle.fast._tiles cimport real, stored_float, stored_half
from mla_oracle.fast._widen cimport of_half, widen
from mla_oracle.reference._common cimport from_bits

cdef enum ScaleRule:
    AS_STORED
    ROUNDED_TO_BF16
    EXPONENT_ONLY
    TO_ZERO             # the same, but infinity is 2^127


cdef struct Packing:
    const float* numbers            # [256, per_byte]
    Py_ssize_t per_byte             # numbers of a byte: 1, or 2
    Py_ssize_t group                # numbers that share a scale
    Py_ssize_t groups
    Py_ssize_t first, step          # bytes: where the first group's codes start, and how far apart groups are
    const float* scales             # [256], of scales of one byte
    int scale_bytes                 # of a stored scale: 1, 2 (f16), 4 (f32), or 0: there is none
    ScaleRule rule
    bint scales_apart               # they lie elsewhere, not in the row
    const int32_t* scale_at         # [groups] bytes
    float factor                    # times the product of code and scale
    bint to_bf16
    Py_ssize_t rest                 # bytes: where the other numbers start
    bint rest_apart
    int rest_dtype                  # reference._common.Stored, or REST_CODES: codes as well,
    const float* rest_numbers       # [256],
    float rest_factor               # times this
    bint looked_up                  # as _lookup.pxd does; there it lies as bf16 once more:
    uint16_t words[256]             # numbers; where per_byte is 2, what half a byte stands for
    uint16_t rest_words[256]

cdef enum:
    REST_CODES = 100


cdef inline uint32_t bits_of(float x) noexcept nogil:
    cdef uint32_t bits
    memcpy(&bits, &x, 4)
    return bits


cdef inline float as_bf16(float x) noexcept nogil:
    cdef uint32_t bits = bits_of(x)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return from_bits(bits & <uint32_t>0xFFFF0000) if x == x else x


cdef inline float scale_of(const Packing* p, const unsigned char* scales, Py_ssize_t g) noexcept nogil:
    cdef const unsigned char* at = scales + p.scale_at[g]
    cdef float scale
    cdef uint32_t bits
    if p.scale_bytes == 1:
        scale = p.scales[at[0]]
    elif p.scale_bytes == 2:
        scale = of_half((<const stored_half*>at)[0])
    else:
        scale = (<const stored_float*>at)[0]
    if p.rule == ROUNDED_TO_BF16:
        scale = as_bf16(scale)
    elif p.rule >= EXPONENT_ONLY:   # as an e8m0 code: 0 is 2^-127, all ones is NaN
        bits = bits_of(scale) & 0x7F800000
        if p.rule == TO_ZERO and bits_of(scale) & 0x7FFFFFFF == 0x7F800000:
            bits = 0x7F000000
        scale = from_bits(0x00400000 if bits == 0 else 0x7FC00000 if bits == 0x7F800000 else bits)
    return scale


cdef inline void unpack(
    const Packing* p,
    const unsigned char* stored,
    const unsigned char* apart,     # what of the row lies elsewhere
    real* row,                      # OUT [n]
    Py_ssize_t n,
) noexcept nogil:
    cdef const unsigned char* scales = apart if p.scales_apart else stored
    cdef const unsigned char* rest = (apart if p.rest_apart else stored) + p.rest
    cdef const unsigned char* codes = stored + p.first
    cdef const float* numbers = p.numbers
    cdef Py_ssize_t g, d, packed = p.groups * p.group
    cdef float scale
    cdef real* to = row
    for g in range(p.groups):
        scale = scale_of(p, scales, g) if p.scale_bytes else 1
        if p.per_byte == 1:
            for d in range(p.group):
                to[d] = numbers[codes[d]] * scale
        else:
            for d in range(p.group // 2):
                to[2 * d] = numbers[2 * codes[d]] * scale
                to[2 * d + 1] = numbers[2 * codes[d] + 1] * scale
        if p.factor != 1:
            for d in range(p.group):
                to[d] = <float>to[d] * p.factor
        if p.to_bf16:
            for d in range(p.group):
                to[d] = as_bf16(<float>to[d])
        codes += p.step
        to += p.group
    if p.rest_dtype != REST_CODES:
        widen(rest, p.rest_dtype, to, n - packed)
        return
    for d in range(n - packed):
        to[d] = p.rest_numbers[rest[d]] * p.rest_factor
        if p.to_bf16:
            to[d] = as_bf16(<float>to[d])
