# SPDX-License-Identifier: Apache-2.0
"""The paged kernels against strict f64, within the bound of mla_oracle.gpu.paged, interpreted and on a GPU."""

import kernel_cases
import ml_dtypes
import numpy as np
import pytest
from fast_cases import make, place
from kernel_cases import MACHINES, assert_right, decode

from mla_oracle.gpu import forms
from mla_oracle.gpu.machine import Buffer

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.fixture(params=MACHINES)
def machine(request):
    yield from kernel_cases.machine(request.param)


def minus_infinity(D, column=3):
    """A latent row whose score is -inf for every query that is positive in `column`."""
    return np.where(np.arange(D) == column, -np.inf, 1).astype(np.float32)


# --- shapes


@pytest.mark.parametrize("edges", [(1, 2, 31, 32, 33), (63, 64, 65), (127, 128, 129)], ids=str)
def test_lengths_around_every_edge_of_a_block_a_tile_and_a_split(machine, edges):
    assert_right(machine, make(len(edges), 1, 2, 24, 17, edges, 16), split_keys=64)


def test_lengths_around_the_edge_of_a_default_split(machine):
    assert_right(machine, make(4, 1, 1, 9, 8, [511, 512, 513, 1025], 64))


def test_a_long_row_has_no_more_than_the_most_splits(machine):
    case = make(4, 1, 1, 5, 4, [2047, 2048, 2049, 4097], 64)
    assert_right(machine, case, split_keys=32)


@pytest.mark.parametrize("H", [1, 3, 16, 20, 64, 128])
def test_any_number_of_heads(machine, H):
    assert_right(machine, make(2, 1, H, 24, 16, [5, 40], 16))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 2, 4])
def test_query_tokens_see_their_own_prefix_and_empty_rows_are_zero(machine, T, causal):
    case = make(6, T, 3, 24, 17, [0, 1, 33, 0, 70, 3], 16, causal=causal, empty_lse=np.inf)
    out, lse = assert_right(machine, case, split_keys=32)
    assert (out[0] == 0).all() and (lse[[0, 3]] == np.inf).all()


@pytest.mark.parametrize("block_size", [1, 16, 64, 61])
def test_any_block_size(machine, block_size):
    assert_right(machine, make(3, 2, 2, 24, 17, [130, 0, 61], block_size), split_keys=96)


