# SPDX-License-Identifier: Apache-2.0
"""append_kv copies bits: the rows asked for go where they belong, and not one other byte changes."""

import numpy as np
import pytest
from problems import DTYPES

from mla_oracle import InputError, append_kv, expected, generate

STORED = ["f32", "f16", "bf16"]


def random_bytes(seed, dtype, *shape):
    """Any bits at all: NaN payloads, infinities, subnormals."""
    size = np.prod(shape, dtype=int) * np.dtype(DTYPES[dtype]).itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(DTYPES[dtype]).reshape(shape)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def problem(dtype, R, slots, T=None):
    T = len(slots) if T is None else T
    cache = random_bytes(1, dtype, 5, 4, 6 + R)
    rows = random_bytes(2, dtype, T, 6), random_bytes(3, dtype, T, R)
    return cache, *rows, np.array(slots, np.int64)


@pytest.mark.parametrize("R", [0, 2])
@pytest.mark.parametrize("dtype", STORED)
def test_rows_go_to_their_slots_and_no_other_byte_changes(dtype, R):
    cache, c_kv, k_pe, slots = problem(dtype, R, [13, -1, 0, 19, -(2**63), 7])
    truth = bits(cache).reshape(20, -1).copy()
    for t in (0, 2, 3, 5):
        truth[slots[t]] = np.concatenate([bits(c_kv)[t], bits(k_pe)[t]])
    append_kv(cache, c_kv, k_pe, slots)
    assert np.array_equal(bits(cache).reshape(20, -1), truth)


def test_rows_beyond_the_slots_are_padding():
    cache, c_kv, k_pe, slots = problem("bf16", 2, [3, 4], T=6)
    longer, *short = cache.copy(), c_kv[:2], k_pe[:2]
    append_kv(cache, c_kv, k_pe, slots)
    append_kv(longer, *short, slots)
    assert np.array_equal(bits(cache), bits(longer))


@pytest.mark.parametrize("slots", [[], [-1, -1, -5]])
def test_nothing_to_write_writes_nothing(slots):
    cache, c_kv, k_pe, slots = problem("f32", 2, slots, T=3)
    before = cache.tobytes()
    append_kv(cache, c_kv, k_pe, slots)
    assert cache.tobytes() == before


def test_a_cache_with_room_between_rows_and_blocks_keeps_that_room():
    room = random_bytes(4, "f16", 11, 9, 16)
    before = room.tobytes()
    cache = room[1::2, 1::2, 3:11]
    append_kv(cache, np.zeros((2, 6), np.float16), np.zeros((2, 2), np.float16), np.array([5, 6]))
    assert not bits(cache[1, 1:3]).any()
    restored = room.copy()
    restored[1::2, 1::2, 3:11][1, 1:3] = np.frombuffer(before, np.float16).reshape(room.shape)[3, 3:6:2, 3:11]
    assert restored.tobytes() == before


def test_rows_taken_from_the_cache_itself_are_read_before_any_is_written():
    cache = np.arange(16, dtype=np.float32).reshape(1, 4, 4)
    rows = cache[0]
    append_kv(cache, rows[:3, :2], rows[:3, 1:3], np.array([1, 2, 3]))
    assert cache[0].tolist() == [[0, 1, 2, 3], [0, 1, 1, 2], [4, 5, 5, 6], [8, 9, 9, 10]]


def test_an_append_case_gives_the_written_cache_and_leaves_its_input_alone():
    case = generate("append:rank=6,rope=2,dtype=bf16,tokens=9")
    before = case.kv_cache.tobytes()
    written = expected(case)["kv_cache"].reshape(-1, 8)
    assert case.kv_cache.tobytes() == before
    assert (case.slot_mapping < 0).tolist() == [False, False, True] * 3
    for t, slot in enumerate(case.slot_mapping):
        if slot >= 0:
            assert np.array_equal(written[slot], np.concatenate([case.c_kv[t], case.k_pe[t]]))
    untouched = np.setdiff1d(np.arange(len(written)), case.slot_mapping)
    assert np.array_equal(written[untouched], case.kv_cache.reshape(-1, 8)[untouched])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": np.array([3, 20])}, "slot_mapping[1] is 20, expected below 20, the slots of kv_cache"),
        ({"slot_mapping": np.array([3, 2**63 - 1])}, "slot_mapping[1] is 9223372036854775807, expected below 20"),
        ({"slot_mapping": np.array([3, -1, 7, 3])}, "slot_mapping[3] is 3, which slot_mapping[0] already is"),
        ({"slot_mapping": np.array([1, 2, 3, 4, 5])}, "slot_mapping has 5 entries, expected at most c_kv's 4 rows"),
        ({"slot_mapping": np.array([1, 2], np.int32)}, "slot_mapping is i32, expected i64"),
        ({"slot_mapping": np.array([1.0])}, "slot_mapping is f64, expected i64"),
        ({"slot_mapping": np.array([[1]])}, "slot_mapping has 2 axes [1, 1], expected 1: [n]"),
        ({"c_kv": np.ones((4, 7), np.float32)}, "kv_cache rows are 8 wide, expected c_kv's 7 + k_pe's 2 elements"),
        ({"k_pe": np.ones((4, 3), np.float32)}, "kv_cache rows are 8 wide, expected c_kv's 6 + k_pe's 3 elements"),
        ({"k_pe": np.ones((3, 2), np.float32)}, "k_pe is [3, 2], expected [T, R] with T = 4 on axis 0"),
        ({"c_kv": np.ones((4, 6), np.float16)}, "c_kv is f16, expected f32"),
        ({"k_pe": np.ones((4, 2), DTYPES["bf16"])}, "k_pe is bf16, expected f32"),
        ({"k_pe": None}, "k_pe is a NoneType, expected an array"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(change, message):
    cache, c_kv, k_pe, slots = problem("f32", 2, [13, 0, 19, 7])
    before = cache.tobytes()
    with pytest.raises(InputError) as error:
        append_kv(**{"kv_cache": cache, "c_kv": c_kv, "k_pe": k_pe, "slot_mapping": slots} | change)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert cache.tobytes() == before


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (np.ones((5, 4, 8)), "kv_cache is f64, expected f32 or f16 or bf16"),
        (np.ones((20, 8), np.float32), "kv_cache has 2 axes [20, 8], expected 3: [num_blocks, block_size, D]"),
        (np.broadcast_to(np.float32(1), (5, 4, 8)), "kv_cache is read-only, expected an array to write into"),
        (np.ones((5, 0, 8), np.float32), "slot_mapping[0] is 0, expected below 0, the slots of kv_cache"),
    ],
)
def test_a_cache_that_cannot_be_written_is_refused(cache, message):
    with pytest.raises(InputError) as error:
        append_kv(cache, np.ones((1, 6), np.float32), np.ones((1, 2), np.float32), np.array([0]))
    assert str(error.value) == message
