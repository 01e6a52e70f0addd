# SPDX-License-Identifier: Apache-2.0
"""Generated cases beyond the plain one: lists and masks as hostile as they claim, NaN in every row that nobody sees."""

import dictionary
import numpy as np
import pytest
from ids import IDS, LENS, SMALL, made, same

from mla_oracle import InputError, UnsupportedError, expected, generate, read_case, write_case


@pytest.mark.parametrize("options", [*IDS, "causal=true"])
def test_a_generated_case_is_answered_by_the_definition(options):
    case = made(options)
    out, lse = expected(case).values()
    if case.lse_axes == "BHT":
        lse = lse.swapaxes(1, 2)
    for index, row in dictionary.attend(case.tensors() | case.conventions()).items():
        assert np.allclose(out[index], row.out, rtol=1e-12, atol=1e-12)
        assert lse[index] == row.lse or abs(lse[index] - row.lse) < 1e-12


@pytest.mark.parametrize("options", IDS)
def test_a_generated_case_goes_through_a_file(tmp_path, options):
    case = made(options)
    write_case(tmp_path / "case", case)
    back = read_case(tmp_path / "case")
    assert back.id == case.id and back.extensions() == case.extensions()
    assert repr(back.conventions()) == repr(case.conventions()) and back.tensors().keys() == case.tensors().keys()
    assert all(same(back.tensors()[name], array) for name, array in case.tensors().items())


@pytest.mark.parametrize("options", IDS)
def test_no_query_sees_nan_and_what_is_unread_changes_no_bit(options):
    case = made(options)
    assert case.extensions() and case.id == made(options).id
    out, lse = expected(case).values()
    assert np.isfinite(out).all() and not np.isnan(lse).any()
    other = expected(made(options, unread="numbers"))
    assert same(out, other["out"]) and same(lse, other["lse"])


def queries(case):
    """(row of the flattened queries, request, position) of every query."""
    counts = np.diff(case.qo_indptr) if case.qo_indptr is not None else [case.q.shape[1] if case.q.ndim == 4 else 1] * 6
    rows = [(b, n - count + t) for b, (n, count) in enumerate(zip(LENS, counts, strict=True)) for t in range(count)]
    return [(r, b, i) for r, (b, i) in enumerate(rows)]


def flat(case, array, axes):
    """[N, ...] of an array with the axes of q but its last two, then `axes` more."""
    return array.reshape(-1, *array.shape[array.ndim - axes :])


def listed(case, name="topk"):
    """The indices of every query, without those that no kernel may read."""
    indices = flat(case, getattr(case, f"{name}_indices"), 1)
    length = getattr(case, f"{name}_length")
    if length is None:
        return [list(row) for row in indices]
    of_request = length.shape != indices.shape[:1] and length.ndim == 1
    return [list(row[: length[b] if of_request else length.reshape(-1)[r]])
            for row, (r, b, _) in zip(indices, queries(case), strict=True)]


def seen_by_the_definition(case):
    """Every (request, position) that some query sees, by loops over the definition."""
    seen = set()
    for r, b, i in queries(case):
        n = LENS[b]
        for p in range(n):
            if case.causal and p > i:
                continue
            left, right = case.window_left, case.window_right
            inside = (left in (None, -1) or p >= i - left) and (right in (None, -1) or p <= i + right)
            if not inside and p >= case.window_first:
                continue
            if case.topk_indices is not None and p not in listed(case)[r]:
                continue
            if case.bias is not None:
                per_head = case.bias.ndim == case.q.ndim
                bias = flat(case, case.bias, 2 if per_head else 1)[r]
                if not (bias[..., p] > -np.inf).any():
                    continue
            seen.add((b, p))
    return seen


BY_POSITION = [o for o in IDS if "by=slot" not in o and "lcg" not in o and not o.startswith("q_dtype")]


