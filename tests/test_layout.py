# SPDX-License-Identifier: Apache-2.0
"""How the inputs lie in memory changes no bit: number formats, strides, alignment, place of a page, what is unread."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from problems import DTYPES, dense, paged, same

from mla_oracle import append_kv, attend_absorbed, attend_naive, decode_paged, expected, generate, merge_states
from mla_oracle.cases.placement import dense_table, sparse_cache

CODES = np.arange(1 << 16, dtype=np.uint16)


def agree(one, other):
    return same(one.out, other.out) and same(one.lse, other.lse)


def unaligned(array):
    """The array at an odd address."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    assert not copy.flags.aligned
    return copy


def padded(array):
    """The array with room between the elements of every outer axis."""
    room = np.zeros([2 * n + 1 for n in array.shape[:-1]] + [array.shape[-1] + 3], array.dtype)
    view = room[(*[slice(1, None, 2)] * (array.ndim - 1), slice(1, array.shape[-1] + 1))]
    view[...] = array
    return view


def backwards(array):
    """The array with negative outer strides."""
    flip = (slice(None, None, -1),) * (array.ndim - 1)
    return array[flip].copy()[flip]


def transposed(array):
    """The array with its outer axes stored in reverse order."""
    axes = [*reversed(range(array.ndim - 1)), array.ndim - 1]
    return np.ascontiguousarray(array.transpose(axes)).transpose(axes)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


LAYOUTS = [unaligned, padded, backwards, transposed, read_only]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_every_code_of_a_16_bit_cache_means_what_it_means_widened(precision, dtype):
    """One request a code: its second key is (code, 1), after a first key of (0, 1)."""
    cache = np.zeros((len(CODES), 2, 2), DTYPES[dtype])
    cache[:, 1, 0] = CODES.view(DTYPES[dtype])
    cache[:, :, 1] = 1
    table = np.arange(len(CODES), dtype=np.int32)[:, None]
    lens = np.full(len(CODES), 2, np.int32)
    q = np.broadcast_to(np.float32([1e-3, 0]), (len(CODES), 1, 2))
    how = {"softmax_scale": 1.0, "head_dim_v": 1, "precision": precision}
    narrow = decode_paged(q, cache, table, lens, **how)
    wide = decode_paged(q, cache.astype(np.float32), table, lens, **how)
    assert agree(narrow, wide)
    values = CODES.view(DTYPES[dtype]).astype(np.float32)
    assert np.array_equal(
        np.isnan(narrow.out[:, 0, 0]),
        np.isnan(values) | (values == np.inf) | (values == -np.inf) & (precision == "f32"),
    )


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_code_of_a_16_bit_query_is_its_own_score_against_a_key_of_one(dtype):
    codes = CODES.view(DTYPES[dtype])
    out, lse = decode_paged(
        codes[:, None, None],
        np.ones((1, 1, 1), np.float32),
        np.zeros((len(CODES), 1), np.int32),
        np.ones(len(CODES), np.int32),
        softmax_scale=1.0,
        head_dim_v=1,
        precision="f64",
    )
    values = codes.astype(np.float32)
    finite = np.isfinite(values)
    assert np.array_equal(lse[finite, 0], values[finite]) and np.all(out[finite] == 1)
    assert np.isnan(lse[~finite & ~(values == -np.inf), 0]).all()


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), list(itertools.product(["f32", "f16", "bf16"], repeat=2)))
def test_queries_and_cache_may_differ_in_dtype(q_dtype, kv_dtype):
    q = paged(1, [9, 4], T=2, dtype=q_dtype)["q"]
    problem = paged(2, [9, 4], T=2, dtype=kv_dtype) | {"q": q}
    wide = {name: problem[name].astype(np.float32) for name in ("q", "kv_cache")}
    for precision in ("f32", "f64"):
        assert agree(decode_paged(**problem, precision=precision), decode_paged(**problem | wide, precision=precision))


@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_dense_inputs_of_16_bits_mean_what_they_mean_widened(dtype, attend):
    problem = dense(3, dtype=dtype)
    wide = {name: x.astype(np.float32) for name, x in problem.items() if name != "geometry"}
    for precision in ("f32", "f64"):
        assert same(attend(**problem, precision=precision), attend(**problem | wide, precision=precision))


