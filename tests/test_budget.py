# SPDX-License-Identifier: Apache-2.0
"""Budgets: honest kernels of others stay inside, wrong functions do not, and no row's budget is nothing."""

import dataclasses

import declared
import honest
import ml_dtypes
import numpy as np
import pytest

from mla_oracle import Geometry, attend_absorbed, attend_naive, decode_paged
from mla_oracle.cases import PagedCase
from mla_oracle.cases.inputs import generate
from mla_oracle.fast import isa
from mla_oracle.oracle import expected
from mla_oracle.verdict.budget import budget, budgets, emulate
from mla_oracle.verdict.numerics import resolve

FAMILIES = ("normal", "peaked", "flat", "position", "onehot", "tailed", "rising")
SHAPES = ((1, 8, 4), (2, 24, 16), (3, 72, 64), (4, 40, 33), (16, 576, 512), (2, 576, 512))  # H, D, V
LENGTHS = (1, 2, 3, 5, 17, 63, 64, 65, 100, 300, 577)
F32 = {"out": "f32", "lse": "f32"}


def units(case, results, spec=None, truth=None, **how):
    truth = truth or expected(case)
    kinds = {name: {"float32": "f32", "float64": "f64"}.get(r.dtype.name, "bf16") for name, r in results.items()}
    kinds |= {name: "f16" for name, r in results.items() if r.dtype == np.float16}
    return budget(case, resolve(spec, case, kinds), truth, **how).units(results, truth)


def worst(case, results, spec=None, truth=None):
    return {name: float(u.max(initial=0)) for name, u in units(case, results, spec, truth).items()}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("inputs", FAMILIES)
def test_honest_kernels_of_others_stay_inside(inputs: str, dtype: str) -> None:
    seed = 10 * FAMILIES.index(inputs) + ("f32", "f16", "bf16").index(dtype)
    rng = np.random.default_rng(seed)
    for _ in range(12):
        H, D, V = SHAPES[rng.integers(len(SHAPES))]
        lens = "+".join(str(n) for n in rng.choice(LENGTHS, rng.integers(1, 4)))
        scale = float(D**-0.5 * rng.choice([0.3, 1, 3]))
        case = generate(
            f"paged:heads={H},row={D},value={V},lens={lens},scale={scale!r},inputs={inputs},dtype={dtype},"
            f"seed={rng.integers(10**6)},lse_base={rng.choice(['e', '2'])},tokens={rng.integers(1, 3)}"
        )
        name, kernel, _ = declared.nothing(rng, dtype)
        out = declared.stored(rng, None, dtype)
        found = worst(case, honest.over_rows(case, kernel, out))
        assert max(found.values()) <= 1, (seed, name, out, case.id, found)


@pytest.mark.parametrize("build", ["strict", *isa.available()])
@pytest.mark.parametrize("inputs", FAMILIES)
def test_our_own_backends_stay_inside(build: str, inputs: str) -> None:
    for dtype in ("bf16",) if "amx" in build else ("f32", "bf16"):
        case = generate(
            f"paged:heads=5,row=72,value=64,lens=1+2+70+600,scale=0.12,tokens=2,inputs={inputs},dtype={dtype}"
        )
        how = {"backend": "strict"} if build == "strict" else {"backend": "fast", "isa": build}
        found = decode_paged(
            case.q, case.kv_cache, case.block_table, case.seq_lens,
            softmax_scale=case.softmax_scale, head_dim_v=64, causal=True, **how,
        )._asdict()  # fmt: skip
        for spec in (None, "strict" if build == "strict" else "fast"):
            assert max(worst(case, found, spec).values()) <= 1, (dtype, spec)


def test_accumulating_in_f16_is_honest_only_where_it_is_declared() -> None:
    case = generate("paged:heads=3,row=72,value=64,lens=900,scale=0.12,dtype=f16,inputs=position")
    found = honest.over_rows(case, honest.half_accumulator)
    assert worst(case, found)["out"] > 3
    assert worst(case, found, "llama.cpp-cpu")["out"] <= 1


def test_columns_too_small_for_the_normal_range_of_f16_are_held_to_its_smallest_step() -> None:
    """llama.cpp's CPU loop, over f16 and over f32 that it narrows; a partial result that is stored in f16."""
    for dtype, split, spec in (("f16", 1, "llama.cpp-cpu"), ("f32", 1, "llama.cpp-cpu"),
                               ("f32", 4, "partials=f16,splits=4"), ("f32", 1, "cache=f16,query=f16,p=f32")):
        case = generate(f"paged:heads=3,row=72,value=64,lens=90+300,scale=0.12,dtype={dtype}")
        cache = case.kv_cache.astype(np.float32)
        cache[..., :64:2] *= 1e-6
        case = dataclasses.replace(case, kv_cache=cache.astype(case.kv_cache.dtype))
        kernel = honest.half_accumulator
        if spec != "llama.cpp-cpu":
            kernel = honest.online(64, split=split, partials="f16" if split > 1 else "f32")
        found = honest.over_rows(case, kernel, inputs="f16" if split == 1 else None)
        assert 0.1 < worst(case, found, spec)["out"] <= 1, spec


