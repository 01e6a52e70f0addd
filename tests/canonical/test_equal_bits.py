# SPDX-License-Identifier: Apache-2.0
"""Bit for bit: without an option it is decode_paged, and the same keys in the same order give the same bits however
they are named."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

from mla_oracle import decode, decode_paged, expected, generate
from mla_oracle.canonical import attend
from mla_oracle.cases import golden

PRECISIONS = ("f32", "f64")
IDS = [
    "paged:heads=3,row=20,value=12,lens=0+1+7+16+33,block=8,scale=0.3",
    "paged:heads=2,row=20,value=20,lens=0+1+2+3+9,block=4,tokens=4,scale=0.3,dtype=bf16,lse_base=2,empty_lse=inf",
    "paged:heads=2,row=20,value=8,lens=5+9,block=4,tokens=3,scale=1.7,dtype=f16,causal=false,inputs=peaked",
    "paged:heads=1,row=6,value=4,lens=64,block=1,scale=0.3",
]


def same(found, right):
    """Equal bits, where every NaN is like any other."""
    for a, b in zip(found, right, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.all((a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b))


@pytest.mark.parametrize("case_id", IDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_plain_case_has_the_bits_of_decode_paged(precision, case_id):
    case = generate(case_id)
    same(attend(case, precision=precision), expected(case, precision=precision, backend="strict").values())


@pytest.mark.parametrize(("case_id", "q", "out", "lse"), golden.PAGED)
def test_the_published_bits_come_out_of_the_canonical_loops_too(case_id, q, out, lse):
    found = attend(generate(f"paged:{case_id}"), precision="f32")
    digests = [hashlib.sha256(a.astype("<f4").tobytes()).hexdigest()[:16] for a in found]
    assert digests == [out, lse]


def problem(T=2, seed=0, dtype=np.float32):
    """Two requests of 7 and 4 tokens and one of none, blocks of 3; unread rows are NaN."""
    rng = np.random.default_rng(seed)
    lens, H, D = [7, 4, 0], 4, 6
    cache = np.full((7, 3, D), np.nan, dtype)
    table = np.full((3, 4), 2**31 - 1, np.int32)
    table[0, :3], table[1, :2] = [4, 0, 6], [1, 5]
    for b, n in enumerate(lens):
        for j in range(n):
            cache[table[b, j // 3], j % 3] = rng.standard_normal(D)
    return {
        "q": rng.standard_normal((3, T, H, D) if T else (3, H, D)).astype(dtype),
        "kv_cache": cache,
        "block_table": table,
        "seq_lens": np.array(lens, np.int32),
        "softmax_scale": 0.4,
        "head_dim_v": 4,
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["key", "query"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_that_are_not_finite_do_the_same_as_in_decode_paged(precision, where, value):
    p = problem()
    (p["q"] if where == "query" else p["kv_cache"])[1 if where == "query" else 4, 1, ..., 2] = value
    extensions = {"lse_axes": "BTH", "sinks": np.full(4, -np.inf, np.float32)}
    same(decode(**p, **extensions, precision=precision), decode_paged(**p, precision=precision, backend="strict"))


def positions(p, K=8):
    """Every position of a request, in order; -1 after them."""
    T = p["q"].shape[1]
    indices = np.where(np.arange(K) < p["seq_lens"][:, None], np.arange(K), -1)
    return np.repeat(indices[:, None], T, axis=1).astype(np.int32)


def slots(p, indices):
    """What positions [B, T, K] of requests are as slots; what is not visible to a causal query is -1."""
    found = np.full(indices.shape, -1, np.int64)
    for (b, t, k), j in np.ndenumerate(indices):
        if 0 <= j <= p["seq_lens"][b] - p["q"].shape[1] + t:
            found[b, t, k] = int(p["block_table"][b, j // 3]) * 3 + j % 3
    return found


def heads_apart(p):
    return {"kv_cache": np.repeat(p["kv_cache"][:, :, None], 4, axis=2)}


def by_slot(p):
    absent = {"block_table": None, "seq_lens": None}
    return {**absent, "causal": False, "topk_by": "slot", "topk_indices": slots(p, positions(p))}


def nothing_extra(p):
    return {
        "extra_kv_cache": np.full((2, 5, 6), np.nan, np.float32),
        "extra_block_table": np.zeros((3, 1), np.int32),
        "extra_seq_lens": np.full(3, 5, np.int32),
        "extra_topk_indices": np.full((3, 2, 2), -1, np.int32),
    }


SAYING_NOTHING = {
    "bias": lambda p: {"bias": np.zeros((3, 2, 7), np.float32)},
    "bias per head": lambda p: {"bias": np.zeros((3, 2, 4, 9), ml_dtypes.bfloat16)},
    "no sinks": lambda p: {"sinks": np.full(4, -np.inf, np.float32), "sinks_in_lse": True},
    "no window": lambda p: {"window_left": -1, "window_right": -1},
    "wide window": lambda p: {"window_left": 9, "window_right": 0},
    "first tokens": lambda p: {"window_left": 0, "window_first": 7},
    "all selected": lambda p: {"topk_indices": positions(p), "topk_length": p["seq_lens"]},
    "all selected, skipping": lambda p: {"topk_indices": positions(p) % 2**20, "topk_outside": "skip"},
    "by slot": by_slot,
    "scales of 1": lambda p: {"q_scale": 1.0, "output_scale": 1.0},
    "split rows": lambda p: {"kv_cache": p["kv_cache"][..., :4], "kpe_cache": p["kv_cache"][..., 4:].copy()},
    "a head axis": lambda p: {"kv_cache": p["kv_cache"][:, :, None]},
    "a KV head for each": heads_apart,
    "ragged": lambda p: {"q": p["q"].reshape(6, 4, 6), "qo_indptr": np.arange(0, 7, 2, dtype=np.int32)},
    "nothing extra": nothing_extra,
}


@pytest.mark.parametrize("name", SAYING_NOTHING)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_option_that_says_nothing_changes_no_bit(precision, name):
    p = problem()
    right = decode_paged(**p, precision=precision, backend="strict")
    found = decode(**{**p, **SAYING_NOTHING[name](p)}, precision=precision)
    same((x.reshape(y.shape) for x, y in zip(found, right, strict=True)), right)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bht_is_the_lse_with_its_last_two_axes_swapped(precision):
    p = problem()
    out, lse = decode(**p, precision=precision, lse_axes="BHT")
    right = decode_paged(**p, precision=precision, backend="strict")
    same((out, lse), (right.out, right.lse.swapaxes(1, 2)))
    assert lse.flags.c_contiguous


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_window_a_bias_and_a_selection_of_the_same_keys_are_the_same(precision):
    p = problem()
    i = p["seq_lens"][:, None, None] - 2 + np.arange(2)[:, None]  # [B, T, 1]
    j = np.arange(7)
    kept = (j >= i - 1) & (j <= i) | (j < 2)  # [B, T, 7]
    window = decode(**p, precision=precision, window_left=1, window_first=2)
    bias = np.where(kept, 0, -np.inf).astype(np.float16)
    same(decode(**p, precision=precision, bias=bias), window)
    indices = np.where(kept, j, -5)
    same(decode(**p, precision=precision, topk_indices=indices, topk_outside="skip"), window)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_positions_and_slots_duplicates_included_are_the_same(precision):
    p = problem()
    indices = np.random.default_rng(1).integers(-1, 4, (3, 2, 9))
    indices[2] = -1
    found = decode(**p, precision=precision, topk_indices=indices)
    moved = {**p, **by_slot(p), "topk_indices": slots(p, indices)}
    same(decode(**moved, precision=precision), found)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_extra_cache_continues_the_main_one(precision):
    """The keys of request 0 from 5 on in a cache of pages of 2."""
    p = problem(T=1)
    right = decode_paged(**p, precision=precision, backend="strict")
    extra = np.full((2, 2, 6), np.nan, np.float32)
    extra[1] = p["kv_cache"][[0, 6], [2, 0]]
    p["kv_cache"] = np.where(np.isin(np.arange(21).reshape(7, 3), [2, 18])[..., None], np.nan, p["kv_cache"])
    tables = {"extra_kv_cache": extra, "topk_indices": np.array([[[0, 1, 2, 3, 4]], [[0, 1, 2, 3, -1]], [[-1] * 5]])}
    positions = {
        "extra_block_table": np.array([[1], [-1], [-1]], np.int32),
        "extra_seq_lens": np.array([2, 0, 0], np.int32),
        "extra_topk_indices": np.array([[[0, 1]], [[-1, -1]], [[-1, -1]]]),
    }
    same(decode(**p, precision=precision, **tables, **positions), right)
    p |= by_slot(p) | tables
    p["topk_indices"] = slots(problem(T=1), tables["topk_indices"])
    extra_slots = np.array([[[2, 3]], [[-1, -1]], [[-1, -1]]])
    same(decode(**p, precision=precision, extra_topk_indices=extra_slots), right)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_e4m3_rows_and_queries_are_the_numbers_they_stand_for(precision):
    p = problem()
    narrow = {name: p[name].astype(ml_dtypes.float8_e4m3fn) for name in ("q", "kv_cache")}
    wide = {name: array.astype(np.float32) for name, array in narrow.items()}
    right = decode_paged(**{**p, **wide}, precision=precision, backend="strict")
    same(decode(**{**p, **narrow}, precision=precision), right)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_scale_of_the_query_is_a_factor_of_the_softmax_scale(precision):
    p = problem()
    right = decode_paged(**{**p, "softmax_scale": 0.4 * 0.3}, precision=precision, backend="strict")
    same(decode(**p, q_scale=0.3, precision=precision), right)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ragged_requests_are_what_each_is_alone(precision):
    p = problem(T=3)
    q, indptr = p["q"].reshape(9, 4, 6)[:6], np.array([0, 1, 6, 6], np.int32)
    extensions = {"window_left": 2, "softcap": 3.0}
    out, lse = decode(**{**p, "q": q}, qo_indptr=indptr, precision=precision, **extensions)
    for b in (0, 1):
        mine = slice(*indptr[b : b + 2])
        alone = {name: p[name][b : b + 1] for name in ("block_table", "seq_lens")} | {"q": q[None, mine]}
        same((out[None, mine], lse[None, mine]), decode(**{**p, **alone}, precision=precision, **extensions))


def test_a_visible_nan_makes_its_rows_nan_in_f64_and_no_others():
    p = problem()
    p["kv_cache"][1, 1, 3] = np.nan  # position 1 of request 1
    indices = np.where(positions(p) == 1, -1, positions(p))
    indices[1, 1, 1] = 1
    out, lse = decode(**p, precision="f64", topk_indices=indices, sinks=np.ones(4, np.float32), sinks_in_lse=True)
    bad = np.zeros((3, 2, 4), bool)
    bad[1, 1] = True
    assert np.array_equal(np.isnan(lse), bad) and np.array_equal(np.isnan(out).all(-1), bad)
