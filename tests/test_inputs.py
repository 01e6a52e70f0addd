# SPDX-License-Identifier: Apache-2.0
"""Generated cases: what an id regenerates, where the tokens lie, what is NaN, and that families do what they say."""

import dataclasses

import numpy as np
import pytest
from problems import same

from mla_oracle import InputError, decode_paged, generate
from mla_oracle._generators import lcg
from mla_oracle.cases import KINDS
from mla_oracle.cases.placement import NOWHERE, dense_table, place_pages, sparse_cache

SMALL = "heads=3,row=12,value=8,scale=0.5,block=4"


@pytest.mark.parametrize(
    "case_id",
    [
        "naive:heads=2,nope=4,rope=2,value=3,rank=5,dtype=f16",
        "absorbed:geometry=minicpm3,dtype=bf16,queries=2,cached=3",
        f"paged:{SMALL},lens=0+5,dtype=bf16,tokens=2,pages=huge",
        "merge:states=4,dtype=f16,lse_base=2,empty_lse=inf",
        "rope:geometry=deepseek-v3,dtype=bf16,heads=2",
        "append:rank=4,rope=2,dtype=f16",
    ],
)
def test_an_id_regenerates_its_case_bit_for_bit(case_id):
    case, again = generate(case_id), generate(generate(case_id).id)
    assert case.kind in KINDS and case.conventions() == again.conventions()
    one, other = case.tensors(), again.tensors()
    assert one.keys() == other.keys()
    assert all(one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes() for name in one)


def test_every_kind_of_case_differs_between_seeds():
    for case_id in ("naive:geometry=minicpm3,cached=2", f"paged:{SMALL},lens=9", "merge:", "append:rank=4,rope=2"):
        separator = "" if case_id.endswith(":") else ","
        one, other = (generate(f"{case_id}{separator}seed={seed}").tensors() for seed in (2, 3))
        assert any(one[name].tobytes() != other[name].tobytes() for name in one)


