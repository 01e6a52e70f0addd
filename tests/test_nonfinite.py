# SPDX-License-Identifier: Apache-2.0
"""Empty rows, infinities and NaN: what each precision says about them, one row of a table each.

A key is (value 0, value 1, tail) and the query is (1, 1, 1), scale 1: a key's score is the sum of its elements.
"""

import math

import numpy as np
import pytest
from problems import dense, paged, same

from mla_oracle import attend_absorbed, attend_naive, decode_paged

INF, NAN = math.inf, math.nan
EMPTY = [-INF, INF, -1e30, NAN, 0.0]

plain = [(0.5, -0.25, 1.0), (-1.0, 2.0, 0.25)]
tail_minus = (1.0, 2.0, -INF)  # a score of -inf, finite values
value_minus = (-INF, 2.0, 0.0)  # a score of -inf through value 0
plus = (1.0, INF, 0.0)
nan_tail = (1.0, 2.0, NAN)
nan_value = (NAN, 2.0, 0.0)


def decode(keys, precision, **how):
    cache = np.array(keys, np.float32).reshape(1, -1, 3) if keys else np.empty((0, 1, 3), np.float32)
    out, lse = decode_paged(
        np.ones((1, 1, 3), np.float32),
        cache,
        np.zeros((1, len(cache)), np.int32),
        np.array([len(keys)], np.int32),
        softmax_scale=1.0,
        head_dim_v=2,
        precision=precision,
        **how,
    )
    return out[0, 0].tolist(), lse[0, 0].item()


def without(keys, *dropped):
    """What decode gives when those keys are not there."""
    return lambda precision: decode([k for k in keys if k not in dropped], precision)


def of(out, lse):
    return lambda precision: (out, lse)


F32 = {
    "no token": ([], of([0, 0], -INF)),
    "every score -inf": ([tail_minus, tail_minus], of([NAN, NAN], -INF)),
    "first score -inf": ([tail_minus, *plain], of([NAN, NAN], -INF)),
    "later score -inf by the tail": ([*plain, tail_minus], without([*plain, tail_minus], tail_minus)),
    "score +inf": ([plain[0], plus, plain[1]], of([NAN, NAN], -INF)),
    "NaN in the tail": ([*plain, nan_tail], of([NAN, NAN], -INF)),
    "NaN in a value": ([nan_value, *plain], of([NAN, NAN], -INF)),
}
F64 = {
    "no token": ([], of([0, 0], -INF)),
    "every score -inf": ([tail_minus, value_minus], of([0, 0], -INF)),
    "first score -inf": ([tail_minus, *plain], of(*decode(plain, "f64"))),
    "later score -inf by the tail": ([*plain, tail_minus], of(*decode(plain, "f64"))),
    "later score -inf by a value": ([plain[0], value_minus, plain[1]], of(*decode(plain, "f64"))),
    "score +inf": ([plain[0], plus, plain[1]], of([NAN, NAN], NAN)),
    "score +inf first": ([plus, *plain], of([NAN, NAN], NAN)),
    "NaN in the tail": ([*plain, nan_tail], of([NAN, NAN], NAN)),
    "NaN in a value, first": ([nan_value, *plain], of([NAN, NAN], NAN)),
    "NaN among -inf": ([tail_minus, nan_tail, tail_minus], of([NAN, NAN], NAN)),
}


@pytest.mark.parametrize(
    ("precision", "row"),
    [
        pytest.param(p, row, id=f"{p}: {name}")
        for p, table in (("f32", F32), ("f64", F64))
        for name, row in table.items()
    ],
)
def test_the_row_of_the_table(precision, row):
    keys, expected = row
    out, lse = decode(keys, precision)
    expected_out, expected_lse = expected(precision)
    assert np.array_equal(out, expected_out, equal_nan=True)
    assert np.array_equal(lse, expected_lse, equal_nan=True)


