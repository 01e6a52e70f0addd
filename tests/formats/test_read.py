# SPDX-License-Identifier: Apache-2.0
"""Random bytes, NaN codes and all, read bit for bit as by the slow reader; how the array lies changes nothing."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_caches import PAGES, backwards, gaps, one_head, page_gaps, tensors, unaligned
from slow_reader import row

from mla_oracle import formats

EVERY = [(name, reader) for name in formats.NAMES for reader in formats.get(name).readers]
ROWS = [name for name in formats.NAMES if name not in PAGES]


def same(found, wanted):
    """Equal numbers, or NaN on both sides; zeros of either sign are equal numbers, so signs are looked at too."""
    np.testing.assert_array_equal(found, wanted)
    there = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found)[there], np.signbit(wanted)[there])


@pytest.mark.parametrize(("name", "reader"), EVERY)
@settings(deadline=None, derandomize=True, max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 3), size=st.integers(1, 5))
def test_every_byte_pattern_reads_as_the_description_says(name, reader, seed, blocks, size):
    rng = np.random.default_rng(seed)
    cache = tensors(name, blocks, size, rng)
    block, offset = rng.integers(0, blocks, 2), rng.integers(0, size, 2)
    wanted = np.stack([row(name, reader, cache, b, o) for b, o in zip(block, offset, strict=True)])
    exact = formats.exact(name, cache, block, offset, reader=reader)
    assert exact.dtype == np.float64
    same(exact, wanted)
    found = formats.read(name, cache, block, offset, block_size=size, reader=reader)
    assert found.dtype == np.float32
    with np.errstate(over="ignore"):
        same(found, wanted.astype(np.float32))


@pytest.mark.parametrize(("name", "reader"), EVERY)
def test_rounding_once_more_to_the_dtype_of_the_reader_changes_nothing(name, reader):
    from mla_oracle.dtypes import round_to

    rng = np.random.default_rng(5)
    cache = tensors(name, 2, 8, rng)
    kind = formats.get(name).reader_roundings[reader]
    found = formats.read(name, cache, np.repeat([0, 1], 8), np.tile(np.arange(8), 2), reader=reader)
    same(round_to(found, kind).astype(np.float32), found)


@pytest.mark.parametrize("layout", [gaps, unaligned, backwards, one_head])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_read_through_any_outer_strides_and_alignment(name, layout):
    rng = np.random.default_rng(1)
    cache = tensors(name, 3, 4, rng)
    block, offset = np.array([2, 0, 1, 2]), np.array([3, 0, 2, 3])
    laid = {k: layout(v) if k.endswith("cache") else v for k, v in cache.items()}
    wanted = formats.read(name, cache, block, offset)
    same(formats.read(name, laid, block, offset), wanted)
    assert formats.check(name, laid)[:2] == (3, 4)


@pytest.mark.parametrize("layout", [page_gaps, unaligned, backwards, one_head])
@pytest.mark.parametrize("name", PAGES)
def test_pages_are_read_through_any_page_stride_and_alignment(name, layout):
    rng = np.random.default_rng(2)
    cache = tensors(name, 3, 4, rng)
    block, offset = np.array([2, 0, 1, 2]), np.array([3, 0, 2, 3])
    same(
        formats.read(name, {"kv_cache": layout(cache["kv_cache"])}, block, offset, block_size=4),
        formats.read(name, cache, block, offset, block_size=4),
    )


@pytest.mark.parametrize("size", [1, 2, 61, 64, 69])
@pytest.mark.parametrize("name", PAGES)
def test_padded_pages_of_bytes_read_like_rows(name, size):
    token, multiple = PAGES[name]
    cache = tensors(name, 2, size, np.random.default_rng(3))
    padded = np.full((2, size * token + -size * token % multiple), 255, np.uint8)
    padded[:, : size * token] = cache["kv_cache"].reshape(2, -1)
    block, offset = np.array([1, 0]), np.array([size - 1, size // 2])
    wanted = formats.read(name, cache, block, offset, block_size=size)
    same(formats.read(name, {"kv_cache": padded}, block, offset, block_size=size), wanted)
    if name != "v4.1_fp4":
        assert formats.block_size_of(name, padded.shape) == size
        same(formats.read(name, {"kv_cache": padded}, block, offset), wanted)


@pytest.mark.parametrize("name", formats.NAMES)
def test_no_rows_are_read_as_none(name):
    cache = tensors(name, 2, 3, np.random.default_rng(4))
    nothing = np.zeros(0, np.int64)
    width = formats.check(name, cache)[2]
    assert formats.read(name, cache, nothing, nothing).shape == (0, width)


@pytest.mark.parametrize("names", [("kv_scale",), ("kpe_scale",), ("kv_scale", "kpe_scale")])
def test_no_rows_are_read_as_none_by_scales_of_tokens(names):
    scales = {"kv_scale": np.ones(1, np.float32), "kpe_scale": np.ones(1, np.float32)}
    scales |= {name: np.full((2, 3), 0.5, np.float32) for name in names}
    nothing = np.zeros(0, np.int64)
    cache = {"kv_cache": np.full((2, 3, 70), 0x38, np.uint8), **scales}
    assert formats.read("fp8_e4m3", cache, nothing, nothing).shape == (0, 70)
    found = formats.read("fp8_e4m3", cache, np.array([1]), np.array([2]))[0]
    assert found[5] == scales["kv_scale"].flat[-1] and found[6] == scales["kpe_scale"].flat[-1]


@pytest.mark.parametrize("name", formats.NAMES)
def test_no_row_but_those_asked_for_is_touched(name):
    # All memory of the cache but that of one row cannot be read: to touch it ends the process.
    code = f"""
