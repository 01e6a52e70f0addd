# SPDX-License-Identifier: Apache-2.0
"""What options do to a budget: numerics inferred from formats, noise near what emulated kernels make, edges."""

import dataclasses
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ids import made

sys.path.insert(0, str(Path(__file__).parents[1]))
import honest_options
from honest_options import run, tiled, two_pass

from mla_oracle import InputError, check, expected, formats, generate
from mla_oracle.canonical.caches import held_as
from mla_oracle.verdict.budget import budget, emulate
from mla_oracle.verdict.emulate import choose
from mla_oracle.verdict.numerics import infer, resolve
from mla_oracle.verdict.parts import parts_of

F32 = {"out": "f32", "lse": "f32"}
BF16 = {"out": "bf16", "lse": "f32"}
MANY = "paged:heads=16,row=72,value=64,lens=900,scale=0.12,dtype=bf16"


# --- what is inferred


def inferred(options, results=BF16):
    numerics = infer(generate(f"paged:heads=2,row=576,value=512,lens=5,scale=0.05,block=4,{options}"), results)
    return numerics.query, numerics.cache, numerics.p, numerics.value_accumulator


@pytest.mark.parametrize(
    ("options", "results", "wanted"),
    [
        ("format=fp8_ds_mla,dtype=bf16", BF16, ("bf16", "bf16", "bf16", "mma")),
        ("format=fp8_ds_mla,dtype=bf16,reader=f32", F32, ("bf16", "f32", "bf16", "mma")),
        ("format=fp8_ds_mla,dtype=f32", F32, ("f32", "f32", "f32", "f32")),
        ("format=fp8_ds_mla,dtype=f32,q_dtype=e4m3", F32, ("e4m3", "bf16", "bf16", "mma")),
        ("format=fp8_e4m3,dtype=f16,reader=f32_f16", F32, ("f16", "f16", "f16", "mma")),
        ("format=fp8_e4m3,dtype=f32", F32, ("f32", "f32", "f32", "f32")),
        ("format=fp8_e4m3,dtype=f32", BF16, ("f32", "f32", "bf16", "mma")),
        ("format=fp8_e4m3,dtype=bf16,q_dtype=e4m3", BF16, ("e4m3", "f32", "bf16", "mma")),
        ("q_dtype=e4m3,dtype=bf16", BF16, ("e4m3", "bf16", "bf16", "mma")),
    ],
)
def test_rows_of_a_format_are_multiplied_as_its_reader_rounds_them(options, results, wanted):
    assert inferred(options, results) == wanted


def test_a_query_is_not_rounded_to_meet_a_cache_of_eight_bits():
    case = generate("paged:heads=2,row=24,value=16,lens=5,scale=0.2,block=4")
    with np.errstate(invalid="ignore"):
        narrow = dataclasses.replace(case, kv_cache=case.kv_cache.astype(ml_dtypes.float8_e4m3fn))
    assert (infer(narrow, F32).query, infer(narrow, F32).cache, infer(narrow, F32).p) == ("f32", "e4m3", "f32")
    half = dataclasses.replace(narrow, q=case.q.astype(ml_dtypes.bfloat16))
    assert (infer(half, F32).query, infer(half, F32).p) == ("bf16", "bf16")


def test_caches_of_two_dtypes_are_multiplied_as_what_holds_both():
    case = made("topk=4,extra=3+0+9+17+2+40,kpe=4")
    f32, f16, bf16, e4m3 = (case.extra_kv_cache.dtype, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)

    def held(main, rope, extra):
        with np.errstate(invalid="ignore"):
            parts = {"kv_cache": main, "kpe_cache": rope, "extra_kv_cache": extra}
            return held_as(dataclasses.replace(case, **{n: getattr(case, n).astype(d) for n, d in parts.items()}))

    assert held(e4m3, e4m3, e4m3) == "e4m3" and held(e4m3, bf16, e4m3) == "bf16" and held(f16, e4m3, f16) == "f16"
    assert held(f16, f16, bf16) == "f32" and held(bf16, f32, bf16) == "f32" and held(bf16, np.float64, bf16) == "f64"
    assert all(held_as(dataclasses.replace(case, kv_cache=case.kv_cache.astype(d), kpe_cache=None, extra_kv_cache=None))
               == name for name, d in (("f32", f32), ("f16", f16), ("bf16", bf16)))  # fmt: skip


