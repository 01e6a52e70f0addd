# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels of the canonical problem: an honest numpy kernel (honest_options.py) with one step of it wrong.

Each is rejected with out in f32 and in bf16, and accepted once the step is right.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from ids import made

sys.path.insert(0, str(Path(__file__).parents[1]))
from honest_options import keys_of_, query_of_, rows_of_, run, two_pass

from mla_oracle import check, expected, formats, generate
from mla_oracle.formats.misread import KINDS, misread, misreadings


def padded(at):
    """-1 is taken for a key: slot 0 by the position `at` gives, instead of being skipped."""

    def keys_of(case, p, b, t, row, T):
        found = keys_of_(case, p, b, t, row, T)
        negative = int((case.topk_indices[row] < 0).sum())
        return found + [(0, at(int(case.seq_lens[b])))] * negative if found else found

    return keys_of


def any_length(case, p, b, t, row, T):
    return keys_of_(case, p | {"topk_length": None, "topk_outside": "skip"}, b, t, row, T)


def once(case, p, b, t, row, T):
    return list(dict.fromkeys(keys_of_(case, p, b, t, row, T)))


def moved(**bounds):
    """Window bounds a token further out or in."""

    def keys_of(case, p, b, t, row, T):
        return keys_of_(case, p | {name: p[name] + by for name, by in bounds.items()}, b, t, row, T)

    return keys_of


def only_main(case, p, b, t, row, T):
    return [key for key in keys_of_(case, p, b, t, row, T) if key[0] == 0]


def as_main(case, p, b, t, row, T):
    return [(0, place) for _, place in keys_of_(case, p, b, t, row, T)]


def first_kv_head(case, p, b, keys, g):
    return rows_of_(case, p, b, keys, 0)


def interleaved_heads(case, p, b, keys, g):
    """Head h reads KV head h % KV: of two groups of two heads, the second of each."""
    return rows_of_(case, p, b, keys, (g + 1) % 2)


def changed(**how):
    """A field of the query, by what it is changed to."""

    def query_of(case, p, row, heads, keys, rows):
        query = query_of_(case, p, row, heads, keys, rows)
        return query._replace(**{name: change(case, query) for name, change in how.items()})

    return query_of


def of_codes(case, query):
    """The values without the scale of a cache in one fp8 dtype."""
    return query.values / np.float32(case.kv_scale[0])


def bent(change):
    """The kernel over queries whose scores `change` computes: as a bias, over keys of zero."""

    def kernel(query):
        s = (query.q @ query.keys.T) * query.scale
        return two_pass()(query._replace(keys=0 * query.keys, cap=np.float32(0), bias=change(query, s)))

    return kernel


def softcap_last(query, s):
    return query.cap * np.tanh((s + query.bias) / query.cap)


def bias_first(query, s):
    return s + query.bias * query.scale


def softcap_before_scale(query, s):
    return query.cap * np.tanh(s / query.scale / query.cap) * query.scale + query.bias


