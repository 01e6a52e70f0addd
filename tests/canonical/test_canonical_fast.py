# SPDX-License-Identifier: Apache-2.0
"""The canonical problem on the fast tier against strict f64, every option and every packed format, on every build.

The bound is that of mla_oracle.fast.paged, over the numbers the rows stand for, and 3 eps for what is done to the sums.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import mla_oracle
from mla_oracle import canonical, formats
from mla_oracle.cases import PagedCase
from mla_oracle.errors import UnsupportedError
from mla_oracle.fast import isa

EPS = {"f32": 2.0**-23, "f64": 2.0**-52}
BF16 = ml_dtypes.bfloat16


@pytest.fixture(params=isa.available())
def build(request):
    return request.param


def make(D=48, V=32, T=2, H=5, lens=(70, 0, 33), block=16, dtype=np.float32, seed=0, **options):
    """A case by position; NaN in rows that no request owns."""
    rng = np.random.default_rng(seed)
    lens = np.array(lens, np.int32)
    used = -(-lens // block)
    order = rng.permutation(int(used.sum()) + 2)
    table = np.full((len(lens), int(used.max()) + 1), 2**31 - 1, np.int32)
    held = np.zeros((len(order), block), bool)
    starts = np.concatenate([[0], used.cumsum()])
    for b, n in enumerate(lens):
        table[b, : used[b]] = order[starts[b] : starts[b + 1]]
        held[table[b, np.arange(n) // block], np.arange(n) % block] = True
    rows = np.where(held[..., None], rng.standard_normal((*held.shape, D)), np.nan)
    fields = {
        "q": rng.standard_normal((len(lens), T, H, D)).astype(dtype),
        "kv_cache": rows.astype(dtype),
        "block_table": table,
        "seq_lens": lens,
        "softmax_scale": 0.2,
        "head_dim_v": V,
        "causal": False,
    }
    return PagedCase(**(fields | options))


def packed(case, name, reader=None, **scales):
    """The case with its rows stored in a format; rows nobody owns are any bytes."""
    rows = np.asarray(case.kv_cache, np.float32)
    free = np.isnan(rows).all(-1)
    tensors = formats.quantize(name, np.where(free[..., None], np.float32(1), rows), **scales)
    return dataclasses.replace(case, cache_format=name, cache_reader=reader, **tensors)


def assert_right(case, build, precision="f32"):
    """(out, lse) of the fast tier within its bound of strict f64."""
    got = canonical.attend(case, precision=precision, backend="fast", isa=build, threads=2)
    truth = canonical.attend(case, precision="f64", backend="strict")
    problem = canonical.checked(case, "f64")
    seen = list(problem.seen)
    eps, tiny = EPS[precision], 2.0**-126 if precision == "f32" else 2.0**-1022
    (N, H, D), V = problem.q.shape, case.head_dim_v
    out, lse = np.zeros((N, H, V)), np.zeros((N, H))
    group, n = H // problem.main.heads, 0
    for one in seen:
        rows, keys = canonical.gather(problem, one)
        for t in range(len(one.starts) - 1):
            mine = keys[one.starts[t] : one.starts[t + 1]]
            for h in range(H if len(mine) else 0):
                k, q = rows[h // group][mine], problem.q[n, h]
                v = np.abs(k[:, problem.value])
                score = k @ q * problem.scale
                p = np.exp(score - score.max())
                size = (np.abs(k) @ np.abs(q)).max() * problem.scale
                tiles = 2 * D * tiny * (np.abs(q).max() + 2 * np.abs(k).max() + 8) * problem.scale
                relative = eps * ((D + 6) * size + 2 * len(mine) + 35) + tiles
                share = 1.0 if precision == "f64" else 1 + 2.0**-18 / relative
                out[n, h] = relative * share * (p @ v) / p.sum() + len(mine) * tiny * (v.max() + 6)
                lse[n, h] = relative + eps * (np.abs(score).max() + np.log(len(mine)) + np.abs(np.nan_to_num(problem.sinks[h], neginf=0)))
            n += 1
    out = out.reshape(truth.out.shape) * abs(problem.output_scale)
    lse = lse.reshape(case.q.shape[:-1]) * problem.lse_unit
    lse = lse.swapaxes(1, 2) if case.lse_axes == "BHT" else lse
    with np.errstate(invalid="ignore"):
        for name, a, b, allowed in (("out", got.out, truth.out, out), ("lse", got.lse, truth.lse, lse)):
            good = (np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))
            assert good.all(), (name, np.argwhere(~good)[0], a[~good][0], b[~good][0], allowed[~good][0])
    return got


def topk(case, K, seed=1):
    rng = np.random.default_rng(seed)
    B, T = case.q.shape[:2]
    indices = np.full((B, T, K), -1, np.int32)
    for b, t in np.ndindex(B, T):
        n = min(K, int(case.seq_lens[b]))
        indices[b, t, :n] = rng.permutation(int(case.seq_lens[b]))[:n]
        indices[b, t, rng.random(K) < 0.3] = -1
    return indices


OPTIONS = {
    "selection": lambda case: {"topk_indices": topk(case, 40)},
    "lengths": lambda case: {"topk_indices": topk(case, 40), "topk_length": np.array([40, 3, 17], np.int32)},
    "window": lambda case: {"window_left": 9, "window_first": 3, "causal": True},
    "sinks": lambda case: {"sinks": np.array([0, -np.inf, 80, -80, 3], np.float32)},
    "sinks in lse": lambda case: {"sinks": np.arange(5, dtype=np.float32), "sinks_in_lse": True, "lse_base": "2"},
    "rope first": lambda case: {"value_offset": 16},
    "last columns": lambda case: {"value_offset": 13},
    "mask": lambda case: {"bias": np.where(np.arange(140).reshape(1, 2, 70) % 3, 0, -np.inf).astype(np.float32).repeat(3, 0)},
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


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla", "model1"])
def test_a_second_cache_of_a_format(name, build):
    D = formats.get(name).width or 96
    case = packed(make(D=D, V=64, H=3, lens=(40, 0, 21)), name)
    other = packed(make(D=D, V=64, H=3, lens=(9, 20, 3), block=4, seed=3), name)
    extra = {
        "topk_indices": topk(case, 30),
        "extra_kv_cache": other.kv_cache,
        "extra_block_table": other.block_table,
        "extra_seq_lens": other.seq_lens,
        "extra_topk_indices": topk(other, 8),
    }
    if other.kv_scale is not None:
        extra["extra_kv_scale"] = other.kv_scale
    assert_right(dataclasses.replace(case, **extra), build)


@pytest.mark.parametrize(("name", "reader"), [pair for pair in FORMATS if pair[1] != "fold"])
def test_packed_rows_are_read_to_the_bit(name, reader, build):
    """One key: out is its value. Every byte of a row is any byte, NaN and infinity among them."""
    from mla_oracle import packings

    D = formats.get(name).width or 96
    case = packed(make(D=D, V=D, H=1, T=1, lens=(40, 33), block=7), name, reader)
    rng = np.random.default_rng(5)
    if name != "fp8_e4m3" or reader != "bf16":
        noise = rng.integers(0, 256, case.kv_cache.shape, np.uint8)
        case.kv_cache.view(np.uint8)[...] = noise
    problem = canonical.checked(case, "f32")
    places = packings.places_of(problem.main, 0)
    if places is None:
        pytest.skip("a reader that the fast tier leaves to formats.read")
    for b, t in ((0, 3), (0, 39), (1, 20)):
        one = dataclasses.replace(case, topk_indices=np.full((2, 1, 1), -1, np.int32))
        one.topk_indices[b] = t
        seen = list(canonical.checked(one, "f32").seen)
        row = problem.main.read(seen[b].slot)[0, 0]
        got = canonical.attend(dataclasses.replace(one, q=np.zeros_like(case.q)), precision="f32", backend="fast", isa=build)
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


def test_what_the_fast_tier_does_not_compute_is_refused_by_name_and_left_to_strict_by_auto():
    case = make()
    for option, value in (("softcap", 3.0), ("bias", np.ones((3, 2, 70), np.float32))):
        other = dataclasses.replace(case, **{option: value})
        with pytest.raises(UnsupportedError, match=f"^{option} is not supported by backend 'fast'$"):
            canonical.attend(other, backend="fast")
        auto, strict = (canonical.attend(other, backend=backend) for backend in ("auto", "strict"))
        assert auto.out.tobytes() == strict.out.tobytes()


def test_decode_takes_a_backend_and_a_build(build):
    case = make()
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    given = ("q", "kv_cache", "block_table", "seq_lens", "softmax_scale", "head_dim_v", "causal")
    got = mla_oracle.decode(**{name: fields[name] for name in given}, window_left=5, backend="fast", isa=build)
    expected = canonical.attend(dataclasses.replace(case, window_left=5), precision="f32", backend="fast", isa=build)
    assert got.out.tobytes() == expected.out.tobytes()
