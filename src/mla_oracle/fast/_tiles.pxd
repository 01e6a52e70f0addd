# SPDX-License-Identifier: Apache-2.0
# The three inner loops of blocked attention, on registers of LANES numbers (see _vec.h).
#
#   scores   S[token, lane] = scale * sum_d row[token][d] Q[d, lane]       lanes = query rows
#   exp_of   e^x in every lane, tanh_of likewise
#   values   O[head, column] = rescale[head] O + sum_token P[token, head] row[token][column]
#
# Every tile has constant bounds: the accumulators live in registers only because the compiler unrolls them.

cdef extern from "_vec.h" nogil:
    ctypedef double real
    ctypedef double vec
    ctypedef double stored_real
    ctypedef float stored_float
    ctypedef double stored_double
    ctypedef unsigned short stored_half
    ctypedef long long word
    ctypedef long long veci
    ctypedef long long stored_pair
    ctypedef long long pairs
    const bint IS_DOUBLE
    enum:
        LANES
        WIDE
        WIDE_VECS
        WIDE_TOKENS
        NARROW_TOKENS
        VALUE_HEADS
        VALUE_VECS
        COLUMNS
        LINE
        KEYS
        PAIR
        TILE
        PANEL
        WIDE_RATE, NARROW_RATE, VALUE_RATE
        MANTISSA
        BIAS
    const real ROUNDER, SMALLEST
    vec splat(real x)
    pairs splat_pair(stored_pair x)
    vec where_greater(vec left, vec right, vec a, vec b)

cdef extern from * nogil:
    void prefetch "__builtin_prefetch"(const void* address, int write, int locality)


cdef inline vec exp_less_one(vec r) noexcept nogil:
    # e^r - 1 for |r| <= log(2)/2; where r is small it is r to all its bits.
    cdef vec p
    if IS_DOUBLE:
        p = r * <real>1.6059043836821613e-10 + splat(2.08767569878681e-09)
        p = p * r + splat(2.505210838544172e-08)
        p = p * r + splat(2.755731922398589e-07)
        p = p * r + splat(2.7557319223985893e-06)
        p = p * r + splat(2.48015873015873e-05)
        p = p * r + splat(1.984126984126984e-04)
        p = p * r + splat(1.388888888888889e-03)
        p = p * r + splat(8.333333333333333e-03)
        p = p * r + splat(4.1666666666666664e-02)
        p = p * r + splat(0.16666666666666666)
        p = p * r + splat(0.5)
    else:
        p = r * <real>1.9875691500e-4 + splat(1.3981999507e-3)
        p = p * r + splat(8.3334519073e-3)
        p = p * r + splat(4.1665795894e-2)
        p = p * r + splat(1.6666665459e-1)
        p = p * r + splat(5.0000001201e-1)
    return p * (r * r) + r


cdef inline vec rest_of(vec x, vec n) noexcept nogil:
    # x - n log(2), which has two terms so that the first times n is exact.
    if IS_DOUBLE:
        x = x - n * <real>0.693147180369123816490
        return x - n * <real>1.90821492927058770002e-10
    x = x - n * <real>0.693359375
    return x + n * <real>2.12194440e-4


cdef inline vec exp_of(vec x) noexcept nogil:
    # x <= 88 (float), 709 (double), -inf or NaN. Within 2 ULP, results below the normal range included.
    # e^x = 2^n e^r with |r| <= log(2)/2; 2^n in two factors, so that only the last product can be subnormal.
    cdef vec low, n, p
    cdef veci whole, half
    low = splat(-760 if IS_DOUBLE else -105)
    x = where_greater(low, x, low, x)
    n = x * <real>1.4426950408889634 + splat(ROUNDER)
    whole = (<veci>n) - (<veci>splat(ROUNDER))
    p = exp_less_one(rest_of(x, n - splat(ROUNDER))) + splat(1)
    half = whole >> 1
    whole = whole - half
    half = (half + BIAS) << MANTISSA
    whole = (whole + BIAS) << MANTISSA
    return p * (<vec>half) * (<vec>whole)


cdef inline vec tanh_of(vec x) noexcept nogil:
    # Any x. Within 3 ULP and 2 eps of itself, 0 and what is below the normal range included; 1 from 20 (float: 10) on.
    # tanh x = e / (e + 2) with e = e^2x - 1 = 2^n (e^r - 1) + (2^n - 1), of |x|; where that is small, n = 0.
    cdef veci sign = (<veci>x) >> (8 * sizeof(real) - 1) << (8 * sizeof(real) - 1)
    cdef vec n, e, power
    cdef veci whole
    cdef vec most = splat(40 if IS_DOUBLE else 20)
    x = <vec>((<veci>x) ^ sign)
    x = x + x
    x = where_greater(x, most, most, x)
    n = x * <real>1.4426950408889634 + splat(ROUNDER)
    whole = (<veci>n) - (<veci>splat(ROUNDER))
    power = <vec>((whole + BIAS) << MANTISSA)
    e = exp_less_one(rest_of(x, n - splat(ROUNDER))) * power + (power - splat(1))
    x = e / (e + splat(2))
    return <vec>((<veci>x) ^ sign)


cdef inline vec weight_of(vec x) noexcept nogil:
    # e^x for x <= 0, and 0 where that is below the normal range: products with such numbers are slow.
    x = exp_of(x)
    return where_greater(splat(SMALLEST), x, splat(0), x)


cdef struct Ahead:
    # Rows that are wanted soon, prefetched line after line while others are computed with.
    const unsigned char** rows
    Py_ssize_t n
    Py_ssize_t bytes                # of a row
    Py_ssize_t row, at              # the next line


