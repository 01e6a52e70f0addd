# SPDX-License-Identifier: Apache-2.0
"""How far two right implementations of attention may be apart, from the sizes of the terms they add up.

A sum rounds every running sum by at most one unit. Terms of random sign keep the running sum a factor sqrt(n) below
the sum of the terms' sizes, and n roundings of random sign add up to sqrt(n) of one: whatever n, and in whatever
order, the sum is off by about one unit of the sum of sizes. SLACK of them cover both sides and the tails.
"""

import numpy as np

UNIT = {"f32": 2.0**-24, "f64": 2.0**-53}  # half an ulp of 1
SLACK = 4


def out_bound(scores, score_size, value_size, *, unit, softmax_unit=None):
    """The bound of every element of out [..., V].

    scores [..., t] are scaled, -inf where hidden; score_size [..., t] and value_size [t, V] or [..., t, V] are
    what they become with every term's size in place of the term. `unit` is half an ulp of 1 in the arithmetic,
    `softmax_unit` in the softmax, where that differs.

    An error of a score is a relative error of its weight, once more of their sum: twice the worst score's, which
    is off by `score_size` units for its sums, and by its own size and 2 for the scale, the exponential, the ratio.
    """
    softmax_unit = softmax_unit or unit
    visible = scores > -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    spread = np.where(visible, unit * score_size + softmax_unit * (np.abs(np.where(visible, scores, 0)) + 2), 0)
    relative = SLACK * (2 * spread.max(axis=-1, keepdims=True) + unit)  # [..., 1]
    return relative * np.einsum("...t,...tv->...v", weights, value_size)


def lse_bound(scores, score_size, *, unit):
    """The bound of every lse [...]: the worst score's error, then the exponential, the logarithm and the sum."""
    visible = scores > -np.inf
    spread = np.where(visible, score_size + np.abs(np.where(visible, scores, 0)) + 2, 0)
    return SLACK * unit * spread.max(axis=-1)
