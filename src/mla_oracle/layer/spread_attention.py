# SPDX-License-Identifier: Apache-2.0
"""The errors of the attention's stages (spread.py); what its kernel adds to lse, o_lat and attn is in limits.py.

`attended` carries the errors of queries and cached rows through the softmax: an error of a score moves the output by
the change of its weight times how far the key's value is from the output.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from ..verdict.noise import RMS, UNIT, coarser, walk
from . import attention
from .spread import U32, Spread


def _of_cache(weight: str) -> Callable[[Spread, Array], Array]:
    def of(e: Spread, out: Array) -> Array:
        L = e.state.geometry.kv_lora_rank
        w2, rows = np.square(e.state.weights[weight]), e.state["kv_cache"][:, :L]
        errors = e.squares("kv_cache")
        carried = None if errors is None else np.einsum("nl,hol->nho", errors[:, :L], w2, optimize=True)
        inner = np.einsum("nl,hol->nho", np.square(rows), w2, optimize=True)
        return np.sqrt(e.contracted(inner, carried, weight, out, L))

    return of


def _q_lat(e: Spread, out: Array) -> Array:
    w2, q = np.square(e.state.weights["w_uk"]), e.state["q_nope"]
    errors = e.squares("q_nope")
    carried = None if errors is None else np.einsum("thp,hpl->thl", errors, w2, optimize=True)
    inner = np.einsum("thp,hpl->thl", np.square(q), w2, optimize=True)
    return np.sqrt(e.contracted(inner, carried, "w_uk", out, q.shape[-1]))


class _Products:
    """Of the scores: the sums of squares of what they add up, unscaled, and the errors that come with it."""

    def __init__(self, e: Spread) -> None:
        s = self.s = e.state
        self.e, self.L = e, s.geometry.kv_lora_rank
        self.c2, self.pe2 = np.square(s.latents), np.square(s["kv_cache"][:, self.L :])
        self.q_lat2 = np.square(np.einsum("thp,hpl->thl", s["q_nope"], s.weights["w_uk"], optimize=True))
        self.k_nope2 = np.square(np.einsum("nl,hpl->nhp", s.latents, s.weights["w_uk"], optimize=True))
        self.absorbed = np.einsum("thl,nl->thn", self.q_lat2, self.c2, optimize=True)
        self.naive = np.einsum("thp,nhp->thn", np.square(s["q_nope"]), self.k_nope2, optimize=True)
        self.pe = np.einsum("thr,nr->thn", np.square(s["q_pe"]), self.pe2, optimize=True)

    def carried(self) -> Array:
        """[T, H, N] squared errors of scaled scores, of queries and cached rows that are not dumped."""
        e, s = self.e, self.s
        found = np.zeros_like(self.pe)
        if (q := e.squares("q_nope")) is not None and "q_lat" not in s.values:
            found += np.einsum("thp,nhp->thn", q, self.k_nope2, optimize=True)
        if (q := e.squares("q_pe")) is not None:
            found += np.einsum("thr,nr->thn", q, self.pe2, optimize=True)
        if (cache := e.squares("kv_cache")) is not None:
            if "k_nope" not in s.values:
                found += np.einsum("thl,nl->thn", self.q_lat2, cache[:, : self.L], optimize=True)
            found += np.einsum("thr,nr->thn", np.square(s["q_pe"]), cache[:, self.L :], optimize=True)
        scaled: Array = found * s.geometry.softmax_scale**2
        return scaled

    def before(self) -> Array:
        """[T, H, N] squared: of what either form rounds before its scores, where neither of them is dumped."""
        if "q_lat" in self.s.values or "k_nope" in self.s.values:
            return np.zeros_like(self.pe)
        e = self.e
        once = (RMS * UNIT[e.held]) ** 2 + walk(e.sums, self.L) ** 2 + coarser(e.held, e.stored["w_uk"]) ** 2
        found: Array = once * (self.absorbed + self.naive) * self.s.geometry.softmax_scale**2
        return found

    def sums(self, scores: Array) -> Array:
        """[T, H, N] squared: of the sums of either form."""
        g = self.s.geometry
        inner = (self.absorbed + self.naive + self.pe) * g.softmax_scale**2
        return self.e.product(inner, self.L + g.qk_head_dim, scores) + np.square(2 * U32 * scores)


def _scores(e: Spread, out: Array) -> Array:
    products = _Products(e)
    squared = products.carried() + products.before() + products.sums(np.where(np.isfinite(out), out, 0.0))
    return np.sqrt(np.where(np.isfinite(out), squared, 0.0))


def _p(e: Spread, out: Array) -> Array:
    """A weight's error is that of its score and of the row's sum, relative to the weight.

    And no less than a unit of f32 of the sum, in which a smaller one is lost.
    """
    products, scores = _Products(e), e.state.scores()
    finite = np.where(np.isfinite(scores), scores, 0.0)
    squared = products.carried() + products.before() + products.sums(finite)
    squared += 2 * np.square(RMS * UNIT[e.held] * finite) + (4 * U32) ** 2  # stored before and after the scale
    squared += np.square(U32 * finite.max(axis=-1, keepdims=True))
    shared = (out**2 * squared).sum(axis=-1, keepdims=True) + walk("f32", out.shape[-1]) ** 2
    found: Array = np.hypot(out * np.expm1(np.minimum(np.sqrt(squared + shared), 10.0)), RMS * U32)
    return np.where(np.isfinite(scores), found, 0.0)


def _lse(e: Spread, out: Array) -> Array:
    products = _Products(e)
    p = attention.softmax(e.state.scores())[0]
    found: Array = (p * np.sqrt(products.carried() + products.before())).sum(axis=-1)  # keys may err alike
    return found


def attended(e: Spread, score_errors: Array, values: Array, errors: Array | None, out: Array) -> Array:
    """Squared errors of out [T, H, V] that those of scores make, and of values [N, V] or [N, H, V]; all squared."""
    p2 = np.square(attention.softmax(e.state.scores())[0])
    weighted = p2 * np.square(np.expm1(np.minimum(np.sqrt(score_errors), 10.0)))
    letters = "thn,nv->thv" if values.ndim == 2 else "thn,nhv->thv"

    def over(a: Array, b: Array) -> Array:
        found: Array = np.einsum(letters, a, b, optimize=True)
        return found

    total = weighted.sum(axis=-1)[..., None]
    spread = over(weighted, np.square(values)) - 2 * out * over(weighted, values) + out**2 * total
    found: Array = np.maximum(spread, 0.0)
    return found if errors is None else found + over(p2, errors)


def _o_lat(e: Spread, out: Array) -> Array:
    products, L = _Products(e), e.state.geometry.kv_lora_rank
    cache = e.squares("kv_cache")
    of_scores = products.carried() + products.before()
    return np.sqrt(attended(e, of_scores, e.state.latents, None if cache is None else cache[:, :L], out))


def _values(e: Spread) -> tuple[Array, Array | None]:
    """The decompressed values [N, H, V], and their squared errors that come with the cached rows."""
    L, w_uv = e.state.geometry.kv_lora_rank, e.state.weights["w_uv"]
    cache = e.squares("kv_cache")
    errors = None if cache is None else np.einsum("nl,hvl->nhv", cache[:, :L], np.square(w_uv), optimize=True)
    return np.einsum("nl,hvl->nhv", e.state.latents, w_uv, optimize=True), errors


def _attn(e: Spread, out: Array) -> Array:
    return np.sqrt(attended(e, _Products(e).carried(), *_values(e), out))


def unseen(e: Spread, out: Array) -> Array:
    """[T, H, V] the errors of attn where it is not dumped: of its inputs, and of what its kernel rounds in any form.

    The kernel's roundings, that is of what stands before the scores, the scores, the weights, the values and the sums.
    """
    products, scores = _Products(e), e.state.scores()
    finite = np.where(np.isfinite(scores), scores, 0.0)
    once = (RMS * UNIT[e.held]) ** 2
    of_scores = products.carried() + products.before() + products.sums(finite) + 2 * once * np.square(finite) + once
    values, errors = _values(e)
    inner = np.einsum("nl,hvl->nhv", np.square(e.state.latents), np.square(e.state.weights["w_uv"]), optimize=True)
    own = e.contracted(inner, errors, "w_uv", values, e.state.geometry.kv_lora_rank) + once * np.square(values)
    found: Array = np.sqrt(attended(e, of_scores, values, own, out) + np.square(walk(e.sums, len(values)) * out))
    return found


SPREADS: dict[str, Callable[[Spread, Array], Array]] = {
    "k_nope": _of_cache("w_uk"),
    "v": _of_cache("w_uv"),
    "q_lat": _q_lat,
    "scores": _scores,
    "lse": _lse,
    "p": _p,
    "o_lat": _o_lat,
    "attn": _attn,
    "unseen": unseen,
}
