# SPDX-License-Identifier: Apache-2.0
"""Wrong online softmax, merges and ranks in plain loops: name of the mutant -> steps of loops.Kernel.

The online softmax runs tile by tile, with the state a kernel has; a merge has the states of its parts.
"""

import math

import ml_dtypes
import numpy as np
from loops import Kernel, state

INF, LN2 = math.inf, math.log(2)


def tiles(k, b, t, h):
    """The keys of each tile that has some."""
    size = min(k.P, 64) if k.P > 1 else 64
    js = k.keys(b, t, h)
    return [[j for j in js if j // size == i] for i in sorted({j // size for j in js})]


def tile_scores(k, b, t, h):
    return [[k.score(b, t, h, j) for j in js] for js in tiles(k, b, t, h)]


def online(on_sum, on_acc, end=None, late=False):
    """on_sum and on_acc of (m - m_new): what the sum and the accumulator are multiplied by at each tile."""

    def attend(k, b, t, h):
        m, total, acc, last = -INF, 0.0, np.zeros(k.V), 0.0
        every = tiles(k, b, t, h)
        if not every:
            return k.empty(b, t, h)
        neighbour = running(tile_scores(k, b, t, (h + 1) % k.H))
        for i, js in enumerate(every):
            s = [k.score(b, t, h, j) for j in js]
            new = max(m, *s)
            other = neighbour[i - 1] - neighbour[i] if i else 0.0
            down = m - new if i else 0.0
            w = [math.exp(x - (m if late and i else new)) for x in s]
            last = sum(w)
            total = total * on_sum(down, other) + last
            acc = acc * on_acc(down, other) + sum(w[n] * k.value(b, j) for n, j in enumerate(js))
            m = new
        out = acc / total if end is None else end(acc, total, last)
        return out, k.lse(m, total, 0)

    return {"attend": attend}


def running(scores):
    tops, m = [], -INF
    for s in scores:
        m = max(m, *s)
        tops.append(m)
    return tops


def tile_maximum(k, b, t, h):
    total, acc, m = 0.0, np.zeros(k.V), -INF
    for js in tiles(k, b, t, h):
        m, z, own = state(k, b, t, h, js)
        total, acc = total + z, acc + own
    return (acc / total, k.lse(m, total, 0)) if total else k.empty(b, t, h)


def e(down, other):
    return math.exp(down)


def one(down, other):
    return 1.0


def powered(k, b, t, h, power):
    """Factors of a step raised to a power."""

    def factor(down, other):
        return math.exp(power * down)

    return online(factor, factor)["attend"](k, b, t, h)


def divided_each_tile(k, b, t, h):
    m, total, acc = -INF, 0.0, np.zeros(k.V)
    for js in tiles(k, b, t, h):
        s = [k.score(b, t, h, j) for j in js]
        new = max(m, *s)
        w = [math.exp(x - new) for x in s]
        old = math.exp(m - new) if total else 0.0
        m, total = new, total * old + sum(w)
        acc = (acc * old + sum(w[n] * k.value(b, j) for n, j in enumerate(js))) / total
    return (acc, k.lse(m, total, 0)) if total else k.empty(b, t, h)


def stale_lse(k, b, t, h):
    out, lse = Kernel.attend(k, b, t, h)
    every = tiles(k, b, t, h)
    before = [j for js in every[:-1] for j in js]
    return (out, k.lse(*state(k, b, t, h, before)[:2], 0)) if before else (out, lse)


ONLINE = {
    "lse-stale": {"attend": stale_lse},
    "divided-each-tile": {"attend": divided_each_tile},
    "acc-inverted": online(e, lambda d, o: math.exp(-d)),
    "sum-not-rescaled": online(one, e),
    "acc-not-rescaled": online(e, one),
    "nothing-rescaled": online(one, one),
    "inverted": online(lambda d, o: math.exp(-d), lambda d, o: math.exp(-d)),
    "base-2": online(lambda d, o: 2**d, lambda d, o: 2**d),
    "acc-base-2": online(e, lambda d, o: 2**d),
    "acc-twice": online(e, lambda d, o: math.exp(2 * d)),
    "unscaled-maximum": {"attend": lambda k, b, t, h: powered(k, b, t, h, 1 / k.scale())},
    "scaled-twice": {"attend": lambda k, b, t, h: powered(k, b, t, h, k.scale())},
    "neighbour": online(e, lambda d, o: math.exp(o)),
    "stale-maximum": online(e, e, late=True),
    "tile-maximum": {"attend": tile_maximum},
    "lazy-8": online(e, lambda d, o: math.exp(d) if -d > 8 else 1.0),
    "unnormalised": online(e, e, lambda acc, total, last: acc),
    "divided-twice": online(e, e, lambda acc, total, last: acc / total**2),
    "last-tile-sum": online(e, e, lambda acc, total, last: acc / last),
}


def parts(k, b, t, h):
    """The keys that a query token sees of each of 4 splits, or of each rank."""
    n, js = k.length(b), k.keys(b, t, h)
    shards = getattr(k.case, "shards", 1)
    if shards > 1 and k.case.shard_layout == "interleaved":
        return [[j for j in js if j % shards == i] for i in range(shards)]
    count = shards if shards > 1 else 4
    size = max(math.ceil(n / count), 1)
    return [[j for j in js if j // size == i] for i in range(count)]


class States:
    """The states of one row: m, z, acc, out and natural lse of each part."""

    def __init__(self, k, b, t, h):
        own = [state(k, b, t, h, js) for js in parts(k, b, t, h)]
        self.m, self.z = [s[0] for s in own], [s[1] for s in own]
        self.acc = [s[2] for s in own]
        self.out = [acc / z if z else acc for _, z, acc in own]
        self.lse = [m + math.log(z) if z else -INF for m, z, _ in own]
        self.full = [i for i, z in enumerate(self.z) if z]


def softmax(x):
    top = max(x)
    w = [math.exp(y - top) if y > -INF else 0.0 for y in x]
    return [y / sum(w) for y in w]


def log_sum(x):
    top = max(x)
    return top + math.log(sum(math.exp(y - top) for y in x if y > -INF))


def merge(weights, lse=None, out=None, natural=True):
    """o = sum weights(states) out_i; lse(states), natural or as it is stored, and else the right one."""

    def attend(k, b, t, h):
        s = States(k, b, t, h)
        if not s.full:
            return k.empty(b, t, h)
        w = weights(s)
        o = out(s) if out else s.out
        joined = sum(w[i] * o[i] for i in s.full)
        if lse is None:
            return joined, k.unit * log_sum(s.lse)
        return joined, lse(s) * (k.unit if natural else 1)

    return {"attend": attend}


def keep(which):
    """Only these parts of the full ones, rightly merged."""

    def attend(k, b, t, h):
        s = States(k, b, t, h)
        kept = [i for i in which(s) if s.z[i]]
        if not kept:
            return k.empty(b, t, h)
        w = softmax([s.lse[i] for i in kept])
        return sum(w[n] * s.out[i] for n, i in enumerate(kept)), k.unit * log_sum([s.lse[i] for i in kept])

    return {"attend": attend}


def joined(states):
    """Right merge of (lse, out) pairs; none: an empty row."""

    def attend(k, b, t, h):
        own = [s for s in states(k, b, t, h) if s[0] > -INF]
        if not own:
            return k.empty(b, t, h)
        w = softmax([s[0] for s in own])
        return sum(w[i] * s[1] for i, s in enumerate(own)), k.unit * log_sum([s[0] for s in own])

    return {"attend": attend}


def last_twice(k, b, t, h):
    s = States(k, b, t, h)
    return [(s.lse[i], s.out[i]) for i in [*s.full, *s.full[-1:]]]


def empty_as_zero(k, b, t, h):
    s = States(k, b, t, h)
    return [(s.lse[i], s.out[i]) if s.z[i] else (0.0, np.zeros(k.V)) for i in range(len(s.z))] if s.full else []


def empty_as_nan(k, b, t, h):
    out, lse = Kernel.attend(k, b, t, h)
    s = States(k, b, t, h)
    return (np.full(k.V, math.nan) if s.full and len(s.full) < len(s.z) else out), lse


def empty_as_infinite(k, b, t, h):
    out, lse = Kernel.attend(k, b, t, h)
    s = States(k, b, t, h)
    return (np.full(k.V, math.nan), math.nan) if len(s.full) < len(s.z) else (out, lse)


def whole(k, b, t, h):
    m, z, acc = state(k, b, t, h, k.keys(b, t, h))
    return (m + math.log(z), acc / z) if z else (-INF, acc)


def states_transposed(k, b, t, h):
    """State [b, i] read of memory that is [splits, B]."""
    memory = [(part, own) for part in range(4) for own in range(k.B)]
    states = []
    for split in range(4):
        part, own = memory[b * 4 + split]
        s = States(k, own, t, h)
        states.append((s.lse[part], s.out[part]))
    return states


def edges(k, b, n):
    size = max(math.ceil(n / 4), 1)
    return {j for j in range(n) if j and j % size == 0}


def of_head(which):
    """The weights of another head."""

    def attend(k, b, t, h):
        s = States(k, b, t, h)
        if not s.full:
            return k.empty(b, t, h)
        w = softmax(States(k, b, t, which(k, h)).lse)
        return sum(w[i] * s.out[i] for i in s.full), k.unit * log_sum(s.lse)

    return {"attend": attend}


def rounded(kind):
    return lambda s: softmax([float(kind(x)) for x in s.lse])


def overflowing(s):
    w = [np.float64(np.float32(np.exp(x))) for x in s.lse]
    return [x / sum(w) for x in w]


def combined(acc, total):
    """Sums of acc_i acc(m_i - M) and of l_i total(m_i - M), one divided by the other."""

    def attend(k, b, t, h):
        s = States(k, b, t, h)
        if not s.full:
            return k.empty(b, t, h)
        top = max(s.m[i] for i in s.full)
        z = sum(s.z[i] * total(s.m[i] - top, 0) for i in s.full)
        return sum(s.acc[i] * acc(s.m[i] - top, 0) for i in s.full) / z, k.lse(top, z, 0)

    return {"attend": attend}


def two(down, other):
    return 2**down


def maximum_base_2(k, b, t, h):
    s = States(k, b, t, h)
    if not s.full:
        return k.empty(b, t, h)
    m = [s.m[i] / LN2 for i in s.full]
    z = sum(s.z[i] * math.exp(m[n] - max(m)) for n, i in enumerate(s.full))
    return sum(s.acc[i] * math.exp(m[n] - max(m)) for n, i in enumerate(s.full)) / z, k.lse(max(m), z, 0)


def of_neighbour(by):
    """Part n of those that have keys is weighted with the lse of part n + by of them."""

    def weights(s):
        w = softmax([s.lse[s.full[(n + by) % len(s.full)]] for n in range(len(s.full))])
        return [w[s.full.index(i)] if i in s.full else 0.0 for i in range(len(s.z))]

    return merge(weights)


MERGE = {
    "of-next-part": of_neighbour(1),
    "of-part-before": of_neighbour(-1),
    "maximum-base-2": {"attend": maximum_base_2},
    "acc-not-rescaled": combined(one, e),
    "sum-not-rescaled": combined(e, one),
    "nothing-rescaled": combined(one, one),
    "rescaled-base-2": combined(two, two),
    "acc-base-2": combined(two, e),
    "sum-base-2": combined(e, two),
    "equal": merge(lambda s: [1 / len(s.full)] * len(s.z)),
    "sum": merge(lambda s: [1.0] * len(s.z)),
    "without-maximum": merge(lambda s: [z / sum(s.z) for z in s.z]),
    "maximum-only": merge(lambda s: softmax(s.m)),
    "linear": merge(lambda s: [x / sum(s.lse[i] for i in s.full) for x in s.lse]),
    "base-2-as-e": merge(lambda s: softmax([x / LN2 for x in s.lse]), lambda s: log_sum([x / LN2 for x in s.lse]),
                         natural=False),
    "e-as-base-2": merge(lambda s: softmax([x * LN2 for x in s.lse]),
                         lambda s: math.log2(sum(2**x for x in s.lse)), natural=False),
    "one-in-base-2": merge(lambda s: softmax([s.lse[0] / LN2, *s.lse[1:]])),
    "maximum-twice": merge(lambda s: softmax([a + b for a, b in zip(s.m, s.lse, strict=True)])),
    "scaled": {"attend": lambda k, b, t, h: merge(lambda s: softmax([x * k.scale() for x in s.lse]))["attend"](
        k, b, t, h)},
    "reversed": merge(lambda s: softmax(s.lse)[::-1]),
    "of-head-0": of_head(lambda k, h: 0),
    "of-next-head": of_head(lambda k, h: (h + 1) % k.H),
    "not-normalised": merge(lambda s: [math.exp(x - max(s.lse)) for x in s.lse]),
    "partials-not-normalised": merge(lambda s: softmax(s.lse), out=lambda s: s.acc),
    "normalised-twice": merge(lambda s: softmax(s.lse), out=lambda s: [o / z if z else o for o, z in
                                                                      zip(s.out, s.z, strict=True)]),
    "first-lost": keep(lambda s: range(1, len(s.z))),
    "last-lost": keep(lambda s: range(len(s.z) - 1)),
    "first-only": keep(lambda s: [0]),
    "last-only": keep(lambda s: [len(s.z) - 1]),
    "first-two": keep(lambda s: [0, 1]),
    "last-twice": joined(last_twice),
    "empty-as-zero": joined(empty_as_zero),
    "empty-as-infinite": {"attend": empty_as_infinite},
    "empty-as-nan": {"attend": empty_as_nan},
    "lse-last": merge(lambda s: softmax(s.lse), lambda s: s.lse[s.full[-1]]),
    "lse-maximum": merge(lambda s: softmax(s.lse), lambda s: max(s.lse)),
    "lse-sum": merge(lambda s: softmax(s.lse), lambda s: sum(s.lse[i] for i in s.full)),
    "lse-mean": merge(lambda s: softmax(s.lse), lambda s: log_sum(s.lse) - math.log(len(s.z))),
    "lse-log2": merge(lambda s: softmax(s.lse), lambda s: max(s.lse)
                      + math.log2(sum(math.exp(x - max(s.lse)) for x in s.lse))),
    "lse-bf16": merge(rounded(ml_dtypes.bfloat16)),
    "lse-f16": merge(rounded(np.float16)),
    "overflow": merge(overflowing),
    "edge-lost": {"keys": lambda k, b, t, h: [j for j in Kernel.keys(k, b, t, h) if j not in edges(k, b, k.lens[b])]},
    "edge-twice": {"keys": lambda k, b, t, h: Kernel.keys(k, b, t, h)
                   + [j for j in Kernel.keys(k, b, t, h) if j in edges(k, b, k.lens[b])]},
    "states-transposed": joined(states_transposed),
    "idle-split": joined(lambda k, b, t, h: [whole(k, b, t, h), (0.0, np.zeros(k.V))]),
    "stale-split": joined(lambda k, b, t, h: [whole(k, b, t, h), whole(k, (b - 1) % k.B, t, h)]),
}


def warp(j):
    return j // 8 % 2


def own_sum(k, b, t, h):
    js = k.keys(b, t, h)
    if not js:
        return k.empty(b, t, h)
    m, _, acc = state(k, b, t, h, js)
    z = sum(math.exp(k.score(b, t, h, j) - m) for j in js if warp(j) == 0)
    return acc / z, k.lse(m, z, 0)


def own_maximum(k, b, t, h):
    js = k.keys(b, t, h)
    if not js:
        return k.empty(b, t, h)
    first, second = ([j for j in js if warp(j) == i] for i in range(2))
    m, z, acc = state(k, b, t, h, first)
    _, more, rest = state(k, b, t, h, second)
    return (acc + rest) / (z + more), k.lse(m, z + more, 0)


def half_not_rescaled(k, b, t, h):
    out, own = online(e, e)["attend"](k, b, t, h)
    wrong_out, _ = online(e, one)["attend"](k, b, t, h)
    half = k.V // 2
    return np.concatenate([out[:half], wrong_out[half:]]), own


def transposed(j):
    return j - j % 64 + j % 8 * 8 + j % 64 // 8


def mask_transposed(k, b, t, h):
    return [transposed(j) for j in range(k.count(b, t, h))]


WARP = {
    "sum-not-joined": {"attend": own_sum},
    "maximum-not-joined": {"attend": own_maximum},
    "half-not-rescaled": {"attend": half_not_rescaled},
    "tokens-transposed": {"value": lambda k, b, j: Kernel.value(
        k, b, transposed(j) if j < k.lens[b] // 64 * 64 else j)},
    "tokens-swapped": {"value": lambda k, b, j: Kernel.value(k, b, j ^ 1 if j ^ 1 < k.lens[b] else j)},
    "mask-transposed": {"keys": mask_transposed},
}


def owned(k, b):
    """The tokens of each rank."""
    n, S = k.lens[b], k.case.shards
    if k.case.shard_layout == "interleaved":
        return [list(range(s, n, S)) for s in range(S)]
    size = math.ceil(n / S)
    return [list(range(s * size, min((s + 1) * size, n))) for s in range(S)]


def seen(of):
    """The first of(k, b, t, rank, its tokens) tokens that each rank owns."""
    return {"keys": lambda k, b, t, h: sorted(
        j for s, own in enumerate(owned(k, b)) for j in own[: max(of(k, b, t, s, own), 0)])}


def other_layout(k, b, t, s, own):
    top, S = k.count(b, t, 0), k.case.shards
    if k.case.shard_layout == "contiguous":
        return len(range(s, top, S))
    size = math.ceil(k.lens[b] / S)
    return len(range(s * size, min((s + 1) * size, top)))


SHARD = {
    "other-layout": seen(other_layout),
    "no-bound": seen(lambda k, b, t, s, own: len(own) if k.count(b, t, 0) else 0),
    "local-bound": seen(lambda k, b, t, s, own: len(own) - k.T + t + 1 if k.case.causal else len(own)),
    "rest-lost": {"keys": lambda k, b, t, h: [
        j for own in owned(k, b) for j in own[: k.lens[b] // k.case.shards] if j < k.count(b, t, h)]},
}

WRONG = {
    f"{family}.{name}": steps
    for family, table in {"online": ONLINE, "warp": WARP, "merge": MERGE, "shard": SHARD}.items()
    for name, steps in table.items()
}
