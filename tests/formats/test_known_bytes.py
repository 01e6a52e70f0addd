# SPDX-License-Identifier: Apache-2.0
"""Bytes worked out by hand from the descriptions of the formats, and what they stand for; both ways.

e4m3: 0x38 is 1, 0x3C 1.5, 0x40 2, 0xB8 -1, 0x01 2^-9, 0x7E 448, 0x7F NaN. e2m1: 1 is 0.5, 2 is 1, 7 is 6, 9 is -0.5.
e8m0: 127 is 1, 129 is 4. bf16: 0x3F80 is 1, 0xC000 -2. f32: 0x3F000000 is 0.5, 0x40400000 is 3.
"""

import ml_dtypes
import numpy as np
import pytest

from mla_oracle import formats

FIRST = np.array([0])


def one(name, data, *, offset=0, **more):
    """The row at (0, offset) of a cache of one page, f64."""
    reader = more.pop("reader", None)
    tensors = {"kv_cache": data, **more}
    return formats.exact(name, tensors, FIRST, np.array([offset]), reader=reader)[0]


def blank(*shape, **at):
    """Zeros [1, *shape] u8; at is {"b5": 0x38, ...}: the byte 5 of the page."""
    data = np.zeros((1, *shape), np.uint8)
    for key, value in at.items():
        data.reshape(-1)[int(key[1:])] = value
    return data


def the_rest_is_zero(row, *but):
    assert not np.delete(row, list(but)).any()


def number(value):
    return np.array([value], np.float32)


@pytest.mark.parametrize(
    ("name", "codes", "values"),
    [
        (
            "fp8_e4m3",
            [0x00, 0x80, 0x01, 0x07, 0x08, 0x38, 0x3C, 0x7E, 0xFE, 0x7F, 0xFF],
            [0.0, -0.0, 2**-9, 7 * 2**-9, 2**-6, 1, 1.5, 448, -448, np.nan, np.nan],
        ),
        (
            "fp8_e4m3fnuz",
            [0x00, 0x01, 0x08, 0x40, 0x44, 0x7F, 0xFF, 0x80],
            [0, 2**-10, 2**-7, 1, 1.5, 240, -240, np.nan],
        ),
        (
            "fp8_e5m2",
            [0x01, 0x04, 0x3C, 0x3E, 0x7B, 0x7C, 0xFC, 0x7D],
            [2**-16, 2**-14, 1, 1.5, 57344, np.inf, -np.inf, np.nan],
        ),
    ],
)
def test_codes_of_fp8(name, codes, values):
    data = np.array(codes, np.uint8)[None, None]
    found = one(name, data, kv_scale=number(0.5))
    np.testing.assert_array_equal(found, np.array(values) / 2)
    assert np.signbit(found[1]) == np.signbit(values[1])


def test_per_tensor_rope_with_its_own_scale_is_the_last_64_columns():
    data = np.full((1, 1, 70), 0x38, np.uint8)
    found = one("fp8_e4m3", data, kv_scale=number(3.0), kpe_scale=number(0.25))
    assert found.tolist() == [3.0] * 6 + [0.25] * 64


def test_per_tensor_split_rope_shares_the_scale_unless_it_has_its_own():
    split = {"kpe_cache": np.full((1, 1, 2), 0x40, np.uint8), "kv_scale": number(3.0)}
    data = np.full((1, 1, 3), 0x38, np.uint8)
    assert one("fp8_e4m3", data, **split).tolist() == [3, 3, 3, 6, 6]
    assert one("fp8_e4m3", data, **split, kpe_scale=number(0.5)).tolist() == [3, 3, 3, 1, 1]


def test_per_token_scales_are_those_of_the_token():
    data = np.full((2, 2, 1), 0x38, np.uint8)
    scale = np.array([[1, 2], [3, np.nan]], np.float32)
    found = formats.read("fp8_e5m2", {"kv_cache": data, "kv_scale": scale}, np.array([1, 0, 1]), np.array([0, 1, 1]))
    one_e5m2 = 0.5  # 0x38 in e5m2: exponent 14 - 15
    np.testing.assert_array_equal(found[:, 0], [3 * one_e5m2, 2 * one_e5m2, np.nan])


def read_one(code, scale, *readers):
    """The e4m3 code times the scale, by each reader."""
    data = np.full((1, 1, 1), code, np.uint8)
    return [one("fp8_e4m3", data, kv_scale=number(scale), reader=reader)[0] for reader in readers]