@pytest.mark.parametrize("name", ["f16", "bf16", "f64"])
def test_out_dtype_rounds_the_result_once(name):
    problem = paged(4, [9, 0, 4])
    for precision in ("f32", "f64"):
        plain = decode_paged(**problem, precision=precision)
        rounded = decode_paged(**problem, precision=precision, out_dtype=name)
        assert rounded.out.dtype == DTYPES[name] and same(rounded.lse, plain.lse)
        gap = np.abs(rounded.out.astype(np.float64) - plain.out)
        assert np.all(gap <= ml_dtypes.finfo(DTYPES[name]).eps / 2 * np.abs(plain.out))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_paged_problem_may_lie_in_any_strides(dtype, layout):
    problem = paged(5, [9, 4, 0, 13], T=3, H=4, dtype=dtype)
    moved = {name: layout(problem[name]) for name in ("q", "kv_cache", "block_table", "seq_lens")}
    if layout is padded:
        moved["seq_lens"] = np.repeat(problem["seq_lens"], 2)[::2]
        moved["block_table"] = np.repeat(problem["block_table"], 2, axis=1)[:, ::2]
    for precision in ("f32", "f64"):
        assert agree(decode_paged(**problem | moved, precision=precision), decode_paged(**problem, precision=precision))


def test_each_outer_axis_of_q_and_the_cache_alone_may_be_strided():
    problem = paged(6, [9, 4], T=2, H=3)
    truth = decode_paged(**problem)
    for name, axes in (("q", 3), ("kv_cache", 2)):
        for axis in range(axes):
            spread = np.repeat(problem[name], 3, axis=axis)
            view = spread[tuple(slice(None, None, 3 if a == axis else 1) for a in range(spread.ndim))]
            spread[tuple(slice(1, None, 3) if a == axis else slice(None) for a in range(spread.ndim))] = np.nan
            assert view.strides != problem[name].strides
            assert agree(decode_paged(**problem | {name: view}), truth)


def test_a_broadcast_axis_may_have_stride_zero():
    problem = paged(7, [9, 4], T=2, H=3)
    shared = np.broadcast_to(problem["q"][:, :1, :1], problem["q"].shape)
    assert shared.strides[1:3] == (0, 0)
    assert agree(decode_paged(**problem | {"q": shared}), decode_paged(**problem | {"q": shared.copy()}))


def test_a_row_of_one_element_may_have_any_innermost_stride():
    problem = paged(8, [9, 4], D=1, V=1)
    odd = as_strided(problem["kv_cache"], strides=(*problem["kv_cache"].strides[:2], 12345))
    assert agree(decode_paged(**problem | {"kv_cache": odd}), decode_paged(**problem))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attend", [attend_naive, attend_absorbed])
def test_a_dense_problem_may_lie_in_any_strides(attend, layout):
    problem = dense(9, t_q=3, t_kv=7, H=4)
    moved = {name: layout(x) if name != "geometry" else x for name, x in problem.items()}
    assert same(attend(**moved), attend(**problem))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_to_merge_may_lie_in_any_strides(layout):
    rng = np.random.default_rng(10)
    out, lse = rng.standard_normal((3, 2, 5, 4)).astype(np.float32), rng.standard_normal((3, 2, 5)).astype(np.float32)
    assert agree(merge_states(layout(out), layout(lse)), merge_states(out, lse))


@pytest.mark.parametrize("causal", [True, False])
def test_a_query_without_token_axis_is_one_token(causal):
    problem = paged(11, [5, 0, 12])
    three = decode_paged(**problem, causal=causal)
    four = decode_paged(**problem | {"q": problem["q"][:, None]}, causal=causal)
    assert three.out.shape == (3, 2, 4) and four.out.shape == (3, 1, 2, 4)
    assert same(three.out, four.out[:, 0]) and same(three.lse, four.lse[:, 0])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("T", [None, 3])
