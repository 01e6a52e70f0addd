# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer of DeepSeek Sparse Attention: a score for every cached token, and the top-k of them.

    index_q       wq_b q_a_norm, n heads of d; its first R elements rotated; Hadamard where the convention says so
    index_k       LayerNorm(wk x), rotated and transformed alike: one head for all
    index_weights weights_proj x / sqrt(n)
    index_scores  sum over heads of weight relu(q . k / sqrt(d)); -inf where the query does not see the token
    topk          the k largest; of equal scores the lowest positions first, and then all in ascending order

With fp8 scores q and k are e4m3, a row of each with one scale: max(|row|, 1e-4) / 448 rounded up to a power of two.
With pooled keys (kpool), a pool's key is the sum of its tokens' keys by weights that a softmax over the pool makes of
gate x + ape, channel by channel; a query chooses k / kpool of the pools whose last token it sees, and the tokens that
it sees after its last whole pool.

DeepSeek-V3.2-Exp, inference/model.py, class Indexer, and kernel.py, act_quant and fp8_index, at 6d8cb70; transformers
5.24, modeling_deepseek_v32.py, modeling_glm_moe_dsa.py (adjacent pairs), modeling_glm5_next.py (pools).
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..dtypes import round_to
from .config import Indexer


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) weight + bias, over the last axis."""
    real = x.dtype.type
    centred = x - x.mean(axis=-1, keepdims=True, dtype=real)
    variance = np.square(centred).mean(axis=-1, keepdims=True, dtype=real)
    found: Array = centred / np.sqrt(variance + real(eps)) * weight + bias
    return found


def hadamard(x: Array) -> Array:
    """x [..., d] times the Hadamard matrix of Sylvester's order over sqrt(d), d a power of two."""
    d = x.shape[-1]
    rows = np.ascontiguousarray(x).reshape(-1, d)
    step = 1
    while step < d:
        pairs = rows.reshape(len(rows), -1, 2, step)
        rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        rows = rows.reshape(-1, d)
        step *= 2
    scaled: Array = (rows / np.sqrt(x.dtype.type(d))).reshape(x.shape)
    return scaled


def fp8(x: Array) -> Array:
    """x [..., d] as an fp8 kernel multiplies it: e4m3 times the scale of the row, in the number type of x."""
    return _stored(x, np.abs(x).max(axis=-1, keepdims=True))


def fp8_apart(x: Array, off: Array) -> Array:
    """How far fp8(x) may be from that of a row whose every element is off by `off` or less: 0 where none is rounded on.

    x and off [..., d]; the scale of the row is that of its largest element, be it off one way or the other.
    """
    held, size = fp8(x), np.abs(x)
    found = np.zeros_like(x)
    for largest in (size - off, size + off):
        for side in (x - off, x + off):
            found = np.maximum(found, np.abs(_stored(side, largest.max(axis=-1, keepdims=True)) - held))
    return found


def _stored(x: Array, largest: Array) -> Array:
    """x rounded to e4m3 times the scale of rows whose largest element this is, [..., 1]."""
    real = x.dtype.type
    fraction, exponent = np.frexp(np.maximum(largest, real(1e-4)) / real(448))
    scale = np.ldexp(real(1), exponent - (fraction == 0.5))  # the least power of two not below
    held: Array = round_to(x / scale, "e4m3", saturate=True).astype(x.dtype) * scale
    return held


def pool_keys(keys: Array, gate: Array, ape: Array) -> Array:
    """keys [n, d] and gate [n, d], ape [kpool, d] -> [n // kpool, d]: whole pools, counted from the first token."""
    size = len(ape)
    pools = len(keys) // size
    shape = (pools, size, keys.shape[1])
    logits = gate[: pools * size].reshape(shape) + ape
    weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    weights /= weights.sum(axis=1, keepdims=True)
    pooled: Array = (weights * keys[: pools * size].reshape(shape)).sum(axis=1)
    return pooled


def score(indexer: Indexer, q: Array, keys: Array, weights: Array, seen: Array) -> Array:
    """q [T, n, d], keys [N, d], weights [T, n], seen [T, N] bool -> [T, N], -inf where not seen."""
    if indexer.scores == "fp8":
        q, keys = fp8(q), fp8(keys)
    products = np.einsum("tnd,kd->tnk", q, keys, optimize=True) / np.sqrt(q.dtype.type(indexer.head_dim))
    scores = np.einsum("tn,tnk->tk", weights, np.maximum(products, 0), optimize=True)
    found: Array = np.where(seen, scores, -np.inf).astype(q.dtype)
    return found


def seen_pools(indexer: Indexer, seen: Array) -> Array:
    """[T, N // kpool]: a query sees a pool if it sees its last token."""
    size = indexer.kpool or 1
    last: Array = seen[:, size - 1 :: size]
    return last


def choose(indexer: Indexer, scores: Array, seen: Array) -> Array:
    """The tokens that each query attends to, [T, k] i64: positions in ascending order, then -1.

    scores [T, N] of tokens or pools, -inf where not seen; seen [T, tokens].
    """
    size = indexer.kpool or 1
    found = np.full((len(scores), width_of(indexer, scores.shape[1])), -1, np.int64)
    for t, row in enumerate(scores):
        order = np.argsort(-row, kind="stable")[: indexer.topk // size]
        chosen = np.sort(order[row[order] > -np.inf])
        tokens = (chosen[:, None] * size + np.arange(size)).ravel()
        if indexer.kpool is not None:
            visible = int(seen[t].sum())
            tokens = np.concatenate([tokens, np.arange(visible - visible % size, visible)])
        found[t, : len(tokens)] = tokens
    return found


def width_of(indexer: Indexer, keys: int) -> int:
    """How many tokens a choice has room for."""
    return min(indexer.topk, keys) if indexer.kpool is None else indexer.topk + indexer.kpool - 1


def selected(topk: Array, count: int) -> Array:
    """[T, count] bool: which of `count` tokens each query attends to; topk [T, k], -1 is none."""
    mask = np.zeros((len(topk), count), bool)
    rows, columns = np.nonzero(topk >= 0)
    mask[rows, topk[rows, columns]] = True
    return mask
