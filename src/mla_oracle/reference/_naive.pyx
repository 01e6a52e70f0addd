# SPDX-License-Identifier: Apache-2.0
# Naive form: decompress every cached row to a key and a value per head, then attend.
#
#   k_nope[t] = w_uk[h] c[t]            v[t] = w_uv[h] c[t]
#   score[t]  = (q_nope . k_nope[t] + q_pe . k_pe[t]) * scale
#   out       = sum_t softmax(score)[t] v[t]
import numpy as np

from mla_oracle.reference._common cimport real, softmax


def attend(
    const real[:, :, :] q_nope,     # [t_q, H, P]
    const real[:, :, :] q_pe,       # [t_q, H, R]
    const real[:, :] c_kv,          # [t_kv, L]
    const real[:, :] k_pe,          # [t_kv, R]
    const real[:, :, :] w_uk,       # [H, P, L]
    const real[:, :, :] w_uv,       # [H, V, L]
    real scale,
    real[:, :, ::1] out,            # [t_q, H, V]
):
    """Fill `out`; the queries are the last t_q rows of the cache."""
    cdef Py_ssize_t t_q = q_nope.shape[0], H = q_nope.shape[1], P = q_nope.shape[2], R = q_pe.shape[2]
    cdef Py_ssize_t t_kv = c_kv.shape[0], L = c_kv.shape[1], V = w_uv.shape[1]
    cdef Py_ssize_t h, i, t, p, l, j, visible
    cdef real acc
    dtype = np.float32 if real is float else np.float64
    cdef real[:, ::1] k_nope = np.empty((t_kv, P), dtype)
    cdef real[:, ::1] v = np.empty((t_kv, V), dtype)
    cdef real[::1] weight = np.empty(t_kv, dtype)

    with nogil:
        for h in range(H):
            for t in range(t_kv):
                for p in range(P):
                    acc = 0
                    for l in range(L):
                        acc += w_uk[h, p, l] * c_kv[t, l]
                    k_nope[t, p] = acc
                for j in range(V):
                    acc = 0
                    for l in range(L):
                        acc += w_uv[h, j, l] * c_kv[t, l]
                    v[t, j] = acc

            for i in range(t_q):
                visible = t_kv - t_q + i + 1

                for t in range(visible):
                    acc = 0
                    for p in range(P):
                        acc += q_nope[i, h, p] * k_nope[t, p]
                    for p in range(R):
                        acc += q_pe[i, h, p] * k_pe[t, p]
                    weight[t] = acc * scale

                softmax(&weight[0], visible)

                out[i, h, :] = 0
                for t in range(visible):
                    if real is double and weight[t] == 0:
                        continue
                    for j in range(V):
                        out[i, h, j] += weight[t] * v[t, j]
