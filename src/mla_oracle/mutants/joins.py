# SPDX-License-Identifier: Apache-2.0
"""The right join of parts: of tiles in the online softmax, of splits, of ranks, of the states of a merge case.

A part has the maximum m_i of its scores, the sum l_i of e^(s - m_i), and acc_i = sum e^(s - m_i) v. A state (out, lse)
is a part with m_i = lse, l_i = 1, acc_i = out. A join gives out = sum coef_i acc_i.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from .plan import Joined


def exact(m: Array, d: Array) -> Joined:
    """coef_i = e^(m_i - M) / z, z = sum e^(m_i - M) d_i. m, d [..., parts]; an empty part has m -inf, d 0."""
    top, c = powers(m)
    z = (c * d).sum(-1)
    return Joined(c * inverse(z)[..., None], top, z)


def powers(m: Array) -> tuple[Array, Array]:
    """The maximum M of m [..., parts] over the parts, and e^(m - M), 0 for an empty part."""
    top = m.max(-1, initial=-np.inf)
    return top, np.exp(m - np.where(top == -np.inf, 0, top)[..., None])


def inverse(z: Array) -> Array:
    """1 / z, and 0 where z is 0."""
    return np.where(z == 0, 0, 1 / np.where(z == 0, 1, z))


def log_parts(m: Array, d: Array) -> Array:
    """The natural lse of each part, -inf for an empty one."""
    return m + np.log(d)


def weighted(w: Array, d: Array, whole: Joined, lse: Array | None = None) -> Joined:
    """The join out = sum w_i out_i with the lse of `whole`, or the `lse` given as it is stored."""
    return Joined(np.where(d == 0, 0, w) * inverse(d), whole.m, whole.z, lse)


def last_of(x: Array, d: Array) -> Array:
    """x [..., parts] of the last part that is not empty."""
    last = d.shape[-1] - 1 - np.argmax((d > 0)[..., ::-1], -1)
    own: Array = np.take_along_axis(x, last[..., None], -1)[..., 0]
    return own
