# SPDX-License-Identifier: Apache-2.0
"""The strict reference is right: published bits, closed forms worked by hand, and exact rational arithmetic."""

import ctypes
import ctypes.util
import hashlib
import math

import bounds
import exact
import numpy as np
import pytest
from problems import dense, paged, queries_of, rows_of, same, visible

from mla_oracle import absorb_query, attend_absorbed, attend_naive, decode_paged, expected, generate, up_project
from mla_oracle.cases import golden

PRECISIONS = ("f32", "f64")


def digest(*arrays):
    return hashlib.sha256(b"".join(a.astype("<f4").tobytes() for a in arrays)).hexdigest()[:16]


@pytest.mark.parametrize(("case_id", "inputs", "naive", "absorbed"), golden.DENSE)
def test_dense_forms_reproduce_the_published_bits(case_id, inputs, naive, absorbed):
    case = generate(f"naive:{case_id}")
    assert digest(*case.tensors().values()) == inputs
    assert digest(expected(case, precision="f32", backend="strict")["out"]) == naive
    assert digest(expected(generate(f"absorbed:{case_id}"), precision="f32", backend="strict")["out"]) == absorbed


@pytest.mark.parametrize(("case_id", "q", "out", "lse"), golden.PAGED)
def test_paged_form_reproduces_the_published_bits(case_id, q, out, lse):
    case = generate(f"paged:{case_id}")
    results = expected(case, precision="f32", backend="strict")
    assert (digest(case.q), digest(results["out"]), digest(results["lse"])) == (q, out, lse)


def test_two_requests_of_two_queries_worked_by_hand():
    """Zero queries: prefix means. Request 0 holds 1, 3, 7 on pages 2 and 0; request 1 holds 9, 11 on page 1."""
    kv_cache = np.array([[[7, 0], [np.nan] * 2], [[9, 5], [11, 5]], [[1, 0], [3, 0]]], np.float32)
    out, lse = decode_paged(
        np.zeros((2, 2, 1, 2), np.float32),
        kv_cache,
        np.array([[2, 0], [1, -1]], np.int32),
        np.array([3, 2], np.int32),
        softmax_scale=0.25,
        head_dim_v=1,
        precision="f64",
        lse_base="2",
    )
    assert out[..., 0, 0].tolist() == [[2, pytest.approx(11 / 3, rel=2**-52)], [9, 10]]
    assert lse[..., 0].tolist() == [[1, pytest.approx(math.log2(3), rel=2**-52)], [0, 1]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_zero_query_gives_prefix_means_and_the_log_of_the_visible_count(precision, T, causal):
    problem = paged(1, [0, 1, 3, 4, 5, 17, 64], T=T, H=3)
    problem["q"][:] = 0
    out, lse = decode_paged(**problem, causal=causal, precision=precision)
    u = bounds.U[precision]
    for b, t in np.ndindex(out.shape[:2]):
        n = visible(problem, b, t, causal)
        rows = rows_of(problem, b)[:n, : problem["head_dim_v"]]
        if n == 0:
            assert np.all(out[b, t] == 0) and np.all(lse[b, t] == -math.inf)
            continue
        mean = [math.fsum(column) / n for column in rows.T]
        # All weights are 1: n sums, the inverse of n, the product with it.
        assert np.all(np.abs(out[b, t] - mean) <= bounds.roundings(n + 2, u) * np.abs(rows).mean(0))
        assert lse[b, t] == pytest.approx(math.log(n), rel=2 * u)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_visible_key_gives_its_value_row_and_its_score(precision):
    problem = paged(2, [1, 1, 1], amplitude=3)
    out, lse = decode_paged(**problem, precision=precision)
    for b, h in np.ndindex(lse.shape):
        row, query = rows_of(problem, b)[0], queries_of(problem)[b, 0, h]
        assert np.array_equal(out[b, h], row[: problem["head_dim_v"]])
        score = float(exact.dot(query, row)) * problem["softmax_scale"]
        assert abs(lse[b, h] - score) <= bounds.roundings(7, bounds.U[precision]) * (np.abs(row) @ np.abs(query))


def decode_two(score_a, score_b, precision):
    """Values 1 and 2 with these two scores, in this order: (out, lse)."""
    kv_cache = np.array([[[1, score_a], [2, score_b]]], np.float32)
    out, lse = decode_paged(
        np.array([[[0, 1]]], np.float32),
        kv_cache,
        np.array([[0]], np.int32),
        np.array([2], np.int32),
        softmax_scale=1,
        head_dim_v=1,
        precision=precision,
    )
    return float(out[0, 0, 0]), float(lse[0, 0])


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, -1), (-0.5, 3), (20, 10), (-70, -71.25), (10, 60)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_keys_weigh_as_the_sigmoid_of_their_difference(precision, a, b):
    out, lse = decode_two(a, b, precision)
    u = bounds.U[precision]
    # Scores are exact here; then exps, products, sums and the quotient: fewer than 12 roundings a term.
    assert out == pytest.approx(1 + 1 / (1 + math.exp(a - b)), rel=12 * u)
    truth = max(a, b) + math.log1p(math.exp(-abs(a - b)))
    assert abs(lse - truth) <= 8 * u * max(abs(truth), 1)


