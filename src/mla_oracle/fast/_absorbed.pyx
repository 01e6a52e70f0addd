# SPDX-License-Identifier: Apache-2.0
# Absorbed form, blocked: the function of reference/_absorbed.pyx in three steps, each shared out by task.
#
#   absorb_query   q_lat[t, h]  = sum_p q_nope[t, h, p] w_uk[h, p]        a task is a head
#   attend         o_lat        = attention over the rows c_kv | k_pe      tasks as for paged decode
#   up_project     out[t, h, j] = w_uv[h, j] . o_lat[t, h]                a task is a head
#
# Arrays have any strides but the innermost, which is one number.
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mla_oracle.fast._plan cimport Job, round_up, state_row
from mla_oracle.fast._tasks cimport RELAXED, fetch_add, load, take_part
from mla_oracle.fast._tiles cimport (
    COLUMNS, KEYS, LANES, LINE, PAIR, VALUE_HEADS, Ahead, fetch_lines, real, splat, stored_real, values, vec,
)
from mla_oracle.reference._common cimport STORED_F32, STORED_F64

cdef enum:
    DOTS = 8        # rows whose dot products run side by side
    STREAMS = 16    # rows of w_uk read side by side: few, so that each is read on without a stop


cdef Py_ssize_t find_ahead(
    const real[:, :, :] w,          # [H, P, L]
    Py_ssize_t h, Py_ssize_t row, Py_ssize_t next_h,
    const unsigned char** rows,     # OUT [STREAMS]: those of head h from `row` on, or the first of head next_h
) noexcept nogil:
    """Returns how many there are."""
    cdef Py_ssize_t n = 0, k
    if row >= w.shape[1]:
        h, row = next_h, 0
    if h < w.shape[0]:
        n = min(STREAMS, w.shape[1] - row)
    for k in range(n):
        rows[k] = <const unsigned char*>&w[h, row + k, 0]
    return n


