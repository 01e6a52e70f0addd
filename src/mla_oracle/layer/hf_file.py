# SPDX-License-Identifier: Apache-2.0
"""A layer's weights in safetensors files, by their Hugging Face names.

    path    one file, model.safetensors.index.json, or a folder that holds either; shards lie beside the index
    names   PREFIX + q_a_proj.weight and so on, q_a_proj.bias where the config has attention_bias

A weight in e4m3 has its scales beside it: NAME.weight_scale_inv [rows / 128, columns / 128], rounded up, multiplies
its blocks of 128 x 128 (DeepSeek-V3.2-Exp, inference/model.py at 6d8cb70, weight_dequant; the hub's names).
"""

from __future__ import annotations

import os
from os import PathLike

import numpy as np

from ..arrays import Array
from ..dtypes import name_of
from ..errors import InputError
from ..files.rawfile import json_object, naming, open_regular, read_bytes, short
from ..files.tensorfile import read_tensors
from .config import LayerConfig
from .weights import Weights, check_weights, shapes

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BLOCK = 128
# Bare parameters; the others are modules with a `.weight`.
BARE = ("indexer.k_norm.bias", "indexer.index_kpool_compress_ape", "indexer.index_kpool_compress_gate")
IGNORED = ("rotary_emb.inv_freq",)  # what rope computes anyway


def read_hf(path: str | PathLike[str], config: LayerConfig, prefix: str) -> Weights:
    """The weights whose names begin with `prefix`. Raises InputError."""
    found = _read(os.fspath(path), prefix)
    if not found:
        raise InputError(f"{os.fspath(path)} holds no tensor {prefix}*, expected a layer's weights")
    scales = {name: found.pop(name) for name in [*found] if name.endswith(".weight_scale_inv")}
    arrays, names = {}, {}
    for name, array in found.items():
        key = name[len(prefix) :]
        if key in IGNORED:
            continue
        key = key if key in BARE else key.removesuffix(".weight")
        scale = scales.pop(f"{name}_scale_inv", None)
        arrays[key], names[key] = _dequantised(name, array, scale), name
    for name, array in scales.items():
        raise InputError(f"{name} is {list(array.shape)}, expected none: it has no weight beside it")
    for key in shapes(config):
        bare = key in BARE or key.endswith(".bias")
        names.setdefault(key, f"{prefix}{key}" if bare else f"{prefix}{key}.weight")
    return check_weights(arrays, config, names=names)


def files_of(path: str) -> list[str]:
    """The files that hold the weights: where there is an index, it and every shard it names. Raises InputError."""
    file = _inside(path)
    if not file.endswith(".json"):
        return [file]
    return [file, *(os.path.join(os.path.dirname(file), shard) for shard in dict.fromkeys(_shards(file).values()))]


def _inside(path: str) -> str:
    """The file of a folder that tells where its weights are, or the file itself."""
    if not os.path.isdir(path):
        return path
    for file in (os.path.join(path, name) for name in (INDEX, SINGLE)):
        if os.path.exists(file):
            return file
    raise InputError(f"{path} holds neither {INDEX} nor {SINGLE}")


def _shards(path: str, prefix: str = "") -> dict[str, str]:
    """The shard of every tensor whose name begins with `prefix`, by the index."""
    with naming(path, "read"), open_regular(path) as opened:
        index = json_object(read_bytes(opened, os.fstat(opened.fileno()).st_size).tobytes(), "it").get("weight_map")
        if not isinstance(index, dict):
            raise InputError(f"weight_map is {short(index)}, expected an object")
        wanted = {name: shard for name, shard in index.items() if name.startswith(prefix)}
        for name, shard in wanted.items():
            if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard:
                raise InputError(f"weight_map has {short(shard)} for {name}, expected the name of a file beside it")
    return wanted


def _read(path: str, prefix: str) -> dict[str, Array]:
    path = _inside(path)
    if not path.endswith(".json"):
        return read_tensors(path, wanted=lambda name: name.startswith(prefix))[0]
    of_layer = _shards(path, prefix)
    found: dict[str, Array] = {}
    for shard in dict.fromkeys(of_layer.values()):
        tensors, _ = read_tensors(os.path.join(os.path.dirname(path), shard), wanted=of_layer.__contains__)
        for name, of in of_layer.items():
            if of == shard and name not in tensors:
                raise InputError(f"{shard} holds no {name}, expected it: the index says so")
        found |= tensors
    return found


def _dequantised(name: str, weight: Array, scale: Array | None) -> Array:
    """`weight`, in f32 where it has scales."""
    if scale is None:
        if name_of(weight.dtype) == "e4m3":
            raise InputError(f"{name} is e4m3 {list(weight.shape)} and {name}_scale_inv is missing")
        return weight
    wanted = [-(-size // BLOCK) for size in weight.shape]
    if weight.ndim != 2 or list(scale.shape) != wanted:
        raise InputError(
            f"{name}_scale_inv is {list(scale.shape)}, expected {wanted}: a scale for each {BLOCK} x {BLOCK} of"
            f" {list(weight.shape)}"
        )
    rows, columns = weight.shape
    each = np.repeat(np.repeat(scale.astype(np.float32), BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :columns]
    product: Array = weight.astype(np.float32) * each
    return product
