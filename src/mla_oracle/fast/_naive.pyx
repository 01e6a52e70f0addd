# SPDX-License-Identifier: Apache-2.0
# Naive form, blocked: the function of reference/_naive.pyx, decompressed a tile of keys at a time.
#
#   a. A task is a few heads over all keys: how many follows from H alone, so the bits know no threads.
#   b. Here the keys lie in the lanes. Per tile of WIDE keys: turn the latent rows, then per head one blocked
#      product gives keys [P, WIDE] and values [V, WIDE]; no more than that is ever decompressed.
#   c. Online softmax over tiles; the unnormalised output is kept in `out`. A weight of 0 touches no value.
from libc.math cimport INFINITY, NAN, exp, isnan
from libc.stdint cimport int64_t
from libc.string cimport memset

from mla_oracle.fast._plan cimport round_up
from mla_oracle.fast._tasks cimport RELAXED, aligned_alloc, fetch_add, free
from mla_oracle.fast._tiles cimport (
    LANES, LINE, WIDE, WIDE_TOKENS, WIDE_VECS, Ahead, real, splat, stored_real, vec, weight_of,
    where_greater, wide_scores,
)


cdef void turn(
    const real[:, :] x,             # [n, D], n <= WIDE
    real* turned,                   # OUT [D, WIDE]; lanes past n are 0
) noexcept nogil:
    cdef Py_ssize_t n = x.shape[0], D = x.shape[1], d0 = 0, d, i
    cdef const real* row
    memset(turned, 0, D * WIDE * sizeof(real))
    while d0 < D:
        for i in range(n):
            row = &x[i, 0]
            for d in range(d0, min(d0 + LINE, D)):
                turned[d * WIDE + i] = row[d]
        d0 += LINE


cdef void decompress(
    const real[:, :] w,             # [n, L]
    const real* c,                  # [L, WIDE]
    const real* zeros,              # [L]
    real* y,                        # OUT [n rounded up to WIDE_TOKENS, WIDE]: w c
) noexcept nogil:
    cdef const stored_real* rows[WIDE_TOKENS]
    cdef Py_ssize_t n = w.shape[0], j = 0, i
    cdef Ahead nothing
    nothing.n = nothing.row = 0
    while j < n:
        for i in range(WIDE_TOKENS):
            rows[i] = <const stored_real*>(&w[j + i, 0] if j + i < n else zeros)
        wide_scores(rows, &nothing, c, 0, w.shape[1], 1, y + j * WIDE, WIDE, LANES)
        j += WIDE_TOKENS


cdef void query_step(
    const real[:] q_nope,           # [P]
    const real[:] q_pe,             # [R]
    const real* keys,               # [P, WIDE]
    const real* pe,                 # [R, WIDE]
    const real* values,             # [V, WIDE]
    Py_ssize_t n,                   # keys of this tile that the query sees
    real scale,
    real* m, real* l,               # its running maximum and sum
    real[:] out,                    # [V], unnormalised
) noexcept nogil:
    cdef vec acc[WIDE_VECS]
    cdef vec weighted, v
    cdef real s[WIDE]
    cdef real top = m[0], fix, total
    cdef Py_ssize_t d, i, j
    for j in range(WIDE_VECS):
        acc[j] = splat(0)
    for d in range(q_nope.shape[0]):
        for j in range(WIDE_VECS):
            acc[j] = acc[j] + q_nope[d] * (<const vec*>keys)[d * WIDE_VECS + j]
    for d in range(q_pe.shape[0]):
        for j in range(WIDE_VECS):
            acc[j] = acc[j] + q_pe[d] * (<const vec*>pe)[d * WIDE_VECS + j]
    for j in range(WIDE_VECS):
        (<vec*>s)[j] = acc[j] * scale
    for i in range(n, WIDE):
        s[i] = -INFINITY
    for i in range(n):
        if s[i] > top:
            top = s[i]
    for j in range(WIDE_VECS):
        acc[j] = weight_of((<vec*>s)[j] - splat(top if top > -INFINITY else 0))
        (<vec*>s)[j] = acc[j]
    fix = <real>exp(m[0] - top) if m[0] > -INFINITY else 0
    total = 0
    for i in range(WIDE):
        total += s[i]
    l[0] = l[0] * fix + total
    m[0] = top
    for d in range(out.shape[0]):
        weighted = splat(0)
        for j in range(WIDE_VECS):
            v = (<const vec*>values)[d * WIDE_VECS + j]
            weighted = weighted + where_greater(acc[j], splat(0), acc[j] * v, splat(0))
        total = 0
        for i in range(LANES):
            total += (<real*>&weighted)[i]
        out[d] = out[d] * fix + total


