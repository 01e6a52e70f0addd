# SPDX-License-Identifier: Apache-2.0
"""A layer at work: its checked inputs, its weights in one number type, and the stages computed so far.

    state = prepare(config, weights, {"hidden_states": x, "positions": positions})
    state["hidden_states"], state.seen, state.mask
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arrays import Array, Axes
from ..checks import choice, number_type, widen
from ..errors import InputError
from ..geometry import Geometry
from ..rope import INTEGERS
from . import attention, indexer, pages
from .config import Indexer, LayerConfig
from .pages import Pages, Places, Store
from .rotation import ANGLE_MODES, regrouped, rotate
from .weights import Weights

INPUTS = {
    "hidden_states": "T C",
    "positions": "T",
    "past_c_kv": "S L",  # as cached: normed, and scaled in LongCat
    "past_k_pe": "S R",  # as cached: rotated, in the layout of the engine
    "past_index_k": "S d",
    "past_index_gate": "S d",  # with pooled keys
    "topk": "T k",  # of a shared layer: what the last full layer chose
    "slot_mapping": "T",  # of the paged form, and
    "block_table": "B blocks",  # see pages.py
}
FORMS = (*attention.FORMS, "paged")
# Where there are several sequences (sequences.py): their tokens, and their cached rows.
STARTS = ("qo_indptr", "past_indptr")


@dataclass
class State:
    """A layer at work: what is given, and the stages computed so far."""

    config: LayerConfig
    weights: dict[str, Array]  # in `real`
    values: dict[str, Array]  # inputs and stages, in `real`
    real: Any
    angles: str = "any"
    form: str = "naive"
    backend: str = "auto"
    store: Store | None = None  # of the paged form
    pages: Pages | None = None  # what the rows of the stage kv_cache are read from
    # Whether rotated rows have their pairs parted, as engines store them that rotate adjacent pairs by halves.
    parted: dict[str, bool] = field(default_factory=lambda: {"rope": False, "index_rope": False})

    def __getitem__(self, name: str) -> Array:
        return self.values[name]

    @property
    def geometry(self) -> Geometry:
        return self.config.geometry

    @property
    def indexer(self) -> Indexer:
        found = self.config.indexer
        assert found is not None
        return found

    @property
    def seen(self) -> Array:
        """[T, N] bool: the tokens that each query sees."""
        T = len(self["hidden_states"])
        return attention.visible(T, T + len(self["past_c_kv"]))

    @property
    def mask(self) -> Array:
        """[T, N] bool: the tokens that each query attends to."""
        seen = self.seen
        return seen if self.config.indexer is None else seen & indexer.selected(self["topk"], seen.shape[1])

    @property
    def query_factor(self) -> Array:
        """[T, 1, 1]: what multiplies a query after its projection: LongCat's scale, and Mistral 4's by position."""
        g = self.geometry
        factor = np.full(len(self["positions"]), g.mla_scale_q_lora, self.real)
        if g.llama_4_scaling_beta and g.yarn is not None:
            turns = self["positions"] // g.yarn.original_max_position_embeddings
            factor *= (1 + g.llama_4_scaling_beta * np.log1p(turns.astype(np.float64))).astype(self.real)
        return factor[:, None, None]

    @property
    def places(self) -> Places:
        """Of the paged form: where the rows lie."""
        assert self.store is not None
        return pages.places(self.store, self["block_table"], self["slot_mapping"], len(self["past_c_kv"]))

    @property
    def latents(self) -> Array:
        """[N, L]: the latent part of the cached rows."""
        return self["kv_cache"][:, : self.geometry.kv_lora_rank]

    def scores(self) -> Array:
        """[T, H, N] scaled scores: from the absorbed queries or the decompressed keys, where there are some."""
        parts = {name: self.values.get(name) for name in ("q_lat", "k_nope")}
        return attention.scores(
            self.geometry, self["q_nope"], self["q_pe"], self["kv_cache"], self.weights["w_uk"], self.mask, **parts
        )

    def linear(self, x: str, weight: str) -> Array:
        """x [T, ...] w^T [T, o], and its bias where it has one."""
        found: Array = self[x].reshape(len(self[x]), -1) @ self.weights[weight].T
        bias = self.weights.get(f"{weight}.bias")
        return found if bias is None else found + bias

    def rotated(self, x: Array, pairing: str, kind: str) -> Array:
        out = rotate(self.config, x, self["positions"], pairing, self.angles, self.real)
        parted = self.parted[kind] and pairing == "interleaved" and self.config.rotates
        return regrouped(self.config, out) if parted else out


def pooled(config: LayerConfig) -> bool:
    return config.indexer is not None and not config.indexer.shared and config.indexer.kpool is not None


def prepare(
    config: LayerConfig,
    weights: Weights,
    inputs: Mapping[str, object],
    *,
    precision: str = "f64",
    form: str = "naive",
    angles: str = "any",
    backend: str = "auto",
    store: Store | None = None,
) -> State:
    """A layer at work on checked inputs, no stage computed. Arguments as of `run`. Raises InputError."""
    real, allowed = number_type(precision)
    if (choice("form", form, FORMS) == "paged") != (store is not None):
        raise InputError(f"form is {form}, expected a store of cached rows with paged and with no other")
    choice("angles", angles, ANGLE_MODES)
    g = config.geometry
    axes = Axes(C=g.hidden_size or 0, L=g.kv_lora_rank, R=g.qk_rope_head_dim)
    kinds = {"hidden_states", "positions", "past_c_kv", "past_k_pe"}
    if config.indexer is not None:
        axes["d"] = config.indexer.head_dim
        kinds |= {"topk"} if config.indexer.shared else {"past_index_k"}
        kinds |= {"past_index_gate"} if pooled(config) else set()
    kinds |= set() if store is None else {"slot_mapping", "block_table"}
    for name in inputs:
        if name not in kinds:
            raise InputError(f"{name} is given, expected {', '.join(k for k in INPUTS if k in kinds)}")
    values: dict[str, Array] = {}
    for name, letters in INPUTS.items():
        if name not in kinds:
            continue
        if name not in inputs:
            if not name.startswith("past_"):
                raise InputError(f"{name} is missing, expected [{', '.join(letters.split())}]")
            if axes.get("S", 0):
                raise InputError(f"{name} is missing, expected {axes['S']} rows, as past_c_kv has")
            axes["S"] = 0
            values[name] = np.zeros((0, axes[letters.split()[1]]), real)
            continue
        whole = name in ("positions", "topk", "slot_mapping", "block_table")
        array = axes.take(name, inputs[name], letters, INTEGERS if whole else allowed)
        values[name] = np.array(array, np.int64) if whole else widen(array, real)
    if not axes["T"]:
        raise InputError("hidden_states has 0 tokens, expected 1 or more")
    for name, array in values.items():
        for index in np.argwhere(~np.isfinite(array))[:1]:
            raise InputError(f"{name}{index.tolist()} is {array[tuple(index)]}, expected a number")
    state = State(config, weights.widened(real), values, real, angles, form, backend, store)
    if store is not None:
        _ = state.places
    if "topk" in values:
        check_choice("topk", values["topk"], state.seen)
    return state


def check_choice(name: str, topk: Array, seen: Array) -> None:
    """Raise InputError unless topk [T, k] holds, for each query, distinct tokens that it sees, one or more, and -1."""
    for t, row in enumerate(topk):
        tokens = row[row >= 0]
        limit = int(seen[t].sum())
        if (row < -1).any() or (tokens >= limit).any():
            i = int(np.argmax((row < -1) | (row >= limit)))
            raise InputError(f"{name}[{t}, {i}] is {row[i]}, expected -1 or a token below {limit}")
        if not tokens.size or len(np.unique(tokens)) != len(tokens):
            raise InputError(f"{name}[{t}] has {tokens.size} tokens, expected distinct ones, 1 or more")
