# SPDX-License-Identifier: Apache-2.0
"""How far a sequential computation may be from the exact result: worst-case rounding, row by row, no constant tuned.

u is the unit roundoff, 2^-24 or 2^-53. A sum of D products in ascending order carries at most D roundings a term, so
it is off by less than ((1 + u)^D - 1) sum |a b|. libm's exp and log are within one ulp, that is 2 u.

If every weight of a row is off by a factor within e^-theta .. e^theta, and so is every term of their sum, then

    |out - exact| <= (e^(2 theta) - 1) sum_j p_j |v_j|        |lse - exact| <= theta + roundings of the log

where theta = E (the scores) + u (R (the subtractions s - m, which telescope to the range of scores) + exps and sums).
"""

import numpy as np

U = {"f32": 2.0**-24, "f64": 2.0**-53}
SMALLEST = {"f32": 2.0**-126, "f64": 2.0**-1022}
SLACK = 1.01  # (1 + u)^k < e^(1.01 k u), and the bound itself is computed in f64


def roundings(count, u):
    return np.expm1(SLACK * count * u)


def softmax(scores):
    """p [n] and lse of scores [n]."""
    top = scores.max()
    weights = np.exp(scores - top)
    return weights / weights.sum(), top + np.log(weights.sum())


def paged_row(query, rows, head_dim_v, scale, precision):
    """Bounds on out [V] and lse of one online-softmax query [D] over latent rows [n, D] (all f64)."""
    u, (n, D) = U[precision], rows.shape
    scores = scale * (rows @ query)
    # D roundings of the sum, one of the product with the scale, one of the scale itself.
    E = roundings(D + 2, u) * scale * (np.abs(rows) @ np.abs(query)).max()
    R = np.ptp(scores) + 2 * E
    # A term: its exp (2) and product (1), then per key a sum (1) and, where the maximum moves, exp and product (3);
    # the inverse and the product with it (2).
    theta = E + SLACK * u * (R + 4 * n + 5)
    values = np.abs(rows[:, :head_dim_v])
    p, lse = softmax(scores)
    out = np.expm1(2 * theta) * (p @ values) + n * SMALLEST[precision] * (1 + values.max())
    return out, theta + SLACK * u * (2 * np.log(n) + 2 * np.abs(lse))


def dense_rows(problem, scale, precision):
    """Bound on out [t_q, H, V] of either dense form."""
    u = U[precision]
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (
        problem[name].astype(np.float64) for name in ("q_nope", "q_pe", "c_kv", "k_pe", "w_uk", "w_uv")
    )
    (t_q, H, P), R, (t_kv, L) = q_nope.shape, q_pe.shape[2], c_kv.shape
    bound = np.empty((t_q, H, w_uv.shape[1]))
    for i, h in np.ndindex(t_q, H):
        c, k = c_kv[: t_kv - t_q + i + 1], k_pe[: t_kv - t_q + i + 1]
        scores = scale * (c @ (q_nope[i, h] @ w_uk[h]) + k @ q_pe[i, h])
        size = np.abs(c) @ (np.abs(q_nope[i, h]) @ np.abs(w_uk[h])) + np.abs(k) @ np.abs(q_pe[i, h])
        # L and P roundings in the two products of either form, R more, one for the scale, three in the scale.
        E = roundings(L + P + R + 4, u) * scale * size.max()
        # exp (2), the sum (n), its inverse (1), the weight (1); the value (L), its product (1) and sum (n).
        theta = E + SLACK * u * (np.ptp(scores) + 2 * E + 2 * len(c) + L + 5)
        values = np.abs(c) @ np.abs(w_uv[h]).T
        bound[i, h] = np.expm1(2 * theta) * (softmax(scores)[0] @ values)
        bound[i, h] += len(c) * SMALLEST[precision] * (1 + values.max())
    return bound