@pytest.mark.parametrize(
    ("caches", "name"),
    [
        ("dtype=bf16,extra_format=fp8_ds_mla", "bf16"),
        ("dtype=bf16,extra_format=q8_0", "f32"),
        ("dtype=f16,extra_format=fp8_ds_mla", "f32"),
        ("dtype=bf16,format=fp8_ds_mla,extra_format=q8_0", "f32"),
        ("dtype=bf16,format=fp8_ds_mla,extra_format=nvfp4_ds_mla", "bf16"),
        ("dtype=bf16,format=q8_0,extra_format=fp8_ds_mla", "f32"),
        ("dtype=bf16,format=fp8_ds_mla,reader=f32", "f32"),
    ],
)
def test_an_extra_cache_of_a_format_of_its_own_counts_in_what_holds_both(caches, name):
    case = generate(f"paged:heads=2,row=576,value=512,lens=5,scale=0.05,block=4,topk=3,extra=4,extra_topk=2,{caches}")
    assert held_as(case) == name


def test_codes_can_be_multiplied_only_where_the_reader_folds_the_scale():
    case = generate("paged:heads=2,row=576,value=512,lens=5,scale=0.05,block=4,format=fp8_ds_mla,dtype=bf16")
    truth = expected(case)
    actual = {name: array.astype(np.float32) for name, array in truth.items()}
    said = "^numerics cache is 'e4m3', expected what 'f32_bf16' makes of fp8_ds_mla: bf16 or wider$"
    with pytest.raises(InputError, match=said):
        check(case, actual, truth, numerics="cache=e4m3")
    folded = generate("paged:heads=2,row=576,value=512,lens=5,scale=0.05,block=4,format=fp8_e4m3,dtype=bf16")
    truth = expected(folded)
    units = [
        check(folded, {"out": truth["out"] * 1.001}, truth, numerics=f"cache={name}").figures["out"].units
        for name in ("e4m3", "f32")
    ]
    assert units[0] == units[1]


# --- emulated kernels compute the case, and the noise is what they miss it by


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize(
    "options",
    ["bias=mask,tokens=2", "bias=normal,softcap=3", "sinks=normal", "sinks=infinite,sinks_in_lse=true,topk=9",
     "kv_heads=2,kpe=3", "output_scale=0.3,value_offset=4", "q_dtype=e4m3,q_scale=0.3",
     "topk=4,extra=3+0+9+17+2+40,sinks=normal,sinks_in_lse=true", "window=3,first=2,tokens=3"],
)  # fmt: skip
def test_every_emulated_kernel_computes_the_case(options, turn):
    case = made(options)
    truth = expected(case)
    numerics = resolve(None, case, F32)
    parts = parts_of(case, numerics)
    kernel = choose(numerics, parts.longest, np.random.default_rng(turn), turn=turn)
    for i in range(parts.count):
        out, lse = parts.open(i).run(np.arange(parts.rows), kernel, np.random.default_rng(turn))
        np.testing.assert_allclose(out, parts.split(truth["out"])[i], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse, parts.split(truth["lse"])[i], rtol=2e-5, atol=2e-5)


def test_emulated_kernels_add_sinks_in_all_three_places():
    numerics = resolve(None, made("sinks=normal"), F32)
    drawn = [choose(numerics, 40, np.random.default_rng(0), turn=turn) for turn in range(8)]
    assert {kernel.sink for kernel in drawn} == {"before", "within", "after"}


def in_units_of_noise(options, spec, out="f32", kernels=8):
    case = generate(f"{MANY},{options}")
    truth = expected(case)
    numerics = resolve(spec, case, {"out": out, "lse": "f32"})
    scale = budget(case, numerics, truth, draws=1)
    found = [emulate(case, numerics, np.random.default_rng(seed)) for seed in range(kernels)]
    return tuple(
        float(np.sqrt(np.mean([np.square((f[name] - truth[name]) / noise) for f in found])))
        for name, noise in (("out", scale.out_scale), ("lse", scale.lse_scale))
    )


@pytest.mark.parametrize(
    ("options", "spec", "least"),
    [
        ("softcap=3.0", "scores=bf16,p=f32,row_sum=f32", 0.6),
        ("softcap=3.0,bias=normal", "scores=bf16,p=f32,row_sum=f32", 0.6),
        ("bias=normal", "scores=bf16,p=f32,row_sum=f32", 0.6),
        ("softcap=2.0", "tanh=approx,p=f32,row_sum=f32", 0.3),
        ("sinks=normal", "scores=bf16,p=f32,row_sum=f32", 0.6),
        ("sinks=normal", "p=bf16,row_sum=f32,splits=1", 0.8),
        ("q_dtype=e4m3,q_scale=1.3", "query=bf16,p=f32,row_sum=f32", 0.6),
        ("output_scale=0.3", "p=bf16,row_sum=f32,splits=1", 0.8),
        ("window=300+0", "p=bf16,row_sum=f32,splits=1", 0.8),
        ("topk=200,sinks=normal,softcap=5.0", "p=bf16,row_sum=f32,splits=1", 0.8),
    ],
)
def test_roundings_of_options_leave_theirs(options, spec, least):
    of_out, of_lse = in_units_of_noise(options, spec)
    most = 1.6 if "approx" in spec else 1.2  # errors of one sign change the temperature, and values go with scores
    assert least < of_out < most and of_lse < 1.5