def test_in_f32_a_later_minus_inf_value_spoils_its_own_column_only():
    keys = [*plain, value_minus]
    (first, second), lse = decode(keys, "f32")
    (_, expected), expected_lse = decode(plain, "f32")
    assert math.isnan(first) and (second, lse) == (expected, expected_lse)


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_nan_in_the_query_reaches_every_row_that_sees_a_token(precision):
    problem = paged(1, [3, 0, 5])
    problem["q"][:, 1, 4] = NAN
    out, lse = decode_paged(**problem, precision=precision)
    assert np.isnan(out[[0, 2], 1]).all() and not out[1].any() and np.isfinite(out[:, 0]).all()
    assert np.all(np.isnan(lse[[0, 2], 1]) if precision == "f64" else lse[[0, 2], 1] == -INF)
    assert np.all(lse[1] == -INF)


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_empty_rows_have_out_zero_and_the_lse_asked_for(precision, empty, lse_base):
    how = {"precision": precision, "empty_lse": empty, "lse_base": lse_base}
    marker = (np.float32 if precision == "f32" else np.float64)(empty)

    out, lse = decode_paged(**paged(2, [0, 2, 0], T=4), **how)  # no token, or fewer than queries
    assert not out[[0, 2]].any() and not out[1, :2].any() and out[1, 2:].all()
    for row in (lse[0], lse[2], lse[1, :2]):
        assert same(row, np.full_like(row, marker))
    assert np.isfinite(lse[1, 2:]).all()

    if precision == "f64":
        out, lse = decode([tail_minus, value_minus], **how)
        assert out == [0, 0] and np.array_equal(lse, marker, equal_nan=True)


def test_without_causality_only_a_request_without_tokens_is_empty():
    out, lse = decode_paged(**paged(3, [0, 2], T=4), causal=False)
    assert not out[0].any() and np.all(lse[0] == -INF) and out[1].all() and np.isfinite(lse[1]).all()


def test_a_base_2_lse_is_the_natural_one_over_log_2():
    problem = paged(4, [0, 1, 7, 33], T=2)
    for precision, u in (("f32", 2.0**-24), ("f64", 2.0**-53)):
        natural = decode_paged(**problem, precision=precision)
        binary = decode_paged(**problem, precision=precision, lse_base="2")
        assert same(binary.out, natural.out)
        finite = np.isfinite(natural.lse)
        assert np.array_equal(binary.lse[~finite], natural.lse[~finite])
        assert np.allclose(binary.lse[finite], natural.lse[finite] / math.log(2), rtol=3 * u, atol=0)


def test_a_base_2_lse_of_a_power_of_two_of_equal_keys_is_its_exponent():
    problem = paged(5, [1, 2, 8, 64])
    problem["q"][:] = 0
    lse = decode_paged(**problem, lse_base="2").lse
    assert lse[:, 0].tolist() == [0, 1, 3, 6]


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_dense_forms_give_a_minus_inf_score_no_weight(precision, attend):
    problem = dense(6, t_q=2, t_kv=5)
    problem["q_pe"][:] = 1
    fewer = {**problem, "c_kv": np.delete(problem["c_kv"], 2, 0), "k_pe": np.delete(problem["k_pe"], 2, 0)}
    problem["k_pe"][2] = -INF
    assert same(attend(**problem, precision=precision), attend(**fewer, precision=precision))


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
def test_dense_values_behind_a_minus_inf_score_are_touched_in_f32_only(attend):
    problem = dense(6, t_q=2, t_kv=5)
    problem["q_nope"][:], problem["w_uk"][:] = 1, 0.5
    fewer = {**problem, "c_kv": np.delete(problem["c_kv"], 2, 0), "k_pe": np.delete(problem["k_pe"], 2, 0)}
    problem["c_kv"][2] = -INF
    assert same(attend(**problem, precision="f64"), attend(**fewer, precision="f64"))
    assert np.isnan(attend(**problem)).all()


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
@pytest.mark.parametrize(("precision", "everywhere"), [("f32", NAN), ("f64", 0.0)])
def test_dense_rows_of_nothing_but_minus_inf(precision, everywhere, attend):
    problem = dense(7)
    problem["q_pe"][:] = 1
    problem["k_pe"][:] = -INF
    out = attend(**problem, precision=precision)
    assert np.array_equal(out, np.full_like(out, everywhere), equal_nan=True)


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_dense_forms_spread_a_visible_nan_and_leave_earlier_queries_alone(precision, attend):
    problem = dense(8, t_q=3, t_kv=5)
    clean = attend(**problem, precision=precision)
    problem["k_pe"][4] = problem["c_kv"][4] = NAN
    out = attend(**problem, precision=precision)
    assert same(out[:2], clean[:2]) and np.isnan(out[2]).all()
