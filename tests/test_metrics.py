# SPDX-License-Identifier: Apache-2.0
"""Figures of rows with known answers, and the kinds of values that are not finite."""

import math

import ml_dtypes
import numpy as np
import pytest

from mla_oracle.verdict.metrics import metrics, nonfinite, ulp


def test_shrunk_and_turned_are_told_apart() -> None:
    w = np.array([[3.0, 4.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
    g = np.array([[1.5, 2.0], [-4.0, 3.0], [3.0, 4.0], [0.0, 0.0]])
    m = metrics({"out": g}, {"out": w})
    np.testing.assert_allclose(m.cosine, [1, 0, 1, 1], atol=1e-15)
    np.testing.assert_allclose(m.norm_ratio, [0.5, 1, 1, 1])
    np.testing.assert_allclose(m.relative_rms, [0.5, math.sqrt(2), 0, 0])
    assert m.lse_error is None and m.nonfinite == {}


def test_an_error_where_the_truth_is_zero_is_infinite() -> None:
    m = metrics({"out": np.array([[1e-30]])}, {"out": np.array([[0.0]])})
    assert m.relative_rms[0] == math.inf and m.cosine[0] == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_ulps_count_the_numbers_between(dtype) -> None:
    one = np.array([1.0, 1.0, 0.0, -0.0], dtype)
    bits = {2: np.int16, 4: np.int32, 8: np.int64}[one.itemsize]
    g = one.copy()
    g.view(bits)[0] += 3
    g.view(bits)[2] += 2
    np.testing.assert_array_equal(ulp(g, np.array([1.0, 1.0, 0.0, 0.0])), [3, 0, 2, 0])
    smallest = one.copy()
    smallest.view(bits)[3] += 1  # the negative number next to -0
    assert ulp(smallest, g.astype(np.float64))[3] == 1


def test_ulps_are_from_the_truth_as_the_dtype_holds_it() -> None:
    assert ulp(np.array([1.0], ml_dtypes.bfloat16), np.array([1.003])) == 0
    assert ulp(np.array([1.0], ml_dtypes.bfloat16), np.array([1.005])) == 1
    assert ulp(np.array([np.nan], np.float32), np.array([1.0])) == 0


def test_every_difference_of_values_not_finite_has_its_name() -> None:
    nan, inf = math.nan, math.inf
    g = np.array([nan, inf, 1.0, nan, -inf, 1.0, nan, inf])
    w = np.array([1.0, 1.0, nan, inf, inf, inf, nan, inf])
    assert nonfinite(g, w, None) == {
        "NaN for a number": 1,
        "infinity for a number": 1,
        "number for NaN": 1,
        "NaN for infinity": 1,
        "sign of infinity": 1,
        "number for infinity": 1,
    }
    assert nonfinite(np.array([inf, 0.0, nan]), np.array([-inf] * 3), -inf) == {"value of an empty row": 3}


def test_the_lse_is_measured_beside() -> None:
    truth = {"out": np.ones((2, 1)), "lse": np.array([1.0, -np.inf])}
    m = metrics({"out": np.ones((2, 1)), "lse": np.array([1.5, np.inf])}, truth)
    np.testing.assert_array_equal(m.lse_error, [0.5, 0])
    assert m.nonfinite == {"value of an empty row": 1}
