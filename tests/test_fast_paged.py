# SPDX-License-Identifier: Apache-2.0
"""Fast paged decode against strict f64, within its published bound, under every instruction set there is."""

import ml_dtypes
import numpy as np
import pytest
from fast_cases import BUILDS, STORED, assert_within_bound, fast, make, place, stored, strict64

from mla_oracle.fast import isa as isas
from mla_oracle.fast import paged


@pytest.fixture(params=BUILDS)
def isa(request):
    return request.param


@pytest.fixture(params=[np.float32, np.float64], ids=["f32", "f64"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("H", [1, 3, 7, 20, 33, 128, 130])
def test_any_number_of_heads(isa, dtype, H):
    assert_within_bound(make(2, 1, H, 72, 64, [97, 130], 16), dtype, isa=isa)


@pytest.mark.parametrize(
    "DV", [(576, 512), (288, 256), (100, 72), (72, 71), (72, 72), (7, 1), (1, 1), (65, 64)]
)
def test_any_row_width(isa, dtype, DV):
    D, V = DV
    assert_within_bound(make(2, 1, 5, D, V, [70, 3], 16), dtype, isa=isa)


@pytest.mark.parametrize("block_size", [1, 2, 16, 61, 64, 576])
def test_any_block_size(isa, dtype, block_size):
    assert_within_bound(make(3, 2, 9, 40, 33, [300, 1, 577], block_size), dtype, isa=isa)


@pytest.mark.parametrize("edge", [12, 16, 32, 64, 96, 128, 192, 1024, 1056, 2048])
def test_lengths_around_every_edge(isa, edge):
    assert_within_bound(make(3, 1, 4, 24, 17, [edge - 1, edge, edge + 1], 16), isa=isa)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "H"), [(2, 3), (7, 20), (5, 64)])
def test_query_tokens_see_their_own_prefix(isa, dtype, T, H, causal):
    assert_within_bound(make(3, T, H, 40, 32, [T, 100, 1100], 16, causal=causal), dtype, isa=isa)


def test_requests_shorter_than_their_queries_have_empty_rows(isa, dtype):
    case = make(4, 3, 5, 40, 32, [0, 1, 2, 0], 16, empty_lse=np.inf)
    out, lse = assert_within_bound(case, dtype, isa=isa)
    assert (out[0] == 0).all() and (lse[0] == np.inf).all() and (lse[1, :2] == np.inf).all()
    assert np.isfinite(lse[1, 2]).all()


def test_nothing_to_do_is_done(isa):
    for B, T, H in [(0, 1, 4), (2, 0, 4), (2, 1, 0)]:
        case = make(2, 1, 4, 8, 8, [1, 1], 4).but(q=np.zeros((B, T, H, 8), np.float32))
        out, lse = fast(case.but(seq_lens=case.seq_lens[:B], block_table=case.block_table[:B]), isa=isa)
        assert out.size == 0 and lse.size == 0


def test_lse_of_zero_queries_is_log_of_the_count_and_output_the_mean(isa, dtype):
    case = stored(make(2, 2, 3, 40, 32, [1500, 9], 16, q_size=0), isa)
    out, lse = fast(case, dtype, isa=isa)
    for b in range(2):
        for t in range(2):
            n = case.visible(b, t)
            np.testing.assert_allclose(lse[b, t], np.log(n), rtol=2 * np.finfo(dtype).eps)
            mean = case.keys(b)[:n, :32].mean(0)
            np.testing.assert_allclose(out[b, t], np.tile(mean, (3, 1)), atol=n * np.finfo(dtype).eps)


@pytest.mark.parametrize("q_size", [4.0, 30.0])
def test_peaked(isa, dtype, q_size):
    assert_within_bound(make(2, 1, 20, 64, 48, [700, 1300], 16, q_size=q_size), dtype, isa=isa)


@pytest.mark.parametrize("rise", [0.01, 1.0, 90.0])
def test_scores_that_rise_so_that_every_tile_rescales(isa, dtype, rise):
    case = make(1, 1, 20, 64, 48, [1500], 16)
    case.q[..., 0] = 16
    for position, row in enumerate(case.keys(0).astype(np.float32)):
        row[0] = rise * position / 96
        place(case, 0, position, row)
    assert_within_bound(case, dtype, isa=isa)


def test_all_scores_equal(isa, dtype):
    case = make(1, 1, 5, 64, 48, [1500], 16)
    for position in range(1, 1500):
        place(case, 0, position, case.keys(0)[0].astype(np.float32))
    assert_within_bound(case, dtype, isa=isa)


