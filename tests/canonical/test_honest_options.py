# SPDX-License-Identifier: Apache-2.0
"""Five hundred honest kernels over every option, cache format and reader of the canonical problem: none is rejected.

The verdict is that of `check`, for numerics inferred from the case. Numpy kernels share no code with the emulator
(honest_options.py); the strict loops, the fast tier and the interpreted CUDA kernels are called as users call them.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from ids import IDS, SMALL

sys.path.insert(0, str(Path(__file__).parents[1]))
import honest_options
from honest import NARROW
from kernel_cases import missing

from mla_oracle import InputError, UnsupportedError, canonical, check, expected, formats, generate
from mla_oracle.fast import isa

FAMILIES = ("normal", "peaked", "flat", "position", "onehot", "tailed", "rising")
READERS = [(name, reader) for name in formats.NAMES for reader in formats.get(name).readers]
DRAWN = 300
OPTIONS = {
    "window": ["3", "20+0", "9+0"], "first": ["2", "5"], "bias": ["normal", "mask", "alibi"], "topk": ["6", "40"],
    "topk_by": ["slot"], "topk_length": ["query", "request"], "duplicates": ["true"], "invalid": ["rows", "none"],
    "extra": ["3+30"], "extra_topk": ["9"], "softcap": ["0.7", "5.0", "50.0"], "sinks": ["normal", "infinite"],
    "sinks_in_lse": ["true"], "tokens": ["1", "3"], "ragged": ["2+1", "0+3"], "kv_heads": ["2"], "kpe": ["8"],
    "value_offset": ["4"], "q_dtype": ["e4m3", "bf16"], "q_scale": ["0.3", "1.7"], "output_scale": ["0.3", "5.0"],
    "lse_axes": ["BHT"], "lse_base": ["2"], "causal": ["false"], "empty_lse": ["inf", "-1e+30", "nan"],
}  # fmt: skip


class Judged(NamedTuple):
    source: str
    what: str
    passed: bool
    reason: str


def judge(source, case, actual, what=""):
    verdict = check(case, actual, expected(case))
    return Judged(source, f"{what} {case.id}", verdict.passed, verdict.reason)


def drawn_case(rng, form=None):
    """A case of a few options, over a dense cache or that of (format, reader)."""
    while True:
        H, D, V = [(4, 24, 16), (2, 72, 64), (4, 40, 32)][rng.integers(3)]
        fields = {name: str(rng.choice(v)) for name, v in OPTIONS.items() if rng.random() < 0.22}
        fields["dtype"] = str(rng.choice(["f32", "f16", "bf16"]))
        if form is not None:
            name, reader = form
            of = formats.get(name)
            H, D, V = 2, of.width or 96, of.latent or 64
            fields |= {"format": name, "reader": reader}
            fields = {n: v for n, v in fields.items() if n not in ("kv_heads", "kpe", "value_offset")}
        lens = "+".join(str(n) for n in rng.choice([0, 1, 2, 17, 40, 64, 150], 2))
        scale = float(D**-0.5 * rng.choice([0.3, 1, 3]))
        more = ",".join(f"{name}={value}" for name, value in fields.items())
        try:
            return generate(
                f"paged:heads={H},row={D},value={V},lens={lens},scale={scale!r},block={rng.choice([4, 16])},"
                f"inputs={rng.choice(FAMILIES)},seed={rng.integers(10**6)},{more}"
            )
        except InputError:
            continue


def weights(case):
    """The narrowest dtype of weights that a kernel for the case may use without saying so."""
    q, cache = (x.dtype.name.replace("bfloat", "bf").replace("float", "f") for x in (case.q, case.kv_cache))
    if case.cache_format is not None or case.kv_cache.dtype.itemsize == 1:
        return q if q in ("bf16", "f16") else "f32"
    return cache if cache in ("bf16", "f16") else "f32"


def in_numpy(rng, form=None):
    case = drawn_case(rng, form)
    p = weights(case)
    name, kernel = honest_options.drawn(rng, p)
    out = str(rng.choice(["f32", "bf16", p]))
    out = "f32" if out == "f16" else out
    return judge("numpy", case, honest_options.run(case, kernel, out), f"{name}, out {out},")


def of_numpy():
    for i in range(DRAWN):
        yield in_numpy(np.random.default_rng([i, 7]))
    for i, form in enumerate(READERS):
        for turn in range(2):
            yield in_numpy(np.random.default_rng([i, turn, 9]), form)


def ours(case, backend, **how):
    found = canonical.attend(case, precision="f32", backend=backend, **how)._asdict()
    return {name: array.astype(NARROW["f32"]) for name, array in found.items()}


def cases_of_options():
    for i, options in enumerate(IDS):
        more = f",inputs={FAMILIES[i % len(FAMILIES)]}" if "inputs" not in options else ""
        yield generate(f"{SMALL},{options}{more}")
    for i, form in enumerate(READERS):
        yield drawn_case(np.random.default_rng([i, 11]), form)


def of_our_own():
    builds = [build for build in isa.available() if build != "amx"]
    for i, case in enumerate(cases_of_options()):
        yield judge("strict", case, ours(case, "strict"))
        try:
            yield judge("fast", case, ours(case, "fast", isa=builds[i % len(builds)]))
        except UnsupportedError as error:
            assert str(error) in [f"{name} is not supported by backend 'fast'" for name in ("bias", "softcap")]


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    return [*of_numpy(), *of_our_own()]


def test_none_of_five_hundred_honest_kernels_is_rejected(judged) -> None:
    assert [one for one in judged if not one.passed] == []
    assert len(judged) >= 500


def test_most_share_no_code_with_the_emulator_and_every_option_is_among_them(judged) -> None:
    count = {source: sum(one.source == source for one in judged) for source in ("numpy", "strict", "fast")}
    assert count["numpy"] == DRAWN + 2 * len(READERS) and count["strict"] == len(IDS) + len(READERS)
    assert count["fast"] > 50
    drawn = [f"{one.what}," for one in judged if one.source == "numpy"]
    for name, values in OPTIONS.items():
        for value in values:
            assert sum(f",{name}={value}" in what for what in drawn) >= 3, (name, value)
    for name, reader in READERS:
        assert sum(f"format={name}," in what and f"reader={reader}," in what for what in drawn) == 2


PTX = [
    "row=80,value=64,dtype=bf16,topk=6,sinks=normal", "row=80,value=64,dtype=bf16,window=9+0,tokens=2",
    "row=80,value=64,dtype=bf16,topk=6,topk_by=slot,tokens=2,sinks=normal", "row=80,value=64,dtype=f16,topk=5",
    "row=576,value=512,dtype=bf16,format=fp8_ds_mla,topk=5,topk_by=slot", "row=80,value=64,dtype=bf16,format=fp8_e4m3",
]  # fmt: skip


@pytest.mark.skipif(missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize("options", PTX)
def test_none_of_the_interpreted_kernels_is_rejected(options) -> None:
    case = generate(f"paged:heads=2,scale=0.1,block=16,lens=0+5+33,{options}")
    assert judge("ptx", case, ours(case, "ptx")).passed
