# SPDX-License-Identifier: Apache-2.0
# Paged decode, blocked: the function of reference/_paged.pyx, computed a tile at a time.
#
# The arithmetic is in _tiles.pxd (registers) and _blocks.pxd (tiles), the cutting in _plan.pxd, the threads'
# shares in _tasks.pxd; this file turns arrays into a Job.
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint32_t

from mla_oracle.fast._amx_tiles cimport HAS_TILES
from mla_oracle.fast._blocks cimport read_row
from mla_oracle.fast._lookup cimport make_tables
from mla_oracle.fast._plan cimport Group, Job, group_at, groups_per_request, round_up, state_row, state_size
from mla_oracle.fast._tasks cimport take_part
from mla_oracle.fast._tiles cimport COLUMNS, LANES, LINE, PAIR, exp_of, real, splat, stored_half, tanh_of, vec
from mla_oracle.fast._unpack cimport Packing, ScaleRule
from mla_oracle.reference._common cimport STORED_F32, STORED_F64, from_bits


def plan(Py_ssize_t T, Py_ssize_t H, Py_ssize_t V, bint causal, const int32_t[:] seq_lens):
    """(tasks, groups, numbers in one pool of partial states), for `decode`."""
    cdef Job job
    cdef Group g
    cdef Py_ssize_t tasks = 0, index, pool = 0
    job.B, job.T, job.H, job.causal, job.o_row = seq_lens.shape[0], T, H, causal, state_row(round_up(V, COLUMNS))
    job.seq_lens = &seq_lens[0]
    job.seq_stride = seq_lens.strides[0]
    for index in range(job.B * groups_per_request(&job)):
        g = group_at(&job, index, 0)
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
    cdef int i
    if out.shape[0] * out.shape[1] * out.shape[2] == 0:
        return
    job.listed, job.apart, job.packing, job.bias = NULL, NULL, NULL, NULL
    job.softcap = 0
    job.first_value, job.row_bytes = 0, kv_cache.shape[2]
    job.D = job.D_kv = kv_cache.shape[2] // (4 if kv_dtype == STORED_F32 else 8 if kv_dtype == STORED_F64 else 2)
    job.block_size = kv_cache.shape[1]
    job.kv = &kv_cache[0, 0, 0]
    job.table = &block_table[0, 0]
    for i in range(2):
        job.kv_strides[i] = kv_cache.strides[i]
        job.table_strides[i] = block_table.strides[i]
    job.causal = causal
    run(&job, q, q_dtype, kv_dtype, seq_lens, softmax_scale, empty_lse, out, lse, counters, pools)


def decode_listed(
    const unsigned char[:, :, :, :] q,      # [N, 1, H, D] as bytes
    int q_dtype,
    const int64_t[:, ::1] listed,           # [N, K] addresses of the rows of each query's keys
    const int64_t[:, ::1] apart,            # [N, K] of the rest of each row; or [0, 0]
    int kv_dtype,
    Py_ssize_t row_bytes,                   # at each address of `listed`
    packing,                                # fast.packing.Packing, or None: dense numbers of kv_dtype
    Py_ssize_t first_value,
    const int32_t[:] counts,                # [N] keys
    double softmax_scale,
    double softcap,                         # 0 for none
    const real[:, :, ::1] bias,             # [N, K, 1, or H in whole registers], -inf skips the key; or [0, 0, 0]
    real[:, :, :, ::1] out,                 # [N, 1, H, V]
    real[:, :, ::1] lse,                    # [N, 1, H], natural log, -inf where a query has no key
    int64_t[::1] counters,
    real[:, ::1] pools,
):
    """As decode, of a list of rows for each query."""
    cdef Job job
    cdef Packing packed
    if out.shape[0] * out.shape[2] * listed.shape[1] == 0:
        return
    job.listed, job.listed_stride = &listed[0, 0], listed.shape[1]
    job.apart = &apart[0, 0] if apart.shape[0] else NULL
    job.softcap = <real>softcap
    job.bias, job.bias_lanes = &bias[0, 0, 0] if bias.shape[0] else NULL, bias.shape[2]
    job.packing = NULL
    job.first_value, job.row_bytes = first_value, row_bytes
    job.D = job.D_kv = q.shape[3] // (4 if q_dtype == STORED_F32 else 8 if q_dtype == STORED_F64 else 2)
    if packing is not None:
        fill(&packed, packing)
        make_tables(&packed, job.D)
        job.packing = &packed
    elif job.apart != NULL:
        job.D_kv = row_bytes // (4 if kv_dtype == STORED_F32 else 8 if kv_dtype == STORED_F64 else 2)
    job.block_size, job.kv, job.table, job.causal = 1, NULL, NULL, False
    run(&job, q, q_dtype, kv_dtype, counts, softmax_scale, -INFINITY, out, lse, counters, pools)


