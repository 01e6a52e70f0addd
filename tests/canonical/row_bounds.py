# SPDX-License-Identifier: Apache-2.0
"""How far a sequential computation of one dictionary.Row may be from it: worst-case rounding, no constant tuned.

As tests/bounds.py: if every weight and every term of their sum is off by a factor within e^-theta .. e^theta, out is
off by at most (e^(2 theta) - 1) sum p |v|, and the LSE by theta. Here theta also holds what the options round:

    q_scale     one product of the scale, in the scale's own rounding
    softcap     x = z / cap: 2 u of |z|, cap's own rounding in it; cap * tanh x: tanh 4 u, cap and product 2 u, of |c|
    bias        one sum, u of |c| + |b|
    a sink      one key more
    output      its factor's own rounding and the product: 2 u of |out|

The definition rounds too, in f64 and less often: its own bound in f64 is added.
"""

import numpy as np

U = {"f32": 2.0**-24, "f64": 2.0**-53}
SMALLEST = {"f32": 2.0**-126, "f64": 2.0**-1022}
SLACK = 1.01


def roundings(count, u):
    return np.expm1(SLACK * count * u)


def bound(row, D, precision, *, softcap=None, output_scale=None, lse_base="e"):
    """(of out [V], of lse); of a row without keys 0."""
    own, of_definition = (_bound(row, D, name, softcap, output_scale, lse_base) for name in (precision, "f64"))
    return own[0] + of_definition[0], own[1] + of_definition[1]


def _bound(row, D, precision, softcap, output_scale, lse_base):
    if not row.scores:
        return np.zeros(len(row.out)), 0.0
    u = U[precision]
    scores, sizes, scaled, capped = (np.array(x) for x in (row.scores, row.sizes, row.scaled, row.capped))
    error = roundings(D + 2, u) * sizes
    if softcap is not None:
        error = error + roundings(2, u) * (np.abs(scaled) + error) + roundings(6, u) * (np.abs(capped) + error)
    bias = np.abs(scores - capped)
    error = (error + u * (np.abs(capped) + error + bias)).max()
    everything = np.append(scores, row.sink) if np.isfinite(row.sink) else scores
    n = len(everything)
    top = everything.max()
    total = np.exp(everything - top).sum()
    reach = np.ptp(everything) + 2 * error
    theta = error + SLACK * u * (reach + 4 * n + 5)
    values = np.abs(np.array(row.values))
    factor = 1.0 if output_scale is None else output_scale
    out = np.expm1(2 * theta) * (np.exp(scores - top) / total @ values) + n * SMALLEST[precision] * (1 + values.max())
    out = factor * out + roundings(2, u) * (np.abs(row.out) + factor * out) + SMALLEST[precision]
    unit = 1 / np.log(2) if lse_base == "2" else 1.0
    lse = unit * (theta + 2 * SLACK * u * np.log(n)) + 4 * SLACK * u * (np.abs(row.lse) if np.isfinite(row.lse) else 0)
    return out, lse
