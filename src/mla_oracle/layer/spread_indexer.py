# SPDX-License-Identifier: Apache-2.0
"""The errors of the indexer's stages (spread.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..arrays import Array
from ..verdict.noise import RMS, UNIT, walk
from . import indexer
from .limits import limit
from .spread import U32, Spread


def _index_rows(e: Spread, x: Array, errors: Array, out: Array) -> Array:
    """Squared: of rows of the indexer from x [T, ..., d] before they are rotated."""
    indexed = e.state.indexer
    squared = errors
    if indexed.pairing is not None:
        turned = e.state.rotated(x, indexed.pairing, "index_rope")
        squared = e.rotation(x, errors + np.square(e.rounding(x, e.held)), turned, indexed.pairing, "index_rope")
    if indexed.hadamard:
        once = (RMS * UNIT[e.held]) ** 2 + (RMS * U32) ** 2 * math.log2(x.shape[-1])
        squared = squared.mean(axis=-1, keepdims=True) + once * np.square(x).mean(axis=-1, keepdims=True)
    return np.broadcast_to(squared, out.shape)


def _index_q(e: Spread, out: Array) -> Array:
    s = e.state
    q = s.linear("q_a_norm", "indexer.wq_b")
    squared = e.linear(s["q_a_norm"], e.squares("q_a_norm"), "indexer.wq_b", q)
    shape = (len(q), s.indexer.num_heads, s.indexer.head_dim)
    return np.sqrt(_index_rows(e, q.reshape(shape), squared.reshape(shape), out))


def _index_k(e: Spread, out: Array) -> Array:
    s, w = e.state, e.state.weights
    x = s.linear("hidden_states", "indexer.wk")
    squared = e.linear(s["hidden_states"], None, "indexer.wk", x) + np.square(e.rounding(x, e.held))
    k = indexer.layer_norm(x, w["indexer.k_norm"], w["indexer.k_norm.bias"], s.indexer.norm_eps)
    squared = e.norm(x, squared, "indexer.k_norm", s.indexer.norm_eps, k, centred=True)
    return np.sqrt(_index_rows(e, k[:, None], squared[:, None], out[:, None])[:, 0])


def _index_keys(e: Spread, out: Array) -> Array:
    s, found = e.state, []
    for past, new in (("past_index_k", "index_k"), ("past_index_gate", "index_gate")):
        if new in s.values:
            errors = e.errors.get(new)
            before = np.zeros((len(s[past]), s.indexer.head_dim))
            found.append(np.concatenate([before, np.zeros_like(s[new]) if errors is None else errors]))
    size = s.indexer.kpool
    if size is None:
        return found[0]
    keys = np.concatenate([s["past_index_k"], s["index_k"]])
    count = len(keys) // size
    shape = (count, size, keys.shape[1])
    rows, of_key, of_gate = (x[: count * size].reshape(shape) for x in (keys, *found))
    gate = np.concatenate([s["past_index_gate"], s["index_gate"]])[: count * size].reshape(shape)
    logits = gate + s.weights["indexer.index_kpool_compress_ape"]
    p = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    p /= p.sum(axis=1, keepdims=True)
    away = np.square(p) * np.square(rows - out[:, None])
    squared = np.square(p) * (np.square(of_key) + (2 * RMS * UNIT[e.held]) ** 2 * np.square(rows))
    squared += away * (np.square(of_gate) + (4 * U32) ** 2 + np.square(U32 * logits))
    found_pools: Array = np.sqrt(squared.sum(axis=1) + (walk("f32", size) * out) ** 2)
    return found_pools


def _index_weights(e: Spread, out: Array) -> Array:
    s = e.state
    y = out * math.sqrt(s.indexer.num_heads)
    squared = e.linear(s["hidden_states"], None, "indexer.weights_proj", y) + np.square(e.rounding(y, e.held))
    return np.sqrt(squared / s.indexer.num_heads + np.square(RMS * U32 * out))


def _flips(x: Array, squared: Array | None) -> Array | None:
    """The squared errors of fp8(x): where x is not exact, an element near the middle of two may be either."""
    if squared is None:
        return None
    off = np.sqrt(np.broadcast_to(squared, x.shape))
    return np.square(indexer.fp8_apart(x, off * limit(off).largest[..., None]))


def _index_scores(e: Spread, out: Array) -> Array:
    s = e.state
    q, keys, w = s["index_q"], s["index_keys"], s["index_weights"]
    of_q, of_k, of_w = (e.squares(name) for name in ("index_q", "index_keys", "index_weights"))
    if s.indexer.scores == "fp8":
        of_q, of_k = _flips(q, of_q), _flips(keys, of_k)
        q, keys = indexer.fp8(q), indexer.fp8(keys)
    d = s.indexer.head_dim
    products = np.einsum("tnd,kd->tnk", q, keys, optimize=True)
    inner = np.einsum("tnd,kd->tnk", np.square(q), np.square(keys), optimize=True)
    squared = e.product(inner, d, products)
    if of_q is not None:
        squared = squared + np.einsum("tnd,kd->tnk", of_q, np.square(keys), optimize=True)
    if of_k is not None:
        squared = squared + np.einsum("tnd,kd->tnk", np.square(q), of_k, optimize=True)
    relu = np.maximum(products, 0)
    found = np.einsum("tn,tnk->tk", np.square(w), squared, optimize=True)
    own = walk(e.sums, s.indexer.num_heads) ** 2 + 4 * (RMS * U32) ** 2
    found += own * np.einsum("tn,tnk->tk", np.square(w), np.square(relu), optimize=True)
    if of_w is not None:
        found += np.einsum("tn,tnk->tk", of_w, np.square(relu), optimize=True)
    return np.sqrt(np.where(np.isfinite(out), found / d, 0.0))


SPREADS: dict[str, Callable[[Spread, Array], Array]] = {
    "index_q": _index_q,
    "index_k": _index_k,
    "index_keys": _index_keys,
    "index_weights": _index_weights,
    "index_scores": _index_scores,
}