def test_readers_of_one_scale_round_where_they_say():
    # 1.5 * (1 + 2^-20): f32 holds it; bf16 has steps of 2^-7 there, f16 of 2^-10.
    scale = 1 + 2.0**-20
    assert read_one(0x3C, scale, *formats.get("fp8_e4m3").readers) == [1.5 * scale, 1.5 * scale, 1.5, 1.5, 1.5]
    # 13 * (1 + 2^-23) needs 27 bits: f32 has steps of 2^-20 there, and 13 * 2^-23 is nearest to two of them.
    assert read_one(0x55, 1 + 2.0**-23, "fold", "f32") == [13 + 13 * 2.0**-23, 13 + 2 * 2.0**-20]
    # In bf16 the scale 1 + 3 * 2^-9 is 1 + 2^-7.
    assert read_one(0x38, 1 + 3 * 2.0**-9, "bf16") == [1 + 2.0**-7]


def test_flashinfer_split_row():
    data = blank(1, 512, b0=0x38, b511=0xB8)
    rope = blank(1, 64, b0=0x3C, b63=0x01)
    found = one("flashinfer_fp8", data, kpe_cache=rope, kv_scale=number(0.5), kpe_scale=number(4.0))
    assert [found[i] for i in (0, 511, 512, 575)] == [0.5, -0.5, 6.0, 4 * 2**-9]
    the_rest_is_zero(found, 0, 511, 512, 575)


def test_flashinfer_grouped_row():
    data = blank(1, 512, b127=0x38, b128=0x38, b511=0x40)
    groups = np.array([[[1, 3, 5, 7]]], np.float32)
    rope = blank(1, 64, b1=0x38)
    found = one("flashinfer_fp8_grouped", data, kpe_cache=rope, ckv_scale=groups, kpe_scale=number(0.25))
    assert [found[i] for i in (127, 128, 511, 513)] == [1, 3, 14, 0.25]
    the_rest_is_zero(found, 127, 128, 511, 513)


def test_656_byte_row():
    data = blank(2, 656)
    row = data[0, 1]
    row[[0, 127, 128, 511]] = 0x38, 0x40, 0xB8, 0x7E
    row[512:528] = [0, 0, 0, 0x3F, 0, 0, 0x40, 0x40, 0, 0, 0x80, 0x3F, 0, 0, 0x80, 0x3E]  # 0.5, 3, 1, 0.25
    row[528:530], row[654:656] = [0x80, 0x3F], [0x00, 0xC0]
    columns = (0, 127, 128, 511, 512, 575)
    found = one("fp8_ds_mla", data, offset=1)
    assert [found[i] for i in columns] == [0.5, 1, -3, 112, 1, -2]
    the_rest_is_zero(found, *columns)
    for reader in ("exponent", "e8m0_rz"):  # 3 counts as 2
        found = one("fp8_ds_mla", data, offset=1, reader=reader)
        assert [found[i] for i in columns] == [0.5, 1, -2, 112, 1, -2]
    assert not one("fp8_ds_mla", data, offset=0).any()


def test_readers_of_the_656_byte_row_differ_as_they_say():
    # Scale 1 + 2^-8 + 2^-9, code 1.5. f32: the product 1.5 + 4.5 * 2^-9, then bf16 in steps of 2^-7: 1.5 + 2^-7.
    # bf16: the scale itself goes to 1 + 2^-7 first, and 1.5 + 1.5 * 2^-7 lies on a tie: to even, 1.5 + 2 * 2^-7.
    data = blank(1, 656, b0=0x3C)
    data[0, 0, 512:516].view("<f4")[:] = 1 + 2.0**-8 + 2.0**-9
    found = {reader: one("fp8_ds_mla", data, reader=reader)[0] for reader in formats.get("fp8_ds_mla").readers}
    assert found == {
        "f32_bf16": 1.5 + 2.0**-7,
        "bf16": 1.5 + 2 * 2.0**-7,
        "f32": 1.5 + 4.5 * 2.0**-9,
        "exponent": 1.5,
        "e8m0_rz": 1.5,
    }


