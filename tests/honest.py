# SPDX-License-Identifier: Apache-2.0
"""Honest kernels in plain numpy that share no code with the package's emulator, and wrong ones for contrast.

A kernel takes a paged case and a random generator and returns what it would store: {"out", "lse"} in its dtypes.
"""

import ml_dtypes
import numpy as np

NARROW = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def rows_of(case, b):
    """The latent rows [n, D] of request b, f32."""
    block = case.kv_cache.shape[1]
    table = case.block_table[b]
    if case.page_ids is not None:
        where = {int(page): i for i, page in enumerate(case.page_ids)}
        table = np.array([where.get(int(page), -1) for page in table])
    return np.array(
        [case.kv_cache[table[j // block], j % block] for j in range(case.seq_lens[b])], case.kv_cache.dtype
    ).astype(np.float32).reshape(-1, case.kv_cache.shape[2])


def over_rows(case, kernel, out="f32", lse="f32"):
    """Results of `kernel(q [H, D], rows [n, D], V, scale) -> (out [H, V], lse [H] natural)` for every query token."""
    q = case.q if case.q.ndim == 4 else case.q[:, None]
    B, T, H, _ = q.shape
    outs, lses = np.zeros((B, T, H, case.head_dim_v)), np.full((B, T, H), -np.inf)
    for b in range(B):
        rows = rows_of(case, b)
        for t in range(T):
            n = len(rows) - (T - 1 - t if case.causal else 0)
            if n > 0:
                outs[b, t], lses[b, t] = kernel(
                    q[b, t].astype(np.float32), rows[:n], case.head_dim_v, np.float32(case.softmax_scale)
                )
    if case.lse_base == "2":
        lses = lses / np.log(2)
    lses = np.where(lses == -np.inf, case.empty_lse, lses)
    shape = case.q.shape[:-1]
    return {
        "out": outs.astype(np.float32).astype(NARROW[out]).reshape(*shape, -1),
        "lse": lses.astype(np.float32).astype(NARROW[lse]).reshape(shape),
    }


def narrowed(x, name):
    return x.astype(NARROW[name]).astype(np.float32)


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


def eager(p="f32"):
    """As frameworks write it: softmax in f32, its result rounded, then the product."""

    def kernel(q, rows, V, scale):
        s = np.einsum("hd,nd->hn", q, rows) * scale
        top = s.max(-1, keepdims=True)
        e = np.exp(s - top)
        total = e.sum(-1, keepdims=True)
        return np.einsum("hn,nv->hv", narrowed(e / total, p), rows[:, :V]), (top + np.log(total))[:, 0]

    return kernel


def online(tile, p="f32", base2=False, split=1):
    """Tiles with a running maximum, in `split` runs merged by their LSE; in base 2 if asked."""

    def run(q, rows, V, scale):
        H = len(q)
        top = np.full((H, 1), -np.inf, np.float32)
        total = np.zeros((H, 1), np.float32)
        acc = np.zeros((H, V), np.float32)
        for j in range(0, len(rows), tile):
            keys = rows[j : j + tile]
            s = (q @ keys.T) * (scale * np.float32(1.442695) if base2 else scale)
            new = np.maximum(top, s.max(-1, keepdims=True))
            power = np.exp2 if base2 else np.exp
            e, decay = power(s - new), power(top - new)
            total = total * decay + e.sum(-1, keepdims=True)
            acc = acc * decay + narrowed(e, p) @ keys[:, :V]
            top = new
        log = np.log2(total) if base2 else np.log(total)
        return acc / total, (top + log) * np.float32(np.log(2) if base2 else 1)

    def kernel(q, rows, V, scale):
        size = -(-len(rows) // split)
        parts = [run(q, rows[j : j + size], V, scale) for j in range(0, len(rows), size)]
        if len(parts) == 1:
            return parts[0][0], parts[0][1][:, 0]
        top = np.max([lse for _, lse in parts], 0)
        weights = [np.exp(lse - top) for _, lse in parts]
        total = np.sum(weights, 0, dtype=np.float32)
        out = sum(w * o for w, (o, _) in zip(weights, parts, strict=True)) / total
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


def draw(rng, cache):
    """A kernel for a cache of dtype `cache`, its name and the dtype of its out."""
    p = str(rng.choice([cache, "f32"]))
    tile = int(rng.choice([1, 7, 16, 24, 48, 64, 100, 128, 500]))
    split = int(rng.integers(1, 12))
    name, kernel = [
        ("two_pass", two_pass(p)),
        ("two_pass, sum of rounded", two_pass(p, sum_rounded=True)),
        ("eager", eager(p)),
        (f"online {tile}", online(tile, p)),
        (f"online {tile} base 2", online(tile, p, base2=True)),
        (f"online {tile} split {split}", online(tile, p, split=split)),
        ("sequential", sequential),
    ][rng.integers(7)]
    return f"{name}, p {p}", kernel, str(rng.choice([cache, "f32"]))
