# SPDX-License-Identifier: Apache-2.0
"""Written and read back, a number is within the bound of its format: half a step of the codes, and the roundings.

Unit roundoffs: e4m3 2^-4, e5m2 2^-3 (p bits of precision: 2^-p), bf16 2^-8, f32 2^-24; half of the smallest step of
e4m3 is 2^-10, of e4m3fnuz 2^-11, of e5m2 2^-17; e2m1 has steps of 1/2, 1 and 2, so half a step is at most a quarter of
the number, or of 1 below it. A scale that is a power of two adds nothing: the quotient and the product are exact. Any
other adds one f32 rounding of the quotient and the roundings of the reader.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_caches import PAGES, backwards, gaps, page_gaps, unaligned

from mla_oracle import formats

BF16, F32 = 2.0**-8, 2.0**-24
E4M3 = (2.0**-4, 2.0**-10)
# Of what a reader makes of an exact product, relative to it: bf16 rounds the scale and then the product.
READER = {"fold": 0.0, "f32": F32, "f32_bf16": F32 + BF16, "f32_f16": F32 + 2.0**-11, "bf16": 2 * BF16 + BF16**2}
POWERS = {"flashmla", "vllm_pow2", "lmdeploy_pow2"}
EVERY = [
    (name, writer, reader)
    for name in formats.NAMES
    for writer in formats.get(name).writers
    for reader in formats.get(name).readers
    if reader not in ("exponent", "e8m0_rz") or writer in POWERS  # these readers need a power of two
]


def arrays(seed, shape):
    """Normal numbers of widely different rows and columns, a few zeros, as f32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (*shape[:2], 1)))
    x *= np.exp2(rng.integers(-8, 1, shape))
    x[rng.random(shape) < 0.02] = 0
    return x.astype(np.float32)


def wide(scales, size):
    """[.., G] -> [.., G * size] f64."""
    return np.repeat(np.asarray(scales, np.float64), size, axis=-1)


def bound(name, writer, reader, x, tensors):
    """The largest error that is honest, [blocks, size, D] f64."""
    size = np.abs(x.astype(np.float64))
    cache = tensors["kv_cache"]
    rope = np.maximum(size * BF16, 2.0**-134)
    if name in ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2"):
        unit, half = {"fp8_e4m3": E4M3, "fp8_e4m3fnuz": (2.0**-4, 2.0**-11), "fp8_e5m2": (2.0**-3, 2.0**-17)}[name]
        code = np.maximum(size * unit, float(tensors["kv_scale"][0]) * half)
        subnormal = 2.0**-25 if reader == "f32_f16" else 0.0
        return code + (size + code) * (READER[reader] + 2 * F32) + subnormal
    if name.startswith("flashinfer"):
        groups = tensors.get("ckv_scale")
        latent = (
            wide(np.broadcast_to(tensors["kv_scale"], (*x.shape[:2], 1)), 512) if groups is None else wide(groups, 128)
        )
        scale = np.concatenate([latent, np.full((*x.shape[:2], 64), float(tensors["kpe_scale"][0]))], axis=-1)
        code = np.maximum(size * E4M3[0], scale * E4M3[1])
        slack = np.full(x.shape, READER.get(reader, 0.0) + 2 * F32)
        slack[..., 512:] = (READER["bf16"] if groups is not None else READER[reader]) + 2 * F32
        if groups is not None and writer in POWERS:
            slack[..., :512] = 0
        return code + (size + code) * slack
    if name == "fp8_ds_mla":
        scale = wide(np.ascontiguousarray(cache[..., 512:528]).view("<f4"), 128)
        code = np.maximum(size[..., :512] * E4M3[0], scale * E4M3[1])
        if writer not in POWERS:
            code += (size[..., :512] + code) * (READER[reader] + F32)
        return np.concatenate([code, rope[..., 512:]], axis=-1)
    if name in ("model1", "v4.1", "aiter_v4"):
        tile = {"model1": 64, "v4.1": 32, "aiter_v4": 64}[name]
        latent = 512 if name == "v4.1" else 448
        top = np.abs(x[..., :latent]).reshape(*x.shape[:2], -1, tile).max(-1)
        least = 2.0**-22 if writer == "vllm" else 2.0**-13
        scale = wide(np.maximum(np.exp2(np.ceil(np.log2(np.maximum(top, 1e-30) / 448))), least), tile)
        code = np.maximum(size[..., :latent] * E4M3[0], scale * E4M3[1])
        return np.concatenate([code, rope[..., latent:]], axis=-1)
    if name == "q8_0":
        d = np.abs(x).reshape(*x.shape[:2], -1, 32).max(-1).astype(np.float64) / 127
        f16 = np.maximum(d * 2.0**-11, 2.0**-25)  # what storing d as f16 adds, of at most 127 of them
        return wide(d * (0.5 + 127 * 4 * F32) + 127 * f16, 32)
    if name == "q6_0":  # 31 is the most, and what is opposite to the largest may be 32
        d = np.abs(x).reshape(*x.shape[:2], -1, 32).max(-1).astype(np.float64) / 32
        return wide(d * (1 + 32 * 4 * F32) + 32 * np.maximum(d * 2.0**-11, 2.0**-25), 32)
    if name == "q8_KV":
        return wide(np.abs(x).max(-1, keepdims=True).astype(np.float64) / 127 * (0.5 + 127 * 4 * F32), x.shape[-1])
    latent = 512
    top = np.abs(x[..., :latent]).reshape(*x.shape[:2], -1, 16).max(-1).astype(np.float64)
    if name == "nvfp4_sglang":
        # The nearest scale is one of the five, so the squared error of a tile is no more than with it; that scale is
        # off by 2^-4 or half a subnormal step, which clips the largest by as much and moves no other bound.
        outer = float(tensors["kv_scale"][0])
        scale = top / 6 + outer * 2.0**-10
        each = np.maximum(size[..., :latent] / 4, wide(scale, 16) / 4) + wide(top * 2.0**-4 + outer * 6 * 2.0**-10, 16)
        tile = np.sqrt((each.reshape(*x.shape[:2], -1, 16) ** 2).sum(-1))
        code = wide(tile, 16) + size[..., :latent] * READER[reader] * 2 + wide(tile, 16) * READER[reader]
        return np.concatenate([code, rope[..., latent:]], axis=-1)
    # Rounded up, the scale is at most 9/8 of amax / 6, or one subnormal step above it; rounded to nearest, less.
    scale = np.maximum(top / 6, 2.0**-9) * (1 + 2.0**-3) + 2.0**-9
    code = np.maximum(size[..., :latent] / 4, wide(scale, 16) / 4)
    if name == "v4.1_fp4":  # rounded to nearest, the scale may be too small by half a step, and the largest is clipped
        return code + wide(top * 2.0**-4 + 6 * 2.0**-10, 16)
    return np.concatenate([code, np.maximum(size[..., latent:] * E4M3[0], E4M3[1])], axis=-1)


