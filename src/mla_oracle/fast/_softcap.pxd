# SPDX-License-Identifier: Apache-2.0
# What happens to a score between its scale and the softmax, where rows are listed: softcap, then bias.
#
#   score = softcap tanh(score / softcap), then + bias, which is -inf for a key that does not count
#
# A capped score is finite even where the row holds an infinity. Such a row is still left out of the products, which
# would make it NaN in every lane, and comes in again lane by lane.
from libc.math cimport INFINITY

from mla_oracle.fast._plan cimport Group, Job
from mla_oracle.fast._tiles cimport LANES, TILE, real, splat, stored_real, tanh_of, vec, where_greater


cdef inline bint bends(const Job* job) noexcept nogil:
    """Whether `bend` has anything to do."""
    return job.softcap > 0 or job.bias != NULL


cdef inline const real* bias_at(const Job* job, const Group* g, Py_ssize_t key, Py_ssize_t lane) noexcept nogil:
    cdef const real* bias = job.bias + (g.b * job.listed_stride + key) * job.bias_lanes
    return bias if job.bias_lanes == 1 else bias + g.row0 + lane


cdef inline bint bend(
    const Job* job, const Group* g, Py_ssize_t key, Py_ssize_t lane,
    real* s,                        # [n, LANES], in place: of keys key, key + 1, ...; lanes lane, lane + 1, ...
    Py_ssize_t n,
) noexcept nogil:
    """Returns whether a score was not finite before."""
    cdef vec odds = splat(0), cap = splat(job.softcap), x, more
    cdef const real* bias = NULL
    cdef Py_ssize_t k
    cdef int i
    cdef bint any_odd = False
    if job.bias != NULL:
        bias = bias_at(job, g, key, lane)
    for k in range(n):
        x = (<vec*>s)[k]
        odds = odds + x * splat(0)
        if job.softcap > 0:
            x = cap * tanh_of(x / cap)
        if bias != NULL:
            more = splat(bias[0]) if job.bias_lanes == 1 else (<const vec*>bias)[0]
            x = where_greater(more, splat(-INFINITY), x + more, more)
            bias += job.bias_lanes
        (<vec*>s)[k] = x
    for i in range(LANES):
        any_odd |= (<real*>&odds)[i] != 0
    return any_odd


cdef inline void add_row(
    const Job* job, const Group* g, Py_ssize_t key, Py_ssize_t lane,
    const real* p,                  # weights of the key: [used / LANES] of [LANES], TILE x LANES apart
    const stored_real* row,         # its value [V], that was left out
    Py_ssize_t used,
    real* o,                        # [used, o_row]: lanes lane, lane + 1, ...
) noexcept nogil:
    cdef Py_ssize_t i, d
    for i in range(used):
        if job.bias != NULL and bias_at(job, g, key, lane + i)[0] == -INFINITY:
            continue
        for d in range(job.V):
            o[i * job.o_row + d] += p[i // LANES * TILE * LANES + i % LANES] * row[d]
