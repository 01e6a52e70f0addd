# SPDX-License-Identifier: Apache-2.0
# Blocked attention of one group of query rows over one chunk of keys, and the merge of a group's chunks.
#
#   a. Query rows lie in the lanes: scores are [key, lane], and the softmax never looks across lanes.
#   b. Per tile of TILE keys and block of lanes: scores, mask, softmax step, values (see _tiles.pxd).
#   c. A key holds its value, so a value that is not finite has no finite score (for softcap see _softcap.pxd). A row
#      that sees it either becomes NaN through its weights, or has weight 0 there and must not touch it: it is left out
#      for all.
from libc.math cimport INFINITY, NAN, exp, isnan, log
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from mla_oracle.fast._lookup cimport HAS_LOOKUP, look_up_row
from mla_oracle.fast._plan cimport (
    GROUP, PARTIAL_ROWS, Group, Job, Work, advance, round_up, state_size, visible, width_at,
)
from mla_oracle.fast._softcap cimport add_row, bend, bends
from mla_oracle.fast._tiles cimport (
    COLUMNS, KEYS, LANES, LINE, NARROW_TOKENS, PAIR, PANEL, TILE, VALUE_HEADS, WIDE, WIDE_TOKENS,
    Ahead, fetch_lines, narrow_scores, prefetch, real, splat, stored_pair, stored_real, values, vec, weight_of,
    where_greater, wide_scores,
)
from mla_oracle.fast._unpack cimport unpack
from mla_oracle.fast._widen cimport widen

cdef enum:
    LATER = 8       # keys from now on whose parts that lie apart are prefetched: few lines, for the rows are long

cdef extern from * nogil:
    int64_t load "__atomic_load_n"(int64_t* address, int order)
    int RELAXED "__ATOMIC_RELAXED"


cdef inline const unsigned char* query_row(const Job* job, const Group* g, Py_ssize_t r) noexcept nogil:
    r += g.row0
    return job.q + g.b * job.q_strides[0] + r // job.H * job.q_strides[1] + r % job.H * job.q_strides[2]


