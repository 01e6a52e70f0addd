# SPDX-License-Identifier: Apache-2.0
"""Merging attention states, and sharded cases, whose merge is part of the problem."""

import itertools
import math

import bounds
import ml_dtypes
import numpy as np
import pytest
from problems import paged, queries_of, rows_of, same

from mla_oracle import decode_paged, expected, generate, merge_states

INF, NAN = math.inf, math.nan
PRECISIONS = {"f32": np.float32, "f64": np.float64}
MARKERS = [-INF, INF, -1e30, NAN, 0.0, 0.1]


def states(seed, *shape, V=3, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((*shape, V)).astype(dtype), (4 * rng.standard_normal(shape)).astype(dtype)


def theta(lse, precision):
    """Of one merge over lse [S, ...]: a subtraction, an exp (2), a product and a sum a state; the quotient, the log."""
    return bounds.SLACK * bounds.U[precision] * float(np.ptp(lse) + 3 * len(lse) + 6 + 2 * np.abs(lse).max())


def truth(out, lse):
    """The merge of f64 states [S, ...], in double, by its definition."""
    weights = np.exp(lse - lse.max(0))
    total = weights.sum(0)
    mean = (weights[..., None] * out).sum(0) / total[..., None]
    return mean, lse.max(0) + np.log(total), (weights[..., None] * np.abs(out)).sum(0) / total[..., None]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_state_is_its_own_merge(precision):
    out, lse = states(1, 1, 5, dtype=PRECISIONS[precision])
    merged = merge_states(out, lse, precision=precision)
    assert same(merged.out, out[0]) and same(merged.lse, lse[0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_of_equal_lse_average_and_add_log_2(precision):
    out = np.array([[[1.0, -3.0]], [[2.0, 5.0]]], PRECISIONS[precision])
    merged = merge_states(out, np.full((2, 1), 10, PRECISIONS[precision]), precision=precision)
    assert merged.out.tolist() == [[1.5, 1.0]]
    assert merged.lse[0] == pytest.approx(10 + math.log(2), rel=2 * bounds.U[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_weigh_by_the_exponential_of_their_lse(precision):
    """exp(lse) 1, 2 and 5: weights 1/8, 1/4 and 5/8, lse log 8."""
    out = np.eye(3, dtype=PRECISIONS[precision])[:, None]
    lse = np.log([[1.0], [2.0], [5.0]]).astype(PRECISIONS[precision])
    merged = merge_states(out, lse, precision=precision)
    error = theta(lse, precision) + 2 * bounds.U[precision]  # lse itself is rounded
    assert np.allclose(merged.out, [[1 / 8, 1 / 4, 5 / 8]], rtol=np.expm1(2 * error), atol=0)
    assert merged.lse[0] == pytest.approx(math.log(8), abs=error)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_merge_is_within_its_rounding_bound_of_its_definition(precision):
    out, lse = (x.astype(np.float64) for x in states(2, 5, 40, 3, dtype=PRECISIONS[precision]))
    merged = merge_states(out.astype(PRECISIONS[precision]), lse.astype(PRECISIONS[precision]), precision=precision)
    mean, total, size = truth(out, lse)
    error = theta(lse, precision) + theta(lse, "f64")
    assert np.all(np.abs(merged.out - mean) <= np.expm1(2 * error) * size)
    assert np.all(np.abs(merged.lse - total) <= error)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_order_of_merging_is_a_matter_of_rounding(precision):
    out, lse = states(3, 3, 40, dtype=PRECISIONS[precision])
    at_once = merge_states(out, lse, precision=precision)
    size = truth(out.astype(np.float64), lse.astype(np.float64))[2]
    for a, b, c in itertools.permutations(range(3)):
        pair = merge_states([out[a], out[b]], [lse[a], lse[b]], precision=precision)
        chained = merge_states([pair.out, out[c]], [pair.lse, lse[c]], precision=precision)
        error = 3 * theta(lse, precision)  # two merges against one
        assert np.all(np.abs(chained.out - at_once.out) <= np.expm1(2 * error) * size)
        assert np.all(np.abs(chained.lse - at_once.lse) <= error)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_halves_of_a_request_merge_to_the_whole(precision):
    problem = paged(4, [37], block=1, H=2, amplitude=1.5)
    whole = decode_paged(**problem, precision=precision)
    table = problem["block_table"]
    parts = [
        decode_paged(
            **problem | {"block_table": own.copy(), "seq_lens": np.array([own.shape[1]], np.int32)}, precision=precision
        )
        for own in (table[:, ::3], table[:, 1::3], table[:, 2::3])
    ]
    merged = merge_states([p.out for p in parts], [p.lse for p in parts], precision=precision)
    error = theta(np.array([p.lse for p in parts], np.float64), precision)
    for h in range(2):
        row = queries_of(problem)[0, 0, h], rows_of(problem, 0), problem["head_dim_v"], problem["softmax_scale"]
        out_bound, lse_bound = bounds.paged_row(*row, precision)
        # The parts and the whole are each off by their own bound; the parts' lse weighs them, too.
        p, _ = bounds.softmax(row[3] * (row[1] @ row[0]))
        size = p @ np.abs(row[1][:, : row[2]])
        assert np.all(np.abs(merged.out - whole.out)[0, h] <= 2 * out_bound + np.expm1(2 * (error + lse_bound)) * size)
        assert np.abs(merged.lse - whole.lse)[0, h] <= 2 * lse_bound + error


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_empty_state_is_left_out_whatever_its_out_holds(precision, marker, lse_base):
    dtype = PRECISIONS[precision]
    how = {"precision": precision, "empty_lse": marker, "lse_base": lse_base}
    out, lse = states(5, 4, 6, dtype=dtype)
    rest = merge_states(out[[0, 3]], lse[[0, 3]], **how)
    out[1:3] = NAN
    lse[1:3] = marker
    for order in itertools.permutations(range(4)):
        merged = merge_states(out[list(order)], lse[list(order)], **how)
        if order.index(0) < order.index(3):
            assert same(merged.out, rest.out) and same(merged.lse, rest.lse)
        assert np.isfinite(merged.out).all()


@pytest.mark.parametrize("infinite", [-INF, INF])
@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_infinite_lse_is_empty_whatever_the_marker(precision, marker, infinite):
    out, lse = states(6, 3, 4, dtype=PRECISIONS[precision])
    rest = merge_states(out[1:], lse[1:], precision=precision, empty_lse=marker)
    out[0], lse[0] = NAN, infinite
    merged = merge_states(out, lse, precision=precision, empty_lse=marker)
    assert same(merged.out, rest.out) and same(merged.lse, rest.lse)


@pytest.mark.parametrize("stored", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("marker", [-1e30, 0.1, 7.3])
def test_a_finite_marker_is_known_as_the_lse_dtype_rounds_it(marker, stored):
    """-1e30 has no exact f32: the marker of an engine with f32 LSE is the nearest one, in either precision."""
    with np.errstate(over="ignore"):
        lse = np.array([[1.0], [marker]]).astype(stored)
    out = np.array([[[2.0]], [[NAN]]], stored)
    for precision in PRECISIONS if stored is not np.float64 else ["f64"]:
        merged = merge_states(out, lse, precision=precision, empty_lse=marker)
        assert (merged.out.item(), merged.lse.item()) == (2, 1)


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("S", [0, 1, 2, 5])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_but_empty_states_is_an_empty_row(precision, S, marker):
    dtype = PRECISIONS[precision]
    out, lse = np.full((S, 2, 3), NAN, dtype), np.full((S, 2), marker, dtype)
    merged = merge_states(out, lse, precision=precision, empty_lse=marker)
    assert same(merged.out, np.zeros((2, 3), dtype)) and same(merged.lse, np.full(2, marker, dtype))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_lse_is_not_empty_unless_nan_means_empty(precision):
    out, lse = states(7, 2, 1, dtype=PRECISIONS[precision])
    lse[0] = NAN
    merged = merge_states(out, lse, precision=precision)
    assert np.isnan(merged.out).all() and np.isnan(merged.lse).all()
    assert np.isfinite(merge_states(out, lse, precision=precision, empty_lse=NAN).out).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_base_2_merge_is_the_natural_one_of_lse_times_log_2(precision):
    out, lse = states(8, 4, 20, dtype=PRECISIONS[precision])
    natural = merge_states(out, lse, precision=precision)
    binary = merge_states(
        out, (lse.astype(np.float64) / math.log(2)).astype(lse.dtype), precision=precision, lse_base="2"
    )
    error = 2 * theta(lse, precision)  # the conversion rounds each lse, the product in the exponent once more
    size = truth(out.astype(np.float64), lse.astype(np.float64))[2]
    assert np.all(np.abs(binary.out - natural.out) <= np.expm1(2 * error) * size)
    assert np.all(np.abs(binary.lse * math.log(2) - natural.lse) <= error)


def test_base_2_states_of_equal_lse_add_one():
    merged = merge_states(np.ones((2, 1, 1), np.float32), np.full((2, 1), 3, np.float32), lse_base="2")
    assert merged.lse.tolist() == [4]


def test_lists_of_states_are_stacked():
    out, lse = states(9, 3, 2, 4)
    stacked = merge_states(out, lse, precision="f64")
    listed = merge_states(list(out), tuple(lse), precision="f64")
    assert same(stacked.out, listed.out) and same(stacked.lse, listed.lse)
    assert stacked.out.shape == (2, 4, 3) and stacked.lse.shape == (2, 4)


def test_states_of_16_bits_mean_what_they_mean_widened():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        out, lse = states(10, 3, 7, dtype=dtype)
        for precision, real in PRECISIONS.items():
            narrow = merge_states(out, lse, precision=precision)
            wide = merge_states(out.astype(real), lse.astype(real), precision=precision)
            assert same(narrow.out, wide.out) and same(narrow.lse, wide.lse)


# Tokens each of three ranks owns, by hand, of requests of 0, 1, 4 and 7 tokens.
OWNED = {
    "contiguous": [[[], [], []], [[0], [], []], [[0, 1], [2, 3], []], [[0, 1], [2, 3], [4, 5]]],
    "interleaved": [[[], [], []], [[0], [], []], [[0, 3], [1], [2]], [[0, 3], [1, 4], [2, 5]]],
}


@pytest.mark.parametrize("causal", ["true", "false"])
@pytest.mark.parametrize("pages", ["shuffled", "huge"])
@pytest.mark.parametrize("layout", OWNED)
def test_each_rank_attends_the_tokens_it_owns(layout, pages, causal):
    """Zero queries: a rank's lse is the log of how many of its tokens the query sees, its out their mean."""
    case = generate(
        "paged:heads=2,row=6,value=4,lens=0+1+4+6,block=2,tokens=2,scale=1.0,inputs=position,shards=3"
        f",shard_layout={layout},pages={pages},causal={causal}"
    )
    results = expected(case)
    assert results["partial_out"].shape == (3, 4, 2, 2, 4) and results["partial_lse"].shape == (3, 4, 2, 2)
    for b, t, s in np.ndindex(4, 2, 3):
        seen = [j for j in OWNED[layout][b][s] if causal == "false" or j < [0, 1, 4, 6][b] - 1 + t]
        lse, out = results["partial_lse"][s, b, t], results["partial_out"][s, b, t]
        if not seen:
            assert np.all(lse == -INF) and not out.any()
            continue
        assert np.allclose(lse, math.log(len(seen)), rtol=2**-52, atol=0)
        value = np.mean([[(j + d) / 16 for d in range(4)] for j in seen], axis=0)
        assert np.allclose(out, value, rtol=2**-50, atol=0)


@pytest.mark.parametrize("empty", ["-inf", "inf", "-1e30", "nan"])
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("layout", OWNED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_ranks_merge_to_the_unsharded_result(precision, layout, lse_base, empty):
    recipe = (
        f"paged:heads=2,row=24,value=16,lens=0+1+9+40,block=4,tokens=2,scale=0.25,lse_base={lse_base},empty_lse={empty}"
    )
    whole = expected(generate(recipe), precision=precision)
    for shards in (2, 7, 50):
        merged = expected(generate(f"{recipe},shards={shards},shard_layout={layout}"), precision=precision)
        # 40 unit-normal tokens of 24 elements: |score| and |out| stay below 64.
        allowed = 64 * bounds.U[precision] * (40 + 24 + shards)
        assert np.array_equal(whole["lse"] == float(empty), merged["lse"] == float(empty))
        assert np.allclose(merged["out"], whole["out"], rtol=0, atol=allowed)
        assert np.allclose(merged["lse"], whole["lse"], rtol=0, atol=allowed, equal_nan=True)
        assert not merged["out"][0].any() and not merged["out"][1, 0].any() and merged["out"][1, 1].all()
