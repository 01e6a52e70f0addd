# SPDX-License-Identifier: Apache-2.0
"""What a layer is, beside its weights: geometry, norms, the indexer of sparse attention, LongRoPE's tables.

    config = LayerConfig.from_hf_config("path/to/config.json", layer=3)
    config.geometry, config.norm_eps, config.indexer

The sizes are Geometry's. What a config.json does not say and engines read differently is a convention, and given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from ..arrays import Array
from ..checks import choice
from ..errors import InputError, UnsupportedError
from ..geometry import Geometry, check_bool, check_integer, check_number, show
from ..geometry.config_section import Section
from ..geometry.hf_config import load, text_section

# model_type -> how its indexer rotates, None: not at all. transformers 5.24: deepseek_v32, glm_moe_dsa and glm5_next,
# modeling_*.py, class *Indexer. DeepSeek's first code (DeepSeek-V3.2-Exp, inference/model.py at 6d8cb70) rotated
# adjacent pairs; its README of 2025-11-17 says that the indexer needs halves.
INDEXERS = {"deepseek_v32": "neox", "glm_moe_dsa": "interleaved", "glm5_next": None, "glm5_next_text": None}
PAIRINGS = ("interleaved", "neox")


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The lightning indexer of DeepSeek Sparse Attention: which top-k tokens a query attends to.

    With `kpool`, keys are pooled in groups of that many tokens and top-k / kpool pools are chosen (GLM-5.3-Flash);
    the tokens of the query's own incomplete pool are chosen as well. A shared layer has no indexer of its own: it is
    given the choice of the last full one.
    """

    num_heads: int
    head_dim: int
    topk: int
    pairing: str | None = None  # of the first qk_rope_head_dim elements; None: nothing is rotated
    hadamard: bool = False  # q and k times the orthonormal Hadamard matrix, which leaves their products alone
    scores: str = "f32"  # or fp8: q and k as e4m3 with one power-of-two scale a row
    norm_eps: float = 1e-6  # of the LayerNorm of its keys
    kpool: int | None = None  # None: tokens are chosen
    shared: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "topk"):
            check_integer(f"indexer {name}", getattr(self, name), least=1)
        if self.pairing is not None:
            choice("index_rope", self.pairing, PAIRINGS)
        choice("index_scores", self.scores, ("f32", "fp8"))
        check_bool("index_hadamard", self.hadamard)
        if self.hadamard and self.head_dim & (self.head_dim - 1):
            raise InputError(f"indexer head_dim is {self.head_dim}, expected a power of two with Hadamard")
        if self.kpool is not None:
            check_integer("index_kpool", self.kpool, least=1)
            if self.topk % self.kpool:
                raise InputError(f"index_kpool is {self.kpool}, expected a divisor of top-k, {self.topk}")
        if self.kpool is not None and self.scores == "fp8":
            raise UnsupportedError("index_scores is fp8, expected f32 with pooled keys")


