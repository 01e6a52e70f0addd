# SPDX-License-Identifier: Apache-2.0
"""Canonical -> dialect -> canonical: what a call says is the case, bit for bit, and what it returns is the case's."""

import dataclasses

import numpy as np
import pytest
from calls import ids
from engines import ENGINES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_oracle import canonical, expected, generate
from mla_oracle.dialects import NAMES, get
from mla_oracle.dialects.folded import folded
from mla_oracle.dialects.same import difference
from mla_oracle.verdict.locate import in_row_order

FEW = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


def rows(case, name, array):
    """out [N, H, V], lse [N, H]."""
    array = in_row_order(case, array) if name == "lse" else array
    return array.reshape(-1, *array.shape[len(case.q.shape) - 2 :])


def in_the_calls_words(case, again):
    """`case` with the LSE as the call gives it; its axes are those of `case`."""
    names = ("lse_base", "empty_lse", "sinks_in_lse")
    return dataclasses.replace(case, lse_axes="BTH", **{name: getattr(again, name) for name in names})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "memra"])
@given(data=st.data())
@FEW
def test_a_case_and_the_case_of_its_call_have_the_same_bits(name, data):
    case = generate(data.draw(ids(name)))
    dialect = get(name)
    arguments = dialect.from_case(case)
    again = dialect.to_case(**arguments)
    mine = in_the_calls_words(folded(case) if dialect.folds else case, again)
    for precision in ("f32", "f64"):
        wanted = canonical.attend(mine, precision=precision, backend="strict")._asdict()
        found = canonical.attend(again, precision=precision, backend="strict")._asdict()
        for result in ("out", "lse"):
            assert rows(again, result, found[result]).tobytes() == rows(mine, result, wanted[result]).tobytes()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@FEW
def test_a_call_returns_what_its_own_loops_compute(name, data):
    dialect = get(name)
    case = generate(data.draw(ids(name)))
    arguments = dialect.from_case(case)
    found, wanted = dialect.run(**arguments), ENGINES[name](arguments)
    assert found.keys() == wanted.keys()
    for result, array in wanted.items():
        assert found[result].shape == array.shape
        largest = np.abs(array[np.isfinite(array)]).max(initial=1)
        np.testing.assert_allclose(found[result], array, rtol=1e-9, atol=1e-11 * largest)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@FEW
def test_the_arguments_of_a_call_come_back_from_its_case(name, data):
    dialect = get(name)
    arguments = dialect.from_case(generate(data.draw(ids(name))))
    case = dialect.to_case(**arguments)
    again = dialect.from_case(case)
    assert again.keys() == arguments.keys()
    if name == "tvm" and arguments["length_info"].ndim == 2:  # a window, of which the tokens are left
        assert difference(case, dialect.to_case(**again)) is None
        return
    for argument, value in arguments.items():
        other = again[argument]
        if isinstance(value, np.ndarray):
            assert (value.dtype, value.shape) == (other.dtype, other.shape)
            assert value.tobytes() == other.tobytes(), argument
        else:
            assert value == other, argument


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@FEW
def test_what_a_call_returned_is_read_as_the_results_of_its_case(name, data):
    dialect = get(name)
    arguments = dialect.from_case(generate(data.draw(ids(name))))
    case = dialect.to_case(**arguments)
    truth = expected(case)
    read = dialect.read(case, dialect.of_case(case, truth))
    for result, array in read.items():
        assert array.shape == truth[result].shape and array.tobytes() == truth[result].tobytes()
