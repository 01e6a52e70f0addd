# SPDX-License-Identifier: Apache-2.0
# _tiles.pxd on AMX: blocks of 16 x 16 sums of products of bf16, added in f32, and the turns that feed them.
#
#   scores   S[key, lane]     A = cached rows as they lie, B = queries by pairs of numbers
#   values   O[lane, column]  A = weights turned to [lane, key], B = rows by pairs of keys
#
# Tiles 0 to 3 hold sums; 4 and 5 an A, 6 and 7 a B.
from mla_oracle.fast._tiles cimport LANES, TILE, Ahead, fetch_lines, real, vec, veci, weight_of, word

cdef extern from "_amx.h" nogil:
    const bint HAS_TILES
    void tiles_on()
    void tiles_off()
    void tile_zero(int t)
    void tile_load(int t, const void* at, Py_ssize_t stride)
    void tile_store(int t, void* at, Py_ssize_t stride)
    void tile_multiply(int c, int a, int b)
    veci pick_words(veci index, veci a, veci b)
    veci pick_halves(veci index, veci a, veci b)

cdef enum:
    BYTES = 1024            # of a tile
    PAIRS = 16              # of keys, or of numbers of a row, in a tile
    STEP = 32               # 2 PAIRS


cdef struct Picks:
    # Where each lane comes from, for pick_words and pick_halves.
    int low[4][16]
    int high[4][16]
    short tops[32]          # the upper halves of a's words, then of b's
    short zipped_tops[32]   # the same, alternating
    short zipped[2][32]     # the first 16 halves of a and b, alternating; then the last


cdef inline void fill(Picks* picks) noexcept nogil:
    cdef int i, j, h
    for j in range(4):
        h = 8 >> j
        for i in range(16):
            picks.low[j][i] = 16 + i - h if i & h else i
            picks.high[j][i] = 16 + i if i & h else i + h
    for i in range(16):
        picks.tops[i] = picks.zipped_tops[2 * i] = 2 * i + 1
        picks.tops[16 + i] = picks.zipped_tops[2 * i + 1] = 32 + 2 * i + 1
        for j in range(2):
            picks.zipped[j][2 * i] = 16 * j + i
            picks.zipped[j][2 * i + 1] = 32 + 16 * j + i


cdef inline void exchange(veci* x, const Picks* picks, int j, int h) noexcept nogil:
    cdef veci low = (<const veci*>picks.low[j])[0], high = (<const veci*>picks.high[j])[0], a, b
    cdef int i, k
    for i in range(16):
        if i & h == 0:
            k = i + h
            a, b = x[i], x[k]
            x[i] = pick_words(low, a, b)
            x[k] = pick_words(high, a, b)


cdef inline void turn(veci* x, const Picks* picks) noexcept nogil:
    # x: [16, 16] words, transposed in place.
    exchange(x, picks, 0, 8)
    exchange(x, picks, 1, 4)
    exchange(x, picks, 2, 2)
    exchange(x, picks, 3, 1)


cdef struct Weighing:
    # One or two blocks of lanes whose scores become weights, key after key, while tiles of others are multiplied.
    real* s                         # [blocks] of [TILE, LANES]
    Py_ssize_t n, k                 # keys, the next one
    Py_ssize_t rate                 # keys for each step of the others
    int blocks
    vec base[2]
    vec total[2]


cdef inline void weigh_keys(Weighing* b, Py_ssize_t keys) noexcept nogil:
    cdef Py_ssize_t stop = min(b.k + keys, b.n)
    cdef vec* s
    cdef int i
    while b.k < stop:
        for i in range(b.blocks):
            s = <vec*>b.s + i * TILE + b.k
            s[0] = weight_of(s[0] - b.base[i])
            b.total[i] = b.total[i] + s[0]
        b.k += 1


cdef inline void zero_sums() noexcept nogil:
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)


