# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of the forms: one InputError of one line, naming argument, index and value, and what was expected.

Good arguments that look odd (subclasses, DLPack, the array interface) are in test_arrays.py, append_kv's bad ones in
test_append.py, the fuzz in test_forms_fuzz.py.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from problems import dense, paged

from mla_oracle import (
    InputError,
    absorb_query,
    attend_absorbed,
    attend_naive,
    decode_paged,
    merge_states,
    up_project,
)

ROWS = [5, 0, 9]  # of blocks of 4: 2, 0 and 3 blocks
GOOD = paged(1, ROWS)  # q [3, 2, 6], kv_cache [7, 4, 6], block_table [3, 3], seq_lens [3], head_dim_v 4


def good(name, *index):
    """A copy of GOOD[name], with `index` (position, value) changed."""
    array = GOOD[name].copy()
    for where, value in zip(index[::2], index[1::2], strict=True):
        array[where] = value
    return array


def message(call, *args, **kwargs):
    with pytest.raises(InputError) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert text.isprintable() and len(text) < 300
    return text


ARRAYS = [
    ("q", GOOD["q"][0], "q has 2 axes [2, 6], expected 4: [B, T, H, D]"),
    ("q", GOOD["q"][None, None], "q has 5 axes [1, 1, 3, 2, 6], expected 4: [B, T, H, D]"),
    ("q", GOOD["q"].astype(np.float64), "q is f64, expected f32 or f16 or bf16"),
    ("q", GOOD["q"].astype(np.int32), "q is i32, expected f32 or f16 or bf16"),
    ("q", GOOD["q"].astype(">f4"), "q: dtype is >f4, expected one of"),
    ("q", GOOD["q"].astype(object), "q: dtype is object, expected one of"),
    ("q", GOOD["q"].astype(np.complex64), "q: dtype is complex64, expected one of"),
    ("q", GOOD["q"].tolist(), "q is a list, expected an array (numpy, DLPack or the array interface)"),
    ("q", None, "q is a NoneType, expected an array"),
    ("q", np.float32(1), "q has 0 axes [], expected 4: [B, T, H, D]"),
    ("q", GOOD["q"][:, :, ::-1], "q has an innermost stride of -4 bytes, expected 4 (contiguous)"),
    ("q", np.repeat(GOOD["q"], 2, axis=2)[:, :, ::2], "q has an innermost stride of 8 bytes, expected 4 (contiguous)"),
    ("kv_cache", GOOD["kv_cache"][0], "kv_cache has 2 axes [4, 6], expected 3: [num_blocks, block_size, D]"),
    ("kv_cache", GOOD["kv_cache"][:, :, None], "kv_cache has 4 axes [7, 4, 1, 6], expected 3"),
    (
        "kv_cache",
        GOOD["kv_cache"][..., :5],
        "kv_cache is [7, 4, 5], expected [num_blocks, block_size, D] with D = 6 on axis 2",
    ),
    ("kv_cache", GOOD["kv_cache"].astype(ml_dtypes.float8_e4m3fn), "kv_cache is e4m3, expected f32 or f16 or bf16"),
    ("kv_cache", GOOD["kv_cache"].astype(np.float64), "kv_cache is f64, expected f32 or f16 or bf16"),
    ("kv_cache", GOOD["kv_cache"][:, :0], "kv_cache has block_size 0, expected 1 or more"),
    (
        "kv_cache",
        GOOD["kv_cache"].transpose(0, 2, 1).copy().transpose(0, 2, 1),
        "kv_cache has an innermost stride of 16 bytes",
    ),
    ("block_table", GOOD["block_table"][0], "block_table has 1 axes [3], expected 2: [B, max_blocks]"),
    ("block_table", GOOD["block_table"].astype(np.int64), "block_table is i64, expected i32"),
    ("block_table", GOOD["block_table"].astype(np.uint32), "block_table is u32, expected i32"),
    ("block_table", GOOD["block_table"].astype(np.float32), "block_table is f32, expected i32"),
    ("block_table", GOOD["block_table"].astype(">i4"), "block_table: dtype is >i4, expected one of"),
    ("block_table", GOOD["block_table"][:2], "block_table is [2, 3], expected [B, max_blocks] with B = 3 on axis 0"),
    ("block_table", good("block_table", (2, 1), -1), "block_table[2, 1] is -1, expected 0 to 6: seq_lens[2] is 9"),
    ("block_table", good("block_table", (0, 1), 7), "block_table[0, 1] is 7, expected 0 to 6: seq_lens[0] is 5"),
    (
        "block_table",
        good("block_table", (2, 2), 2**31 - 1, (0, 0), -(2**31)),
        "block_table[0, 0] is -2147483648, expected",
    ),
    ("seq_lens", GOOD["seq_lens"][:, None], "seq_lens has 2 axes [3, 1], expected 1: [B]"),
    ("seq_lens", GOOD["seq_lens"].astype(np.int64), "seq_lens is i64, expected i32"),
    ("seq_lens", GOOD["seq_lens"].astype(np.float32), "seq_lens is f32, expected i32"),
    ("seq_lens", GOOD["seq_lens"].astype(bool), "seq_lens is bool, expected i32"),
    ("seq_lens", np.array(["5", "0", "9"]), "seq_lens: dtype is <U1, expected one of"),
    ("seq_lens", GOOD["seq_lens"][:2], "seq_lens is [2], expected [B] with B = 3 on axis 0"),
    ("seq_lens", good("seq_lens", 1, -1), "seq_lens[1] is -1, expected 0 or more"),
    ("seq_lens", good("seq_lens", 2, -(2**31)), "seq_lens[2] is -2147483648, expected 0 or more"),
    (
        "seq_lens",
        good("seq_lens", 0, 13),
        "seq_lens[0] is 13, expected at most 12: block_table has 3 blocks of 4 a request",
    ),
    ("seq_lens", good("seq_lens", 2, 2**31 - 1), "seq_lens[2] is 2147483647, expected at most 12"),
]
NUMBERS = [
    ("softmax_scale", math.nan, "softmax_scale is nan, expected a positive finite number"),
    ("softmax_scale", 0, "softmax_scale is 0, expected a positive finite number"),
    ("softmax_scale", -0.5, "softmax_scale is -0.5, expected a positive finite number"),
    ("softmax_scale", math.inf, "softmax_scale is inf, expected a positive finite number"),
    ("softmax_scale", np.float32(-math.inf), "softmax_scale is -inf, expected a positive finite number"),
    ("softmax_scale", 1e39, "softmax_scale is 1e+39, expected a positive finite number"),  # infinite in f32
    ("softmax_scale", 1e-46, "softmax_scale is 1e-46, expected a positive finite number"),  # zero in f32
    ("softmax_scale", 10**400, "softmax_scale is an integer of more than 64 bits, expected a number"),
    ("softmax_scale", None, "softmax_scale is None, expected a number"),
    ("softmax_scale", "0.5", "softmax_scale is '0.5', expected a number"),
    ("softmax_scale", True, "softmax_scale is True, expected a number"),
    ("softmax_scale", np.ones((3, 3)), "softmax_scale is a ndarray, expected a number"),
    ("head_dim_v", 7, "head_dim_v is 7, expected 1 to 6, the width of a kv_cache row"),
    ("head_dim_v", 0, "head_dim_v is 0, expected 1 to 6"),
    ("head_dim_v", -1, "head_dim_v is -1, expected 1 to 6"),
    ("head_dim_v", 2**70, "head_dim_v is an integer of more than 64 bits, expected 1 to 6"),
    ("head_dim_v", 4.0, "head_dim_v is 4.0, expected an integer"),
    ("head_dim_v", None, "head_dim_v is None, expected an integer"),
    ("head_dim_v", True, "head_dim_v is True, expected an integer"),
    ("causal", "false", "causal is 'false', expected True or False"),
    ("causal", 1, "causal is 1, expected True or False"),
    ("causal", None, "causal is None, expected True or False"),
    ("precision", "f16", "precision is 'f16', expected f32 or f64"),
    ("precision", np.float32, "precision is a type, expected f32 or f64"),
    ("precision", np.array(["f32", "f64"]), "precision is a ndarray, expected f32 or f64"),
    ("backend", "gpu", "backend is 'gpu', expected auto or strict or fast or cuda or ptx"),
    ("threads", 0, "threads is 0, expected 1 to 1024, or None"),
    ("threads", 2.0, "threads is 2.0, expected 1 to 1024, or None"),
    ("lse_base", "10", "lse_base is '10', expected e or 2"),
    ("lse_base", 2, "lse_base is 2, expected e or 2"),
    ("empty_lse", "inf", "empty_lse is 'inf', expected a number"),
    ("empty_lse", None, "empty_lse is None, expected a number"),
    ("empty_lse", 10**400, "empty_lse is an integer of more than 64 bits, expected a number"),
    ("out_dtype", "e4m3", "out_dtype is 'e4m3', expected f32 or f16 or bf16 or f64"),
    ("out_dtype", np.float16, "out_dtype is a type, expected f32 or f16 or bf16 or f64"),
    ("out_dtype", ["f16"], "out_dtype is a list, expected f32 or f16 or bf16 or f64"),
]


