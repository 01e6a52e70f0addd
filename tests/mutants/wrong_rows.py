# SPDX-License-Identifier: Apache-2.0
"""Wrong query rows, values, outputs, lse and empty rows in plain loops: name of the mutant -> steps of loops.Kernel."""

import math

import ml_dtypes
import numpy as np
from loops import Kernel
from wrong_scores import hadamard, tile_transposed

NAN = math.nan


def q_of(place):
    """The query of row place(k, b, t, h) of the flattened q; NaN where there is none."""

    def query(k, b, t, h):
        flat, at = k.q.reshape(-1, k.D), place(k, b, t, h)
        return flat[at] if at < len(flat) else np.full(k.D, NAN)

    return {"query": query}


def flat(k, b, t, h):
    return (b * k.T + t) * k.H + h


def stored(move):
    """Where the result of row (b, t, h) is taken from: move(k, b, t, h)."""

    def finish(k, out, lse):
        new_out, new_lse = out.copy(), lse.copy()
        for b, t, h in np.ndindex(lse.shape):
            source = move(k, b, t, h)
            new_out[b, t, h] = 0 if source is None else out[source]
            new_lse[b, t, h] = 0 if source is None else lse[source]
        return new_out, new_lse

    return {"finish": finish}


def misread(k, b, t, h):
    other = ml_dtypes.bfloat16 if k.case.q.dtype == np.float16 else np.float16
    q = k.case.q if k.case.q.ndim == 4 else k.case.q[:, None]
    return np.frombuffer(q[b, t, h].tobytes(), other).astype(float)


def table_row(k, b, t, h):
    """Everything but the query from request b T + t."""
    other = b * k.T + t
    if other >= k.B:
        return np.full(k.V, NAN), NAN
    n = k.lens[other]
    js = range(max(n - k.T + t + 1, 0) if k.case.causal else n)
    s = [k.scale() * float(k.query(b, t, h) @ k.row(other, j)) for j in js]
    return k.softmax(b, t, h, s, [k.value(other, j) for j in js])


def transposed(k, b, t, h):
    t_, h_ = (t * k.H + h) % k.T, (t * k.H + h) // k.T
    return b, t_, h_


def by_length(k, b, t, h):
    order = sorted(range(k.B), key=lambda i: -k.lens[i])
    return order[b], t, h