cdef inline void load_sums(const real* o, Py_ssize_t a, Py_ssize_t b, Py_ssize_t stride) noexcept nogil:
    # At o, a, b and a + b numbers on; rows stride numbers apart.
    tile_load(0, o, stride * 4)
    tile_load(1, o + a, stride * 4)
    tile_load(2, o + b, stride * 4)
    tile_load(3, o + b + a, stride * 4)


cdef inline void store_sums(real* o, Py_ssize_t a, Py_ssize_t b, Py_ssize_t stride) noexcept nogil:
    tile_store(0, o, stride * 4)
    tile_store(1, o + a, stride * 4)
    tile_store(2, o + b, stride * 4)
    tile_store(3, o + b + a, stride * 4)


cdef inline void wide_score_tiles(
    const char** k, const Py_ssize_t* stride,   # 2 times 16 rows
    const char* q, Py_ssize_t steps, int terms, Py_ssize_t plane,
    real* s,                                    # OUT [32, 16]; and, TILE x LANES on, for the next 16 lanes
    Weighing* before, Ahead* ahead, Py_ssize_t rate,
) noexcept nogil:
    cdef Py_ssize_t step
    cdef const char* at
    cdef int t
    zero_sums()
    for step in range(steps):
        fetch_lines(ahead, rate)
        tile_load(4, k[0] + step * 64, stride[0])
        tile_load(5, k[1] + step * 64, stride[1])
        for t in range(terms):
            at = q + t * plane + step * BYTES
            tile_load(6, at, 64)
            tile_load(7, at + steps * BYTES, 64)
            tile_multiply(0, 4, 6)
            tile_multiply(1, 4, 7)
            tile_multiply(2, 5, 6)
            tile_multiply(3, 5, 7)
        weigh_keys(before, before.rate)
    store_sums(s, TILE * LANES, 16 * LANES, LANES)


cdef inline void narrow_score_tiles(
    const char** k, const Py_ssize_t* stride,   # 4 times 16 rows
    const char* q, Py_ssize_t steps, int terms, Py_ssize_t plane,
    real* s,                                    # OUT [64, 16]
    Weighing* before, Ahead* ahead, Py_ssize_t rate,
) noexcept nogil:
    cdef Py_ssize_t step
    cdef const char* at
    cdef int t
    zero_sums()
    for step in range(steps):
        fetch_lines(ahead, rate)
        for t in range(terms):
            at = q + t * plane + step * BYTES
            tile_load(6, at, 64)
            tile_load(4, k[0] + step * 64, stride[0])
            tile_multiply(0, 4, 6)
            tile_load(5, k[1] + step * 64, stride[1])
            tile_multiply(1, 5, 6)
            tile_load(4, k[2] + step * 64, stride[2])
            tile_multiply(2, 4, 6)
            tile_load(5, k[3] + step * 64, stride[3])
            tile_multiply(3, 5, 6)
        weigh_keys(before, before.rate)
    store_sums(s, 16 * LANES, 32 * LANES, LANES)


cdef inline void split_weights(
    const real* s,                  # [steps, STEP, LANES]
    Py_ssize_t steps,
    const Picks* picks,
    char* p,                        # OUT per step two tiles of [lane, pair of keys, 2]: to 8 bits, and the rest
) noexcept nogil:
    cdef veci tops = (<const veci*>picks.zipped_tops)[0], a, b
    cdef veci x[16]
    cdef vec u, v
    cdef Py_ssize_t step
    cdef int i, t
    for step in range(steps):
        for t in range(2):
            for i in range(PAIRS):
                u = (<const vec*>s)[step * STEP + 2 * i]
                v = (<const vec*>s)[step * STEP + 2 * i + 1]
                a = <veci>u + <word>0x8000
                b = <veci>v + <word>0x8000
                if t:
                    a = a & <word>-65536
                    b = b & <word>-65536
                    u = u - <vec>a
                    v = v - <vec>b
                    a = <veci>u + <word>0x8000
                    b = <veci>v + <word>0x8000
                x[i] = pick_halves(tops, a, b)
            turn(x, picks)
            for i in range(16):
                (<veci*>(p + (step * 2 + t) * BYTES))[i] = x[i]


