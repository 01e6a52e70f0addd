# SPDX-License-Identifier: Apache-2.0
"""The weights of one layer: which there are, their shapes, and what is wrong with those that a file holds.

    weights = read_weights("model.safetensors.index.json", config, layer=3)     or a folder, a .safetensors, a .gguf
    weights["q_b_proj"]                                                         [H (P + R), q_lora_rank], as stored

Names and axes are those of Hugging Face: y = x W^T. `w_uk` [H, P, L] and `w_uv` [H, V, L] are the two parts of
kv_b_proj, whose rows are those of head 0 (P of the key, then V of the value), of head 1, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np

from ..arrays import Array, as_array, dtype_name
from ..checks import WIDE_FLOATS, widen
from ..errors import InputError
from .config import LayerConfig

# What has a bias where a config has attention_bias (transformers 5.24, in all of these families): no q_proj has.
BIASED = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
# What their rows and columns are made of.
MADE_OF = {
    "q_proj": "num_attention_heads (qk_nope_head_dim + qk_rope_head_dim) x hidden_size",
    "q_a_proj": "q_lora_rank x hidden_size",
    "q_a_layernorm": "q_lora_rank",
    "q_b_proj": "num_attention_heads (qk_nope_head_dim + qk_rope_head_dim) x q_lora_rank",
    "kv_a_proj_with_mqa": "(kv_lora_rank + qk_rope_head_dim) x hidden_size",
    "kv_a_layernorm": "kv_lora_rank",
    "kv_b_proj": "num_attention_heads (qk_nope_head_dim + v_head_dim) x kv_lora_rank",
    "o_proj": "hidden_size x num_attention_heads v_head_dim",
    "w_uk": "num_attention_heads x qk_nope_head_dim x kv_lora_rank",
    "w_uv": "num_attention_heads x v_head_dim x kv_lora_rank",
    "indexer.wq_b": "index_n_heads index_head_dim x q_lora_rank",
    "indexer.wk": "index_head_dim x hidden_size",
    "indexer.weights_proj": "index_n_heads x hidden_size",
    "indexer.index_kpool_compress_ape": "index_kpool x index_head_dim",
    "indexer.index_kpool_compress_gate": "index_head_dim x hidden_size",
}


@dataclass(frozen=True, eq=False)
class Weights:
    """Arrays by name, checked."""

    arrays: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def dtypes(self) -> dict[str, str]:
        """The dtype of every weight, as it is stored."""
        return {name: dtype_name(name, array) for name, array in self.arrays.items()}

    def widened(self, real: Any) -> dict[str, Array]:
        return {name: widen(array, real) for name, array in self.arrays.items()}


def shapes(config: LayerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that a layer of `config` has."""
    g = config.geometry
    hidden, heads, latent = _hidden(config), g.num_heads, g.kv_lora_rank
    rows = heads * g.qk_head_dim
    found: dict[str, tuple[int, ...]]
    if g.q_lora_rank is None:
        found = {"q_proj": (rows, hidden)}
    else:
        rank = g.q_lora_rank
        found = {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (rows, rank)}
    found |= {
        "kv_a_proj_with_mqa": (g.latent_dim, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (g.qk_nope_head_dim + g.v_head_dim), latent),
        "o_proj": (hidden, heads * g.v_head_dim),
    }
    if config.attention_bias:
        found |= {f"{name}.bias": found[name][:1] for name in BIASED if name in found}
    if config.indexer is not None and not config.indexer.shared and g.q_lora_rank is not None:
        n, d = config.indexer.num_heads, config.indexer.head_dim
        found |= {
            "indexer.wq_b": (n * d, g.q_lora_rank),
            "indexer.wk": (d, hidden),
            "indexer.k_norm": (d,),
            "indexer.k_norm.bias": (d,),
            "indexer.weights_proj": (n, hidden),
        }
        if config.indexer.kpool is not None:
            found |= {
                "indexer.index_kpool_compress_ape": (config.indexer.kpool, d),
                "indexer.index_kpool_compress_gate": (d, hidden),
            }
    return found