@pytest.mark.parametrize(("name", "writer", "reader"), EVERY)
@settings(deadline=None, derandomize=True, max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 3), size=st.integers(1, 4), layout=st.integers(0, 3))
def test_round_trip_stays_within_the_bound(name, writer, reader, seed, blocks, size, layout):
    width = formats.get(name).width or 96
    x = arrays(seed, (blocks, size, width))
    if name == "nvfp4_ds_mla":
        x = np.clip(x, -448, 448)  # its rope has no scale
    tensors = formats.quantize(name, x, writer=writer)
    laid = dict(tensors)
    for key in ("kv_cache", "kpe_cache"):
        if key in laid and layout:
            laid[key] = (unaligned, page_gaps if name in PAGES else gaps, backwards)[layout - 1](tensors[key])
    block, offset = np.repeat(np.arange(blocks), size), np.tile(np.arange(size), blocks)
    found = formats.exact(name, laid, block, offset, block_size=size, reader=reader).reshape(x.shape)
    limit = bound(name, writer, reader, x, tensors)
    error = np.abs(found - x.astype(np.float64))
    worst = np.unravel_index(np.argmax(error - limit), error.shape)
    assert (error <= limit).all(), (worst, x[worst], found[worst], error[worst], limit[worst])


@pytest.mark.parametrize("name", [n for n in formats.NAMES if n[0] != "q" and "fp4" not in n])
def test_what_was_read_is_written_back_unchanged_where_the_scale_is_a_power_of_two(name):
    # The largest code of a tile is above half of 448, so the tile keeps its scale, and the rest is on the grid already.
    x = arrays(9, (2, 3, formats.get(name).width or 96))
    scales = {s: 0.25 for s in formats.get(name).tensors if s in ("kv_scale", "kpe_scale")}
    once = formats.quantize(name, x, **scales)
    block, offset = np.repeat([0, 1], 3), np.tile(np.arange(3), 2)
    values = formats.read(name, once, block, offset).reshape(x.shape)
    again = formats.quantize(name, values, **scales)
    back = formats.read(name, again, block, offset).reshape(x.shape)
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("name", formats.NAMES)
def test_no_block_and_no_row_are_written_as_none(name):
    width = formats.get(name).width or 64
    for shape in ((0, 4, width), (2, 0, width)):
        tensors = formats.quantize(name, np.zeros(shape, np.float32))
        assert tensors["kv_cache"].shape[:2] == shape[:2]