@pytest.mark.parametrize("options", BY_POSITION)
def test_exactly_the_rows_that_nobody_sees_are_nan(options):
    case = made(options)
    seen = seen_by_the_definition(case)
    rows = case.kv_cache.astype(np.float32).reshape(*case.kv_cache.shape[:2], -1)
    read = np.zeros(rows.shape[:2], bool)
    for b, p in seen:
        read[case.block_table[b, p // 4], p % 4] = True
    assert np.isfinite(rows[read]).all() and np.isnan(rows[~read]).all() and not read.all()


def test_by_slot_the_rows_that_no_list_names_are_nan():
    for options in ("topk=6,topk_by=slot,tokens=2,topk_length=query", "topk=3,extra=3+0+9+17+2+40,topk_by=slot"):
        case = made(options)
        for name, cache in (("topk", case.kv_cache), ("extra_topk", case.extra_kv_cache)):
            if cache is not None:
                rows = cache.reshape(-1, 12)
                named = sorted({int(s) for row in listed(case, name) for s in row if s >= 0})
                assert np.isfinite(rows[named]).all()
                assert np.isnan(np.delete(rows, named, axis=0)).all() and len(named) < len(rows)


def test_a_list_is_shuffled_with_minus_one_anywhere_and_names_no_token_twice():
    case = made("topk=16,tokens=4")
    holes, rising = [], 0
    for row in case.topk_indices.reshape(-1, 16):
        keys = row[row >= 0].tolist()
        assert len(set(keys)) == len(keys)
        rising += keys == sorted(keys) and len(keys) > 3
        holes += [k for k in range(16) if row[k] < 0 and (row[k:] >= 0).any()]
    assert rising == 0 and len(set(holes)) > 8
    assert case.topk_indices.dtype == np.int32
    short = case.topk_indices[2]  # of a request of 4 tokens
    assert (short[:, 8:] >= 0).any() and (short[:, :8] >= 0).any()
    assert (case.topk_indices[4:] == -1).any(axis=2).sum() > 4
    long = case.topk_indices[5]  # of a request that has more tokens than the list has entries
    assert (long >= 0).sum() > 40 and len(np.unique(long[long >= 0])) > 20


def test_without_invalid_ones_minus_one_only_follows_too_few_keys():
    case = made("topk=8,invalid=none")
    for row, n in zip(case.topk_indices, LENS, strict=True):
        count = min(n, 8)
        assert (row[:count] >= 0).all() and (row[count:] == -1).all()


def test_every_third_query_may_select_nothing():
    case = made("topk=8,invalid=rows,tokens=3,causal=false")
    rows = case.topk_indices.reshape(-1, 8)
    assert (rows[2::3] == -1).all() and (rows[np.arange(18) % 3 != 2][4:] >= 0).any(axis=1).all()
    out, lse = expected(case).values()
    assert (out[:, 2] == 0).all() and (lse[:, 2] == -np.inf).all()


def test_duplicates_are_named_twice():
    case = made("topk=8,duplicates=true,invalid=none")
    row = case.topk_indices[5].tolist()
    assert row[::2] == row[1::2] and len(set(row)) == 4


@pytest.mark.parametrize("by", ["position", "slot"])
def test_too_large_indices_come_only_where_they_are_skipped(by):
    case = made(f"topk=16,tokens=3,topk_outside=skip,topk_by={by}")
    for row, (_, b, _) in zip(listed(case), queries(case), strict=True):
        capacity = LENS[b] if by == "position" else case.kv_cache.shape[0] * 4
        assert not {int(k) for k in row if k >= capacity} - {capacity, capacity + 1, 2147480000}
    every = [k for row in listed(case) for k in row]
    assert 2147480000 in every
    calm = made(f"topk=16,tokens=3,topk_by={by}")
    assert 2147480000 not in [k for row in listed(calm) for k in row]
    expected(calm)


@pytest.mark.parametrize("options", ["tokens=3,topk_length=query", "tokens=3,topk_length=request",
                                     "ragged=2+1+0+3+1+2,topk_length=request", "topk_length=query"])
def test_beyond_a_topk_length_lies_garbage(options):
    case = made(f"topk=16,{options}")
    shape = case.topk_indices.shape[:-1] if "query" in options or "ragged" in options else (6,)
    assert case.topk_length.shape == shape and case.topk_length.dtype == np.int32
    assert len(np.unique(case.topk_length)) > 2 and case.topk_length.max() <= 16
    kept = [len(row) for row in listed(case)]
    beyond = [k for row, n in zip(case.topk_indices.reshape(-1, 16), kept, strict=True) for k in row[n:]]
    assert max(beyond) > 10**6 and min(beyond) < -(10**6)
    assert sum(0 <= k < 40 for k in beyond) > 4  # keys that a kernel may take for listed ones


def test_a_list_by_slot_names_the_rows_that_the_list_by_position_does():
    options = "topk=6,tokens=2,causal=false,invalid=rows"
    by_position, by_slot = made(options), made(options + ",topk_by=slot")
    assert by_slot.block_table is None and by_slot.seq_lens is None and by_slot.causal is False
    for b in range(6):
        for position, slot in zip(by_position.topk_indices[b].ravel(), by_slot.topk_indices[b].ravel(), strict=True):
            wanted = -1 if position < 0 else by_position.block_table[b, position // 4] * 4 + position % 4
            assert slot == wanted
    one, other = expected(by_position), expected(by_slot)
    assert same(one["out"], other["out"]) and same(one["lse"], other["lse"])


def test_a_bias_hides_keys_and_is_large_where_there_is_no_token():
    case = made("bias=normal,tokens=2")
    assert case.bias.shape == (6, 2, 40) and case.bias.dtype == np.float32
    for b, n in enumerate(LENS):
        assert (case.bias[b, :, n:] == 1e4).all()
    of_long = case.bias[5]
    assert 0.1 < (of_long == -np.inf).mean() < 0.4 and np.isfinite(of_long[of_long > -np.inf]).all()
    mask = made("bias=mask,tokens=3")
    assert set(np.unique(mask.bias[5, :2])) == {-np.inf, 0.0} and (mask.bias[5, 2] == -np.inf).all()
    assert (expected(mask)["out"][:, 2] == 0).all()


def test_an_alibi_bias_falls_with_the_distance_by_a_slope_a_head():
    bias = made("bias=alibi,tokens=2").bias
    assert bias.shape == (6, 2, 4, 40)
    for head, slope in enumerate((0.25, 0.0625, 0.015625, 0.00390625)):
        assert same(bias[5, 1, head], (-slope * np.arange(39, -1, -1)).astype(np.float32))
        assert bias[5, 0, head, 38] == 0 and bias[4, 0, head, 9] == 0


def test_infinite_sinks_come_by_turns_with_numbers():
    sinks = made("sinks=infinite").sinks
    assert sinks.dtype == np.float32 and sinks[1] == -np.inf and sinks[2] == np.inf and np.isfinite(sinks[[0, 3]]).all()
    assert np.isfinite(made("sinks=normal").sinks).all()


def test_split_storage_holds_the_rows_of_the_joined_one():
    joined, split = generate(SMALL), made("kpe=3")
    assert split.kv_cache.shape[-1] == 9 and split.kpe_cache.shape[-1] == 3
    assert same(np.concatenate([split.kv_cache, split.kpe_cache], axis=-1), joined.kv_cache)
    one, other = expected(joined), expected(split)
    assert same(one["out"], other["out"]) and same(one["lse"], other["lse"])


def test_position_coded_values_are_where_the_value_is():
    case = made("value_offset=4,inputs=position")
    row = case.kv_cache[case.block_table[5, 9], 3]  # position 39
    assert row[4:].tolist() == [(39 + c) / 16 for c in range(8)]
    assert np.allclose(expected(case)["out"][5, 0], [(19.5 + c) / 16 for c in range(8)])


def test_ragged_queries_are_those_of_one_batch_after_the_other():
    case = made("ragged=2+1+0+3+1+2")
    assert case.q.shape == (9, 4, 12) and case.qo_indptr.tolist() == [0, 2, 3, 3, 6, 7, 9]
    assert np.isnan(case.kv_cache[case.block_table[2, 0]]).all()  # request 2 has no query


def test_a_query_in_e4m3_stands_for_q_times_its_scale():
    case, plain = made("q_dtype=e4m3,q_scale=0.03"), generate(SMALL)
    assert case.q.dtype.name == "float8_e4m3fn" and case.q_scale == 0.03
    assert np.abs(case.q.astype(np.float32) * 0.03 - plain.q).max() < 0.2


def test_several_kv_heads_have_rows_of_their_own():
    case = made("kv_heads=2")
    assert case.kv_cache.shape[2:] == (2, 12)
    out = expected(case)["out"]
    swapped = generate(SMALL + ",kv_heads=2").kv_cache[:, :, ::-1]
    assert not np.allclose(case.kv_cache, swapped, equal_nan=True) and out.shape == (6, 4, 8)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("topk_by=slot", "has topk_by without topk"),
        ("topk_length=query", "has topk_length without topk"),
        ("duplicates=true", "has duplicates without topk"),
        ("invalid=rows", "has invalid without topk"),
        ("topk_outside=skip", "has topk_outside without topk"),
        ("extra=1x6", "has extra without topk"),
        ("topk=3,extra_topk=4", "has extra_topk without extra"),
        ("topk=3,extra_block=4", "has extra_block without extra"),
        ("extra_format=model1", "has extra_format without extra"),
        ("writer=flashmla", "has writer without format"),
        ("reader=bf16", "has reader without format"),
        ("sinks_in_lse=true", "has sinks_in_lse without sinks"),
        ("lse_axes=BHT", "has lse_axes without tokens"),
        ("topk=3,topk_by=slot,window=4", "has window and topk_by: by slot there are no positions"),
        ("topk=3,topk_by=slot,first=4", "has first and topk_by: by slot there are no positions"),
        ("topk=3,topk_by=slot,bias=mask", "has bias and topk_by: by slot there are no positions"),
        ("ragged=1x6,tokens=2", "has ragged and tokens: one of them counts the query tokens"),
        ("format=fp8_e4m3,kpe=3", "has format and kpe: a format says itself whether it is split"),
        ("format=fp8_e4m3,kv_heads=2", "has format and kv_heads: a format has one head"),
        ("ragged=1x5", "has 5 of ragged, expected 6, as lens"),
        ("topk=3,extra=1", "has 1 of extra, expected 6, as lens"),
        ("kv_heads=3", "has kv_heads=3, expected a number that divides heads=4"),
        ("value_offset=5", "has value_offset=5, expected at most row - value=4"),
        ("kpe=12", "has kpe=12, expected at most row - 1=11"),
        ("window=3+1", "has a window of 1 to the right, expected 0: it is causal"),
        ("window=", "has window=, expected left or left+right, each -1 (no bound) or more, below 2^31"),
        ("window=1+0+2", "has window=1+0+2, expected left or left+right"),
        ("window=-2", "has window=-2, expected left or left+right"),
        ("first=-1", "has first=-1, expected an integer from 0"),
        ("softcap=0", "has softcap=0, expected a positive finite number"),
        ("topk=0", "has topk=0, expected a positive integer"),
        ("invalid=many", "has invalid=many, expected none or some or rows"),
        ("format=a b", "has format=a b, expected a name of letters, digits, _ and ."),
        ("q_dtype=e5m2", "has q_dtype=e5m2, expected f32 or f16 or bf16 or e4m3"),
        ("q_scale=1e-300", "has q_scale=1e-300, expected one by which q / q_scale is finite in f32"),
        ("q_scale=1e300", "has q_scale=1e+300, expected one by which q / q_scale is finite in f32"),
        ("q_scale=1e-42", "has q_scale=1e-42, expected one by which q / q_scale is finite in f32"),
        ("q_dtype=f16,q_scale=1e-05", "has q_scale=1e-05, expected one by which q / q_scale is finite in f16"),
        ("q_dtype=e4m3,q_scale=1e-300", "has q_scale=1e-300, expected one by which q / q_scale is finite in e4m3"),
    ],
)
def test_an_option_that_says_nothing_or_contradicts_another_is_one_line(options, reason):
    with pytest.raises(InputError) as error:
        made(options)
    assert reason in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize(("options", "said"), [
    ("softcap=3,shards=2", "softcap is not supported by shards=2"),
    ("window=3,pages=huge", "window_left is not supported by pages=huge"),
    ("topk=3,pages=strided", "topk_indices is not supported by pages=strided"),
])
def test_what_only_plain_cases_have_is_named(options, said):
    with pytest.raises(UnsupportedError) as error:
        made(options)
    assert str(error.value) == said