import ctypes, mmap, sys
sys.path.insert(0, {__file__.rsplit("/", 1)[0]!r})
import numpy as np
from random_caches import tensors
from mla_oracle import formats

cache = tensors({name!r}, 2, 3, np.random.default_rng(0))
wanted = formats.read({name!r}, cache, np.array([1]), np.array([1]))
guarded = dict(cache)
libc = ctypes.CDLL(None, use_errno=True)
for key, value in cache.items():
    if value.ndim < 2:
        continue
    row = value[1, 1].nbytes if {name!r} not in ("model1", "v4.1", "v4.1_fp4") else 3 * value[1, 1].nbytes
    step = -(-row // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, 6 * step)
    whole = np.frombuffer(memory, np.uint8).reshape(2, 3, step)
    if row == value[1, 1].nbytes:
        view = whole[:, :, :row].view(value.dtype)
        if value.ndim == 2:
            view = view[:, :, 0]
        keep = 4
    else:  # a page of three rows at the start of each half
        view = np.lib.stride_tricks.as_strided(whole, value.shape, (3 * step, value.shape[2], 1))
        keep = 3
    view[...] = value
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in range(6):
        if at != keep:
            assert libc.mprotect(ctypes.c_void_p(start + at * step), ctypes.c_size_t(step), mmap.PROT_READ * 0) == 0
    guarded[key] = view
found = formats.read({name!r}, guarded, np.array([1]), np.array([1]))
np.testing.assert_array_equal(found, wanted)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64", "e4m3", "e4m3fnuz", "e5m2"])
def test_a_cache_without_a_format_is_read_as_the_numbers_it_holds(dtype):
    from mla_oracle.dtypes import round_to

    rng = np.random.default_rng(6)
    rows = round_to(rng.standard_normal((2, 3, 6)), dtype)
    rope = round_to(rng.standard_normal((2, 3, 2)), dtype)
    found = formats.exact(None, {"kv_cache": rows, "kpe_cache": rope}, np.array([1, 0]), np.array([2, 0]))
    np.testing.assert_array_equal(found[:, :6], rows.astype(np.float64)[[1, 0], [2, 0]])
    np.testing.assert_array_equal(found[:, 6:], rope.astype(np.float64)[[1, 0], [2, 0]])
    assert formats.check(None, {"kv_cache": rows}) == (2, 3, 6)


def test_nothing_is_imported_until_it_is_asked_for():
    code = """
import sys, mla_oracle
assert not any(name.startswith("mla_oracle.formats") for name in sys.modules)
from mla_oracle import formats
assert "numpy" not in sys.modules and "ml_dtypes" not in sys.modules
formats.get("q8_0")
assert "mla_oracle.formats.pages" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