def attend(
    const real[:, :, :] q_nope,     # [t_q, H, P]
    const real[:, :, :] q_pe,       # [t_q, H, R]
    const real[:, :] c_kv,          # [t_kv, L]
    const real[:, :] k_pe,          # [t_kv, R]
    const real[:, :, :] w_uk,       # [H, P, L]
    const real[:, :, :] w_uv,       # [H, V, L]
    double softmax_scale,
    real[:, :, :] out,              # [t_q, H, V]
    int64_t[::1] counter,           # [1], 0 at first, shared by all threads
):
    """Fill `out`; the queries are the last t_q rows. Each thread calls this with the same arguments.

    Any strides but the innermost of c_kv, k_pe, w_uk and w_uv, which is one number.
    """
    cdef Py_ssize_t t_q = q_nope.shape[0], H = q_nope.shape[1], P = q_nope.shape[2], R = q_pe.shape[2]
    cdef Py_ssize_t t_kv = c_kv.shape[0], L = c_kv.shape[1], V = w_uv.shape[1]
    cdef Py_ssize_t heads = max(1, min(8, H // 8)), first, h, t, n, key, i, sees
    cdef Py_ssize_t sizes[6]
    cdef real* parts[6]
    cdef real* state
    cdef real inverse
    sizes[:] = [
        L * WIDE, R * WIDE, round_up(P, WIDE_TOKENS) * WIDE, round_up(V, WIDE_TOKENS) * WIDE, L,
        heads * t_q * 2,
    ]
    cdef Py_ssize_t size = sum([round_up(sizes[i], LINE) for i in range(6)]) * sizeof(real)
    cdef real* memory = <real*>aligned_alloc(64, size)
    if memory == NULL:
        raise MemoryError(f"{size} bytes of scratch for one thread")
    with nogil:
        parts[0] = memory
        for i in range(5):
            parts[i + 1] = parts[i] + round_up(sizes[i], LINE)
        memset(parts[4], 0, L * sizeof(real))
        first = fetch_add(&counter[0], heads, RELAXED)
        while first < H:
            for h in range(first, min(first + heads, H)):
                for t in range(t_q):
                    state = parts[5] + 2 * ((h - first) * t_q + t)
                    state[0], state[1] = -INFINITY, 0
                    out[t, h, :] = 0
            key = 0
            while key < t_kv:
                n = min(WIDE, t_kv - key)
                turn(c_kv[key : key + n], parts[0])
                turn(k_pe[key : key + n], parts[1])
                for h in range(first, min(first + heads, H)):
                    decompress(w_uk[h], parts[0], parts[4], parts[2])
                    decompress(w_uv[h], parts[0], parts[4], parts[3])
                    for t in range(t_q):
                        sees = t_kv - t_q + t + 1 - key
                        state = parts[5] + 2 * ((h - first) * t_q + t)
                        if sees > 0:
                            query_step(q_nope[t, h], q_pe[t, h], parts[2], parts[1], parts[3], min(sees, n),
                                       <real>softmax_scale, state, state + 1, out[t, h])
                key += n
            for h in range(first, min(first + heads, H)):
                for t in range(t_q):
                    state = parts[5] + 2 * ((h - first) * t_q + t)
                    inverse = 1 / state[1] if state[1] > 0 else 0
                    for i in range(V):
                        out[t, h, i] = NAN if isnan(state[1]) else out[t, h, i] * inverse
            first = fetch_add(&counter[0], heads, RELAXED)
        free(memory)