def test_scores_near_overflow(isa, dtype):
    case = make(1, 1, 5, 8, 8, [200], 16, q_size=1e18, kv_size=1e18, scale=1.0)
    assert_within_bound(case, dtype, isa=isa)


def test_weights_below_the_normal_range(isa):
    # One key with weight 1 and small values, 199 with weights from 2^-150 to 2^-116 and huge values.
    case = make(1, 1, 5, 64, 48, [200], 16)
    case.q[...] = np.where(np.arange(64) == 63, 16, 0)
    for position, row in enumerate(case.keys(0).astype(np.float32)):
        row[:63] *= 1e20 if position else 1e-20
        row[63] = position / 8 - 105 if position else 0
        place(case, 0, position, row)
    out, _ = assert_within_bound(case, isa=isa)
    assert (np.abs(out) > 1e-19).all()


@pytest.mark.parametrize("build", [build for build in BUILDS if "amx" in build])
def test_amx_keeps_the_accuracy_of_f32(build):
    case = stored(make(2, 1, 128, 576, 512, [1024, 700], 64), build)
    expected, _ = strict64(case)
    assert np.abs(fast(case, isa=build)[0] - expected).max() <= 4e-6 * np.abs(expected).max()


@pytest.mark.parametrize("build", [build for build in BUILDS if "amx" in build])
def test_on_amx_a_weight_keeps_what_two_terms_hold(build):
    # A key of weight 1 and value 0, one of value 1: the output is the other's weight, and the bound is little else.
    case = make(1, 32, 128, 1, 1, [2], 2, causal=False, scale=1.0)
    case.q[...] = np.random.default_rng(1).uniform(-1.4, 0, case.q.shape)
    for position in range(2):
        place(case, 0, position, np.float32(position))
    assert_within_bound(case, isa=build)


@pytest.mark.parametrize("rest", [2.0**-9, 2.0**-9 + 2.0**-20])
@pytest.mark.parametrize(("head", "column"), [(0, 0), (0, 39), (39, 0), (39, 39), (17, 31)])
def test_one_number_of_the_queries_that_is_no_bf16_keeps_its_bits(isa, head, column, rest):
    # On amx the queries of a group have as many terms as the one that needs most.
    many = make(1, 1, 40, 40, 32, [100], 16)
    few = many.but(q=many.q.astype(ml_dtypes.bfloat16).astype(np.float32))
    few.q[0, 0, head, column] = 64 * (1 + rest)
    many.q[0, 0, head] = few.q[0, 0, head]
    for a, b in zip(fast(few, isa=isa), fast(many, isa=isa), strict=True):
        assert a[0, 0, head].tobytes() == b[0, 0, head].tobytes()


@pytest.mark.parametrize("exponent", [-30, -20, 20])
def test_small_queries_of_large_keys_and_the_reverse(isa, dtype, exponent):
    case = make(1, 1, 20, 40, 32, [200], 16, q_size=10.0**exponent, kv_size=10.0**-exponent)
    assert_within_bound(case, dtype, isa=isa)


# --- values that are not finite


def test_a_query_below_the_normal_range_keeps_a_score_of_minus_infinity(isa, dtype):
    case = make(1, 1, 20, 40, 32, [200], 16)
    case.q[..., 3] = 1e-39
    for position in [0, 5, 96, 150, 198]:
        place(case, 0, position, np.where(np.arange(40) == 3, -np.inf, 1).astype(np.float32))
    out, _ = assert_within_bound(case, dtype, isa=isa)
    assert np.isfinite(out).all()


def test_a_score_of_minus_infinity_has_weight_zero_and_its_value_is_not_touched(isa, dtype):
    case = make(2, 2, 20, 40, 32, [200, 1300], 16)
    case.q[..., 3] = np.abs(case.q[..., 3]) + 1
    for position in [0, 5, 96, 150, 198]:
        for b in range(2):
            place(case, b, position, np.where(np.arange(40) == 3, -np.inf, 1).astype(np.float32))
    out, lse = assert_within_bound(case, dtype, isa=isa)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


def test_a_row_that_sees_only_minus_infinity_is_empty(isa, dtype):
    case = make(1, 1, 20, 40, 32, [130], 16, empty_lse=np.inf)
    case.q[..., 3] = 1
    for position in range(130):
        place(case, 0, position, np.where(np.arange(40) == 3, -np.inf, 1).astype(np.float32))
    out, lse = assert_within_bound(case, dtype, isa=isa)
    assert (out == 0).all() and (lse == np.inf).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 31, 39])
