# SPDX-License-Identifier: Apache-2.0
"""Cache formats against torch's own 8-bit floats: all codes, the rounding of millions of f32, and whole rows and pages.

The rows and pages are taken apart by torch's views and casts, and written by its arithmetic, as FlashMLA's tests do.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from test_peer_rounding import f32_around_every_tie  # noqa: E402

from mla_oracle import formats  # noqa: E402
from mla_oracle.formats.codes import decode, encode, exponents, rounded  # noqa: E402

KINDS = {"e4m3": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2}
CODES = np.arange(256, dtype=np.uint8)


def same(ours, theirs):
    """Equal numbers and signs, or NaN on both sides."""
    theirs = theirs.double().numpy()
    np.testing.assert_array_equal(ours, theirs)
    there = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours)[there], np.signbit(theirs)[there])


@pytest.mark.parametrize("element", KINDS)
def test_all_256_codes(element):
    same(decode(CODES, element), torch.from_numpy(CODES).view(KINDS[element]).float())


def test_all_256_codes_of_e8m0():
    same(exponents(CODES, 2.0**-127, np.nan), torch.from_numpy(CODES).view(torch.float8_e8m0fnu).float())


@pytest.mark.parametrize("element", KINDS)
def test_f32_around_every_tie_are_rounded_to_the_same_codes(element):
    values = f32_around_every_tie()
    values = values[
        np.abs(values) < {"e4m3": 464, "e4m3fnuz": 248, "e5m2": 61440}[element]
    ]  # to the tie above the largest
    theirs = torch.from_numpy(values).to(KINDS[element])
    for beyond in ("saturate", "nan"):
        np.testing.assert_array_equal(encode(values, element, beyond), theirs.view(torch.uint8).numpy())


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_f32_around_every_tie_are_rounded_to_the_same_halves(name):
    values = f32_around_every_tie()
    same(rounded(values, name), torch.from_numpy(values).to({"bf16": torch.bfloat16, "f16": torch.float16}[name]))


def random_rows(width, seed, blocks=3, size=4):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((blocks, size, width)) * np.exp2(rng.integers(-20, 12, (blocks, size, 1)))
    x[0, 0] = 0
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


def everything(name, tensors, reader, blocks=3, size=4):
    block, offset = np.repeat(np.arange(blocks), size), np.tile(np.arange(size), blocks)
    return formats.read(name, tensors, block, offset, block_size=size, reader=reader).reshape(blocks, size, -1)


def power_scale(x, tile):
    """x [.., C] -> the scale of each tile of it, [.., C / tile] f32: 2^ceil(log2(amax / 448)), 2^-13 at least."""
    top = x.float().unflatten(-1, (-1, tile)).abs().amax(-1)
    return torch.exp2((top / 448).clamp_min(1e-4).log2().ceil())


def tiles_of(x, scale, tile):
    """e4m3 codes of x / scale as u8."""
    quotient = x.float().unflatten(-1, (-1, tile)) / scale[..., None]
    return quotient.to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)


def test_656_byte_rows_are_written_like_by_torch():
    x = random_rows(576, 1)
    scale = power_scale(x[..., :512], 128)
    wanted = torch.cat(
        [tiles_of(x[..., :512], scale, 128), scale.view(torch.uint8), x[..., 512:].contiguous().view(torch.uint8)], -1
    )
    found = formats.quantize("fp8_ds_mla", x.float().numpy(), writer="flashmla")["kv_cache"]
    np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("writer", formats.get("fp8_ds_mla").writers)
def test_656_byte_rows_are_read_like_by_torch(writer):
    tensors = formats.quantize("fp8_ds_mla", random_rows(576, 2).float().numpy(), writer=writer)
    data = torch.from_numpy(tensors["kv_cache"])
    codes = data[..., :512].view(torch.float8_e4m3fn).unflatten(-1, (4, 128))
    scale = data[..., 512:528].contiguous().view(torch.float32)[..., None]
    rope = data[..., 528:].contiguous().view(torch.bfloat16)
    for reader, product in (
        ("f32", codes.float() * scale),
        ("f32_bf16", (codes.float() * scale).bfloat16()),
        ("bf16", codes.to(torch.bfloat16) * scale.bfloat16()),
        ("exponent", codes.float() * torch.exp2(scale.log2().floor()) if writer == "flashmla" else None),
    ):
        if product is not None:
            same(everything("fp8_ds_mla", tensors, reader), torch.cat([product.flatten(-2).float(), rope.float()], -1))


def test_model1_pages_are_written_and_read_like_by_torch():
    blocks, size = 3, 4
    x = random_rows(512, 3)
    scale = power_scale(x[..., :448], 64)
    page = torch.zeros((blocks, 5 * 576), dtype=torch.uint8)  # 4 * 584 padded
    data = page[:, : size * 576].unflatten(1, (size, 576))
    data[..., :448] = tiles_of(x[..., :448], scale, 64)
    data[..., 448:] = x[..., 448:].contiguous().view(torch.uint8)
    scales = page[:, size * 576 : size * 584].unflatten(1, (size, 8))
    scales[..., :7] = scale.to(torch.float8_e8m0fnu).view(torch.uint8)

    tensors = formats.quantize("model1", x.float().numpy(), writer="flashmla")
    found = tensors["kv_cache"]
    assert found.strides[0] == 5 * 576
    np.testing.assert_array_equal(np.ascontiguousarray(found).reshape(blocks, -1), page[:, : size * 584].numpy())

    codes = data[..., :448].view(torch.float8_e4m3fn).unflatten(-1, (7, 64))
    factor = scales[..., :7].view(torch.float8_e8m0fnu)[..., None]
    rope = data[..., 448:].contiguous().view(torch.bfloat16).float()
    for reader, product in (
        ("bf16", codes.to(torch.bfloat16) * factor.to(torch.bfloat16)),
        ("exp2", (codes.float() * torch.exp2(scales[..., :7].float() - 127)[..., None]).bfloat16()),
    ):
        same(everything("model1", tensors, reader), torch.cat([product.flatten(-2).float(), rope], -1))
    same(
        everything("model1", {"kv_cache": page.numpy()}, "bf16"),
        torch.from_numpy(everything("model1", tensors, "bf16")),
    )


def test_v41_pages_are_written_and_read_like_by_torch():
    x = random_rows(512, 4)
    scale = power_scale(x, 32)
    codes, factor = tiles_of(x, scale, 32), scale.to(torch.float8_e8m0fnu)
    wanted = torch.cat([codes.flatten(1), factor.view(torch.uint8).flatten(1)], -1)
    tensors = formats.quantize("v4.1", x.float().numpy())
    np.testing.assert_array_equal(np.ascontiguousarray(tensors["kv_cache"]).reshape(3, -1), wanted.numpy())
    product = (
        codes.view(torch.float8_e4m3fn).to(torch.bfloat16).unflatten(-1, (16, 32))
        * factor.to(torch.bfloat16)[..., None]
    )
    same(everything("v4.1", tensors, "bf16"), product.flatten(-2))


@pytest.mark.parametrize("element", KINDS)
@pytest.mark.parametrize("reader", ["f32", "f32_bf16", "f32_f16", "bf16"])
def test_rows_of_one_scale_are_read_like_by_torch(element, reader):
    codes = np.random.default_rng(5).integers(0, 256, (3, 4, 576), np.uint8)
    scale = torch.tensor([0.0123])
    x = torch.from_numpy(codes).view(KINDS[element])
    wanted = {
        "f32": x.float() * scale,
        "f32_bf16": (x.float() * scale).bfloat16(),
        "f32_f16": (x.float() * scale).half(),
        "bf16": x.to(torch.bfloat16) * scale.bfloat16(),
    }[reader]
    same(everything(f"fp8_{element}", {"kv_cache": codes, "kv_scale": scale.numpy()}, reader), wanted)


@pytest.mark.parametrize("element", KINDS)
def test_torch_tensors_are_taken_as_they_are(element):
    codes = torch.arange(2 * 3 * 70, dtype=torch.int32).to(torch.uint8).reshape(2, 3, 70)
    tensors = {"kv_cache": codes.view(KINDS[element]), "kv_scale": torch.tensor([0.5])}
    slots = torch.tensor([1, 0])
    same(formats.read(f"fp8_{element}", tensors, slots, slots), tensors["kv_cache"].float()[slots, slots] / 2)
