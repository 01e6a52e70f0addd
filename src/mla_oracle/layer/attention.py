# SPDX-License-Identifier: Apache-2.0
"""The attention of a layer, over the tokens that each query sees or has chosen.

Where a query has chosen all that it sees, its row is the dense one, bit for bit; else it attends to the chosen rows in
ascending order, alone.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..dense import attend_absorbed, attend_naive
from ..geometry import Geometry

FORMS = {"naive": attend_naive, "absorbed": attend_absorbed}


def visible(queries: int, rows: int) -> Array:
    """[T, rows] bool: the queries are the last of the rows, and see those up to their own."""
    return np.tri(queries, rows, rows - queries, dtype=bool)


def attend(
    geometry: Geometry,
    q_nope: Array,
    q_pe: Array,
    kv_cache: Array,
    w_uk: Array,
    w_uv: Array,
    mask: Array,
    *,
    form: str = "naive",
    backend: str = "auto",
) -> Array:
    """q_nope [T, H, P], q_pe [T, H, R], kv_cache [N, L + R], mask [T, N] bool within `visible` -> [T, H, V]."""
    precision = "f32" if q_nope.dtype == np.float32 else "f64"
    latent = geometry.kv_lora_rank
    T, N = mask.shape

    def run(queries: slice, rows: Array) -> Array:
        cached = kv_cache[rows]
        q = q_nope[queries], q_pe[queries]
        return FORMS[form](
            geometry, *q, cached[:, :latent], cached[:, latent:], w_uk, w_uv, precision=precision, backend=backend
        )

    sparse = np.flatnonzero((mask != visible(T, N)).any(axis=1))
    if len(sparse) == T:
        out = np.empty((*q_nope.shape[:2], geometry.v_head_dim), q_nope.dtype)
    else:
        out = run(slice(None), np.arange(N))
    for t in sparse:
        out[t : t + 1] = run(slice(t, t + 1), np.flatnonzero(mask[t]))
    return out


def scores(
    geometry: Geometry,
    q_nope: Array,
    q_pe: Array,
    kv_cache: Array,
    w_uk: Array,
    mask: Array,
    *,
    q_lat: Array | None = None,
    k_nope: Array | None = None,
) -> Array:
    """[T, H, N] scaled, -inf where a query does not attend; from q_lat [T, H, L] or k_nope [N, H, P] where given."""
    latent = geometry.kv_lora_rank
    if k_nope is not None and q_lat is None:
        found = np.einsum("thp,nhp->thn", q_nope, k_nope, optimize=True)
    else:
        q_lat = np.einsum("thp,hpl->thl", q_nope, w_uk, optimize=True) if q_lat is None else q_lat
        found = np.einsum("thl,nl->thn", q_lat, kv_cache[:, :latent], optimize=True)
    found += np.einsum("thr,nr->thn", q_pe, kv_cache[:, latent:], optimize=True)
    found *= q_nope.dtype.type(geometry.softmax_scale)
    return np.where(mask[:, None], found, -np.inf).astype(q_nope.dtype)


def softmax(of: Array) -> tuple[Array, Array]:
    """The weights [T, H, N] and lse [T, H] of scores; every row attends to something."""
    base = of.max(axis=-1, keepdims=True)
    weights = np.exp(of - base)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total, (base + np.log(total))[..., 0]