def test_the_rounding_of_what_output_scale_makes_is_that_of_out():
    case = generate("paged:heads=8,row=576,value=512,lens=1,scale=0.0625,dtype=f32,output_scale=0.3")
    truth = expected(case)
    scale = budget(case, resolve("p=f32", case, BF16), truth, draws=1)
    rounded = truth["out"].astype(ml_dtypes.bfloat16).astype(np.float64)
    rms = np.sqrt(np.mean(np.square((rounded - truth["out"]) / scale.out_scale)))
    assert rms == pytest.approx(1, abs=0.05)


def test_a_sink_of_much_weight_shrinks_out_and_what_it_may_miss_by():
    """e^8 times the keys' own weight: what is left of out is as well known, relative to its size, as the LSE."""
    case = generate("paged:heads=4,row=72,value=64,lens=200,scale=0.12,sinks=normal")
    near = dataclasses.replace(case, sinks=np.full(4, -30, np.float32))
    far = dataclasses.replace(case, sinks=(expected(near)["lse"][0] + 8).astype(np.float32))
    sizes = {}
    for name, one in (("near", near), ("far", far)):
        truth = expected(one)
        allowed = budget(one, resolve(None, one, F32), truth).allowed(truth)["out"]
        sizes[name] = (np.sqrt(np.mean(truth["out"] ** 2, axis=-1)), allowed)
    ratio = sizes["far"][0] / sizes["near"][0]
    np.testing.assert_allclose(ratio, 1 / (1 + np.exp(8)), rtol=1e-4)
    assert (sizes["far"][1] < 8 * sizes["near"][1]).all()
    wrong = dataclasses.replace(far, sinks=far.sinks + np.float32(1e-4))
    assert not check(far, stored(expected(wrong)), expected(far)).passed


ROUNDED_Q = "query=bf16,p=f32,row_sum=f32"  # of a query in f32: errors of the scores above all others


def noise_of(case, spec=ROUNDED_Q):
    truth = expected(case)
    return truth, budget(case, resolve(spec, case, F32), truth, draws=1)


def test_a_softcap_damps_what_scores_are_off_by():
    case = generate("paged:heads=4,row=72,value=64,lens=200,scale=1.0")
    capped = dataclasses.replace(case, softcap=0.7)
    of_lse = [noise_of(one)[1].lse_scale for one in (case, capped)]
    assert (of_lse[1] < 0.05 * of_lse[0]).all()


@pytest.mark.parametrize(("softcap", "numerics"), [("1000.0", None), ("3000.0", "tanh=sigmoid")])
def test_a_large_softcap_costs_what_a_sigmoid_is_off_by_near_0(softcap, numerics):
    case = generate(f"paged:heads=4,row=72,value=64,lens=200,scale=0.001,softcap={softcap}")
    step, given = 0.5 * 2.0**-22 * float(softcap), run(case, two_pass(tanh="sigmoid"))
    _, found = noise_of(case, ",".join(["p=f32,row_sum=f32", *([numerics] if numerics else [])]))
    assert (found.lse_scale > step).all()
    assert check(case, given, expected(case), numerics=numerics).passed
    assert check(case, given, expected(case), numerics="tanh=f32").figures["out"].units > 3
    assert infer(case, F32).tanh == ("f32" if numerics else "sigmoid")


def with_sinks_above(case, by, **more):
    """The case with sinks `by` above the LSE of its keys."""
    return dataclasses.replace(case, id=None, sinks=(expected(case)["lse"][0] + by).astype(np.float32), **more)


def test_an_lse_that_is_off_shifts_what_a_sink_leaves_of_out():
    """Equal values: out is off only by what the sink's share is."""
    case = generate("paged:heads=4,row=72,value=64,lens=900,scale=0.12")
    case = dataclasses.replace(case, kv_cache=np.where(np.arange(72) < 64, np.float32(1), case.kv_cache))
    truth, found = noise_of(with_sinks_above(case, 8.0))
    relative = found.out_scale[0] / np.abs(truth["out"][0])
    assert (relative > 0.9 * found.lse_scale[0][:, None]).all()