def test_weights_of_the_fast_tier_on_amx_are_two_numbers_of_bf16() -> None:
    """Nearly equal weights: what two numbers of eight bits leave of them is all that is wrong."""
    tight = ((86, 300, 0.0354, "tailed"), (104, 20, 0.0177, "peaked"), (110, 300, 0.0354, "normal"))
    for seed, n, scale, inputs in tight:
        case = generate(f"paged:heads=1,row=8,value=4,lens={n},scale={scale},inputs={inputs},dtype=bf16,seed={seed}")
        assert 0.2 < worst(case, honest.over_rows(case, honest.online(500, "bf16x2")), "fast")["out"] < 0.8
        assert worst(case, honest.over_rows(case, honest.online(500, "tf32")), "fast")["out"] > 3


@pytest.mark.parametrize(("declared", "p"), [("p=bf16", "bf16"), ("p=f16", "f16")])
def test_rounding_the_weights_of_an_f32_cache_must_be_declared(declared: str, p: str) -> None:
    case = generate("paged:heads=4,row=72,value=64,lens=40+400,scale=0.12")
    found = honest.over_rows(case, honest.two_pass(p))
    assert worst(case, found)["out"] > 3
    assert worst(case, found, declared)["out"] <= 1


def test_weights_of_eight_bits_have_their_budget() -> None:
    case = generate("paged:heads=8,row=72,value=64,lens=9+300,scale=0.12,dtype=bf16")
    truth = expected(case)
    numerics = resolve("p=e4m3,p_scale=256", case, {"out": "bf16", "lse": "f32"})
    allowed = budget(case, numerics, truth)
    for seed in range(20):
        found = emulate(case, numerics, np.random.default_rng(seed + 1000))
        assert max(u.max() for u in allowed.units(found, truth).values()) <= 1
    assert 0.01 < allowed.allowed(truth)["out"].max() < 0.2


# --- what must be outside


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("inputs", FAMILIES)
def test_wrong_functions_are_outside(inputs: str, dtype: str) -> None:
    case = generate(f"paged:heads=16,row=576,value=512,lens=2+64+1024,scale=0.0625,inputs={inputs},dtype={dtype}")
    truth = expected(case)
    allowed = budget(case, resolve(None, case, {"out": dtype, "lse": "f32"}), truth)

    def beyond(found):
        return max(float(u.max()) for u in allowed.units(found, truth).values())

    assert beyond({"out": truth["out"] * 1.01}) > 1
    assert beyond({"out": truth["out"] * 1.05}) > 5
    if inputs not in ("flat", "position"):  # their queries are zero
        assert beyond(expected(dataclasses.replace(case, softmax_scale=0.0625 * 1.01))) > 2
    assert beyond(expected(dataclasses.replace(case, seq_lens=case.seq_lens - 1))) > 10
    short = np.maximum(case.seq_lens - 64, 1)
    assert beyond(expected(dataclasses.replace(case, seq_lens=short))) > 10


def test_a_wrong_element_shows_in_a_row_of_outliers() -> None:
    """One column a thousand times the others: a relative error of the row would not see the rest of it."""
    case = generate("paged:heads=2,row=72,value=64,lens=200,scale=0.12,dtype=bf16")
    cache = case.kv_cache.copy()
    cache[..., 7] = (cache[..., 7].astype(np.float32) * 1000).astype(cache.dtype)
    case = PagedCase(**{**case.tensors(), **case.conventions(), "kv_cache": cache, "softmax_scale": 1e-4})
    truth = expected(case)
    out = truth["out"].copy()
    out[0, 1, 30] += 0.1 * np.abs(truth["out"][0, 1, 8:]).max()
    assert np.linalg.norm(out - truth["out"]) < 1e-3 * np.linalg.norm(truth["out"][0, 1])
    assert worst(case, {"out": out.astype(ml_dtypes.bfloat16)}, truth=truth)["out"] > 1


