# SPDX-License-Identifier: Apache-2.0
# Merge: attention states over disjoint sets of keys, joined by their LSE.
#
#   w[s] = e^(lse[s] - max lse)     out = sum_s w[s] out[s] / sum_s w[s]     lse = max lse + log sum_s w[s]
from mla_oracle.reference._common cimport INFINITY, exp_of, log_of, real
from libc.math cimport isinf, isnan


def merge(
    const real[:, :, :] partial_out,    # [S, N, V]
    const real[:, :] partial_lse,       # [S, N]
    double unit,                        # log(base of the LSE)
    double marker,                      # the lse of an empty state, next to -inf and +inf
    double empty_lse,                   # the lse of a row that has none but empty states
    real[:, ::1] out,                   # [N, V]
    real[::1] lse,                      # [N]
):
    """Fill `out` and `lse`. A state whose lse is infinite or `marker` is empty: its out is not touched."""
    cdef Py_ssize_t S = partial_out.shape[0], N = partial_out.shape[1], V = partial_out.shape[2]
    cdef Py_ssize_t s, n, d
    cdef real m, w, total
    with nogil:
        for n in range(N):
            m = -INFINITY
            for s in range(S):
                if not empty(partial_lse[s, n], marker) and partial_lse[s, n] > m:
                    m = partial_lse[s, n]

            total = 0
            out[n, :] = 0
            for s in range(S):
                if empty(partial_lse[s, n], marker):
                    continue
                w = exp_of(<real>((partial_lse[s, n] - m) * unit))
                total += w
                for d in range(V):
                    out[n, d] += w * partial_out[s, n, d]

            if total == 0:
                lse[n] = <real>empty_lse
                continue
            for d in range(V):
                out[n, d] /= total
            lse[n] = <real>(m + log_of(total) / unit)


cdef inline bint empty(double lse, double marker) noexcept nogil:
    return isinf(lse) or lse == marker or (isnan(lse) and isnan(marker))