@pytest.mark.parametrize("cache", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("query", DTYPES, ids=lambda dtype: dtype.__name__)
def test_stored_dtypes_are_widened_exactly(machine, query, cache):
    case = make(2, 2, 3, 40, 33, [70, 5], 16)
    narrow = case.but(q=case.q.astype(query), kv_cache=case.kv_cache.astype(cache))
    out, lse = assert_right(machine, narrow)
    wide = narrow.but(q=narrow.q.astype(np.float32), kv_cache=narrow.kv_cache.astype(np.float32))
    wide_out, wide_lse = decode(machine, wide)
    assert out.tobytes() == wide_out.tobytes() and lse.tobytes() == wide_lse.tobytes()


def test_one_key_is_returned_as_it_is_stored(machine):
    """Every finite f16 and bf16, subnormal ones included."""
    for number in (np.float16, ml_dtypes.bfloat16):
        every = np.arange(65536, dtype=np.uint16).view(number)
        every = np.resize(every[np.isfinite(every.astype(np.float32))], (32, 2048))
        case = make(32, 1, 1, 2048, 2048, [1] * 32, 1, q_size=0)
        cache = np.zeros(case.kv_cache.shape, number)
        cache[case.block_table[:, 0], 0] = every
        out, _ = decode(machine, case.but(kv_cache=cache))
        assert out[:, 0, 0].tobytes() == (every.astype(np.float32) + 0).tobytes()


GEOMETRIES = {  # H, kv_lora_rank, qk_rope_head_dim
    "glm-5.2": (8, 64, 8),
    "glm-5.3-flash": (8, 64, 0),
    "deepseek": (16, 64, 8),
    "minicpm3": (5, 32, 4),
    "glm-5.2, whole rows": (2, 512, 64),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_geometry_of_models(machine, name):
    H, L, R = GEOMETRIES[name]
    case = make(2, 1, H, L + R, L, [70, 33], 16)
    assert_right(machine, case.but(kv_cache=case.kv_cache.astype(ml_dtypes.bfloat16)))


@pytest.mark.parametrize("DV", [(1, 1), (7, 1), (33, 32), (130, 129)], ids=str)
def test_any_row_width(machine, DV):
    assert_right(machine, make(2, 1, 2, *DV, [33, 3], 16))


def test_strided_views(machine):
    case = make(3, 2, 3, 24, 17, [70, 5, 40], 16)
    room = np.full((case.kv_cache.shape[0], 2, 16, 31), np.nan, np.float32)
    room[:, 1, :, 5:29] = case.kv_cache
    heads_first = np.ascontiguousarray(case.q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    table = np.full((3, 2, case.block_table.shape[1] + 3), -7, np.int32)
    table[:, 1, 1:-2] = case.block_table
    apart = case.but(q=heads_first, kv_cache=room[:, 1, :, 5:29], block_table=table[:, 1, 1:-2])
    assert [x.tobytes() for x in decode(machine, apart)] == [x.tobytes() for x in decode(machine, case)]
    backwards = case.but(kv_cache=case.kv_cache[::-1], block_table=len(case.kv_cache) - 1 - case.block_table)
    assert [x.tobytes() for x in decode(machine, backwards)] == [x.tobytes() for x in decode(machine, case)]


def test_views_no_kernel_can_follow_are_copied(machine):
    case = make(2, 1, 2, 9, 8, [33, 5], 16)
    unaligned = np.zeros(case.kv_cache.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(case.kv_cache.shape)
    unaligned[...] = case.kv_cache
    turned = np.asfortranarray(case.block_table)
    other = case.but(kv_cache=unaligned, block_table=turned, q=np.repeat(case.q, 2, axis=3)[..., ::2])
    assert [x.tobytes() for x in decode(machine, other)] == [x.tobytes() for x in decode(machine, case)]


def test_the_largest_ids_reach_their_page(machine):
    """The cache begins so far before its pages that they have the last ids there are, terabytes away."""
    case = make(3, 1, 2, 40, 33, [70, 0, 33], 16)
    expected = decode(machine, case)
    arrays = [forms.put(machine, x) for x in (case.q, case.kv_cache, case.block_table, case.seq_lens)]
    first = 2**31 - len(case.kv_cache)
    near = arrays[1]
    pointer = (near.pointer - first * near.strides[0]) % 2**64
    arrays[1] = Buffer(pointer, (2**31, *near.shape[1:]), near.dtype, near.strides, near)
    table = np.where(case.block_table < 2**30, case.block_table.astype(np.int64) + first, -1)
    arrays[2] = forms.put(machine, table.astype(np.int32))
    out, lse = machine.empty((3, 1, 2, 33), np.float32), machine.empty((3, 1, 2), np.float32)
    forms.decode_paged(machine, *arrays, case.scale, True, 1.0, -np.inf, out, lse, longest=70)
    assert [machine.download(x).tobytes() for x in (out, lse)] == [x.tobytes() for x in expected]


# --- scores


@pytest.mark.parametrize("q_size", [0.0, 0.1, 4.0, 30.0])
def test_flat_and_peaked_scores(machine, q_size):
    assert_right(machine, make(2, 1, 3, 40, 33, [130, 70], 16, q_size=q_size), split_keys=64)


def test_lse_of_zero_queries_is_log_of_the_count_and_output_the_mean(machine):
    case = make(1, 1, 2, 24, 17, [130], 16, q_size=0)
    out, lse = decode(machine, case, split_keys=64)
    np.testing.assert_allclose(lse, np.log(130), rtol=2 * 2.0**-23)
    np.testing.assert_allclose(out[0, 0, 1], case.keys(0)[:, :17].mean(0), atol=130 * 2.0**-23)
    np.testing.assert_allclose(decode(machine, case, np.log2(np.e))[1], np.log2(130), rtol=4 * 2.0**-23)


@pytest.mark.parametrize("rise", [1.0, -1.0, 90.0, -90.0])
def test_scores_that_rise_or_fall_so_that_every_tile_rescales(machine, rise):
    case = make(1, 1, 2, 24, 17, [200], 16)
    case.q[..., 0] = 16
    for position, row in enumerate(case.keys(0).astype(np.float32)):
        row[0] = rise * position / 32
        place(case, 0, position, row)
    assert_right(machine, case, split_keys=64)


def test_small_queries_of_large_keys_and_scores_near_overflow(machine):
    assert_right(machine, make(1, 1, 2, 24, 17, [70], 16, q_size=1e-30, kv_size=1e30))
    assert_right(machine, make(1, 1, 2, 8, 8, [70], 16, q_size=1e18, kv_size=1e18, scale=1.0))


# --- values that are not finite


def test_a_score_of_minus_infinity_has_weight_zero_and_its_value_is_not_touched(machine):
    case = make(2, 2, 3, 24, 17, [70, 200], 16)
    case.q[..., 3] = np.abs(case.q[..., 3]) + 1
    for b, position in [(0, 0), (0, 5), (1, 32), (1, 68), (1, 199)]:
        place(case, b, position, minus_infinity(24))
    out, lse = assert_right(machine, case, split_keys=64)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("empty_lse", [-np.inf, np.inf, -2.0**100])
def test_a_row_that_sees_only_minus_infinity_is_empty(machine, empty_lse):
    case = make(2, 1, 2, 24, 17, [100, 33], 16, empty_lse=empty_lse)
    case.q[..., 3] = 1
    for position in range(100):
        place(case, 0, position, minus_infinity(24))
    for position in range(32):  # the first tile of the other request
        place(case, 1, position, minus_infinity(24))
    out, lse = assert_right(machine, case, split_keys=64)
    assert (out[0] == 0).all() and (lse[0] == np.float32(empty_lse)).all() and np.isfinite(lse[1]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("column", "position"), [(0, 0), (20, 100), (16, 99)])
def test_a_visible_nan_or_plus_infinity_spoils_the_rows_that_see_it(machine, bad, column, position):
    case = make(2, 3, 2, 24, 17, [101, 101], 16)
    case.q[..., column] = np.abs(case.q[..., column]) + 1
    row = case.keys(1)[position].astype(np.float32)
    row[column] = bad
    place(case, 1, position, row)
    out, lse = assert_right(machine, case, split_keys=64)
    sees = np.array([[False] * 3, [position < case.visible(1, t) for t in range(3)]])
    assert (np.isnan(lse) == sees[..., None]).all()
    assert (np.isnan(out) == sees[..., None, None]).all()


def test_a_row_that_sees_nothing_but_nan_is_nan_and_not_empty(machine):
    case = make(1, 1, 2, 24, 17, [70], 16)
    for position in range(70):
        place(case, 0, position, np.full(24, np.nan, np.float32))
    out, lse = decode(machine, case, split_keys=32)
    assert np.isnan(out).all() and np.isnan(lse).all()


def test_a_query_with_nan_spoils_its_own_row_alone(machine):
    case = make(2, 2, 3, 24, 17, [70, 33], 16)
    case.q[1, 0, 2, 5] = np.nan
    out, lse = assert_right(machine, case)
    assert np.argwhere(np.isnan(lse)).tolist() == [[1, 0, 2]] and np.isnan(out).sum() == 17
