# SPDX-License-Identifier: Apache-2.0
"""Wrong lists, windows, sinks, biases, layouts and scales in plain loops: mutant -> steps of list_loops.Lists."""

import math

import numpy as np
from list_loops import Lists

LOG2 = math.log(2)


def entries(of):
    """of(kernel, row, indices before the length, what the list named) -> places of the main cache."""

    def step(k, n, source=0):
        own = Lists.entries(k, n, source)
        if source or k.case.topk_indices is None:
            return own
        return of(k, n, k.index(n)[: k.count(n)])

    return {"entries": step}


def inside(k, n, places):
    return [p for p in places if 0 <= p < k.length(k.rows[n][0])]


def until(stop):
    def of(k, n, index):
        return inside(k, n, index[: next((j for j, i in enumerate(index) if stop(k, n, i)), len(index))])

    return entries(of)


def first(k, n):
    return k.starts[k.rows[n][0]]


def of_row(other):
    def of(k, n, index):
        m = other(k, n)
        return [p for p in k.index(m)[: k.count(m)] if 0 <= p < k.length(k.rows[m][0])]

    return entries(of)


def count_of(other):
    return entries(lambda k, n, index: inside(k, n, k.index(n)[: other(k, n)]))


def lies(of):
    return {"slot": lambda k, n, place, source=0: Lists.slot(k, n, place, 1) if source else of(k, n, place)}


def paged(size):
    return lies(lambda k, n, place: k.lies(k.rows[n][0], place, 0, size(k)))


def raw(k, slot):
    return slot if 0 <= slot < k.caches[0][0] * k.caches[0][1] else None


def zero_keys(k, n):
    index = k.index(n)[: k.count(n)]
    return Lists.keys(k, n) + [(0, -1, "zero")] * (len(index) - len(Lists.entries(k, n)))


def dense(k, n, source=0):
    return Lists.entries(k, n, 1) if source else list(range(k.length(k.rows[n][0])))


def dense_if_empty(k, n, source=0):
    own = Lists.entries(k, n, source)
    return own if source or own else dense(k, n)


def one_state(k, n):
    empty = not Lists.keys(k, n) and k.length(k.rows[n][0])
    return [(0, -1, "zero")] if empty else Lists.keys(k, n)


