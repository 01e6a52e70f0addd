# SPDX-License-Identifier: Apache-2.0
"""Public bugs outside the log the mutants were made from, as wrong kernels: numpy code that shares nothing with them.

    PUBLIC["owner/repository#number"] = Bug(what was computed, its class, the kernel)

Causes are those that the threads state; (review) was found before it was merged. A kernel takes a case and gives its
results. Those of paged cases are `each(row)`: row(p, b, t, h) is out and lse of one query row, of `Paged`, which knows
where rows lie and rotates rope elements (pairs, base 10000). `cases` names what a bug needs that the suite has not.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LOG2E = 1.4426950408889634


class Bug(NamedTuple):
    words: str
    family: str  # "" where no class explains it
    run: Callable
    cases: tuple = ()


class Paged:
    """A paged case: q [B, T, H, D], rows of each request [n, D], V, R, what each query token sees."""

    def __init__(self, case):
        self.case, self.V, self.scale, self.block = case, case.head_dim_v, case.softmax_scale, case.kv_cache.shape[1]
        q = case.q if case.q.ndim == 4 else case.q[:, None]
        self.q, self.lens = q.astype(np.float64), [int(n) for n in case.seq_lens]
        self.B, self.T, self.H, self.D = q.shape
        ids = np.arange(len(case.kv_cache)) if case.page_ids is None else case.page_ids
        self.place = {int(page): i for i, page in enumerate(ids)}
        self.cache = case.kv_cache.astype(np.float64)
        self.table = case.block_table
        self.theta = 10000.0 ** (-np.arange((self.D - self.V) // 2) * 2 / (self.D - self.V))

    def row(self, b, j):
        return self.cache[self.place[int(self.table[b, j // self.block])], j % self.block]

    def rows(self, b, n=None):
        n = self.lens[b] if n is None else n
        return np.array([self.row(b, j) for j in range(n)]).reshape(n, self.D)

    def seen(self, b, t):
        return max(self.lens[b] - self.T + t + 1, 0) if self.case.causal else self.lens[b]

    def position(self, b, t):
        return self.lens[b] - self.T + t

    def turned(self, x, by, halves=False):
        """[..., D] with its rope elements turned by the angles `by` [...] x theta."""
        angle = np.asarray(by, float)[..., None] * self.theta
        r, half = x[..., self.V :], len(self.theta)
        a, b = (r[..., :half], r[..., half:]) if halves else (r[..., 0::2], r[..., 1::2])
        first, second = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        y = np.concatenate([first, second], -1) if halves else np.stack([first, second], -1).reshape(r.shape)
        return np.concatenate([x[..., : self.V], y], -1)

    def attend(self, q, keys, values=None):
        """out [V] and lse of one query [D] over keys [n, D]."""
        if not len(keys):
            return np.zeros(self.V), self.case.empty_lse
        s = keys @ q * self.scale
        e = np.exp(s - s.max())
        return e / e.sum() @ (keys[:, : self.V] if values is None else values), self.lse(s.max() + np.log(e.sum()))

    def lse(self, natural):
        return natural * (LOG2E if self.case.lse_base == "2" else 1)


def stored(case, out, lse):
    shape = case.q.shape[:-1]
    return {"out": out.reshape(*shape, -1).astype(np.float32), "lse": lse.reshape(shape).astype(np.float32)}


def each(row):
    def run(case):
        p = Paged(case)
        out, lse = np.zeros((p.B, p.T, p.H, p.V)), np.zeros((p.B, p.T, p.H))
        with np.errstate(all="ignore"):
            for b, t, h in np.ndindex(lse.shape):
                out[b, t, h], lse[b, t, h] = row(p, b, t, h)
        return stored(case, out, lse)

    return run


def keys(change):
    """Attention of the right query over change(p, b, t) [n, D]."""
    return each(lambda p, b, t, h: p.attend(p.q[b, t, h], change(p, b, t)))


def queries(change):
    """Attention of change(p, b, t, h) [D] over the right keys."""
    return each(lambda p, b, t, h: p.attend(change(p, b, t, h), p.rows(b)[: p.seen(b, t)]))


def both(query, key):
    """Attention of query(p, q, position) over key(p, keys, positions, b); rope elements are rotated already."""

    def row(p, b, t, h):
        k = p.rows(b)[: p.seen(b, t)]
        return p.attend(query(p, p.q[b, t, h], p.position(b, t)), key(p, k, np.arange(len(k)), b))

    return each(row)


def streamed(step, end=lambda acc, z: acc / z):
    """One key at a time: (m, z, acc) <- step(m, z, acc, s, v)."""

    def row(p, b, t, h):
        k = p.rows(b)[: p.seen(b, t)]
        if not len(k):
            return np.zeros(p.V), p.case.empty_lse
        m, z, acc = -math.inf, 0.0, np.zeros(p.V)
        for s, v in zip(k @ p.q[b, t, h] * p.scale, k[:, : p.V], strict=True):
            m, z, acc = step(m, z, acc, s, v)
        return end(acc, z), p.lse(m + math.log(z))

    return each(row)


def never_corrected(m, z, acc, s, v):
    top = max(m, s)
    w = math.exp(s - top)
    return top, z + w, acc + w * v


def divided_each_time(m, z, acc, s, v):
    top = max(m, s)
    old, w = math.exp(m - top), math.exp(s - top)
    total = z * old + w
    return top, total, (acc * old + w * v) / total


def inverted_for_acc(m, z, acc, s, v):
    top = max(m, s)
    old, w = math.exp(m - top), math.exp(s - top)
    return top, z * old + w, (acc / old if z else acc) + w * v


def tiles_of_four(p, b, t, h):
    """Maxima that are scaled, scaled once more where the state is corrected."""
    k = p.rows(b)[: p.seen(b, t)]
    m, z, acc = -math.inf, 0.0, np.zeros(p.V)
    for first in range(0, len(k), p.block):
        s = k[first : first + p.block] @ p.q[b, t, h] * p.scale
        top = max(m, s.max())
        old = math.exp((m - top) * p.scale) if z else 0.0
        w = np.exp(s - top)
        m, z, acc = top, z * old + w.sum(), acc * old + w @ k[first : first + p.block, : p.V]
    return (acc / z, p.lse(m + math.log(z))) if z else (np.zeros(p.V), p.case.empty_lse)


def from_minus_50000(p, b, t, h):
    """The running maximum starts at -5e4, f32."""
    k = p.rows(b)[: p.seen(b, t)]
    s = k @ p.q[b, t, h] * p.scale
    m = max(-5e4, s.max(initial=-np.inf))
    w = np.exp(s - m).astype(np.float32)
    return (w @ k[:, : p.V] / w.sum(), p.lse(m + np.log(w.sum()))) if w.sum() else (np.zeros(p.V), -math.inf)


def less_ten(p, b, t, h):
    """e^(s - 10) in f32: 10 for the maximum, whatever the scores."""
    k = p.rows(b)[: p.seen(b, t)]
    w = np.exp((k @ p.q[b, t, h] * p.scale - 10).astype(np.float32))
    return (w @ k[:, : p.V] / w.sum(), p.lse(10 + np.log(w.sum()))) if len(k) else (np.zeros(p.V), p.case.empty_lse)


def flat_rows(p, start, n):
    """n rows of the cache as one array of rows, from row `start` on."""
    return p.cache.reshape(-1, p.D)[start : start + n]


def top_left(p, b, t):
    return p.rows(b)[: min(t + 1, p.lens[b])] if p.lens[b] else p.rows(b)


def zero_tail(p, b, t):
    """Keys past the length, up to a multiple of 64, are zeros and count."""
    k = p.rows(b)[: p.seen(b, t)]
    return np.concatenate([k, np.zeros((-p.lens[b] % 64, p.D))]) if len(k) else k


def padded_tokens(case):
    """q and out are packed [B T], and indexed as if a request had 1, 2, 4, ... tokens; what is not written stays 0."""
    p = Paged(case)
    q, tokens = p.q.reshape(p.B * p.T, p.H, p.D), 1 << (p.T - 1).bit_length()
    out, lse = np.zeros((p.B * p.T, p.H, p.V)), np.zeros((p.B * p.T, p.H))
    for b, t in np.ndindex(p.B, p.T):
        i = b * tokens + t
        for h in range(p.H if i < len(q) else 0):
            out[i, h], lse[i, h] = p.attend(q[i, h], p.rows(b)[: p.seen(b, t)])
    return stored(case, out, lse)


def window_at_first(p, b, t, h):
    """The T newest tokens, queries and keys, at the position of the first of them."""
    k = p.rows(b)[: p.seen(b, t)]
    back = np.maximum(np.arange(len(k)) - (p.lens[b] - p.T), 0)
    return p.attend(p.turned(p.q[b, t, h], -t), p.turned(k, -back))


def draft_ahead(p, b, t, h):
    """The newest token, query and key, one position on."""
    k = p.rows(b)[: p.seen(b, t)]
    return p.attend(p.turned(p.q[b, t, h], 1), p.turned(k, (np.arange(len(k)) >= p.lens[b] - p.T) * 1.0))


def first_prefix(p, b, t):
    """4 splits of floor(n / 4) keys, each the first of them."""
    return p.rows(b)[: p.seen(b, t)][: max(p.lens[b] // 4, 1)]


def whole_last_page(p, b, t):
    n = p.seen(b, t)
    return p.rows(b, -(-n // p.block) * p.block)


def not_written(p, b, t):
    """The rows of the T newest tokens went elsewhere: what is there is zeros."""
    k = p.rows(b)[: p.seen(b, t)].copy()
    k[max(p.lens[b] - p.T, 0) :] = 0
    return k


def packed_out(case):
    """Rows of out are written V apart to a buffer in which they are D apart."""
    p = Paged(case)
    right = each(lambda p, b, t, h: p.attend(p.q[b, t, h], p.rows(b)[: p.seen(b, t)]))(case)
    buffer = np.zeros((p.B * p.T * p.H, p.D), np.float32)
    buffer.reshape(-1)[: right["out"].size] = right["out"].ravel()
    return {"out": buffer[:, : p.V].reshape(right["out"].shape), "lse": right["lse"]}


def fragments(case):
    """Of 16 keys, the second eight of row g and the first eight of row g + 8 are exchanged in P."""
    p = Paged(case)
    out, lse = np.zeros((p.B, p.T, p.H, p.V)), np.zeros((p.B, p.T, p.H))
    for b, t in np.ndindex(p.B, p.T):
        k = p.rows(b)[: p.seen(b, t)]
        s = p.q[b, t] @ k.T * p.scale
        w = np.exp(s - s.max(-1, keepdims=True))
        total = w.sum(-1)
        w = np.concatenate([w, np.zeros((p.H, -len(k) % 16))], 1)
        for g in (h for h in range(p.H) if h % 16 < 8 and h + 8 < p.H):
            for first in range(0, w.shape[1], 16):
                mine, other = slice(first + 8, first + 16), slice(first, first + 8)
                w[g, mine], w[g + 8, other] = w[g + 8, other].copy(), w[g, mine].copy()
        out[b, t] = w[:, : len(k)] @ k[:, : p.V] / total[:, None]
        lse[b, t] = s.max(-1) + np.log(total)
    return stored(case, out, lse)


def dense(w_uk=lambda w: w, mask=lambda i, j: j <= i):
    """Absorbed attention with another w_uk [H, P, L], or another mask."""

    def run(case):
        q, q_pe, c, k_pe, uk, uv = (
            x.astype(np.float64) for x in (case.q_nope, case.q_pe, case.c_kv, case.k_pe, case.w_uk, case.w_uv)
        )
        a = np.einsum("thp,hpl->thl", q, w_uk(uk))
        scale = case.softmax_scale or (q.shape[-1] + q_pe.shape[-1]) ** -0.5
        s = (np.einsum("thl,jl->thj", a, c) + np.einsum("thr,jr->thj", q_pe, k_pe)) * scale
        i, j = np.arange(len(q))[:, None, None] + len(c) - len(q), np.arange(len(c))
        s = np.where(mask(i, j), s, -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        latent = np.einsum("thj,jl->thl", e / e.sum(-1, keepdims=True), c)
        return {"out": np.einsum("thl,hvl->thv", latent, uv).astype(np.float32)}

    return run


def unscaled_rows(w):
    """Head h starts h P elements into w_uk, not h P rows."""
    H, P, L = w.shape
    return np.stack([w.reshape(-1)[h * P : h * P + P * L].reshape(P, L) for h in range(H)])


def merge(weights, rows=lambda out, s: out[s]):
    """out = sum_s w_s rows(out, s) / sum w, (w, top) = weights(natural lse); a state without weight is not touched."""

    def run(case):
        out, lse = case.partial_out.astype(np.float64), case.partial_lse.astype(np.float64)
        unit = math.log(2) if case.lse_base == "2" else 1.0
        with np.errstate(all="ignore"):
            w, top = weights(lse * unit)
            total = w.sum(0)
            added = (np.where(w[s][..., None] == 0, 0, w[s][..., None] * rows(out, s)) for s in range(len(out)))
            joined = np.where((total == 0)[..., None], 0, sum(added) / total[..., None])
            stored_lse = np.where(total == 0, case.empty_lse, (top + np.log(total)) / unit)
        return {"out": joined.astype(np.float32), "lse": stored_lse.astype(np.float32)}

    return run


def right_weights(lse):
    lse = np.where(np.isinf(lse), -np.inf, lse)
    top = lse.max(0)
    return np.exp(lse - np.where(top == -np.inf, 0, top)), top


def infinite_weights(lse):
    """-inf is no weight, +inf is one."""
    top = lse.max(0)
    return np.exp(lse - np.where(top == -np.inf, 0, top)), top


def suffix_by_prefix_strides(out, s):
    """Rows of the states after the first are read 3/2 V apart, as those of a padded buffer."""
    flat, V = out[s].reshape(-1, out.shape[-1]), out.shape[-1]
    if s == 0:
        return out[s]
    at = np.arange(len(flat))[:, None] * (3 * V // 2) + np.arange(V)
    return np.where(at < flat.size, flat.reshape(-1)[np.minimum(at, flat.size - 1)], 0).reshape(out[s].shape)


def append(slot):
    """Rows at slot(case, i)."""

    def run(case):
        cache = case.kv_cache.copy()
        flat = cache.reshape(-1, cache.shape[-1])
        for i, at in enumerate(case.slot_mapping):
            to = slot(case, int(at))
            if at >= 0 and 0 <= to < len(flat):
                flat[to] = np.concatenate([case.c_kv[i], case.k_pe[i]])
        return {"kv_cache": cache}

    return run


MSCALE = 0.1 * math.log(40) + 1
UNTURNED = (lambda p, q, at: p.turned(q, -at), lambda p, k, at, b: p.turned(k, -at))
DENSE = ("absorbed:heads=3,nope=24,rope=8,value=16,rank=32,queries=3,cached=40",)
TALL = ("paged:heads=16,row=20,value=12,scale=0.3,lens=40+9+70,block=16",)
FAR = ("paged:heads=3,row=20,value=12,scale=30000,lens=1+1+2+1,block=4",)
MERGED = ("merge:states=3,rows=9,empty_lse=inf",)
RIGHT = {
    "paged": queries(lambda p, b, t, h: p.q[b, t, h]),
    "absorbed": dense(),
    "merge": merge(right_weights),
    "append": append(lambda case, at: at),
}
PUBLIC = {
    "paiml/aprender#2753": Bug(
        "the correction e^(m_old - m_new) is 1 at every key: old and new maximum are one register",
        "missing rescale", streamed(never_corrected)),
    "1bit-MONSTER/1bit-MONSTER#495": Bug(
        "the accumulator is divided by the running sum at every key", "wrong normalisation",
        streamed(divided_each_time, lambda acc, z: acc)),
    "Dao-AILab/flash-attention#991": Bug(
        "line 10 of the paper's algorithm 1 as printed: acc divided by e^(m_old - m_new)",
        "wrong rescale", streamed(inverted_for_acc)),
    "tile-ai/TileOPs#1511": Bug("maxima that are scaled are scaled again in the correction (review)",
                                "wrong rescale", each(tiles_of_four)),
    "flashinfer-ai/flashinfer#4267": Bug("the running maximum starts at -5e4: rows below it are zeros",
                                         "softmax range", each(from_minus_50000), FAR),
    "HabanaAI/vllm-fork#275": Bug("10 taken for the maximum: e^(s - 10) overflows", "softmax range", each(less_ten)),
    "kekzl/imp#880": Bug("cos and sin times mscale, for q and k: the rope part of the scores times mscale^2",
                         "scale of one part",
                         queries(lambda p, b, t, h: p.q[b, t, h] * np.where(np.arange(p.D) < p.V, 1, 1.261**2))),
    "vllm-project/vllm#48658": Bug("1/sqrt of the latent row's width", "uniform temperature",
                                   queries(lambda p, b, t, h: p.q[b, t, h] * p.D**-0.5 / p.scale)),
    "vllm-project/tpu-inference#521": Bug("YaRN's mscale^2 left out of the scale", "uniform temperature",
                                          queries(lambda p, b, t, h: p.q[b, t, h] / MSCALE**2)),
    "sgl-project/sglang#18396": Bug("k_scale of a checkpoint, 0.06, in the scores of a cache that is not quantised",
                                    "uniform temperature", queries(lambda p, b, t, h: p.q[b, t, h] * 0.06)),
    "golang-design/accel#10": Bug("a page table is given, and the cache read as if it were one run", "table entry",
                                  keys(lambda p, b, t: flat_rows(p, 0, p.seen(b, t)))),
    "tanishqkumar/ssd#23": Bug("the paged cache read as packed requests: request b after those before it",
                               "table entry",
                               keys(lambda p, b, t: flat_rows(p, sum(p.lens[:b]), p.seen(b, t)))),
    "gittensor-ai-lab/sparkinfer#3": Bug(
        "query t sees keys 0 .. t (also onnx/onnx#8068, jax-ml/jax#24495)", "causal bound", keys(top_left)),
    "flashinfer-ai/flashinfer#5090": Bug("keys past the length are zeros in the last tile of 64, and count",
                                         "pad lanes in denominator", keys(zero_tail)),
    "hw-native-sys/simpler#72": Bug("the last page's scores are not masked", "length metadata", keys(whole_last_page)),
    "tile-ai/tilelang#2010": Bug("every split takes the first floor(n / splits) keys (review)", "combine coverage",
                                 keys(first_prefix)),
    "flashinfer-ai/flashinfer#4059": Bug("packed q and out indexed with a padded number of tokens",
                                         "query row mapping", padded_tokens),
    "sgl-project/sglang#25015": Bug("draft positions counted on before they are used: the newest token one further",
                                    "position off by one", each(draft_ahead)),
    "jundot/omlx#2363": Bug("all tokens of a window at the position of the first", "wrong position",
                            each(window_at_first)),
    "RobertCsordas/moeut#6": Bug("the query's offset taken before the cache is joined: token t at position t",
                                 "wrong position",
                                 each(lambda p, b, t, h: p.attend(p.turned(p.q[b, t, h], t - p.position(b, t)),
                                                                  p.rows(b)[: p.seen(b, t)]))),
    "MemTensor/MemOS#2315": Bug("joined fragments of 8 keys keep the positions they had alone", "wrong position",
                                both(lambda p, q, at: q, lambda p, k, at, b: p.turned(k, at % 8 - at))),
    "sqliteai/warp#27": Bug("rope elements are never rotated", "missing rotation", both(*UNTURNED)),
    "hw-native-sys/pypto-lib#244": Bug(
        "halves rotated where pairs are interleaved", "rope pairing",
        both(lambda p, q, at: p.turned(p.turned(q, -at), at, True),
             lambda p, k, at, b: p.turned(p.turned(k, -at), at, True))),
    "NVIDIA/TensorRT-LLM#17110": Bug("rows of a verify step are written to the capture's blocks", "rows not written",
                                     keys(not_written)),
    "vllm-project/vllm#18807": Bug("merged rows stored packed in a padded buffer", "stride ignored", packed_out),
    "kekzl/imp#352": Bug("registers of P in the wrong order: weights of rows g and g + 8 exchanged", "",
                         fragments, TALL),
    "unslothai/unsloth-zoo#963": Bug("a padding mask takes the place of the causal one", "no causal bound",
                                     dense(mask=lambda i, j: j >= 0), DENSE),
    "1bit-MONSTER/1bit-MONSTER#2451": Bug("head h starts h P elements into the weights, not rows", "upstream GEMM",
                                          dense(unscaled_rows), DENSE),
    "1bit-MONSTER/1bit-MONSTER#109": Bug(
        "weights [out, in] read as [in, out]", "upstream GEMM",
        dense(lambda w: w.reshape(len(w), w.shape[2], w.shape[1]).swapaxes(1, 2)), DENSE),
    "vllm-project/vllm#15492": Bug("an empty state's lse of +inf is a weight: inf - inf", "-inf merge",
                                   merge(infinite_weights), MERGED),
    "local-inference-lab/vllm#17": Bug("states after the first read with the strides of the first", "",
                                       merge(right_weights, suffix_by_prefix_strides), MERGED),
    "vllm-project/vllm#54498": Bug("slots from positions that count an image's tokens less: 2 behind",
                                   "writer corruption", append(lambda case, at: at - 2),
                                   ("append:rank=16,rope=4,tokens=21",)),
}  # fmt: skip
