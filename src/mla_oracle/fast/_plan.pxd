# SPDX-License-Identifier: Apache-2.0
# How a decode is cut up, and what its threads share and own.
#
#   A group is up to GROUP query rows (query tokens x heads) of one request: one pass over its keys for all.
#   A chunk is a run of a group's keys; a task is one chunk of one group. The cuts follow from lengths and
#   group size alone, never from the threads.
from libc.stdint cimport int32_t, int64_t

from mla_oracle.fast._tiles cimport COLUMNS, LANES, LINE, PAIR, TILE, WIDE, real
from mla_oracle.fast._unpack cimport Packing

cdef enum:
    GROUP = 128             # query rows that share one pass over the cache
    CHUNK = 1024            # keys of a chunk, more where there would be too many
    PARTIAL_ROWS = 2048     # query rows x chunks of one group, at most
    MERGED = 1 << 30        # added to a group's counter once its output is written


cdef struct Job:
    const unsigned char* q
    const unsigned char* kv
    const unsigned char* pe         # where the rest of each row lies if not in kv, by key; or NULL
    const int32_t* table
    const int32_t* seq_lens
    Py_ssize_t q_strides[3]         # bytes, as all strides here
    Py_ssize_t kv_strides[2]
    Py_ssize_t pe_stride
    int pe_dtype
    const int64_t* listed           # [B, listed_stride]: where each key's row lies, instead of kv and table; or NULL
    const int64_t* apart            # the same, of what a packed row has elsewhere; or NULL
    Py_ssize_t listed_stride        # numbers
    const real* bias                # [B, listed_stride, bias_lanes]: added to the score of each listed key; or NULL
    Py_ssize_t bias_lanes           # 1, for all of a request's rows; or one of each, in whole registers
    const Packing* packing          # of a listed row that is not dense numbers; or NULL
    Py_ssize_t table_strides[2]
    Py_ssize_t seq_stride
    Py_ssize_t B, T, H, D, V
    Py_ssize_t D_kv                 # numbers of a row that lie in kv: D, but for pe
    Py_ssize_t first_value          # of a row: value = V numbers from here on
    Py_ssize_t row_bytes            # stored, at `kv` or `listed`
    Py_ssize_t V_tiles              # V rounded up to whole value tiles
    Py_ssize_t o_row                # numbers from row to row of a state's o: an odd number of lines (see state_row)
    Py_ssize_t row                  # numbers of a packed row: at least D and V_tiles
    Py_ssize_t block_size
    int q_dtype, kv_dtype
    bint causal
    bint direct                     # cached rows are read in place: numbers of this type, in whole pairs
    real scale
    real softcap                    # 0: none
    real empty_lse
    int64_t* counters               # [1 + groups]: the next task; per group, chunks done
    real* out                       # [B, T x H, V]
    real* lse                       # [B, T x H]


cdef struct Group:
    Py_ssize_t b, row0, rows
    Py_ssize_t lanes                # rows rounded up to whole registers
    Py_ssize_t keys                 # that its last row sees
    Py_ssize_t chunk, chunks
    Py_ssize_t index                # of this group
    Py_ssize_t first_task           # its chunks are tasks first_task, first_task + 1, ...


cdef struct Work:
    # What one thread needs; each starts on a cache line.
    real* q                         # per block of rows: [D, width], or by pairs (see _tiles.pxd); D even
    real* q_rows                    # [LANES, D], D even
    real* s                         # [WIDE_VECS] of [TILE, LANES]
    real* rescale                   # [WIDE]
    real* packed                    # [TILE, row]
    real* tail                      # [TILE, COLUMNS]
    real* zeros                     # [row]
    real* state                     # m [lanes], l [lanes], o [lanes, o_row]
    # With tiles alone (_amx_rows.pxd, which also says what q, s, packed and tail are there):
    real* p                         # weights as bf16
    real* picks
    int terms                       # of the query


cdef inline Py_ssize_t round_up(Py_ssize_t n, Py_ssize_t step) noexcept nogil:
    return (n + step - 1) // step * step


cdef inline Py_ssize_t width_at(Py_ssize_t lane, Py_ssize_t lanes) noexcept nogil:
    return WIDE if lanes - lane >= WIDE else LANES


cdef inline Py_ssize_t visible(const Job* job, Py_ssize_t b, Py_ssize_t row) noexcept nogil:
    cdef Py_ssize_t n = (<const int32_t*>(<const char*>job.seq_lens + b * job.seq_stride))[0]
    return max(0, n - job.T + row // job.H + 1) if job.causal else n


cdef inline Py_ssize_t groups_per_request(const Job* job) noexcept nogil:
    return (job.T * job.H + GROUP - 1) // GROUP


cdef inline Group group_at(const Job* job, Py_ssize_t index, Py_ssize_t first_task) noexcept nogil:
    cdef Group g
    cdef Py_ssize_t n = groups_per_request(job), total = job.T * job.H
    cdef Py_ssize_t most = round_up((total + n - 1) // n, LANES)
    g.index, g.first_task = index, first_task
    g.b = index // n
    g.row0 = index % n * most
    g.rows = max(0, min(most, total - g.row0))
    g.lanes = round_up(g.rows, LANES)
    g.keys = visible(job, g.b, g.row0 + g.rows - 1) if g.rows else 0
    n = max(1, min((g.keys + CHUNK - 1) // CHUNK, PARTIAL_ROWS // max(g.lanes, 1)))
    g.chunk = round_up((g.keys + n - 1) // n, LINE)
    g.chunks = max(1, (g.keys + g.chunk - 1) // g.chunk) if g.keys else 1
    return g


cdef inline bint advance(const Job* job, Group* g, Py_ssize_t task) noexcept nogil:
    """Move `g` on to the group of `task`, which is not before it. False: there is no such task."""
    while task >= g.first_task + g.chunks:
        if g.index + 1 == job.B * groups_per_request(job):
            return False
        g[0] = group_at(job, g.index + 1, g.first_task + g.chunks)
    return True


cdef inline Py_ssize_t state_row(Py_ssize_t V_tiles) noexcept nogil:
    # At an even distance of lines, 2 KB above all, the same columns of all rows fall into a few sets of the cache.
    return (round_up(V_tiles, LINE) // LINE | 1) * LINE


cdef inline Py_ssize_t state_size(const Job* job, Py_ssize_t lanes) noexcept nogil:
    return round_up(lanes * (2 + job.o_row), LINE)


cdef inline real* carve(char** memory, Py_ssize_t numbers) noexcept nogil:
    cdef real* at = <real*>memory[0]
    memory[0] += round_up(numbers * sizeof(real), 64)
    return at


cdef inline char* lay_out(const Job* job, Work* w, char* memory) noexcept nogil:
    # Returns the end of what it carved; from NULL, that is the size.
    cdef Py_ssize_t lanes = round_up(min(GROUP, job.T * job.H), LANES)
    w.q = carve(&memory, lanes * round_up(job.D, PAIR))
    w.q_rows = carve(&memory, LANES * round_up(job.D, PAIR))
    w.s = carve(&memory, TILE * WIDE)
    w.rescale = carve(&memory, WIDE)
    w.packed = carve(&memory, 0 if job.direct else TILE * job.row)
    w.tail = carve(&memory, TILE * COLUMNS)
    w.zeros = carve(&memory, job.row)
    w.state = carve(&memory, state_size(job, lanes))
    return memory
