# SPDX-License-Identifier: Apache-2.0
# _blocks.pxd for a bf16 cache on AMX: the same state, scores and weights, by products of bf16 tiles.
#
#   a. Scores: a tile of 16 cached rows, where they lie, times a tile of 16 query rows: S[key, lane]. A query is
#      three bf16 terms that add up to it exactly, or as many of them as are not 0.
#   b. Values: weights as two bf16 terms, turned to [lane, key]; rows interleaved by pairs, 64 columns at a time.
#   c. All products are exact and added in f32, in an order that lengths and group size alone set. Numbers
#      below the normal range count as 0.
#   d. A score that is not finite is computed again, from the query as it is stored.
from libc.math cimport INFINITY, isfinite
from libc.string cimport memcpy, memset

from mla_oracle.fast._amx_rows cimport find_blocks, in_place, pack_rows
from mla_oracle.fast._amx_tiles cimport (
    BYTES, STEP, Picks, Weighing, narrow_score_tiles, narrow_value_tiles, pack_values, split_weights, weigh_keys,
    wide_score_tiles, wide_value_tiles,
)
from mla_oracle.fast._blocks cimport find_rows, first_rows_of_next, mask, query_row
from mla_oracle.fast._plan cimport GROUP, Group, Job, Work, round_up, visible
from mla_oracle.fast._softcap cimport add_row, bend, bends
from mla_oracle.fast._tiles cimport (
    COLUMNS, LANES, TILE, Ahead, real, splat, stored_half, stored_real, vec, weight_of, where_greater,
)
from mla_oracle.fast._widen cimport widen
from mla_oracle.reference._common cimport STORED_BF16

cdef enum:
    FEW = 64                # keys of a softmax step of few lanes; else TILE


# --- scores