def test_what_no_request_reads_may_hold_nan(T, dtype):
    lens = [0, 1, 3, 4, 5, 8, 0, 17]
    poisoned, zeroed = (paged(12, lens, T=T, dtype=dtype, unread=unread) for unread in (np.nan, 0))
    for precision in ("f32", "f64"):
        assert agree(decode_paged(**poisoned, precision=precision), decode_paged(**zeroed, precision=precision))


def test_a_query_does_not_read_the_tokens_after_it():
    problem = paged(13, [7], T=3, block=2)
    truth = decode_paged(**problem)
    cache = problem["kv_cache"].copy()
    cache[problem["block_table"][0, 6 // 2], 6 % 2] = np.nan
    out, lse = decode_paged(**problem | {"kv_cache": cache})
    assert same(out[:, :2], truth.out[:, :2]) and same(lse[:, :2], truth.lse[:, :2]) and np.isnan(out[:, 2]).all()


def test_table_entries_past_a_length_may_hold_anything():
    problem = paged(14, [0, 5, 12])
    unused = np.arange(3) >= -(-problem["seq_lens"] // 4)[:, None]
    truth = decode_paged(**problem)
    for anything in (-1, -(2**31), 2**31 - 1, 0):
        assert agree(
            decode_paged(**problem | {"block_table": np.where(unused, np.int32(anything), problem["block_table"])}),
            truth,
        )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_pages_at_huge_ids_and_strides_give_the_bits_of_pages_side_by_side(dtype):
    recipe = f"paged:heads=2,row=24,value=16,lens=0+1+16+17+40,block=16,tokens=2,scale=0.25,dtype={dtype},seed=5"
    case, near = generate(f"{recipe},pages=huge"), generate(recipe)
    assert int(case.block_table[1, 0]) * case.block_stride > 2**32
    cache = sparse_cache(case)
    assert cache.shape[0] == case.num_blocks and cache.strides[0] == case.block_stride
    how = {"softmax_scale": case.softmax_scale, "head_dim_v": case.head_dim_v}
    far = decode_paged(case.q, cache, case.block_table, case.seq_lens, **how)
    assert agree(far, decode_paged(case.q, case.kv_cache, dense_table(case), case.seq_lens, **how))
    assert agree(far, decode_paged(near.q, near.kv_cache, near.block_table, near.seq_lens, **how))
    results = expected(case, precision="f32")
    assert same(results["out"], far.out) and same(results["lse"], far.lse)


def test_append_kv_reaches_a_page_beyond_4_gib():
    case = generate("paged:heads=1,row=24,value=16,lens=40,block=16,scale=0.25,pages=huge")
    cache = sparse_cache(case)
    block = int(case.page_ids[-1])
    append_kv(cache, np.ones((1, 16), np.float32), np.full((1, 8), 2, np.float32), np.array([block * 16 + 3]))
    assert cache[block, 3].tolist() == [1] * 16 + [2] * 8


@pytest.mark.parametrize("shape", [{"B": 0}, {"T": 0}, {"H": 0}, {"num_blocks": 0}, {"max_blocks": 0}])
def test_empty_axes_give_empty_results_or_empty_rows(shape):
    size = {"B": 2, "T": 3, "H": 4, "num_blocks": 5, "max_blocks": 1} | shape
    for dtype, precision in itertools.product(DTYPES, ["f32", "f64"]):
        if (dtype, precision) == ("f64", "f32"):
            continue
        out, lse = decode_paged(
            np.ones((size["B"], size["T"], size["H"], 6), DTYPES[dtype]),
            np.ones((size["num_blocks"], 2, 6), DTYPES[dtype]),
            np.zeros((size["B"], size["max_blocks"]), np.int32),
            np.zeros(size["B"], np.int32),
            softmax_scale=1.0,
            head_dim_v=4,
            precision=precision,
        )
        assert out.shape == (size["B"], size["T"], size["H"], 4) and lse.shape == out.shape[:3]
        assert not out.any() and np.all(lse == -np.inf)


def test_dense_forms_without_queries_give_an_empty_result():
    for attend, t_kv in itertools.product((attend_naive, attend_absorbed), (0, 3)):
        assert attend(**dense(15, t_q=0, t_kv=t_kv)).shape == (0, 2, 4)
