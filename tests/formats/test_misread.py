# SPDX-License-Identifier: Apache-2.0
"""Misreadings: of ordinary rows each takes other numbers than the format's reader does, those of its formula."""

import numpy as np
import pytest

from mla_oracle import formats
from mla_oracle.errors import InputError
from mla_oracle.formats.misread import KINDS, misread, misreadings

ALL = [(how, name) for name in formats.NAMES for how in misreadings(name)]
SIZE = 4
BLOCK, OFFSET = np.repeat(np.arange(3), SIZE), np.tile(np.arange(SIZE), 3)
POWERS = {"flashmla", "vllm_pow2", "lmdeploy_pow2"}


def ordinary(name, writer=None, seed=0):
    """(rows as read [12, D], tensors) of normal numbers of different sizes from tile to tile and row to row."""
    rng = np.random.default_rng(seed)
    width = formats.get(name).width or 576
    x = rng.standard_normal((3, SIZE, width)) * np.exp2(rng.integers(-4, 5, (3, SIZE, 1)))
    x *= np.repeat(np.exp2(rng.integers(-3, 4, (3, SIZE, width // 16))), 16, axis=2)
    if name == "nvfp4_ds_mla":
        x = np.clip(x, -448, 448)
    scales = {"kv_scale": 0.3, "kpe_scale": 0.7} if name == "flashinfer_fp8" else {}
    tensors = formats.quantize(name, x.astype(np.float32), writer=writer, **scales)
    return formats.read(name, tensors, BLOCK, OFFSET, block_size=SIZE), tensors


def wrong(how, name, tensors, **more):
    return misread(how, name, tensors, BLOCK, OFFSET, block_size=SIZE, **more)


@pytest.mark.parametrize(("how", "name"), [pair for pair in ALL if pair[0] != "scale-clamped"])
def test_ordinary_rows_are_misread(how, name):
    arbitrary = how in ("scale-exponent", "scale-nearest-power") and "vllm" in formats.get(name).writers
    right, tensors = ordinary(name, "vllm" if arbitrary else None)
    found = wrong(how, name, tensors)
    assert found.shape == right.shape
    assert found.dtype == np.float32
    differs = ~((found == right) | (np.isnan(found) & np.isnan(right)))
    assert differs.any(axis=1).mean() > 0.5


@pytest.mark.parametrize(("name", "writer"), [("model1", "vllm"), ("fp8_ds_mla", "lmdeploy_pow2")])
def test_a_clamped_scale_enlarges_small_tiles_only(name, writer):
    x = np.full((3, SIZE, formats.get(name).width), 2.0**-12, np.float32)  # scale 2^-20
    x[:, 1] = 1.0  # scale 2^-8
    tensors = formats.quantize(name, x, writer=writer)
    latent = formats.get(name).latent
    found = wrong("scale-clamped", name, tensors).reshape(x.shape)
    assert (found[:, 0, :latent] == 2.0**-12 * 2.0**7).all()
    assert (found[:, 1] == 1).all()


@pytest.mark.parametrize("name", ["fp8_ds_mla", "flashinfer_fp8_grouped"])
@pytest.mark.parametrize("how", ["scale-exponent", "scale-nearest-power"])
def test_powers_of_two_hide_a_reader_of_exponents(how, name):
    right, tensors = ordinary(name, "flashmla")
    np.testing.assert_array_equal(wrong(how, name, tensors), right)


def test_the_reader_of_exponents_shrinks_each_tile_by_up_to_two():
    right, tensors = ordinary("fp8_ds_mla", "vllm")
    found = wrong("scale-exponent", "fp8_ds_mla", tensors, reader="f32")
    right = formats.read("fp8_ds_mla", tensors, BLOCK, OFFSET, reader="f32")
    scale = np.ascontiguousarray(tensors["kv_cache"][..., 512:528]).view("<f4").reshape(12, 4).astype(np.float64)
    factor = np.exp2(np.floor(np.log2(scale))) / scale
    assert ((factor > 0.5) & (factor <= 1)).all()
    np.testing.assert_allclose(found[:, :512], right[:, :512] * np.repeat(factor, 128, axis=1), rtol=2.0**-22)
    np.testing.assert_array_equal(found[:, 512:], right[:, 512:])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "flashinfer_fp8"])
def test_wrong_powers_of_one_scale(name):
    right, tensors = ordinary(name)
    scale = np.full(576, float(tensors["kv_scale"][0]))
    if "kpe_scale" in tensors:
        scale[512:] = float(tensors["kpe_scale"][0])
    for how, factor in (("scale-twice", scale), ("scale-ignored", 1 / scale), ("scale-divided", scale**-2)):
        np.testing.assert_allclose(wrong(how, name, tensors), right * factor, rtol=2.0**-20)


def test_the_neighbours_scale():
    x = np.zeros((1, 1, 512), np.float32)
    x[0, 0, :448] = np.repeat(np.exp2(np.arange(7)), 64)  # tile t holds 2^t, its code 256 of scale 2^(t - 8)
    tensors = formats.quantize("model1", x)
    slot = np.array([0])
    found = misread("scale-neighbour", "model1", tensors, slot, slot)[0]
    assert found[:448:64].tolist() == [2, 4, 8, 16, 32, 64, 1]
    found = misread("scale-first", "model1", tensors, slot, slot)[0]
    assert found[:448:64].tolist() == [1] * 7
    found = misread("scale-bias", "model1", tensors, slot, slot)[0]
    assert found[:448:64].tolist() == [0.5, 1, 2, 4, 8, 16, 32]


def test_swapped_nibbles_exchange_the_columns_of_a_pair():
    for name in ("nvfp4_ds_mla", "nvfp4_sglang", "v4.1_fp4"):
        right, tensors = ordinary(name)
        found = wrong("nibbles-swapped", name, tensors)
        pairs = right[:, :512].reshape(12, 256, 2)[..., ::-1].reshape(12, 512)
        np.testing.assert_array_equal(found[:, :512], pairs)
        np.testing.assert_array_equal(found[:, 512:], right[:, 512:])


def test_unpermuted_scales_are_those_of_other_tiles():
    x = np.zeros((1, 1, 576), np.float32)
    x[0, 0, 16] = 6.0  # tile 1, scale 1 in byte 8, code 6; all others have the least scale 2^-9
    tensors = formats.quantize("nvfp4_ds_mla", x)
    slot = np.array([0])
    assert misread("scales-unpermuted", "nvfp4_ds_mla", tensors, slot, slot)[0, 16] == 6 * 2.0**-9


@pytest.mark.parametrize("name", ["model1", "v4.1", "v4.1_fp4"])
def test_addresses_of_scales_in_a_page(name):
    form = formats.get(name)
    data, scales = form.data_bytes, form.scale_bytes
    tensors = {"kv_cache": np.zeros((1, 2, data + scales), np.uint8)}
    page = tensors["kv_cache"].reshape(-1)
    one, two = (0x38, 0x40) if form.readers == ("bf16",) and name == "v4.1_fp4" else (127, 128)
    page[0] = page[data] = 0x38 if name != "v4.1_fp4" else 2  # 1 in column 0 of both tokens
    page[2 * data : 2 * data + scales], page[2 * data + scales :] = one, two
    slots = np.array([0, 0]), np.array([0, 1])
    assert formats.read(name, tensors, *slots)[:, 0].tolist() == [1, 2]
    if name != "v4.1_fp4":
        page[2 * data - scales : 2 * data] = 130
        assert misread("scales-early", name, tensors, *slots)[:, 0].tolist() == [8, 1]
    # Column by column: token o, tile t at 2 t + o, so token 1 takes the second byte, of token 0.
    assert misread("scales-transposed", name, tensors, *slots)[:, 0].tolist() == [1, 1]
    # As rows: token 0 finds its scales in the data of token 1, and token 1 its data one scale row on.
    found = misread("regions-as-rows", name, tensors, *slots)
    assert found[0, 0] != 1


def test_transposed_scales_of_groups():
    right, tensors = ordinary("flashinfer_fp8_grouped")
    groups = tensors["ckv_scale"]
    twisted = groups.reshape(3, 4, SIZE).transpose(0, 2, 1)  # [block, offset, tile] of memory [block, tile, offset]
    wanted = formats.read("flashinfer_fp8_grouped", tensors | {"ckv_scale": twisted.copy()}, BLOCK, OFFSET)
    np.testing.assert_array_equal(wrong("scales-transposed", "flashinfer_fp8_grouped", tensors), wanted)
    assert (wanted != right).any()


def test_fnuz_taken_for_fn_is_twice_as_large():
    right, tensors = ordinary("fp8_e4m3fnuz")
    found = wrong("fn-fnuz", "fp8_e4m3fnuz", tensors)
    there = ~np.isnan(found)
    np.testing.assert_array_equal(found[there], 2 * right[there])


def test_the_rope_takes_a_scale_that_is_not_its_own():
    right, tensors = ordinary("flashinfer_fp8")
    found = wrong("rope-latent-scale", "flashinfer_fp8", tensors, reader="fold")
    exact = formats.read("flashinfer_fp8", tensors, BLOCK, OFFSET, reader="fold")
    np.testing.assert_array_equal(found[:, :512], exact[:, :512])
    np.testing.assert_allclose(found[:, 512:], right[:, 512:] * 0.3 / 0.7, rtol=2.0**-6)
    right, tensors = ordinary("fp8_ds_mla")
    scale = np.ascontiguousarray(tensors["kv_cache"][..., 512:516]).view("<f4").reshape(12, 1)
    found = wrong("rope-scaled", "fp8_ds_mla", tensors)
    np.testing.assert_array_equal(found, np.concatenate([right[:, :512], right[:, 512:] * scale], axis=1))


def test_a_packed_row_taken_for_a_plain_one():
    _, tensors = ordinary("fp8_ds_mla")
    plain = {"kv_cache": tensors["kv_cache"][..., :576], "kv_scale": np.ones(1, np.float32)}
    wanted = formats.read("fp8_e4m3", plain, BLOCK, OFFSET)
    np.testing.assert_array_equal(wrong("packed-as-plain", "fp8_ds_mla", tensors), wanted)


def test_quants_of_q6_0_that_are_not_centred():
    data = np.zeros((1, 1, 26), np.uint8)
    data[0, 0, :2], data[0, 0, 10] = [0x00, 0x38], 0x07  # d = 0.5: 7 and 0
    slot = np.array([0])
    assert misread("quants-uncentred", "q6_0", {"kv_cache": data}, slot, slot)[0, :2].tolist() == [3.5, 0]


def test_blocks_of_q8_0():
    data = np.zeros((1, 1, 34), np.uint8)
    data[0, 0, :4] = 0x00, 0x3C, 1, 0xFF  # d 1, as bf16 2^-7; q 1 and -1
    slot = np.array([0])
    assert misread("d-as-bf16", "q8_0", {"kv_cache": data}, slot, slot)[0, :3].tolist() == [2.0**-7, -(2.0**-7), 0]
    assert misread("quants-unsigned", "q8_0", {"kv_cache": data}, slot, slot)[0, :3].tolist() == [1, 255, 0]


def test_every_misreading_is_for_some_format_and_every_format_has_some():
    assert {how for how, _ in ALL} == set(KINDS)
    assert {name for _, name in ALL} == set(formats.NAMES)
    assert all(function.__doc__ for function, _ in KINDS.values())


def test_a_misreading_that_says_nothing_of_the_format_is_refused():
    _, tensors = ordinary("q8_0")
    with pytest.raises(InputError, match=r"^misreading is 'nibbles-swapped', expected one of .* for format q8_0$"):
        wrong("nibbles-swapped", "q8_0", tensors)