def test_one_element_in_a_row_of_512_decides_alone() -> None:
    case = generate("paged:heads=2,row=576,value=512,lens=300,scale=0.0625,dtype=bf16")
    truth = expected(case)
    allowed = budget(case, resolve(None, case, {"out": "bf16", "lse": "f32"}), truth)
    out = truth["out"].copy()
    out[0, 1, 77] += 15 * allowed.out_scale[0, 1, 77]  # as a mean square over the row: 15 / sqrt(512) = 0.66
    found = allowed.units({"out": out}, truth)["out"]
    assert found[0, 0] == 0 and 1 < found[0, 1] < 5
    column, alone = allowed.worst_column(out, truth["out"], (0, 1))
    assert column == 77 and alone == pytest.approx(15 * allowed.out_scale[0, 1, 77] / found[0, 1])


def test_declaring_more_allows_less() -> None:
    case = generate("paged:heads=4,row=72,value=64,lens=2000,scale=0.12,dtype=bf16")
    truth = expected(case)
    free, flashmla = (
        budget(case, resolve(spec, case, {"out": "bf16", "lse": "f32"}), truth).allowed(truth)["lse"].max()
        for spec in (None, "flashmla")
    )
    assert flashmla < free / 4


# --- the edges


def test_no_budget_is_nothing_where_emulation_is_exact() -> None:
    """Equal weights of one key: every emulated kernel returns the value itself."""
    case = generate("paged:heads=2,row=8,value=4,lens=1,scale=0.25")
    truth = expected(case)
    allowed = budget(case, resolve(None, case, F32), truth)
    np.testing.assert_array_less(2.0**-25 * np.abs(truth["out"]), allowed.out_scale * 2)
    one_off = np.nextafter(truth["out"].astype(np.float32), np.float32(np.inf))
    assert allowed.units({"out": one_off}, truth)["out"].max() <= 1


def test_a_column_of_zeros_stays_one() -> None:
    case = generate("paged:heads=2,row=24,value=16,lens=40,scale=0.25,dtype=bf16")
    cache = case.kv_cache.copy()
    cache[..., 3] = 0
    case = dataclasses.replace(case, kv_cache=cache)
    truth = expected(case)
    assert (truth["out"][..., 3] == 0).all()
    allowed = budget(case, resolve(None, case, F32), truth)
    out = truth["out"].astype(np.float32)
    assert allowed.units({"out": out}, truth)["out"].max() < 0.1
    out[0, 1, 3] = 1e-6
    assert allowed.units({"out": out}, truth)["out"][0, 1] > 1e6


def test_a_row_that_sees_nothing_is_exact() -> None:
    case = generate("paged:heads=2,row=24,value=16,lens=0+1+9,tokens=2,scale=0.25,empty_lse=-1e30")
    truth = expected(case)
    good = {name: r.astype(np.float32) for name, r in truth.items()}
    found = units(case, good)
    assert (found["out"] <= 1).all() and (found["lse"] <= 1).all()
    good["out"][0, 0, 0, 3] = 1e-30
    good["lse"][1, 0, 0] = -2e30
    found = units(case, good)
    assert found["out"][0, 0, 0] == np.inf and found["lse"][1, 0, 0] == np.inf
    assert (found["out"] > 1).sum() == (found["lse"] > 1).sum() == 1


def test_columns_that_are_not_finite_leave_the_others_their_budget() -> None:
    case = generate("paged:heads=2,row=24,value=16,lens=40,block=16,scale=0.25")
    cache = case.kv_cache.copy()
    cache[case.block_table[0, 0], 3, 5] = np.inf
    q = np.abs(case.q)
    q[..., 5] = 0
    case = PagedCase(**{**case.tensors(), **case.conventions(), "kv_cache": cache, "q": -q})
    truth = {"out": np.ones((1, 2, 16)), "lse": np.ones((1, 2))}
    truth["out"][..., 5] = np.inf
    allowed = budget(case, resolve(None, case, F32), truth)
    assert (allowed.out_scale[..., 5] == 0).all() and (allowed.out_scale[..., 6] > 0).all()
    assert allowed.units(truth, truth)["out"].max() == 0


def test_the_same_seed_gives_the_same_budget() -> None:
    case = generate("paged:heads=4,row=72,value=64,lens=3+200,scale=0.12,dtype=bf16")
    truth = expected(case)
    numerics = resolve(None, case, F32)
    first, again, other = (budget(case, numerics, truth, seed=seed).out_rms for seed in (1, 1, 2))
    np.testing.assert_allclose(first, again, rtol=1e-6)
    np.testing.assert_allclose(first, other, rtol=0.5)


def test_a_large_case_emulates_a_sample_and_limits_every_row() -> None:
    case = generate("paged:heads=64,row=72,value=64,lens=4000x12+5,scale=0.12,dtype=bf16")
    truth = expected(case)
    allowed = budget(case, resolve(None, case, F32), truth, draws=3)
    assert "of 3 emulated kernels" in allowed.reason
    rows = int(allowed.reason.split(" rows")[0].split()[-1])
    assert 100 < rows < 3 * 64 * 13
    assert (allowed.out_rms > 0).all() and (allowed.lse_max > 0).all()