@pytest.mark.parametrize(("name", "value", "text"), ARRAYS + NUMBERS, ids=[text for *_, text in ARRAYS + NUMBERS])
def test_a_bad_argument_of_decode_paged_is_named_in_one_line(name, value, text):
    assert message(decode_paged, **GOOD | {name: value}).startswith(text)


def test_f64_arrays_belong_to_precision_f64():
    wide = {name: GOOD[name].astype(np.float64) for name in ("q", "kv_cache")}
    assert decode_paged(**GOOD | wide, precision="f64").out.dtype == np.float64
    assert message(decode_paged, **GOOD | wide) == "q is f64, expected f32 or f16 or bf16"


def test_a_scale_too_small_for_f32_is_good_in_f64():
    assert np.isfinite(decode_paged(**GOOD | {"softmax_scale": 1e-46}, precision="f64").out).all()


def test_a_scale_is_never_guessed():
    with pytest.raises(TypeError, match="softmax_scale"):
        decode_paged(**{name: value for name, value in GOOD.items() if name != "softmax_scale"})


DENSE = dense(2)  # t_q 2, t_kv 5, H 2, P 3, R 2, V 4, L 6


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("geometry", None, "geometry is None, expected a Geometry"),
        ("geometry", {"num_heads": 2}, "geometry is a dict, expected a Geometry"),
        ("q_nope", DENSE["q_nope"][0], "q_nope has 2 axes [2, 3], expected 3: [t_q, H, P]"),
        ("q_nope", DENSE["q_nope"][:, :1], "q_nope is [2, 1, 3], expected [t_q, H, P] with H = 2 on axis 1"),
        ("q_nope", DENSE["q_nope"][..., :2], "q_nope is [2, 2, 2], expected [t_q, H, P] with P = 3 on axis 2"),
        ("q_nope", DENSE["q_nope"].astype(np.float64), "q_nope is f64, expected f32 or f16 or bf16"),
        ("q_pe", DENSE["q_pe"][:1], "q_pe is [1, 2, 2], expected [t_q, H, R] with t_q = 2 on axis 0"),
        ("q_pe", DENSE["q_pe"][..., :0], "q_pe is [2, 2, 0], expected [t_q, H, R] with R = 2 on axis 2"),
        ("q_pe", None, "q_pe is a NoneType, expected an array"),
        ("c_kv", DENSE["c_kv"][:, None], "c_kv has 3 axes [5, 1, 6], expected 2: [t_kv, L]"),
        ("c_kv", DENSE["c_kv"][:, :5], "c_kv is [5, 5], expected [t_kv, L] with L = 6 on axis 1"),
        ("k_pe", DENSE["k_pe"][:4], "k_pe is [4, 2], expected [t_kv, R] with t_kv = 5 on axis 0"),
        ("k_pe", DENSE["k_pe"].astype(int), "k_pe is i64, expected f32 or f16 or bf16"),
        ("w_uk", DENSE["w_uk"].transpose(0, 2, 1), "w_uk is [2, 6, 3], expected [H, P, L] with P = 3 on axis 1"),
        ("w_uv", DENSE["w_uv"].transpose(0, 2, 1), "w_uv is [2, 6, 4], expected [H, V, L] with V = 4 on axis 1"),
        ("w_uv", DENSE["w_uv"].tolist(), "w_uv is a list, expected an array"),
        ("softmax_scale", 0.0, "softmax_scale is 0.0, expected a positive finite number"),
        ("softmax_scale", math.nan, "softmax_scale is nan, expected a positive finite number"),
        ("softmax_scale", "1", "softmax_scale is '1', expected a number"),
        ("precision", "f128", "precision is 'f128', expected f32 or f64"),
    ],
)
def test_a_bad_argument_of_a_dense_form_is_named_in_one_line(attend, name, value, text):
    assert message(attend, **DENSE | {name: value}).startswith(text)


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
def test_more_queries_than_cached_rows_are_refused(attend):
    few = DENSE | {"c_kv": DENSE["c_kv"][:1], "k_pe": DENSE["k_pe"][:1]}
    assert message(attend, **few) == "q_nope has 2 queries and c_kv 1 rows, expected the queries to be its last rows"


