# SPDX-License-Identifier: Apache-2.0
"""Writers: the scales they choose and the bytes they store, by hand; NaN, infinity, zeros and what is too large."""

import ml_dtypes
import numpy as np
import pytest

from mla_oracle import formats
from mla_oracle.formats.scales import power_above

WIDTH = {name: formats.get(name).width or 64 for name in formats.NAMES}
EVERY = [(name, writer) for name in formats.NAMES for writer in formats.get(name).writers]
FLT_MIN = 2.0**-126


def written(name, columns, writer=None, **scales):
    """(tensors, row [D] as the format's first reader reads it) of one row, zero but for {column: value}."""
    rows = np.zeros((1, 1, WIDTH[name]), np.float32)
    for column, value in columns.items():
        rows[0, 0, column] = value
    tensors = formats.quantize(name, rows, writer=writer, **scales)
    return tensors, formats.exact(name, tensors, np.array([0]), np.array([0]))[0]


def tile_scale(name, writer, amax):
    """The scale that `writer` gives a tile whose largest magnitude is amax, as stored."""
    tensors, _ = written(name, {0: amax}, writer)
    if name == "flashinfer_fp8_grouped":
        return float(tensors["ckv_scale"][0, 0, 0])
    data = tensors["kv_cache"].reshape(-1)
    if name == "fp8_ds_mla":
        return float(data[512:516].view("<f4")[0])
    return int(data[{"model1": 576, "v4.1": 512, "aiter_v4": 448}[name]])


def e4m3_values():
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.mark.parametrize(
    ("writer", "zeros", "at_448", "at_449", "at_1"),
    [
        ("flashmla", 2.0**-13, 1.0, 2.0, 2.0**-8),
        ("vllm", FLT_MIN, 1.0, np.float32(449) / np.float32(448), np.float32(1 / 448)),
        ("sglang", 0.0, 1.0, np.float32(449) / np.float32(448), np.float32(1 / 448)),
        ("lmdeploy", np.float32(1e-6) / np.float32(448), 1.0, np.float32(449) / np.float32(448), np.float32(1 / 448)),
        ("lmdeploy_pow2", 2.0**-28, 1.0, 2.0, 2.0**-8),
        ("vllm_pow2", 2.0**-22, 1.0, 2.0, 2.0**-8),
    ],
)
def test_scale_rules_of_f32_scales(writer, zeros, at_448, at_449, at_1):
    for name in ("fp8_ds_mla", "flashinfer_fp8_grouped"):
        if writer in formats.get(name).writers:
            assert [tile_scale(name, writer, a) for a in (0, 448, -449, 1)] == [zeros, at_448, at_449, at_1]


@pytest.mark.parametrize(
    ("name", "writer", "zeros"),
    [
        ("model1", "flashmla", 127 - 13),
        ("model1", "vllm", 127 - 22),
        ("v4.1", "flashmla", 127 - 13),
        ("aiter_v4", "flashmla", 127 - 13),
    ],
)
def test_scale_rules_of_e8m0_scales(name, writer, zeros):
    assert [tile_scale(name, writer, a) for a in (0, 448, 449, 1, 3e38)] == [zeros, 127, 128, 119, 127 + 120]


def test_the_two_smallest_scales_part_between_them():
    # amax 2^-10: over 448 that is 2^-18.8, below 1e-4 for one writer, above 1e-4 / 448 for the other.
    assert tile_scale("model1", "flashmla", 2.0**-10) == 114
    assert tile_scale("model1", "vllm", 2.0**-10) == 127 - 18


def test_powers_of_two_are_rounded_up_exactly():
    powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    np.testing.assert_array_equal(power_above(powers), powers)
    np.testing.assert_array_equal(power_above(np.nextafter(powers[1:], np.float32(0))), powers[1:])
    np.testing.assert_array_equal(power_above(np.nextafter(powers[:-1], np.float32(np.inf))), powers[1:])
    special = np.array([np.inf, np.nan, 2.0**-149], np.float32)
    np.testing.assert_array_equal(power_above(special), [np.inf, np.nan, 2.0**-126])


def test_656_bytes_of_a_row():
    tensors, _ = written("fp8_ds_mla", {0: 1.0, 1: -449.0, 511: 2.0**-13, 512: 1.0, 575: -2.0}, "flashmla")
    data = tensors["kv_cache"]
    assert data.shape == (1, 1, 656)
    wanted = np.zeros(656, np.uint8)
    wanted[[0, 1]] = 0x30, 0xF6  # scale 2: 0.5, and -224.5 of which -224 is next
    wanted[511] = 0x38  # scale 2^-13
    wanted[512:528] = [0, 0, 0, 0x40] + [0, 0, 0, 0x39] * 3
    wanted[528:530], wanted[654:656] = [0x80, 0x3F], [0x00, 0xC0]
    np.testing.assert_array_equal(data[0, 0], wanted)


