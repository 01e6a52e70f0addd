# SPDX-License-Identifier: Apache-2.0
"""Cases of the canonical problem, and the bounds of the tiers that compute it faster than the strict one."""

import dataclasses

import ml_dtypes
import numpy as np

from mla_oracle import canonical, formats
from mla_oracle.cases import PagedCase

EPS = {"f32": 2.0**-23, "f64": 2.0**-52}
BF16 = ml_dtypes.bfloat16


def make(D=48, V=32, T=2, H=5, lens=(70, 0, 33), block=16, dtype=np.float32, seed=0, **options):
    """A case by position; NaN in rows that no request owns."""
    rng = np.random.default_rng(seed)
    lens = np.array(lens, np.int32)
    used = -(-lens // block)
    order = rng.permutation(int(used.sum()) + 2)
    table = np.full((len(lens), int(used.max()) + 1), 2**31 - 1, np.int32)
    held = np.zeros((len(order), block), bool)
    starts = np.concatenate([[0], used.cumsum()])
    for b, n in enumerate(lens):
        table[b, : used[b]] = order[starts[b] : starts[b + 1]]
        held[table[b, np.arange(n) // block], np.arange(n) % block] = True
    rows = np.where(held[..., None], rng.standard_normal((*held.shape, D)), np.nan)
    fields = {
        "q": rng.standard_normal((len(lens), T, H, D)).astype(dtype),
        "kv_cache": rows.astype(dtype),
        "block_table": table,
        "seq_lens": lens,
        "softmax_scale": 0.2,
        "head_dim_v": V,
        "causal": False,
    }
    return PagedCase(**(fields | options))


def packed(case, name, reader=None, **scales):
    """The case with its rows stored in a format; rows nobody owns are any bytes."""
    rows = np.asarray(case.kv_cache, np.float32)
    free = np.isnan(rows).all(-1)
    tensors = formats.quantize(name, np.where(free[..., None], np.float32(1), rows), **scales)
    return dataclasses.replace(case, cache_format=name, cache_reader=reader, **tensors)


def assert_right(case, build=None, precision="f32", backend="fast"):
    """(out, lse) within the bound of mla_oracle.canonical.decode, or of the tensor cores of mla_oracle.gpu.paged.

    Over the numbers the rows stand for, with 3 eps for what is done to the sums.
    """
    mma = backend != "fast"
    got = canonical.attend(case, precision=precision, backend=backend, isa=build, threads=2)
    truth = canonical.attend(case, precision="f64", backend="strict")
    problem = canonical.checked(case, "f64")
    seen = list(problem.seen)
    eps, tiny = EPS[precision], 2.0**-126 if precision == "f32" else 2.0**-1022
    (N, H, D), V = problem.q.shape, case.head_dim_v
    out, lse = np.zeros((N, H, V)), np.zeros((N, H))
    group, n = H // problem.main.heads, 0
    for b, one in enumerate(seen):
        rows, keys = canonical.gather(problem, one)
        biases = canonical.bias_at(problem, b, one)
        for t in range(len(one.starts) - 1):
            of_query = slice(*one.starts[t : t + 2])
            for h in range(H):
                bias = biases[h, of_query]
                mine = keys[of_query][bias > -np.inf]
                if not len(mine):
                    continue
                k, q = rows[h // group][mine], problem.q[n, h]
                v = np.abs(k[:, problem.value])
                sizes = (np.abs(k) @ np.abs(q)) * problem.scale
                capped, size, bent = bend(k @ q * problem.scale, sizes, eps, tiny, D, problem.softcap)
                score = capped + bias[bias > -np.inf]
                p = np.exp(score - score.max())
                tiles = 2 * D * tiny * (np.abs(q).max() + 2 * np.abs(k).max() + 8) * problem.scale
                relative = eps * (((1.1 * D + 16) if mma else D + 6) * size + 2 * len(mine) + 35 + bent) + tiles
                relative += 3 * eps * np.abs(score).max() * (problem.bias is not None)
                of_lse = eps * (np.abs(score).max() + np.log(len(mine)))
                rounded = 2.0**-8 if mma else 2.0**-17 if precision == "f32" else 0.0
                sunk = of_lse if problem.sinks[h] > -np.inf else 0
                out[n, h] = (relative + rounded + sunk) * (p @ v) / p.sum() + len(mine) * tiny * (v.max() + 6)
                sink = np.abs(np.nan_to_num(problem.sinks[h], neginf=0))
                lse[n, h] = relative + 2 * (of_lse + eps * (np.log(len(mine)) + sink))
            n += 1
    out = out.reshape(truth.out.shape) * abs(problem.output_scale)
    lse = lse.reshape(case.q.shape[:-1]) * problem.lse_unit
    lse = lse.swapaxes(1, 2) if case.lse_axes == "BHT" else lse
    with np.errstate(invalid="ignore"):
        for name, a, b, allowed in (("out", got.out, truth.out, out), ("lse", got.lse, truth.lse, lse)):
            good = (np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))
            assert good.all(), (name, np.argwhere(~good)[0], a[~good][0], b[~good][0], allowed[~good][0])
    return got


def bend(scaled, sizes, eps, tiny, D, softcap):
    """(capped scores, `size`, what a softcap rounds, in eps) of scaled scores [n] and their sizes [n]."""
    if not softcap:
        return scaled, sizes.max(), 0.0
    capped = softcap * np.tanh(scaled / softcap)
    with np.errstate(over="ignore"):
        slope = np.cosh(np.maximum(np.abs(scaled) - eps * (D + 6) * sizes, 0) / softcap) ** -2
    return capped, (slope * sizes).max(), 9 * np.abs(capped).max() + tiny * softcap


def topk(case, K, seed=1):
    rng = np.random.default_rng(seed)
    B, T = case.q.shape[:2]
    indices = np.full((B, T, K), -1, np.int32)
    for b, t in np.ndindex(B, T):
        n = min(K, int(case.seq_lens[b]))
        indices[b, t, :n] = rng.permutation(int(case.seq_lens[b]))[:n]
        indices[b, t, rng.random(K) < 0.3] = -1
    return indices