def tokens(case, b):
    """The rows [n, D] of request b, in f32."""
    j = np.arange(case.seq_lens[b])
    table = dense_table(case)
    return case.kv_cache[table[b, j // case.kv_cache.shape[1]], j % case.kv_cache.shape[1]].astype(np.float32)


@pytest.mark.parametrize("pages", ["shuffled", "descending", "huge"])
@pytest.mark.parametrize("inputs", ["normal", "peaked", "flat", "position", "onehot", "tailed", "rising"])
def test_every_slot_that_nobody_reads_is_nan_and_no_other(inputs, pages):
    case = generate(f"paged:{SMALL},lens=0+1+4+5+11,inputs={inputs},pages={pages}")
    read = np.zeros(case.kv_cache.shape[:2], bool)
    table = dense_table(case)
    for b, n in enumerate(case.seq_lens):
        for j in range(n):
            assert not read[table[b, j // 4], j % 4]
            read[table[b, j // 4], j % 4] = True
    assert np.isfinite(case.kv_cache[read]).all()
    unread = ~read
    if pages == "descending":  # the published layout leaves its spare pages readable
        unread[:3] = False
    assert np.isnan(case.kv_cache[unread]).all() and unread.any()


def test_a_descending_lcg_case_is_the_published_layout():
    case = generate(f"paged:{SMALL},lens=1+9+0+8,inputs=lcg,pages=descending,seed=11")
    assert case.kv_cache.shape == (4 * 3 + 3, 4, 12)  # as many pages a request as the longest has, and 3 spare
    assert case.block_table.tolist() == [[14, 13, 12], [11, 10, 9], [8, 7, 6], [5, 4, 3]]
    cache, q = np.empty(case.kv_cache.size, np.float32), np.empty(case.q.size, np.float32)
    lcg(11, cache)
    lcg(11 + 7919, q)
    assert same(case.q, q.reshape(4, 3, 12))
    cache = cache.reshape(case.kv_cache.shape)
    for b, n in enumerate(case.seq_lens):
        for j in range(12):
            page, row = case.block_table[b, j // 4], j % 4
            stored = case.kv_cache[page, row]
            assert same(stored, cache[page, row]) if j < n else np.isnan(stored).all()
    assert same(case.kv_cache[:3], cache[:3])


@pytest.mark.parametrize("pages", ["shuffled", "huge"])
def test_pages_are_shuffled_and_unused_entries_name_no_page(pages):
    case = generate(f"paged:{SMALL},lens=0+40+3,pages={pages}")
    in_use = np.arange(10) < np.array([[0], [10], [1]])
    ids = case.block_table[in_use]
    assert len(set(ids.tolist())) == 11 and np.any(np.diff(ids) != 1) and np.any(np.diff(ids) != -1)
    assert np.all(case.block_table[~in_use] == NOWHERE) and (case.num_blocks or len(case.kv_cache)) <= NOWHERE


def test_the_place_of_a_page_does_not_change_the_tokens():
    near, far, down = (generate(f"paged:{SMALL},lens=5+9,pages={p}") for p in ("shuffled", "huge", "descending"))
    for b in range(2):
        assert same(tokens(near, b), tokens(far, b)) and same(tokens(near, b), tokens(down, b))


def test_huge_pages_lie_beyond_32_bits_without_touching_each_other():
    case = generate("paged:geometry=glm-5.2,heads=1,lens=0+1+130,dtype=bf16,pages=huge")
    page_bytes = case.kv_cache[0].nbytes
    assert np.all(case.page_ids * case.block_stride > 2**32) and np.all(case.page_ids < case.num_blocks)
    assert case.block_stride > page_bytes and case.num_blocks * case.block_stride > 2**35
    cache = sparse_cache(case)
    assert cache[case.page_ids].tobytes() == case.kv_cache.tobytes()
    assert not cache[case.page_ids - 1].astype(np.float32).any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_blocks": None}, "metadata num_blocks is missing, expected with page_ids"),
        ({"block_stride": None}, "metadata block_stride is missing, expected with page_ids"),
        ({"block_stride": 191}, "block_stride is 191, expected at least 192, the bytes of a page"),
        ({"page_ids": [0, 1, 2, 3, 4, -1]}, "page_ids[5] is -1, expected 0 to 99"),
        ({"page_ids": [0, 1, 2, 100, 4, 5]}, "page_ids[3] is 100, expected 0 to 99"),
        ({"page_ids": [0, 1, 2, 3, 4, 1]}, "page_ids[5] is 1, which page_ids[1] already is"),
        ({"page_ids": [0, 1, 2]}, "page_ids is [3], expected [pages] with pages = 6 on axis 0"),
        ({"page_ids": [10, 11, 12, 13, 14, 15]}, "block_table[1, 0] is 3, which page_ids does not hold"),
    ],
)
def test_a_bad_placement_is_named_in_one_line(change, text):
    case = generate(f"paged:{SMALL},lens=0+9")
    assert case.kv_cache.shape[0] == 6
    table = np.where(case.block_table == NOWHERE, NOWHERE, 3 + np.cumsum(np.ones((2, 3), int), 1) - 1).astype(np.int32)
    good = {"page_ids": np.arange(6), "num_blocks": 100, "block_stride": 192, "block_table": table}
    if "page_ids" in change:
        change["page_ids"] = np.array(change["page_ids"], np.int64)
    dense_table(dataclasses.replace(case, **good))
    with pytest.raises(InputError) as error:
        dense_table(dataclasses.replace(case, **good | change))
    assert str(error.value) == text


def test_a_cache_of_no_request_has_only_its_spare_pages():
    pages = place_pages(np.array([0, 0], np.int32), 4, "shuffled", np.arange)
    assert pages.count == 3 and pages.unread_rows.all() and pages.row_of_token.size == 0
    assert generate("paged:heads=1,row=4,value=2,scale=1,lens=").q.shape == (0, 1, 4)


def family(inputs, **how):
    given = ",".join(f"{name}={value}" for name, value in ({"lens": 30, "seed": 5} | how).items())
    return generate(f"paged:{SMALL},inputs={inputs},{given}")


def scores(case):
    """[H, n] of the only request."""
    return case.softmax_scale * case.q[0].astype(np.float64) @ tokens(case, 0).astype(np.float64).T


def test_rising_scores_move_the_maximum_with_every_token():
    for dtype in ("f32", "f16", "bf16"):
        assert np.allclose(np.diff(scores(family("rising", dtype=dtype)), axis=1), 0.5, rtol=0.02)


def test_flat_scores_give_the_log_of_the_length():
    case = family("flat")
    assert not case.q.any()
    lse = decode_paged(
        case.q, case.kv_cache, case.block_table, case.seq_lens, softmax_scale=0.5, head_dim_v=8, precision="f64"
    ).lse
    assert np.allclose(lse, np.log(30), rtol=2**-50, atol=0)


def test_position_values_name_their_token_and_column_exactly():
    for dtype in ("f32", "f16", "bf16"):
        case = family("position", lens=300, dtype=dtype)
        values = tokens(case, 0)[:, :8]
        assert np.array_equal(values * 16, (np.arange(300)[:, None] + np.arange(8)) % 251)


def test_onehot_heads_read_one_element_each():
    case = family("onehot")
    assert np.count_nonzero(case.q) == 3
    columns = np.nonzero(case.q[0])[1]
    assert columns.tolist() == [0, 1, 2]  # 37 h mod 12
    assert np.allclose(scores(case), 4 * tokens(case, 0)[:, columns].T)


def test_peaked_scores_put_nearly_all_weight_on_one_key():
    weights = np.exp(scores(family("peaked", lens=200)))
    flat = np.exp(scores(family("normal", lens=200)))
    largest = (weights / weights.sum(1, keepdims=True)).max(1)
    assert np.all(largest > 0.6) and np.all(largest > 2 * (flat / flat.sum(1, keepdims=True)).max(1))


def test_tailed_rows_have_rare_large_elements():
    plain, tailed = (tokens(family(inputs, lens=2000), 0).astype(np.float64) for inputs in ("normal", "tailed"))
    assert np.allclose(tailed, plain**3 / 4, rtol=1e-6)
    assert (tailed**4).mean() / (tailed**2).mean() ** 2 > 10 > (plain**4).mean() / (plain**2).mean() ** 2


def test_merge_cases_have_empty_states_in_every_row_and_nothing_else_in_the_first():
    for marker, text in ((-np.inf, "-inf"), (np.inf, "inf"), (np.nan, "nan")):
        case = generate(f"merge:states=4,rows=6,empty_lse={text}")
        empty = np.isnan(case.partial_lse) if np.isnan(marker) else case.partial_lse == marker
        assert empty[:, 0].all() and not empty[:, 1:].all(0).any() and empty[:, 1:].any(0).all()
        assert np.array_equal(np.isnan(case.partial_out).all(-1), empty)
        assert np.isfinite(case.partial_out[~empty]).all()


def test_rope_cases_take_from_the_geometry_what_the_id_does_not_say():
    case = generate("rope:geometry=deepseek-v3,positions=3+1")
    assert (case.x.shape, case.positions.tolist(), case.pairing, case.base) == ((2, 1, 64), [3, 1], "interleaved", 1e4)
    assert '"factor": 40' in case.yarn
    case = generate("rope:rope=8,heads=2,pairing=neox,base=5e5,angles=table")
    assert (case.x.shape, case.pairing, case.base, case.angles, case.yarn) == ((5, 2, 8), "neox", 5e5, "table", None)


def test_dense_cases_carry_a_scale_only_where_it_is_not_one_over_the_root():
    assert generate("naive:geometry=glm-5.2,cached=1").softmax_scale is None
    scale = generate("naive:geometry=deepseek-v3,cached=1").softmax_scale
    assert scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert generate("naive:geometry=deepseek-v3,cached=1,scale=0.5").softmax_scale == 0.5
