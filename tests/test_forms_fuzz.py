# SPDX-License-Identifier: Apache-2.0
"""The argument checks under fuzz: an InputError of one line or a result, never another exception, never a crash."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import dense, paged

from mla_oracle import (
    InputError,
    absorb_query,
    append_kv,
    attend_absorbed,
    attend_naive,
    decode_paged,
    merge_states,
    up_project,
)

DENSE = dense(1)
STATES = {"partial_out": np.ones((2, 3, 4), np.float32), "partial_lse": np.ones((2, 3), np.float32)}
APPEND = {
    "kv_cache": np.ones((2, 2, 5), np.float32),
    "c_kv": np.ones((2, 3), np.float32),
    "k_pe": np.ones((2, 2), np.float32),
    "slot_mapping": np.array([3, -1]),
}
HOW = ["backend", "threads", "isa"]
FORMS = [
    (decode_paged, paged(2, [5, 0, 9]), ["causal", "precision", "lse_base", "empty_lse", "out_dtype", *HOW]),
    (attend_naive, DENSE, ["softmax_scale", "precision", *HOW]),
    (attend_absorbed, DENSE, ["softmax_scale", "precision", *HOW]),
    (absorb_query, {"q_nope": DENSE["q_nope"], "w_uk": DENSE["w_uk"]}, ["precision"]),
    (up_project, {"o_lat": np.ones((2, 2, 6), np.float32), "w_uv": DENSE["w_uv"]}, ["precision"]),
    (merge_states, STATES, ["precision", "lse_base", "empty_lse"]),
    (append_kv, APPEND, []),
]
DTYPES = ["f4", "f8", "f2", ">f4", "i4", "i8", ">i8", "u1", "?", "c8", "O", "S3", "U2", "M8[s]", "V6", "f4,i4", "g"]
SCALARS = [
    np.float64(2),
    np.float32(0.5),
    np.int64(3),
    np.bool_(True),
    b"f32",
    [1],
    {},
    "f32",
    "f64",
    "2",
    "fast",
    "strict",
    2**70,
    10**400,
]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(SCALARS)


@st.composite
def arrays(draw, like):
    """An array of any rank, dtype, order and strides, often of the right shape or dtype."""
    shape = like.shape if draw(st.booleans()) else tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    dtype = like.dtype if draw(st.booleans()) else np.dtype(draw(st.sampled_from([*DTYPES, ml_dtypes.bfloat16])))
    values = np.zeros(shape, dtype)
    if dtype.kind in "iuf":
        wide = dtype.kind == "i" and dtype.itemsize >= 4
        values[...] = draw(st.sampled_from([-(2**31), -1, 1, 5, 2**31 - 1] if wide else [0, 1, 5]))
    step = draw(st.sampled_from([1, 1, -1, 2]))
    return np.asarray(values, order=draw(st.sampled_from("CF")))[(slice(None, None, step),) * len(shape)]


@settings(deadline=None, max_examples=500, derandomize=True)
@given(st.data())
def test_whatever_the_arguments_only_an_input_error_is_raised(data):
    call, arguments, options = data.draw(st.sampled_from(FORMS))
    arguments = dict(arguments)
    for name in data.draw(st.sets(st.sampled_from([*arguments, *options]), min_size=1, max_size=3)):
        value = arguments.get(name)
        arguments[name] = data.draw(scalars | arrays(value) if isinstance(value, np.ndarray) else scalars)
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    if call is append_kv and "kv_cache" in before:
        arguments["kv_cache"] = before["kv_cache"].copy()
    try:
        call(**arguments)
    except InputError as error:
        assert str(error) and str(error).isprintable()
        for name, array in before.items():
            assert arguments[name].dtype == object or arguments[name].tobytes() == array.tobytes()


@settings(deadline=None, max_examples=500, derandomize=True)
@given(st.data())
def test_exactly_the_lengths_and_block_ids_in_range_are_accepted(data):
    """A cache of 6 blocks of 2 tokens, 3 requests of up to 4 blocks."""
    table = np.array(data.draw(st.lists(st.integers(0, 5), min_size=12, max_size=12)), np.int32).reshape(3, 4)
    lens = np.array(data.draw(st.lists(st.integers(0, 8), min_size=3, max_size=3)), np.int32)
    for array, bad in ((table, [-1, 6, -(2**31), 2**31 - 1]), (lens, [-1, 9, -(2**31), 2**31 - 1])):
        for where in data.draw(st.sets(st.integers(0, array.size - 1), max_size=2)):
            array.flat[where] = data.draw(st.sampled_from(bad))
    problem = paged(3, [1]) | {
        "q": np.ones((3, 1, 3), np.float32),
        "kv_cache": np.ones((6, 2, 3), np.float32),
        "block_table": table,
        "seq_lens": lens,
        "head_dim_v": 2,
    }
    valid = all(0 <= n <= 8 and all(0 <= table[b, j // 2] < 6 for j in range(n)) for b, n in enumerate(lens.tolist()))
    if not valid:
        with pytest.raises(InputError, match=r"^(seq_lens|block_table)\[\d"):
            decode_paged(**problem)
        return
    out, lse = decode_paged(**problem)
    for b, n in enumerate(lens):
        assert np.all(out[b] == (n > 0)) and (lse[b, 0] > 0 if n else lse[b, 0] == -np.inf)
