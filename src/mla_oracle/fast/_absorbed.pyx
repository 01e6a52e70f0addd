# SPDX-License-Identifier: Apache-2.0
# Absorbed form, blocked: the function of reference/_absorbed.pyx in three steps, each shared out by task.
#
#   absorb_query   q_lat[t, h]  = sum_p q_nope[t, h, p] w_uk[h, p]        a task is a head
#   attend         o_lat        = attention over the rows c_kv | k_pe      tasks as for paged decode
#   up_project     out[t, h, j] = w_uv[h, j] . o_lat[t, h]                a task is a head
#
# Arrays have any strides but the innermost, which is one number. Inputs are bytes of their stored dtypes
# (reference._common.Stored), each with its own, and are widened by tile where that is not `real`.
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mla_oracle.fast._plan cimport Job, round_up, state_row
from mla_oracle.fast._tasks cimport RELAXED, fetch_add, load, take_part
from mla_oracle.fast._tiles cimport (
    COLUMNS, KEYS, LANES, LINE, PAIR, VALUE_HEADS, Ahead, fetch_lines, real, splat, stored_real, values, vec,
)
from mla_oracle.fast._widen cimport is_real, numbers_at, size_of, widen
from mla_oracle.reference._common cimport STORED_F32, STORED_F64

cdef enum:
    DOTS = 8        # rows whose dot products run side by side
    STREAMS = 16    # rows of w_uk read side by side: few, so that each is read on without a stop


cdef Py_ssize_t find_ahead(
    const unsigned char[:, :, :] w,     # [H, P, L]
    Py_ssize_t h, Py_ssize_t row, Py_ssize_t next_h,
    const unsigned char** rows,         # OUT [STREAMS]: those of head h from `row` on, or the first of head next_h
) noexcept nogil:
    """Returns how many there are."""
    cdef Py_ssize_t n = 0, k
    if row >= w.shape[1]:
        h, row = next_h, 0
    if h < w.shape[0]:
        n = min(STREAMS, w.shape[1] - row)
    for k in range(n):
        rows[k] = &w[h, row + k, 0]
    return n


cdef void take_columns(
    const unsigned char** rows, int dtype,      # [n] -> [L]
    Py_ssize_t n, Py_ssize_t column, Py_ssize_t width,
    real (*room)[COLUMNS],          # OUT [n]: `width` numbers of each from `column` on; what follows only fills up `o`
) noexcept nogil:
    cdef const stored_real* row
    cdef Py_ssize_t k, i
    if is_real(dtype):
        for k in range(n):
            row = <const stored_real*>rows[k] + column
            for i in range(COLUMNS):
                room[k][i] = row[i] if i < width else 0
        return
    for k in range(n):
        widen(rows[k] + column * size_of(dtype), dtype, &room[k][0], width)


cdef void absorb_head(
    const unsigned char[:, :] q_nope, int q_dtype,      # [T, P]
    const unsigned char[:, :, :] w, int w_dtype,        # [H, P, L]
    Py_ssize_t h, Py_ssize_t next_h,
    real[:, :] q_lat,               # OUT [T, L]
    real* o,                        # scratch: [VALUE_HEADS, L rounded up to COLUMNS]
) noexcept nogil:
    cdef const stored_real* rows[STREAMS]
    cdef real p[STREAMS][VALUE_HEADS]
    cdef real room[STREAMS][COLUMNS]
    cdef real zeros[COLUMNS]
    cdef real part[STREAMS]
    cdef const stored_real* q
    cdef real one[VALUE_HEADS]
    cdef const unsigned char* starts[STREAMS]
    cdef const unsigned char* found[STREAMS]
    cdef bint in_place = is_real(w_dtype)
    cdef Py_ssize_t T = q_nope.shape[0], P = w.shape[1], L = q_lat.shape[1], o_stride = round_up(L, COLUMNS)
    cdef Py_ssize_t t = 0, first, n, k, i, column, size = size_of(w_dtype)
    cdef Ahead ahead
    ahead.rows, ahead.bytes = found, w.shape[2]
    memset(zeros, 0, sizeof(zeros))
    memset(room, 0, sizeof(room))
    for i in range(VALUE_HEADS):
        one[i] = 1
    while t < T:
        memset(o, 0, VALUE_HEADS * o_stride * sizeof(real))
        first = 0
        while first < P:
            n = min(STREAMS, P - first)
            ahead.n, ahead.row, ahead.at = find_ahead(w, h, first + STREAMS, next_h, found), 0, 0
            memset(p, 0, sizeof(p))
            for i in range(min(VALUE_HEADS, T - t)):
                q = numbers_at(&q_nope[t + i, first * size_of(q_dtype)], q_dtype, part, n)
                for k in range(n):
                    p[k][i] = q[k]
            for k in range(n):
                starts[k] = &w[h, first + k, 0]
            for k in range(n, STREAMS):
                rows[k] = zeros
            column = 0
            while column < L:
                if in_place and column + COLUMNS <= L:
                    for k in range(n):
                        rows[k] = <const stored_real*>starts[k] + column
                else:
                    take_columns(starts, w_dtype, n, column, min(COLUMNS, L - column), room)
                    for k in range(n):
                        rows[k] = <const stored_real*>&room[k][0]
                fetch_lines(&ahead, STREAMS * COLUMNS * size // 64)
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
    const unsigned char[:, :] w_uv, int w_dtype,        # [V, L]
    real[:, :] out,                 # OUT [T, V]
    real* room,                     # scratch: [DOTS, L]
) noexcept nogil:
    cdef const stored_real* rows[DOTS]
    cdef real y[DOTS]
    cdef Py_ssize_t V = w_uv.shape[0], L = o_lat.shape[1], j = 0, t, i
    while j < V:
        for i in range(DOTS):
            rows[i] = numbers_at(&w_uv[min(j + i, V - 1), 0], w_dtype, room + i * L, L)
        for t in range(o_lat.shape[0]):
            dots(rows, <const stored_real*>&o_lat[t, 0], L, y)
            for i in range(min(DOTS, V - j)):
                out[t, j + i] = y[i]
        j += DOTS