def test_model1_pages_of_two_are_padded_to_576():
    rows = np.zeros((2, 2, 512), np.float32)
    rows[0, 1, [0, 447, 448, 511]] = 1, 448, 1, -2
    data = formats.quantize("model1", rows, writer="flashmla")["kv_cache"]
    assert data.shape == (2, 2, 584)
    assert data.strides == (1728, 584, 1)  # 1168 is 2 * 576 + 16
    wanted = np.zeros(1168, np.uint8)
    wanted[576], wanted[576 + 447] = 0x78, 0x7E  # 1 / 2^-8 = 256, 448
    wanted[576 + 448 : 576 + 450], wanted[576 + 574 : 576 + 576] = [0x80, 0x3F], [0x00, 0xC0]
    wanted[1152 : 1152 + 7] = 114
    wanted[1160 : 1160 + 7] = [119, 114, 114, 114, 114, 114, 127]
    np.testing.assert_array_equal(np.ascontiguousarray(data[0]).reshape(-1), wanted)


def test_v41_pages_are_padded_to_512():
    rows = np.zeros((1, 2, 512), np.float32)
    rows[0, 1, [31, 511]] = 1, 448
    data = formats.quantize("v4.1", rows)["kv_cache"]
    assert data.strides[1:] == (528, 1)
    assert formats.quantize("v4.1", np.zeros((2, 2, 512), np.float32))["kv_cache"].strides[0] == 1536
    wanted = np.zeros(1056, np.uint8)
    wanted[512 + 31], wanted[512 + 511] = 0x78, 0x7E
    wanted[1024:] = 114
    wanted[1024 + 16], wanted[1024 + 31] = 119, 127
    np.testing.assert_array_equal(data.reshape(-1), wanted)


def test_352_bytes_of_a_row():
    # Tile 0: amax 6, scale 1. Tile 1: amax 6.5, 6.5 / 6 rounded up is 1.125: 6.5 / 1.125 = 5.78 is 6.
    columns = {0: 0.5, 1: -6.0, 2: 5.0, 16: 6.5, 17: 1.2, 496: 6 * 448.0, 497: 1e30, 512: 1.0, 575: 500.0}
    data = written("nvfp4_ds_mla", columns)[0]["kv_cache"][0, 0]
    wanted = np.zeros(352, np.uint8)
    wanted[0] = 0xF1  # 0.5 is code 1, -6 is 15
    wanted[1] = 0x06  # 5 lies between 4 and 6, the even code is 6, which is 4
    wanted[8] = 0x27  # 1.2 / 1.125 = 1.07
    wanted[248] = 0x77  # 1e30 / 6 is past the largest scale, 448: 2688 / 448 is 6, and 1e30 saturates at 6
    wanted[256], wanted[319] = 0x38, 0x7E
    wanted[320:] = 0x01  # 2^-9
    wanted[320], wanted[328], wanted[351] = 0x38, 0x39, 0x7E
    np.testing.assert_array_equal(data, wanted)


def test_nvfp4_scales_are_rounded_up():
    for amax in np.float32([6.0, np.nextafter(np.float32(6), np.float32(7)), 6.7499, 6.75, 6.7501, 6 * 447.0]):
        data = written("nvfp4_ds_mla", {3: -amax})[0]["kv_cache"][0, 0]
        scale = e4m3_values()[data[320]]
        below = {1.0: 0.9375, 1.125: 1.0, 1.25: 1.125, 448.0: 416.0}[scale]
        assert below < amax / np.float32(6) <= scale


def test_q8_0_blocks():
    # amax 127: d 1. 0.5 rounds away from zero in C and to even with SIMD.
    for writer, half in (("ggml", 1), ("ggml_simd", 0)):
        data = written("q8_0", {0: 127.0, 1: -0.5, 2: 2.5, 33: 1.0}, writer)[0]["kv_cache"][0, 0]
        assert data[:2].tolist() == [0x00, 0x3C]
        assert data[2:5].view(np.int8).tolist() == [127, -half, 2 + half]
        assert data[34:36].view("<f2")[0] == np.float16(1 / 127)
        assert data[36:68].view(np.int8).tolist() == [0, 127] + [0] * 30


def test_q8_0_writers_take_the_reciprocal_of_d_or_of_amax():
    rng = np.random.default_rng(4)
    top = rng.uniform(1, 2, (1, 400, 1)).astype(np.float32)
    x = (top * (rng.integers(0, 126, (1, 400, 32)) + 0.5) / 127).astype(np.float32)  # near the ties
    x[..., :1] = top
    by_d = x * (np.float32(1) / (top / np.float32(127)))
    by_amax = x * (np.float32(127) / top)
    wanted = {"ggml": np.floor(by_d.astype(np.float64) + 0.5), "ggml_simd": np.rint(by_amax)}
    assert (np.rint(by_d) != np.rint(by_amax)).any()
    for writer, quants in wanted.items():
        found = formats.quantize("q8_0", x, writer=writer)["kv_cache"][..., 2:].view(np.int8)
        np.testing.assert_array_equal(found, quants)