cdef run(
    Job* job,
    const unsigned char[:, :, :, :] q, int q_dtype, int kv_dtype,
    const int32_t[:] seq_lens,
    double softmax_scale, double empty_lse,
    real[:, :, :, ::1] out, real[:, :, ::1] lse,
    int64_t[::1] counters, real[:, ::1] pools,
):
    """What both have in common, and the work."""
    cdef Py_ssize_t lacking
    cdef int i
    job.B, job.T, job.H, job.V = out.shape[0], out.shape[1], out.shape[2], out.shape[3]
    job.V_tiles = round_up(job.V, COLUMNS)
    job.o_row = state_row(job.V_tiles)
    job.row = max(round_up(job.D, LINE), job.first_value + job.V_tiles)
    job.pe = NULL
    job.q, job.seq_lens = &q[0, 0, 0, 0], &seq_lens[0]
    for i in range(3):
        job.q_strides[i] = q.strides[i]
    job.seq_stride = seq_lens.strides[0]
    job.q_dtype, job.kv_dtype = q_dtype, kv_dtype
    job.direct = kv_dtype == (STORED_F64 if sizeof(real) == 8 else STORED_F32) and job.D % PAIR == 0
    job.direct = job.direct and job.packing == NULL and job.apart == NULL
    job.scale, job.empty_lse = <real>softmax_scale, <real>empty_lse
    job.counters, job.out, job.lse = &counters[0], &out[0, 0, 0, 0], &lse[0, 0, 0]
    with nogil:
        lacking = take_part(job, &pools[0, 0], pools.shape[0], pools.shape[1])
    if lacking:
        raise MemoryError(f"{lacking} bytes of scratch for one thread")


cdef fill(Packing* p, packing):
    cdef const float[:, ::1] numbers = packing.numbers
    cdef const float[::1] scales = packing.scales, rest_numbers = packing.rest_numbers
    cdef const int32_t[::1] scale_at = packing.scale_at
    p.numbers, p.per_byte, p.scales, p.scale_at = &numbers[0, 0], numbers.shape[1], &scales[0], &scale_at[0]
    p.group, p.groups, p.first, p.step = packing.group, packing.groups, packing.first, packing.step
    p.scale_bytes, p.rule, p.scales_apart = packing.scale_bytes, <ScaleRule><int>packing.rule, packing.scales_apart
    p.factor, p.to_bf16 = packing.factor, packing.to_bf16
    p.rest, p.rest_apart = packing.rest, packing.rest_apart
    p.rest_dtype, p.rest_numbers, p.rest_factor = packing.rest_dtype, &rest_numbers[0], packing.rest_factor


def numbers_of_rows(packing, const int64_t[::1] rows, const int64_t[::1] apart, real[:, ::1] numbers):
    """Fill `numbers` [n, D] from packed rows, to test their bits: addresses [n], and [n] of their rests, or [0]."""
    cdef Job job
    cdef Packing packed
    cdef const stored_half* halves
    cdef Py_ssize_t k, d
    job.D, job.pe, job.listed_stride, job.packing = numbers.shape[1], NULL, 0, &packed
    job.apart = &apart[0] if apart.shape[0] else NULL
    fill(&packed, packing)
    make_tables(&packed, job.D)
    for k in range(rows.shape[0]):
        read_row(&job, 0, k, <const unsigned char*>rows[k], &numbers[k, 0])
        if HAS_TILES and packed.looked_up:
            halves = <const stored_half*>&numbers[k, 0]
            for d in range(job.D - 1, -1, -1):
                numbers[k, d] = from_bits(<uint32_t>halves[d] << 16)


def exp_lanes(real[::1] x):
    """In place e^x, to test its error: whole registers of numbers, at most 88 (float), 709 (double)."""
    cdef Py_ssize_t i
    for i in range(x.shape[0] // LANES):
        (<vec*>&x[0])[i] = exp_of((<vec*>&x[0])[i])


def tanh_lanes(real[::1] x):
    """In place tanh x, to test its error: whole registers of numbers."""
    cdef Py_ssize_t i
    for i in range(x.shape[0] // LANES):
        (<vec*>&x[0])[i] = tanh_of((<vec*>&x[0])[i])


def multiply_add(Py_ssize_t steps, real[::1] x):
    """`steps` x 12 multiply-adds of whole registers, nothing else: the peak, for benchmarks. Returns flops.

    x: [12 x LANES], in and out.
    """
    cdef vec acc[12]
    cdef vec factor = splat(0.5), more = splat(1)
    cdef Py_ssize_t _step
    cdef int i
    with nogil:
        for i in range(12):
            acc[i] = (<vec*>&x[0])[i]
        for _step in range(steps):
            for i in range(12):
                acc[i] = acc[i] * factor + more
        for i in range(12):
            (<vec*>&x[0])[i] = acc[i]
    return LANES * 24 * steps
