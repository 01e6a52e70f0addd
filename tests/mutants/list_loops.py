# SPDX-License-Identifier: Apache-2.0
"""Decode over lists of keys in plain loops, every step a method: a wrong kernel does one step otherwise.

    Lists(case).run()                                          {"out": [rows, H, V], "lse": [rows, H]}
    wrong(case, sink=lambda k, h: 0.0).run()                   all sinks 0

A key is (source, place, slot): source 0 or 1, the token or slot the list names, where it lies; slot None is nowhere,
"zero" a row of zeros. Nothing here is the package's but the numbers that a format's bytes stand for.
"""

import math

import numpy as np

from mla_oracle import formats


class Lists:
    def __init__(self, case):
        self.case = case
        self.H, self.D = case.q.shape[-2:]
        self.V, self.offset = case.head_dim_v, case.value_offset
        self.q = case.q.astype(np.float64).reshape(-1, self.H, self.D)
        if case.qo_indptr is None:
            T = case.q.shape[1] if case.q.ndim == 4 else 1
            self.starts = [T * b for b in range(len(case.q) + 1)]
        else:
            self.starts = [int(x) for x in case.qo_indptr]
        self.B = len(self.starts) - 1
        self.rows = [(b, t) for b in range(self.B) for t in range(self.starts[b + 1] - self.starts[b])]
        self.by_slot = case.topk_by == "slot"
        dense = case.cache_format is None
        self.KV = case.kv_cache.shape[2] if dense and case.kv_cache.ndim == 4 else 1
        self.caches = [self.cache("")] + ([self.cache("extra_")] if case.extra_kv_cache is not None else [])
        self.P = self.caches[0][1]
        self.unit = 1.0 if case.lse_base == "e" else 1 / math.log(2)
        self.bias_rows = None
        if case.bias is not None:
            per_head = case.bias.ndim == case.q.ndim
            flat = case.bias.astype(np.float64).reshape(len(self.rows), *((self.H,) if per_head else (1,)), -1)
            self.bias_rows = np.broadcast_to(flat, (len(self.rows), self.H, flat.shape[2]))

    def cache(self, prefix):
        """(blocks, block size, all rows [slots, KV, D])"""
        case, kv = self.case, getattr(self.case, f"{prefix}kv_cache")
        if case.cache_format is not None:
            names = ("kv_scale",) if prefix else ("kpe_cache", "kv_scale", "kpe_scale", "ckv_scale")
            tensors = {"kv_cache": kv} | {n: getattr(case, prefix + n) for n in names}
            tensors = {n: x for n, x in tensors.items() if x is not None}
            blocks, size, _ = formats.check(case.cache_format, tensors)
            b, o = (x.ravel() for x in np.indices((blocks, size)))
            return blocks, size, formats.exact(case.cache_format, tensors, b, o, block_size=size)[:, None]
        parts = [kv] + ([case.kpe_cache] if case.kpe_cache is not None and not prefix else [])
        rows = np.concatenate([p.astype(np.float64).reshape(p.shape[0] * p.shape[1], self.KV, -1) for p in parts], -1)
        return kv.shape[0], kv.shape[1], rows

    def tokens(self, b):
        return self.starts[b + 1] - self.starts[b]

    def length(self, b, source=0):
        lens = self.case.extra_seq_lens if source else self.case.seq_lens
        return self.caches[source][0] * self.caches[source][1] if lens is None else int(lens[b])

    def position(self, n):
        b, t = self.rows[n]
        return self.length(b) - self.tokens(b) + t

    # -- the list

    def index(self, n, source=0):
        name = ("topk_indices", "extra_topk_indices")[source]
        array = getattr(self.case, name)
        return [int(x) for x in array.reshape(len(self.rows), -1)[n]]

    def count(self, n, source=0):
        length = getattr(self.case, ("topk_length", "extra_topk_length")[source])
        if length is None:
            return len(self.index(n, source))
        of_request = self.case.q.ndim == 4 and length.ndim == 1 and self.case.qo_indptr is None
        return int(length[self.rows[n][0]] if of_request else length.reshape(-1)[n])

    def entries(self, n, source=0):
        """What a row's list names, before it is asked whether a row may see it."""
        most = self.length(self.rows[n][0], source)
        if (self.case.extra_topk_indices if source else self.case.topk_indices) is None:
            return list(range(most))
        return [i for i in self.index(n, source)[: self.count(n, source)] if 0 <= i < most]

    def window(self):
        one = [None if w in (None, -1) else w for w in (self.case.window_left, self.case.window_right)]
        return (*one, self.case.window_first)

    def causal(self):
        return self.case.causal and not self.by_slot

    def here(self, n):
        """The position that causality and window are measured from."""
        return self.position(n)

    def sees(self, n, place):
        left, right, first = self.window()
        i = self.here(n)
        near = (left is None or place >= i - left) and (right is None or place <= i + right)
        return self.by_slot or ((near or place < first) and (not self.causal() or place <= i))

    def hides(self, n, place):
        """Whether the bias hides a key from every head."""
        if self.bias_rows is None or not 0 <= place < self.bias_rows.shape[2]:
            return False
        return bool((self.bias_rows[n][:, place] == -math.inf).all())

    def slot(self, n, place, source=0):
        return self.lies(self.rows[n][0], place, source, self.caches[source][1])

    def lies(self, b, place, source, size):
        blocks, own, _ = self.caches[source]
        table = self.case.extra_block_table if source else self.case.block_table
        if place < 0:
            return None
        if table is None:
            slot = place // size * own + place % size
        else:
            page = int(table[b][place // size]) if place // size < table.shape[1] else -1
            slot = page * size + place % size if 0 <= page < blocks else -1
        return slot if 0 <= slot < blocks * own else None

    def main(self, n):
        places = [p for p in self.entries(n) if self.sees(n, p) and not self.hides(n, p)]
        return [(0, p, self.slot(n, p)) for p in places]

    def extra(self, n):
        return [(1, p, self.slot(n, p, 1)) for p in self.entries(n, 1)] if len(self.caches) > 1 else []

    def keys(self, n):
        return self.main(n) + self.extra(n)

    # -- one row

    def group(self, h):
        return h // (self.H // self.KV)

    def read(self, source, slot, g):
        if slot is None:
            return np.full(self.D, np.nan)
        return np.zeros(self.D) if slot == "zero" else self.caches[source][2][slot, g]

    def query(self, n, h):
        return self.q[n, h]

    def scale(self):
        return self.case.softmax_scale * (1.0 if self.case.q_scale is None else self.case.q_scale)

    def cap(self, s):
        return s if self.case.softcap is None else self.case.softcap * math.tanh(s / self.case.softcap)

    def bias(self, n, h, key):
        if key[0] or self.bias_rows is None or not 0 <= key[1] < self.bias_rows.shape[2]:
            return 0.0
        return float(self.bias_rows[n, h, key[1]])

    def score(self, dot, bias):
        return self.cap(dot * self.scale()) + bias

    def value(self, row):
        return row[self.offset : self.offset + self.V]

    def value_row(self, n, key, g):
        return self.read(key[0], key[2], g)

    def sink(self, h):
        return -math.inf if self.case.sinks is None else float(self.case.sinks[h])

    def sinks_in_lse(self):
        return self.case.sinks_in_lse

    def divide(self, weights, sink, top):
        """Z of out, from weights e^(s - top)."""
        return math.fsum(weights) + math.exp(min(sink - top, 700.0))

    def factor(self):
        return 1.0 if self.case.output_scale is None else self.case.output_scale

    def empty_lse(self, n, h):
        return self.case.empty_lse

    def row(self, n, h):
        g, keys = self.group(h), self.keys(n)
        scores = []
        for key in keys:
            with np.errstate(all="ignore"):
                dot = float(self.query(n, h) @ self.read(key[0], key[2], g))
            scores.append(self.score(dot, self.bias(n, h, key)))
        live = [j for j, s in enumerate(scores) if s != -math.inf]
        if not live:
            return np.zeros(self.V), self.empty_lse(n, h)
        if any(math.isnan(s) for s in scores):
            return np.full(self.V, np.nan), math.nan
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        sink = self.sink(h)
        out = sum(weights[j] * self.value(self.value_row(n, keys[j], g)) for j in live)
        total = math.fsum(weights)
        of_lse = self.divide(weights, sink, top) if self.sinks_in_lse() else total
        out = out / self.divide(weights, sink, top) * self.factor()
        if sink == math.inf:
            out, of_lse = np.zeros(self.V), math.inf if self.sinks_in_lse() else total
        return out, (top + (math.log(of_lse) if of_lse >= 0 else math.nan)) * self.unit

    def run(self):
        out, lse = np.zeros((len(self.rows), self.H, self.V)), np.zeros((len(self.rows), self.H))
        for n in range(len(self.rows)):
            for h in range(self.H):
                out[n, h], lse[n, h] = self.row(n, h)
        return self.finish({"out": out, "lse": lse})

    def finish(self, results):
        return results


def wrong(case, **steps):
    """A kernel that does these steps otherwise; each takes the kernel first."""
    return type("Wrong", (Lists,), steps)(case)