def whole(tile):
    return count_of(lambda k, n: k.count(n) // tile * tile or k.count(n))


def extra(of):
    return {"extra": lambda k, n: [key for key in of(k, n) if len(k.caches) > 1]}


def extra_unbounded(k, n):
    most = k.length(k.rows[n][0], 1)
    return [(1, p, k.slot(n, p, 1)) for p in k.index(n, 1) if 0 <= p < most]


def gathered(k, n, h):
    out, lse = Lists.row(k, n, h)
    bad = k.keys(n) and any(i < 0 for i in k.index(n)[: k.count(n)])
    return (out * np.nan if bad else out), lse


def separate(mean):
    """Each cache's softmax alone."""

    def row(k, n, h):
        parts = []
        for keys in (k.main(n), k.extra(n)):
            alone = type(k)(k.case)
            alone.keys = lambda n, keys=keys: keys
            parts.append((Lists.row(alone, n, h), bool(keys)))
        held = [part for part, there in parts if there]
        if not held:
            return Lists.row(k, n, h)
        return sum(out for out, _ in held) / (len(held) if mean else 1), held[0][1]

    return {"row": row}


TOPK = {
    "minus-one-as-first": entries(lambda k, n, index: [0 if i < 0 else i for i in index]),
    "minus-one-as-last": entries(lambda k, n, index: [k.length(k.rows[n][0]) - 1 if i < 0 else i for i in index]),
    "minus-one-as-zero-key": {"keys": zero_keys},
    "minus-one-gathered": {"row": gathered},
    "ends-at-hole": until(lambda k, n, i: not 0 <= i < k.length(k.rows[n][0])),
    "prefix-of-valid": entries(lambda k, n, index: inside(k, n, index[: len(inside(k, n, index))])),
    "length-ignored": count_of(lambda k, n: None),
    "length-plus-one": count_of(lambda k, n: k.count(n) + 1),
    "length-minus-one": count_of(lambda k, n: max(k.count(n) - 1, 0)),
    "length-of-first-token": count_of(lambda k, n: k.count(first(k, n))),
    "length-of-request-0": count_of(lambda k, n: k.count(0)),
    "length-by-row": count_of(lambda k, n: int(k.case.topk_length[min(n, k.B - 1)])),
    "duplicates-dropped": entries(lambda k, n, index: list(dict.fromkeys(inside(k, n, index)))),
    "cut-by-capacity": count_of(lambda k, n: min(k.count(n), len(k.index(n)) * 3 // 4)),
    "dense": {"entries": dense},
    "empty-as-dense": {"entries": dense_if_empty},
    "empty-as-zero-key": {"keys": one_state},
    "positions-as-slots": lies(lambda k, n, place: raw(k, place)),
    "slots-as-pages": lies(lambda k, n, place: raw(k, place * k.P)),
    "offsets-lost": lies(lambda k, n, place: k.lies(k.rows[n][0], place // k.P * k.P, 0, k.P)),
    "page-size-64": paged(lambda k: 64),
    "page-size-halved": paged(lambda k: k.P // 2),
    "page-size-1": paged(lambda k: 1),
    "outside-clamped": entries(lambda k, n, index: [min(i, k.length(k.rows[n][0]) - 1) for i in index if i >= 0]),
    "outside-read": entries(lambda k, n, index: [i for i in index if i >= 0]),
    "outside-as-first": entries(lambda k, n, index: [i if i < k.length(k.rows[n][0]) else 0 for i in index if i >= 0]),
    "causal-by-place": count_of(lambda k, n: min(k.count(n), max(k.position(n) + 1, 0))),
    "of-first-token": of_row(first),
    "of-row-0": of_row(lambda k, n: 0),
    "of-row-before": of_row(lambda k, n: max(n - 1, 0)),
    **{f"whole-tiles-{tile}": whole(tile) for tile in (64, 32, 8, 4)},
    "extra-ignored": extra(lambda k, n: []),
    "main-ignored": {"main": lambda k, n: []},
    "extra-in-main": {"extra": lambda k, n: [(1, p, k.slot(n, p)) for p in k.entries(n, 1)],
                      "read": lambda k, source, slot, g: Lists.read(k, 0, slot, g)},
    "extra-page-size": extra(lambda k, n: [(1, p, k.lies(k.rows[n][0], p, 1, k.P)) for p in k.entries(n, 1)]),
    "extra-length-ignored": extra(extra_unbounded),
    "extra-added": separate(False),
    "extra-averaged": separate(True),
}  # fmt: skip


def window(of):
    return {"window": lambda k: of(*Lists.window(k))}


def bounded(of):
    return {"sees": lambda k, n, place: Lists.sees(k, n, place) and of(k, n, place)}


def from_token(of):
    """The window from of(k, n), causality from the row's own position."""

    def sees(k, n, place):
        left, right, head = k.window()
        i = of(k, n)
        near = (left is None or place >= i - left) and (right is None or place <= i + right)
        return (near or place < head) and (not k.causal() or place <= k.position(n))

    return {"sees": sees}


def page_window(k, n, place):
    left, right, head = k.window()
    i = k.position(n)
    start = max(i - left, 0) // k.P * k.P
    seen = (place >= start and (right is None or place <= i + right)) or place < head
    return seen and (not k.causal() or place <= i)


def kept_twice(k, n):
    left, _, head = k.window()
    own = Lists.main(k, n)
    return own + [key for key in own if key[1] < head and key[1] >= k.position(n) - left]


def other_request(of):
    """Row n sees the keys of another request, at its place among that request's queries."""

    def main(k, n):
        b = of(k, n)
        if b == k.rows[n][0]:
            return Lists.main(k, n)
        own = min(k.length(b) - k.tokens(b) + n - k.starts[b], k.length(b) - 1)
        moved = type(k)(k.case)
        moved.here = lambda n: own
        places = [p for p in range(k.length(b)) if Lists.sees(moved, n, p)]
        return [(0, p, k.lies(b, p, 0, k.P)) for p in places]

    return {"main": main}


def here(of):
    return {"here": of}


def tokens_of(k, n, T):
    b, t = k.rows[n]
    return k.length(b) - T + t


def last(k, n):
    return k.length(k.rows[n][0]) - 1


SIGHT = {
    "causal-none": {"causal": lambda k: False},
    "causal-unwanted": {"causal": lambda k: True},
    "causal-strict": bounded(lambda k, n, place: place < k.position(n)),
    "causal-one-more": here(lambda k, n: k.position(n) + 1),
    "length-minus-one": bounded(lambda k, n, place: place < last(k, n)),
    "window-left-one-more": window(lambda left, right, head: (left + 1, right, head)),
    "window-left-one-less": window(lambda left, right, head: (left - 1, right, head)),
    "window-left-none": window(lambda left, right, head: (None, right, head)),
    "window-padded": window(lambda left, right, head: (math.ceil((left + 1) / 64) * 64 - 1, right, head)),
    "window-page": {"sees": page_window},
    "window-right-one-more": window(lambda left, right, head: (left, right + 1, head)),
    "window-right-one-less": window(lambda left, right, head: (left, right - 1, head)),
    "window-right-none": window(lambda left, right, head: (left, None, head)),
    "window-left-minus-one-as-0": window(lambda left, right, head: (0, right, head)),
    "window-right-minus-one-as-0": window(lambda left, right, head: (left, 0, head)),
    "window-symmetric": window(lambda left, right, head: (left, left, head)),
    "window-from-last": from_token(last),
    "window-from-first": from_token(lambda k, n: k.position(first(k, n))),
    "first-ignored": window(lambda left, right, head: (left, right, 0)),
    "first-one-more": window(lambda left, right, head: (left, right, head + 1)),
    "first-one-less": window(lambda left, right, head: (left, right, head - 1)),
    "first-twice": {"main": kept_twice},
    "ragged-padded": here(lambda k, n: tokens_of(k, n, max(k.tokens(b) for b in range(k.B)))),
    "ragged-next-length": here(lambda k, n: tokens_of(k, n, k.tokens((k.rows[n][0] + 1) % k.B))),
    "ragged-first-to-previous": other_request(
        lambda k, n: max(k.rows[n][0] - 1, 0) if k.rows[n][1] == 0 else k.rows[n][0]
    ),
    "ragged-even": other_request(lambda k, n: n * k.B // len(k.rows)),
    "query-of-first-token": {"query": lambda k, n, h: k.q[first(k, n), h]},
    "query-of-row-before": {"query": lambda k, n, h: k.q[max(n - 1, 0), h]},
}  # fmt: skip


def sink(of):
    return {"sink": lambda k, h: of(k, Lists.sink(k, h))}


def of_head(of):
    return {"sink": lambda k, h: Lists.sink(k, of(k, h))}


def many(count):
    return {"divide": lambda k, w, sink, top: math.fsum(w) + count * math.exp(sink - top)}


def lse_alone(k, n, h):
    with_sink, without = Lists(k.case), Lists(k.case)
    without.sink = lambda h: -math.inf
    return Lists.row(without, n, h)[0], Lists.row(with_sink, n, h)[1]


def zero_sink(k, own):
    return 0.0


def lost(k, n, h):
    out, lse = Lists.row(k, n, h)
    huge = Lists.sink(k, h) * math.log2(math.e) > 3.4028235e38
    return (out * np.nan if huge and k.keys(n) else out), lse


def score(of):
    return {"score": of}


SINK = {
    "missing": {"sink": lambda k, h: -math.inf},
    "twice": many(2),
    **{f"per-split-{count}": many(count) for count in (3, 4, 8)},
    "in-lse": {"sinks_in_lse": lambda k: True},
    "not-in-lse": {"sinks_in_lse": lambda k: False},
    "lse-alone": {"row": lse_alone},
    "base-e-as-2": {"divide": lambda k, w, sink, top: math.fsum(w) + 2 ** (sink - top / LOG2)},
    "log2e-twice": {"divide": lambda k, w, sink, top: math.fsum(w) + math.exp(sink / LOG2 - top)},
    "scaled": sink(lambda k, x: x * k.case.softmax_scale),
    "unscaled": sink(lambda k, x: x / k.case.softmax_scale),
    "negated": sink(lambda k, x: -x),
    "zero": sink(zero_sink),
    "without-maximum": {"divide": lambda k, w, sink, top: math.fsum(w) + math.exp(sink)},
    "linear": {"divide": lambda k, w, sink, top: math.fsum(w) + sink / math.exp(top)},
    "of-head-0": of_head(lambda k, h: 0),
    "of-next-head": of_head(lambda k, h: (h + 1) % k.H),
    "heads-reversed": of_head(lambda k, h: k.H - 1 - h),
    "on-empty-rows": {"empty_lse": lambda k, n, h: Lists.sink(k, h) * k.unit if not k.keys(n) else k.case.empty_lse},
    "overflow": {"row": lost},
}  # fmt: skip
CAP = {
    "missing": {"cap": lambda k, s: s},
    "twice": {"cap": lambda k, s: Lists.cap(k, Lists.cap(k, s))},
    "not-divided": {"cap": lambda k, s: k.case.softcap * math.tanh(s)},
    "not-multiplied": {"cap": lambda k, s: math.tanh(s / k.case.softcap)},
    "before-scale": score(lambda k, dot, bias: k.scale() * k.cap(dot) + bias),
    "clipped": {"cap": lambda k, s: max(-k.case.softcap, min(s, k.case.softcap))},
    "after-bias": score(lambda k, dot, bias: k.cap(dot * k.scale() + bias) if bias > -math.inf else -math.inf),
    "base-2": {"cap": lambda k, s: Lists.cap(k, s / LOG2) * LOG2},
}


def bias(of):
    """of(kernel, row, head, place) of keys of the main cache that are seen."""
    return {"bias": lambda k, n, h, key: 0.0 if key[0] else of(k, n, h, key[1])}


def table(k, n, h, place):
    return float(k.bias_rows[n, h, place]) if 0 <= place < k.bias_rows.shape[2] else 0.0


def changed(of):
    return {"bias": lambda k, n, h, key: of(k, Lists.bias(k, n, h, key))}


def unhidden(of):
    """Hidden keys are seen, with of(bias)."""
    return {"hides": lambda k, n, place: False, "bias": lambda k, n, h, key: of(Lists.bias(k, n, h, key))}


def by_place(k, n, h, key):
    if key[0]:
        return 0.0
    return table(k, n, h, k.keys(n).index(key))


def row_of_zeros(k, n, h):
    """Scores of hidden keys are 0 before anything is added."""
    alone = type(k)(k.case)
    hidden = {key: Lists.bias(k, n, h, key) == -math.inf for key in k.keys(n)}
    alone.query = lambda n, h: k.q[n, h]
    reads = Lists.read
    g = k.group(h)
    scores = []
    for key in k.keys(n):
        dot = float(k.q[n, h] @ reads(k, key[0], key[2], g))
        scores.append(0.0 if hidden[key] else k.cap(dot * k.scale()) + Lists.bias(k, n, h, key))
    if not scores:
        return np.zeros(k.V), k.case.empty_lse
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    out = sum(w * k.value(reads(k, key[0], key[2], g)) for w, key in zip(weights, k.keys(n), strict=True))
    return out / math.fsum(weights), (top + math.log(math.fsum(weights))) * k.unit


BIAS = {
    "missing": changed(lambda k, x: -math.inf if x == -math.inf else 0.0),
    "ignored": unhidden(lambda x: 0.0),
    "scaled": changed(lambda k, x: k.scale() * x),
    "unscaled": changed(lambda k, x: x / k.scale()),
    "base-2": changed(lambda k, x: x * LOG2),
    "log2e-twice": changed(lambda k, x: x / LOG2),
    "twice": changed(lambda k, x: x + x),
    "negated": changed(lambda k, x: x if x == -math.inf else -x),
    "heads-reversed": bias(lambda k, n, h, place: table(k, n, k.H - 1 - h, place)),
    "of-head-0": bias(lambda k, n, h, place: table(k, n, 0, place)),
    "of-first-token": bias(lambda k, n, h, place: table(k, first(k, n), h, place)),
    "of-row-0": bias(lambda k, n, h, place: table(k, 0, h, place)),
    "next-column": bias(lambda k, n, h, place: table(k, n, h, place + 1)),
    "by-place": {"bias": by_place},
    "by-slot": bias(lambda k, n, h, place: table(k, n, h, k.slot(n, place))),
    "hidden-as-zero": {"hides": lambda k, n, place: False, "row": row_of_zeros},
    "hidden-as-10000": unhidden(lambda x: -1e4 if x == -math.inf else x),
    "hidden-as-30": unhidden(lambda x: -30.0 if x == -math.inf else x),
    "hidden-as-1": unhidden(lambda x: 0.0 if x == -math.inf else x + 1),
}


def kpe(slot):
    """The rope part of the slot slot(k, own)."""

    def read(k, source, own, g):
        row = Lists.read(k, source, own, g).copy()
        cut = k.case.kv_cache.shape[-1]
        other = slot(k, own)
        row[cut:] = 0 if other is None else k.caches[0][2][other % (k.caches[0][0] * k.P), g][cut:]
        return row

    return {"read": read}


def kpe_first(k, source, own, g):
    row = Lists.read(k, source, own, g)
    cut = k.case.kv_cache.shape[-1]
    return np.concatenate([row[cut:], row[:cut]])


def turned(to_heads_first):
    def finish(k, results):
        B, T, H = k.case.q.shape[:3]
        lse = results["lse"].reshape(B, T, H)
        moved = np.empty_like(lse)
        for b in range(B):
            flat = [lse[b, t, h] for h in range(H) for t in range(T)] if to_heads_first else list(lse[b].ravel())
            for t in range(T):
                for h in range(H):
                    moved[b, t, h] = flat[t * H + h] if to_heads_first else flat[h * T + t]
        return {**results, "lse": moved.reshape(results["lse"].shape)}

    return {"finish": finish}


def latent_first(k, n, h):
    """q's rope elements, its first ones, meet the last elements of the row."""
    rope = k.offset
    return np.concatenate([k.q[n, h, rope:], k.q[n, h, :rope]])


LAYOUT = {
    "value-at-0": {"value": lambda k, row: row[: k.V]},
    "latent-first": {"query": latent_first, "value": lambda k, row: row[: k.V]},
    "kv-head-modulo": {"group": lambda k, h: h % k.KV},
    "kv-head-0": {"group": lambda k, h: 0},
    "kv-head-next": {"group": lambda k, h: (Lists.group(k, h) + 1) % k.KV},
    "kpe-of-page-0": kpe(lambda k, own: own % k.P),
    "kpe-of-next-page": kpe(lambda k, own: own + k.P),
    "kpe-of-next-slot": kpe(lambda k, own: own + 1),
    "kpe-missing": kpe(lambda k, own: None),
    "kpe-first": {"read": kpe_first},
    "lse-heads-first": turned(True),
    "lse-tokens-first": turned(False),
}
SCALE = {
    "q-missing": {"scale": lambda k: k.case.softmax_scale},
    "q-twice": {"scale": lambda k: k.case.softmax_scale * k.case.q_scale**2},
    "q-divided": {"scale": lambda k: k.case.softmax_scale / k.case.q_scale},
    "q-on-out": {"factor": lambda k: Lists.factor(k) * k.case.q_scale},
    "out-missing": {"factor": lambda k: 1.0},
    "out-twice": {"factor": lambda k: k.case.output_scale**2},
    "out-divided": {"factor": lambda k: 1 / k.case.output_scale},
}
WRONG = {
    f"{prefix}.{name}": steps
    for prefix, table_of in (
        ("topk", TOPK), ("sight", SIGHT), ("sink", SINK), ("cap", CAP), ("bias", BIAS), ("layout", LAYOUT),
        ("scale", SCALE),
    )
    for name, steps in table_of.items()
}  # fmt: skip
