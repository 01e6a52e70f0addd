# SPDX-License-Identifier: Apache-2.0
"""Any valid combination of the options is what the dictionary of keys says, and nothing that nobody may read counts."""

import dictionary
import numpy as np
import pytest
import row_bounds
from draws import problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_oracle import decode, formats
from mla_oracle.fast import isa


def worst(p, precision, **how):
    """The largest error over its bound of any row."""
    out, lse = decode(**p, precision=precision, **how)
    if p.get("lse_axes") == "BHT":
        lse = lse.swapaxes(1, 2)
    assert out.shape == (*p["q"].shape[:-1], p["head_dim_v"]) and lse.shape == p["q"].shape[:-1]
    assert out.dtype == lse.dtype == {"f32": np.float32, "f64": np.float64}[precision]
    found = 0.0
    rows = dictionary.attend(p, precision)
    assert len(rows) == lse.size
    for index, row in rows.items():
        options = {name: p.get(name) for name in ("softcap", "output_scale")}
        of_out, of_lse = row_bounds.bound(row, p["q"].shape[-1], precision, **options, lse_base=p["lse_base"])
        if not row.scores:
            assert np.all(out[index] == 0)
            assert np.array_equal(lse[index], lse.dtype.type(p["empty_lse"]), equal_nan=True)
            continue
        error = np.abs(out[index] - row.out)
        assert np.all(error <= of_out), f"out of {index}: {(error / of_out).max()} bounds"
        off = 0.0 if lse[index] == row.lse else abs(lse[index] - row.lse)
        assert off <= of_lse, f"lse of {index}: {off / of_lse} bounds"
        found = max(found, float((error / of_out).max()), off / of_lse)
    return found


@settings(deadline=None, max_examples=400, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("precision", ["f64", "f32"])
@given(data=st.data())
def test_any_combination_of_options_is_the_definition(precision, data):
    worst(data.draw(problems(precision)), precision)


@settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("precision", ["f64", "f32"])
@pytest.mark.parametrize("form", formats.NAMES)
@given(data=st.data())
def test_any_combination_of_options_over_rows_of_any_format_is_the_definition(form, precision, data):
    worst(data.draw(problems(precision, form)), precision)


@settings(deadline=None, max_examples=200, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("precision", ["f64", "f32"])
@pytest.mark.parametrize("build", [name for name in isa.available() if name != "amx"])
@given(data=st.data())
def test_the_fast_tier_is_the_definition_as_well(build, precision, data):
    worst(data.draw(problems(precision)), precision, backend="fast", isa=build)