cdef inline void pack_values(
    const unsigned char** rows,     # [steps, STEP]
    Py_ssize_t steps,
    const unsigned char* zeros,
    Py_ssize_t column, Py_ssize_t D,
    const Picks* picks,
    char* panel,                    # OUT [4, steps] tiles of [pair of keys, column, 2]
) noexcept nogil:
    cdef veci first = (<const veci*>picks.zipped[0])[0], last = (<const veci*>picks.zipped[1])[0], a, b
    cdef Py_ssize_t step, i
    cdef int half
    cdef char* to
    for step in range(steps):
        for i in range(PAIRS):
            for half in range(2):
                to = panel + (2 * half * steps + step) * BYTES + i * 64
                if column + half * 32 < D:
                    a = (<const veci*>(rows[step * STEP + 2 * i] + column * 2))[half]
                    b = (<const veci*>(rows[step * STEP + 2 * i + 1] + column * 2))[half]
                else:
                    a = (<const veci*>zeros)[0]
                    b = a
                (<veci*>to)[0] = pick_halves(first, a, b)
                (<veci*>(to + steps * BYTES))[0] = pick_halves(last, a, b)


cdef inline void wide_value_tiles(
    const char* p,                  # 32 lanes
    const char* panel,              # 32 columns
    Py_ssize_t steps,
    real* o, Py_ssize_t stride,     # [32, 32], rows stride numbers apart
    bint begin,                     # o is zeros, not what lies there
    Ahead* ahead, Py_ssize_t rate,
) noexcept nogil:
    cdef Py_ssize_t step
    if begin:
        zero_sums()
    else:
        load_sums(o, 16, 16 * stride, stride)
    for step in range(steps):
        fetch_lines(ahead, rate)
        tile_load(6, panel + step * BYTES, 64)
        tile_load(7, panel + (steps + step) * BYTES, 64)
        tile_load(4, p + 2 * step * BYTES, 64)
        tile_multiply(0, 4, 6)
        tile_multiply(1, 4, 7)
        tile_load(5, p + TILE * 64 + 2 * step * BYTES, 64)
        tile_multiply(2, 5, 6)
        tile_multiply(3, 5, 7)
        tile_load(4, p + (2 * step + 1) * BYTES, 64)
        tile_multiply(0, 4, 6)
        tile_multiply(1, 4, 7)
        tile_load(5, p + TILE * 64 + (2 * step + 1) * BYTES, 64)
        tile_multiply(2, 5, 6)
        tile_multiply(3, 5, 7)
    store_sums(o, 16, 16 * stride, stride)


cdef inline void narrow_value_tiles(
    const char* p,                  # 16 lanes
    const char* panel,              # 64 columns
    Py_ssize_t steps,
    real* o, Py_ssize_t stride,     # [16, 64], rows stride numbers apart
    bint begin,                     # o is zeros, not what lies there
    Ahead* ahead, Py_ssize_t rate,
) noexcept nogil:
    cdef Py_ssize_t step
    if begin:
        zero_sums()
    else:
        load_sums(o, 16, 32, stride)
    for step in range(steps):
        fetch_lines(ahead, rate)
        tile_load(4, p + 2 * step * BYTES, 64)
        tile_load(6, panel + step * BYTES, 64)
        tile_multiply(0, 4, 6)
        tile_load(7, panel + (steps + step) * BYTES, 64)
        tile_multiply(1, 4, 7)
        tile_load(5, p + (2 * step + 1) * BYTES, 64)
        tile_multiply(0, 5, 6)
        tile_multiply(1, 5, 7)
        tile_load(6, panel + (2 * steps + step) * BYTES, 64)
        tile_multiply(2, 4, 6)
        tile_load(7, panel + (3 * steps + step) * BYTES, 64)
        tile_multiply(3, 4, 7)
        tile_multiply(2, 5, 6)
        tile_multiply(3, 5, 7)
    store_sums(o, 16, 32, stride)
