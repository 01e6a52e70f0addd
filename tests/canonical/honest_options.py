# SPDX-License-Identifier: Apache-2.0
"""Honest kernels in plain numpy for every option of the canonical problem; they share no code with the emulator.

    found = run(case, tiled(24, "bf16", split=3), out="bf16")       # {"out", "lse"}, as a kernel stores them

Keys come from the dictionary definition, in the order they are listed. A kernel takes one Query and returns
(out [H, V], lse [H] natural); `honest.py` has the sums and the roundings it may make.
"""

from typing import NamedTuple

import dictionary
import honest
import numpy as np
from honest import narrowed

from mla_oracle import formats

F32 = np.float32


class Query(NamedTuple):
    """The heads of one KV head of one query token, f32."""

    q: np.ndarray  # [H, D]
    keys: np.ndarray  # [n, D]
    values: np.ndarray  # [n, V]
    scale: np.float32
    cap: np.float32  # 0: none
    bias: np.ndarray  # [H, n]
    sinks: np.ndarray  # [H], -inf: none
    count_sinks: bool  # in the LSE


def run(case, kernel, out="f32", lse="f32", **wrong):
    """Results of `kernel` for every query. `wrong`: functions that replace the ones below, for kernels that are not."""
    p, H = fields(case), case.q.shape[-2]
    keys_of, rows_of, query_of = (wrong.get(f.__name__, f) for f in (keys_of_, rows_of_, query_of_))
    kv_heads = case.kv_cache.shape[2] if case.cache_format is None and case.kv_cache.ndim == 4 else 1
    outs, lses = np.zeros((*case.q.shape[:-1], case.head_dim_v)), np.full(case.q.shape[:-1], -np.inf)
    for b, t, row, T in dictionary.queries(p):
        keys = keys_of(case, p, b, t, row, T)
        for g in range(kv_heads if keys else 0):
            heads = range(g * (H // kv_heads), (g + 1) * (H // kv_heads))
            query = query_of(case, p, row, heads, keys, rows_of(case, p, b, keys, g))
            sees = (query.bias > -np.inf).any(axis=1)
            with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
                o, z = kernel(query)
            o = o * F32(1 if case.output_scale is None else case.output_scale)
            where = (*row, slice(heads[0], heads[-1] + 1))
            outs[where], lses[where] = np.where(sees[:, None], o, 0), np.where(sees, z, -np.inf)
            if case.sinks is not None:
                infinite = (query.sinks == np.inf) & sees
                outs[where][infinite] = 0
                lses[where][infinite & case.sinks_in_lse] = np.inf
    lses = lses / np.log(2) if case.lse_base == "2" else lses
    lses = np.where(lses == -np.inf, case.empty_lse, lses).astype(F32).astype(honest.NARROW[lse])
    lses = np.ascontiguousarray(lses.swapaxes(1, 2)) if case.lse_axes == "BHT" else lses
    return {"out": outs.astype(F32).astype(honest.NARROW[out]), "lse": lses}


def fields(case):
    """The fields as the dictionary takes them; the cache of a format as an empty one of its shape."""
    p = {**dictionary.DEFAULTS, **case.tensors(), **case.conventions()}
    for name in ("kv_cache", "extra_kv_cache"):
        if case.cache_format is not None and p[name] is not None:
            p[name] = np.broadcast_to(F32(0), formats.check(case.cache_format, tensors_of(case, name)))
    return p


def tensors_of(case, name):
    if name == "extra_kv_cache":
        return {"kv_cache": case.extra_kv_cache, "kv_scale": case.extra_kv_scale}
    return {n: getattr(case, n) for n in ("kv_cache", "kpe_cache", "kv_scale", "kpe_scale", "ckv_scale")}


def keys_of_(case, p, b, t, row, T):
    """[(source, place)] that the query sees, as often as it does."""
    return [key for key, count in dictionary.seen(p, b, t, T, row).items() for _ in range(count)]


def rows_of_(case, p, b, keys, g, read=formats.read):
    """The rows [n, D] f32 of these keys."""
    if case.cache_format is None:
        return np.array([dictionary.cache_row(p, source, b, place, g) for source, place in keys], F32)
    rows = np.zeros((len(keys), case.q.shape[-1]), F32)
    for s, name in enumerate(("kv_cache", "extra_kv_cache")):
        mine = [i for i, (source, _) in enumerate(keys) if source == s]
        if mine:
            where = np.array([dictionary.address(p, s, b, keys[i][1]) for i in mine]).T
            size = p[name].shape[1]
            found = read(case.cache_format, tensors_of(case, name), *where, block_size=size, reader=case.cache_reader)
            rows[mine] = found
    return rows


def query_of_(case, p, row, heads, keys, rows):
    bias = np.zeros((len(heads), len(keys)), F32)
    for j, (source, place) in enumerate(keys):
        for i, h in enumerate(heads):
            index = dictionary.bias_index(p, source, place, row, h)
            bias[i, j] = 0 if index is None else p["bias"][index]
    rows = np.where((bias == -np.inf).all(axis=0)[:, None], F32(0), rows)  # nobody reads those
    first = case.value_offset
    return Query(
        case.q[row][heads].astype(F32),
        rows,
        rows[:, first : first + case.head_dim_v],
        F32(case.softmax_scale * (1 if case.q_scale is None else case.q_scale)),
        F32(case.softcap or 0),
        bias,
        np.full(len(heads), -np.inf, F32) if case.sinks is None else case.sinks[heads],
        case.sinks_in_lse,
    )


def scores_of(query, scores, tanh):
    s = scores(np.zeros((len(query.q), len(query.keys)), F32), query.q, query.keys.T) * query.scale
    if query.cap:
        x = s / query.cap
        s = query.cap * (np.tanh(x) if tanh == "tanh" else 2 / (1 + np.exp(-2 * x)) - 1)
    return np.where(query.bias == -np.inf, F32(-np.inf), s + query.bias)


def two_pass(p="f32", *, tanh="tanh", scores=honest.plain):
    """A softmax over all scores and the sink, its result rounded to p."""

    def kernel(query):
        s = scores_of(query, scores, tanh)
        sinks = np.where(query.sinks == np.inf, -np.inf, query.sinks)[:, None].astype(F32)
        top = np.maximum(s.max(-1, keepdims=True), sinks)
        e, of_sink = np.exp(s - top), np.exp(sinks - top)
        total = e.sum(-1, keepdims=True)
        own = s.max(-1, keepdims=True)
        keys = own + np.log(np.exp(s - own).sum(-1, keepdims=True))
        lse = top + np.log(total + of_sink) if query.count_sinks else keys
        return narrowed(e / (total + of_sink), p) @ query.values, lse[:, 0]

    return kernel


def tiled(
    tile, p="f32", *, tanh="tanh", base2=False, split=1, partials="f32", backward=False, sum_rounded=False,
    sink="after", scores=honest.plain, sums=honest.plain,
):  # fmt: skip
    """Tiles with a running maximum, in runs merged by their LSE; `sink`: "first" begins with it, "last" ends with it,
    "after" scales what was merged. One that is not to be counted in the LSE is always "after"."""

    def state(query, s, values, start):
        H, unit = len(query.q), F32(np.log2(np.e)) if base2 else F32(1)
        power = np.exp2 if base2 else np.exp
        top = np.full((H, 1), -np.inf, F32)
        total, acc = np.zeros((H, 1), F32), np.zeros((H, values.shape[1]), F32)
        sinks = np.where(query.sinks == np.inf, -np.inf, query.sinks)[:, None].astype(F32) * unit
        if start == "first":
            top, total = sinks, np.where(sinks == -np.inf, F32(0), F32(1))
        for j in range(0, s.shape[1], tile):
            x = s[:, j : j + tile] * unit
            new = np.maximum(top, x.max(-1, keepdims=True))
            base = np.where(new == -np.inf, F32(0), new)
            e, decay = power(x - base), power(top - base)
            w = narrowed(e, p)
            total = total * decay + (w if sum_rounded else e).sum(-1, keepdims=True)
            acc, top = sums(acc * decay, w, values[j : j + tile]), new
        if start == "last":
            new = np.maximum(top, sinks)
            base = np.where(new == -np.inf, F32(0), new)
            decay = power(top - base)
            total, acc, top = total * decay + power(sinks - base), acc * decay, new
        lse = np.where(total > 0, top + (np.log2 if base2 else np.log)(total), -np.inf)
        return acc / np.where(total > 0, total, F32(1)), (lse / unit)[:, 0].astype(F32)

    def kernel(query):
        s, values = scores_of(query, scores, tanh), query.values
        s, values = (s[:, ::-1], values[::-1]) if backward else (s, values)
        size = -(-s.shape[1] // split)
        where = sink if query.count_sinks else "after"
        states = []
        for j in range(0, s.shape[1], size):
            states.append(state(query, s[:, j : j + size], values[j : j + size], where if j == 0 else "none"))
        if len(states) == 1:
            out, lse = states[0]
        else:
            lses = np.stack([z for _, z in states])
            top = lses.max(0)
            weights = np.exp(lses - np.where(top == -np.inf, F32(0), top))
            total = weights.sum(0)
            out = sum(w[:, None] * narrowed(o, partials) for w, (o, _) in zip(weights, states, strict=True))
            out, lse = out / np.where(total > 0, total, F32(1))[:, None], top + np.log(total)
        if where != "after":
            return out, lse
        share = 1 / (1 + np.exp(query.sinks - lse))
        return out * share[:, None], np.logaddexp(lse, query.sinks) if query.count_sinks else lse

    return kernel


def drawn(rng, p):
    """(name, kernel) of one kernel whose weights are of dtype `p`, or of f32."""
    p = str(rng.choice([p, "f32"]))
    cores = p != "f32" and rng.random() < 0.5
    how = {"tanh": str(rng.choice(["tanh", "sigmoid"])), "scores": honest.truncated if cores else honest.plain}
    if rng.random() < 0.2:
        return f"two passes, p {p} {how['tanh']}", two_pass(p, **how)
    tile, split = int(rng.choice([1, 7, 16, 64, 500])), int(rng.choice([1, 1, 2, 5]))
    more = {"sink": str(rng.choice(["first", "last", "after"])), "base2": bool(rng.integers(2)),
            "sum_rounded": bool(rng.integers(2)), "backward": bool(rng.integers(2))}  # fmt: skip
    name = f"tiles of {tile}, split {split}, p {p} {how['tanh']} {more}"
    return name, tiled(tile, p, split=split, sums=how["scores"], **how, **more)
