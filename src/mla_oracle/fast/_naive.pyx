# SPDX-License-Identifier: Apache-2.0
# Naive form, blocked: the function of reference/_naive.pyx, decompressed a tile of keys at a time.
#
#   a. A task is a few heads over all keys: how many follows from H alone, so the bits know no threads.
#   b. Here the keys lie in the lanes. Per tile of WIDE keys: turn the latent rows, then per head one blocked
#      product gives keys [P, WIDE] and values [V, WIDE]; no more than that is ever decompressed.
#   c. Inputs are bytes of their stored dtypes (reference._common.Stored), each with its own: they are widened by
#      tile where that is not `real`.
#   d. Online softmax over tiles; the unnormalised output is kept in `out`. A weight of 0 touches no value.
from libc.math cimport INFINITY, NAN, exp, isnan
from libc.stdint cimport int64_t
from libc.string cimport memset

from mla_oracle.fast._plan cimport round_up
from mla_oracle.fast._tasks cimport RELAXED, aligned_alloc, fetch_add, free
from mla_oracle.fast._tiles cimport (
    LANES, LINE, WIDE, WIDE_TOKENS, WIDE_VECS, Ahead, real, splat, stored_real, vec, weight_of,
    where_greater, wide_scores,
)
from mla_oracle.fast._widen cimport is_real, numbers_at, size_of

cdef enum:
    SPAN = 128      # keys, at most, that share one widening of the weights


cdef void turn(
    const unsigned char[:, :] x, int dtype,     # [n, D], n <= WIDE
    real* turned,                   # OUT [D, WIDE]; lanes past n are 0
) noexcept nogil:
    cdef Py_ssize_t n = x.shape[0], D = x.shape[1] // size_of(dtype), d0 = 0, width, d, i
    cdef real room[LINE]
    cdef const stored_real* row
    memset(turned, 0, D * WIDE * sizeof(real))
    while d0 < D:
        width = min(LINE, D - d0)
        for i in range(n):
            row = numbers_at(&x[i, d0 * size_of(dtype)], dtype, room, width)
            for d in range(width):
                turned[(d0 + d) * WIDE + i] = row[d]
        d0 += LINE


cdef void decompress(
    const unsigned char[:, :] w, int dtype,     # [n, L]
    const real* c,                  # [tiles, L, WIDE]
    Py_ssize_t tiles, Py_ssize_t L,
    const real* zeros,              # [L]
    real* room,                     # scratch: [WIDE_TOKENS, L]
    real* y,                        # OUT [tiles, n rounded up to WIDE_TOKENS, WIDE]: w c
) noexcept nogil:
    cdef const stored_real* rows[WIDE_TOKENS]
    cdef Py_ssize_t n = w.shape[0], j = 0, i, tile
    cdef Ahead nothing
    nothing.n = nothing.row = 0
    while j < n:
        for i in range(WIDE_TOKENS):
            rows[i] = <const stored_real*>zeros
            if j + i < n:
                rows[i] = numbers_at(&w[j + i, 0], dtype, room + i * L, L)
        for tile in range(tiles):
            wide_scores(rows, &nothing, c + tile * L * WIDE, 0, L, 1,
                        y + (tile * round_up(n, WIDE_TOKENS) + j) * WIDE, WIDE, LANES)
        j += WIDE_TOKENS