def heads_128(k, b, t, h):
    row, head = divmod(flat(k, b, t, h), 128)
    return (row // k.T, row % k.T, head) if head < k.H else None


def padded_tokens(k, b, t, h):
    padded = 4 if k.T == 3 else 1 << (k.T - 1).bit_length()
    other, token = divmod(b * k.T + t, padded)
    if token >= k.T:
        return np.zeros(k.V), 0.0
    n = k.lens[other]
    js = range(max(n - k.T + token + 1, 0) if k.case.causal else n)
    s = [k.scale() * float(k.query(b, t, h) @ k.row(other, j)) for j in js]
    return k.softmax(b, t, h, s, [k.value(other, j) for j in js])


QUERY = {
    "padded-tokens": {"attend": padded_tokens},
    "broadcast": stored(lambda k, b, t, h: (b, 0, h)),
    "first-token": q_of(lambda k, b, t, h: flat(k, b, 0, h)),
    "last-token": q_of(lambda k, b, t, h: flat(k, b, k.T - 1, h)),
    "tokens-reversed": q_of(lambda k, b, t, h: flat(k, b, k.T - 1 - t, h)),
    "table-row": {"attend": table_row},
    "heads-128": q_of(lambda k, b, t, h: (b * k.T + t) * 128 + h),
    "heads-64": q_of(lambda k, b, t, h: (b * k.T + t) * 64 + h),
    "request-0": q_of(lambda k, b, t, h: flat(k, 0, t, h)),
    "next-request": q_of(lambda k, b, t, h: flat(k, (b + 1) % k.B, t, h)),
    "head-0": q_of(lambda k, b, t, h: flat(k, b, t, 0)),
    "head-shift": q_of(lambda k, b, t, h: flat(k, b, t, (h + 1) % k.H)),
    "heads-reversed": q_of(lambda k, b, t, h: flat(k, b, t, k.H - 1 - h)),
    "heads-swapped": q_of(lambda k, b, t, h: flat(k, b, t, h ^ 1 if h ^ 1 < k.H else h)),
    "heads-interleaved": q_of(lambda k, b, t, h: flat(k, b, t, h // 2 if h % 2 == 0 else k.H // 2 + h // 2)),
    "heads-of-other-half": q_of(lambda k, b, t, h: flat(k, b, t, (h + k.H // 2) % k.H)),
    "head-mod-16": q_of(lambda k, b, t, h: flat(k, b, t, h % 16)),
    "transposed": q_of(lambda k, b, t, h: b * k.T * k.H + h * k.T + t),
    "misread": {"query": misread},
    "output-heads-128": stored(heads_128),
    "output-sorted": stored(by_length),
    "output-transposed": stored(transposed),
    "output-next-head": stored(lambda k, b, t, h: (b, t, (h - 1) % k.H)),
    "weights-next-head": {"finish": lambda k, out, lse: (out[:, :, [(h + 1) % k.H for h in range(k.H)]], lse)},
    "tail-heads": stored(lambda k, b, t, h: (b, t, h) if h < k.H - k.H % 16 else None),
    "tail-rows": stored(lambda k, b, t, h: (b, t, h) if t * k.H + h < 64 else None),
    "last-request": stored(lambda k, b, t, h: (b, t, h) if b < k.B - 1 else None),
}


def value(of):
    """The value of token j is of(k, b, j)."""
    return {"value": of}


def token(of):
    """The value of token j is that of token of(k, b, j); 0 where that is negative."""

    def value_of(k, b, j):
        i = of(k, b, j)
        return Kernel.value(k, b, i) if i >= 0 else np.zeros(k.V)

    return {"value": value_of}


def columns(act):
    """Each output row changed by act(k, o)."""

    def finish(k, out, lse):
        return np.array([act(k, o) for o in out.reshape(-1, k.V)]).reshape(out.shape), lse

    return {"finish": finish}


def fragments(k, out, lse):
    new = out.copy()
    for b, t, h, v in np.ndindex(out.shape):
        if h < k.H // 8 * 8 and v < k.V // 8 * 8:
            new[b, t, h, v] = out[b, t, h // 8 * 8 + v % 8, v // 8 * 8 + h % 8]
    return new, lse


def output_stride(k, out, lse):
    flat_out = [0.0] * out.size
    for r, o in enumerate(out.reshape(-1, k.V)):
        for c in range(k.V):
            if r * k.D + c < len(flat_out):
                flat_out[r * k.D + c] = o[c]
    return np.array(flat_out).reshape(out.shape), lse


def output_packed(k, out, lse):
    flat_out = [0.0] * (lse.size * k.D)
    flat_out[: out.size] = out.ravel()
    return np.array([flat_out[r * k.D : r * k.D + k.V] for r in range(lse.size)]).reshape(out.shape), lse


def lag(k, j):
    block, row = divmod(j, k.D)
    return block * k.V + row


def repeated(period):
    return columns(lambda k, o: [o[c - 1] if c % period == period - 1 else x for c, x in enumerate(o)])


VALUE = {
    **{f"repeated-{period}": repeated(period) for period in (2, 8, 16)},
    "row-end": value(lambda k, b, j: k.row(b, j)[k.D - k.V :]),
    "one-element-on": value(lambda k, b, j: k.row(b, j)[1 : k.V + 1]),
    "lag": token(lambda k, b, j: lag(k, j)),
    "lag-rows-lost": token(lambda k, b, j: lag(k, j) if j % k.D < k.V else -1),
    "page-frozen": token(lambda k, b, j: j % k.P),
    "page-skips": token(lambda k, b, j: 2 * (j // k.P) * k.P + j % k.P),
    "page-behind": token(lambda k, b, j: j - k.P),
    "tile-behind-64": token(lambda k, b, j: j - 64),
    "tile-behind-128": token(lambda k, b, j: j - 128),
    "tile-ahead-64": token(lambda k, b, j: j + 64 if j + 64 < k.lens[b] else -1),
    "next-row": token(lambda k, b, j: min(j + 1, k.lens[b] - 1)),
    "row-before": token(lambda k, b, j: j - 1),
    "reversed": token(lambda k, b, j: k.lens[b] - 1 - j),
    "slot-of-request-0": value(lambda k, b, j: k.row(0, j)[: k.V]),
    "output-packed": {"finish": output_packed},
    "output-stride": {"finish": output_stride},
    "first-half": columns(lambda k, o: [x if c < k.V // 2 else 0 for c, x in enumerate(o)]),
    "half-repeated": columns(lambda k, o: [o[c % (k.V // 2)] for c in range(k.V)]),
    "halves-swapped": columns(lambda k, o: [*o[k.V // 2 :], *o[: k.V // 2]]),
    "tile-transposed": columns(lambda k, o: o[tile_transposed(k.V)]),
    "fragments": {"finish": fragments},
    "basis": columns(lambda k, o: hadamard(k.V) @ o),
    "factor-0.75": columns(lambda k, o: 0.75 * o),
    "factor-2": columns(lambda k, o: 2 * o),
    "factor-1.02": columns(lambda k, o: 1.02 * o),
    "row-factor-1.21": {"row": lambda k, b, j: 1.21 * Kernel.row(k, b, j)},
}


def lse(of):
    """The lse of a row from its maximum, its sum and how many keys it sees, as it is stored."""
    return {"lse": of}


def placed(move):
    """The lse of row (b, t, h) is taken from move(k, b, t, h); None: its own."""

    def finish(k, out, lse):
        new = lse.copy()
        for b, t, h in np.ndindex(lse.shape):
            source = move(k, b, t, h)
            new[b, t, h] = lse[b, t, h] if source is None else lse[source]
        return out, new

    return {"finish": finish}


def next_to_empty(k, out, lse):
    lse = lse.copy()
    for b in range(k.B):
        if k.lens[b] == 0:
            lse[b + 1 if b + 1 < k.B else b - 1] = k.case.empty_lse
    return out, lse


def request_last(k, b, t, h):
    """Stored at [h, b T + t], read at [b, t, h]: of position (b T + t) H + h."""
    at = (b * k.T + t) * k.H + h
    row = at % (k.B * k.T)
    return row // k.T, row % k.T, at // (k.B * k.T)


LOG2E = 1 / math.log(2)
LSE = {
    "base-2": lse(lambda k, m, z, n: (m + math.log(z)) * LOG2E),
    "base-e": lse(lambda k, m, z, n: m + math.log(z)),
    "base-twice": lse(lambda k, m, z, n: (m + math.log(z)) * LOG2E**2),
    "mixed-m": lse(lambda k, m, z, n: m * LOG2E + math.log(z)),
    "mixed-l": lse(lambda k, m, z, n: m + math.log2(z)),
    "without-maximum": lse(lambda k, m, z, n: math.log(z) * k.unit),
    "maximum-only": lse(lambda k, m, z, n: m * k.unit),
    "unscaled-maximum": lse(lambda k, m, z, n: (m / k.scale() + math.log(z)) * k.unit),
    "maximum-scaled-twice": lse(lambda k, m, z, n: (m * k.scale() + math.log(z)) * k.unit),
    "negated": lse(lambda k, m, z, n: -(m + math.log(z)) * k.unit),
    "minus-maximum": lse(lambda k, m, z, n: (math.log(z) - m) * k.unit),
    "sum": lse(lambda k, m, z, n: z * math.exp(m)),
    "l-only": lse(lambda k, m, z, n: z),
    "log-left-out": lse(lambda k, m, z, n: (m + z) * k.unit),
    "mean": lse(lambda k, m, z, n: (m + math.log(z / n)) * k.unit),
    "zero": {"finish": lambda k, out, lse: (out, np.zeros(lse.shape))},
    "all-minus-inf": {"finish": lambda k, out, lse: (out, np.full(lse.shape, -math.inf))},
    "next-to-empty": {"finish": next_to_empty},
    "next-head": placed(lambda k, b, t, h: (b, t, (h - 1) % k.H)),
    "heads-first": placed(transposed),
    "request-last": placed(request_last),
    "first-token": placed(lambda k, b, t, h: (b, 0, h)),
}


def empty(out=None, of_lse=None):
    """What an empty row holds."""

    def row(k, b, t, h):
        return (np.zeros(k.V) if out is None else np.full(k.V, out)), k.case.empty_lse if of_lse is None else of_lse(k)

    return {"empty": row}


def row_above(k, out, lse):
    out = out.copy()
    for b in range(k.B):
        for t in range(k.T):
            if k.count(b, t, 0) == 0 and (b, t) != (0, 0):
                out[b, t] = out[(b, t - 1) if t else (b - 1, k.T - 1)]
    return out, lse


def work_shifted(k, out, lse):
    full = [b for b in range(k.B) if k.lens[b]]
    new_out, new_lse = np.zeros(out.shape), np.full(lse.shape, k.case.empty_lse)
    for place, b in enumerate(full):
        new_out[place], new_lse[place] = out[b], lse[b]
    return new_out, new_lse


def last_entry(k, b, t, h):
    """A page of keys through the last table entry where a request has none."""
    if k.lens[b]:
        return Kernel.attend(k, b, t, h)
    js = range(max(k.P - k.T + t + 1, 0) if k.case.causal else k.P)
    rows = [k.read(int(k.table[b, -1]) * k.stride + j * k.D * k.item) for j in js]
    return k.softmax(b, t, h, [k.scale() * float(k.query(b, t, h) @ row) for row in rows], [row[: k.V] for row in rows])


def mean(k, b, t, h):
    """A row that sees nothing of a request that has keys."""
    if k.count(b, t, h) or not k.lens[b]:
        return Kernel.attend(k, b, t, h)
    lowest = float(np.finfo(np.float32).min)
    n = k.lens[b]
    return sum(k.value(b, j) for j in range(n)) / n, lowest * k.unit + math.log(n) * k.unit


F32_MIN = float(np.finfo(np.float32).min)
EMPTY = {
    "nan": empty(NAN),
    "nan-lse": empty(NAN, lambda k: NAN),
    "lse-zero": empty(None, lambda k: 0.0),
    "lse-other-sign": empty(None, lambda k: -k.case.empty_lse),
    "lse-lowest": empty(None, lambda k: F32_MIN),
    "one": empty(1.0),
    "row-above": {"finish": row_above},
    "first-key": {"length": lambda k, b: max(k.lens[b], 1)},
    "last-entry": {"attend": last_entry},
    "mean": {"attend": mean},
    "work-shifted": {"finish": work_shifted},
}

WRONG = {
    f"{family}.{name}": steps
    for family, table in {"query": QUERY, "value": VALUE, "lse": LSE, "empty": EMPTY}.items()
    for name, steps in table.items()
}