def test_an_lse_that_counts_a_sink_is_off_by_the_keys_share_of_it():
    case = generate("paged:heads=4,row=72,value=64,lens=200,scale=0.12")
    apart, counted = (with_sinks_above(case, 6.0, sinks_in_lse=count) for count in (False, True))
    ratio = noise_of(counted)[1].lse_scale / noise_of(apart)[1].lse_scale
    assert (ratio < 0.05).all()


def test_a_lone_weight_is_rounded_where_there_is_a_sink():
    case = generate("paged:heads=4,row=72,value=64,lens=1,scale=0.12")
    for one, rounded in ((case, False), (with_sinks_above(case, 0.0), True)):
        truth, found = noise_of(one, "p=bf16")
        relative = found.out_scale[0] / np.abs(truth["out"][0])
        assert (relative > 0.4 * 2.0**-8).all() == rounded


def stored(results):
    return {name: array.astype(np.float32) for name, array in results.items()}


# --- what must be declared


def test_an_approximate_tanh_is_honest_only_where_it_is_declared(monkeypatch):
    case = generate("paged:heads=3,row=72,value=64,lens=900,scale=1.0,softcap=8.0,inputs=tailed")
    truth = expected(case)
    assert check(case, run(case, two_pass()), truth).passed
    sign = np.float32(2.0**-11) * np.where(np.arange(900) % 2, 1, -1).astype(np.float32)
    right = honest_options.scores_of
    monkeypatch.setattr(honest_options, "scores_of", lambda *a: right(*a) * (1 + sign))
    found = run(case, two_pass())
    assert not check(case, found, truth).passed
    assert check(case, found, truth, numerics="tanh=approx").passed


def test_a_query_made_numbers_of_bf16_is_honest_only_where_it_is_declared():
    case = generate("paged:heads=3,row=72,value=64,lens=900,scale=0.12,dtype=f32,q_dtype=e4m3,q_scale=1.3")
    truth = expected(case)

    def query_of(case, p, row, heads, keys, rows):
        query = honest_options.query_of_(case, p, row, heads, keys, rows)
        q = (query.q * np.float32(1.3)).astype(ml_dtypes.bfloat16).astype(np.float32)
        return query._replace(q=q, scale=np.float32(case.softmax_scale))

    found = run(case, two_pass(), query_of_=query_of)
    assert not check(case, found, truth).passed
    assert check(case, found, truth, numerics="query=bf16").passed


def test_weights_of_eight_bits_over_a_folded_cache_are_honest_only_where_they_are_declared():
    case = generate("paged:heads=8,row=72,value=64,lens=9+300,scale=0.12,dtype=bf16,format=fp8_e4m3,sinks=normal")
    truth = expected(case)
    found = run(case, tiled(500, "e4m3"), "bf16")
    assert not check(case, found, truth).passed
    assert check(case, found, truth, numerics="p=e4m3,p_base=max").passed


# --- edges


def test_a_lone_key_with_a_sink_has_a_weight_that_is_not_1():
    case = generate("paged:heads=4,row=72,value=64,lens=1,scale=0.12,dtype=bf16,sinks=normal,sinks_in_lse=true")
    truth = expected(case)
    for kernel in (two_pass("bf16"), tiled(16, "bf16", sink="first"), tiled(16, "bf16", sink="last")):
        assert check(case, run(case, kernel, "f32"), truth).passed


def test_heads_that_see_other_keys_have_budgets_of_their_own():
    """A bias that hides all keys but one from head 0, and all from head 1."""
    case = generate("paged:heads=3,row=24,value=16,lens=40,scale=0.3,bias=normal,unread=numbers")
    bias = np.zeros((1, 3, 40), np.float32)
    bias[0, 0, 1:] = bias[0, 1] = -np.inf
    case = dataclasses.replace(case, bias=bias)
    truth = expected(case)
    found = budget(case, resolve("p=bf16", case, F32), truth)
    assert (found.out_scale[0, 1] == 0).all() and (found.out_scale[0, 2] > 0).all()
    relative = found.allowed(truth)["out"][0]
    assert relative[0] < 1e-5 < 1e-4 < relative[2]
    actual = stored(truth)
    assert check(case, actual, truth).passed
    actual["out"][0, 1, 3] = 1e-30
    assert not check(case, actual, truth).passed


def test_every_reader_of_every_format_has_a_dtype_that_holds_its_rows():
    for name in formats.NAMES:
        form = formats.get(name)
        D, V = form.width or 96, form.latent or 64
        for reader in form.readers:
            case = generate(f"paged:heads=2,row={D},value={V},lens=5,scale=0.05,format={name},reader={reader},block=4")
            assert held_as(case) == ("f32" if reader in ("fold", "f32") else "f16" if reader == "f32_f16" else "bf16")
