# SPDX-License-Identifier: Apache-2.0
# _unpack.pxd in registers, to the same bits: 32 codes are looked up as bf16 at once, and multiplied as f32.
#
# The even numbers are a register of f32 and the odd ones another: bf16 is the upper half of an f32. Where tiles take
# the row it becomes bf16, else f32. A product is NaN with the bits of a factor, or with the processor's own: if the
# lower halves of these are zeros, rounding does not carry out of them.
from libc.math cimport NAN
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

from mla_oracle.fast._amx_tiles cimport HAS_TILES
from mla_oracle.fast._tiles cimport real, stored_half, vec, veci, word
from mla_oracle.fast._unpack cimport REST_CODES, Packing, bits_of, scale_of
from mla_oracle.fast._widen cimport widen
from mla_oracle.reference._common cimport STORED_BF16

cdef extern from "_codes.h" nogil:
    const bint HAS_LOOKUP
    veci bytes_as_words(const void* at)
    veci nibbles_as_words(const void* at)
    veci look_up(veci words, const veci* table)
    veci look_up_few(veci words, const veci* table)
    vec splat_two(float a, float b)
    void store_halves(void* to, vec even, vec odd)
    void store_floats(void* to, vec even, vec odd)

cdef enum:
    AT_ONCE = 32


cdef inline void make_tables(Packing* p, Py_ssize_t n) noexcept nogil:
    """Fill p.words and p.rest_words; p.looked_up: whether a row of n numbers is read from them."""
    cdef Py_ssize_t left = n - p.groups * p.group, together = p.group
    cdef uint32_t lost = 0
    cdef int i
    for i in range(256):
        lost |= bits_of(p.numbers[i * p.per_byte])
        p.words[i] = bits_of(p.numbers[i * p.per_byte]) >> 16
    if p.group * 2 == AT_ONCE and p.groups % 2 == 0 and p.step * p.per_byte == p.group and p.scale_bytes:
        together = AT_ONCE
    if p.rest_dtype == REST_CODES:
        for i in range(256):
            lost |= bits_of(p.rest_numbers[i])
            p.rest_words[i] = bits_of(p.rest_numbers[i]) >> 16
        together |= left
    elif left and p.rest_dtype != STORED_BF16:
        lost = 1
    p.looked_up = HAS_LOOKUP and lost & 0xFFFF == 0 and together % AT_ONCE == 0


cdef inline float quiet(float x) noexcept nogil:
    return x if x == x else <float>NAN


cdef inline vec carried(vec x) noexcept nogil:
    # The upper halves are those of x rounded to bf16.
    cdef veci bits = <veci>x
    return <vec>(bits + ((bits >> 16) & <word>1) + <word>0x7FFF)


cdef inline void multiply(
    veci words, vec scale, float factor, bint to_bf16,
    real* row, Py_ssize_t d,        # OUT 32 numbers from d on
) noexcept nogil:
    cdef vec even = <vec>(words << 16) * scale, odd = <vec>(words & <word>-65536) * scale
    if factor != 1:
        even = even * factor
        odd = odd * factor
    if to_bf16:
        even, odd = carried(even), carried(odd)
    if HAS_TILES:
        store_halves(<stored_half*>row + d, even, odd)
        return
    if to_bf16:
        even = <vec>(<veci>even & <word>-65536)
        odd = <vec>(<veci>odd & <word>-65536)
    store_floats(row + d, even, odd)


cdef inline void look_up_row(
    const Packing* p,
    const unsigned char* stored,
    const unsigned char* apart,     # what of the row lies elsewhere
    real* row,                      # OUT [n], of bf16 for tiles
    Py_ssize_t n,
) noexcept nogil:
    cdef const unsigned char* scales = apart if p.scales_apart else stored
    cdef const unsigned char* rest = (apart if p.rest_apart else stored) + p.rest
    cdef const unsigned char* codes = stored + p.first
    cdef Py_ssize_t g, d = 0, end, packed = p.groups * p.group
    cdef float scale, factor = quiet(p.factor)
    cdef bint by_two = p.group < AT_ONCE
    cdef veci table[8]
    cdef vec by
    cdef int i
    for i in range(8):
        table[i] = (<const veci*>p.words)[i]
    for g in range(p.groups >> by_two):
        scale = quiet(scale_of(p, scales, g << by_two)) if p.scale_bytes else 1
        by = splat_two(scale, quiet(scale_of(p, scales, 2 * g + 1)) if by_two else scale)
        end = d + (p.group << by_two)
        while d < end:
            if p.per_byte == 1:
                multiply(look_up(bytes_as_words(codes), table), by, factor, p.to_bf16, row, d)
            else:
                multiply(look_up_few(nibbles_as_words(codes), table), by, factor, p.to_bf16, row, d)
            codes += AT_ONCE // p.per_byte
            d += AT_ONCE
        codes = stored + p.first + (g + 1) * (p.step << by_two)
    if p.rest_dtype != REST_CODES:
        if HAS_TILES:
            memcpy(<stored_half*>row + packed, rest, (n - packed) * 2)
        else:
            widen(rest, p.rest_dtype, row + packed, n - packed)
        return
    for i in range(8):
        table[i] = (<const veci*>p.rest_words)[i]
    scale, factor = quiet(p.rest_factor), 1
    by = splat_two(scale, scale)
    while d < n:
        multiply(look_up(bytes_as_words(rest), table), by, factor, p.to_bf16, row, d)
        rest += AT_ONCE
        d += AT_ONCE