cdef inline void load_queries(const Job* job, Work* w, const Group* g) noexcept nogil:
    cdef Py_ssize_t lane = 0, width, j, i, k, r, d, D = round_up(job.D, PAIR)
    cdef real* q = w.q
    while lane < g.lanes:
        width = width_at(lane, g.lanes)
        for j in range(width // LANES):
            for i in range(LANES):
                r = lane + j * LANES + i
                if r < g.rows:
                    widen(query_row(job, g, r), job.q_dtype, w.q_rows + i * D, job.D)
                else:
                    memset(w.q_rows + i * D, 0, D * sizeof(real))
            d = 0
            while d < D:
                if width == LANES:
                    for i in range(LANES):
                        (<stored_pair*>(q + (d + i % PAIR) * LANES))[i // PAIR] = (
                            (<const stored_pair*>(w.q_rows + i * D + d))[0])
                else:
                    for i in range(LANES):
                        for k in range(PAIR):
                            q[(d + k) * width + j * LANES + i] = w.q_rows[i * D + d + k]
                d += PAIR
        q += D * width
        lane += width


cdef inline void find_rows(
    const Job* job, Py_ssize_t b, Py_ssize_t key, Py_ssize_t n,
    const unsigned char** rows,     # OUT [TILE]; past n it repeats the last one
) noexcept nogil:
    cdef Py_ssize_t page = key // job.block_size, slot = key % job.block_size, k
    cdef const char* table
    cdef const unsigned char* at = NULL
    if job.listed != NULL:  # there may be no table
        for k in range(n):
            rows[k] = <const unsigned char*>job.listed[b * job.listed_stride + key + k]
        for k in range(n, TILE):
            rows[k] = rows[n - 1]
        return
    table = <const char*>job.table + b * job.table_strides[0]
    for k in range(n):
        if k == 0 or slot == job.block_size:
            if k:
                page += 1
                slot = 0
            at = (job.kv + (<const int32_t*>(table + page * job.table_strides[1]))[0] * job.kv_strides[0]
                  + slot * job.kv_strides[1])
        rows[k] = at
        at += job.kv_strides[1]
        slot += 1
    for k in range(n, TILE):
        rows[k] = rows[n - 1]


cdef inline void read_row(
    const Job* job, Py_ssize_t b, Py_ssize_t key,
    const unsigned char* stored,
    real* row,                      # OUT [D]; of bf16 for tiles, where it is looked up
) noexcept nogil:
    cdef const unsigned char* apart = NULL
    cdef int apart_dtype = job.kv_dtype
    cdef size_t later       # past the end of a list it is no address, so not a pointer to be added to
    if job.apart != NULL:
        apart = <const unsigned char*>job.apart[b * job.listed_stride + key]
        later = <size_t>job.apart[b * job.listed_stride + min(key + LATER, job.listed_stride - 1)]
        prefetch(<const void*>later, 0, 3)
        prefetch(<const void*>(later + 64), 0, 3)
    elif job.pe != NULL:
        apart, apart_dtype = job.pe + key * job.pe_stride, job.pe_dtype
    if job.packing != NULL:
        if HAS_LOOKUP and job.packing.looked_up:
            look_up_row(job.packing, stored, apart, row, job.D)
        else:
            unpack(job.packing, stored, apart, row, job.D)
        return
    widen(stored, job.kv_dtype, row, job.D_kv)
    if apart != NULL:
        widen(apart, apart_dtype, row + job.D_kv, job.D - job.D_kv)


cdef inline Py_ssize_t first_rows_of_next(
    const Job* job, const Group* g,
    const unsigned char** rows,     # OUT [tile + GROUP]
    Py_ssize_t tile,                # keys
) noexcept nogil:
    # The first tile of the task that is next in line now, likely this thread's, and the queries it needs.
    # Returns how many rows these are.
    cdef Group next_group = g[0]
    cdef Py_ssize_t task = load(job.counters, RELAXED), key, n, r
    if not advance(job, &next_group, task):
        return 0
    key = (task - next_group.first_task) * next_group.chunk
    n = min(tile, min(next_group.chunk, next_group.keys - key))
    if n > 0:
        find_rows(job, next_group.b, key, n, rows)
    if next_group.index == g.index:
        return n
    for r in range(next_group.rows):
        rows[n + r] = query_row(job, &next_group, r)
    return n + next_group.rows


cdef inline void mask(
    real* s,                        # [width / LANES] of [n, LANES], TILE x LANES apart: s is always so
    Py_ssize_t n, Py_ssize_t width, Py_ssize_t key,
    const Py_ssize_t* sees,         # [width]
) noexcept nogil:
    cdef Py_ssize_t j, k, i
    for j in range(width // LANES):
        for k in range(n):
            for i in range(LANES):
                if key + k >= sees[j * LANES + i]:
                    s[(j * TILE + k) * LANES + i] = -INFINITY


cdef inline bint softmax(
    real* s,                        # scores in, weights out
    Py_ssize_t n, Py_ssize_t width,
    real* m, real* l,               # [width]
    real* rescale,                  # OUT [width]
) noexcept nogil:
    """Returns whether a score was not finite."""
    cdef Py_ssize_t j, k
    cdef int i
    cdef vec x, top, base, fix, total, odd
    cdef vec* column
    cdef bint any_odd = False
    for j in range(width // LANES):
        column = <vec*>s + j * TILE
        top = (<vec*>m)[j]
        odd = splat(0)
        for k in range(n):
            x = column[k]
            top = where_greater(x, top, x, top)
            odd = odd + x * splat(0)
        base = where_greater(top, splat(-INFINITY), top, splat(0))
        fix = weight_of((<vec*>m)[j] - base)
        total = splat(0)
        for k in range(n):
            x = weight_of(column[k] - base)
            column[k] = x
            total = total + x
        for k in range(n, round_up(n, KEYS)):
            column[k] = splat(0)
        (<vec*>l)[j] = (<vec*>l)[j] * fix + total
        (<vec*>m)[j] = top
        (<vec*>rescale)[j] = fix
        for i in range(LANES):
            any_odd |= (<real*>&odd)[i] != 0
    return any_odd


cdef inline void leave_out(
    const Job* job, Work* w,
    const stored_real** rows,       # [n]; those with a value that is not finite become rows of zeros
    Py_ssize_t n,
) noexcept nogil:
    cdef Py_ssize_t k, d
    cdef real odd
    for k in range(n):
        odd = 0
        for d in range(job.V):
            odd += rows[k][d] * 0
        if odd != 0:
            rows[k] = <const stored_real*>w.zeros


cdef inline void add_values(
    const Job* job, Work* w,
    const stored_real** rows,       # [n]
    Py_ssize_t n, Py_ssize_t used,  # n in whole KEYS
    real* o,                        # [used, o_row]
    Ahead* ahead,
) noexcept nogil:
    cdef const stored_real* tail[TILE]
    cdef const real* p
    cdef Py_ssize_t column = 0, head, k, d, readable
    readable = (job.D_kv if job.direct else job.row) - job.first_value
    while column < job.V:
        if column + COLUMNS > readable:
            for k in range(n):
                tail[k] = <const stored_real*>(w.tail + k * COLUMNS)
                for d in range(COLUMNS):
                    w.tail[k * COLUMNS + d] = rows[k][column + d] if column + d < job.V else 0
        head = 0
        while head < used:
            p = w.s + head // LANES * TILE * LANES + head % LANES
            if column + COLUMNS > readable:
                values(tail, n, 0, p, LANES, w.rescale + head,
                       o + head * job.o_row + column, job.o_row,
                       ahead)
            else:
                values(rows, n, column, p, LANES, w.rescale + head,
                       o + head * job.o_row + column, job.o_row,
                       ahead)
            head += VALUE_HEADS
        column += COLUMNS


cdef inline Py_ssize_t tile_of(Py_ssize_t keys) noexcept nogil:
    # How many of the keys that are left are the next tile: in tiles of like size, each hides the next one's memory.
    cdef Py_ssize_t tiles = (keys + TILE - 1) // TILE
    return min(keys, round_up((keys + tiles - 1) // tiles, NARROW_TOKENS))


cdef inline void attend(
    const Job* job, Work* w, const Group* g, Py_ssize_t chunk,
    real* m,                        # OUT the state: m [lanes], l [lanes], o [lanes, o_row]
) noexcept nogil:
    cdef real* total = m + g.lanes
    cdef real* o = m + 2 * g.lanes
    cdef real* q
    cdef const unsigned char* found[2][TILE + GROUP]
    cdef const stored_real* rows[TILE]
    cdef const stored_real* rests[TILE]     # where numbers split to D of each row are, as if all of it were
    cdef const stored_real* live[TILE]      # rows whose values count
    cdef Py_ssize_t sees[GROUP]
    cdef Py_ssize_t key = chunk * g.chunk, stop = min(key + g.chunk, g.keys)
    cdef Py_ssize_t least = g.keys, lane, width, used, n, n_ahead, k
    cdef bint odd
    cdef const stored_real** part
    cdef Py_ssize_t d, stop_d, D = round_up(job.D, PAIR)
    # From here on the row is in rests; widened rows are split where those read in place are, for the same bits.
    cdef Py_ssize_t split = job.D_kv if job.pe != NULL and (job.D | job.D_kv) % PAIR == 0 else D
    cdef real scale
    cdef real* row
    cdef int now = 0
    cdef Ahead ahead
    for lane in range(g.lanes):
        m[lane] = -INFINITY
        sees[lane] = visible(job, g.b, g.row0 + lane) if lane < g.rows else g.keys
        least = min(least, sees[lane])
    memset(total, 0, (state_size(job, g.lanes) - g.lanes) * sizeof(real))

    if key < stop:
        find_rows(job, g.b, key, tile_of(stop - key), found[0])
    while key < stop:
        n = tile_of(stop - key)
        if key + n < stop:
            n_ahead = tile_of(stop - key - n)
            find_rows(job, g.b, key + n, n_ahead, found[1 - now])
        else:
            n_ahead = first_rows_of_next(job, g, found[1 - now], TILE)
        ahead.rows, ahead.n, ahead.bytes = found[1 - now], n_ahead, job.row_bytes
        ahead.row = ahead.at = 0
        for k in range(n):
            rows[k] = <const stored_real*>found[now][k]
            if not job.direct:
                row = w.packed + k * job.row
                read_row(job, g.b, key + k, found[now][k], row)
                rows[k] = <const stored_real*>row
            live[k] = rows[k] + job.first_value
            if split < D:
                rests[k] = <const stored_real*>(job.pe + (key + k) * job.pe_stride) - split if job.direct else rows[k]
        for k in range(n, TILE):
            rows[k] = <const stored_real*>w.zeros
            rests[k] = rows[k]
            live[k] = rows[k]

        q = w.q
        lane = 0
        while lane < g.lanes:
            width = width_at(lane, g.lanes)
            d = 0
            while d < D:
                stop_d = min(d + PANEL // width, split if d < split else D)
                part = &rows[0] if d < split else &rests[0]
                scale = job.scale if stop_d == D else 1
                k = 0
                while k < n:
                    if width == WIDE:
                        wide_scores(part + k, &ahead, q, d, stop_d, scale,
                                    w.s + k * LANES, LANES, TILE * LANES)
                        k += WIDE_TOKENS
                    else:
                        narrow_scores(part + k, &ahead, q, d, stop_d, scale, w.s + k * LANES)
                        k += NARROW_TOKENS
                d = stop_d
            if key + n > least:
                mask(w.s, n, width, key, sees + lane)
            odd = False
            if bends(job):
                for k in range(width // LANES):
                    odd |= bend(job, g, key, lane + k * LANES, w.s + k * TILE * LANES, n)
                softmax(w.s, n, width, m + lane, total + lane, w.rescale)
            else:
                odd = softmax(w.s, n, width, m + lane, total + lane, w.rescale)
            if odd:
                leave_out(job, w, live, n)
            used = min(width, g.rows - lane)
            add_values(job, w, live, round_up(n, KEYS), used, o + lane * job.o_row, &ahead)
            if odd and job.softcap > 0:
                for k in range(n):
                    if live[k] == <const stored_real*>w.zeros:
                        add_row(job, g, key + k, lane, w.s + k * LANES, rows[k] + job.first_value, used,
                                o + lane * job.o_row)
            q += D * width
            lane += width
        fetch_lines(&ahead, n_ahead * ahead.bytes)
        key += n
        now = 1 - now


cdef inline void finish(
    const Job* job, const Group* g,
    const real* states,             # [chunks, state]
) noexcept nogil:
    cdef real weight[PARTIAL_ROWS]
    cdef Py_ssize_t size = state_size(job, g.lanes), r, i, d
    cdef const real* o
    cdef real* out
    cdef double top, base, total
    for r in range(g.rows):
        out = job.out + (g.b * job.T * job.H + g.row0 + r) * job.V
        top = -INFINITY
        for i in range(g.chunks):
            top = max(top, <double>states[i * size + r])
        base = top if top > -INFINITY else 0
        total = 0
        for i in range(g.chunks):
            weight[i] = <real>exp(states[i * size + r] - base)
            total += <double>weight[i] * states[i * size + g.lanes + r]
        if isnan(total) or total == 0:
            for d in range(job.V):
                out[d] = NAN if isnan(total) else 0
            job.lse[g.b * job.T * job.H + g.row0 + r] = NAN if isnan(total) else job.empty_lse
            continue
        job.lse[g.b * job.T * job.H + g.row0 + r] = <real>(top + log(total))
        for i in range(g.chunks):
            weight[i] = <real>(weight[i] / total)
            o = states + i * size + 2 * g.lanes + r * job.o_row
            for d in range(job.V):
                out[d] = (out[d] if i else 0) + weight[i] * o[d]