def test_bad_ends_of_the_absorbed_form_are_named_in_one_line():
    q_nope, w_uk, w_uv = DENSE["q_nope"], DENSE["w_uk"], DENSE["w_uv"]
    assert message(absorb_query, q_nope, w_uk[:1]) == "w_uk is [1, 3, 6], expected [H, P, L] with H = 2 on axis 0"
    assert message(absorb_query, q_nope, w_uk[0]) == "w_uk has 2 axes [3, 6], expected 3: [H, P, L]"
    assert message(absorb_query, q_nope.astype(float), w_uk) == "q_nope is f64, expected f32 or f16 or bf16"
    assert message(up_project, q_nope, w_uv) == "w_uv is [2, 4, 6], expected [H, V, L] with L = 3 on axis 2"
    assert message(up_project, np.ones((2, 2, 6), np.float32), w_uv, precision="half").startswith("precision is 'half'")


OUT, LSE = np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("out", "lse", "how", "text"),
    [
        (
            OUT,
            LSE[:, :2],
            {},
            "partial_lse is [2, 2], expected [S, ...] with partial_out [S, ..., V], which is [2, 3, 4]",
        ),
        (OUT, LSE[:1], {}, "partial_lse is [1, 3], expected [S, ...]"),
        (OUT[0, 0], LSE[0, 0], {}, "partial_lse is [], expected [S, ...]"),
        (OUT, OUT, {}, "partial_lse is [2, 3, 4], expected [S, ...]"),
        ([], [], {}, "partial_out has no state, expected one or more"),
        (OUT.astype(float), LSE, {}, "partial_out is f64, expected f32 or f16 or bf16"),
        (OUT, LSE.astype(np.int32), {}, "partial_lse is i32, expected f32 or f16 or bf16"),
        (OUT, LSE.astype(">f4"), {}, "partial_lse: dtype is >f4, expected one of"),
        (
            [OUT[0], OUT[1, :2]],
            [LSE[0], LSE[1, :2]],
            {},
            "partial_out[1] is float32 [2, 4], expected partial_out[0]'s float32 [3, 4]",
        ),
        (
            [OUT[0], OUT[1].astype(np.float16)],
            LSE,
            {},
            "partial_out[1] is float16 [3, 4], expected partial_out[0]'s float32",
        ),
        (OUT, [[1.0] * 3] * 2, {}, "partial_lse[0] is a list, expected an array"),
        ("states", LSE, {}, "partial_out[0] is a str, expected an array"),
        (None, LSE, {}, "partial_out is a NoneType, expected an array"),
        (OUT, LSE, {"lse_base": "10"}, "lse_base is '10', expected e or 2"),
        (OUT, LSE, {"empty_lse": "none"}, "empty_lse is 'none', expected a number"),
        (OUT, LSE, {"precision": None}, "precision is None, expected f32 or f64"),
    ],
)
def test_a_bad_argument_of_merge_states_is_named_in_one_line(out, lse, how, text):
    assert message(merge_states, out, lse, **how).startswith(text)
