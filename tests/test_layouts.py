# SPDX-License-Identifier: Apache-2.0
"""Layouts of rows, queries, LSE and caches: every element where it belongs, views where the memory allows one."""

import math

import ml_dtypes
import numpy as np
import pytest
from problems import DTYPES

from mla_oracle import InputError
from mla_oracle.spellings.cache_layouts import (
    blocks_of_tokens,
    cache_view,
    from_cache_view,
    reinterpret,
    tokens_as_blocks,
    value_columns,
)
from mla_oracle.spellings.layouts import (
    batched,
    fold_heads,
    join,
    lse_from_canonical,
    lse_in_base,
    lse_to_canonical,
    ragged,
    split,
    unfold_heads,
)


def numbered(*shape, kind=np.float32):
    return np.arange(math.prod(shape)).astype(kind).reshape(shape)


def is_view(one, other):
    return np.shares_memory(one, other)


@pytest.mark.parametrize("kind", DTYPES.values())
@pytest.mark.parametrize("order", ["latent_first", "rope_first"])
def test_parts_of_two_tensors_are_joined_in_the_order_asked_for(order, kind):
    latent, rope = numbered(2, 3, 4, kind=kind), -numbered(2, 3, 2, kind=kind)
    joined = join(latent, rope, order=order)
    assert joined.shape == (2, 3, 6) and joined.dtype == kind
    assert (joined[..., :4] == latent).all() if order == "latent_first" else (joined[..., 2:] == latent).all()
    back = split(joined, 4, order=order)
    assert (back[0] == latent).all() and (back[1] == rope).all() and is_view(back[0], joined)


@pytest.mark.parametrize("order", ["latent_first", "rope_first"])
def test_slices_of_one_tensor_are_joined_to_a_view_of_it(order):
    rows = numbered(3, 4, 9)[:, ::2, 1:7]
    joined = join(*split(rows, 4, order=order), order=order)
    assert is_view(joined, rows) and joined.strides == rows.strides and (joined == rows).all()


def test_slices_that_are_apart_or_of_other_rows_are_joined_to_a_new_array():
    rows = numbered(3, 9)
    apart = join(rows[:, :4], rows[:, 5:7])
    assert not is_view(apart, rows) and apart.tolist() == rows[:, [0, 1, 2, 3, 5, 6]].tolist()
    shifted = join(rows[:-1, :4], rows[1:, 4:])
    assert shifted.tolist() == np.concatenate([rows[:-1, :4], rows[1:, 4:]], axis=1).tolist()
    spread = numbered(4, 9)
    assert join(spread[:2, :4], spread[::2, 4:6]).tolist() == [[0, 1, 2, 3, 4, 5], [9, 10, 11, 12, 22, 23]]
    same, backwards = join(rows[:, :4], rows[:, 4:]), join(rows[:, 4:], rows[:, :4])
    assert is_view(same, rows) and not is_view(backwards, rows)


def test_a_part_of_one_column_joins_whatever_its_last_stride():
    rows = np.arange(12, dtype=np.float32).reshape(2, 6)
    first = rows[:, :1:6]
    assert first.strides[-1] != first.itemsize
    np.testing.assert_array_equal(join(first, rows[:, 1:]), rows)


def test_a_rope_part_of_no_element_joins_to_the_latent_part():
    latent = numbered(2, 4)
    assert join(latent, np.empty((2, 0), np.float32)) is latent


def test_heads_fold_and_unfold_in_place():
    q = numbered(5, 6)
    assert unfold_heads(q, 3).shape == (5, 3, 2) and is_view(unfold_heads(q, 3), q)
    assert (fold_heads(unfold_heads(q, 3)) == q).all() and is_view(fold_heads(unfold_heads(q, 3)), q)
    assert unfold_heads(q[:, ::2], 3)[1, 2, 0] == q[1, 4]


