# SPDX-License-Identifier: Apache-2.0
"""The canonical problem on the fast tier against strict f64, every option and every packed format, on every build."""

import dataclasses

import numpy as np
import pytest
from canonical_cases import BF16, assert_right, make, packed, topk

import mla_oracle
from mla_oracle import canonical, formats
from mla_oracle.canonical import listed, packings
from mla_oracle.fast import isa


@pytest.fixture(params=isa.available())
def build(request):
    return request.param


OPTIONS = {
    "selection": lambda case: {"topk_indices": topk(case, 40)},
    "lengths": lambda case: {"topk_indices": topk(case, 40), "topk_length": np.array([40, 3, 17], np.int32)},
    "window": lambda case: {"window_left": 9, "window_first": 3, "causal": True},
    "sinks": lambda case: {"sinks": np.array([0, -np.inf, 80, -80, 3], np.float32)},
    "sinks in lse": lambda case: {"sinks": np.arange(5, dtype=np.float32), "sinks_in_lse": True, "lse_base": "2"},
    "rope first": lambda case: {"value_offset": 16},
    "last columns": lambda case: {"value_offset": 13},
    "mask": lambda case: {
        "bias": np.where(np.arange(140).reshape(1, 2, 70) % 3, 0, -np.inf).astype(np.float32).repeat(3, 0),
    },
    "other axes": lambda case: {"lse_axes": "BHT", "empty_lse": np.inf},
    "scales": lambda case: {"q_scale": 0.5, "output_scale": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, dtype, build):
    case = make(dtype=dtype)
    assert_right(dataclasses.replace(case, **OPTIONS[option](case)), build)


def test_f64(build):
    case = make(dtype=np.float64)
    assert_right(dataclasses.replace(case, topk_indices=topk(case, 40)), build, "f64")


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_split_storage_and_ragged_queries_and_several_kv_heads(dtype, build):
    case = make(dtype=dtype, H=6)
    split = {"kv_cache": case.kv_cache[..., :32], "kpe_cache": case.kv_cache[..., 32:]}
    assert_right(dataclasses.replace(case, **split), build)
    ragged = {"q": case.q.reshape(6, 6, 48), "qo_indptr": np.array([0, 4, 4, 6], np.int32)}
    assert_right(dataclasses.replace(case, **ragged), build)
    many = case.kv_cache[:, :, None] * np.array([1, -2, 0.5])[:, None]
    assert_right(dataclasses.replace(case, kv_cache=many.astype(dtype), window_left=20), build)


@pytest.mark.parametrize("column", [3, 40, 47])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_an_infinity_in_either_part_of_split_rows_is_what_it_is_in_strict_f64(dtype, column, build):
    case = make(dtype=dtype)
    cache = case.kv_cache.copy()
    cache[:, ::5, column] = -np.inf
    whole = dataclasses.replace(case, kv_cache=cache, topk_indices=topk(case, 40))
    split = dataclasses.replace(whole, kv_cache=cache[..., :32], kpe_cache=cache[..., 32:])
    truth = canonical.attend(whole, precision="f64", backend="strict")
    assert np.isnan(truth.lse).any() and np.isfinite(truth.lse).any()
    for one in (whole, split):
        found = canonical.attend(one, precision="f32", backend="fast", isa=build)
        np.testing.assert_allclose(found.out, truth.out, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found.lse, truth.lse, rtol=1e-5, atol=1e-5)


def test_a_second_cache(build):
    case, other = make(dtype=BF16), make(block=4, lens=(9, 20, 3), dtype=BF16, seed=3)
    extra = {
        "topk_indices": topk(case, 30),
        "extra_kv_cache": other.kv_cache,
        "extra_block_table": other.block_table,
        "extra_seq_lens": other.seq_lens,
        "extra_topk_indices": topk(other, 8),
    }
    assert_right(dataclasses.replace(case, **extra), build)


FORMATS = [
    (name, reader)
    for name in formats.NAMES
    for reader in formats.get(name).readers
]  # fmt: skip


@pytest.mark.parametrize(("name", "reader"), FORMATS)
def test_every_format_and_reader(name, reader, build):
    D = formats.get(name).width or 96
    case = packed(make(D=D, V=64 if D == 96 else 448, H=3, lens=(40, 0, 21)), name, reader)
    assert_right(dataclasses.replace(case, topk_indices=topk(case, 30)), build)


PAIRS = [
    ("fp8_e4m3", "fp8_e4m3"), ("fp8_ds_mla", "fp8_ds_mla"), ("model1", "model1"), ("v4.1", "v4.1_fp4"),
    ("flashinfer_fp8", "nvfp4_sglang"), ("q6_0", "q8_0"), ("q8_KV", "q6_0"), ("q6_0", "q6_0"), ("aiter_v4", "model1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "second"), PAIRS)
def test_a_second_cache_of_a_format(name, second, build):
    D = formats.get(name).width or 96
    case = packed(make(D=D, V=64, H=3, lens=(40, 0, 21)), name)
    other = packed(make(D=D, V=64, H=3, lens=(9, 20, 3), block=4, seed=3), second)
    extra = {
        "topk_indices": topk(case, 30),
        "extra_kv_cache": other.kv_cache,
        "extra_block_table": other.block_table,
        "extra_seq_lens": other.seq_lens,
        "extra_topk_indices": topk(other, 8),
    }
    if second != name:
        extra["extra_cache_format"] = second
    if other.kv_scale is not None:
        extra["extra_kv_scale"] = other.kv_scale
    assert_right(dataclasses.replace(case, **extra), build)


@pytest.mark.parametrize("name", [n for n in formats.NAMES if not formats.get(n).tensors and n != "q6_0"])
def test_two_caches_of_one_format_are_read_as_they_are_used(name):
    case = packed(make(D=formats.get(name).width or 96, V=64, lens=(9,)), name)
    other = packed(make(D=formats.get(name).width or 96, V=64, lens=(20,), block=4), name)
    tables = {f"extra_{n}": getattr(other, n) for n in ("kv_cache", "block_table", "seq_lens")}
    case = dataclasses.replace(case, extra_topk_indices=topk(other, 8), **tables)
    assert listed.rows_of(canonical.checked(case, "f32"), 0)[0].places.packing is not None


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_a_second_cache_has_a_scale_of_its_own(scale, build):
    case = packed(make(D=96, V=64, lens=(9,)), "fp8_e4m3")
    shared = {"extra_block_table": case.block_table, "extra_seq_lens": case.seq_lens, "extra_kv_cache": case.kv_cache}
    own = case.kv_scale * np.float32(scale)
    case = dataclasses.replace(case, extra_topk_indices=topk(case, 8), extra_kv_scale=own, **shared)
    found = listed.rows_of(canonical.checked(case, "f32"), 0)
    assert len(found) == (1 if scale == 1 else 2) and all(rows.places.packing is not None for rows in found)
    assert_right(case, build)


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("second", ["fp8_e4m3", "q6_0"])
@pytest.mark.parametrize("scored", [False, True])
def test_a_second_cache_beside_dense_rows_and_tokens_that_see_both_or_one_or_none(scored, second, precision, build):
    case, other = (make(D=96, V=64, H=3, lens=(9, 20, 3), block=4, seed=seed) for seed in (1, 2))
    other = packed(other, second)
    wanted, more = topk(case, 5), topk(other, 4)
    wanted[0, 0], more[1, 0], wanted[2], more[2] = -1, -1, -1, -1
    extra = {f"extra_{n}": getattr(other, n) for n in ("kv_cache", "block_table", "seq_lens", "kv_scale")}
    lists = {"topk_indices": wanted, "extra_topk_indices": more, "sinks": np.array([0, 2, -np.inf], np.float32)}
    case = dataclasses.replace(case, extra_cache_format=second, **lists, **extra)
    if scored:
        bias = np.random.default_rng(3).standard_normal((*case.q.shape[:3], 20)).astype(np.float32)
        bias[bias < -1] = -np.inf
        case = dataclasses.replace(case, softcap=3.0, bias=bias)
    assert_right(case, build, precision)
    assert len(listed.rows_of(canonical.checked(case, precision), 0)) == 2


@pytest.mark.parametrize("reader", ["exponent", "e8m0_rz"])
def test_scales_taken_for_powers_of_two_are_read_to_the_bit_beyond_all_numbers_too(reader, build):
    case = packed(make(D=576, V=512, H=1, T=1, lens=(2,), block=7), "fp8_ds_mla", reader)
    row = case.kv_cache.view(np.uint8)[case.block_table[0, 0], 0]
    row[:512] = 0x38
    case = dataclasses.replace(case, topk_indices=np.zeros((1, 1, 1), np.int32), q=np.zeros_like(case.q))
    for *scales, powers in ((np.inf, 1e-40, 0.75, -3, (0.5, 2)), (-np.inf, 0, 2.0**127, 1, (2.0**127, 1))):
        row[512:528] = np.array(scales, np.float32).view(np.uint8)
        least = 0 if build == "amx" else 2.0**-127  # whose tiles take what is below the normal range for 0
        wanted = np.repeat([2.0**127, least, *powers], 128)
        if reader == "exponent":  # the key is NaN then, and with it all that it is weighed by
            wanted[:] = np.nan
        got = canonical.attend(case, precision="f32", backend="fast", isa=build)
        np.testing.assert_array_equal(got.out[0, 0, 0], wanted.astype(np.float32))


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("reader", formats.get("fp8_e4m3").readers)
@pytest.mark.parametrize("rope", [None, "one", "split", "tokens"])
@pytest.mark.parametrize("tokens", [False, True])
def test_per_tensor_rows_with_every_kind_of_scale(tokens, rope, reader, precision, build):
    case = packed(make(D=96, V=64, H=3, lens=(40, 0, 21)), "fp8_e4m3", reader)
    rng, shape = np.random.default_rng(4), case.kv_cache.shape[:2]
    scales = {"kv_scale": rng.uniform(0.1, 2, shape if tokens else (1,)).astype(np.float32)}
    if rope == "split":
        scales |= {"kv_cache": case.kv_cache[..., :64], "kpe_cache": case.kv_cache[..., 64:].copy()}
    if rope:
        scales["kpe_scale"] = rng.uniform(0.1, 2, shape if rope == "tokens" else (1,)).astype(np.float32)
    case = dataclasses.replace(case, topk_indices=topk(case, 30), **scales)
    assert_right(case, build, precision)
    fused = packings.places_of(canonical.checked(case, precision).main, 0) is not None
    several = tokens or rope is not None
    other = rope == "tokens" or (tokens and (rope == "split" or reader == "f32_f16"))
    assert fused == (not other and not (several and reader == "fold" and precision == "f64"))


# Readers whose rows are first made numbers by formats.read: the six bits lie in two places.
READ_AS_NUMBERS = {("q6_0", "f32")}


def places(name, reader):
    case = packed(make(D=formats.get(name).width or 96, V=64, H=1, T=1, lens=(9,), block=7), name, reader)
    return packings.places_of(canonical.checked(case, "f32").main, 0)


def test_all_other_readers_are_the_fast_tiers_own():
    assert {pair for pair in FORMATS if pair[1] != "fold" and places(*pair) is None} == READ_AS_NUMBERS


@pytest.mark.parametrize("any_byte", [False, True])
@pytest.mark.parametrize(
    ("name", "reader"), [pair for pair in FORMATS if pair[1] != "fold" and pair not in READ_AS_NUMBERS]
)
def test_packed_rows_are_read_to_the_bit(name, reader, any_byte, build):
    """One key: out is its value, as it was written; or of any bytes, most of whose rows hold a NaN."""
    D = formats.get(name).width or 96
    case = packed(make(D=D, V=D, H=1, T=1, lens=(40, 33), block=7), name, reader)
    if any_byte:
        case.kv_cache.view(np.uint8)[...] = np.random.default_rng(5).integers(0, 256, case.kv_cache.shape, np.uint8)
    problem = canonical.checked(case, "f32")
    for b, t in ((0, 3), (0, 39), (1, 20)):
        one = dataclasses.replace(case, topk_indices=np.full((2, 1, 1), -1, np.int32))
        one.topk_indices[b] = t
        seen = list(canonical.checked(one, "f32").seen)
        row = problem.main.read(seen[b].slot)[0, 0]
        flat = dataclasses.replace(one, q=np.zeros_like(case.q))
        got = canonical.attend(flat, precision="f32", backend="fast", isa=build)
        assert any_byte or (np.isfinite(row).all() and row.any())
        if np.isfinite(row).all():
            assert (got.out[b, 0, 0] == row).all()
        else:
            assert np.isnan(got.out[b, 0, 0]).all()


def test_the_same_bits_for_any_threads_alone_or_in_a_batch_and_in_any_pages(build):
    case = packed(make(D=576, V=512, H=16, lens=(300, 0, 400)), "fp8_ds_mla")
    case = dataclasses.replace(case, topk_indices=topk(case, 256))
    whole = canonical.attend(case, precision="f32", backend="fast", isa=build)
    for threads in (1, 2, 3):
        again = canonical.attend(case, precision="f32", backend="fast", isa=build, threads=threads)
        assert again.out.tobytes() == whole.out.tobytes() and again.lse.tobytes() == whole.lse.tobytes()
    part = {name: getattr(case, name)[2:] for name in ("q", "block_table", "seq_lens", "topk_indices")}
    alone = canonical.attend(dataclasses.replace(case, **part), precision="f32", backend="fast", isa=build)
    assert alone.out.tobytes() == whole.out[2:].tobytes()


def test_decode_takes_a_backend_and_a_build(build):
    case = make()
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    given = ("q", "kv_cache", "block_table", "seq_lens", "softmax_scale", "head_dim_v", "causal")
    got = mla_oracle.decode(**{name: fields[name] for name in given}, window_left=5, backend="fast", isa=build)
    expected = canonical.attend(dataclasses.replace(case, window_left=5), precision="f32", backend="fast", isa=build)
    assert got.out.tobytes() == expected.out.tobytes()
