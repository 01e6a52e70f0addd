# SPDX-License-Identifier: Apache-2.0
"""Layouts of caches as engines have them, to the canonical ones and back: axes, tokens without pages, which columns are
the value, bytes. All are views.

    canonical   kv_cache [P, S, D] = [num_blocks, block_size, D], or [P, S, K, D] with K key/value heads
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .. import dtypes
from ..arrays import Array, address, as_array, dtype_name
from ..errors import InputError
from ..geometry import check_integer


def cache_view(kv_cache: object, axes: str) -> Array:
    """kv_cache whose axes are the letters `axes` as [P, S, D], or [P, S, K, D] where it has more than one head: a view.

    P pages, S slots of a page, K key/value heads, D a row, 1 an axis of one.

    "PSD"    vLLM (triton_decode_attention.py, csrc/cpu/mla_decode.cpp), CUTLASS MLA, vllm.cpp
    "PSKD"   FlashMLA (flash_mla_interface.py), aiter (aiter/mla.py), LMDeploy (backends/cuda/attention/mla.py)
    "PKSD"   FlashInfer's trtllm-gen (flashinfer/mla/_core.py)
    "P1SKD"  TensorRT-LLM's pool (tests/unittest/_torch/attention/test_attention_mla.py)
    "SKD", "SD"   tokens without pages, blocks of one: SGLang's k_buffer (triton_ops/decode_attention.py)
    """
    array, where = _placed("kv_cache", kv_cache, axes)
    for axis in where.get("1", []):
        if array.shape[axis] != 1:
            raise InputError(f"kv_cache is {list(array.shape)}, expected 1 on axis {axis}: its axes are {axes}")
    heads = where.get("K", [])
    keep = where.get("P", []) + where["S"] + (heads if heads and array.shape[heads[0]] != 1 else []) + where["D"]
    view = array.transpose(keep + [axis for axis in range(array.ndim) if axis not in keep])
    view = view.reshape(view.shape[: len(keep)]) if view.size else np.empty(view.shape[: len(keep)], array.dtype)
    return view if "P" in where else view[:, None]


def from_cache_view(kv_cache: object, axes: str) -> Array:
    """The canonical kv_cache [P, S, D] or [P, S, K, D] with the axes `axes`, the other way round: a view."""
    array = as_array("kv_cache", kv_cache)
    if array.ndim not in (3, 4):
        raise InputError(f"kv_cache has {array.ndim} axes {list(array.shape)}, expected [P, S, D] or [P, S, K, D]")
    letters = "PSKD" if array.ndim == 4 else "PSD"
    where = _letters(axes)
    if "P" not in where:
        if array.shape[1] != 1:
            raise InputError(f"kv_cache has blocks of {array.shape[1]}, expected 1: its axes are to be {axes}")
        array, letters = array[:, 0], letters[1:].replace("P", "")
    if "K" in letters and "K" not in where:
        raise InputError(f"kv_cache is {list(array.shape)}, expected one key/value head: its axes are to be {axes}")
    order = [letters.index(letter) for letter in axes if letter in letters]
    view = array.transpose(order)
    for axis, letter in enumerate(axes):
        if letter not in letters:
            view = np.expand_dims(view, axis)
    return view


def tokens_as_blocks(kv_cache: object) -> Array:
    """kv_cache [P, S, ...] as blocks of one token [P * S, 1, ...], numbered by slot: a view.

    Pages must lie one after the other: a gap between them would be slots, too.
    """
    array = as_array("kv_cache", kv_cache)
    if array.ndim < 3:
        raise InputError(f"kv_cache is {list(array.shape)}, expected [P, S, D]")
    P, S = array.shape[:2]
    if P > 1 and S > 1 and array.size and array.strides[0] != S * array.strides[1]:
        raise InputError(
            f"kv_cache has pages {array.strides[0]} bytes apart, expected {S * array.strides[1]}:"
            f" {S} slots of {array.strides[1]} bytes"
        )
    return _strided(array, (P * S, 1, *array.shape[2:]), (array.strides[1 if S > 1 else 0], 0, *array.strides[2:]))


def blocks_of_tokens(kv_cache: object, block_size: int) -> Array:
    """kv_cache [tokens, 1, ...] as blocks of `block_size` [tokens / block_size, block_size, ...]: a view.

    SGLang's FlashMLA backend: k_cache.view(-1, 64, 1, 576) (layers/attention/flashmla_backend.py).
    """
    array = as_array("kv_cache", kv_cache)
    block_size = check_integer("block_size", block_size, least=1)
    if array.ndim < 3 or array.shape[1] != 1 or array.shape[0] % block_size:
        raise InputError(f"kv_cache is {list(array.shape)}, expected [tokens, 1, D], tokens a multiple of {block_size}")
    count, stride = array.shape[0] // block_size, array.strides[0]
    return _strided(array, (count, block_size, *array.shape[2:]), (block_size * stride, stride, *array.strides[2:]))


def value_columns(kv_cache: object, values: object) -> tuple[int, int]:
    """(value_offset, head_dim_v) of `values` [..., V], a view of columns of the rows of kv_cache [..., D].

    SGLang: v_buffer = k_buffer[..., :512] (triton_ops/decode_attention.py). llama.cpp: V is K's first 512 elements
    (src/models/deepseek2.cpp), in ik_llama.cpp those from 64 on.
    """
    rows, view = as_array("kv_cache", kv_cache), as_array("values", values)
    if dtype_name("values", view) != dtype_name("kv_cache", rows):
        raise InputError(f"values is {view.dtype}, expected {rows.dtype} as kv_cache is")
    offset, left = divmod(address(view) - address(rows), max(1, rows.itemsize))
    same = view.shape[:-1] == rows.shape[:-1] and view.strides == rows.strides
    if not same or left or not 0 <= offset <= rows.shape[-1] - view.shape[-1]:
        raise InputError(
            f"values {list(view.shape)} is no view of columns of kv_cache {list(rows.shape)},"
            " expected kv_cache[..., a:b]"
        )
    return offset, view.shape[-1]


def reinterpret(array: object, dtype: str, *, name: str = "kv_cache") -> Array:
    """The bytes of `array` [..., n] as `dtype`: a view. `name` is what messages call it.

    Engines hand packed rows over as u8, i8 or e4m3 alike (FlashMLA csrc/api/sparse_decode.h), and fp8 caches as u8
    (vLLM).
    """
    given = as_array(name, array)
    kind = dtypes.dtype(dtype)
    if given.ndim == 0 or given.size == 0:
        raise InputError(f"{name} is {list(given.shape)}, expected elements to read as {dtype}")
    if given.itemsize == kind.itemsize:
        return given.view(kind)
    if given.shape[-1] > 1 and given.strides[-1] != given.itemsize:
        raise InputError(f"{name} has an innermost stride of {given.strides[-1]} bytes, expected {given.itemsize}")
    if given.shape[-1] * given.itemsize % kind.itemsize:
        raise InputError(f"{name} has rows of {given.shape[-1] * given.itemsize} bytes, expected whole {dtype}")
    for what, value in [("address", address(given)), *((f"stride {s}", s) for s in given.strides[:-1])]:
        if value % kind.itemsize:
            raise InputError(f"{name} is misaligned for {dtype}: its {what} is no multiple of {kind.itemsize}")
    return given.view(kind)


def _letters(axes: str) -> dict[str, list[int]]:
    """Where each letter of `axes` is."""
    where: dict[str, list[int]] = {}
    for axis, letter in enumerate(axes):
        where.setdefault(letter, []).append(axis)
    single = all(len(where.get(letter, [])) <= 1 for letter in "PSKD")
    if not single or not {"S", "D"} <= where.keys() <= set("PSKD1") or axes[-1] != "D":
        raise InputError(f"axes is {axes!r}, expected P, S, K and 1 in any order, S among them, then D")
    return where


def _placed(name: str, value: object, axes: str) -> tuple[Array, dict[str, list[int]]]:
    where = _letters(axes)
    array = as_array(name, value)
    if array.ndim != len(axes):
        raise InputError(f"{name} has {array.ndim} axes {list(array.shape)}, expected {len(axes)}: [{', '.join(axes)}]")
    return array, where


def _strided(array: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    return as_strided(array, shape, strides) if array.size else np.empty(shape, array.dtype)