cdef void absorb_head(
    const real[:, :] q_nope,        # [T, P]
    const real[:, :, :] w,          # [H, P, L]
    Py_ssize_t h, Py_ssize_t next_h,
    real[:, :] q_lat,               # OUT [T, L]
    real* o,                        # scratch: [VALUE_HEADS, L rounded up to COLUMNS]
) noexcept nogil:
    cdef const stored_real* rows[STREAMS]
    cdef real p[STREAMS][VALUE_HEADS]
    cdef real tail[STREAMS][COLUMNS]
    cdef real zeros[COLUMNS]
    cdef real one[VALUE_HEADS]
    cdef const unsigned char* found[STREAMS]
    cdef Py_ssize_t T = q_nope.shape[0], P = w.shape[1], L = w.shape[2], o_stride = round_up(L, COLUMNS)
    cdef Py_ssize_t t = 0, first, n, k, i, column
    cdef Ahead ahead
    ahead.rows, ahead.bytes = found, L * sizeof(real)
    memset(zeros, 0, sizeof(zeros))
    for i in range(VALUE_HEADS):
        one[i] = 1
    while t < T:
        memset(o, 0, VALUE_HEADS * o_stride * sizeof(real))
        first = 0
        while first < P:
            n = min(STREAMS, P - first)
            ahead.n, ahead.row, ahead.at = find_ahead(w, h, first + STREAMS, next_h, found), 0, 0
            for k in range(STREAMS):
                for i in range(VALUE_HEADS):
                    p[k][i] = q_nope[t + i, first + k] if t + i < T and k < n else 0
            for k in range(n, STREAMS):
                rows[k] = zeros
            column = 0
            while column < L:
                for k in range(n):
                    rows[k] = <const stored_real*>&w[h, first + k, 0] + column
                    if column + COLUMNS > L:
                        for i in range(COLUMNS):
                            tail[k][i] = rows[k][i] if column + i < L else 0
                        rows[k] = <const stored_real*>&tail[k][0]
                fetch_lines(&ahead, STREAMS * COLUMNS // LINE)
                values(rows, round_up(n, KEYS), 0, &p[0][0], VALUE_HEADS, one, o + column, o_stride, &ahead)
                column += COLUMNS
            first += STREAMS
        for i in range(min(VALUE_HEADS, T - t)):
            for k in range(L):
                q_lat[t + i, k] = o[i * o_stride + k]
        t += VALUE_HEADS


cdef void dots(
    const stored_real** rows,       # [DOTS] -> [n]
    const stored_real* x,           # [n]
    Py_ssize_t n,
    real* y,                        # OUT [DOTS]
) noexcept nogil:
    cdef vec acc[DOTS]
    cdef vec b
    cdef real lanes[DOTS][LANES]
    cdef Py_ssize_t k = 0
    cdef int i, j
    for i in range(DOTS):
        acc[i] = splat(0)
    while k + LANES <= n:
        b = (<const vec*>(x + k))[0]
        for i in range(DOTS):
            acc[i] = acc[i] + (<const vec*>(rows[i] + k))[0] * b
        k += LANES
    for i in range(DOTS):
        (<vec*>&lanes[i][0])[0] = acc[i]
        y[i] = 0
        for j in range(LANES):
            y[i] += lanes[i][j]
    while k < n:
        for i in range(DOTS):
            y[i] += rows[i][k] * x[k]
        k += 1


cdef void project_head(
    const real[:, :] o_lat,         # [T, L]
    const real[:, :] w_uv,          # [V, L]
    real[:, :] out,                 # OUT [T, V]
) noexcept nogil:
    cdef const stored_real* rows[DOTS]
    cdef real y[DOTS]
    cdef Py_ssize_t V = w_uv.shape[0], j = 0, t, i
    while j < V:
        for i in range(DOTS):
            rows[i] = <const stored_real*>&w_uv[min(j + i, V - 1), 0]
        for t in range(o_lat.shape[0]):
            dots(rows, <const stored_real*>&o_lat[t, 0], w_uv.shape[1], y)
            for i in range(min(DOTS, V - j)):
                out[t, j + i] = y[i]
        j += DOTS


def absorb_query(
    const real[:, :, :] q_nope,     # [T, H, P]
    const real[:, :, :] w_uk,       # [H, P, L]
    real[:, :, :] q_lat,            # [T, H, L]
    int64_t[::1] counter,           # [1], 0 at first, shared by all threads
):
    """Fill `q_lat`: q_nope seen from the latent space. Each thread calls this with the same arguments."""
    cdef Py_ssize_t h, size = VALUE_HEADS * round_up(w_uk.shape[2], COLUMNS) * sizeof(real)
    cdef real* o = <real*>malloc(size)
    if o == NULL:
        raise MemoryError(f"{size} bytes of scratch for one thread")
    with nogil:
        h = fetch_add(&counter[0], 1, RELAXED)
        while h < w_uk.shape[0]:
            absorb_head(q_nope[:, h], w_uk, h, load(&counter[0], RELAXED), q_lat[:, h], o)
            h = fetch_add(&counter[0], 1, RELAXED)
        free(o)


def up_project(
    const real[:, :, :] o_lat,      # [T, H, L]
    const real[:, :, :] w_uv,       # [H, V, L]
    real[:, :, :] out,              # [T, H, V]
    int64_t[::1] counter,           # [1], 0 at first, shared by all threads
):
    """Fill `out`: each head's latent output, decompressed. Each thread calls it with the same arguments."""
    cdef Py_ssize_t h
    with nogil:
        h = fetch_add(&counter[0], 1, RELAXED)
        while h < w_uv.shape[0]:
            project_head(o_lat[:, h], w_uv[h], out[:, h])
            h = fetch_add(&counter[0], 1, RELAXED)


def attend(
    const real[:, :, ::1] q,        # [T, H, L + R]
    const real[:, :] c_kv,          # [t_kv, L]
    const real[:, :] k_pe,          # [t_kv, R]
    double softmax_scale,
    real[:, :, ::1] o_lat,          # [T, H, L]
    real[:, ::1] lse,               # [T, H]
    int64_t[::1] counters,          # as for _paged.decode
    real[:, ::1] pools,
):
    """Fill `o_lat` and `lse`; queries are the last T rows. Each thread calls it with the same arguments."""
    cdef Job job
    cdef int32_t page = 0, t_kv = <int32_t>c_kv.shape[0]
    cdef Py_ssize_t lacking
    if o_lat.shape[0] * o_lat.shape[1] == 0:
        return
    job.B, job.T, job.H, job.V = 1, o_lat.shape[0], o_lat.shape[1], o_lat.shape[2]
    job.D, job.D_kv, job.first_value = q.shape[2], job.V, 0
    job.listed, job.apart, job.packing, job.bias = NULL, NULL, NULL, NULL
    job.softcap = 0
    job.V_tiles = round_up(job.V, COLUMNS)
    job.o_row = state_row(job.V_tiles)
    job.row = max(round_up(job.D, LINE), job.V_tiles)
    job.block_size = t_kv
    job.q, job.kv = <const unsigned char*>&q[0, 0, 0], <const unsigned char*>&c_kv[0, 0]
    job.table, job.seq_lens = &page, &t_kv
    job.pe, job.pe_stride = <const unsigned char*>&k_pe[0, 0], k_pe.strides[0]
    job.q_strides[0], job.q_strides[1], job.q_strides[2] = 0, q.strides[0], q.strides[1]
    job.kv_strides[0], job.kv_strides[1] = 0, c_kv.strides[0]
    job.table_strides[0], job.table_strides[1], job.seq_stride = 0, 0, 0
    job.row_bytes = job.D_kv * sizeof(real)
    job.q_dtype = job.kv_dtype = STORED_F64 if sizeof(real) == 8 else STORED_F32
    job.direct, job.causal = job.D % PAIR == 0 and job.D_kv % PAIR == 0, True
    job.scale, job.empty_lse = <real>softmax_scale, 0
    job.counters, job.out, job.lse = &counters[0], &o_lat[0, 0, 0], &lse[0, 0]
    with nogil:
        lacking = take_part(&job, &pools[0, 0], pools.shape[0], pools.shape[1])
    if lacking:
        raise MemoryError(f"{lacking} bytes of scratch for one thread")