def test_q6_0_blocks():
    # The largest, 32, is -32 of d = -1; of the others -0.5 is 0.5 and is rounded up to 33, and 63 is the most.
    data = written("q6_0", {0: 32.0, 1: -0.5, 9: -32.0, 16: 7.0, 40: -64.0}, "ggml")[0]["kv_cache"][0, 0]
    assert data[:2].tolist() == [0x00, 0xBC] and data[26:28].tolist() == [0x00, 0x40]
    q = {0: 0, 1: 33, 9: 63, 16: 25}
    q = [q.get(j, 32) for j in range(32)]
    assert data[10:26].tolist() == [q[j] % 16 + 16 * (q[j + 16] % 16) for j in range(16)]
    high = [q[j] // 16 + 4 * (q[j + 16] // 16) + 16 * (q[j + 8] // 16) + 64 * (q[j + 24] // 16) for j in range(8)]
    assert data[2:10].tolist() == high and high[0] == 0 + 4 * 1 + 16 * 2 + 64 * 2
    # 8 of block 1 is 0, its high bits are bits 4-5 of byte 0
    assert data[28] == 2 + 4 * 2 + 16 * 0 + 64 * 2


def test_q8_kv_rows_have_one_scale_and_the_sum_of_their_quants():
    data = written("q8_KV", {0: 127.0, 1: -0.5, 2: 2.5, 63: -64.0})[0]["kv_cache"][0, 0]
    assert data[:4].view("<f4")[0] == 1 and data[4:8].view("<i4")[0] == 127 + 0 + 2 - 64
    assert data[8:11].view(np.int8).tolist() == [127, 0, 2] and data[71:].view(np.int8)[0] == -64
    assert not written("q8_KV", {})[0]["kv_cache"].any()


@pytest.mark.parametrize(("name", "whole"), [("q6_0", 32), ("q8_KV", 64)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_or_a_row_of_ik_with_no_number_is_nan_as_a_whole(name, whole, value):
    row = written(name, {3: value, 4: 1.0, 32: 127.0})[1]
    assert np.isnan(row[:whole]).all() and not np.isnan(row[whole:]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("writer", formats.get("q8_0").writers)
def test_a_block_of_q8_0_with_no_number_is_nan_as_a_whole(writer, value):
    tensors, row = written("q8_0", {3: value, 4: 1.0, 32: 127.0}, writer)
    assert np.isnan(row[:32]).all()
    assert row[32:34].tolist() == [127, 0]
    assert not tensors["kv_cache"][0, 0, 2:34].any()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2"])
def test_writers_of_one_scale_differ_past_the_largest(name):
    largest = {"fp8_e4m3": 448, "fp8_e4m3fnuz": 240, "fp8_e5m2": 57344}[name]
    columns = {0: largest * 4.0, 1: -np.inf, 2: np.nan, 3: 1.0}
    beyond = np.inf if name == "fp8_e5m2" else np.nan
    for writer, wanted in (
        ("saturate", [largest, -largest, np.nan, 1]),
        ("reciprocal", [largest, -largest, np.nan, 1]),
        ("cast", [beyond, -beyond, np.nan, 1]),
        ("saturate_224", [224, -224, np.nan, 1]),
    ):
        if writer in formats.get(name).writers:
            found = written(name, columns, writer, kv_scale=2.0)[1]
            np.testing.assert_array_equal(found[:4] / 2, [*wanted[:3], 0.5])


def test_reciprocal_multiplies_where_the_others_divide():
    # 17 s / 32 is a tie of e4m3 and goes to 0.5, the even one; times f32(1 / s) it is a little more: 9 / 16.
    s = next(s for s in np.arange(3, 99, 2, np.float32) if s * np.float32(17 / 32) * (np.float32(1) / s) > 17 / 32)
    columns = {0: s * np.float32(17 / 32)}
    assert written("fp8_e4m3", columns, "saturate", kv_scale=float(s))[1][0] == 0.5 * s
    assert written("fp8_e4m3", columns, "reciprocal", kv_scale=float(s))[1][0] == 0.5625 * s


def test_scales_are_calibrated_over_latent_and_rope_together_and_returned():
    tensors, row = written("fp8_e4m3", {0: 1.0, 63: -896.0, 1: np.inf, 2: np.nan})
    assert tensors["kv_scale"].tolist() == [2.0]
    assert row[63] == -896
    tensors, row = written("fp8_e4m3", {})
    assert tensors["kv_scale"].tolist() == [1.0]
    tensors, row = written("flashinfer_fp8", {0: 448.0, 575: 896.0})
    assert (tensors["kv_scale"].tolist(), tensors["kpe_scale"].tolist()) == ([1.0], [2.0])
    tensors, row = written("nvfp4_sglang", {0: 6 * 448.0 * 8})
    assert tensors["kv_scale"].tolist() == [8.0]


@pytest.mark.parametrize(("name", "writer"), EVERY)
def test_rows_of_zeros_are_read_as_zeros_but_where_the_writer_divides_by_zero(name, writer):
    _, row = written(name, {}, writer)
    if writer == "sglang":
        assert np.isnan(row[:512]).all() and not row[512:].any()
    else:
        assert not row.any()


def columns_that_are_nan(name, writer, value):
    """Columns read as NaN where column 3 alone was `value`."""
    row = written(name, {3: value} | dict.fromkeys(range(4, WIDTH[name], 8), 1.0), writer)[1]
    return np.flatnonzero(np.isnan(row)).tolist(), row


TILE = {"fp8_ds_mla": 128, "flashinfer_fp8_grouped": 128, "model1": 64, "aiter_v4": 64, "v4.1": 32, "v4.1_fp4": 16}


@pytest.mark.parametrize(("name", "writer"), [(n, w) for n, w in EVERY if n[0] != "q"])
def test_nan_spreads_over_its_tile_where_the_writer_lets_it(name, writer):
    found, row = columns_that_are_nan(name, writer, np.nan)
    if name == "nvfp4_ds_mla":
        assert (found, row[3]) == ([], row[4])  # the largest code: with 1 the amax, six sixths rounded up
    elif name == "nvfp4_sglang":
        assert (found, row[3]) == ([], 0)
    elif name in TILE and writer == "flashmla":
        assert found == list(range(TILE[name]))
    else:
        assert found == [3]
        assert row[4] != 0


@pytest.mark.parametrize(("name", "writer"), [(n, w) for n, w in EVERY if n[0] != "q"])
def test_infinity_is_saturated_or_takes_its_tile_along(name, writer):
    found, row = columns_that_are_nan(name, writer, np.inf)
    if name in ("nvfp4_ds_mla", "nvfp4_sglang"):
        assert not found and row[3] > 0
        return
    if (name.startswith("fp8_") and name != "fp8_ds_mla") or name == "flashinfer_fp8":
        assert found == ([3] if writer == "cast" and name != "fp8_e5m2" else [])
        assert row[4] == pytest.approx(1)
        return
    # The scale is infinite or, in e8m0, NaN: every code times it is NaN, zero too.
    assert found == list(range(TILE[name]))


def test_subnormal_codes_are_written_and_read():
    for k in (1, 3, 7):
        row = written("fp8_e4m3", {0: k * 2.0**-9}, kv_scale=1.0)[1]
        assert row[0] == k * 2.0**-9
        row = written("fp8_ds_mla", {0: 1.0, 1: k * 2.0**-17}, "flashmla")[1]  # scale 2^-8
        assert row[1] == k * 2.0**-17
    assert written("fp8_e4m3", {0: 2.0**-10}, kv_scale=1.0)[1][0] == 0  # a tie with zero
    assert written("fp8_e4m3fnuz", {0: -(2.0**-12)}, kv_scale=1.0)[0]["kv_cache"].view(np.uint8)[0, 0, 0] == 0


def test_best_mse_is_the_best_of_the_five_codes_around_the_nearest():
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((1, 40, 576)) * np.exp2(rng.integers(-9, 3, (1, 40, 1)))).astype(np.float32)
    outer = np.float32(2.0**-6)
    made = {w: formats.quantize("nvfp4_sglang", rows, writer=w, kv_scale=float(outer)) for w in ("best_mse", "nearest")}
    values = e4m3_values()
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for token in range(40):
        for tile in range(32):
            x = rows[0, token, 16 * tile : 16 * tile + 16].astype(np.float64)
            near = int(made["nearest"]["kv_cache"][0, token, 256 + tile])
            quotient = min(np.abs(x).max() / (6 * float(outer)), 448)
            assert np.abs(values[near] - quotient) == np.abs(values[:127] - quotient).min()
            errors = {}
            for code in range(max(near - 2, 0), min(near + 2, 126) + 1):
                scale = values[code] * float(outer)
                stored = scale * grid[np.abs(np.abs(x)[:, None] / scale - grid).argmin(1)] if scale else 0 * x
                errors[code] = ((np.abs(x) - stored) ** 2).sum()
            best = int(made["best_mse"]["kv_cache"][0, token, 256 + tile])
            assert errors[best] <= min(errors.values()) * (1 + 1e-6)
