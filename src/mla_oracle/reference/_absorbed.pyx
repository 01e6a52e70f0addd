# SPDX-License-Identifier: Apache-2.0
# Absorbed form: fold w_uk into the query, attend over the latent rows themselves, decompress the output once.
#
#   q_lat    = w_uk[h]^T q_nope
#   score[t] = (q_lat . c[t] + q_pe . k_pe[t]) * scale
#   o_lat    = sum_t softmax(score)[t] c[t]
#   out      = w_uv[h] o_lat
import numpy as np

from mla_oracle.reference._common cimport real, softmax


cdef void absorb(
    const real[:] q_nope,           # [P]
    const real[:, :] w_uk,          # [P, L]
    real[::1] q_lat,                # [L]
) noexcept nogil:
    cdef Py_ssize_t p, l
    q_lat[:] = 0
    for p in range(w_uk.shape[0]):
        for l in range(w_uk.shape[1]):
            q_lat[l] += q_nope[p] * w_uk[p, l]


cdef void project(
    const real[:] o_lat,            # [L]
    const real[:, :] w_uv,          # [V, L]
    real[::1] out,                  # [V]
) noexcept nogil:
    cdef Py_ssize_t j, l
    cdef real acc
    for j in range(w_uv.shape[0]):
        acc = 0
        for l in range(w_uv.shape[1]):
            acc += w_uv[j, l] * o_lat[l]
        out[j] = acc


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
    cdef Py_ssize_t t_q = q_nope.shape[0], H = q_nope.shape[1], R = q_pe.shape[2]
    cdef Py_ssize_t t_kv = c_kv.shape[0], L = c_kv.shape[1]
    cdef Py_ssize_t h, i, t, p, l, visible
    cdef real acc
    dtype = np.float32 if real is float else np.float64
    cdef real[::1] q_lat = np.empty(L, dtype)
    cdef real[::1] o_lat = np.empty(L, dtype)
    cdef real[::1] weight = np.empty(t_kv, dtype)

    with nogil:
        for h in range(H):
            for i in range(t_q):
                visible = t_kv - t_q + i + 1

                absorb[real](q_nope[i, h], w_uk[h], q_lat)

                for t in range(visible):
                    acc = 0
                    for l in range(L):
                        acc += q_lat[l] * c_kv[t, l]
                    for p in range(R):
                        acc += q_pe[i, h, p] * k_pe[t, p]
                    weight[t] = acc * scale

                softmax(&weight[0], visible)

                o_lat[:] = 0
                for t in range(visible):
                    if real is double and weight[t] == 0:
                        continue
                    for l in range(L):
                        o_lat[l] += weight[t] * c_kv[t, l]

                project[real](o_lat, w_uv[h], out[i, h])


def absorb_query(
    const real[:, :, :] q_nope,     # [T, H, P]
    const real[:, :, :] w_uk,       # [H, P, L]
    real[:, :, ::1] q_lat,          # [T, H, L]
):
    """Fill `q_lat`: q_nope seen from the latent space."""
    cdef Py_ssize_t i, h
    with nogil:
        for i in range(q_nope.shape[0]):
            for h in range(q_nope.shape[1]):
                absorb[real](q_nope[i, h], w_uk[h], q_lat[i, h])


def up_project(
    const real[:, :, :] o_lat,      # [T, H, L]
    const real[:, :, :] w_uv,       # [H, V, L]
    real[:, :, ::1] out,            # [T, H, V]
):
    """Fill `out`: the latent output of each head, decompressed."""
    cdef Py_ssize_t i, h
    with nogil:
        for i in range(o_lat.shape[0]):
            for h in range(o_lat.shape[1]):
                project[real](o_lat[i, h], w_uv[h], out[i, h])
