# SPDX-License-Identifier: Apache-2.0
# Paged decode, blocked: the function of reference/_paged.pyx, computed a tile at a time.
#
#   a. A group is up to GROUP query rows (query tokens x heads) of one request; each cached row is read once
#      for all of them. Its keys are cut into chunks, by length and group size alone; a task is one chunk.
#   b. A task walks tiles of TILE keys. For each block of query rows: scores, softmax, values (_tiles.pxd).
#      Query rows lie in the lanes, so the softmax never looks across lanes.
#   c. Whoever finishes a group's last chunk merges all of them in ascending order. Neither the order of the
#      sums nor the cuts depend on threads, batch or page numbers: the bits never do.
#   d. A key is the whole row, so a value that is not finite has no finite score. A row that sees it either
#      becomes NaN through its weights, or has weight 0 there and must not touch it: it is left out for all.
from libc.math cimport INFINITY, NAN, exp, isfinite, isnan, log
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from mla_oracle.fast._tiles cimport (
    COLUMNS, LANES, LINE, NARROW_TOKENS, PANEL, TILE, VALUE_HEADS, WIDE, WIDE_TOKENS,
    exp_of, narrow_scores, real, splat, stored_real, values, vec, where_greater, wide_scores,
)
from mla_oracle.fast._widen cimport widen
from mla_oracle.reference._common cimport STORED_F32, STORED_F64

cdef extern from * nogil:
    int64_t fetch_add "__atomic_fetch_add"(int64_t* address, int64_t by, int order)
    int64_t load "__atomic_load_n"(int64_t* address, int order)
    int ACQ_REL "__ATOMIC_ACQ_REL", ACQUIRE "__ATOMIC_ACQUIRE", RELAXED "__ATOMIC_RELAXED"

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t alignment, size_t size)
    void free(void* memory)

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    GROUP = 128             # query rows that share one pass over the cache
    CHUNK = 1024            # keys of a chunk, more where there would be too many
    PARTIAL_ROWS = 2048     # query rows x chunks of one group, at most
    MERGED = 1 << 30        # added to a group's counter once its output is written


cdef struct Job:
    const unsigned char* q
    const unsigned char* kv
    const int32_t* table
    const int32_t* seq_lens
    Py_ssize_t q_strides[3]         # bytes, as all strides here
    Py_ssize_t kv_strides[2]
    Py_ssize_t table_strides[2]
    Py_ssize_t seq_stride
    Py_ssize_t B, T, H, D, V
    Py_ssize_t V_tiles              # V rounded up to whole value tiles
    Py_ssize_t row                  # numbers of a packed row: at least D and V_tiles
    Py_ssize_t block_size
    int q_dtype, kv_dtype
    Py_ssize_t kv_itemsize
    bint causal
    bint direct                     # cached rows are read in place
    real scale
    real empty_lse
    real* out                       # [B, T x H, V]
    real* lse                       # [B, T x H]


cdef struct Group:
    Py_ssize_t b, row0, rows
    Py_ssize_t lanes                # rows rounded up to whole registers
    Py_ssize_t keys                 # that its last row sees
    Py_ssize_t chunk, chunks


cdef struct Work:
    # What one thread needs; each starts on a cache line.
    real* q                         # per block of rows: [D, width]
    real* q_rows                    # [LANES, D]
    real* s                         # [TILE, WIDE]
    real* rescale                   # [WIDE]
    real* packed                    # [TILE, row]
    real* tail                      # [TILE, COLUMNS]
    real* zeros                     # [row]
    real* state                     # m [lanes], l [lanes], o [lanes, V_tiles]


cdef inline Py_ssize_t round_up(Py_ssize_t n, Py_ssize_t step) noexcept nogil:
    return (n + step - 1) // step * step


cdef inline Py_ssize_t width_at(Py_ssize_t lane, Py_ssize_t lanes) noexcept nogil:
    return WIDE if lanes - lane >= WIDE else LANES


