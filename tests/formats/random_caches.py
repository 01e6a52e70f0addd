# SPDX-License-Identifier: Apache-2.0
"""Caches of random bytes in every format: tensors(name, num_blocks, block_size, rng), and arrays laid out otherwise."""

import ml_dtypes
import numpy as np

KINDS = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
WIDTH = {
    "fp8_ds_mla": 656, "aiter_v4": 512, "model1": 584, "v4.1": 528, "v4.1_fp4": 288,
    "nvfp4_ds_mla": 352, "nvfp4_sglang": 416, "q8_0": 102, "q6_0": 78, "q8_KV": 104,
}  # fmt: skip
PAGES = {"model1": (584, 576), "v4.1": (528, 512), "v4.1_fp4": (288, 512)}  # bytes a token, multiple of a page


def some_bytes(rng, *shape):
    return rng.integers(0, 256, shape, np.uint8)


def scale(rng):
    return np.array([rng.uniform(0.5, 2) * 2.0 ** rng.integers(-20, 20)], np.float32)


def floats(rng, *shape):
    """f32 of any bits."""
    return rng.integers(0, 2**32, shape, np.uint64).astype(np.uint32).view(np.float32)


def tensors(name, blocks, size, rng):
    if name in KINDS:
        found = {"kv_cache": some_bytes(rng, blocks, size, 70).view(KINDS[name]), "kv_scale": scale(rng)}
        if rng.integers(2):
            found["kpe_scale"] = scale(rng)
        if rng.integers(2):
            found["kpe_cache"] = some_bytes(rng, blocks, size, 8)
        if rng.integers(2):
            found["kv_scale"] = floats(rng, blocks, size)
        return found
    if name.startswith("flashinfer"):
        split = {"kv_cache": some_bytes(rng, blocks, size, 512), "kpe_cache": some_bytes(rng, blocks, size, 64)}
        grouped = name.endswith("grouped")
        latent = {"ckv_scale": floats(rng, blocks, size, 4)} if grouped else {"kv_scale": scale(rng)}
        return split | latent | {"kpe_scale": scale(rng)}
    found = {"kv_cache": some_bytes(rng, blocks, size, WIDTH[name])}
    if name == "aiter_v4":
        found["kpe_cache"] = some_bytes(rng, blocks, size, 128).view(ml_dtypes.bfloat16)
    if name == "nvfp4_sglang":
        found["kv_scale"] = scale(rng)
    return found


def unaligned(array):
    """The array at an odd address."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def gaps(array):
    """The array with room after each row and each page; the room holds 0xFF."""
    wide = np.full((*(2 * n + 1 for n in array.shape[:-1]), array.shape[-1] + 3), 255, np.uint8)
    room = np.repeat(wide, array.itemsize, axis=-1).view(array.dtype)
    view = room[(*[slice(1, None, 2)] * (array.ndim - 1), slice(1, array.shape[-1] + 1))]
    view[...] = array
    return view


def page_gaps(array):
    """[blocks, size, bytes] with room after each page only; the room holds 0xFF."""
    blocks, size, row = array.shape
    memory = np.full((blocks, size * row + 37), 255, np.uint8)
    view = np.lib.stride_tricks.as_strided(memory, array.shape, (memory.strides[0], row, 1))
    view[...] = array
    return view


def backwards(array):
    """The array with its pages in memory from last to first."""
    return array[::-1].copy()[::-1]


def one_head(array):
    """[blocks, size, W] as engines with an axis for the KV head pass it: [blocks, size, 1, W]."""
    return array[:, :, None]