@pytest.mark.parametrize("position", [0, 100, 1250])
def test_a_visible_nan_or_plus_infinity_spoils_the_rows_that_see_it(isa, dtype, bad, column, position):
    case = make(2, 3, 20, 40, 32, [1251, 1251], 16)
    case.q[..., column] = np.abs(case.q[..., column]) + 1
    row = case.keys(1)[position].astype(np.float32)
    row[column] = bad
    place(case, 1, position, row)
    out, lse = assert_within_bound(case, dtype, isa=isa)
    sees = np.array([[False] * 3, [position < case.visible(1, t) for t in range(3)]])
    assert (np.isnan(lse) == sees[..., None]).all()
    assert (np.isnan(out) == sees[..., None, None]).all()


def test_a_query_with_nan_spoils_its_own_row_alone(isa, dtype):
    case = make(2, 2, 20, 40, 32, [200, 90], 16)
    case.q[1, 0, 17, 5] = np.nan
    out, lse = assert_within_bound(case, dtype, isa=isa)
    assert np.argwhere(np.isnan(lse)).tolist() == [[1, 0, 17]]
    assert np.isnan(out[1, 0, 17]).all() and np.isnan(out).sum() == 32


# --- what is stored, and how


@pytest.mark.parametrize("number", [np.float16, ml_dtypes.bfloat16])
def test_one_key_is_returned_as_it_is_stored(isa, dtype, number):
    every = np.arange(65536, dtype=np.uint16).view(number)
    every = np.resize(every[np.isfinite(every.astype(np.float32))], (128, 512))
    case = make(128, 1, 1, 512, 512, [1] * 128, 1, q_size=0)
    cache = np.zeros(case.kv_cache.shape, number)
    cache[case.block_table[:, 0], 0] = every
    out, _ = fast(case.but(kv_cache=cache), dtype, isa=isa.partition(" ")[0])
    expected = every.astype(dtype) + 0
    if "amx" in isa and (dtype, number) == (np.float32, ml_dtypes.bfloat16):
        expected[np.abs(expected) < np.finfo(np.float32).smallest_normal] = 0
    assert out[:, 0, 0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("cache", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("query", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("isa", isas.available())
def test_stored_dtypes_are_widened_exactly(isa, dtype, cache, query):
    case = make(2, 2, 9, 100, 72, [130, 1030], 16)
    narrow = case.but(
        q=case.q.astype(ml_dtypes.bfloat16).astype(query),
        kv_cache=case.kv_cache.astype(ml_dtypes.bfloat16).astype(cache),
    )
    wide = narrow.but(q=narrow.q.astype(np.float32))
    if (isa, dtype, cache) != ("amx", np.float32, ml_dtypes.bfloat16):
        wide = wide.but(kv_cache=narrow.kv_cache.astype(np.float32))
    for a, b in zip(fast(narrow, dtype, isa=isa), fast(wide, dtype, isa=isa), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("D", [96, 100])
def test_strided_and_unaligned_views(isa, dtype, D):
    case = stored(make(2, 2, 9, D, 72, [130, 200], 16), isa)

    def apart(x):
        """The same numbers as bytes, a gap after every row, starting at an odd byte."""
        row = x.shape[-1] * x.itemsize
        room = np.full((*x.shape[:-1], row + 13), 0xFF, np.uint8)
        room[..., 5 : 5 + row] = x.view(np.uint8)
        return room[..., 5 : 5 + row]

    out, lse = np.empty((2, 2, 9, 72), dtype), np.empty((2, 2, 9), dtype)
    table = np.repeat(case.block_table, 3, axis=1)[:, ::3]
    lens = np.repeat(case.seq_lens, 2)[::2]
    q, kv = apart(case.q), apart(case.kv_cache)
    q_code, kv_code = STORED[case.q.dtype.name], STORED[case.kv_cache.dtype.name]
    name = isa.partition(" ")[0]
    paged.decode(q, q_code, kv, kv_code, table, lens, case.scale, True, 1.0, -np.inf, out, lse, isa=name)
    expected_out, expected_lse = fast(case, dtype, isa=isa)
    assert out.tobytes() == expected_out.tobytes() and lse.tobytes() == expected_lse.tobytes()


def test_the_truth_these_tests_lean_on_is_the_formula():
    case = make(1, 2, 3, 40, 32, [50], 16)
    out, lse = strict64(case)
    for t in range(2):
        keys = case.keys(0)[: case.visible(0, t)]
        p = np.exp(case.q[0, t].astype(np.float64) @ keys.T * case.scale)
        np.testing.assert_allclose(out[0, t], p @ keys[:, :32] / p.sum(1, keepdims=True), rtol=1e-11)
        np.testing.assert_allclose(lse[0, t], np.log(p.sum(1)), rtol=1e-13)