@pytest.mark.parametrize(
    ("bits", "f32", "exponent", "e8m0_rz"),
    [
        (0x00000000, 0.0, 2.0**-127, 2.0**-127),  # a scale of zero: its exponent bits are those of 2^-127 in e8m0
        (0x7F800000, np.inf, np.nan, 2.0**127),
        (0x7FC00000, np.nan, np.nan, np.nan),
        (0x00400000, 2.0**-127, 2.0**-127, 2.0**-127),
    ],
)
def test_scales_that_are_no_ordinary_numbers(bits, f32, exponent, e8m0_rz):
    data = blank(1, 656, b0=0x38)
    data[0, 0, 512:516].view("<u4")[:] = bits
    found = [one("fp8_ds_mla", data, reader=r)[0] for r in ("f32", "exponent", "e8m0_rz")]
    np.testing.assert_array_equal(found, [f32, exponent, e8m0_rz])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("reader", formats.get("fp8_ds_mla").readers)
def test_a_scale_that_is_nan_reads_as_nan_whatever_its_payload(reader, bits):
    data = blank(1, 656, b0=0x38)
    data[0, 0, 512:516].view("<u4")[:] = bits
    found = one("fp8_ds_mla", data, reader=reader)
    assert np.isnan(found[:128]).all()
    the_rest_is_zero(found[128:])


def test_model1_page_of_two():
    page = np.zeros(2 * 584, np.uint8)
    page[576 + 0], page[576 + 447] = 0x38, 0x3C  # token 1, columns 0 and 447
    page[576 + 448 : 576 + 450], page[576 + 574 : 576 + 576] = [0x80, 0x3F], [0x00, 0xC0]  # columns 448 and 511
    page[2 * 576 + 8 + 0], page[2 * 576 + 8 + 6] = 129, 126  # scales of its tiles 0 and 6
    page[0], page[2 * 576] = 0x40, 127  # token 0
    page[[2 * 576 + 7, 2 * 576 + 15]] = 255  # the pads
    data = page.reshape(1, 2, 584)
    found = one("model1", data, offset=1)
    assert [found[i] for i in (0, 447, 448, 511)] == [4, 0.75, 1, -2]
    the_rest_is_zero(found, 0, 447, 448, 511)
    found = one("model1", data)
    assert found[0] == 2
    the_rest_is_zero(found, 0)


@pytest.mark.parametrize(
    ("reader", "at_0", "at_255"), [("bf16", 2.0**-127, np.nan), ("exp2", 2.0**-127, np.inf), ("guarded", 0.0, np.nan)]
)
def test_e8m0_codes_0_and_255_are_what_the_reader_takes_them_for(reader, at_0, at_255):
    page = blank(1, 584, b0=0x38, b64=0x38, b576=0, b577=255)
    found = one("model1", page, reader=reader)
    np.testing.assert_array_equal(found[[0, 64]], [at_0, at_255])
    assert np.isnan(found[65:128]).all()  # zero times infinity, or times NaN


def test_v41_page_of_two():
    page = np.zeros(2 * 528, np.uint8)
    page[512], page[512 + 31], page[512 + 32], page[512 + 511] = 0x38, 0x38, 0x38, 0xB8  # token 1
    page[1024 + 16 + 0], page[1024 + 16 + 1], page[1024 + 16 + 15] = 127, 130, 126
    found = one("v4.1", page.reshape(1, 2, 528), offset=1)
    assert [found[i] for i in (0, 31, 32, 511)] == [1, 1, 8, -0.5]
    the_rest_is_zero(found, 0, 31, 32, 511)


def test_v41_fp4_page_of_two():
    page = np.zeros(2 * 288, np.uint8)
    page[256], page[256 + 8], page[256 + 255] = 0x21, 0x07, 0x90  # token 1: columns 0 1, 16, 511
    page[512 + 32 + 0], page[512 + 32 + 1], page[512 + 32 + 31] = 0x38, 0x40, 0x7E
    found = one("v4.1_fp4", page.reshape(1, 2, 288), offset=1)
    assert [found[i] for i in (0, 1, 16, 511)] == [0.5, 1, 12, -224]
    the_rest_is_zero(found, 0, 1, 16, 511)


