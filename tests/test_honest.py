# SPDX-License-Identifier: Apache-2.0
"""Two thousand honest kernels, over every preset of numerics and every family of inputs: none is rejected.

Most share no code with the emulator that budgets are made of: numpy (honest.py, by what they declare: declared.py), the
strict loops, every build of the fast tier, the CUDA kernels as the interpreter runs them. torch and the CPU kernels of
engines are in tests/peers. Each kernel meets a case of its own, and the verdict is that of `check`.
"""

import dataclasses
from typing import NamedTuple

import declared
import honest
import numpy as np
import pytest
from kernel_cases import missing

from mla_oracle import Geometry, attend_absorbed, attend_naive, decode_paged
from mla_oracle.cases import PagedCase
from mla_oracle.cases.inputs import generate
from mla_oracle.fast import isa
from mla_oracle.oracle import expected
from mla_oracle.verdict.budget import emulate
from mla_oracle.verdict.compare import check
from mla_oracle.verdict.kernels import KERNELS
from mla_oracle.verdict.numerics import resolve

FAMILIES = ("normal", "peaked", "flat", "position", "onehot", "tailed", "rising")
SHAPES = ((1, 8, 4), (2, 24, 16), (3, 72, 64), (4, 40, 33), (8, 144, 128), (2, 576, 512))  # H, D, V
LENGTHS = (0, 1, 2, 3, 5, 17, 31, 63, 64, 65, 100, 257, 400)
SPECS = tuple(declared.DECLARED)
BUILDS = ("strict", *isa.available())
EACH = 12  # numpy kernels of one spec in one family
EMULATED = 4


class Judged(NamedTuple):
    source: str
    spec: str | None
    inputs: str
    what: str  # the case, and the kernel
    passed: bool
    reason: str


def problem(rng, inputs, cache, shapes=SHAPES, lengths=LENGTHS):
    """A paged case; one in six has queries of f32 over a narrower cache."""
    H, D, V = shapes[rng.integers(len(shapes))]
    lens = "+".join(str(n) for n in rng.choice(lengths, rng.integers(1, 4)))
    apart = cache != "f32" and rng.random() < 1 / 6
    tokens = int(rng.integers(4))
    case = generate(
        f"paged:heads={H},row={D},value={V},lens={lens},scale={float(D**-0.5 * rng.choice([0.3, 1, 3]))!r},"
        f"inputs={inputs},dtype={'f32' if apart else cache},seed={rng.integers(10**6)},"
        f"block={rng.choice([1, 16, 64])},pages={rng.choice(['shuffled', 'descending', 'strided'])},"
        f"lse_base={rng.choice(['e', '2'])},causal={rng.choice(['true', 'false'])}"
        f"{f',tokens={tokens}' if tokens else ''}"
    )
    narrow = case.kv_cache.astype(honest.NARROW[cache])
    return dataclasses.replace(case, kv_cache=narrow, block_stride=None, page_ids=None, num_blocks=None,
                               block_table=positions(case), id=None) if apart else case  # fmt: skip


def positions(case):
    """The block table of a case whose pages have ids of their own, as places in its cache."""
    if case.page_ids is None:
        return case.block_table
    where = {int(page): i for i, page in enumerate(case.page_ids)}
    return np.vectorize(lambda page: where.get(int(page), -1), otypes=[np.int32])(case.block_table)


def judge(source, spec, inputs, case, actual, what=""):
    verdict = check(case, actual, expected(case), numerics=spec)
    return Judged(source, spec, inputs, f"{what} {case.id or case.name}", verdict.passed, verdict.reason)


def in_numpy(rng, inputs, spec):
    cache = str(rng.choice(declared.DECLARED[spec].caches))
    case = problem(rng, inputs, cache)
    name, kernel, narrowed = declared.DECLARED[spec].draw(rng, cache)
    own = narrowed or (cache if case.q.dtype != case.kv_cache.dtype else None)
    return case, honest.over_rows(case, kernel, declared.stored(rng, spec, cache), inputs=own), name


def emulated(rng, inputs, spec):
    cache = str(rng.choice(declared.DECLARED[spec].caches))
    case = problem(rng, inputs, cache)
    kinds = {"out": declared.stored(rng, spec, cache), "lse": "f32"}
    found = emulate(case, resolve(spec, case, kinds), rng, fine=bool(rng.integers(2)))
    return case, {name: x.astype(honest.NARROW[kinds[name]]) for name, x in found.items()}, "emulated"


def ours(case, build):
    """decode_paged of this build, as any user calls it."""
    how = {"strict": {"backend": "strict"}, "scalar": {"backend": "ptx", "kernel": "scalar"},
           "mma": {"backend": "ptx", "kernel": "mma"}}.get(build, {"backend": "fast", "isa": build})  # fmt: skip
    return decode_paged(
        case.q, case.kv_cache, positions(case), case.seq_lens, softmax_scale=case.softmax_scale,
        head_dim_v=case.head_dim_v, causal=case.causal, lse_base=case.lse_base, empty_lse=case.empty_lse, **how,
    )._asdict()  # fmt: skip