cdef void query_step(
    const stored_real* q_nope, Py_ssize_t P,    # [P]
    const stored_real* q_pe, Py_ssize_t R,      # [R]
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
    for d in range(P):
        for j in range(WIDE_VECS):
            acc[j] = acc[j] + q_nope[d] * (<const vec*>keys)[d * WIDE_VECS + j]
    for d in range(R):
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
    const unsigned char[:, :, :] q_nope, int nope_dtype,    # [t_q, H, P]
    const unsigned char[:, :, :] q_pe, int q_pe_dtype,      # [t_q, H, R]
    const unsigned char[:, :] c_kv, int kv_dtype,           # [t_kv, L]
    const unsigned char[:, :] k_pe, int pe_dtype,           # [t_kv, R]
    const unsigned char[:, :, :] w_uk, int uk_dtype,        # [H, P, L]
    const unsigned char[:, :, :] w_uv, int uv_dtype,        # [H, V, L]
    double softmax_scale,
    real[:, :, :] out,              # [t_q, H, V]
    int64_t[::1] counter,           # [1], 0 at first, shared by all threads
):
    """Fill `out`; the queries are the last t_q rows. Each thread calls this with the same arguments.

    Any strides but the innermost, which is one number, and any of `out`.
    """
    cdef Py_ssize_t t_q = q_nope.shape[0], H = q_nope.shape[1]
    cdef Py_ssize_t P = w_uk.shape[1], R = k_pe.shape[1] // size_of(pe_dtype)
    cdef Py_ssize_t t_kv = c_kv.shape[0], L = c_kv.shape[1] // size_of(kv_dtype), V = w_uv.shape[1]
    cdef Py_ssize_t heads = max(1, min(8, H // 8)), first, h, t, n, key, i, sees, tiles
    cdef Py_ssize_t at_once = 1 if is_real(uk_dtype) and is_real(uv_dtype) else max(1, SPAN // WIDE)
    cdef Py_ssize_t key_size = round_up(P, WIDE_TOKENS) * WIDE, value_size = round_up(V, WIDE_TOKENS) * WIDE
    cdef const stored_real* query
    cdef const stored_real* query_pe
    cdef Py_ssize_t sizes[8]
    cdef real* parts[8]
    cdef real* state
    cdef real inverse
    sizes[:] = [
        at_once * L * WIDE, at_once * R * WIDE, at_once * key_size, at_once * value_size, L,
        heads * t_q * 2, WIDE_TOKENS * L, P + R,
    ]
    cdef Py_ssize_t size = sum([round_up(sizes[i], LINE) for i in range(8)]) * sizeof(real)
    cdef real* memory = <real*>aligned_alloc(64, size)
    if memory == NULL:
        raise MemoryError(f"{size} bytes of scratch for one thread")
    with nogil:
        parts[0] = memory
        for i in range(7):
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
                tiles = min(at_once, (t_kv - key + WIDE - 1) // WIDE)
                for i in range(tiles):
                    n = min(WIDE, t_kv - key - i * WIDE)
                    turn(c_kv[key + i * WIDE : key + i * WIDE + n], kv_dtype, parts[0] + i * L * WIDE)
                    turn(k_pe[key + i * WIDE : key + i * WIDE + n], pe_dtype, parts[1] + i * R * WIDE)
                for h in range(first, min(first + heads, H)):
                    decompress(w_uk[h], uk_dtype, parts[0], tiles, L, parts[4], parts[6], parts[2])
                    decompress(w_uv[h], uv_dtype, parts[0], tiles, L, parts[4], parts[6], parts[3])
                    for t in range(t_q):
                        query = numbers_at(&q_nope[t, h, 0], nope_dtype, parts[7], P)
                        query_pe = numbers_at(&q_pe[t, h, 0], q_pe_dtype, parts[7] + P, R)
                        state = parts[5] + 2 * ((h - first) * t_q + t)
                        for i in range(tiles):
                            sees = t_kv - t_q + t + 1 - key - i * WIDE
                            if sees > 0:
                                query_step(query, P, query_pe, R, parts[2] + i * key_size, parts[1] + i * R * WIDE,
                                           parts[3] + i * value_size, min(sees, WIDE),
                                           <real>softmax_scale, state, state + 1, out[t, h])
                key += tiles * WIDE
            for h in range(first, min(first + heads, H)):
                for t in range(t_q):
                    state = parts[5] + 2 * ((h - first) * t_q + t)
                    inverse = 1 / state[1] if state[1] > 0 else 0
                    for i in range(V):
                        out[t, h, i] = NAN if isnan(state[1]) else out[t, h, i] * inverse
            first = fetch_add(&counter[0], heads, RELAXED)
        free(memory)