def test_a_batch_is_ragged_queries_of_equal_lengths():
    q = numbered(3, 2, 4, 5)
    rows, indptr = ragged(q)
    assert is_view(rows, q) and rows.shape == (6, 4, 5) and indptr.tolist() == [0, 2, 4, 6]
    assert indptr.dtype == np.int32
    back = batched(rows, indptr)
    assert is_view(back, q) and back.tobytes() == q.tobytes()


@pytest.mark.parametrize(
    ("axes", "shape"), [("BTH", (2, 3, 4)), ("BHT", (2, 4, 3)), ("NH", (6, 4)), ("HN", (4, 6))]
)
def test_an_lse_turns_to_any_order_and_back(axes, shape):
    lse = numbered(2, 3, 4)
    turned = lse_from_canonical(lse, axes)
    assert turned.shape == shape and is_view(turned, lse)
    for b, t, h in np.ndindex(2, 3, 4):
        index = {"BTH": (b, t, h), "BHT": (b, h, t), "NH": (b * 3 + t, h), "HN": (h, b * 3 + t)}[axes]
        assert turned[index] == lse[b, t, h]
    back = lse_to_canonical(turned, axes, tokens=3)
    assert is_view(back, lse) and back.tobytes() == lse.tobytes()


def test_an_lse_of_ragged_queries_stays_in_rows():
    lse = numbered(5, 4)
    assert lse_to_canonical(lse, "NH") is lse
    assert (lse_to_canonical(lse_from_canonical(lse, "HN"), "HN") == lse).all()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_base_of_an_lse_changes_and_sentinels_stay(kind):
    lse = np.array([3, -2.5, 0, np.inf, -np.inf, np.nan, -1e30], kind)
    base_2 = lse_in_base(lse, given="e", wanted="2", empty_lse=-1e30)
    assert base_2.dtype == kind
    # 3 / ln 2 and -2.5 / ln 2, to 20 digits
    one_rounding = 0 if kind is np.float32 else 3e-16
    wanted = [kind(4.3280851226668902232), kind(-3.6067376022224085194), 0]
    assert base_2[:3].tolist() == pytest.approx(wanted, rel=one_rounding, abs=0)
    assert base_2[3:5].tolist() == [np.inf, -np.inf] and np.isnan(base_2[5]) and base_2[6] == kind(-1e30)
    assert lse_in_base(np.array([8], kind), given="2", wanted="e")[0] == kind(5.5451774444795624753)  # 8 ln 2, exact
    assert lse_in_base(lse, given="2", wanted="2") is lse


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("PSD", (3, 4, 5)), ("PSKD", (3, 4, 2, 5)), ("PKSD", (3, 2, 4, 5)), ("P1SKD", (3, 1, 4, 2, 5)),
        ("P1S1D", (3, 1, 4, 1, 5)), ("SD", (12, 5)), ("SKD", (12, 2, 5)),
    ],
)
def test_a_cache_of_any_axes_is_seen_as_pages_slots_and_heads(axes, shape):
    given = numbered(*shape)
    cache = cache_view(given, axes)
    assert is_view(cache, given)
    pages, slots = (12, 1) if "P" not in axes else (3, 4)
    assert cache.shape == ((pages, slots, 2, 5) if "K" in axes else (pages, slots, 5))
    for p, s, k, d in np.ndindex(pages, slots, 2 if "K" in axes else 1, 5):
        here = {"P": p, "S": s if "P" in axes else p, "K": k, "D": d, "1": 0}
        assert cache[(p, s, k, d) if "K" in axes else (p, s, d)] == given[tuple(here[letter] for letter in axes)]
    back = from_cache_view(cache, axes)
    assert back.shape == given.shape and is_view(back, given) and back.tobytes() == given.tobytes()