@dataclass(frozen=True, kw_only=True, eq=False)
class LongRope:
    """LongRoPE's tables: pair j turns by position / (factor[j] base^(2j/R)), cosines and sines times `amplitude`.

    transformers takes the long factors where a call's last position + 1 exceeds the original context, and so does this.
    """

    base: float
    short: Array  # [R/2]
    long: Array  # [R/2]
    original_max_position_embeddings: int
    amplitude: float


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One attention layer. `norm_eps` is that of the latent norms: transformers has 1e-6 there whatever the file says
    (but in glm5_next), engines take rms_norm_eps. Norms are computed in f32, whatever the layer stores."""

    geometry: Geometry
    norm_eps: float
    rms_norm_eps: float | None = None  # what the config says; norm_eps may be given in its place
    attention_bias: bool = False  # of q_a_proj, kv_a_proj_with_mqa and o_proj
    indexer: Indexer | None = None
    longrope: LongRope | None = None

    def __post_init__(self) -> None:
        check_number("norm_eps", self.norm_eps, least=0)
        check_bool("attention_bias", self.attention_bias)
        if self.geometry.hidden_size is None:
            raise InputError("hidden_size is None, expected an integer for a whole layer")
        if self.geometry.longrope and self.longrope is None:
            raise InputError("the geometry has longrope, expected its tables")
        if self.indexer is not None and self.geometry.q_lora_rank is None:
            raise InputError("q_lora_rank is None, expected an integer with an indexer")
        pairing = None if self.indexer is None else self.indexer.pairing
        rotated = self.geometry.qk_rope_head_dim
        if pairing is not None and self.indexer is not None and not 0 < rotated <= self.indexer.head_dim:
            raise InputError(f"index_rope is {pairing}, expected none with {rotated} rope elements")

    @property
    def rotates(self) -> bool:
        """Whether anything is: not in a NoPE model."""
        g = self.geometry
        return g.qk_rope_head_dim > 0 and (g.rope_theta is not None or self.longrope is not None)

    @classmethod
    def from_hf_config(
        cls,
        config: str | PathLike[str] | Mapping[str, Any],
        layer: int = 0,
        *,
        norm_eps: float | None = None,
        index_rope: str | None = None,
        index_hadamard: bool = False,
        index_scores: str = "f32",
        index_kpool: int | None = None,
    ) -> LayerConfig:
        """Layer number `layer` of the model that a config.json describes: its path, its folder, or its content.

        What is given takes the place of what the file says. Raises InputError, and UnsupportedError for an unknown
        architecture.
        """
        content = config if isinstance(config, Mapping) else load(config)
        geometry = Geometry.from_hf_config(content)
        section = text_section(content)
        model_type = section["model_type"].value
        biases = section.given("attention_bias") and section.flag("attention_bias", False)
        layers = section.integer("num_hidden_layers") if section.given("num_hidden_layers") else None
        check_integer("layer", layer, least=0)
        if layers is not None and layer >= layers:
            raise InputError(f"layer is {layer}, expected below {section['num_hidden_layers'].name}, {layers}")
        said = section.number("rms_norm_eps", least=0) if section.given("rms_norm_eps") else None
        indexer = None
        if model_type in INDEXERS:
            if index_kpool is None and section.given("index_kpool"):
                index_kpool = section.integer("index_kpool")
            if section.given("index_kpool_always_select_tail"):
                section.expect("index_kpool_always_select_tail", True, model_type)
            indexer = Indexer(
                num_heads=section.integer("index_n_heads"),
                head_dim=section.integer("index_head_dim"),
                topk=section.integer("index_topk"),
                pairing=index_rope or _pairing(section, model_type),
                hadamard=index_hadamard,
                scores=index_scores,
                kpool=index_kpool,
                shared=_shared(section, layer),
            )
        elif index_rope or index_hadamard or index_kpool or index_scores != "f32":
            raise InputError(f"a convention of the indexer is given, expected none: {model_type} has no indexer")
        longrope = _longrope(section, geometry) if geometry.longrope else None
        return cls(
            geometry=geometry,
            norm_eps=section.number("rms_norm_eps", least=0) if norm_eps is None else norm_eps,
            rms_norm_eps=said,
            attention_bias=biases,
            indexer=indexer,
            longrope=longrope,
        )


def _pairing(section: Section, model_type: str) -> str | None:
    if section.given("indexer_rope_interleave") and INDEXERS[model_type] is not None:
        return PAIRINGS[not section.flag("indexer_rope_interleave", True)]
    return INDEXERS[model_type]


def _shared(section: Section, layer: int) -> bool:
    """Whether a layer reuses the last full one's choice: `indexer_types`, a pattern of F and S, or every so many-th.

    transformers 5.24, configuration_glm_moe_dsa.py.
    """
    for key in ("indexer_types", "index_topk_pattern"):
        if not section.given(key):
            continue
        kinds = section[key].value
        if not isinstance(kinds, (list, tuple, str)) or layer >= len(kinds):
            raise InputError(f"{section[key].name} is {show(kinds)}, expected one entry a layer")
        kind = {"F": "full", "S": "shared"}.get(str(kinds[layer]), kinds[layer])
        if kind not in ("full", "shared"):
            raise InputError(f"{section[key].name}[{layer}] is {show(kind)}, expected full or shared")
        return bool(kind == "shared")
    every = section.integer("index_topk_freq") if section.given("index_topk_freq") else 1
    offset = section.integer("index_skip_topk_offset", least=0) if section.given("index_skip_topk_offset") else 2
    return max(layer - offset + 1, 0) % every != 0


def _longrope(section: Section, geometry: Geometry) -> LongRope:
    """transformers 5.24, modeling_rope_utils.py: `factor` is new over original context where it is not given."""
    group = next(key for key in ("rope_parameters", "rope_scaling") if section.given(key))
    rope = Section(section[group].value, f"{section[group].name}.")
    original = rope if rope.given("original_max_position_embeddings") else section
    context = original.integer("original_max_position_embeddings")
    factor = (
        rope.number("factor", above=0)
        if rope.given("factor")
        else section.integer("max_position_embeddings") / context
    )
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    if rope.given("attention_factor"):
        amplitude = rope.number("attention_factor", above=0)
    base = (rope if rope.given("rope_theta") else section).number("rope_theta", 1e4, above=0)
    pairs = geometry.qk_rope_head_dim // 2
    tables = {}
    for key in ("short_factor", "long_factor"):
        values = rope.take(key).value
        if not isinstance(values, (list, tuple)) or len(values) != pairs:
            found = len(values) if isinstance(values, (list, tuple)) else show(values)
            raise InputError(f"{rope[key].name} has {found} factors, expected {pairs}: qk_rope_head_dim / 2")
        tables[key] = np.array([check_number(f"{rope[key].name}[{j}]", x, above=0) for j, x in enumerate(values)])
    return LongRope(
        base=base,
        short=tables["short_factor"],
        long=tables["long_factor"],
        original_max_position_embeddings=context,
        amplitude=amplitude,
    )
