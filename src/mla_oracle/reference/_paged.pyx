# SPDX-License-Identifier: Apache-2.0
# Paged form: an absorbed query over latent rows scattered in pages; one pass with an online softmax.
#
#   key = the whole row, value = its first V elements
#   per key:  m' = max(m, score)   acc = acc e^(m - m') + e^(score - m') value   l = l e^(m - m') + e^(score - m')
#   out = acc / l                  lse = m + log l
import numpy as np

from mla_oracle.reference._common cimport INFINITY, Stored, exp_of, int32_t, isnan, load_row, log_of, real


def decode(
    const unsigned char[:, :, :, :] q,      # [B, T, H, D] as bytes
    int q_dtype,
    const unsigned char[:, :, :] kv_cache,  # [num_blocks, block_size, D] as bytes
    int kv_dtype,
    const int32_t[:, :] block_table,        # [B, max_blocks]
    const int32_t[:] seq_lens,              # [B]
    double softmax_scale,
    bint causal,
    double lse_unit,                        # 1, or log2(e) for an LSE in base 2
    double empty_lse,
    real[:, :, :, ::1] out,                 # [B, T, H, V]
    real[:, :, ::1] lse,                    # [B, T, H]
):
    """Fill `out` and `lse`. Query t of T sees the first seq_len - T + t + 1 keys, or all if not causal."""
    cdef Py_ssize_t B = out.shape[0], T = out.shape[1], H = out.shape[2], V = out.shape[3]
    cdef Py_ssize_t block_size = kv_cache.shape[1]
    cdef Py_ssize_t b, t, h, j, d, visible
    cdef real scale = <real>softmax_scale
    cdef real m, m_new, l, score, rescale, p, inverse
    dtype = np.float32 if real is float else np.float64
    itemsize = {0: 4, 1: 2, 2: 2, 3: 8}
    cdef Py_ssize_t D = kv_cache.shape[2] // itemsize[kv_dtype]
    cdef real[::1] query = np.empty(D, dtype)
    cdef real[::1] key = np.empty(D, dtype)
    cdef real[::1] acc = np.empty(V, dtype)

    with nogil:
        for b in range(B):
            for t in range(T):
                visible = seq_lens[b] - T + t + 1 if causal else seq_lens[b]
                for h in range(H):
                    load_row(&q[b, t, h, 0], <Stored>q_dtype, &query[0], D)
                    m = -INFINITY
                    l = 0
                    acc[:] = 0

                    for j in range(visible):
                        load_row(&kv_cache[block_table[b, j // block_size], j % block_size, 0],
                                 <Stored>kv_dtype, &key[0], D)

                        score = 0
                        for d in range(D):
                            score += query[d] * key[d]
                        score *= scale
                        if real is double and score == -INFINITY:
                            continue

                        m_new = score if m < score else m
                        rescale = 0 if m == -INFINITY or m == INFINITY else exp_of(m - m_new)
                        p = exp_of(score - m_new)
                        for d in range(V):
                            acc[d] = acc[d] * rescale + p * key[d]
                        l = l * rescale + p
                        m = m_new

                    inverse = 1 / l if l > 0 else 0
                    for d in range(V):
                        out[b, t, h, d] = acc[d] * inverse
                    lse[b, t, h] = <real>((m + log_of(l)) * lse_unit) if l > 0 else <real>empty_lse
                    if real is double and isnan(l):
                        lse[b, t, h] = l
