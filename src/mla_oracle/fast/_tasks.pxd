# SPDX-License-Identifier: Apache-2.0
# One thread's part of a decode: take the next task until none is left.
#
# Whoever finishes a group's last chunk merges all its chunks in ascending order, so a group's bits do not
# depend on who computed what. Partial states live in a few shared pools; a group waits until all that had its
# pool before are merged. Their tasks were all taken earlier, so the wait ends.
from libc.stdint cimport int64_t
from libc.string cimport memset

from mla_oracle.fast._amx cimport attend_tiles
from mla_oracle.fast._amx_rows cimport lay_out_tiles, load_query_tiles, prepare_tiles
from mla_oracle.fast._amx_tiles cimport HAS_TILES, tiles_off, tiles_on
from mla_oracle.fast._blocks cimport attend, finish, load_queries
from mla_oracle.fast._plan cimport MERGED, Group, Job, Work, advance, group_at, lay_out, round_up, state_size
from mla_oracle.fast._tiles cimport LANES, PAIR, TILE, real

cdef extern from * nogil:
    int64_t fetch_add "__atomic_fetch_add"(int64_t* address, int64_t by, int order)
    int64_t load "__atomic_load_n"(int64_t* address, int order)
    int ACQ_REL "__ATOMIC_ACQ_REL", ACQUIRE "__ATOMIC_ACQUIRE", RELAXED "__ATOMIC_RELAXED"

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t alignment, size_t size)
    void free(void* memory)

cdef extern from "<sched.h>" nogil:
    int sched_yield()


cdef inline void load_group(const Job* job, Work* w, const Group* g) noexcept nogil:
    if HAS_TILES:
        load_query_tiles(job, w, g)
    else:
        load_queries(job, w, g)


cdef inline void attend_chunk(
    const Job* job, Work* w, const Group* g, Py_ssize_t chunk, real* state,
) noexcept nogil:
    if HAS_TILES:
        attend_tiles(job, w, g, chunk, state)
    else:
        attend(job, w, g, chunk, state)


cdef inline void work_off(
    const Job* job, Work* w, real* pools, Py_ssize_t n_pools, Py_ssize_t pool_size,
) noexcept nogil:
    cdef Group g = group_at(job, 0, 0)
    cdef Py_ssize_t loaded = -1, task, before
    cdef real* states
    cdef int64_t* done
    while True:
        task = fetch_add(job.counters, 1, RELAXED)
        if not advance(job, &g, task):
            return
        if loaded != g.index:
            load_group(job, w, &g)
            loaded = g.index
        done = job.counters + 1 + g.index
        if g.chunks == 1:
            attend_chunk(job, w, &g, 0, w.state)
            finish(job, &g, w.state)
        else:
            before = g.index - n_pools
            while before >= 0:
                while load(job.counters + 1 + before, ACQUIRE) < MERGED:
                    sched_yield()
                before -= n_pools
            states = pools + g.index % n_pools * pool_size
            task -= g.first_task
            attend_chunk(job, w, &g, task, states + task * state_size(job, g.lanes))
            if fetch_add(done, 1, ACQ_REL) < g.chunks - 1:
                continue
            finish(job, &g, states)
        fetch_add(done, MERGED, ACQ_REL)


cdef inline Py_ssize_t take_part(
    const Job* job, real* pools, Py_ssize_t n_pools, Py_ssize_t pool_size,
) noexcept nogil:
    """Work off tasks until none is left. Returns 0, or how many bytes of scratch could not be had."""
    cdef Work w
    cdef Py_ssize_t size = <Py_ssize_t>(lay_out_tiles if HAS_TILES else lay_out)(job, &w, NULL)
    cdef char* memory = <char*>aligned_alloc(64, size)
    if memory == NULL:
        return size
    if HAS_TILES:
        lay_out_tiles(job, &w, memory)
        prepare_tiles(job, &w)
        tiles_on()
    else:
        lay_out(job, &w, memory)
        memset(w.zeros, 0, job.row * sizeof(real))
        memset(w.q_rows, 0, LANES * round_up(job.D, PAIR) * sizeof(real))
        memset(w.packed, 0, 0 if job.direct else TILE * job.row * sizeof(real))
    work_off(job, &w, pools, n_pools, pool_size)
    if HAS_TILES:
        tiles_off()
    free(memory)
    return 0