cdef inline Py_ssize_t visible(const Job* job, Py_ssize_t b, Py_ssize_t row) noexcept nogil:
    cdef Py_ssize_t n = (<const int32_t*>(<const char*>job.seq_lens + b * job.seq_stride))[0]
    return max(0, n - job.T + row // job.H + 1) if job.causal else n


cdef inline Py_ssize_t groups_per_request(const Job* job) noexcept nogil:
    return (job.T * job.H + GROUP - 1) // GROUP


cdef Group group_at(const Job* job, Py_ssize_t index) noexcept nogil:
    cdef Group g
    cdef Py_ssize_t n = groups_per_request(job), total = job.T * job.H
    cdef Py_ssize_t most = round_up((total + n - 1) // n, LANES)
    g.b = index // n
    g.row0 = index % n * most
    g.rows = max(0, min(most, total - g.row0))
    g.lanes = round_up(g.rows, LANES)
    g.keys = visible(job, g.b, g.row0 + g.rows - 1) if g.rows else 0
    n = max(1, min((g.keys + CHUNK - 1) // CHUNK, PARTIAL_ROWS // max(g.lanes, 1)))
    g.chunk = round_up((g.keys + n - 1) // n, TILE)
    g.chunks = max(1, (g.keys + g.chunk - 1) // g.chunk) if g.keys else 1
    return g


cdef inline Py_ssize_t state_size(const Job* job, Py_ssize_t lanes) noexcept nogil:
    return round_up(lanes * (2 + job.V_tiles), LINE)


cdef void load_queries(const Job* job, Work* w, const Group* g) noexcept nogil:
    cdef Py_ssize_t lane = 0, width, j, i, r, d, d0
    cdef real* q = w.q
    while lane < g.lanes:
        width = width_at(lane, g.lanes)
        for j in range(width // LANES):
            for i in range(LANES):
                r = g.row0 + lane + j * LANES + i
                if r < g.row0 + g.rows:
                    widen(job.q + g.b * job.q_strides[0] + r // job.H * job.q_strides[1]
                          + r % job.H * job.q_strides[2], job.q_dtype, w.q_rows + i * job.D, job.D)
                else:
                    memset(w.q_rows + i * job.D, 0, job.D * sizeof(real))
            d0 = 0
            while d0 < job.D:
                for i in range(LANES):
                    for d in range(d0, min(d0 + LINE, job.D)):
                        q[d * width + j * LANES + i] = w.q_rows[i * job.D + d]
                d0 += LINE
        q += job.D * width
        lane += width


cdef void find_rows(
    const Job* job, Py_ssize_t b, Py_ssize_t key, Py_ssize_t n,
    const unsigned char** rows,     # OUT [TILE]; past n it repeats the last one
) noexcept nogil:
    cdef const char* table = <const char*>job.table + b * job.table_strides[0]
    cdef Py_ssize_t page = key // job.block_size, slot = key % job.block_size, k
    cdef const unsigned char* at = NULL
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


cdef void mask(
    real* s,                        # [n, width]
    Py_ssize_t n, Py_ssize_t width, Py_ssize_t key,
    const Py_ssize_t* sees,         # [width]
) noexcept nogil:
    cdef Py_ssize_t k, i
    for k in range(n):
        for i in range(width):
            if key + k >= sees[i]:
                s[k * width + i] = -INFINITY


cdef bint softmax(
    real* s,                        # [n, width], scores in, weights out
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
        top = (<vec*>m)[j]
        odd = splat(0)
        for k in range(n):
            column = <vec*>(s + k * width + j * LANES)
            x = column[0]
            top = where_greater(x, top, x, top)
            odd = odd + x * splat(0)
        base = where_greater(top, splat(-INFINITY), top, splat(0))
        fix = exp_of((<vec*>m)[j] - base)
        total = splat(0)
        for k in range(n):
            column = <vec*>(s + k * width + j * LANES)
            x = exp_of(column[0] - base)
            column[0] = x
            total = total + x
        (<vec*>l)[j] = (<vec*>l)[j] * fix + total
        (<vec*>m)[j] = top
        (<vec*>rescale)[j] = fix
        for i in range(LANES):
            any_odd |= (<real*>&odd)[i] != 0
    return any_odd


cdef void leave_out(
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


cdef void add_values(
    const Job* job, Work* w,
    const stored_real** rows,       # [n]
    Py_ssize_t n, Py_ssize_t width, Py_ssize_t used,
    real* o,                        # [width, V_tiles]
) noexcept nogil:
    cdef const stored_real* tail[TILE]
    cdef Py_ssize_t column = 0, head, k, d, readable = job.D if job.direct else job.row
    while column < job.V:
        if column + COLUMNS > readable:
            for k in range(n):
                tail[k] = <const stored_real*>(w.tail + k * COLUMNS)
                for d in range(COLUMNS):
                    w.tail[k * COLUMNS + d] = rows[k][column + d] if column + d < job.V else 0
        head = 0
        while head < used:
            if column + COLUMNS > readable:
                values(tail, n, 0, w.s + head, width, w.rescale + head,
                       o + head * job.V_tiles + column, job.V_tiles)
            else:
                values(rows, n, column, w.s + head, width, w.rescale + head,
                       o + head * job.V_tiles + column, job.V_tiles)
            head += VALUE_HEADS
        column += COLUMNS


cdef void attend(
    const Job* job, Work* w, const Group* g, Py_ssize_t key, Py_ssize_t stop,
    real* m,                        # OUT the state: m [lanes], l [lanes], o [lanes, V_tiles]
) noexcept nogil:
    cdef real* l = m + g.lanes
    cdef real* o = m + 2 * g.lanes
    cdef real* q
    cdef const unsigned char* found[2][TILE]
    cdef const stored_real* rows[TILE]
    cdef const stored_real* live[TILE]      # rows whose values count
    cdef Py_ssize_t sees[GROUP]
    cdef Py_ssize_t least = g.keys, lane, width, n, k, step
    cdef Py_ssize_t d, stop_d
    cdef real scale
    cdef int now = 0
    for lane in range(g.lanes):
        m[lane] = -INFINITY
        sees[lane] = visible(job, g.b, g.row0 + lane) if lane < g.rows else g.keys
        least = min(least, sees[lane])
    memset(l, 0, (state_size(job, g.lanes) - g.lanes) * sizeof(real))

    if key < stop:
        find_rows(job, g.b, key, min(TILE, stop - key), found[0])
    while key < stop:
        n = min(TILE, stop - key)
        step = 0
        if key + n < stop:
            find_rows(job, g.b, key + n, min(TILE, stop - key - n), found[1 - now])
            step = job.kv_itemsize
        for k in range(n):
            rows[k] = <const stored_real*>found[now][k]
            if not job.direct:
                widen(found[now][k], job.kv_dtype, w.packed + k * job.row, job.D)
                rows[k] = <const stored_real*>(w.packed + k * job.row)
            live[k] = rows[k]
        for k in range(n, TILE):
            rows[k] = <const stored_real*>w.zeros

        q = w.q
        lane = 0
        while lane < g.lanes:
            width = width_at(lane, g.lanes)
            d = 0
            while d < job.D:
                stop_d = min(d + PANEL // width, job.D)
                scale = job.scale if stop_d == job.D else 1
                k = 0
                while k < n:
                    if width == WIDE:
                        wide_scores(rows + k, found[1 - now] + k, step, q, d, stop_d, scale, w.s + k * WIDE)
                        k += WIDE_TOKENS
                    else:
                        narrow_scores(rows + k, found[1 - now] + k, step, q, d, stop_d, scale, w.s + k * LANES)
                        k += NARROW_TOKENS
                d = stop_d
            step = 0
            if key + n > least:
                mask(w.s, n, width, key, sees + lane)
            if softmax(w.s, n, width, m + lane, l + lane, w.rescale):
                leave_out(job, w, live, n)
            add_values(job, w, live, n, width, min(width, g.rows - lane), o + lane * job.V_tiles)
            q += job.D * width
            lane += width
        key += n
        now = 1 - now


cdef void finish(
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
            o = states + i * size + 2 * g.lanes + r * job.V_tiles
            for d in range(job.V):
                out[d] = (out[d] if i else 0) + weight[i] * o[d]


cdef void work_off(
    const Job* job, Work* w,
    int64_t* counters,              # [1 + groups]: the next task; per group, chunks done
    real* pools, Py_ssize_t n_pools, Py_ssize_t pool_size,
) noexcept nogil:
    cdef Py_ssize_t groups = job.B * groups_per_request(job)
    cdef Py_ssize_t index = 0, first = 0, loaded = -1, task, key
    cdef real* states
    cdef Group g
    if groups == 0:
        return
    g = group_at(job, 0)
    while True:
        task = fetch_add(counters, 1, RELAXED)
        while task >= first + g.chunks:
            first += g.chunks
            index += 1
            if index == groups:
                return
            g = group_at(job, index)
        if loaded != index:
            load_queries(job, w, &g)
            loaded = index
        if g.chunks == 1:
            attend(job, w, &g, 0, g.keys, w.state)
            finish(job, &g, w.state)
        else:
            while index >= n_pools and load(counters + 1 + index - n_pools, ACQUIRE) < MERGED:
                sched_yield()
            states = pools + index % n_pools * pool_size
            key = (task - first) * g.chunk
            attend(job, w, &g, key, min(key + g.chunk, g.keys), states + (task - first) * state_size(job, g.lanes))
            if fetch_add(counters + 1 + index, 1, ACQ_REL) < g.chunks - 1:
                continue
            finish(job, &g, states)
        fetch_add(counters + 1 + index, MERGED, ACQ_REL)


cdef real* carve(char** memory, Py_ssize_t numbers) noexcept nogil:
    cdef real* at = <real*>memory[0]
    memory[0] += round_up(numbers * sizeof(real), 64)
    return at


cdef char* lay_out(const Job* job, Work* w, char* memory) noexcept nogil:
    # Returns the end of what it carved; from NULL, that is the size.
    cdef Py_ssize_t lanes = round_up(min(GROUP, job.T * job.H), LANES)
    w.q = carve(&memory, lanes * job.D)
    w.q_rows = carve(&memory, LANES * job.D)
    w.s = carve(&memory, TILE * WIDE)
    w.rescale = carve(&memory, WIDE)
    w.packed = carve(&memory, 0 if job.direct else TILE * job.row)
    w.tail = carve(&memory, TILE * COLUMNS)
    w.zeros = carve(&memory, job.row)
    w.state = carve(&memory, state_size(job, lanes))
    return memory


def plan(Py_ssize_t T, Py_ssize_t H, Py_ssize_t V, bint causal, const int32_t[:] seq_lens):
    """(tasks, groups, numbers in one pool of partial states), for `decode`."""
    cdef Job job
    cdef Group g
    cdef Py_ssize_t tasks = 0, index, pool = 0
    job.B, job.T, job.H, job.causal, job.V_tiles = seq_lens.shape[0], T, H, causal, round_up(V, COLUMNS)
    job.seq_lens = &seq_lens[0]
    job.seq_stride = seq_lens.strides[0]
    for index in range(job.B * groups_per_request(&job)):
        g = group_at(&job, index)
        tasks += g.chunks
        if g.chunks > 1:
            pool = max(pool, g.chunks * state_size(&job, g.lanes))
    return tasks, job.B * groups_per_request(&job), pool


def decode(
    const unsigned char[:, :, :, :] q,      # [B, T, H, D] as bytes
    int q_dtype,
    const unsigned char[:, :, :] kv_cache,  # [num_blocks, block_size, D] as bytes
    int kv_dtype,
    const int32_t[:, :] block_table,        # [B, max_blocks]
    const int32_t[:] seq_lens,              # [B]
    double softmax_scale,
    bint causal,
    double empty_lse,
    real[:, :, :, ::1] out,                 # [B, T, H, V]
    real[:, :, ::1] lse,                    # [B, T, H], natural log
    int64_t[::1] counters,                  # [1 + groups], zeros at first, shared by all threads
    real[:, ::1] pools,                     # [n, pool], n more than the threads, shared
):
    """Work off tasks until none is left. Each thread of one decode calls this with the same arguments."""
    cdef Job job
    cdef Work w
    cdef char* memory
    cdef int i
    job.B, job.T, job.H, job.V = out.shape[0], out.shape[1], out.shape[2], out.shape[3]
    if job.B * job.T * job.H == 0:
        return
    job.kv_itemsize = 4 if kv_dtype == STORED_F32 else 8 if kv_dtype == STORED_F64 else 2
    job.D = kv_cache.shape[2] // job.kv_itemsize
    job.V_tiles = round_up(job.V, COLUMNS)
    job.row = max(round_up(job.D, LINE), job.V_tiles)
    job.block_size = kv_cache.shape[1]
    job.q, job.kv, job.table, job.seq_lens = &q[0, 0, 0, 0], &kv_cache[0, 0, 0], &block_table[0, 0], &seq_lens[0]
    for i in range(3):
        job.q_strides[i] = q.strides[i]
    for i in range(2):
        job.kv_strides[i] = kv_cache.strides[i]
        job.table_strides[i] = block_table.strides[i]
    job.seq_stride = seq_lens.strides[0]
    job.q_dtype, job.kv_dtype = q_dtype, kv_dtype
    job.direct = kv_dtype == (STORED_F64 if sizeof(real) == 8 else STORED_F32)
    job.causal, job.scale, job.empty_lse = causal, <real>softmax_scale, <real>empty_lse
    job.out, job.lse = &out[0, 0, 0, 0], &lse[0, 0, 0]

    cdef Py_ssize_t size = <Py_ssize_t>lay_out(&job, &w, NULL)
    memory = <char*>aligned_alloc(64, size)
    if memory == NULL:
        raise MemoryError(f"{size} bytes of scratch for one thread")
    with nogil:
        lay_out(&job, &w, memory)
        memset(w.zeros, 0, job.row * sizeof(real))
        memset(w.packed, 0, 0 if job.direct else TILE * job.row * sizeof(real))
        work_off(&job, &w, &counters[0], &pools[0, 0], pools.shape[0], pools.shape[1])
        free(memory)


def exp_lanes(real[::1] x):
    """In place e^x, for the tests of its error; a multiple of LANES numbers, each at most 88 (float), 709 (double)."""
    cdef Py_ssize_t i
    for i in range(x.shape[0] // LANES):
        (<vec*>&x[0])[i] = exp_of((<vec*>&x[0])[i])


def multiply_add(Py_ssize_t steps, real[::1] x):
    """`steps` x 12 multiply-adds of whole registers and nothing else, for benchmarks: the peak. Returns flops.

    x: [12 x LANES], in and out.
    """
    cdef vec acc[12]
    cdef vec factor = splat(0.5), more = splat(1)
    cdef Py_ssize_t k
    cdef int i
    with nogil:
        for i in range(12):
            acc[i] = (<vec*>&x[0])[i]
        for k in range(steps):
            for i in range(12):
                acc[i] = acc[i] * factor + more
        for i in range(12):
            (<vec*>&x[0])[i] = acc[i]
    return LANES * 24 * steps
