# SPDX-License-Identifier: Apache-2.0
"""A cache in a format is the dense cache of the numbers its reader makes, bit for bit; nobody reads its other rows."""

import numpy as np
import pytest

from mla_oracle import InputError, decode, formats

WIDTHS = {name: formats.get(name).width or 576 for name in formats.NAMES}
# Slots of the main cache that the two requests see, three blocks of 4.
TABLE, LENS = np.array([[2, 0], [1, -1]], np.int32), np.array([6, 3], np.int32)
SEEN = [8, 9, 10, 11, 0, 1, 4, 5, 6]


def problem(name, seed=0):
    """(what is not the cache, the tensors of the cache, the rows [3, 4, D] they were made of)."""
    rng = np.random.default_rng(seed)
    D = WIDTHS[name]
    rows = rng.standard_normal((3, 4, D)).astype(np.float32)
    tensors = formats.quantize(name, rows)
    p = {
        "q": rng.standard_normal((2, 2, 3, D)).astype(np.float32),
        "block_table": TABLE,
        "seq_lens": LENS,
        "softmax_scale": 0.05,
        "head_dim_v": formats.get(name).latent or 512,
    }
    return p, tensors, rows


def numbers(name, tensors, precision, reader=None):
    """[3, 4, D] all rows as `reader` reads them."""
    read = formats.exact if precision == "f64" else formats.read
    blocks, offsets = np.divmod(np.arange(12), 4)
    return read(name, tensors, blocks, offsets, block_size=4, reader=reader).reshape(3, 4, -1)


def same(found, right):
    for a, b in zip(found, right, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("name", formats.NAMES)
def test_a_format_is_the_dense_cache_of_what_each_reader_reads(name, precision):
    p, tensors, _ = problem(name)
    for reader in (None, *formats.get(name).readers):
        dense = numbers(name, tensors, precision, reader)
        right = decode(**p, kv_cache=dense, precision=precision, lse_axes="BHT", window_left=2)
        how = {"cache_format": name, "cache_reader": reader, "lse_axes": "BHT", "window_left": 2}
        same(decode(**p, **tensors, **how, precision=precision), right)
        assert np.isfinite(right.out).all()


@pytest.mark.parametrize("name", formats.NAMES)
def test_rows_that_nobody_reads_may_be_anything(name):
    p, tensors, rows = problem(name)
    right = decode(**p, **tensors, cache_format=name)
    unread = np.setdiff1d(np.arange(12), SEEN)
    rows.reshape(12, -1)[unread] = 3e4
    others = formats.quantize(name, rows, **scales(tensors))
    assert not np.array_equal(numbers(name, others, "f32"), numbers(name, tensors, "f32"))
    same(decode(**p, **others, cache_format=name), right)


def scales(tensors):
    return {name: array for name, array in tensors.items() if name.endswith("_scale") and array.size == 1}


@pytest.mark.parametrize("name", ["model1", "fp8_ds_mla", "fp8_e4m3"])
def test_an_extra_cache_has_the_format_of_the_main_one_and_its_own_scale(name):
    p, tensors, _ = problem(name)
    _, extra, _ = problem(name, seed=5)
    extra = {"kv_cache": extra["kv_cache"], **scales(extra)}
    if name == "fp8_e4m3":
        extra["kv_scale"] = extra["kv_scale"] * np.float32(1.5)
    slots = {
        "block_table": None,
        "seq_lens": None,
        "causal": False,
        "topk_by": "slot",
        "topk_indices": np.array([[[8, 9, 0]] * 2, [[4, 5, -1]] * 2]),
        "extra_topk_indices": np.array([[[11, -1]] * 2, [[3, 3]] * 2]),
    }
    dense = {"kv_cache": numbers(name, tensors, "f64"), "extra_kv_cache": numbers(name, extra, "f64")}
    right = decode(**{**p, **slots}, **dense, precision="f64")
    given = {f"extra_{tensor}": array for tensor, array in extra.items()}
    same(decode(**{**p, **slots}, **tensors, **given, cache_format=name, precision="f64"), right)


def test_an_extra_cache_of_a_format_of_its_own_is_read_by_its_own_first_rule():
    p, tensors, _ = problem("fp8_ds_mla")
    _, extra, _ = problem("nvfp4_sglang", seed=5)
    given = {f"extra_{tensor}": array for tensor, array in extra.items()}
    given |= {"extra_block_table": TABLE, "extra_seq_lens": LENS, "extra_topk_indices": np.array([[[0, 5]] * 2] * 2)}
    given["extra_topk_indices"][1] = 2
    own = {"cache_format": "fp8_ds_mla", "cache_reader": "f32", "extra_cache_format": "nvfp4_sglang"}
    right = {"kv_cache": numbers("fp8_ds_mla", tensors, "f64", "f32")}
    by_its_own = right | {"extra_kv_cache": numbers("nvfp4_sglang", extra, "f64")}
    lists = {name: array for name, array in given.items() if not name.endswith(("cache", "scale"))}
    found = decode(**p, **tensors, **given, **own, precision="f64")
    same(found, decode(**p, **lists, **by_its_own, precision="f64"))
    by_the_main_one = right | {"extra_kv_cache": numbers("nvfp4_sglang", extra, "f64", "f32")}
    assert not np.array_equal(found.out, decode(**p, **lists, **by_the_main_one, precision="f64").out)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"cache_format": "fp8"}, f"cache_format is 'fp8', expected one of {' '.join(formats.NAMES)}"),
        ({"cache_reader": "f64"}, "reader is 'f64'"),
        ({"kv_cache": np.zeros((3, 4, 655), np.uint8)}, "kv_cache has 655 bytes a row, expected 656"),
        ({"kv_cache": np.zeros((3, 4, 656), np.float32)}, "kv_cache is f32, expected"),
        ({"kv_scale": np.ones(1, np.float32)}, "kv_scale"),
        ({"extra_kv_cache": np.zeros((3, 4, 655), np.uint8)}, "extra_kv_cache has 655 bytes a row, expected 656"),
    ],
)
def test_what_a_format_does_not_take_is_one_line_that_names_the_argument(changes, line):
    p, tensors, _ = problem("fp8_ds_mla")
    with pytest.raises(InputError) as error:
        decode(**{**p, **tensors, "cache_format": "fp8_ds_mla", **changes})
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
