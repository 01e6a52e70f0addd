# SPDX-License-Identifier: Apache-2.0
# Where the tiles of _amx.pxd come from: a thread's scratch, queries as bf16 terms, cached rows as blocks of 16.
from libc.string cimport memcpy, memset

from mla_oracle.fast._amx_tiles cimport BYTES, STEP, Picks, fill, pick_halves, turn
from mla_oracle.fast._blocks cimport query_row, read_row
from mla_oracle.fast._plan cimport GROUP, Group, Job, Work, carve, round_up, state_size
from mla_oracle.fast._tiles cimport COLUMNS, LANES, TILE, real, splat, stored_half, vec, veci, word
from mla_oracle.fast._widen cimport widen
from mla_oracle.reference._common cimport STORED_BF16

cdef enum:
    TERMS = 3               # of a query


cdef inline bint in_place(const Job* job) noexcept nogil:
    # Cached rows are tiles as they lie: bf16, a whole number of STEPs.
    return job.D % STEP == 0 and job.packing == NULL and job.apart == NULL


cdef inline char* lay_out_tiles(const Job* job, Work* w, char* memory) noexcept nogil:
    # Returns the end of what it carved; from NULL, that is the size.
    cdef Py_ssize_t lanes = round_up(min(GROUP, job.T * job.H), LANES), D = round_up(job.D, STEP)
    w.q = carve(&memory, TERMS * lanes * D // 2)
    w.q_rows = carve(&memory, LANES * D)
    w.s = carve(&memory, TILE * lanes)
    w.p = carve(&memory, TILE * lanes)
    w.rescale = carve(&memory, lanes)
    w.packed = carve(&memory, TILE * D // 2)
    w.tail = carve(&memory, TILE * COLUMNS // 2)
    w.zeros = carve(&memory, D // 2)
    w.picks = carve(&memory, sizeof(Picks) // sizeof(real))
    w.state = carve(&memory, state_size(job, lanes))
    return memory


cdef inline void prepare_tiles(const Job* job, Work* w) noexcept nogil:
    cdef Py_ssize_t D = round_up(job.D, STEP)
    memset(w.q_rows, 0, LANES * D * sizeof(real))
    memset(w.packed, 0, TILE * D * 2)
    memset(w.zeros, 0, D * 2)
    fill(<Picks*>w.picks)


cdef inline void load_query_tiles(const Job* job, Work* w, const Group* g) noexcept nogil:
    # w.q: [TERMS] of [lanes / 16, D / 32] tiles of [pair of numbers, lane, 2]; w.terms: how many are not all 0.
    cdef Picks* picks = <Picks*>w.picks
    cdef veci tops = (<const veci*>picks.tops)[0], bits
    cdef Py_ssize_t D = round_up(job.D, STEP), steps = D // STEP, plane = g.lanes * D * 2
    cdef Py_ssize_t block, step, r
    cdef int i, t, terms = 1 if job.q_dtype == STORED_BF16 else TERMS
    cdef vec part[2][16]
    cdef veci x[16]
    cdef veci left
    w.terms = 1
    for block in range(g.lanes // 16):
        for i in range(16):
            r = block * 16 + i
            if r < g.rows:
                widen(query_row(job, g, r), job.q_dtype, w.q_rows + i * D, job.D)
            else:
                memset(w.q_rows + i * D, 0, job.D * sizeof(real))
        for step in range(steps):
            for i in range(16):
                part[0][i] = (<vec*>(w.q_rows + i * D + step * STEP))[0]
                part[1][i] = (<vec*>(w.q_rows + i * D + step * STEP))[1]
            for t in range(terms):
                left = <veci>splat(0)
                for i in range(16):
                    x[i] = pick_halves(tops, <veci>part[0][i], <veci>part[1][i])
                    bits = <veci>part[0][i] & <word>-65536
                    part[0][i] = part[0][i] - <vec>bits
                    bits = <veci>part[1][i] & <word>-65536
                    part[1][i] = part[1][i] - <vec>bits
                    left = left | <veci>part[0][i] | <veci>part[1][i]
                turn(x, picks)
                for i in range(16):
                    (<veci*>(<char*>w.q + t * plane + (block * steps + step) * BYTES))[i] = x[i]
                if t + 1 < terms and w.terms == t + 1:
                    for i in range(16):
                        if (<word*>&left)[i] != 0:
                            w.terms = t + 2


cdef inline void pack_rows(
    const Job* job, Work* w, Py_ssize_t b, Py_ssize_t key,
    const unsigned char** rows,     # [n], IN AND OUT
    Py_ssize_t n,
) noexcept nogil:
    """Make rows that are not so tiles: bf16, zeros up to a whole STEP."""
    cdef Py_ssize_t D = round_up(job.D, STEP), k, d
    cdef real* row = w.q_rows + 2 * D    # as in score_again, behind its two
    cdef stored_half* to = <stored_half*>w.packed
    for k in range(n):
        if job.packing == NULL and job.apart == NULL:
            memcpy(to, rows[k], job.D * 2)
        elif job.packing != NULL and job.packing.looked_up:
            read_row(job, b, key + k, rows[k], <real*>to)
        else:
            read_row(job, b, key + k, rows[k], row)
            for d in range(job.D):
                to[d] = (<const word*>row)[d] >> 16
        rows[k] = <const unsigned char*>to
        to += D


cdef inline void find_blocks(
    Work* w,
    const unsigned char** rows,     # [n]
    Py_ssize_t n,
    Py_ssize_t bytes,               # of a row
    bint often,                     # read more than twice: then no line is split between two of the processor's
    const char** at,                # OUT [blocks] of 16 rows, those past n any numbers
    Py_ssize_t* strides,            # OUT [blocks] how far apart their rows are
) noexcept nogil:
    """Blocks are where the rows lie if these are equally far apart, else copies."""
    cdef Py_ssize_t first = 0, k, i
    cdef char* copy
    cdef bint apart
    while first < n:
        at[0], strides[0] = <const char*>rows[first], bytes
        apart = first + 16 > n
        if not apart:
            strides[0] = rows[first + 1] - rows[first]
            apart = often and (<size_t>at[0] | <size_t>strides[0]) % 64 != 0
            for k in range(first + 1, first + 15):
                apart |= rows[k + 1] - rows[k] != strides[0]
        if apart:
            copy = <char*>w.packed + first * bytes
            at[0], strides[0] = copy, bytes
            for k in range(first, min(first + 16, n)):
                for i in range(bytes // 64):
                    (<veci*>(copy + i * 64))[0] = (<const veci*>rows[k])[i]
                copy += bytes
        first += 16
        at += 1
        strides += 1