WRONG = {
    "-1 is the first row": ("topk=6,tokens=2", {"keys_of_": padded(lambda n: 0)}),
    "-1 is the last row": ("topk=6,tokens=2", {"keys_of_": padded(lambda n: n - 1)}),
    "topk_length is ignored": ("topk=6,topk_length=query,tokens=2", {"keys_of_": any_length}),
    "topk_length of a request is ignored": ("topk=6,topk_length=request,tokens=2", {"keys_of_": any_length}),
    "duplicates count once": ("topk=8,duplicates=true", {"keys_of_": once}),
    "the window reaches a token too far back": ("window=3", {"keys_of_": moved(window_left=1)}),
    "the window misses its oldest token": ("window=3", {"keys_of_": moved(window_left=-1)}),
    "the window reaches a token too far ahead": (
        "window=2+1,causal=false,tokens=4", {"keys_of_": moved(window_right=1)}
    ),
    "the window misses its newest token": ("window=2+1,causal=false,tokens=4", {"keys_of_": moved(window_right=-1)}),
    "the first tokens are not kept": ("window=3+0,first=2,tokens=2", {"keys_of_": moved(window_first=-2)}),
    "the second cache is ignored": ("topk=4,extra=3+4+9+17+2+40,inputs=peaked", {"keys_of_": only_main}),
    "indices of the second cache are taken for the first": (
        "topk=4,extra=3+1+4+5+2+40,extra_block=4,causal=false", {"keys_of_": as_main}
    ),
    "every head reads KV head 0": ("kv_heads=2", {"rows_of_": first_kv_head}),
    "heads read the KV heads by turns": ("kv_heads=2", {"rows_of_": interleaved_heads}),
    "the value is the first columns": (
        "value_offset=4", {"query_of_": changed(values=lambda case, query: query.keys[:, : case.head_dim_v])}
    ),
    "no q_scale": (
        "q_dtype=e4m3,q_scale=0.03", {"query_of_": changed(scale=lambda case, query: np.float32(case.softmax_scale))}
    ),
    "no sink": ("sinks=normal", {"query_of_": changed(sinks=lambda case, query: np.full_like(query.sinks, -np.inf))}),
    "the sink counts twice": (
        "sinks=normal", {"query_of_": changed(sinks=lambda case, query: query.sinks + np.float32(np.log(2)))}
    ),
    "the sink is multiplied by the scale": (
        "sinks=normal", {"query_of_": changed(sinks=lambda case, query: query.sinks * query.scale)}
    ),
    "the LSE counts the sink": ("sinks=normal", {"query_of_": changed(count_sinks=lambda case, query: True)}),
    "the LSE does not count the sink": (
        "sinks=normal,sinks_in_lse=true", {"query_of_": changed(count_sinks=lambda case, query: False)}
    ),
    "no softcap": ("softcap=3", {"query_of_": changed(cap=lambda case, query: np.float32(0))}),
    "no bias": ("bias=normal,tokens=2", {"query_of_": changed(bias=lambda case, query: np.zeros_like(query.bias))}),
    "no softcap's last factor": ("softcap=3", {"kernel": bent(lambda q, s: np.tanh(s / q.cap))}),
    "the softcap comes after the bias": ("softcap=3,bias=normal", {"kernel": bent(softcap_last)}),
    "the softcap comes before the scale": ("softcap=3,bias=normal", {"kernel": bent(softcap_before_scale)}),
    "the bias comes before the scale": ("bias=normal,tokens=2", {"kernel": bent(bias_first)}),
    "no scale on the values": (
        "format=fp8_e4m3,dtype=bf16", {"query_of_": changed(values=of_codes)}
    ),
    "the scale of the first cache on the second": (
        "format=fp8_e4m3,topk=4,extra=3+4+9+17+2+40", {"rows_of_": lambda case, p, b, keys, g: rows_of_(
            dataclasses.replace(case, extra_kv_scale=case.kv_scale * np.float32(1.1)), p, b, keys, g)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("out", ["f32", "bf16"])
@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_with_one_wrong_step_is_rejected(name, out):
    options, wrong = WRONG[name]
    case = made(options, unread="numbers")
    truth = expected(case)
    right = check(case, run(case, two_pass(), out), truth)
    assert right.passed, right.reason
    kernel = wrong.get("kernel", two_pass())
    found = check(case, run(case, kernel, out, **{k: f for k, f in wrong.items() if k != "kernel"}), truth)
    assert not found.passed, found.reason


def test_an_lse_with_its_axes_swapped_is_rejected_where_the_shape_does_not_tell():
    case = made("tokens=4,lse_axes=BHT")
    truth = expected(case)
    found = run(case, two_pass())
    assert found["lse"].shape[1] == found["lse"].shape[2] and check(case, found, truth).passed
    verdict = check(case, found | {"lse": found["lse"].swapaxes(1, 2).copy()}, truth)
    assert not verdict.passed and verdict.reason.startswith("lse is ") and "head" in verdict.reason


# --- cache formats

ARBITRARY = {"fp8_ds_mla": "vllm", "flashinfer_fp8_grouped": "vllm"}  # writers whose scales are no powers of two
SMALL_SCALES = {**ARBITRARY, "model1": "vllm"}  # and below 2^-13


def stored_in(name, how, q="bf16"):
    """A case over rows whose tiles are of many sizes, which `how` can show; queries of dtype q."""
    form = formats.get(name)
    D, V = form.width or 96, form.latent or 64
    lens = "40+3,block=8,unread=numbers"
    case = generate(f"paged:heads=2,row={D},value={V},lens={lens},scale=0.03,dtype=f32,q_dtype={q}")
    rng = np.random.default_rng(3)
    rows = case.kv_cache * np.exp2(rng.uniform(-2, 2, (*case.kv_cache.shape[:2], D // 16))).repeat(16, axis=-1)
    rows = rows * (1e-4 if how == "scale-clamped" else 1)
    scales = {"kpe_scale": 0.013} if how == "rope-latent-scale" else {}
    writer = (SMALL_SCALES if how == "scale-clamped" else ARBITRARY).get(name)
    tensors = formats.quantize(name, rows.astype(np.float32), writer=writer, **scales)
    scale = 300.0 if how == "scale-clamped" else case.softmax_scale
    return dataclasses.replace(case, id=None, cache_format=name, softmax_scale=scale, **tensors)


@pytest.mark.parametrize(("how", "name"), [(how, name) for name in formats.NAMES for how in misreadings(name)])
def test_every_misreading_of_a_format_is_rejected(how, name):
    case = stored_in(name, how)
    truth = expected(case)
    assert check(case, run(case, two_pass(), "bf16"), truth).passed

    def rows_of(case, p, b, keys, g):
        return rows_of_(case, p, b, keys, g, read=lambda *a, **k: misread(how, *a, **k))

    found = run(case, two_pass(), "bf16", rows_of_=rows_of)
    verdict = check(case, found, truth)
    assert not verdict.passed, verdict.reason


def test_every_misreading_is_among_them():
    assert {how for name in formats.NAMES for how in misreadings(name)} == set(KINDS)


@pytest.mark.parametrize(
    ("name", "right", "other"),
    [
        ("fp8_ds_mla", "f32_bf16", "exponent"), ("fp8_ds_mla", "f32", "bf16"), ("fp8_ds_mla", "f32", "f32_bf16"),
        ("flashinfer_fp8_grouped", "f32_bf16", "exponent"), ("fp8_e4m3", "fold", "bf16"),
        ("fp8_e4m3", "f32", "f32_f16"),
    ],
)  # fmt: skip
def test_the_rounding_of_another_reader_is_not_honest(name, right, other):
    """Of kernels whose weights are f32; those that round them to bf16 may not be told from ones that round values."""
    case = dataclasses.replace(stored_in(name, "", "f32"), cache_reader=right)
    truth = expected(case)
    assert check(case, run(case, two_pass(), "f32"), truth).passed
    found = run(dataclasses.replace(case, cache_reader=other), two_pass(), "f32")
    assert not check(case, found, truth).passed
    assert check(dataclasses.replace(case, cache_reader=other), found, expected(
        dataclasses.replace(case, cache_reader=other))).passed  # fmt: skip


def test_rounding_the_rows_to_what_the_query_has_is_honest_where_it_is_declared():
    case = dataclasses.replace(stored_in("fp8_e4m3", "", "f32"), cache_reader="fold")
    truth = expected(case)
    found = run(dataclasses.replace(case, cache_reader="f32_bf16"), two_pass(), "f32")
    assert not check(case, found, truth).passed
    assert check(case, found, truth, numerics="cache=bf16").passed
