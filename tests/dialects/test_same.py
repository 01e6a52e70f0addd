# SPDX-License-Identifier: Apache-2.0
"""When two cases ask the same: one bit that a query sees is a difference, what nobody reads is none."""

from dataclasses import replace

import numpy as np
import pytest
from test_conventions import DECODE

from mla_oracle import generate
from mla_oracle.dialects.same import difference

CASE = generate(f"{DECODE},tokens=2,bias=normal,sinks=normal,window=60".replace("bf16", "f32"))


def flipped(array, *index):
    """`array` with the lowest bit of one element turned."""
    other = array.copy()
    bits = other.view(np.uint32 if other.dtype == np.float32 else np.int32)
    bits[index] ^= 1
    return other


def seen(request, token):
    """Where a token lies."""
    return int(CASE.block_table[request, token // 64]), token % 64


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"q": flipped(CASE.q, 0, 0, 0, 0)}, "q differs"),
        ({"kv_cache": flipped(CASE.kv_cache, *seen(0, 69), 575)}, "the rows that query 1 of request 0 sees differ"),
        ({"kv_cache": flipped(CASE.kv_cache, *seen(2, 63), 0)}, "the rows that query 1 of request 2 sees differ"),
        ({"bias": flipped(CASE.bias, 2, 1, 63)}, "the bias of query 1 of request 2 differs"),
        ({"sinks": flipped(CASE.sinks, 3)}, "sinks differ"),
        ({"softmax_scale": np.nextafter(CASE.softmax_scale, 1)}, "softmax_scale is 0.0625, it has 0.06250000000000001"),
        ({"seq_lens": np.array([70, 0, 63], np.int32)}, "query 0 of request 2 sees"),
        ({"window_left": 59}, "query 0 of request 0 sees"),
        ({"causal": False}, "query 0 of request 0 sees"),
        ({"head_dim_v": 511}, "a value is columns 0 to 511 (value_offset, head_dim_v), it has 0 to 510"),
        ({"value_offset": 1}, "a value is columns 0 to 511 (value_offset, head_dim_v), it has 1 to 512"),
        ({"softcap": 30.0}, "softcap is None, it has 30.0"),
        ({"q": CASE.q.astype(np.float64)}, "q is f32, it has f64"),
        ({"q": CASE.q[:, 1]}, "requests have [2, 2, 2] query tokens, it has [1, 1, 1]"),
    ],
)
def test_a_difference_is_told(changes, told):
    assert difference(CASE, CASE) is None
    if "q" in changes and changes["q"].ndim == 3:
        changes = changes | {"bias": CASE.bias[:, 1]}
    assert difference(CASE, replace(CASE, **changes)).startswith(told)


@pytest.mark.parametrize(
    "changes",
    [
        {"lse_base": "2", "empty_lse": np.inf, "lse_axes": "BHT", "sinks_in_lse": True},
        {"kv_cache": np.concatenate([CASE.kv_cache, CASE.kv_cache[:1]])},
        {"kv_cache": flipped(CASE.kv_cache, *seen(0, 0), 5)},  # before the window
        {"block_table": np.pad(CASE.block_table, ((0, 0), (0, 1)), constant_values=7)},
        {"kv_cache": CASE.kv_cache[..., :512], "kpe_cache": CASE.kv_cache[..., 512:]},
        {"id": None},
    ],
)
def test_what_is_no_part_of_the_question_is_no_difference(changes):
    assert difference(CASE, replace(CASE, **changes)) is None
