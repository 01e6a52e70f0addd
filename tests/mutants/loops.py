# SPDX-License-Identifier: Apache-2.0
"""A decode kernel in plain loops, every step a method: a wrong kernel is a subclass that does one step otherwise.

    Kernel(case).run()                                         {"out": [B, T, H, V], "lse": [B, T, H]}
    wrong(case, scale=lambda k: 1.0).run()                     the scale left out

Nothing here is the package's: bytes are looked up one by one, sums are summed in order.
"""

import cmath
import math

import numpy as np


class Kernel:
    def __init__(self, case):
        self.case = case
        self.q = case.q.astype(np.float64)
        if self.q.ndim == 3:
            self.q = self.q[:, None]
        self.B, self.T, self.H, self.D = self.q.shape
        self.V = case.head_dim_v
        self.R = self.D - self.V
        self.P = case.kv_cache.shape[1]
        self.lens = [int(n) for n in case.seq_lens]
        self.table = case.block_table.astype(int)
        self.item = case.kv_cache.dtype.itemsize
        self.page_bytes = self.P * self.D * self.item
        self.stride = case.block_stride or self.page_bytes
        ids = range(len(case.kv_cache)) if case.page_ids is None else case.page_ids
        self.stored = {int(page): i for i, page in enumerate(ids)}
        self.blocks = case.num_blocks or len(case.kv_cache)
        self.unit = 1.0 if case.lse_base == "e" else 1 / math.log(2)
        self.cache = case.kv_cache.astype(np.float64)

    # -- memory

    def element(self, address):
        """The element at a byte address of the whole cache."""
        page, offset = divmod(address, self.stride)
        if not 0 <= page < self.blocks:
            return math.nan
        if page not in self.stored or offset >= self.page_bytes:
            return 0.0
        assert offset % self.item == 0
        return self.cache[self.stored[page]].reshape(-1)[offset // self.item]

    def read(self, address):
        """A row at a byte address; None is nowhere."""
        if address is None:
            return np.full(self.D, np.nan)
        page, offset = divmod(address, self.stride)
        if page in self.stored and offset % (self.D * self.item) == 0 and offset < self.page_bytes:
            return self.cache[self.stored[page], offset // (self.D * self.item)]
        return np.array([self.element(address + d * self.item) for d in range(self.D)])

    # -- where a token is

    def entry(self, b, i):
        """Block id of entry i, None past the table."""
        return int(self.table[b, i]) if 0 <= i < self.table.shape[1] else None

    def address(self, b, j):
        page = self.entry(b, j // self.P)
        return None if page is None else page * self.stride + j % self.P * self.D * self.item

    def slot(self, slot):
        """The byte address of a token slot of the cache."""
        return slot // self.P * self.stride + slot % self.P * self.D * self.item

    def row(self, b, j):
        return self.read(self.address(b, j))

    def value(self, b, j):
        return self.row(b, j)[: self.V]

    # -- scores

    def query(self, b, t, h):
        return self.q[b, t, h]

    def scale(self):
        return self.case.softmax_scale

    def key(self, b, j):
        return self.row(b, j)

    def score(self, b, t, h, j):
        return self.scale() * float(np.dot(self.query(b, t, h), self.key(b, j)))

    # -- which keys

    def length(self, b):
        return self.lens[b]

    def count(self, b, t, h):
        """How many keys a query token sees."""
        n = self.length(b)
        return max(n - self.T + t + 1, 0) if self.case.causal else n

    def keys(self, b, t, h):
        return list(range(self.count(b, t, h)))

    # -- rope: pairs (2i, 2i + 1), base 10000

    def position(self, b, t):
        return self.lens[b] - self.T + t

    def angles(self):
        return [10000.0 ** (-2 * i / self.R) for i in range(self.R // 2)]

    def turn(self, x, positions, interleaved=True, theta=None):
        """Rope elements [R] turned by positions[i] * theta[i], or by one position."""
        theta = self.angles() if theta is None else theta
        n = len(x) // 2
        y = np.array(x, float)
        for i in range(n):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + n)
            z = complex(x[a], x[b]) * cmath.exp(1j * positions * theta[i])
            y[a], y[b] = z.real, z.imag
        return y

    def unturned(self, x, position):
        return self.turn(x, -position)

    # -- softmax

    def attend(self, b, t, h):
        js = self.keys(b, t, h)
        return self.softmax(b, t, h, [self.score(b, t, h, j) for j in js], [self.value(b, j) for j in js])

    def softmax(self, b, t, h, s, v):
        live = [i for i in range(len(s)) if s[i] != -math.inf]
        if not live:
            return self.empty(b, t, h)
        m = max(s[i] for i in live) if not any(math.isnan(s[i]) for i in live) else math.nan
        w = [float(np.exp(s[i] - m)) for i in live]
        z = sum(w)
        return sum(w[n] * v[i] for n, i in enumerate(live)) / z, self.lse(m, z, len(live))

    def lse(self, m, z, n):
        return (m + math.log(z)) * self.unit if not math.isnan(z) else math.nan

    def empty(self, b, t, h):
        return np.zeros(self.V), self.case.empty_lse

    # -- all rows

    def finish(self, out, lse):
        return out, lse

    def run(self):
        out = np.zeros((self.B, self.T, self.H, self.V))
        lse = np.zeros((self.B, self.T, self.H))
        with np.errstate(all="ignore"):
            for b in range(self.B):
                for t in range(self.T):
                    for h in range(self.H):
                        out[b, t, h], lse[b, t, h] = self.attend(b, t, h)
            out, lse = self.finish(out, lse)
        if self.case.q.ndim == 3:
            out, lse = out[:, 0], lse[:, 0]
        return {"out": out, "lse": lse}


def wrong(case, **steps):
    """A kernel that does these steps otherwise."""
    return type("Wrong", (Kernel,), steps)(case)


def state(k, b, t, h, js):
    """(m, z, acc) of these keys, (-inf, 0, 0) of none."""
    s = [k.score(b, t, h, j) for j in js]
    if not js:
        return -math.inf, 0.0, np.zeros(k.V)
    m = max(s)
    w = [math.exp(x - m) for x in s]
    return m, sum(w), sum(w[i] * k.value(b, j) for i, j in enumerate(js))