def test_a_single_head_is_no_axis():
    assert cache_view(numbered(3, 4, 1, 5), "PSKD").shape == (3, 4, 5)
    assert cache_view(numbered(12, 1, 5), "SKD").shape == (12, 1, 5)  # SGLang's k_buffer
    assert from_cache_view(numbered(3, 4, 5), "PKSD").shape == (3, 1, 4, 5)
    assert from_cache_view(numbered(12, 1, 5), "SKD").shape == (12, 1, 5)


def test_tokens_and_blocks_are_two_views_of_one_cache():
    cache = numbered(3, 4, 9)[:, :, 1:6]
    tokens = tokens_as_blocks(cache)
    assert tokens.shape == (12, 1, 5) and is_view(tokens, cache) and (tokens[:, 0] == cache.reshape(12, 5)).all()
    back = blocks_of_tokens(tokens, 4)
    assert is_view(back, cache) and back.shape == (3, 4, 5) and (back == cache).all()
    assert tokens_as_blocks(numbered(3, 4, 2, 5)).shape == (12, 1, 2, 5)
    assert tokens_as_blocks(numbered(6, 1, 5)[::2]).tolist() == numbered(6, 1, 5)[::2].tolist()
    assert tokens_as_blocks(np.empty((0, 4, 5))).shape == (0, 1, 5)
    assert blocks_of_tokens(np.empty((0, 1, 5)), 4).shape == (0, 4, 5)


def test_the_columns_of_a_value_are_read_from_where_it_lies():
    rows = numbered(3, 4, 9)[..., 1:7]
    assert value_columns(rows, rows[..., :4]) == (0, 4)  # SGLang, llama.cpp
    assert value_columns(rows, rows[..., 2:]) == (2, 4)  # rope first
    assert value_columns(rows, rows) == (0, 6)


def test_bytes_are_read_as_another_dtype_in_place():
    packed = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    for dtype, shape in (("i8", (2, 3, 4)), ("e4m3", (2, 3, 4)), ("bf16", (2, 3, 2)), ("f32", (2, 3, 1))):
        seen = reinterpret(packed, dtype)
        assert seen.shape == shape and is_view(seen, packed)
        assert reinterpret(seen, "u8").tobytes() == packed.tobytes()
    assert reinterpret(packed[..., 2:], "bf16").tobytes() == packed[..., 2:].tobytes()


