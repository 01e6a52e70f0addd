# SPDX-License-Identifier: Apache-2.0
# The paged form with its options: as _paged.pyx, over rows already gathered, the keys of every query listed.
#
#   score = (query . key) scale, then softcap tanh(score / softcap) where there is one, then + bias
#   per key:  m' = max(m, score)   acc = acc e^(m - m') + e^(score - m') value   l = l e^(m - m') + e^(score - m')
#   a sink is one more key, the last, of value 0 and with the sink as its score; a row of no other key has none
#   out = acc / l * output_scale   lse = m + log l, before the sink or after it
import numpy as np

from libc.math cimport tanh, tanhf
from libc.stdint cimport int64_t
from mla_oracle.reference._common cimport INFINITY, exp_of, isnan, log_of, real


def attend(
    const real[:, :, :] q,          # [T, H, D]: one request, the heads that read these rows
    const real[:, ::1] rows,        # [n, D]
    const int64_t[::1] starts,      # [T + 1]: query t sees keys starts[t] .. starts[t + 1], in this order
    const int64_t[::1] keys,        # [M]: which row each is; a row that comes twice counts twice
    const real[:, :] bias,          # [H, M], 0 for none; -inf skips the key
    const real[::1] sinks,          # [H], -inf for none
    double softmax_scale,
    double softcap,                 # 0 for none
    bint sinks_in_lse,
    Py_ssize_t value_offset,        # value = row[value_offset : value_offset + V]
    double output_scale,
    double lse_unit,                # 1, or log2(e) for an LSE in base 2
    double empty_lse,
    real[:, :, :] out,              # [T, H, V]
    real[:, :] lse,                 # [T, H]
):
    """Fill `out` and `lse`. With no option used: the bits of _paged.decode."""
    cdef Py_ssize_t T = out.shape[0], H = out.shape[1], V = out.shape[2], D = rows.shape[1]
    cdef Py_ssize_t t, h, i, j, d
    cdef real scale = <real>softmax_scale, cap = <real>softcap
    cdef real m, m_new, l, score, rescale, p, inverse
    cdef real[::1] acc = np.empty(V, np.float32 if real is float else np.float64)

    with nogil:
        for t in range(T):
            for h in range(H):
                m = -INFINITY
                l = 0
                acc[:] = 0

                for i in range(starts[t], starts[t + 1]):
                    if bias[h, i] == -INFINITY:
                        continue
                    j = keys[i]
                    score = 0
                    for d in range(D):
                        score += q[t, h, d] * rows[j, d]
                    score *= scale
                    if cap > 0:
                        score = cap * tanh_of(score / cap)
                    score += bias[h, i]
                    if real is double and score == -INFINITY:
                        continue

                    m_new = score if m < score else m
                    rescale = 0 if m == -INFINITY or m == INFINITY else exp_of(m - m_new)
                    p = exp_of(score - m_new)
                    for d in range(V):
                        acc[d] = acc[d] * rescale + p * rows[j, value_offset + d]
                    l = l * rescale + p
                    m = m_new

                lse[t, h] = <real>((m + log_of(l)) * lse_unit) if l > 0 else <real>empty_lse
                if l > 0 and sinks[h] > -INFINITY:
                    m_new = sinks[h] if m < sinks[h] else m
                    rescale = exp_of(m - m_new)
                    p = 1 if sinks[h] == m_new else exp_of(sinks[h] - m_new)
                    for d in range(V):
                        acc[d] *= rescale
                    l = l * rescale + p
                    m = m_new
                    if sinks_in_lse:
                        lse[t, h] = <real>((m + log_of(l)) * lse_unit)

                inverse = 1 / l if l > 0 else 0
                for d in range(V):
                    out[t, h, d] = acc[d] * inverse * <real>output_scale
                if real is double and isnan(l):
                    lse[t, h] = l


cdef inline real tanh_of(real x) noexcept nogil:
    if real is float:
        return tanhf(x)
    else:
        return tanh(x)