def test_aiter_v4_row():
    data = blank(1, 512, b0=0x38, b31=0x38, b32=0x38, b447=0x40)
    data[0, 0, 448:462] = [127, 129, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255]
    data[0, 0, 462:] = 0x7F  # not read
    rope = np.zeros((1, 1, 64), ml_dtypes.bfloat16)
    rope[0, 0, [0, 63]] = 1, -2
    found = one("aiter_v4", data, kpe_cache=rope)
    np.testing.assert_array_equal(found[[0, 31, 32, 447, 448, 511]], [1, 1, 4, np.inf, 1, -2])
    assert one("aiter_v4", data, kpe_cache=rope, reader="bf16")[64] == 0  # zero times 2^-127
    wide = np.zeros((1, 1, 576), np.uint8)
    wide[..., :512] = data
    np.testing.assert_array_equal(one("aiter_v4", wide, kpe_cache=rope), found)


def test_352_byte_row_with_its_scales_permuted():
    data = blank(1, 352)
    row = data[0, 0]
    row[0] = 0x21  # columns 0 and 1: 0.5 and 1
    row[8], row[16], row[32], row[255] = 0x07, 0x02, 0x02, 0x90  # columns 16, 32, 64 and 511: 6, 1, 1, -0.5
    row[320] = 0x38  # scale 0: 1
    row[328] = 0x40  # scale 1: 2
    row[336] = 0x3C  # scale 2: 1.5
    row[321] = 0x01  # scale 4: 2^-9
    row[351] = 0x7E  # scale 31: 448
    row[256], row[319] = 0xB8, 0x7E  # rope, no scale
    found = one("nvfp4_ds_mla", data)
    columns = (0, 1, 16, 32, 64, 511, 512, 575)
    assert [found[i] for i in columns] == [0.5, 1, 12, 1.5, 2**-9, -224, -1, 448]
    the_rest_is_zero(found, *columns)


def test_416_byte_row_with_a_scale_for_the_layer():
    data = blank(1, 416)
    row = data[0, 0]
    row[0], row[8], row[255] = 0x21, 0x07, 0x90
    row[256], row[257], row[287] = 0x38, 0x40, 0x7E  # scales 0, 1 and 31
    row[288:290], row[414:416] = [0x80, 0x3F], [0x00, 0xC0]
    found = one("nvfp4_sglang", data, kv_scale=number(0.25))
    columns = (0, 1, 16, 511, 512, 575)
    assert [found[i] for i in columns] == [0.125, 0.25, 3, -56, 1, -2]
    the_rest_is_zero(found, *columns)


def test_q8_0_row_of_612_bytes():
    data = blank(1, 612)
    row = data[0, 0]
    row[0:2], row[2], row[33] = [0x00, 0x3C], 1, 0xFF  # d = 1: columns 0 and 31
    row[34:36], row[36] = [0x00, 0x38], 127  # d = 0.5: column 32
    row[578:580], row[580], row[611] = [0x01, 0x00], 128, 2  # d = 2^-24: columns 544 and 575
    found = one("q8_0", data)
    columns = (0, 31, 32, 544, 575)
    assert [found[i] for i in columns] == [1, -1, 63.5, -(2**-17), 2**-23]
    the_rest_is_zero(found, *columns)


def test_q6_0_row_of_468_bytes():
    data = blank(1, 468)
    row = data[0, 0]
    row[0:2] = [0x00, 0x3C]  # d = 1: all of block 0 is -32 but
    row[2], row[10], row[25] = 0b11_00_10_01, 0x5F, 0xF0  # columns 0, 16, 24 by their high bits, 31 by its low ones
    row[26:28], row[28:52] = [0x00, 0xB8], 0xFF  # d = -0.5, all of block 1 is 31 d
    row[442:444] = [0x01, 0x00]  # d = 2^-24
    found = one("q6_0", data)
    block = dict.fromkeys(range(32), -32) | {0: 15 + 16 - 32, 16: 5 + 32 - 32, 24: 48 - 32, 31: 15 - 32}
    assert found[:32].tolist() == [block[i] for i in range(32)]
    assert found[32:64].tolist() == [-15.5] * 32 and found[544:].tolist() == [-(2.0**-19)] * 32
    the_rest_is_zero(found, *range(64), *range(544, 576))


def test_q8_kv_row_of_584_bytes():
    data = blank(1, 584)
    row = data[0, 0]
    row[0:4], row[4:8] = [0x00, 0x00, 0xC0, 0x3F], 0xFF  # d = 1.5; the sum is not read
    row[8], row[71], row[583] = 2, 0x80, 0xFF
    found = one("q8_KV", data)
    assert [found[i] for i in (0, 63, 575)] == [3, -192, -1.5]
    the_rest_is_zero(found, 0, 63, 575)
