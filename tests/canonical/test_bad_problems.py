# SPDX-License-Identifier: Apache-2.0
"""Every contradiction of the options is one line that names the argument: the exact lines."""

import math

import ml_dtypes
import numpy as np
import pytest

from mla_oracle import InputError, UnsupportedError, decode

I32, F32 = np.int32, np.float32


def problem():
    """Two requests of 5 and 3 tokens, two query tokens, four heads, blocks of 2."""
    return {
        "q": np.ones((2, 2, 4, 6), F32),
        "kv_cache": np.ones((7, 2, 6), F32),
        "block_table": np.array([[0, 1, 2], [3, 4, -1]], I32),
        "seq_lens": np.array([5, 3], I32),
        "softmax_scale": 0.5,
        "head_dim_v": 4,
        "lse_axes": "BHT",
    }


def ints(*values):
    return np.array(values, I32)


def indices(K=3, **at):
    return np.zeros((2, 2, K), I32)


def entry(value, b=1, t=0, k=2):
    found = np.zeros((2, 2, 3), np.int64)
    found[b, t, k] = value
    return found


def biased(value, *index, shape=(2, 2, 5)):
    found = np.zeros(shape, F32)
    found[index] = value
    return found


SLOT = {"topk_by": "slot", "causal": False, "block_table": None, "seq_lens": None, "topk_indices": indices()}
RAGGED = {"q": np.ones((4, 4, 6), F32), "lse_axes": "BTH"}
EXTRA = {
    "extra_kv_cache": np.ones((3, 4, 6), F32),
    "extra_block_table": ints([0, 1], [2, -1]),
    "extra_seq_lens": ints(6, 4),
    "extra_topk_indices": indices(),
}
NO_TABLE = {"extra_block_table": None, "extra_seq_lens": None}

