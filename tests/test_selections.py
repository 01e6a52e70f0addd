# SPDX-License-Identifier: Apache-2.0
"""Selections and masks: hand-written ones, round trips bit for bit, one line for each contradiction."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_oracle import InputError
from mla_oracle.spellings.selections import (
    from_dense,
    from_mask,
    positions_of_slots,
    slots_of_positions,
    split_selection,
    to_mask,
)

TABLE = np.array([[7, 3, -1], [2147480000, 0, 0], [5, 0, 2]], np.int32)
LENS = np.array([6, 0, 11], np.int32)
PAGES = {"block_table": TABLE, "seq_lens": LENS, "block_size": 4}
INF = np.float32(np.inf)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_positions_become_slots_through_the_table(kind):
    chosen = np.array([[5, -1, 0, 5], [-1, -2, -1, -9], [10, 4, 4, 0]], kind)
    slots = slots_of_positions(chosen, **PAGES)
    assert slots.dtype == kind
    assert slots.tolist() == [[13, -1, 28, 13], [-1, -1, -1, -1], [10, 0, 0, 20]]


def test_what_lies_beyond_a_topk_length_may_be_anything():
    chosen = np.array([[[5, 99], [1, 2**31 - 1]], [[9, 9], [9, 9]], [[0, 10], [77, 3]]], np.int32)
    per_request = slots_of_positions(chosen[:2], TABLE[:2], LENS[:2], block_size=4,
                                     topk_length=np.array([1, 0], np.int32))
    assert per_request.tolist() == [[[13, -1], [29, -1]], [[-1, -1], [-1, -1]]]
    per_query = slots_of_positions(chosen, **PAGES, topk_length=np.array([[1, 1], [0, 0], [2, 0]], np.int32))
    assert per_query.tolist() == [[[13, -1], [29, -1]], [[-1, -1], [-1, -1]], [[20, 10], [-1, -1]]]


def test_ragged_queries_select_in_their_own_requests():
    chosen = np.array([[1], [10], [9]], np.int64)
    slots = slots_of_positions(chosen, **PAGES, qo_indptr=np.array([0, 1, 1, 3], np.int32))
    assert slots.tolist() == [[29], [10], [9]]


def test_positions_outside_may_be_skipped():
    chosen = np.array([[6, 5], [0, -1], [11, 2**31 - 1]], np.int32)
    assert slots_of_positions(chosen, **PAGES, topk_outside="skip").tolist() == [[-1, 13], [-1, -1], [-1, -1]]


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_slots_and_positions_and_back_are_the_same_bits(seed):
    rng = np.random.default_rng(seed)
    block, B, T, K = rng.integers(1, 5), rng.integers(0, 5), rng.integers(1, 4), rng.integers(0, 6)
    lens = rng.integers(0, 4 * block, B).astype(np.int32)
    table = rng.permutation(4 * B).reshape(B, 4).astype(np.int32)
    chosen = rng.integers(-1, np.maximum(lens, 1)[:, None, None], (B, T, K)).astype(np.int32)
    chosen[lens == 0] = -1
    slots = slots_of_positions(chosen, table, lens, block_size=block)
    for b, t, k in np.ndindex(slots.shape):
        p = chosen[b, t, k]
        assert slots[b, t, k] == (-1 if p < 0 else table[b, p // block] * block + p % block)
    back = positions_of_slots(slots, table, lens, block_size=block)
    assert back.dtype == chosen.dtype and back.tobytes() == chosen.tobytes()


def test_one_list_for_two_caches_is_split_into_views():
    chosen = np.arange(24, dtype=np.int32).reshape(2, 2, 6)
    main, main_length, extra, extra_length = split_selection(chosen, np.array([3, 6], np.int32), 4)
    assert main.tolist() == chosen[..., :4].tolist() and extra.tolist() == chosen[..., 4:].tolist()
    assert np.shares_memory(main, chosen) and np.shares_memory(extra, chosen)
    assert main_length.tolist() == [3, 4] and extra_length.tolist() == [0, 2]


def test_a_bool_mask_shows_what_is_true():
    mask = np.array([[True, False], [False, True]])
    assert from_mask(mask).tolist() == [[0, -INF], [-INF, 0]] and from_mask(mask).dtype == np.float32
    assert to_mask(from_mask(mask)).tolist() == mask.tolist()


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_float_mask_is_a_bias_as_it_is(kind):
    mask = np.array([[0.5, -np.inf, -2]], kind)
    assert np.shares_memory(from_mask(mask), mask) and from_mask(mask).dtype == kind
    assert to_mask(np.array([0, -np.inf, -0.0], kind)).tolist() == [True, False, True]


def test_dense_rows_are_a_block_a_request():
    rows = np.zeros((2, 5, 3), np.float32)
    cache, table = from_dense(rows)
    assert np.shares_memory(cache, rows) and cache.shape == (2, 5, 3)
    assert table.block_table.tolist() == [[0], [1]] and table.seq_lens.tolist() == [5, 5]
    assert from_dense(rows[0])[0].shape == (1, 5, 3)


def selected(indices, kind=np.int32, **how):
    return slots_of_positions(np.array(indices, kind), **PAGES | how)


def slotted(indices, **how):
    return positions_of_slots(np.array(indices, np.int32), **PAGES | how)


BAD = [
    (lambda: selected([[6], [-1], [0]]), "topk_indices[0, 0] is 6, expected below 6, the tokens of request 0"),
    (lambda: selected([[[0], [5]], [[-1], [-1]], [[10], [11]]]),
     "topk_indices[2, 1, 0] is 11, expected below 11, the tokens of request 2"),
    (lambda: selected([[0], [0], [0]]), "topk_indices[1, 0] is 0, expected below 0, the tokens of request 1"),
    (lambda: selected([[0], [-1]]), "topk_indices is [2, 1], expected [B, K] with B = 3 on axis 0"),
    (lambda: selected([[0], [0], [0]], kind=np.uint32), "topk_indices is u32, expected i32 or i64"),
    (lambda: selected([[0], [-1], [0]], topk_outside="drop"), "topk_outside is 'drop', expected error or skip"),
    (lambda: selected([[0], [-1], [0]], topk_length=np.array([1, 2, 0])), "topk_length[1] is 2, expected 0 to 1"),
    (lambda: selected([[0], [-1], [0]], topk_length=np.array([1, 0])), "topk_length is [2], expected [3]"),
    (lambda: selected([[0], [0]], qo_indptr=np.array([0, 1, 1, 3], np.int32)),
     "qo_indptr[3] is 3, expected 2, the length of topk_indices"),
    (lambda: selected([[0], [0]], qo_indptr=np.array([0, 2], np.int32)),
     "qo_indptr is [2], expected [4] as for seq_lens"),
    (lambda: slots_of_positions(np.array([[3]], np.int32), np.array([[2**29]], np.int32), np.array([4], np.int32),
                                block_size=4),
     "topk_indices[0, 0] is slot 2147483651, expected i64 indices to hold it"),
    (lambda: slotted([[20], [-1], [20]]), "topk_indices[0, 0] is 20, expected a slot of a token of request 0"),
    (lambda: slotted([[14], [-1], [20]]), "topk_indices[0, 0] is 14, expected a slot of a token of request 0"),
    (lambda: slotted([[-1], [-1], [-1]], block_table=np.array([[7, 7, 1], [0, 0, 0], [5, 0, 2]], np.int32)),
     "block_table[0, 1] is 7, as block_table[0, 0] is: slots have two positions"),
    (lambda: split_selection(np.zeros((2, 3), np.int32), np.array([1, 4]), 2), "topk_length[1] is 4, expected 0 to 3"),
    (lambda: split_selection(np.zeros((2, 3), np.int32), np.array([1, 2]), 4),
     "columns is 4, expected at most 3, those of topk_indices"),
    (lambda: from_mask(np.zeros((2, 3), np.uint8)), "mask is u8, expected bool or f32 or f16 or bf16"),
    (lambda: from_mask(np.array([[0, np.nan]], np.float16)), "mask[0, 1] is nan, expected a number or -inf"),
    (lambda: from_mask(np.array([[np.inf]], np.float32)), "mask[0, 0] is inf, expected a number or -inf"),
    (lambda: to_mask(np.array([0, -1], np.float32)),
     "bias[1] is -1.0, expected 0 or -inf: a mask has nothing between"),
    (lambda: to_mask(np.array([True])), "bias is bool, expected f32 or f16 or bf16"),
    (lambda: from_dense(np.zeros(3)), "rows has 1 axes [3], expected [B, N, D] or [N, D]"),
]


@pytest.mark.parametrize(("call", "text"), BAD)
def test_a_contradiction_is_one_line_that_names_the_argument(call, text):
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == text
