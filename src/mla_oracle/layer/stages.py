# SPDX-License-Identifier: Apache-2.0
"""One attention layer, stage by stage: hidden states [T, C] of a sequence's last T tokens -> its output [T, C].

    values = run(config, weights, inputs)              every stage in f64; precision="f32", form="absorbed", ...
    values["c_kv"], values["out"]                      the names and axes are those of STAGES

S rows were cached before, N = S + T; H heads; P, R, V, L, Q = q_lora_rank and C = hidden_size as in Geometry; n and d
are the heads of the indexer and their size; keys are tokens or pools. In order, each computed from those before it:

    q_a [T, Q]   q_a_norm [T, Q]   q [T, H, P+R]   kv_a [T, L+R]   kv_a_norm [T, L]   c_kv [T, L]
    q_nope [T, H, P]   q_pe [T, H, R]   k_pe [T, R]   kv_cache [N, L+R]
    index_q [T, n, d]   index_k [T, d]   index_gate [T, d]   index_keys [keys, d]   index_weights [T, n]
    index_scores [T, keys]   topk [T, k]
    k_nope [N, H, P]   v [N, H, V]   q_lat [T, H, L]   scores [T, H, N]   lse [T, H]   p [T, H, N]
    o_lat [T, H, L]   attn [T, H, V]   out [T, C]

To add one, add it to STAGES, and its errors to a spread_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ..arrays import Array
from ..checks import choice
from ..dense import absorb_query
from . import attention, indexer, pages
from .config import PAIRINGS, LayerConfig
from .pages import Store
from .sequences import joined, sequences
from .state import State, pooled
from .weights import Weights


class Stage(NamedTuple):
    axes: str
    meaning: str
    compute: Callable[[State], Array]
    exists: Callable[[LayerConfig], bool] = lambda config: True


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean x^2 + eps) weight, over the last axis."""
    real = x.dtype.type
    mean = np.square(x).mean(axis=-1, keepdims=True, dtype=real)
    found: Array = x / np.sqrt(mean + real(eps)) * weight
    return found


def _q(s: State) -> Array:
    flat = s.linear("hidden_states", "q_proj") if s.geometry.q_lora_rank is None else s.linear("q_a_norm", "q_b_proj")
    return flat.reshape(len(flat), s.geometry.num_heads, s.geometry.qk_head_dim)


def _pairing(s: State) -> str:
    return PAIRINGS[not s.geometry.rope_interleave]


def _index_rows(s: State, x: Array) -> Array:
    """Rows of the indexer, rotated and transformed where it does that."""
    if s.indexer.pairing is not None:
        x = s.rotated(x, s.indexer.pairing, "index_rope")
    return indexer.hadamard(x) if s.indexer.hadamard else x


def _index_q(s: State) -> Array:
    q = s.linear("q_a_norm", "indexer.wq_b")
    return _index_rows(s, q.reshape(len(q), s.indexer.num_heads, s.indexer.head_dim))


def _index_k(s: State) -> Array:
    x, w = s.linear("hidden_states", "indexer.wk"), s.weights
    k = indexer.layer_norm(x, w["indexer.k_norm"], w["indexer.k_norm.bias"], s.indexer.norm_eps)
    return _index_rows(s, k[:, None])[:, 0]


def _index_keys(s: State) -> Array:
    keys = np.concatenate([s["past_index_k"], s["index_k"]])
    if s.indexer.kpool is None:
        return keys
    gate = np.concatenate([s["past_index_gate"], s["index_gate"]])
    return indexer.pool_keys(keys, gate, s.weights["indexer.index_kpool_compress_ape"])


def _index_scores(s: State) -> Array:
    return indexer.score(
        s.indexer, s["index_q"], s["index_keys"], s["index_weights"], indexer.seen_pools(s.indexer, s.seen)
    )


def _kv_cache(s: State) -> Array:
    rows = (np.concatenate([s[f"past_{name}"], s[name]]) for name in ("c_kv", "k_pe"))
    found: Array = np.concatenate([*rows], axis=1)
    if s.store is None:
        return found
    s.pages = pages.written(s.store, s.places, found, len(s["past_c_kv"]), s.geometry.kv_lora_rank)
    return pages.read_back(s.pages, s.places, s.store.block_size, s.real)


def _attn(s: State) -> Array:
    w = s.weights
    if s.pages is not None:
        q_lat = absorb_query(s["q_nope"], w["w_uk"], precision=_precision(s))
        q = np.concatenate([q_lat, s["q_pe"]], axis=-1)
        o_lat = pages.attend(s.pages, s.places, s.geometry, q, s.mask, s.seen, s.backend)
        found: Array = np.einsum("thl,hvl->thv", o_lat, w["w_uv"], optimize=True)
        return found
    return attention.attend(
        s.geometry, s["q_nope"], s["q_pe"], s["kv_cache"], w["w_uk"], w["w_uv"], s.mask, form=s.form, backend=s.backend
    )


def _of_cache(s: State, weight: str) -> Array:
    found: Array = np.einsum("nl,hol->nho", s.latents, s.weights[weight], optimize=True)
    return found


def _full(config: LayerConfig) -> bool:
    return config.indexer is not None and not config.indexer.shared


def _low_rank(config: LayerConfig) -> bool:
    return config.geometry.q_lora_rank is not None


def _precision(s: State) -> str:
    return "f32" if s.real == np.float32 else "f64"