def dense(rng, kind, dtype):
    H, P, R, V, L = [(2, 3, 2, 4, 6), (4, 24, 8, 32, 64), (2, 128, 64, 128, 512), (3, 8, 0, 8, 16)][rng.integers(4)]
    n = int(rng.choice([1, 3, 17, 64, 130]))
    return generate(
        f"{kind}:heads={H},nope={P},rope={R},value={V},rank={L},queries={min(n, int(rng.integers(1, 4)))},cached={n},"
        f"dtype={dtype},seed={rng.integers(10**6)}"
    )


def of_numpy():
    for spec in SPECS:
        for inputs in FAMILIES:
            rng = np.random.default_rng([SPECS.index(spec), FAMILIES.index(inputs)])
            for _ in range(EACH):
                case, found, name = in_numpy(rng, inputs, spec)
                yield judge("numpy", spec, inputs, case, found, name)
    for seed, kind in enumerate(("naive", "absorbed")):
        for dtype in ("f32", "f16", "bf16"):
            rng = np.random.default_rng([seed, ord(dtype[0])])
            for i in range(10):
                case = dense(rng, kind, dtype)
                yield judge("numpy", None, kind, case, honest.dense(case, i % 2 == 0, dtype))


def of_emulator():
    for spec in SPECS:
        for inputs in FAMILIES:
            rng = np.random.default_rng([99, SPECS.index(spec), FAMILIES.index(inputs)])
            for _ in range(EMULATED):
                case, found, name = emulated(rng, inputs, spec)
                yield judge("emulator", spec, inputs, case, found, name)


def of_our_own():
    for build in BUILDS:
        for inputs in FAMILIES:
            rng = np.random.default_rng([BUILDS.index(build), FAMILIES.index(inputs)])
            for spec in (None, None, "strict" if build == "strict" else "fast"):
                case = problem(rng, inputs, "bf16" if build == "amx" else str(rng.choice(declared.EVERY)))
                yield judge(build, spec, inputs, case, ours(case, build))
    for kind, attend in (("naive", attend_naive), ("absorbed", attend_absorbed)):
        for backend in ("strict", "fast"):
            rng = np.random.default_rng(5)
            case = dense(rng, kind, "f32")
            P, R = case.q_nope.shape[2], case.q_pe.shape[2]
            H, V, L = case.w_uv.shape
            out = attend(Geometry(num_heads=H, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V, kv_lora_rank=L),
                         **case.tensors(), softmax_scale=case.softmax_scale, backend=backend)  # fmt: skip
            yield judge(backend, None, kind, case, {"out": out})


def of_cuda():
    """Small ones: an interpreted kernel takes a tenth of a second."""
    for inputs in FAMILIES:
        rng = np.random.default_rng(FAMILIES.index(inputs))
        for build, cache in (("scalar", "f32"), ("scalar", "bf16"), ("mma", "bf16"), ("mma", "f16")):
            case = problem(rng, inputs, cache, ((2, 32, 16), (3, 80, 64)), (1, 5, 17, 40))
            while case.q.dtype != case.kv_cache.dtype:
                case = problem(rng, inputs, cache, ((2, 32, 16), (3, 80, 64)), (1, 5, 17, 40))
            yield judge(build, None, inputs, case, ours(case, build))


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    return [*of_numpy(), *of_emulator(), *of_our_own()]


def test_none_of_two_thousand_honest_kernels_is_rejected(judged: list[Judged]) -> None:
    assert [one for one in judged if not one.passed] == []
    assert len(judged) >= 2000


def test_most_share_no_code_with_the_emulator(judged: list[Judged]) -> None:
    count = {source: sum(one.source == source for one in judged) for source in {one.source for one in judged}}
    assert count["numpy"] == len(SPECS) * len(FAMILIES) * EACH + 60 == 1656
    assert count["emulator"] == len(SPECS) * len(FAMILIES) * EMULATED == 532
    assert {"strict", *isa.available()} <= set(count)


def test_every_preset_is_among_them_in_every_family(judged: list[Judged]) -> None:
    assert set(KERNELS) < set(SPECS)
    independent = {(one.spec, one.inputs) for one in judged if one.source == "numpy"}
    assert independent >= {(spec, inputs) for spec in SPECS for inputs in FAMILIES}
    assert {(None, "naive"), (None, "absorbed")} <= independent


@pytest.mark.skipif(missing("ptx") is not None, reason="the extra cuda is not installed")
def test_none_of_the_cuda_kernels_is_rejected() -> None:
    found = list(of_cuda())
    assert [one for one in found if not one.passed] == []
    assert len(found) == 4 * len(FAMILIES)


def test_the_cases_are_not_all_alike() -> None:
    rng = np.random.default_rng(0)
    cases = [problem(rng, "normal", "bf16") for _ in range(60)]
    assert all(isinstance(case, PagedCase) for case in cases)
    assert len({case.q.shape for case in cases}) > 20
    assert 3 < sum(case.q.dtype != case.kv_cache.dtype for case in cases) < 25
    assert {case.lse_base for case in cases} == {"e", "2"} and {case.causal for case in cases} == {True, False}
