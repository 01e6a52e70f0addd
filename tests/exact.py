# SPDX-License-Identifier: Apache-2.0
"""Attention worked out in rational numbers: every score is exact, then rounded once; sums are math.fsum.

Nothing here is shared with the package. It is slow: use it on a handful of tokens.
"""

import math
from fractions import Fraction


def dot(a, b):
    return sum((Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)), Fraction(0))


def softmax_rows(scores, values):
    """(out [V], lse): scores [n] and values [n][V], floats or Fractions."""
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    columns = zip(*values, strict=True)
    out = [math.fsum(w * float(x) for w, x in zip(weights, column, strict=True)) / total for column in columns]
    return out, float(top) + math.log(total)


def attend_row(query, rows, head_dim_v, scale):
    """(out [V], lse) of one absorbed query [D] over latent rows [n][D]."""
    scores = [Fraction(scale) * dot(query, row) for row in rows]
    return softmax_rows(scores, [row[:head_dim_v] for row in rows])


def attend_dense_row(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, scale):
    """out [V] of one query and head: q_nope [P], q_pe [R], c_kv [n][L], k_pe [n][R], w_uk [P][L], w_uv [V][L]."""
    scores = []
    for c, k in zip(c_kv, k_pe, strict=True):
        nope = sum(Fraction(float(q)) * dot(w, c) for q, w in zip(q_nope, w_uk, strict=True))
        scores.append(Fraction(scale) * (nope + dot(q_pe, k)))
    return softmax_rows(scores, [[dot(w, c) for w in w_uv] for c in c_kv])[0]
