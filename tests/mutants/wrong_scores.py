# SPDX-License-Identifier: Apache-2.0
"""Wrong scales, ropes, scores and roundings in plain loops: name of the mutant -> steps of loops.Kernel."""

import math
from functools import cache

import ml_dtypes
import numpy as np
from loops import Kernel

LN2 = math.log(2)
MSCALE = 0.1 * math.log(40) + 1


def scale(of):
    return {"scale": lambda k: of(k, k.case.softmax_scale)}


def rope(query=None, key=None):
    """Rope elements [R], unturned, and their position -> turned otherwise."""
    steps = {}
    if query:
        def turned_query(k, b, t, h):
            q = Kernel.query(k, b, t, h)
            p = k.position(b, t)
            return np.concatenate([q[: k.V], query(k, k.unturned(q[k.V :], p), p, b, t, h)])

        steps["query"] = turned_query
    if key:
        def turned_key(k, b, j):
            row = Kernel.row(k, b, j)
            return np.concatenate([row[: k.V], key(k, k.unturned(row[k.V :], j), j, b)])

        steps["key"] = turned_key
    return steps


def sides(name, act, which="both q k"):
    """The three mutants of one wrong rotation act(k, x, p)."""
    q, j = (lambda k, x, p, b, t, h: act(k, x, p)), (lambda k, x, p, b: act(k, x, p))
    made = {"both": rope(q, j), "q": rope(q), "k": rope(None, j)}
    return {f"rope.{name}" + (f"-{side}" if side != "both" else ""): made[side] for side in which.split()}


def table_layout(k, x, p):
    """cos and sin tables laid out in halves [theta_0 ..., theta_0 ...] while pairs are adjacent."""
    half = k.R // 2
    table = [p * k.angles()[m % half] for m in range(k.R)]
    y = np.empty(k.R)
    for i in range(half):
        a, b = 2 * i, 2 * i + 1
        y[a] = x[a] * math.cos(table[a]) - x[b] * math.sin(table[a])
        y[b] = x[b] * math.cos(table[b]) + x[a] * math.sin(table[b])
    return y


def swapped(k, x, p):
    y = np.empty(k.R)
    for i, theta in enumerate(k.angles()):
        c, s = math.sin(p * theta), math.cos(p * theta)
        y[2 * i], y[2 * i + 1] = x[2 * i] * c - x[2 * i + 1] * s, x[2 * i] * s + x[2 * i + 1] * c
    return y