LINES = [
    # selection
    ({"topk_by": "page"}, "topk_by is 'page', expected position or slot"),
    ({"topk_outside": "clip"}, "topk_outside is 'clip', expected error or skip"),
    ({**SLOT, "causal": True}, "causal is True, expected False with topk_by 'slot'"),
    ({**SLOT, "window_left": 3}, "window_left is 3, expected None with topk_by 'slot'"),
    ({**SLOT, "window_right": 0}, "window_right is 0, expected None with topk_by 'slot'"),
    ({**SLOT, "window_first": 2}, "window_first is 2, expected 0 with topk_by 'slot'"),
    ({**SLOT, "bias": biased(0)}, "bias is given, expected None with topk_by 'slot': a slot has no position"),
    ({**SLOT, "topk_indices": None}, "topk_indices is missing, expected with topk_by 'slot'"),
    ({**SLOT, "seq_lens": ints(5, 3)}, "seq_lens is given, expected None with topk_by 'slot'"),
    ({**SLOT, "block_table": ints([0], [0])}, "block_table is given, expected None with topk_by 'slot'"),
    ({"block_table": None}, "tensor block_table is missing from the paged case"),
    ({"seq_lens": None}, "tensor seq_lens is missing from the paged case"),
    ({"topk_indices": entry(3)}, "topk_indices[1, 0, 2] is 3, expected below 3, seq_lens[1]"),
    ({**SLOT, "topk_indices": entry(14)}, "topk_indices[1, 0, 2] is 14, expected below 14, the rows of kv_cache"),
    ({"topk_indices": entry(2**62)}, f"topk_indices[1, 0, 2] is {2**62}, expected below 3, seq_lens[1]"),
    (
        {**RAGGED, "qo_indptr": ints(0, 1, 4), "topk_indices": np.array([[0], [0], [7], [0]])},
        "topk_indices[2, 0] is 7, expected below 3, seq_lens[1]",
    ),
    ({"topk_indices": np.zeros((2, 3), I32)}, "topk_indices has 2 axes [2, 3], expected 3: [B, T, K]"),
    ({"topk_indices": np.zeros((2, 2, 3), F32)}, "topk_indices is f32, expected i32 or i64"),
    (
        {"topk_indices": np.zeros((2, 1, 3), I32)},
        "topk_indices is [2, 1, 3], expected [B, T, K] with T = 2 on axis 1",
    ),
    (
        {"topk_indices": indices(), "topk_length": ints(3, -1)},
        "topk_length[1] is -1, expected 0 to 3, the entries of topk_indices",
    ),
    (
        {"topk_indices": indices(), "topk_length": ints([3, 0], [1, 4])},
        "topk_length[1, 1] is 4, expected 0 to 3, the entries of topk_indices",
    ),
    (
        {"topk_indices": indices(), "topk_length": ints(3, 1, 2)},
        "topk_length is [3], expected [B] with B = 2 on axis 0",
    ),
    ({"topk_length": ints(1, 1)}, "topk_length is given, expected None without topk_indices"),
    # the extra cache
    ({"extra_topk_indices": indices()}, "extra_topk_indices is given, expected None without extra_kv_cache"),
    ({"extra_topk_length": ints(1, 1)}, "extra_topk_length is given, expected None without extra_kv_cache"),
    ({"extra_block_table": ints([0], [0])}, "extra_block_table is given, expected None without extra_kv_cache"),
    ({"extra_seq_lens": ints(0, 0)}, "extra_seq_lens is given, expected None without extra_kv_cache"),
    ({"extra_kv_scale": np.ones(1, F32)}, "extra_kv_scale is given, expected None without extra_kv_cache"),
    ({**EXTRA, "extra_topk_indices": None}, "extra_topk_indices is missing, expected with extra_kv_cache"),
    ({**EXTRA, "extra_seq_lens": None}, "extra_seq_lens is missing, expected with topk_by 'position'"),
    ({**EXTRA, "extra_block_table": None}, "extra_block_table is missing, expected with topk_by 'position'"),
    ({**SLOT, **EXTRA}, "extra_block_table is given, expected None with topk_by 'slot'"),
    (
        {**SLOT, **EXTRA, **NO_TABLE, "extra_topk_indices": entry(12, 0, 1, 0)},
        "extra_topk_indices[0, 1, 0] is 12, expected below 12, the rows of extra_kv_cache",
    ),
    (
        {**EXTRA, "extra_topk_indices": entry(6, 0, 1, 0)},
        "extra_topk_indices[0, 1, 0] is 6, expected below 6, extra_seq_lens[0]",
    ),
    (
        {**EXTRA, "extra_seq_lens": ints(9, 0)},
        "extra_seq_lens[0] is 9, expected at most 8: extra_block_table has 2 blocks of 4 a request",
    ),
    (
        {**EXTRA, "extra_block_table": ints([3, 1], [2, -1])},
        "extra_block_table[0, 0] is 3, expected 0 to 2: request 0 sees token 0, and extra_kv_cache has 3 blocks",
    ),
    (
        {**EXTRA, "extra_topk_length": ints(3, 5)},
        "extra_topk_length[1] is 5, expected 0 to 3, the entries of extra_topk_indices",
    ),
    (
        {**EXTRA, "extra_kv_cache": np.ones((3, 4, 5), F32)},
        "extra_kv_cache has rows of 5 elements, expected 6 as the main cache",
    ),
    (
        {**EXTRA, "extra_kv_cache": np.ones((3, 4, 2, 6), F32)},
        "extra_kv_cache has 2 KV heads, expected 1 as the main cache",
    ),
    ({**EXTRA, "extra_kv_scale": np.ones(1, F32)}, "extra_kv_scale is given, expected None without cache_format"),
    # tables
    (
        {"block_table": ints([0, 7, 2], [3, 4, -1])},
        "block_table[0, 1] is 7, expected 0 to 6: request 0 sees token 2, and kv_cache has 7 blocks",
    ),
    ({"seq_lens": ints(5, -1)}, "seq_lens[1] is -1, expected 0 or more"),
    ({"seq_lens": ints(5, 7)}, "seq_lens[1] is 7, expected at most 6: block_table has 3 blocks of 2 a request"),
    ({"seq_lens": ints(5)}, "seq_lens is [1], expected [B] with B = 2 on axis 0"),
    # ragged queries
    ({"qo_indptr": ints(0, 2, 4)}, "q has 4 axes [2, 2, 4, 6], expected 3: [N, H, D]"),
    ({**RAGGED, "qo_indptr": ints(1, 2, 4)}, "qo_indptr[0] is 1, expected 0"),
    ({**RAGGED, "qo_indptr": ints(0, 3, 2)}, "qo_indptr[2] is 2, expected at least 3, the entry before it"),
    ({**RAGGED, "qo_indptr": ints(0, 3, 5)}, "qo_indptr[2] is 5, expected 4, the rows of q"),
    ({**RAGGED, "qo_indptr": ints()}, "qo_indptr is [0], expected [B+1]"),
    ({**RAGGED, "qo_indptr": ints(0, 4)}, "block_table is [2, 3], expected [B, max_blocks] with B = 1 on axis 0"),
    (
        {**RAGGED, "qo_indptr": ints(0, 2, 4), "lse_axes": "BHT"},
        "lse_axes is 'BHT', expected 'BTH' where q is [N, H, D]",
    ),
    (
        {**RAGGED, "qo_indptr": ints(0, 2, 4), "topk_indices": np.zeros((4, 1), I32), "topk_length": ints(1, 1)},
        "topk_length is [2], expected [N] with N = 4 on axis 0",
    ),
    # window
    ({"window_left": -2}, "window_left is -2, expected an integer from -1 to 2147483647"),
    ({"window_left": 1.5}, "window_left is 1.5, expected an integer from -1 to 2147483647"),
    ({"window_right": True}, "window_right is True, expected an integer from -1 to 2147483647"),
    ({"window_first": -1}, "window_first is -1, expected an integer from 0 to 2147483647"),
    ({"window_right": 2}, "window_right is 2, expected None or 0 with causal"),
    # bias
    ({"bias": biased(math.nan, 0, 1, 4)}, "bias[0, 1, 4] is nan, expected a finite number or -inf"),
    ({"bias": biased(math.inf, 1, 1, 0)}, "bias[1, 1, 0] is inf, expected a finite number or -inf"),
    (
        {"bias": biased(math.nan, 1, 0, 3, 1, shape=(2, 2, 4, 5))},
        "bias[1, 0, 3, 1] is nan, expected a finite number or -inf",
    ),
    ({"bias": biased(0, shape=(2, 2, 4))}, "bias has 4 columns, expected at least 5, seq_lens[0]"),
    ({"bias": biased(0, shape=(2, 2, 3, 5))}, "bias is [2, 2, 3, 5], expected [B, T, H, columns] with H = 4 on axis 2"),
    ({"bias": biased(0, shape=(2, 5))}, "bias has 2 axes [2, 5], expected 3: [B, T, columns]"),
    ({"bias": np.zeros((2, 2, 5))}, "bias is f64, expected f32 or f16 or bf16"),
    # sinks and softcap
    ({"sinks": np.array([0, math.nan, 0, 0], F32)}, "sinks[1] is nan, expected a number or an infinity"),
    ({"sinks": np.zeros(3, F32)}, "sinks is [3], expected [H] with H = 4 on axis 0"),
    ({"sinks": np.zeros(4)}, "sinks is f64, expected f32"),
    ({"sinks_in_lse": "yes"}, "sinks_in_lse is 'yes', expected True or False"),
    ({"softcap": 0.0}, "softcap is 0.0, expected a positive finite number"),
    ({"softcap": -30}, "softcap is -30, expected a positive finite number"),
    ({"softcap": math.nan}, "softcap is nan, expected a positive finite number"),
    ({"softcap": math.inf}, "softcap is inf, expected a positive finite number"),
    ({"softcap": 1e-60}, "softcap is 1e-60, expected a positive finite number"),
    ({"softcap": "30"}, "softcap is '30', expected a number"),
    # scales
    ({"q_scale": 0.0}, "q_scale is 0.0, expected a positive finite number"),
    ({"q_scale": math.nan}, "q_scale is nan, expected a positive finite number"),
    ({"q_scale": 1e39}, "softmax_scale * q_scale is 5e+38, expected a positive finite number"),
    ({"output_scale": -1.0}, "output_scale is -1.0, expected a positive finite number"),
    ({"kv_scale": np.ones(1, F32)}, "kv_scale is given, expected None without cache_format"),
    ({"ckv_scale": np.ones(1, F32)}, "ckv_scale is given, expected None without cache_format"),
    ({"kpe_scale": np.ones(1, F32)}, "kpe_scale is given, expected None without cache_format"),
    ({"cache_reader": "bf16"}, "cache_reader is 'bf16', expected None without cache_format"),
    ({"cache_format": np.ones(2)}, "cache_format is a ndarray, expected a name or None"),
    ({"cache_format": "fp8_ds_mla", "cache_reader": 2}, "cache_reader is 2, expected a name or None"),
    # rows
    ({"kv_cache": np.ones((7, 2, 5), F32)}, "q has rows of 6 elements, expected 5 as the keys"),
    ({"kpe_cache": np.ones((7, 2, 2), F32)}, "q has rows of 6 elements, expected 8 as the keys"),
    (
        {"kpe_cache": np.ones((6, 2, 2), F32)},
        "kpe_cache is [6, 2, 2], expected [num_blocks, block_size, R] with num_blocks = 7 on axis 0",
    ),
    (
        {"kv_cache": np.ones((7, 2, 2, 4), F32), "kpe_cache": np.ones((7, 2, 2), F32)},
        "kpe_cache has 3 axes [7, 2, 2], expected 4: [num_blocks, block_size, KV, R]",
    ),
    ({"kv_cache": np.ones((7, 2, 3, 6), F32)}, "q has 4 heads, expected a multiple of 3, the KV heads of kv_cache"),
    ({"kv_cache": np.ones((7, 2, 0, 6), F32)}, "kv_cache has 0 KV heads, expected 1 or more"),
    ({"kv_cache": np.ones((7, 0, 6), F32)}, "kv_cache has block_size 0, expected 1 or more"),
    ({"kv_cache": np.ones((7, 2, 6))}, "kv_cache is f64, expected f32 or f16 or bf16 or e4m3"),
    ({"q": np.ones((2, 2, 4, 6), ml_dtypes.float8_e5m2)}, "q is e5m2, expected f32 or f16 or bf16 or e4m3"),
    ({"value_offset": 3}, "value_offset is 3, expected 0 to 2: a row has 6 elements, a value 4"),
    ({"value_offset": -1}, "value_offset is -1, expected an integer from 0 to 2147483647"),
    ({"head_dim_v": 7}, "head_dim_v is 7, expected 1 to 6, the width of a kv_cache row"),
    # results
    ({"lse_axes": "HBT"}, "lse_axes is 'HBT', expected BTH or BHT"),
    ({"q": np.ones((2, 4, 6), F32)}, "lse_axes is 'BHT', expected 'BTH' where q is [B, H, D]"),
    ({"causal": None}, "causal is None, expected True or False"),
    ({"lse_base": "10"}, "lse_base is '10', expected e or 2"),
    ({"empty_lse": "-inf"}, "empty_lse is '-inf', expected a number"),
    ({"precision": "f16"}, "precision is 'f16', expected f32 or f64"),
    ({"threads": 0}, "threads is 0, expected 1 to 1024, or None"),
    ({"backend": "slow"}, "backend is 'slow', expected auto or strict or fast or cuda or ptx"),
    ({"topk_indices": [[0]]}, "topk_indices is a list, expected an array (numpy, DLPack or the array interface)"),
]