BF16 = ml_dtypes.bfloat16
WHOLE = numbered(4, 9)
BAD = [
    (lambda: join(numbered(2, 4), numbered(2, 2, kind=BF16)), "rope is bf16, expected f32 as latent is"),
    (lambda: join(numbered(2, 4), numbered(3, 2)), "rope is [3, 2], expected [2, 'R'] as latent is [2, 4]"),
    (lambda: join(numbered(2, 4), numbered(2, 2), order="pe_first"),
     "order is 'pe_first', expected latent_first or rope_first"),
    (lambda: split(numbered(2, 4), 5), "latent is 5, expected at most the last axis of rows [2, 4]"),
    (lambda: unfold_heads(numbered(2, 7), 3), "q is [2, 7], expected a last axis that 3 heads divide"),
    (lambda: fold_heads(numbered(7)), "q is [7], expected [..., H, D]"),
    (lambda: ragged(numbered(2, 3, 4)), "q has 3 axes [2, 3, 4], expected [B, T, H, D]"),
    (lambda: batched(numbered(4, 1, 2), np.array([0, 1, 4], np.int32)),
     "qo_indptr[1] is 1, expected 2: 2 tokens for each of 2 requests"),
    (lambda: batched(numbered(5, 1, 2), np.array([0, 2, 4], np.int32)),
     "qo_indptr has 2 requests, expected a number that divides the 5 tokens of q"),
    (lambda: batched(numbered(5, 1, 2), np.array([0], np.int32)),
     "qo_indptr has 0 requests, expected a number that divides the 5 tokens of q"),
    (lambda: cache_view(numbered(3, 2, 4, 5), "P1SD"),
     "kv_cache is [3, 2, 4, 5], expected 1 on axis 1: its axes are P1SD"),
    (lambda: cache_view(numbered(3, 4, 5), "PSKD"), "kv_cache has 3 axes [3, 4, 5], expected 4: [P, S, K, D]"),
    (lambda: cache_view(numbered(3, 4, 5), "PDS"),
     "axes is 'PDS', expected P, S, K and 1 in any order, S among them, then D"),
    (lambda: from_cache_view(numbered(3, 4, 2, 5), "PSD"),
     "kv_cache is [3, 4, 2, 5], expected one key/value head: its axes are to be PSD"),
    (lambda: from_cache_view(numbered(3, 4, 5), "SKD"), "kv_cache has blocks of 4, expected 1: its axes are to be SKD"),
    (lambda: from_cache_view(numbered(4, 5), "SD"), "kv_cache has 2 axes [4, 5], expected [P, S, D] or [P, S, K, D]"),
    (lambda: tokens_as_blocks(numbered(3, 5, 5)[:, :4]),
     "kv_cache has pages 100 bytes apart, expected 80: 4 slots of 20 bytes"),
    (lambda: tokens_as_blocks(numbered(4, 5)), "kv_cache is [4, 5], expected [P, S, D]"),
    (lambda: blocks_of_tokens(numbered(10, 1, 5), 4),
     "kv_cache is [10, 1, 5], expected [tokens, 1, D], tokens a multiple of 4"),
    (lambda: value_columns(WHOLE[::2], WHOLE[:2, :2]),
     "values [2, 2] is no view of columns of kv_cache [2, 9], expected kv_cache[..., a:b]"),
    (lambda: value_columns(WHOLE[:, :4], WHOLE[:, 3:5]),
     "values [4, 2] is no view of columns of kv_cache [4, 4], expected kv_cache[..., a:b]"),
    (lambda: value_columns(WHOLE[:, 2:], WHOLE[:, 1:4]),
     "values [4, 3] is no view of columns of kv_cache [4, 7], expected kv_cache[..., a:b]"),
    (lambda: value_columns(numbered(2, 4), numbered(2, 2)),
     "values [2, 2] is no view of columns of kv_cache [2, 4], expected kv_cache[..., a:b]"),
    (lambda: value_columns(numbered(2, 4, kind=BF16), numbered(2, 2)),
     "values is float32, expected bfloat16 as kv_cache is"),
    (lambda: reinterpret(np.zeros((2, 3), np.uint8), "bf16"), "kv_cache has rows of 3 bytes, expected whole bf16"),
    (lambda: reinterpret(np.zeros((2, 5), np.uint8)[:, 1:], "bf16"),
     "kv_cache is misaligned for bf16: its address is no multiple of 2"),
    (lambda: reinterpret(np.zeros((2, 5), np.uint8)[:, :4], "bf16"),
     "kv_cache is misaligned for bf16: its stride 5 is no multiple of 2"),
    (lambda: reinterpret(np.zeros((2, 8), np.uint8)[:, ::2], "bf16", name="ckv"),
     "ckv has an innermost stride of 2 bytes, expected 1"),
    (lambda: lse_to_canonical(numbered(2, 3), "BHT"), "lse has 2 axes [2, 3], expected 3: [B, H, T]"),
    (lambda: lse_to_canonical(numbered(5, 3), "NH", tokens=2), "lse has 5 tokens, expected a multiple of 2"),
    (lambda: lse_from_canonical(numbered(5, 3), "THB"), "axes is 'THB', expected BTH or BHT or NH or HN"),
    (lambda: lse_in_base(numbered(3), given="e", wanted="10"), "wanted is '10', expected e or 2"),
    (lambda: lse_in_base(numbered(3, kind=BF16), given="e", wanted="2"), "lse is bfloat16, expected f32 or f64"),
]


@pytest.mark.parametrize(("call", "text"), BAD)
def test_a_contradiction_is_one_line_that_names_the_argument(call, text):
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == text