def base(value):
    return lambda k, x, p: k.turn(x, p, theta=[value ** (-2 * i / k.R) for i in range(k.R // 2)])


def half(k, x, p):
    n = k.R // 4 * 2
    return np.concatenate([k.turn(x[:n], p, theta=[10000.0 ** (-2 * i / n) for i in range(n // 2)]), x[n:]])


def to_halves(x):
    return np.concatenate([x[0::2], x[1::2]])


def query(act):
    """The whole query [D] otherwise."""
    return {"query": lambda k, b, t, h: act(k, Kernel.query(k, b, t, h), b, t, h)}


def key(act):
    return {"key": lambda k, b, j: act(k, Kernel.row(k, b, j))}


def score(act):
    return {"score": lambda k, b, t, h, j: act(k, Kernel.score(k, b, t, h, j), b, t, h, j)}


def without(first, last):
    def act(k, row):
        row = row.copy()
        row[first(k) : last(k)] = 0
        return row

    return key(act)


@cache
def hadamard(n):
    """Sylvester's matrix, normalised: entry (i, j) is the parity of i and j."""
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]) / math.sqrt(n)


def tile_transposed(n):
    """Where element i of the transposed tiles comes from: 8 rows of 8 in each 64."""
    return [i - i % 64 + i % 64 % 8 * 8 + i % 64 // 8 if i < n // 64 * 64 else i for i in range(n)]


def chunk_repeated(k, row):
    row = row.copy()
    row[64:128] = row[:64]
    return row


def chunk_repeated_query(k, q, b, t, h):
    q = q.copy()
    q[64:128] = q[:64]
    return q


def tail_heads(k, x, p, b, t, h):
    block = 16 if k.H > 16 else 2
    over = (block - k.H % block) % block
    x = k.turn(x, p)
    return k.turn(x, p - 1) if t > 0 and h < over else x


def exp2(k, b, t, h, s, v):
    """Weights 2^(s - m) of natural scores."""
    if not s:
        return k.empty(b, t, h)
    m = max(s)
    w = [2.0 ** (x - m) for x in s]
    return sum(w[i] * v[i] for i in range(len(s))) / sum(w), k.lse(m, sum(w), len(s))


TEMPERATURE = {
    "exp2": {"softmax": exp2},
    "row-width": scale(lambda k, s: 1 / math.sqrt(k.D)),
    "value-width": scale(lambda k, s: 1 / math.sqrt(k.V)),
    "rope-width": scale(lambda k, s: 1 / math.sqrt(k.R)),
    "no-mscale": scale(lambda k, s: s / MSCALE**2),
    "mscale-once": scale(lambda k, s: s / MSCALE),
    "extra-mscale": scale(lambda k, s: s * MSCALE**2),
    "one": scale(lambda k, s: 1.0),
    "inverted": scale(lambda k, s: 1 / s),
    "twice": scale(lambda k, s: s * s),
    "hidden-width": scale(lambda k, s: s * math.sqrt(4.8)),
    "integer-root": scale(lambda k, s: 1 / int(1 / s)),
    "bf16": scale(lambda k, s: float(ml_dtypes.bfloat16(s))),
    "no-log2e": scale(lambda k, s: s * LN2),
    "log2e-twice": scale(lambda k, s: s / LN2),
    "half": scale(lambda k, s: s / 2),
    "double": scale(lambda k, s: s * 2),
    "factor-1.05": scale(lambda k, s: s * 1.05),
    "factor-0.95": scale(lambda k, s: s * 0.95),
    "factor-1.01": scale(lambda k, s: s * 1.01),
    "latent-only": key(lambda k, row: np.concatenate([row[: k.V], row[k.V :] / k.case.softmax_scale])),
    "rope-only": key(lambda k, row: np.concatenate([row[: k.V] / k.case.softmax_scale, row[k.V :]])),
}

ROPE = {
    **sides("pairing", lambda k, x, p: k.turn(x, p, interleaved=False)),
    **sides("table-layout", table_layout),
    **sides("doubled", lambda k, x, p: k.turn(x, 2 * p)),
    **sides("missing", lambda k, x, p: x),
    **sides("plus-one", lambda k, x, p: k.turn(x, p + 1), "q k"),
    **sides("minus-one", lambda k, x, p: k.turn(x, p - 1), "q k"),
    **sides("reversed", lambda k, x, p: k.turn(x, -p)),
    **sides("cos-sin-swapped", swapped),
    **sides("exponent", lambda k, x, p: k.turn(x, p, theta=[10000.0 ** (-i / k.R) for i in range(k.R // 2)]), "both k"),
    **sides("exponent-width",
            lambda k, x, p: k.turn(x, p, theta=[10000.0 ** (-2 * i / (3 * k.R)) for i in range(k.R // 2)]), "both k"),
    **sides("half", half, "both k"),
    **sides("position-bf16", lambda k, x, p: k.turn(x, float(ml_dtypes.bfloat16(p))), "both k"),
    **sides("position-f16", lambda k, x, p: k.turn(x, float(np.float16(p))), "both k"),
    **sides("base-500000", base(500000.0), "both k"),
    **sides("base-1e+06", base(1e6), "both k"),
    "rope.dropped": without(lambda k: k.V, lambda k: k.D),
    "rope.zero-rows": query(lambda k, q, b, t, h: np.where(np.arange(k.D) < k.V, q, 0) if b else q),
    "rope.first-head": query(lambda k, q, b, t, h: np.concatenate([q[: k.V], k.q[b, t, 0, k.V :]])),
    "rope.next-head": query(lambda k, q, b, t, h: np.concatenate([q[: k.V], k.q[b, t, (h + 1) % k.H, k.V :]])),
    "rope.head-before": query(lambda k, q, b, t, h: np.concatenate([q[: k.V], k.q[b, t, (h - 1) % k.H, k.V :]])),
    "rope.order-q": query(lambda k, q, b, t, h: np.concatenate([q[: k.V], to_halves(q[k.V :])])),
    "rope.order-k": key(lambda k, row: np.concatenate([row[: k.V], to_halves(row[k.V :])])),
    "rope.amplitude": key(lambda k, row: np.concatenate([row[: k.V], row[k.V :] * MSCALE**2])),
    "rope.tail-heads": rope(tail_heads),
    "rope.query-at-t": rope(lambda k, x, p, b, t, h: k.turn(x, t)),
    "rope.query-at-last": rope(lambda k, x, p, b, t, h: k.turn(x, k.lens[b] - 1)),
    "rope.query-of-request-0": rope(lambda k, x, p, b, t, h: k.turn(x, k.lens[0] - k.T + t)),
    "rope.new-plus-one": rope(lambda k, x, p, b, t, h: k.turn(x, p + 1),
                             lambda k, x, p, b: k.turn(x, p + 1 if p >= k.lens[b] - k.T else p)),
    "rope.window-at-first": rope(lambda k, x, p, b, t, h: k.turn(x, k.lens[b] - k.T),
                                lambda k, x, p, b: k.turn(x, min(p, k.lens[b] - k.T))),
    "rope.fragments-64": rope(None, lambda k, x, p, b: k.turn(x, p % 64)),
    "rope.page-local": rope(None, lambda k, x, p, b: k.turn(x, p % k.P)),
    "rope.key-flat": rope(None, lambda k, x, p, b: k.turn(x, p + sum(k.lens[:b]))),
    "rope.new-keys-missing": rope(None, lambda k, x, p, b: x if p >= k.lens[b] - k.T else k.turn(x, p)),
    "rope.outside-window": rope(None, lambda k, x, p, b: x if p < k.lens[b] - 128 else k.turn(x, p)),
}

def over_heads(k, b, t, h):
    """Each key is weighted by its share of e^s over the heads."""
    js = k.keys(b, t, h)
    if not js:
        return k.empty(b, t, h)
    out = np.zeros(k.V)
    for j in js:
        s = [k.score(b, t, other, j) for other in range(k.H)]
        out = out + k.value(b, j) / sum(math.exp(x - s[h]) for x in s)
    return out, Kernel.attend(k, b, t, h)[1]


SCORE = {
    "softmax-over-heads": {"attend": over_heads},
    "latent-dropped": without(lambda k: 0, lambda k: k.V),
    "last-32": without(lambda k: k.D - 32, lambda k: k.D),
    "last-16-latent": without(lambda k: max(k.V - 16, 0), lambda k: k.V),
    "one-element": without(lambda k: k.D - 1, lambda k: k.D),
    "first-chunk": without(lambda k: 0, lambda k: 64),
    "chunk-repeated": key(chunk_repeated) | query(chunk_repeated_query),
    "next-head": query(lambda k, q, b, t, h: q + k.q[b, t, h + 1] if h + 1 < k.H else q),
    "rope-first-keys": key(lambda k, row: np.concatenate([row[k.V :], row[: k.V]])),
    "rope-first-query": query(lambda k, q, b, t, h: np.concatenate([q[k.V :], q[: k.V]])),
    "halves-swapped": key(lambda k, row: np.concatenate([row[k.V // 2 : k.V], row[: k.V // 2], row[k.V :]])),
    "tile-transposed": key(lambda k, row: np.concatenate([row[: k.V][tile_transposed(k.V)], row[k.V :]])),
    "key-basis": key(lambda k, row: np.concatenate([hadamard(k.V) @ row[: k.V], row[k.V :]])),
    "negated": score(lambda k, s, *_: -s),
    "soft-cap-50": score(lambda k, s, *_: 50 * math.tanh(s / 50)),
    "soft-cap-30": score(lambda k, s, *_: 30 * math.tanh(s / 30)),
    "clipped-10": score(lambda k, s, *_: min(s, 10.0)),
    "distance-bias-0.00390625": score(lambda k, s, b, t, h, j: s + (j - k.lens[b] + 1) / 256),
}


def no_maximum(kind):
    """Weights e^s in `kind`, their sum exact."""

    def softmax(k, b, t, h, s, v):
        w = [float(kind(np.exp(x))) for x in s]
        z = sum(w)
        if z == 0:
            return k.empty(b, t, h)
        out = sum(w[i] * v[i] for i in range(len(w))) / z
        return out, k.unit * float(np.log(z)) if not math.isnan(z) else math.nan

    return {"softmax": softmax}


def above(limit):
    """Scores further than the limit below the maximum have no weight."""

    def softmax(k, b, t, h, s, v):
        return Kernel.softmax(k, b, t, h, [x if x >= max(s) - limit else -math.inf for x in s], v)

    return {"softmax": softmax}


def f16_scores(k, b, t, h, j):
    return float(np.float16(np.dot(k.query(b, t, h), k.key(b, j)))) * k.scale()


def maximum_from(limit):
    """The running maximum starts at the limit; weights in f32."""

    def softmax(k, b, t, h, s, v):
        m = max([limit, *s])
        w = [float(np.float32(np.exp(x - m))) for x in s]
        if not sum(w):
            return k.empty(b, t, h)
        return sum(w[i] * v[i] for i in range(len(w))) / sum(w), k.lse(m, sum(w), 0)

    return {"softmax": softmax}


RANGE = {
    "maximum-from--50000": maximum_from(-50000.0),
    "no-maximum-f32": no_maximum(np.float32),
    "no-maximum-f16": no_maximum(np.float16),
    "scores-bf16": score(lambda k, s, *_: float(ml_dtypes.bfloat16(s))),
    "scores-f16": {"score": f16_scores},
    "scores-e4m3": score(lambda k, s, *_: float(np.array(s).astype(ml_dtypes.float8_e4m3fn))),
    "weights-above-4": above(4),
    "weights-above-8": above(8),
}

WRONG = {
    **{f"temperature.{name}": steps for name, steps in TEMPERATURE.items()},
    **ROPE,
    **{f"score.{name}": steps for name, steps in SCORE.items()},
    **{f"range.{name}": steps for name, steps in RANGE.items()},
    "temperature.no-mscale + rope.pairing": TEMPERATURE["no-mscale"] | ROPE["rope.pairing"],
    "temperature.row-width + rope.pairing": TEMPERATURE["row-width"] | ROPE["rope.pairing"],
}