@pytest.mark.parametrize(("changes", "line"), LINES, ids=[f"{i}: {line[:40]}" for i, (_, line) in enumerate(LINES)])
def test_a_contradiction_is_one_line_that_names_the_argument(changes, line):
    with pytest.raises(InputError) as error:
        decode(**{**problem(), **changes})
    assert str(error.value) == line


def test_the_problem_itself_is_valid_and_so_are_its_variants():
    for changes in ({}, SLOT, EXTRA, {**SLOT, **EXTRA, **NO_TABLE}, {**RAGGED, "qo_indptr": ints(0, 2, 4)}):
        decode(**{**problem(), **changes})


@pytest.mark.parametrize("backend", ["cuda", "ptx"])
def test_other_backends_refuse_an_extension_by_its_name(backend):
    with pytest.raises(UnsupportedError, match=rf"^softcap is not supported by backend '{backend}'$"):
        decode(**problem(), softcap=3.0, backend=backend)


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'page_ids'"):
        decode(**problem(), page_ids=np.arange(7))


def test_ids_that_no_query_sees_are_not_looked_at():
    """Blocks before a window are freed by engines: their entries may hold anything."""
    p = problem() | {"block_table": ints([2**31 - 1, 1, 2], [3, 4, 99])}
    out, _ = decode(**p, window_left=0)
    assert np.all(out == 1)
