# SPDX-License-Identifier: Apache-2.0
"""Whatever the arguments of decode: a result, or an InputError of one line; the arrays are left as they were."""

import ml_dtypes
import numpy as np
from draws import problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_oracle import InputError, decode, formats
from mla_oracle.cases.extensions import Extensions

OPTIONS = ["causal", "softmax_scale", "head_dim_v", "lse_base", "empty_lse", "precision", "threads"]
NAMES = sorted({*OPTIONS, "q", "kv_cache", "block_table", "seq_lens", *Extensions.__dataclass_fields__})
DTYPES = ["f4", "f8", "f2", ">f4", "i4", "i8", "u1", "?", "c8", "O", "S3", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
SCALARS = [np.float64(2), np.int64(3), np.bool_(True), b"slot", [1], {}, "slot", "skip", "BHT", "fp8_ds_mla", 2**70]
scalars = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3) | st.sampled_from(SCALARS)


@st.composite
def arrays(draw, like):
    """An array of any rank, dtype and strides, often of the shape or the dtype of `like`."""
    shape, dtype = tuple(draw(st.lists(st.integers(0, 4), max_size=5))), np.dtype(draw(st.sampled_from(DTYPES)))
    if isinstance(like, np.ndarray):
        shape = like.shape if draw(st.booleans()) else shape
        dtype = like.dtype if draw(st.booleans()) else dtype
    values = np.zeros(shape, dtype)
    if dtype.kind in "if":
        values[...] = draw(st.sampled_from([-1, 0, 1, 5, 2**31 - 1] if dtype.itemsize >= 4 else [0, 1, 5]))
    return values[(slice(None, None, draw(st.sampled_from([1, -1, 2]))),) * len(shape)]


@settings(deadline=None, max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_only_an_input_error_is_raised_and_nothing_is_written_to(data):
    p = data.draw(problems(form=data.draw(st.none() | st.sampled_from(formats.NAMES))))
    for name in sorted(data.draw(st.sets(st.sampled_from(NAMES), min_size=1, max_size=3))):
        p[name] = data.draw(scalars | arrays(p.get(name)))
    before = {name: x.tobytes() for name, x in p.items() if isinstance(x, np.ndarray) and x.dtype != object}
    p.setdefault("softmax_scale", 1.0)
    try:
        decode(**p)
    except InputError as error:
        assert str(error) and str(error).isprintable()
    assert all(p[name].tobytes() == held for name, held in before.items())
