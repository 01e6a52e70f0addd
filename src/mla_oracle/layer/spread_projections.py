# SPDX-License-Identifier: Apache-2.0
"""The errors of projections, norms and rotations, of the cached rows, and of the output projection (spread.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from ..verdict.noise import RMS, UNIT
from .limits import limit
from .pages import apart
from .spread import U32, Spread


def _projected(x: str, weight: str) -> Callable[[Spread, Array], Array]:
    def of(e: Spread, out: Array) -> Array:
        flat = out.reshape(len(out), -1)
        found = e.linear(e.state[x], e.squares(x), weight, flat)
        return np.sqrt(found).reshape(out.shape)

    return of


def _q(e: Spread, out: Array) -> Array:
    direct = e.state.geometry.q_lora_rank is None
    return _projected(*(("hidden_states", "q_proj") if direct else ("q_a_norm", "q_b_proj")))(e, out)


def _q_a_norm(e: Spread, out: Array) -> Array:
    eps = e.state.config.norm_eps
    return np.sqrt(e.norm(e.state["q_a"], e.squares("q_a"), "q_a_layernorm", eps, out, centred=False))


def _kv_a_norm(e: Spread, out: Array) -> Array:
    L = e.state.geometry.kv_lora_rank
    errors = e.squares("kv_a")
    errors = None if errors is None else errors[:, :L]
    return np.sqrt(
        e.norm(e.state["kv_a"][:, :L], errors, "kv_a_layernorm", e.state.config.norm_eps, out, centred=False)
    )


def _scaled(e: Spread, name: str, part: slice, factor: Array | float, out: Array) -> Array:
    """Of a part of a stage times a factor, which rounds where it is not 1, and is of f32 at best."""
    errors = e.squares(name)
    once = np.where(np.asarray(factor) == 1, 0.0, (RMS * max(UNIT[e.held], U32)) ** 2)
    found = once * np.square(out)
    total: Array = np.sqrt(found if errors is None else found + errors[..., part] * np.square(factor))
    return total


def _c_kv(e: Spread, out: Array) -> Array:
    return _scaled(e, "kv_a_norm", slice(None), e.state.geometry.mla_scale_kv_lora, out)


def _q_nope(e: Spread, out: Array) -> Array:
    return _scaled(e, "q", slice(0, e.state.geometry.qk_nope_head_dim), e.state.query_factor, out)


def _q_pe(e: Spread, out: Array) -> Array:
    s, P = e.state, e.state.geometry.qk_nope_head_dim
    factor = s.query_factor
    errors = e.squares("q")
    errors = None if errors is None else errors[..., P:] * np.square(factor)
    pairing = "interleaved" if s.geometry.rope_interleave else "neox"
    once = np.where(factor == 1, 0.0, (RMS * max(UNIT[e.held], U32)) ** 2)
    found = e.rotation(s["q"][..., P:] * factor, errors, out, pairing, "rope")
    total: Array = np.sqrt(found + once * np.square(out))
    return total


def _k_pe(e: Spread, out: Array) -> Array:
    s, L = e.state, e.state.geometry.kv_lora_rank
    errors = e.squares("kv_a")
    pairing = "interleaved" if s.geometry.rope_interleave else "neox"
    return np.sqrt(e.rotation(s["kv_a"][:, L:], None if errors is None else errors[:, L:], out, pairing, "rope"))


def _kv_cache(e: Spread, out: Array) -> Array:
    L, new = e.state.geometry.kv_lora_rank, len(e.state["hidden_states"])
    found = np.zeros_like(out)
    for name, part in (("c_kv", slice(0, L)), ("k_pe", slice(L, None))):
        if name in e.errors:
            found[-new:, part] = e.errors[name]
    s = e.state
    if s.store is None or not found.any():
        return found
    rows = np.concatenate([np.concatenate([s[f"past_{name}"], s[name]]) for name in ("c_kv", "k_pe")], axis=1)
    return apart(s.store, s.places, rows, found * limit(found).largest[:, None], len(s["past_c_kv"]), L)


def _out(e: Spread, out: Array) -> Array:
    errors = e.squares("attn")
    flat = e.state["attn"].reshape(len(out), -1)
    return np.sqrt(e.linear(flat, None if errors is None else errors.reshape(flat.shape), "o_proj", out))


SPREADS: dict[str, Callable[[Spread, Array], Array]] = {
    "q_a": _projected("hidden_states", "q_a_proj"),
    "q_a_norm": _q_a_norm,
    "q": _q,
    "kv_a": _projected("hidden_states", "kv_a_proj_with_mqa"),
    "kv_a_norm": _kv_a_norm,
    "c_kv": _c_kv,
    "q_nope": _q_nope,
    "q_pe": _q_pe,
    "k_pe": _k_pe,
    "kv_cache": _kv_cache,
    "index_gate": _projected("hidden_states", "indexer.index_kpool_compress_gate"),
    "out": _out,
}