def absorb_query(
    const unsigned char[:, :, :] q_nope, int q_dtype,   # [T, H, P]
    const unsigned char[:, :, :] w_uk, int w_dtype,     # [H, P, L]
    real[:, :, :] q_lat,            # [T, H, L]
    int64_t[::1] counter,           # [1], 0 at first, shared by all threads
):
    """Fill `q_lat`: q_nope seen from the latent space. Each thread calls this with the same arguments."""
    cdef Py_ssize_t h, size = VALUE_HEADS * round_up(q_lat.shape[2], COLUMNS) * sizeof(real)
    cdef real* o = <real*>malloc(size)
    if o == NULL:
        raise MemoryError(f"{size} bytes of scratch for one thread")
    with nogil:
        h = fetch_add(&counter[0], 1, RELAXED)
        while h < w_uk.shape[0]:
            absorb_head(q_nope[:, h], q_dtype, w_uk, w_dtype, h, load(&counter[0], RELAXED), q_lat[:, h], o)
            h = fetch_add(&counter[0], 1, RELAXED)
        free(o)


def up_project(
    const real[:, :, :] o_lat,      # [T, H, L]
    const unsigned char[:, :, :] w_uv, int w_dtype,     # [H, V, L]
    real[:, :, :] out,              # [T, H, V]
    int64_t[::1] counter,           # [1], 0 at first, shared by all threads
):
    """Fill `out`: each head's latent output, decompressed. Each thread calls it with the same arguments."""
    cdef Py_ssize_t h, size = DOTS * o_lat.shape[2] * sizeof(real)
    cdef real* room = <real*>malloc(size)
    if room == NULL:
        raise MemoryError(f"{size} bytes of scratch for one thread")
    with nogil:
        h = fetch_add(&counter[0], 1, RELAXED)
        while h < w_uv.shape[0]:
            project_head(o_lat[:, h], w_uv[h], w_dtype, out[:, h], room)
            h = fetch_add(&counter[0], 1, RELAXED)
        free(room)


def attend(
    const real[:, :, ::1] q,        # [T, H, L + R]
    const unsigned char[:, :] c_kv, int kv_dtype,       # [t_kv, L]
    const unsigned char[:, :] k_pe, int pe_dtype,       # [t_kv, R]
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
    job.q, job.kv = <const unsigned char*>&q[0, 0, 0], &c_kv[0, 0]
    job.table, job.seq_lens = &page, &t_kv
    job.pe, job.pe_stride, job.pe_dtype = &k_pe[0, 0], k_pe.strides[0], pe_dtype
    job.q_strides[0], job.q_strides[1], job.q_strides[2] = 0, q.strides[0], q.strides[1]
    job.kv_strides[0], job.kv_strides[1] = 0, c_kv.strides[0]
    job.table_strides[0], job.table_strides[1], job.seq_stride = 0, 0, 0
    job.row_bytes = c_kv.shape[1]
    job.q_dtype, job.kv_dtype = STORED_F64 if sizeof(real) == 8 else STORED_F32, kv_dtype
    job.direct = is_real(kv_dtype) and is_real(pe_dtype) and job.D % PAIR == 0 and job.D_kv % PAIR == 0
    job.causal = True
    job.scale, job.empty_lse = <real>softmax_scale, 0
    job.counters, job.out, job.lse = &counters[0], &o_lat[0, 0, 0], &lse[0, 0]
    with nogil:
        lacking = take_part(&job, &pools[0, 0], pools.shape[0], pools.shape[1])
    if lacking:
        raise MemoryError(f"{lacking} bytes of scratch for one thread")