@pytest.mark.parametrize("size", [200, 15000, 1e20, 3e38])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_huge_difference_of_scores_gives_the_larger_ones_row_exactly(precision, size):
    size = float(np.float32(size))
    assert decode_two(size, -size, precision) == (1, size)
    assert decode_two(-size, size, precision) == (2, size)
    assert decode_two(size, size, precision)[0] == 1.5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_paged_form_agrees_with_exact_arithmetic(precision):
    problem = paged(3, [7, 2, 5], T=2, amplitude=1.5)
    out, lse = decode_paged(**problem, precision=precision)
    scale, V = problem["softmax_scale"], problem["head_dim_v"]
    for b, t, h in np.ndindex(lse.shape):
        query, rows = queries_of(problem)[b, t, h], rows_of(problem, b)[: visible(problem, b, t)]
        exact_out, exact_lse = exact.attend_row(query, rows, V, scale)
        out_bound, lse_bound = bounds.paged_row(query, rows, V, scale, precision)
        # Twice: the exact arithmetic rounds its exps and its result too.
        assert np.all(np.abs(out[b, t, h] - exact_out) <= 2 * out_bound)
        assert abs(lse[b, t, h] - exact_lse) <= 2 * lse_bound


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
@pytest.mark.parametrize("R", [0, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_dense_forms_agree_with_exact_arithmetic(precision, R, attend):
    problem = dense(4, t_q=3, t_kv=6, R=R)
    scale = 1 / math.sqrt(3 + R)
    out = attend(**problem, precision=precision)
    bound = bounds.dense_rows(problem, scale, precision)
    for i, h in np.ndindex(out.shape[:2]):
        n = 6 - 3 + i + 1
        truth = exact.attend_dense_row(
            problem["q_nope"][i, h],
            problem["q_pe"][i, h],
            problem["c_kv"][:n],
            problem["k_pe"][:n],
            problem["w_uk"][h],
            problem["w_uv"][h],
            scale,
        )
        assert np.all(np.abs(out[i, h] - truth) <= 2 * bound[i, h])


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
def test_the_dense_scale_in_f32_is_an_f32_quotient_of_an_f32_root(attend):
    """At 24 it is not the f32 next to 1 / sqrt(24), as published."""
    problem = dense(5, P=16, R=8)
    published = np.float32(1) / np.sqrt(np.float32(24))
    assert published != np.float32(1 / math.sqrt(24))
    assert np.array_equal(attend(**problem), attend(**problem, softmax_scale=float(published)))
    assert not np.array_equal(attend(**problem), attend(**problem, softmax_scale=1 / math.sqrt(24)))


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
def test_the_dense_scale_is_one_over_the_root_of_nope_plus_rope(attend):
    problem = dense(5, P=10, R=6)
    given = attend(**problem, softmax_scale=0.25, precision="f64")
    assert np.array_equal(attend(**problem, precision="f64"), given)


def test_absorb_attend_project_by_hand_is_the_absorbed_form_bit_for_bit():
    expf = ctypes.CDLL(ctypes.util.find_library("m")).expf
    expf.restype, expf.argtypes = ctypes.c_float, [ctypes.c_float]
    f32 = np.float32

    def ordered_sum(terms, axis=0):
        return np.add.accumulate(terms, axis=axis, dtype=f32).take(-1, axis)

    problem = dense(6, t_q=3, t_kv=9, H=2, P=8, R=8, V=5, L=12)
    q_lat = absorb_query(problem["q_nope"], problem["w_uk"])  # [t_q, H, L]
    o_lat = np.empty_like(q_lat)
    for i, h in np.ndindex(3, 2):
        n = 9 - 3 + i + 1
        query = np.concatenate([q_lat[i, h], problem["q_pe"][i, h]])
        keys = np.concatenate([problem["c_kv"][:n], problem["k_pe"][:n]], axis=1)
        scores = ordered_sum(query * keys, axis=1) * f32(0.25)
        weights = np.array([expf(s - scores.max()) for s in scores], f32)
        weights *= f32(1) / ordered_sum(weights)
        o_lat[i, h] = ordered_sum(weights[:, None] * problem["c_kv"][:n])
    assert same(up_project(o_lat, problem["w_uv"]), attend_absorbed(**problem))


def test_absorbed_queries_over_a_paged_cache_are_the_absorbed_form():
    problem = dense(7, t_q=4, t_kv=9, P=6, R=10)
    q = np.concatenate([absorb_query(problem["q_nope"], problem["w_uk"], precision="f64"), problem["q_pe"]], axis=2)
    rows = np.concatenate([problem["c_kv"], problem["k_pe"]], axis=1)
    out, _ = decode_paged(
        q[None],
        rows.reshape(3, 3, -1)[::-1],
        np.array([[2, 1, 0]], np.int32),
        np.array([9], np.int32),
        softmax_scale=0.25,
        head_dim_v=6,
        precision="f64",
    )
    difference = up_project(out[0], problem["w_uv"], precision="f64") - attend_absorbed(**problem, precision="f64")
    assert np.all(np.abs(difference) <= 4 * bounds.dense_rows(problem, 0.25, "f64"))