cdef inline bint scale_scores(
    real* s,                        # [n, LANES], in place
    Py_ssize_t n, real scale,
    vec* top,                       # OUT their maximum, NaN left out
) noexcept nogil:
    """Returns whether a score is not finite."""
    cdef vec tops[4]
    cdef vec odds[4]
    cdef vec x
    cdef Py_ssize_t k
    cdef int i
    cdef bint any_odd = False
    for i in range(4):
        tops[i] = splat(-INFINITY)
        odds[i] = splat(0)
    for k in range(n // 4):
        for i in range(4):
            x = (<vec*>s)[4 * k + i] * scale
            (<vec*>s)[4 * k + i] = x
            tops[i] = where_greater(x, tops[i], x, tops[i])
            odds[i] = odds[i] + x * splat(0)
    for k in range(n // 4 * 4, n):
        x = (<vec*>s)[k] * scale
        (<vec*>s)[k] = x
        tops[0] = where_greater(x, tops[0], x, tops[0])
        odds[0] = odds[0] + x * splat(0)
    for i in range(1, 4):
        tops[0] = where_greater(tops[i], tops[0], tops[i], tops[0])
        odds[0] = odds[0] + odds[i]
    top[0] = tops[0]
    for i in range(LANES):
        any_odd |= (<real*>&odds[0])[i] != 0
    return any_odd


cdef inline void begin_weights(
    Weighing* b, int i,             # which of its blocks
    vec top,                        # of the scores
    real* m, real* rescale,         # [LANES]; IN AND OUT, OUT
) noexcept nogil:
    top = where_greater((<vec*>m)[0], top, (<vec*>m)[0], top)
    b.base[i] = where_greater(top, splat(-INFINITY), top, splat(0))
    b.total[i] = splat(0)
    (<vec*>rescale)[0] = weight_of((<vec*>m)[0] - b.base[i])
    (<vec*>m)[0] = top


cdef inline void end_weights(
    const Work* w, Weighing* b, Py_ssize_t lane,    # its first
    Py_ssize_t steps,
    real* l,                        # [lanes], IN AND OUT
) noexcept nogil:
    cdef int i
    cdef real* s
    weigh_keys(b, b.n)
    for i in range(b.blocks):
        s = b.s + i * TILE * LANES
        (<vec*>(l + lane))[0] = (<vec*>(l + lane))[0] * (<vec*>(w.rescale + lane))[0] + b.total[i]
        memset(s + b.n * LANES, 0, (steps * STEP - b.n) * LANES * sizeof(real))
        split_weights(s, steps, <Picks*>w.picks, <char*>w.p + lane * TILE * 4)
        lane += LANES


cdef inline void score_again(
    const Job* job, Work* w, const Group* g, Py_ssize_t lane,
    const unsigned char** rows,     # [n]
    Py_ssize_t n,
    real* s,                        # [n, LANES]: lanes lane, lane + 1, ...; those not finite are replaced
) noexcept nogil:
    cdef Py_ssize_t D = round_up(job.D, STEP), i, k, d
    cdef real* q = w.q_rows
    cdef real* row = q + D
    cdef real total
    cdef vec sums
    cdef bint loaded
    for i in range(min(LANES, g.rows - lane)):
        loaded = False
        for k in range(n):
            if isfinite(s[k * LANES + i]):
                continue
            if not loaded:
                widen(query_row(job, g, lane + i), job.q_dtype, q, job.D)
                loaded = True
            widen(rows[k], job.kv_dtype, row, job.D)
            sums = splat(0)
            for d in range(D // LANES):
                sums = sums + (<vec*>q)[d] * (<vec*>row)[d]
            total = 0
            for d in range(LANES):
                total += (<real*>&sums)[d]
            s[k * LANES + i] = total * job.scale


# --- values


cdef inline void leave_out_rows(
    const Job* job, const Work* w,
    const unsigned char** rows,     # [n]; those with a value that is not finite become rows of zeros
    Py_ssize_t n,
) noexcept nogil:
    cdef Py_ssize_t k, d
    cdef int odd
    for k in range(n):
        odd = 0
        for d in range(job.V):
            odd |= ((<const stored_half*>rows[k])[d] & 0x7F80) == 0x7F80
        if odd:
            rows[k] = <const unsigned char*>w.zeros


cdef inline void add_rows(
    const Job* job, Work* w, const Group* g, Py_ssize_t key,
    const unsigned char** rows,     # [n]; those that were left out are rows of zeros
    const unsigned char** whole,    # [n]; and as they were
    Py_ssize_t n,
    real* o,                        # [lanes, o_row]
) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        if rows[k] != whole[k]:
            widen(whole[k], STORED_BF16, w.q_rows, job.V)
            add_row(job, g, key + k, 0, w.s + k * LANES, <const stored_real*>w.q_rows, g.rows, o)


cdef inline void rescale_rows(
    real* o, Py_ssize_t stride,                     # rows of width numbers, stride numbers apart
    Py_ssize_t lanes, Py_ssize_t width,
    const real* rescale,                            # [lanes]
) noexcept nogil:
    cdef Py_ssize_t i, d
    for i in range(lanes):
        if rescale[i] != 1:
            for d in range(width // LANES):
                (<vec*>(o + i * stride))[d] = (<vec*>(o + i * stride))[d] * rescale[i]


# --- a chunk


cdef inline void score_tiles(
    const Job* job, const Work* w, const Group* g, Py_ssize_t lane, Py_ssize_t width,
    const char** at,                # [blocks] of 16 rows
    const Py_ssize_t* strides,
    Py_ssize_t n,
    Weighing* before, Ahead* ahead, Py_ssize_t lines,     # to weigh and to prefetch meanwhile
) noexcept nogil:
    cdef Py_ssize_t steps = round_up(job.D, STEP) // STEP, plane = g.lanes * steps * STEP * 2
    cdef Py_ssize_t blocks = (n + 15) // 16, i = 0, k, rate
    cdef const char* q = <char*>w.q + lane // LANES * steps * BYTES
    cdef real* s = w.s + lane * TILE
    cdef const char* four[4]
    cdef Py_ssize_t apart[4]
    cdef int most = 2 if width > LANES else 4
    rate = lines // ((blocks + most - 1) // most * steps) + 1
    before.rate = before.n // ((blocks + most - 1) // most * steps) + 1
    while i < blocks:
        for k in range(most):
            four[k] = at[min(i + k, blocks - 1)]
            apart[k] = strides[min(i + k, blocks - 1)]
        if most == 2:
            wide_score_tiles(four, apart, q, steps, w.terms, plane, s + i * 16 * LANES, before, ahead, rate)
        else:
            narrow_score_tiles(four, apart, q, steps, w.terms, plane, s + i * 16 * LANES, before, ahead, rate)
        i += most


cdef inline void add_value_tiles(
    const Job* job, Work* w, const Group* g,
    const unsigned char** rows, Py_ssize_t steps,
    real* o, bint begin,            # [lanes, o_row]; as if zeros at first
    Ahead* ahead, Py_ssize_t lines,
) noexcept nogil:
    cdef Py_ssize_t column = 0, D = round_up(job.D, STEP) - job.first_value, j, half, rate
    rate = lines // (job.V_tiles // COLUMNS * steps * (g.lanes // 32 * 2 + g.lanes // 16 % 2)) + 1
    cdef char* panel = <char*>w.tail
    while column < job.V:
        pack_values(rows, steps, <const unsigned char*>w.zeros, column, D, <Picks*>w.picks, panel)
        j = 0
        while j + 1 < g.lanes // 16:
            for half in range(2):
                wide_value_tiles(<char*>w.p + j * TILE * 64, panel + 2 * half * steps * BYTES, steps,
                                 o + j * 16 * job.o_row + column + half * 32, job.o_row, begin, ahead, rate)
            j += 2
        if j < g.lanes // 16:
            narrow_value_tiles(<char*>w.p + j * TILE * 64, panel, steps,
                               o + j * 16 * job.o_row + column, job.o_row, begin, ahead, rate)
        column += COLUMNS


cdef inline void attend_tiles(
    const Job* job, Work* w, const Group* g, Py_ssize_t chunk,
    real* m,                        # OUT the state: m [lanes], l [lanes], o [lanes, o_row] if there is a key
) noexcept nogil:
    cdef real* total = m + g.lanes
    cdef real* o = m + 2 * g.lanes
    cdef real* s
    cdef const unsigned char* found[2][TILE + GROUP]
    cdef const unsigned char* rows[TILE]
    cdef const unsigned char* whole[TILE]
    cdef Py_ssize_t sees[GROUP]
    cdef Py_ssize_t key = chunk * g.chunk, stop = min(key + g.chunk, g.keys)
    cdef Py_ssize_t most = TILE if g.lanes > 32 else FEW, D = round_up(job.D, STEP)
    cdef Py_ssize_t least = g.keys, lane, width, n, n_ahead, k, steps, lines
    cdef const char* at[TILE]           # of each block of 16 rows
    cdef Py_ssize_t strides[TILE]
    cdef vec top
    cdef bint odd, begin
    cdef int now = 0, i
    cdef Ahead ahead
    cdef Weighing weighing
    for lane in range(g.lanes):
        m[lane] = -INFINITY
        sees[lane] = visible(job, g.b, g.row0 + lane) if lane < g.rows else g.keys
        least = min(least, sees[lane])
    memset(total, 0, g.lanes * sizeof(real))

    if key < stop:
        find_rows(job, g.b, key, min(most, stop - key), found[0])
    while key < stop:
        n = min(most, stop - key)
        if key + n < stop:
            n_ahead = min(most, stop - key - n)
            find_rows(job, g.b, key + n, n_ahead, found[1 - now])
        else:
            n_ahead = first_rows_of_next(job, g, found[1 - now], most)
        ahead.rows, ahead.n, ahead.bytes = found[1 - now], n_ahead, job.row_bytes
        ahead.row = ahead.at = 0
        lines = n_ahead * ((ahead.bytes + 63) // 64)
        steps = (n + STEP - 1) // STEP
        for k in range(n):
            rows[k] = found[now][k]
        if not in_place(job):
            pack_rows(job, w, g.b, key, rows, n)
        find_blocks(w, rows, n, D * 2, g.lanes > 2 * LANES, at, strides)
        for k in range(n, steps * STEP):
            rows[k] = <const unsigned char*>w.zeros

        odd = False
        weighing.blocks = weighing.n = weighing.k = 0
        lane = 0
        while lane < g.lanes:
            width = min(2 * LANES, g.lanes - lane)
            score_tiles(job, w, g, lane, width, at, strides, n, &weighing, &ahead, lines * 3 * width // (10 * g.lanes))
            end_weights(w, &weighing, lane - 2 * LANES, steps, total)
            weighing.s, weighing.n, weighing.k, weighing.blocks = w.s + lane * TILE, n, 0, width // LANES
            for i in range(weighing.blocks):
                s = weighing.s + i * TILE * LANES
                if scale_scores(s, n, job.scale, &top) or key + n > least:
                    score_again(job, w, g, lane, rows, n, s)
                    mask(s, n, LANES, key, sees + lane)
                    odd |= scale_scores(s, n, 1, &top)
                if bends(job):
                    bend(job, g, key, lane, s, n)
                    scale_scores(s, n, 1, &top)
                begin_weights(&weighing, i, top, m + lane, w.rescale + lane)
                lane += LANES
        end_weights(w, &weighing, lane - weighing.blocks * LANES, steps, total)
        for k in range(n):
            rows[k] += job.first_value * 2
        if odd:
            memcpy(whole, rows, n * sizeof(rows[0]))
            leave_out_rows(job, w, rows, n)
        begin = key == chunk * g.chunk
        if not begin:
            rescale_rows(o, job.o_row, g.lanes, job.V_tiles, w.rescale)
        add_value_tiles(job, w, g, rows, steps, o, begin, &ahead, lines * 7 // 10)
        if odd and job.softcap > 0:
            add_rows(job, w, g, key, rows, whole, n, o)
        key += n
        now = 1 - now
