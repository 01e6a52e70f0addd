# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a cache is said in one line that names the argument; nothing is guessed."""

import ml_dtypes
import numpy as np
import pytest
from random_caches import PAGES, tensors

from mla_oracle import formats
from mla_oracle.errors import InputError

ROWS = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352, "nvfp4_sglang": 416}
HERE = np.array([0])


def refused(call, *words):
    with pytest.raises(InputError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line


def cache(name, blocks=2, size=3):
    return tensors(name, blocks, size, np.random.default_rng(0))


def given(name, **other):
    """A reader of a good cache but for `other`; checked and read must agree."""
    found = cache(name) | other

    def both():
        try:
            formats.check(name, found)
        except InputError as error:
            refused(lambda: formats.read(name, found, HERE, HERE), str(error))
            raise

    return both


@pytest.mark.parametrize("name", formats.NAMES)
def test_the_good_cache_is_taken(name):
    assert formats.check(name, cache(name))[:2] == (2, 3)
    given(name)()


def test_the_name_of_a_format():
    for name in ("fp8", "FP8_E4M3", "", 3, ["q8_0"]):
        refused(lambda name=name: formats.get(name), "cache_format", repr(name), "q8_0")


@pytest.mark.parametrize("name", formats.NAMES)
def test_the_names_of_writers_and_readers(name):
    rows = np.zeros((1, 1, formats.get(name).width or 64), np.float32)
    refused(lambda: formats.quantize(name, rows, writer="best"), "writer is 'best'", formats.get(name).writers[0], name)
    refused(lambda: formats.read(name, cache(name), HERE, HERE, reader="f64"), "reader is 'f64'", name)


@pytest.mark.parametrize("name", formats.NAMES)
def test_a_missing_cache(name):
    refused(given(name, kv_cache=None), "kv_cache is missing", name)


@pytest.mark.parametrize(("name", "width"), [*ROWS.items(), ("model1", 584), ("v4.1", 528), ("v4.1_fp4", 288)])
def test_bytes_a_row(name, width):
    for wrong in (width - 1, width + 1, 576):
        refused(given(name, kv_cache=np.zeros((2, 3, wrong), np.uint8)), f"kv_cache has {wrong} bytes", str(width))


@pytest.mark.parametrize(("name", "said", "row"), [("q8_0", "34", 611), ("q6_0", "26", 467), ("q8_KV", "8 and", 583)])
def test_bytes_a_row_of_ggml(name, said, row):
    for wrong in (row, 32, 8, 0):
        refused(given(name, kv_cache=np.zeros((2, 3, wrong), np.uint8)), f"kv_cache has {wrong} bytes", said)


def test_bytes_a_row_of_aiter():
    refused(given("aiter_v4", kv_cache=np.zeros((2, 3, 513), np.uint8)), "kv_cache has 513 bytes", "512")
    refused(
        given("aiter_v4", kpe_cache=np.zeros((2, 3, 63), ml_dtypes.bfloat16)), "kpe_cache is [2, 3, 63]", "[2, 3, 64]"
    )
    refused(given("aiter_v4", kpe_cache=None), "kpe_cache is missing")
    refused(given("aiter_v4", kpe_cache=np.zeros((2, 3, 64), np.float16)), "kpe_cache is f16", "bf16")


@pytest.mark.parametrize("name", formats.NAMES)
def test_dtypes(name):
    shape = cache(name)["kv_cache"].shape
    for wrong in (np.float32, np.uint16, bool, ml_dtypes.float8_e8m0fnu):
        refused(given(name, kv_cache=np.zeros(shape, wrong)), "kv_cache is ", "expected", "u8")


def test_an_fp8_of_another_kind():
    refused(
        given("fp8_e4m3", kv_cache=np.zeros((2, 3, 70), ml_dtypes.float8_e4m3fnuz)),
        "kv_cache is e4m3fnuz, expected e4m3",
    )
    refused(
        given("fp8_e4m3fnuz", kv_cache=np.zeros((2, 3, 70), ml_dtypes.float8_e4m3fn)),
        "kv_cache is e4m3, expected e4m3fnuz",
    )
    refused(
        given("fp8_e5m2", kpe_cache=np.zeros((2, 3, 8), ml_dtypes.float8_e4m3fn)), "kpe_cache is e4m3, expected e5m2"
    )


@pytest.mark.parametrize("name", formats.NAMES)
def test_axes(name):
    data = cache(name)["kv_cache"]
    for wrong in (data[0, 0], np.repeat(data[:, :, None], 2, axis=2), data[None, None]):
        refused(given(name, kv_cache=wrong), f"kv_cache is {list(wrong.shape)}", "num_blocks")
    if name not in PAGES:
        refused(given(name, kv_cache=data[0]), "kv_cache is", "num_blocks")
    refused(given(name, kv_cache=data.tolist()), "kv_cache is a list")


@pytest.mark.parametrize("name", formats.NAMES)
def test_gaps_inside_a_row(name):
    data = cache(name)["kv_cache"]
    spread = np.repeat(data.view(np.uint8), 2, axis=-1)[..., ::2]
    refused(given(name, kv_cache=spread), "kv_cache has a stride of 2 bytes along its last axis", "no gaps")


@pytest.mark.parametrize("name", PAGES)
def test_gaps_inside_a_page(name):
    data = cache(name)["kv_cache"]
    spread = np.repeat(data, 2, axis=1)[:, ::2]
    refused(given(name, kv_cache=spread), "kv_cache has a row stride of", "no gaps in a page")


@pytest.mark.parametrize(("name", "token"), [("model1", 584), ("v4.1", 528), ("v4.1_fp4", 288)])
def test_a_truncated_page(name, token):
    pages = {"kv_cache": np.zeros((2, 4 * token - 1), np.uint8)}
    refused(
        lambda: formats.check(name, pages, block_size=4), f"kv_cache has {4 * token - 1} bytes a page", str(4 * token)
    )
    short = {"kv_cache": np.zeros((2, token - 1), np.uint8)}
    refused(lambda: formats.read(name, short, HERE, HERE), f"kv_cache has {token - 1} bytes a page")


def test_a_block_size_that_is_not_the_arrays():
    for name in ("q8_0", "model1"):
        refused(lambda name=name: formats.check(name, cache(name), block_size=64), "block_size is 64", "blocks of 3")


def test_a_block_size_that_bytes_do_not_tell():
    refused(lambda: formats.block_size_of("v4.1_fp4", (2, 1024)), "block_size is not told")
    refused(lambda: formats.block_size_of("fp8_ds_mla", (2, 656)), "kv_cache is [2, 656]")
    assert formats.block_size_of("model1", (9, 37440)) == 64
    assert formats.block_size_of("fp8_ds_mla", (9, 64, 1, 656)) == 64


SCALED = [
    ("fp8_e4m3", "kv_scale"),
    ("fp8_e4m3fnuz", "kpe_scale"),
    ("fp8_e5m2", "kv_scale"),
    ("flashinfer_fp8", "kv_scale"),
    ("flashinfer_fp8", "kpe_scale"),
    ("flashinfer_fp8_grouped", "kpe_scale"),
    ("nvfp4_sglang", "kv_scale"),
]


@pytest.mark.parametrize(("name", "scale"), SCALED)
def test_scales_that_are_no_scale(name, scale):
    for wrong, said in ((np.nan, "nan"), (0.0, "0.0"), (-1.0, "-1.0"), (np.inf, "inf"), (1e300, "inf"), (1e-60, "0.0")):
        refused(given(name, **{scale: wrong}), f"{scale} is {said}, expected a finite number above 0")
        if np.float64(np.float32(wrong) if abs(wrong) < 1e30 else np.inf) == wrong or np.isnan(wrong):
            refused(given(name, **{scale: np.array([wrong], np.float32)}), f"{scale} is {said}")
    refused(given(name, **{scale: np.ones(2, np.float32)}), f"{scale} is [2], expected a number")
    refused(given(name, **{scale: np.ones(1)}), f"{scale} is f64, expected f32")
    refused(given(name, **{scale: "1"}), f"{scale} is a str")
    refused(given(name, **{scale: True}), f"{scale} is a bool")


@pytest.mark.parametrize(("name", "scale"), [pair for pair in SCALED if pair != ("fp8_e4m3fnuz", "kpe_scale")])
def test_scales_that_are_missing(name, scale):
    refused(given(name, **{scale: None}), f"{scale} is missing", name)


@pytest.mark.parametrize("name", formats.NAMES)
def test_tensors_that_the_format_has_no_place_for(name):
    some = {
        "kpe_cache": np.zeros((2, 3, 64), np.uint8),
        "kv_scale": 1.0,
        "kpe_scale": 1.0,
        "ckv_scale": np.ones((2, 3, 4), np.float32),
    }
    for other, value in some.items():
        if other not in formats.get(name).tensors:
            refused(given(name, **{other: value}), f"{other} is given, expected none", name)


def test_both_scales_of_the_latent():
    refused(given("flashinfer_fp8", ckv_scale=np.ones((2, 3, 4), np.float32)), "ckv_scale is given, expected none")
    refused(given("flashinfer_fp8_grouped", kv_scale=1.0), "kv_scale is given, expected none")
    refused(given("flashinfer_fp8_grouped", ckv_scale=None), "ckv_scale is missing")


def test_scales_of_other_rows_than_the_caches():
    refused(
        given("flashinfer_fp8_grouped", ckv_scale=np.ones((2, 3, 3), np.float32)), "ckv_scale is [2, 3, 3]", "[2, 3, 4]"
    )
    refused(given("fp8_e4m3", kv_scale=np.ones((2, 4), np.float32)), "kv_scale is [2, 4]", "[2, 3]")
    refused(
        given("flashinfer_fp8", kv_scale=np.ones((2, 3), np.float32)), "kv_scale is [2, 3], expected a number or [1]"
    )


def test_a_split_rope_of_other_rows_or_widths():
    for wrong in ((2, 4, 64), (3, 3, 64)):
        refused(given("flashinfer_fp8", kpe_cache=np.zeros(wrong, np.uint8)), f"kpe_cache is {list(wrong)}")
    refused(given("flashinfer_fp8", kpe_cache=np.zeros((2, 3, 32), np.uint8)), "kpe_cache has 32 columns, expected 64")
    refused(given("flashinfer_fp8", kv_cache=np.zeros((2, 3, 576), np.uint8)), "kv_cache has 576 columns, expected 512")
    refused(given("flashinfer_fp8", kpe_cache=None), "kpe_cache is missing")
    refused(given("flashinfer_fp8_grouped", kpe_cache=None), "kpe_cache is missing")


def test_a_scale_of_the_last_64_columns_of_fewer():
    narrow = {"kv_cache": np.zeros((2, 3, 64), np.uint8), "kv_scale": 1.0, "kpe_scale": 1.0}
    refused(lambda: formats.check("fp8_e4m3", narrow), "kpe_scale is given, but kv_cache has 64 columns")
    rows = np.zeros((1, 1, 64), np.float32)
    refused(lambda: formats.quantize("fp8_e4m3", rows, kpe_scale=1.0), "rows has 64 columns")


@pytest.mark.parametrize("name", formats.NAMES)
def test_slots_outside_the_cache(name):
    def ask(blocks, offsets):
        return lambda: formats.read(name, cache(name), np.array(blocks), np.array(offsets))

    refused(ask([0, 2], [0, 0]), "blocks[1] is 2, expected 0 to 1")
    refused(ask([-1], [0]), "blocks[0] is -1")
    refused(ask([0, 1], [0, 3]), "offsets[1] is 3, expected 0 to 2")
    refused(ask([0], [0, 1]), "offsets is [2], expected [1] as blocks")
    refused(ask([0.0], [0]), "blocks is float64 [1], expected integers [n]")
    refused(ask([[0]], [0]), "blocks is int64 [1, 1]")


@pytest.mark.parametrize("name", formats.NAMES)
def test_rows_to_write(name):
    width = formats.get(name).width or 64
    refused(lambda: formats.quantize(name, np.zeros((1, 1, width))), "rows is f64, expected f32")
    refused(lambda: formats.quantize(name, np.zeros((1, width), np.float32)), f"rows is [1, {width}], expected")
    refused(lambda: formats.quantize(name, [[0.0]]), "rows is a list")
    if formats.get(name).width or name[0] == "q":
        refused(
            lambda: formats.quantize(name, np.zeros((1, 1, width + 1), np.float32)), f"rows has {width + 1} columns"
        )
    refused(
        lambda: formats.quantize(name, np.zeros((1, 1, width), np.float32), scale=1.0), "scale is given, expected none"
    )


def test_scales_to_write_with():
    rows = np.zeros((1, 1, 576), np.float32)
    refused(lambda: formats.quantize("fp8_e4m3", rows, kv_scale=0.0), "kv_scale is 0.0")
    refused(lambda: formats.quantize("nvfp4_sglang", rows, kv_scale=np.nan), "kv_scale is nan")
    refused(lambda: formats.quantize("fp8_ds_mla", rows, kv_scale=1.0), "kv_scale is given, expected none")
    refused(
        lambda: formats.quantize("flashinfer_fp8_grouped", rows, ckv_scale=1.0), "ckv_scale is given, expected none"
    )