STAGES: dict[str, Stage] = {
    "q_a": Stage("T Q", "q_a_proj of the hidden states", lambda s: s.linear("hidden_states", "q_a_proj"), _low_rank),
    "q_a_norm": Stage(
        "T Q", "its RMSNorm", lambda s: rms_norm(s["q_a"], s.weights["q_a_layernorm"], s.config.norm_eps), _low_rank
    ),
    "q": Stage("T H P+R", "q_b_proj of that, or q_proj of the hidden states", _q),
    "kv_a": Stage(
        "T L+R", "kv_a_proj_with_mqa of the hidden states", lambda s: s.linear("hidden_states", "kv_a_proj_with_mqa")
    ),
    "kv_a_norm": Stage(
        "T L",
        "RMSNorm of its first L elements",
        lambda s: rms_norm(
            s["kv_a"][:, : s.geometry.kv_lora_rank], s.weights["kv_a_layernorm"], s.config.norm_eps
        ),
    ),
    "c_kv": Stage(
        "T L",
        "what is cached of that: times LongCat's scale",
        lambda s: s["kv_a_norm"] * s.real(s.geometry.mla_scale_kv_lora),
    ),
    "q_nope": Stage(
        "T H P",
        "the first P elements of q, times LongCat's scale",
        lambda s: s["q"][..., : s.geometry.qk_nope_head_dim] * s.query_factor,
    ),
    "q_pe": Stage(
        "T H R",
        "the others, rotated, times that scale",
        lambda s: s.rotated(s["q"][..., s.geometry.qk_nope_head_dim :], _pairing(s), "rope") * s.query_factor,
    ),
    "k_pe": Stage(
        "T R",
        "the last R elements of kv_a, rotated",
        lambda s: s.rotated(s["kv_a"][:, None, s.geometry.kv_lora_rank :], _pairing(s), "rope")[:, 0],
    ),
    "kv_cache": Stage("N L+R", "the cached rows, the new ones last; of the paged form as read back", _kv_cache),
    "index_q": Stage("T n d", "the indexer's queries, rotated", _index_q, _full),
    "index_k": Stage("T d", "its keys, normed and rotated", _index_k, _full),
    "index_gate": Stage(
        "T d",
        "the gate of pooled keys",
        lambda s: s.linear("hidden_states", "indexer.index_kpool_compress_gate"),
        pooled,
    ),
    "index_keys": Stage("keys d", "all its keys: of tokens, or pooled", _index_keys, _full),
    "index_weights": Stage(
        "T n",
        "the weight of each of its heads",
        lambda s: s.linear("hidden_states", "indexer.weights_proj") / np.sqrt(s.real(s.indexer.num_heads)),
        _full,
    ),
    "index_scores": Stage("T keys", "its scores, -inf where a key is not seen", _index_scores, _full),
    "topk": Stage(
        "T k",
        "the chosen tokens, ascending, then -1",
        lambda s: indexer.choose(s.indexer, s["index_scores"], s.seen),
        _full,
    ),
    "k_nope": Stage("N H P", "decompressed keys", lambda s: _of_cache(s, "w_uk")),
    "v": Stage("N H V", "decompressed values", lambda s: _of_cache(s, "w_uv")),
    "q_lat": Stage(
        "T H L",
        "absorbed queries",
        lambda s: absorb_query(s["q_nope"], s.weights["w_uk"], precision=_precision(s)),
    ),
    "scores": Stage("T H N", "scaled scores, -inf where a query does not attend", State.scores),
    "lse": Stage("T H", "log of the sum of their exponentials", lambda s: attention.softmax(s.scores())[1]),
    "p": Stage("T H N", "their softmax", lambda s: attention.softmax(s.scores())[0]),
    "o_lat": Stage(
        "T H L",
        "the latent output of the absorbed form",
        lambda s: np.einsum("thn,nl->thl", attention.softmax(s.scores())[0], s.latents, optimize=True),
    ),
    "attn": Stage("T H V", "the heads' outputs", _attn),
    "out": Stage("T C", "o_proj of that", lambda s: s.linear("attn", "o_proj")),
}


def stages_of(config: LayerConfig) -> dict[str, Stage]:
    """The stages that a layer of `config` has, in order."""
    return {name: stage for name, stage in STAGES.items() if stage.exists(config)}


def run(
    config: LayerConfig,
    weights: Weights,
    inputs: Mapping[str, object],
    *,
    precision: str = "f64",
    form: str = "naive",
    angles: str = "closed",
    rope_layout: str | None = None,
    backend: str = "auto",
    store: Store | None = None,
) -> dict[str, Array]:
    """Every stage of a layer, in the number type of `precision`; of a shared layer, its `topk` is among the inputs.

    `inputs`: hidden_states [T, C] and positions [T]; past_c_kv [S, L] and past_k_pe [S, R] where rows were cached
    before, with an indexer past_index_k [S, d] and with pooled keys past_index_gate [S, d]; topk [T, k] of a shared
    layer; qo_indptr [B + 1] and past_indptr [B + 1] of several sequences (sequences.py); of the paged form slot_mapping
    [T] and block_table [B, blocks]. `form` naive, absorbed or paged, which takes the `store` of its cached rows;
    `angles` and `backend` as in rope and in dense. `rope_layout` neox: rotated rows have their pairs parted, as
    past_k_pe then has. Raises InputError.
    """
    how = {"precision": precision, "form": form, "angles": angles, "backend": backend, "store": store}
    parted = rope_layout is not None and choice("rope_layout", rope_layout, PAIRINGS) == "neox"
    found: dict[str, list[Array]] = {name: [] for name in stages_of(config)}
    for sequence in sequences(config, weights, inputs, **how):
        state = sequence.state
        state.parted["rope"] = parted
        for name, parts in found.items():
            state.values[name] = STAGES[name].compute(state)
            parts.append(state.values[name])
    return {name: joined(name, STAGES[name].axes, parts) for name, parts in found.items()}
