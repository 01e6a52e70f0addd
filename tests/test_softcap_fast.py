# SPDX-License-Identifier: Apache-2.0
"""Softcap and bias on the fast tier against strict f64, on every build: far ends, infinite rows, the same bits."""

import dataclasses

import numpy as np
import pytest
from canonical_cases import BF16, assert_right, make, packed, topk

from mla_oracle import backends, canonical, formats
from mla_oracle.canonical import listed
from mla_oracle.canonical.biases import listed_bias
from mla_oracle.fast import isa


@pytest.fixture(params=isa.available())
def build(request):
    return request.param


def bias(case, size=1.0, heads=None, skipped=0.3, seed=2):
    """[B,T,n] or [B,T,H,n]: normal numbers of this size, some -inf; all of request 0's for head 1."""
    B, T, H = case.q.shape[:3]
    rng, n = np.random.default_rng(seed), int(case.seq_lens.max())
    found = size * rng.standard_normal((B, T, *([H] if heads else []), n))
    found[rng.random(found.shape) < skipped] = -np.inf
    if heads:
        found[0, :, 1] = -np.inf
    return found.astype(np.float32)


def both(case, heads=True):
    return {"softcap": 1.5, "bias": bias(case, heads=heads)}


OPTIONS = {
    "softcap": lambda case: {"softcap": 1.5},
    "bias": lambda case: {"bias": bias(case)},
    "bias by head": lambda case: {"bias": bias(case, heads=True)},
    "bias in few bits": lambda case: {"bias": bias(case, heads=True).astype(BF16)},
    "both": both,
    "selection": lambda case: {"topk_indices": topk(case, 40), **both(case)},
    "window": lambda case: {"window_left": 9, "window_first": 3, "causal": True, **both(case)},
    "sinks": lambda case: {"sinks": np.array([0, -np.inf, 80, -80, 3], np.float32), "sinks_in_lse": True, **both(case)},
    "other conventions": lambda case: {
        "value_offset": 13, "lse_axes": "BHT", "lse_base": "2", "empty_lse": np.inf, "output_scale": 3.0,
        **both(case, heads=False),
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, dtype, build):
    case = make(dtype=dtype)
    assert_right(dataclasses.replace(case, **OPTIONS[option](case)), build)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_f64(option, build):
    case = make(dtype=np.float64)
    assert_right(dataclasses.replace(case, **OPTIONS[option](case)), build, "f64")


@pytest.mark.parametrize("H", [16, 33, 130])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_many_heads_and_keys(H, dtype, build):
    case = make(dtype=dtype, H=H, T=1, lens=(1100, 0, 129))
    assert_right(dataclasses.replace(case, **both(case)), build)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla", "model1", "nvfp4_ds_mla", "q8_0"])
def test_packed_rows(name, build):
    case = packed(make(D=formats.get(name).width or 96, V=64, H=5, lens=(40, 0, 21)), name)
    assert_right(dataclasses.replace(case, topk_indices=topk(case, 30), **both(case)), build)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_second_cache_has_no_bias_and_kv_heads_have_their_own(dtype, build):
    case, other = make(dtype=dtype), make(block=4, lens=(9, 20, 3), dtype=dtype, seed=3)
    tables = {f"extra_{n}": getattr(other, n) for n in ("kv_cache", "block_table", "seq_lens")}
    extra = {"topk_indices": topk(case, 30), "extra_topk_indices": topk(other, 8), **tables}
    assert_right(dataclasses.replace(case, **extra, **both(case)), build)
    case = make(dtype=dtype, H=6)
    many = (case.kv_cache[:, :, None] * np.array([1, -2, 0.5])[:, None]).astype(dtype)
    assert_right(dataclasses.replace(case, kv_cache=many, **both(case)), build)


AMPLITUDES = {"tiny": (1e-12, 1e-12), "normal": (1.0, 1.0), "large": (60.0, 20.0), "huge": (1e18, 1e18)}


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("amplitude", [*AMPLITUDES, "mixed"])
@pytest.mark.parametrize("softcap", [None, 1e-3, 30.0, 1e6])
def test_far_ends(softcap, amplitude, precision, build):
    """Scores from 1e-24 to 1e37, biases of 1e4 and 1e-4, for all heads and for some, and without one."""
    of_q, of_keys = AMPLITUDES.get(amplitude, (1.0, 1.0))
    for dtype in (np.float32, BF16) if precision == "f32" else (np.float64,):
        case = make(dtype=np.float64, T=1, H=3, lens=(20, 0, 7))
        rows = case.kv_cache * of_keys
        if amplitude == "mixed":
            rows *= 10.0 ** np.random.default_rng(7).integers(-30, 18, rows.shape[:2])[..., None]
        case = dataclasses.replace(case, q=(case.q * of_q).astype(dtype), kv_cache=rows.astype(dtype), softcap=softcap)
        for size, heads in ((0.0, True), (1e4, False), (1e4, True), (1e-4, True)):
            assert_right(dataclasses.replace(case, bias=bias(case, size, heads)), build, precision)
        if softcap is not None:
            assert_right(case, build, precision)


def test_the_bound_of_capped_scores_notices_another_softcap(build):
    case = dataclasses.replace(make(dtype=BF16), softcap=1.0)
    with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
        attend = listed.attend
        patch.setattr(listed, "attend", lambda p, **how: attend(dataclasses.replace(p, softcap=1.002), **how))
        assert_right(case, build)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("H", [5, 16])
def test_a_row_that_some_heads_skip_does_not_touch_them(H, dtype, build):
    case = make(dtype=dtype, H=H)
    skipping = bias(case, heads=True)
    skipping[2, :, 3:, 7] = -np.inf
    skipping[2, :, :3, 7] = 0
    block, offset = case.block_table[2, 0], 7
    for softcap in (None, 1.5):
        clean = dataclasses.replace(case, bias=skipping, softcap=softcap)
        expected = canonical.attend(clean, precision="f32", backend="fast", isa=build)
        for poison in (np.nan, np.inf, -np.inf):
            rows = case.kv_cache.copy()
            rows[block, offset, 5] = poison
            poisoned = dataclasses.replace(clean, kv_cache=rows)
            got = canonical.attend(poisoned, precision="f32", backend="fast", isa=build)
            assert (got.out[2, :, 3:] == expected.out[2, :, 3:]).all()
            assert (got.lse[2, :, 3:] == expected.lse[2, :, 3:]).all()
            assert not np.isfinite(got.out[2, :, :3, 5]).all()


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_an_infinity_under_a_softcap_is_what_it_is_in_strict_f64(dtype, build):
    case = make(dtype=dtype)
    for column in (5, 40):  # of a value, and beyond it
        rows = case.kv_cache.copy()
        rows[case.block_table[0, 2], 3, column] = -np.inf
        rows[case.block_table[2, 0], 2, column] = np.inf
        for more in ({}, {"bias": bias(case, heads=True)}):
            one = dataclasses.replace(case, kv_cache=rows, softcap=1.5, **more)
            got = canonical.attend(one, precision="f32", backend="fast", isa=build)
            true = canonical.attend(one, precision="f64", backend="strict")
            assert np.isfinite(true.out).all() == (column == 40)
            np.testing.assert_allclose(got.out, true.out, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(got.lse, true.lse, rtol=1e-4)


@pytest.mark.parametrize("name", [None, "fp8_ds_mla"])
def test_the_same_bits_for_any_threads_and_alone_or_in_a_batch(name, build):
    case = make(D=576, V=512, H=16, lens=(2300, 0, 400), dtype=BF16)
    case = dataclasses.replace(packed(case, name) if name else case, **both(case))
    whole = canonical.attend(case, precision="f32", backend="fast", isa=build)
    for threads in (1, 2, 3):
        again = canonical.attend(case, precision="f32", backend="fast", isa=build, threads=threads)
        assert again.out.tobytes() == whole.out.tobytes() and again.lse.tobytes() == whole.lse.tobytes()
    part = {name: getattr(case, name)[2:] for name in ("q", "block_table", "seq_lens", "bias")}
    alone = canonical.attend(dataclasses.replace(case, **part), precision="f32", backend="fast", isa=build)
    assert alone.out.tobytes() == whole.out[2:].tobytes() and alone.lse.tobytes() == whole.lse[2:].tobytes()


def test_a_bias_of_zeros_is_none(build):
    case = make(dtype=BF16)
    plain = canonical.attend(dataclasses.replace(case, window_left=90), precision="f32", backend="fast", isa=build)
    none = dataclasses.replace(case, bias=np.zeros((3, 2, 5, 70), np.float32))
    problem = canonical.checked(none, "f32")
    (rows,) = listed.rows_of(problem, 0)
    assert listed_bias(problem, slice(0, 5), rows.keys) is None
    assert canonical.attend(none, precision="f32", backend="fast", isa=build).out.tobytes() == plain.out.tobytes()


def test_auto_leaves_large_ones_to_the_fast_tier(monkeypatch):
    case = make()
    case = dataclasses.replace(case, **both(case))
    fast, strict = (canonical.attend(case, precision="f32", backend=used).out.tobytes() for used in ("fast", "strict"))
    assert canonical.attend(case, precision="f32").out.tobytes() == strict != fast
    monkeypatch.setattr(backends, "LARGE", 1)
    assert canonical.attend(case, precision="f32").out.tobytes() == fast
