# SPDX-License-Identifier: Apache-2.0
"""The errors of the attention's stages (spread.py), but for what an honest kernel adds, which is the budget's (limits.py).

`attended` carries the errors of queries and cached rows through the softmax: an error of a score moves the output by
its weight times how far the key's value is from the output.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from ..noise import RMS, UNIT, coarser, walk
from . import attention
from .spread import U32, Spread


def _of_cache(weight: str) -> Callable[[Spread, Array], Array]:
    def of(e: Spread, out: Array) -> Array:
        L = e.state.geometry.kv_lora_rank
        w2, rows = np.square(e.state.weights[weight]), e.state["kv_cache"][:, :L]
        errors = e.squares("kv_cache")
        carried = None if errors is None else np.einsum("nl,hol->nho", errors[:, :L], w2, optimize=True)
        inner = np.einsum("nl,hol->nho", np.square(rows), w2, optimize=True)
        return np.sqrt(e.contracted(inner, carried, weight, out))

    return of


def _q_lat(e: Spread, out: Array) -> Array:
    w2, q = np.square(e.state.weights["w_uk"]), e.state["q_nope"]
    errors = e.squares("q_nope")
    carried = None if errors is None else np.einsum("thp,hpl->thl", errors, w2, optimize=True)
    return np.sqrt(e.contracted(np.einsum("thp,hpl->thl", np.square(q), w2, optimize=True), carried, "w_uk", out))


def score_errors(e: Spread) -> Array:
    """[T, H, N] squared errors of scaled scores that come from stages that are not dumped."""
    s, L = e.state, e.state.geometry.kv_lora_rank
    pe2 = np.square(s["kv_cache"][:, L:])
    found = np.zeros((*s["q_nope"].shape[:2], len(pe2)))
    if (q := e.squares("q_nope")) is not None:
        k_nope = np.einsum("nl,hpl->nhp", s["kv_cache"][:, :L], s.weights["w_uk"], optimize=True)
        found += np.einsum("thp,nhp->thn", q, np.square(k_nope), optimize=True)
    if (q := e.squares("q_pe")) is not None:
        found += np.einsum("thr,nr->thn", q, pe2, optimize=True)
    if (cache := e.squares("kv_cache")) is not None:
        q_lat = np.einsum("thp,hpl->thl", s["q_nope"], s.weights["w_uk"], optimize=True)
        found += np.einsum("thl,nl->thn", np.square(q_lat), cache[:, :L], optimize=True)
        found += np.einsum("thr,nr->thn", np.square(s["q_pe"]), cache[:, L:], optimize=True)
    return found * s.geometry.softmax_scale**2


def _own_scores(e: Spread, out: Array) -> Array:
    """[T, H, N] squared: of the sums of either form, and of what either rounds before them."""
    s, g = e.state, e.state.geometry
    L = g.kv_lora_rank
    c2, pe2 = np.square(s["kv_cache"][:, :L]), np.square(s["kv_cache"][:, L:])
    q_lat = np.einsum("thp,hpl->thl", s["q_nope"], s.weights["w_uk"], optimize=True)
    k_nope = np.einsum("nl,hpl->nhp", s["kv_cache"][:, :L], s.weights["w_uk"], optimize=True)
    absorbed = np.einsum("thl,nl->thn", np.square(q_lat), c2, optimize=True)
    naive = np.einsum("thp,nhp->thn", np.square(s["q_nope"]), np.square(k_nope), optimize=True)
    pe = np.einsum("thr,nr->thn", np.square(s["q_pe"]), pe2, optimize=True)
    before = (RMS * UNIT[e.held]) ** 2 + walk(e.sums, L) ** 2 + coarser(e.held, e.stored["w_uk"]) ** 2
    scale2 = g.softmax_scale**2
    finite = np.where(np.isfinite(out), out, 0.0)
    found = e.product((absorbed + naive + pe) * scale2, L + g.qk_head_dim, finite)
    return found + before * (absorbed + naive) * scale2 + np.square(2 * U32 * finite)


def _scores(e: Spread, out: Array) -> Array:
    return np.sqrt(np.where(np.isfinite(out), _own_scores(e, out) + score_errors(e), 0.0))


def _softmax(e: Spread) -> tuple[Array, Array, Array]:
    """The weights [T, H, N], and the squared errors of the scores and of lse [T, H]."""
    s = e.state
    of = attention.scores(s.geometry, s["q_nope"], s["q_pe"], s["kv_cache"], s.weights["w_uk"], s.mask)
    p, lse = attention.softmax(of)
    finite = np.where(np.isfinite(of), of, 0.0)
    squared = _own_scores(e, of) + score_errors(e) + np.square(RMS * UNIT[e.held] * finite) + (4 * U32) ** 2
    squared += np.square(U32 * finite.max(axis=-1, keepdims=True))
    of_lse = (p**2 * squared).sum(axis=-1) + np.square(U32 * (np.abs(lse) + 2 + walk("f32", of.shape[-1]) / U32))
    return p, squared, of_lse


def _lse(e: Spread, out: Array) -> Array:
    return np.sqrt(_softmax(e)[2])


def _p(e: Spread, out: Array) -> Array:
    p, squared, of_lse = _softmax(e)
    return p * np.sqrt(squared + of_lse[..., None])


def attended(e: Spread, values: Array, errors: Array | None, out: Array) -> Array:
    """Squared errors of out [T, H, V] that come from stages not dumped: values [N, V] or [N, H, V], errors squared."""
    s = e.state
    of = attention.scores(s.geometry, s["q_nope"], s["q_pe"], s["kv_cache"], s.weights["w_uk"], s.mask)
    p2 = np.square(attention.softmax(of)[0])
    weighted = p2 * score_errors(e)
    letters = "thn,nv->thv" if values.ndim == 2 else "thn,nhv->thv"

    def over(a: Array, b: Array) -> Array:
        found: Array = np.einsum(letters, a, b, optimize=True)
        return found

    total = weighted.sum(axis=-1)[..., None]
    found = np.maximum(over(weighted, np.square(values)) - 2 * out * over(weighted, values) + out**2 * total, 0.0)
    return found if errors is None else found + over(p2, errors)


def _o_lat(e: Spread, out: Array) -> Array:
    L = e.state.geometry.kv_lora_rank
    cache = e.squares("kv_cache")
    return np.sqrt(attended(e, e.state["kv_cache"][:, :L], None if cache is None else cache[:, :L], out))


def _attn(e: Spread, out: Array) -> Array:
    L, w_uv = e.state.geometry.kv_lora_rank, e.state.weights["w_uv"]
    values = np.einsum("nl,hvl->nhv", e.state["kv_cache"][:, :L], w_uv, optimize=True)
    cache = e.squares("kv_cache")
    errors = None if cache is None else np.einsum("nl,hvl->nhv", cache[:, :L], np.square(w_uv), optimize=True)
    return np.sqrt(attended(e, values, errors, out))


SPREADS: dict[str, Callable[[Spread, Array], Array]] = {
    "k_nope": _of_cache("w_uk"),
    "v": _of_cache("w_uv"),
    "q_lat": _q_lat,
    "scores": _scores,
    "lse": _lse,
    "p": _p,
    "o_lat": _o_lat,
    "attn": _attn,
}