cdef inline void fetch_lines(Ahead* ahead, Py_ssize_t lines) noexcept nogil:
    while lines > 0 and ahead.row < ahead.n:
        prefetch(ahead.rows[ahead.row] + ahead.at, 0, 2)
        lines -= 1
        ahead.at += 64
        if ahead.at >= ahead.bytes:
            ahead.at = 0
            ahead.row += 1


cdef inline void wide_scores(
    const stored_real** rows,       # [WIDE_TOKENS] -> [D]
    Ahead* ahead,
    const real* q,                  # [D, WIDE]
    Py_ssize_t d, Py_ssize_t D,     # sum over d <= index < D, on top of what s holds if d > 0
    real scale,                     # of the result
    real* s,                        # [WIDE_TOKENS, WIDE_VECS] registers, at these strides
    Py_ssize_t token_stride, Py_ssize_t vec_stride,
) noexcept nogil:
    cdef vec acc[WIDE_TOKENS][WIDE_VECS]
    cdef vec b[WIDE_VECS]
    cdef const stored_real* r[WIDE_TOKENS]
    cdef Py_ssize_t stop
    cdef int i, j
    for i in range(WIDE_TOKENS):
        r[i] = rows[i]
        for j in range(WIDE_VECS):
            acc[i][j] = (<vec*>(s + i * token_stride + j * vec_stride))[0] if d else splat(0)
    while d < D:
        fetch_lines(ahead, WIDE_RATE)
        stop = min(d + LINE, D)
        while d < stop:
            for j in range(WIDE_VECS):
                b[j] = (<const vec*>q)[d * WIDE_VECS + j]
            for i in range(WIDE_TOKENS):
                for j in range(WIDE_VECS):
                    acc[i][j] = acc[i][j] + r[i][d] * b[j]
            d += 1
    for i in range(WIDE_TOKENS):
        for j in range(WIDE_VECS):
            (<vec*>(s + i * token_stride + j * vec_stride))[0] = acc[i][j] * scale


cdef inline vec add_pairs(vec even, vec odd) noexcept nogil:
    # The sums of pairs, of `even` in the even lanes and of `odd` in the others.
    if PAIR == 1:
        return even
    even = even + <vec>((<pairs>even) >> 32)
    odd = odd + <vec>((<pairs>odd) << 32)
    return <vec>(((<pairs>even) & <stored_pair>0xFFFFFFFF) | ((<pairs>odd) & <stored_pair>-0x100000000))


cdef inline void narrow_scores(
    const stored_real** rows,       # [NARROW_TOKENS] -> [D]
    Ahead* ahead,
    const real* q,                  # [D / PAIR] of [PAIR, LANES / PAIR, PAIR]: lanes 0, 2, ...; then 1, 3, ...
    Py_ssize_t d, Py_ssize_t D,     # whole pairs
    real scale,
    real* s,                        # [NARROW_TOKENS, LANES]
) noexcept nogil:
    cdef vec acc[NARROW_TOKENS][PAIR]
    cdef vec b[PAIR]
    cdef vec x
    cdef const stored_real* r[NARROW_TOKENS]
    cdef Py_ssize_t stop
    cdef bint begin = d == 0
    cdef int i, j
    for i in range(NARROW_TOKENS):
        r[i] = rows[i]
        for j in range(PAIR):
            acc[i][j] = splat(0)
    while d < D:
        fetch_lines(ahead, NARROW_RATE)
        stop = min(d + LINE, D)
        while d < stop:
            for j in range(PAIR):
                b[j] = (<const vec*>q)[d + j]
            for i in range(NARROW_TOKENS):
                x = <vec>splat_pair((<const stored_pair*>(r[i] + d))[0])
                for j in range(PAIR):
                    acc[i][j] = acc[i][j] + x * b[j]
            d += PAIR
    for i in range(NARROW_TOKENS):
        x = add_pairs(acc[i][0], acc[i][PAIR - 1])
        if not begin:
            x = x + (<vec*>s)[i]
        (<vec*>s)[i] = x * scale


cdef inline void values(
    const stored_real** rows,       # [n] -> at least column + COLUMNS numbers
    Py_ssize_t n,                   # whole KEYS
    Py_ssize_t column,
    const real* p,                  # [n, VALUE_HEADS], rows p_stride apart
    Py_ssize_t p_stride,
    const real* rescale,            # [VALUE_HEADS]
    real* o,                        # [VALUE_HEADS, COLUMNS], rows o_stride apart
    Py_ssize_t o_stride,
    Ahead* ahead,
) noexcept nogil:
    cdef vec acc[VALUE_HEADS][VALUE_VECS]
    cdef vec b[VALUE_VECS]
    cdef Py_ssize_t k = 0
    cdef int i, j, t
    for i in range(VALUE_HEADS):
        for j in range(VALUE_VECS):
            acc[i][j] = (<vec*>(o + i * o_stride))[j] * rescale[i]
            prefetch(o + (VALUE_HEADS + i) * o_stride + j * LANES, 1, 3)
    while k < n:
        fetch_lines(ahead, VALUE_RATE)
        for t in range(KEYS):
            for j in range(VALUE_VECS):
                b[j] = (<const vec*>(rows[k + t] + column))[j]
            for i in range(VALUE_HEADS):
                for j in range(VALUE_VECS):
                    acc[i][j] = acc[i][j] + p[(k + t) * p_stride + i] * b[j]
        k += KEYS
    for i in range(VALUE_HEADS):
        for j in range(VALUE_VECS):
            (<vec*>(o + i * o_stride))[j] = acc[i][j]
