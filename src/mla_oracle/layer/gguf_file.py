# SPDX-License-Identifier: Apache-2.0
"""A layer's weights in a GGUF file, through the package gguf, and its dequantisation where they are quantised.

    blk.N.attn_q_a, attn_q_a_norm, attn_q_b or attn_q, attn_kv_a_mqa, attn_kv_a_norm, attn_output
    blk.N.attn_kv_b                      as in Hugging Face, or split:
    blk.N.attn_k_b   ne {P, L, H}        the transpose of w_uk within each head
    blk.N.attn_v_b   ne {L, V, H}        w_uv
    blk.N.indexer.attn_q_b, attn_k, k_norm (and its bias), proj
    .weight follows, or .bias where the config has attention_bias

ne lists axes innermost first: the package hands a tensor over with its axes in numpy's order. Names: gguf 0.19,
constants.py. The split: ggml-org/llama.cpp 01a723d, conversion/deepseek.py (once in convert_hf_to_gguf.py), class
DeepseekV2Model, modify_tensors: kv_b_proj as [H, P + V, L] is parted along its second axis, and of the keys' part alone
the last two axes are swapped. A file that has both the whole and its parts must have them alike. Rows of rope are as
in Hugging Face: llama.cpp rotates adjacent pairs in these models.
"""

from __future__ import annotations

import math
import os
from os import PathLike
from typing import Any

import numpy as np

from ..arrays import Array
from ..errors import InputError, UnsupportedError
from .config import LayerConfig
from .gguf_reader import open_gguf
from .weights import Weights, check_weights

NAMES = {
    "attn_q": "q_proj",
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
    "attn_output": "o_proj",
    "indexer.attn_q_b": "indexer.wq_b",
    "indexer.attn_k": "indexer.wk",
    "indexer.k_norm": "indexer.k_norm",
    "indexer.proj": "indexer.weights_proj",
}
SPLIT = {"attn_k_b": "w_uk", "attn_v_b": "w_uv"}
# Of a block, but not of its attention.
OTHERS = ("attn_norm", "ffn_", "exp_probs_b", "post_attention", "post_ffw", "nextn", "layer_output")
# What the file says of the layer itself, and what the config calls it; set_gguf_parameters of the same class.
SIZES = {
    "attention.head_count": "num_heads",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}
ARCHITECTURES = ("deepseek2", "deepseek32", "glm-dsa", "minicpm3", "kimi-linear", "mistral4")


def read_gguf(path: str | PathLike[str], config: LayerConfig, layer: int) -> Weights:
    """The weights of block `layer`. Raises InputError, UnsupportedError for an unknown architecture, MissingError."""
    reader = open_gguf(os.fspath(path))
    architecture = _field(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(f"general.architecture is {architecture!r}, expected {', '.join(ARCHITECTURES)}")
    _check_facts(reader, architecture, config)
    prefix = f"blk.{layer}."
    arrays: dict[str, Array] = {}
    names = {key: f"{prefix}{name}.weight" for name, key in (NAMES | SPLIT).items()}
    names |= {f"{key}.bias": f"{prefix}{name}.bias" for name, key in NAMES.items()}
    keys = {name: key for key, name in names.items()}
    for tensor in reader.tensors:
        if not tensor.name.startswith(prefix) or tensor.name[len(prefix) :].startswith(OTHERS):
            continue
        key = keys.get(tensor.name, tensor.name)
        names.setdefault(key, tensor.name)
        array = _dequantised(tensor)
        if key == "w_uk":
            _check_key_part(tensor.name, array, config)
            array = array.swapaxes(1, 2)
        arrays[key] = array
    if not arrays:
        raise InputError(f"{os.fspath(path)} holds no tensor {prefix}attn_*, expected a layer's weights")
    if "w_uv" in arrays and not arrays.keys() & {"kv_b_proj", "w_uk"}:
        raise InputError(f"{names['w_uk']} is missing, expected {_key_part(config)}")
    if "kv_b_proj" in arrays and not arrays.keys().isdisjoint(SPLIT.values()):
        parts = {key: arrays.pop(key) for key in SPLIT.values() if key in arrays}
        whole = check_weights(arrays, config, names=names)
        for key, part in parts.items():
            if part.shape != whole[key].shape or not np.array_equal(part, whole[key]):
                raise InputError(f"{names[key]} is {list(part.shape)} and not the part of {names['kv_b_proj']}")
        return whole
    return check_weights(arrays, config, names=names)


def _check_facts(reader: Any, architecture: str, config: LayerConfig) -> None:
    """Raise InputError where the file's metadata contradicts the config."""
    g = config.geometry
    facts = {key: (name, getattr(g, name)) for key, name in SIZES.items()}
    facts["rope.freq_base"] = "rope_theta", g.rope_theta
    facts["attention.layer_norm_rms_epsilon"] = "rms_norm_eps", config.rms_norm_eps
    facts["rope.scaling.factor"] = "factor of YaRN", None if g.yarn is None else g.yarn.factor
    for key, (name, wanted) in facts.items():
        found = _field(reader, f"{architecture}.{key}")
        if isinstance(found, (int, float)) and wanted is not None and not math.isclose(found, wanted, rel_tol=1e-6):
            raise InputError(f"{architecture}.{key} is {found:g}, expected {wanted:g}: the config's {name}")


def _key_part(config: LayerConfig) -> list[int]:
    g = config.geometry
    return [g.num_heads, g.kv_lora_rank, g.qk_nope_head_dim]


def _check_key_part(name: str, array: Array, config: LayerConfig) -> None:
    g, wanted = config.geometry, _key_part(config)
    if list(array.shape) == wanted:
        return
    why = ""
    if array.ndim == 3 and list(array.shape) == [wanted[0], wanted[2], wanted[1]]:
        why = ": it is transposed within each head"
    elif array.ndim == 3 and list(array.shape[1:]) == wanted[1:]:
        why = f": {len(array)} heads where the config has {g.num_heads}"
    raise InputError(f"{name} is {list(array.shape)}, expected {wanted}{why}")


def _dequantised(tensor: Any) -> Array:
    """f64, f32 and f16 as they are; others in f32. [outermost axis, ..., innermost axis]"""
    from gguf import GGMLQuantizationType as Kind
    from gguf import dequantize

    shape = tuple(int(size) for size in reversed(tensor.shape))
    if tensor.tensor_type in (Kind.F32, Kind.F16, Kind.F64):
        return np.array(tensor.data).reshape(shape)
    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
    except NotImplementedError:
        raise UnsupportedError(f"{tensor.name} is {tensor.tensor_type.name}, which gguf cannot dequantise") from None


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
