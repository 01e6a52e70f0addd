# SPDX-License-Identifier: Apache-2.0
"""Options worked out by hand: zero queries, single keys, empty rows."""

import math

import numpy as np
import pytest

from mla_oracle import decode

PRECISIONS = ("f32", "f64")
U = {"f32": 2.0**-24, "f64": 2.0**-53}


def zero_queries(lens=(5, 3), T=2, H=2):
    """Every score is 0. Token j of request b has the value 1 + j + 10 b, on pages of 2 in reverse order."""
    B, width = len(lens), -(-max(lens) // 2)
    cache = np.full((B * width, 2, 3), np.nan, np.float32)
    table = np.arange(B * width, dtype=np.int32)[::-1].reshape(B, width)
    for b, n in enumerate(lens):
        for j in range(n):
            cache[table[b, j // 2], j % 2] = [1 + j + 10 * b, 0.5, 7]
    return {
        "q": np.zeros((B, T, H, 3), np.float32),
        "kv_cache": cache,
        "block_table": table.copy(),
        "seq_lens": np.array(lens, np.int32),
        "softmax_scale": 1.0,
        "head_dim_v": 1,
    }


def mean(out, b, t):
    return out[b, t, :, 0].tolist()


def near(value, precision, terms=8):
    return pytest.approx(value, rel=terms * U[precision])


@pytest.mark.parametrize(
    ("window", "kept"),
    [
        ({"window_left": 1}, {(0, 0): [2, 3], (0, 1): [3, 4], (1, 0): [0, 1], (1, 1): [1, 2]}),
        ({"window_left": 0, "window_first": 1}, {(0, 0): [0, 3], (0, 1): [0, 4], (1, 1): [0, 2]}),
        ({"window_left": 0, "window_right": 0, "window_first": 9}, {(0, 0): [0, 1, 2, 3], (1, 0): [0, 1]}),
        ({"window_left": 0, "window_right": 1, "causal": False}, {(0, 0): [3, 4], (0, 1): [4], (1, 0): [1, 2]}),
        ({"window_right": 0, "causal": False}, {(0, 0): [0, 1, 2, 3], (0, 1): [0, 1, 2, 3, 4]}),
        ({"window_right": 0, "window_left": 0, "window_first": 3, "causal": False}, {(0, 0): [0, 1, 2, 3]}),
        ({"window_left": -1, "causal": False}, {(1, 0): [0, 1, 2]}),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_window_is_the_mean_of_its_tokens_and_the_log_of_their_count(precision, window, kept):
    out, lse = decode(**zero_queries(), **window, precision=precision)
    for (b, t), tokens in kept.items():
        assert mean(out, b, t) == [near(np.mean([1 + j + 10 * b for j in tokens]), precision)] * 2
        assert lse[b, t].tolist() == [near(math.log(len(tokens)), precision)] * 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_key_selected_thrice_counts_thrice_and_one_not_visible_not_at_all(precision):
    indices = np.array([[[0, 0, -3, 0, 4, 2]] * 2, [[1] * 6, [2, 1, 0, -1, -1, -1]]])
    out, lse = decode(**zero_queries(), topk_indices=indices, precision=precision)
    assert mean(out, 0, 0) == [near((1 + 1 + 1 + 3) / 4, precision)] * 2  # token 4 is the next one's
    assert mean(out, 0, 1) == [near((1 + 1 + 1 + 3 + 5) / 5, precision)] * 2
    assert mean(out, 1, 0) == [12.0] * 2
    expected = [[4, 5], [6, 3]]
    assert np.exp(lse[..., 0]).tolist() == [[near(n, precision, 16) for n in row] for row in expected]


@pytest.mark.parametrize("length", [np.array([2, 1], np.int32), np.array([[2, 3], [1, 0]], np.int32)])
def test_what_lies_at_topk_length_and_beyond_may_be_anything(length):
    indices = np.full((2, 2, 3), 2**31 - 1)
    per_token = length if length.ndim == 2 else np.stack([length] * 2, 1)
    for b, t in np.ndindex(2, 2):
        indices[b, t, : per_token[b, t]] = [0, 1, 2][: per_token[b, t]]
    _, lse = decode(**zero_queries(), topk_indices=indices, topk_length=length, precision="f64")
    counts = np.where(per_token > 0, per_token, 0)
    with np.errstate(divide="ignore"):
        assert np.allclose(lse, np.log(counts)[..., None].repeat(2, -1), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("in_lse", [False, True])
@pytest.mark.parametrize("sink", [-math.inf, -200.0, 0.0, 1.5, 200.0, math.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_sink_takes_its_share_of_the_weight_and_has_no_value(precision, sink, in_lse):
    p = zero_queries()
    sinks = np.array([sink, -math.inf], np.float32)
    out, lse = decode(**p, sinks=sinks, sinks_in_lse=in_lse, precision=precision)
    plain = decode(**p, lse_axes="BTH", window_left=-1, precision=precision)
    n = 5
    share = n / (n + math.exp(sink)) if sink < math.inf else 0.0
    assert out[0, 1, 0, 0] == near(3 * share, precision) and out[0, 1, 1] == plain.out[0, 1, 1]
    total = math.inf if sink == math.inf else max(math.log(n) + math.log1p(math.exp(sink) / n), sink)
    assert lse[0, 1, 0] == near(total if in_lse else math.log(n), precision)
    assert lse[0, 1, 1] == plain.lse[0, 1, 1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_extra_keys_are_neither_masked_nor_biased_and_come_in_the_same_softmax(precision):
    p = zero_queries()
    extra = np.full((2, 4, 3), np.nan, np.float32)
    extra[1, 2], extra[1, 3] = [100, 0, 0], [200, 0, 0]
    out, lse = decode(
        **p,
        extra_kv_cache=extra,
        extra_block_table=np.array([[0, 1], [1, 0]], np.int32),
        extra_seq_lens=np.array([8, 4], np.int32),
        extra_topk_indices=np.array([[[6, 7], [7, -1]], [[-1, -1], [2, 2]]]),
        window_left=0,
        bias=np.zeros((2, 2, 5), np.float32),
        precision=precision,
    )
    assert [mean(out, b, t)[0] for b, t in np.ndindex(2, 2)] == [
        near(x, precision) for x in ((4 + 100 + 200) / 3, (5 + 200) / 2, 12, (13 + 100 + 100) / 3)
    ]
    assert np.exp(lse[..., 1]).ravel().tolist() == [near(n, precision, 16) for n in (3, 2, 1, 3)]


def one_key(precision, **options):
    """lse of one key whose scaled score is 2."""
    p = {
        "q": np.array([[[1, 3]]], np.float32),
        "kv_cache": np.array([[[1, 1]]], np.float32),
        "block_table": np.zeros((1, 1), np.int32),
        "seq_lens": np.ones(1, np.int32),
        "softmax_scale": 0.5,
        "head_dim_v": 1,
    }
    out, lse = decode(**p, precision=precision, **options)
    assert out.item() == options.get("output_scale", 1)
    return lse.item()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_score_of_one_key_is_scaled_then_capped_then_biased(precision):
    bias = np.full((1, 1), 0.75, np.float32)
    assert one_key(precision, value_offset=1) == 2
    assert one_key(precision, q_scale=0.25, output_scale=2.0) == 0.5
    assert one_key(precision, bias=bias) == 2.75
    assert one_key(precision, softcap=4.0) == near(4 * math.tanh(0.5), precision)
    assert one_key(precision, softcap=4.0, bias=bias) == near(4 * math.tanh(0.5) + 0.75, precision)
    assert one_key(precision, softcap=4.0, bias=bias, q_scale=8.0) == near(4 * math.tanh(4) + 0.75, precision)
    assert one_key(precision, lse_base="2", bias=bias) == near(2.75 / math.log(2), precision)


EMPTY = {
    "length": lambda p: {"seq_lens": np.zeros(2, np.int32), "sinks": np.ones(2, np.float32)},
    "mask": lambda p: {"bias": np.full((2, 2, 5), -np.inf, np.float32)},
    "window": lambda p: {"topk_indices": np.full((2, 2, 3), 0), "window_left": 0},
    "window before the first token": lambda p: {
        "window_right": 0,
        "causal": False,
        "seq_lens": np.ones(2, np.int32),
    },
    "causality": lambda p: {"topk_indices": np.full((2, 2, 1), 2), "seq_lens": np.full(2, 3, np.int32)},
    "selection": lambda p: {"topk_indices": np.full((2, 2, 3), -1)},
    "indices outside": lambda p: {"topk_indices": np.full((2, 2, 3), 9), "topk_outside": "skip"},
    "no entries": lambda p: {"topk_indices": np.zeros((2, 2, 0), np.int32)},
    "topk_length": lambda p: {"topk_indices": np.full((2, 2, 3), 1), "topk_length": np.zeros(2, np.int32)},
    "slots": lambda p: {
        "topk_by": "slot",
        "causal": False,
        "block_table": None,
        "seq_lens": None,
        "topk_indices": np.full((2, 2, 3), -9),
    },
}


@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf, -1e30, math.nan])
@pytest.mark.parametrize("why", EMPTY)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_empty_row_has_out_0_and_the_lse_that_is_asked_for_sinks_or_not(precision, why, empty_lse):
    p = zero_queries()
    if why == "selection":
        p["kv_cache"][:] = np.nan
    sinks = {"sinks": np.array([3, np.inf], np.float32), "sinks_in_lse": True}
    out, lse = decode(**{**p, **sinks, **EMPTY[why](p)}, empty_lse=empty_lse, precision=precision)
    t = 0 if why in ("causality", "window before the first token") else slice(None)
    assert np.all(out[:, t] == 0)
    assert np.all(np.isnan(lse[:, t]) if math.isnan(empty_lse) else lse[:, t] == lse.dtype.type(empty_lse))


def test_each_head_reads_the_rows_of_its_own_kv_head():
    p = zero_queries(H=6)
    kv = np.stack([p["kv_cache"] + 100 * g for g in range(3)], axis=2)  # [num_blocks, block_size, KV, D]
    out, _ = decode(**{**p, "kv_cache": kv}, precision="f64")
    assert out[0, 1, :, 0].tolist() == [near(3 + 100 * (h // 2), "f64") for h in range(6)]


def test_the_value_may_lie_anywhere_in_the_row():
    p = zero_queries()
    out, _ = decode(**{**p, "head_dim_v": 2}, value_offset=1, precision="f64")
    assert out[0, 1, 0].tolist() == [0.5, near(7, "f64")]
    split = {"kv_cache": p["kv_cache"][..., :1], "kpe_cache": p["kv_cache"][..., 1:], "head_dim_v": 3}
    out, _ = decode(**{**p, **split}, precision="f64")
    assert out[0, 1, 0].tolist() == [near(3, "f64"), 0.5, near(7, "f64")]