def test_rows_are_limited_by_rows_of_as_many_keys_alone() -> None:
    """Sums of 3,000 keys in f16 miss what theory expects by more than those of one key do."""

    def limits(lens):
        case = generate(f"paged:heads=4,row=40,value=32,lens={lens},scale=0.2,inputs=normal,dtype=bf16")
        return budget(case, resolve("value_accumulator=f16", case, F32), expected(case))

    together, short, long = limits("1x40+3000"), limits("1x40"), limits("3000")
    np.testing.assert_allclose(together.out_rms[:40], short.out_rms, rtol=0.02)
    np.testing.assert_allclose(together.out_max[:40], short.out_max, rtol=0.02)
    assert together.out_rms[40:].max() > 1.2 * together.out_rms[:40].max()
    np.testing.assert_allclose(together.out_rms[40:], long.out_rms, rtol=0.2)


def test_no_requests_no_budget() -> None:
    case = generate("paged:heads=2,row=24,value=16,lens=,scale=0.25")
    assert budget(case, resolve(None, case, F32), expected(case)).out_rms.shape == (0, 2)


def test_every_rank_of_a_sharded_case_has_its_budgets() -> None:
    case = generate("paged:heads=2,row=40,value=32,lens=7+130,block=16,scale=0.2,shards=3,tokens=2,dtype=bf16")
    truth = expected(case)
    kinds = {"out": "bf16", "lse": "f32", "partial_out": "f32", "partial_lse": "f32"}
    found = budgets(case, resolve(None, case, kinds), kinds, truth)
    partial = {"out": truth["partial_out"], "lse": truth["partial_lse"]}
    assert found["partial_out"].units(partial, partial)["out"].shape == truth["partial_lse"].shape
    wrong = {"out": truth["partial_out"] * 1.05}
    assert (found["partial_out"].units(wrong, partial)["out"][2, 1] > 1).all()
    narrow = {"out": truth["partial_out"].astype(np.float32).astype(ml_dtypes.bfloat16)}
    assert found["partial_out"].units(narrow, partial)["out"].max() < 2


# --- the dense forms


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("naive", [True, False])
def test_either_dense_form_is_honest_for_either_kind_of_case(naive: bool, dtype: str) -> None:
    shapes = [(2, 3, 2, 4, 6), (4, 24, 8, 32, 64), (2, 128, 64, 128, 512), (3, 8, 0, 8, 16)]
    for seed, (H, P, R, V, L) in enumerate(shapes):
        for kind in ("naive", "absorbed"):
            case = generate(
                f"{kind}:heads={H},nope={P},rope={R},value={V},rank={L},queries=3,cached={4 + 40 * seed},"
                f"dtype={dtype},seed={seed}"
            )
            truth = expected(case)
            numerics = resolve(None, case, {"out": dtype})
            allowed = budget(case, numerics, truth)
            found = honest.dense(case, naive, dtype)
            assert allowed.units(found, truth)["out"].max() <= 1, case.id
            assert allowed.units(emulate(case, numerics, np.random.default_rng(seed)), truth)["out"].max() <= 1
            assert allowed.units({"out": truth["out"] * 1.05}, truth)["out"].max() > 2
            assert allowed.units({"out": np.roll(truth["out"], 1, axis=1)}, truth)["out"].min() > 1


@pytest.mark.parametrize("kind", ["naive", "absorbed"])
def test_a_scaled_query_is_honest_in_dense_cases_where_it_is_declared(kind: str) -> None:
    case = generate(f"{kind}:heads=2,nope=24,rope=8,value=32,rank=64,queries=3,cached=44,dtype=bf16")
    truth = expected(case)
    numerics = resolve("scaled=q", case, {"out": "bf16"})
    allowed, usual = (budget(case, n, truth) for n in (numerics, resolve(None, case, {"out": "bf16"})))
    assert allowed.units(emulate(case, numerics, np.random.default_rng(3)), truth)["out"].max() <= 1
    assert (allowed.out_scale > usual.out_scale).mean() > 0.95


def test_our_own_dense_forms_stay_inside() -> None:
    for kind, attend in (("naive", attend_naive), ("absorbed", attend_absorbed)):
        case = generate(f"{kind}:geometry=deepseek-v2-lite,queries=2,cached=60,inputs=xorshift,seed=42")
        for backend in ("strict", "fast"):
            out = attend(
                Geometry.preset("deepseek-v2-lite"),
                case.q_nope, case.q_pe, case.c_kv, case.k_pe, case.w_uk, case.w_uv,
                softmax_scale=case.softmax_scale, backend=backend,
            )  # fmt: skip
            assert worst(case, {"out": out})["out"] <= 1
