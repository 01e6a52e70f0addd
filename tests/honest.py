# SPDX-License-Identifier: Apache-2.0
"""Honest kernels in plain numpy that share no code with the package's emulator.

    found = over_rows(case, online(24, "bf16", split=3), out="bf16")        # {"out", "lse"}, as a kernel stores them

A kernel takes q [H, D] and the rows [n, D] one query sees, f32, and returns (out [H, V], lse [H] natural). What it
rounds is in its arguments; declared.py knows what known kernels round.
"""

import ml_dtypes
import numpy as np

NARROW = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
}


def rows_of(case, b):
    """The latent rows [n, D] of request b, f32."""
    block = case.kv_cache.shape[1]
    table = case.block_table[b]
    if case.page_ids is not None:
        where = {int(page): i for i, page in enumerate(case.page_ids)}
        table = np.array([where.get(int(page), -1) for page in table])
    j = np.arange(case.seq_lens[b])
    return case.kv_cache[table[j // block], j % block].astype(np.float32)


def over_rows(case, kernel, out="f32", lse="f32", inputs=None):
    """Results of `kernel` for every query token, its q and rows narrowed to `inputs`, stored as `out` and `lse`."""
    q = case.q if case.q.ndim == 4 else case.q[:, None]
    B, T, H, _ = q.shape
    outs, lses = np.zeros((B, T, H, case.head_dim_v)), np.full((B, T, H), -np.inf)
    for b in range(B):
        rows = narrowed(rows_of(case, b), inputs)
        for t in range(T):
            n = len(rows) - (T - 1 - t if case.causal else 0)
            if n > 0:
                query = narrowed(q[b, t].astype(np.float32), inputs)
                outs[b, t], lses[b, t] = kernel(query, rows[:n], case.head_dim_v, np.float32(case.softmax_scale))
    if case.lse_base == "2":
        lses = lses / np.log(2)
    lses = np.where(lses == -np.inf, case.empty_lse, lses)
    shape = case.q.shape[:-1]
    return {
        "out": outs.astype(np.float32).astype(NARROW[out]).reshape(*shape, -1),
        "lse": lses.astype(np.float32).astype(NARROW[lse]).reshape(shape),
    }


def narrowed(x, name):
    """x as `name` holds it; None: as it is."""
    if name == "tf32":  # 13 bits less, half of the smallest one that is left added before, ties to even
        bits = x.view(np.int32).astype(np.int64)
        return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).astype(np.uint32).view(np.float32)
    if name == "bf16x2":
        return narrowed(x, "bf16") + narrowed(x - narrowed(x, "bf16"), "bf16")
    return x if name is None else x.astype(NARROW[name]).astype(np.float32)


# ---- how products are summed: (sum so far [H, N], a [H, n], b [n, N]) -> [H, N]


def plain(total, a, b):
    return total + a @ b


def truncated(total, a, b):
    """As tensor cores may: 16 products exactly, their sum with what was there cut to f32."""
    for j in range(0, a.shape[1], 16):
        exact = total + a[:, j : j + 16].astype(np.float64) @ b[j : j + 16].astype(np.float64)
        total = exact.astype(np.float32)
        total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
    return total


def half(total, a, b):
    """Tensor cores whose accumulator is f16."""
    for j in range(0, a.shape[1], 16):
        total = narrowed(total + a[:, j : j + 16] @ b[j : j + 16], "f16")
    return total


# ---- exponentials

FIFTH = np.polynomial.Chebyshev.interpolate(np.exp, 5, [-0.35, 0.35]).convert(kind=np.polynomial.Polynomial).coef


def exp_polynomial(x):
    """A power of two times a polynomial of degree five, in f32: within 3 ULP, and 1 at 0."""
    x = np.maximum(x, np.float32(-87))
    whole = np.rint(x * np.float32(1.44269504))
    rest = (x - whole * np.float32(0.693359375)) + whole * np.float32(2.12194440e-4)
    found = np.zeros_like(x)
    for coefficient in (*FIFTH[:0:-1].astype(np.float32), np.float32(1)):
        found = found * rest + coefficient
    return np.ldexp(found, whole.astype(np.int32))


# ---- kernels


def two_pass(p="f32", sum_rounded=False):
    """Scores, softmax relative to the maximum, weights rounded to p."""

    def kernel(q, rows, V, scale):
        s = (q @ rows.T) * scale
        top = s.max(-1, keepdims=True)
        e = np.exp(s - top)
        w = narrowed(e, p)
        total = (w if sum_rounded else e).sum(-1, keepdims=True)
        return (w @ rows[:, :V]) / total, (top + np.log(total))[:, 0]

    return kernel


def eager(p="f32", scores="f32"):
    """As frameworks write it: softmax in f32, its result rounded, then the product."""

    def kernel(q, rows, V, scale):
        s = narrowed(narrowed(np.einsum("hd,nd->hn", q, rows), scores) * scale, scores)
        top = s.max(-1, keepdims=True)
        e = np.exp(s - top)
        total = e.sum(-1, keepdims=True)
        return np.einsum("hn,nv->hv", narrowed(e / total, p), rows[:, :V]), (top + np.log(total))[:, 0]

    return kernel


def q_scaled(kernel, query):
    """`kernel` with q times the scale, in `query`, and scores without a scale."""
    return lambda q, rows, V, scale: kernel(narrowed(q * scale, query), rows, V, np.float32(1))


def online(
    tile, p="f32", *, base2=False, exp=np.exp, split=1, partials="f32", backward=False, lazy=0.0,
    sum_rounded=False, p_scale=1.0, scores=plain, sums=plain,
):  # fmt: skip
    """Tiles with a running maximum that is renewed once it is off by more than `lazy`, in runs merged by their LSE."""

    def run(q, rows, V, scale):
        H = len(q)
        top = np.full((H, 1), -np.inf, np.float32)
        total = np.zeros((H, 1), np.float32)
        acc = np.zeros((H, V), np.float32)
        unit = np.float32(1.442695 if base2 else 1)
        power = np.exp2 if base2 else exp
        for j in range(0, len(rows), tile):
            keys = rows[j : j + tile]
            s = scores(np.zeros((H, len(keys)), np.float32), q, keys.T) * (scale * unit)
            new = s.max(-1, keepdims=True)
            new = np.where(new > top + np.float32(lazy) * unit, new, top)
            e, decay = power(s - new) * np.float32(p_scale), power(top - new)
            w = narrowed(e, p)
            total = total * decay + (w if sum_rounded else e).sum(-1, keepdims=True)
            acc = sums(acc * decay, w, keys[:, :V])
            top = new
        log = np.log2(total / np.float32(p_scale)) if base2 else np.log(total / np.float32(p_scale))
        return acc / total, (top + log) * np.float32(np.log(2) if base2 else 1)

    def kernel(q, rows, V, scale):
        rows = rows[::-1] if backward else rows
        size = -(-len(rows) // split)
        parts = [run(q, rows[j : j + size], V, scale) for j in range(0, len(rows), size)]
        if len(parts) == 1:
            return parts[0][0], parts[0][1][:, 0]
        top = np.max([lse for _, lse in parts], 0)
        weights = [np.exp(lse - top) for _, lse in parts]
        total = np.sum(weights, 0, dtype=np.float32)
        out = sum(w * narrowed(o, partials) for w, (o, _) in zip(weights, parts, strict=True)) / total
        return out, (top + np.log(total))[:, 0]

    return kernel


def sequential(q, rows, V, scale):
    """One key at a time, f32, as loops in C do it."""
    top = np.full((len(q), 1), -np.inf, np.float32)
    total = np.zeros((len(q), 1), np.float32)
    acc = np.zeros((len(q), V), np.float32)
    for row in rows:
        s = np.zeros(len(q), np.float32)
        for d in range(0, len(row), 8):
            s = s + q[:, d : d + 8] @ row[d : d + 8]
        s = (s * scale)[:, None]
        new = np.maximum(top, s)
        decay, e = np.exp(top - new), np.exp(s - new)
        total, acc, top = total * decay + e, acc * decay + e * row[:V], new
    return acc / total, (top + np.log(total))[:, 0]


def half_accumulator(q, rows, V, scale):
    """As llama.cpp's CPU loop with an f16 cache: weights in f32, every addition to the output rounded to f16."""
    s = (q @ rows.T) * scale
    out = np.zeros((len(q), V), np.float16)
    top = np.full((len(q), 1), -np.inf, np.float32)
    total = np.zeros((len(q), 1), np.float32)
    for j, row in enumerate(rows):
        new = np.maximum(top, s[:, j : j + 1])
        decay, e = np.exp(top - new), np.exp(s[:, j : j + 1] - new)
        if (decay != 1).any():
            out = (out.astype(np.float32) * decay).astype(np.float16)
        out = (out.astype(np.float32) + e * row[:V]).astype(np.float16)
        total, top = total * decay + e, new
    return out.astype(np.float32) / total, (top + np.log(total))[:, 0]


def dense(case, naive, dtype):
    """Either dense form, with activations, weights and intermediate results of `dtype`: {"out"}."""
    a = {name: tensor.astype(np.float32) for name, tensor in case.tensors().items()}
    t_q, t_kv = len(a["q_nope"]), len(a["c_kv"])
    scale = np.float32(case.softmax_scale or (a["q_nope"].shape[2] + a["q_pe"].shape[2]) ** -0.5)
    hidden = np.arange(t_kv) > t_kv - t_q + np.arange(t_q)[:, None]
    outs = []
    for h in range(a["w_uk"].shape[0]):
        if naive:
            nope = narrowed(a["c_kv"] @ a["w_uk"][h].T, dtype)
            q, values = a["q_nope"][:, h], narrowed(a["c_kv"] @ a["w_uv"][h].T, dtype)
        else:
            nope, values = a["c_kv"], a["c_kv"]
            q = narrowed(a["q_nope"][:, h] @ a["w_uk"][h], dtype)
        s = np.where(hidden, -np.inf, (q @ nope.T + a["q_pe"][:, h] @ a["k_pe"].T) * scale)
        p = np.exp(s - s.max(-1, keepdims=True))
        out = narrowed(p / p.sum(-1, keepdims=True), dtype) @ values
        outs.append(out if naive else narrowed(out, dtype) @ a["w_uv"][h].T)
    return {"out": np.stack(outs, 1).astype(NARROW[dtype])}