def check_weights(
    given: Mapping[str, object], config: LayerConfig, *, names: Mapping[str, str] | None = None
) -> Weights:
    """The weights `given` by the names of `shapes`, checked; w_uk and w_uv may be given in the place of kv_b_proj.

    `names`: what the file calls each, for messages. Raises InputError for a missing or extra tensor, or a shape that
    is not the layer's: it is said where it is transposed, or the shape of another number of heads.
    """
    wanted = shapes(config)
    g = config.geometry
    split = {
        "w_uk": (g.num_heads, g.qk_nope_head_dim, g.kv_lora_rank),
        "w_uv": (g.num_heads, g.v_head_dim, g.kv_lora_rank),
    }
    if not given.keys().isdisjoint(split):
        del wanted["kv_b_proj"]
        wanted |= split
    called = {name: (names or {}).get(name, name) for name in (*wanted, *given)}
    arrays = {name: as_array(called[name], value) for name, value in given.items()}
    for name, array in arrays.items():
        if name not in wanted:
            why = f"a layer of this config has {', '.join(called[key] for key in wanted)}"
            if not config.attention_bias and name in [f"{of}.bias" for of in BIASED]:
                why = "the config has no attention_bias"
            raise InputError(f"{called[name]} is {list(array.shape)}, expected none: {why}")
    for name, shape in wanted.items():
        if name not in arrays:
            raise InputError(f"{called[name]} is missing, expected {list(shape)}")
        array = arrays[name]
        if array.shape != shape:
            raise InputError(
                f"{called[name]} is {list(array.shape)}, expected {list(shape)}"
                f"{_why(name, array.shape, shape, config)}"
            )
        kind = dtype_name(called[name], array)
        if kind not in WIDE_FLOATS:
            raise InputError(f"{called[name]} is {kind}, expected {' or '.join(WIDE_FLOATS)}")
        wide = widen(array, np.float64)
        if not np.isfinite(wide).all():
            index = tuple(int(i) for i in np.argwhere(~np.isfinite(wide))[0])
            raise InputError(f"{called[name]}{list(index)} is {wide[index]}, expected a number")
    if "kv_b_proj" in arrays:
        both = arrays.pop("kv_b_proj").reshape(g.num_heads, g.qk_nope_head_dim + g.v_head_dim, g.kv_lora_rank)
        arrays["w_uk"], arrays["w_uv"] = both[:, : g.qk_nope_head_dim], both[:, g.qk_nope_head_dim :]
    return Weights(arrays)


def read_weights(path: str | PathLike[str], config: LayerConfig, layer: int, *, prefix: str | None = None) -> Weights:
    """Layer `layer`'s weights in a safetensors file, its index.json, a folder with either, or a GGUF file.

    `prefix` of the names in safetensors; None: model.layers.LAYER.self_attn. Raises InputError, MissingError where the
    package gguf is needed and missing.
    """
    if fspath(path).endswith(".gguf"):
        from .gguf_file import read_gguf

        if prefix is not None:
            raise InputError(f"prefix is {prefix!r}, expected none for a GGUF file")
        return read_gguf(path, config, layer)
    from .hf_file import read_hf

    return read_hf(path, config, f"model.layers.{layer}.self_attn." if prefix is None else prefix)


def _hidden(config: LayerConfig) -> int:
    hidden = config.geometry.hidden_size
    if hidden is None:
        raise InputError("hidden_size is None, expected an integer for a whole layer")
    return hidden


def _why(name: str, found: tuple[int, ...], wanted: tuple[int, ...], config: LayerConfig) -> str:
    """What the shape of a weight tells about it, else which sizes of the config are its."""
    turned = found[:-2] + found[:-3:-1]
    if turned == wanted and len(wanted) > 1:
        return ": it is transposed" + (" within each head" if len(wanted) == 3 else "")
    heads = _heads(name, found, wanted, config)
    if heads is not None:
        return f": {heads} heads where the config has {config.geometry.num_heads}"
    heads = _heads(name, turned, wanted, config) if len(wanted) > 1 else None
    if heads is not None:
        return f": it is transposed, and of {heads} heads where the config has {config.geometry.num_heads}"
    return f": {MADE_OF[name]} of the config" if name in MADE_OF else ""


def _heads(name: str, found: tuple[int, ...], wanted: tuple[int, ...], config: LayerConfig) -> int | None:
    """The heads of a weight that is right but for their number."""
    g = config.geometry
    of_head = {
        "q_proj": (0, g.qk_head_dim),
        "q_b_proj": (0, g.qk_head_dim),
        "kv_b_proj": (0, g.qk_nope_head_dim + g.v_head_dim),
        "o_proj": (1, g.v_head_dim),
        "w_uk": (0, 1),
        "w_uv": (0, 1),
    }.get(name)
    if of_head is None or len(found) != len(wanted):
        return None
    axis, width = of_head
    others = [(a, b) for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if i != axis]
    return found[axis] // width if all(a == b for a, b in others) and found[axis] % width == 0 else None
