# SPDX-License-Identifier: Apache-2.0
"""Every form, dtype and kernel on cases of many shapes, twice: the package's own verdict, and the same bits again.

A case is its id (`mla-oracle explain ID` says what it is). The verdict's budget is made for what the kernel that ran
rounds: on tensor cores weights in the cache's dtype, in the scalar kernels nothing below f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mla_oracle import dtypes, generate, oracle
from mla_oracle.arrays import Array
from mla_oracle.cases import AbsorbedCase, Case, NaiveCase, PagedCase
from mla_oracle.cases.extensions import require_plain
from mla_oracle.errors import OracleError
from mla_oracle.gpu import absorbed_mma, forms, paged_wgmma
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Finding
from mla_oracle.gpu.driver import DriverError
from mla_oracle.verdict import compare

EPS = 2.0**-23
LOG2E = 1.4426950408889634
SCALAR = {"p": "f32", "score_accumulator": "f32", "value_accumulator": "f32"}
DENSE_SCALAR = {**SCALAR, "query": "f32", "cache": "f32"}  # what a dense form makes of its inputs is f32 as well
NUMERICS: dict[type, dict[str, str]] = {PagedCase: SCALAR, NaiveCase: DENSE_SCALAR, AbsorbedCase: DENSE_SCALAR}

SHAPES = (  # of paged cases, rows multiples of 16 so that both kernels take them; the second: keys of a split
    ("heads=1,row=16,value=16,scale=0.125,lens=1,block=1", 64),
    ("heads=3,row=48,value=32,scale=0.125,lens=0+1+31+32+33+63+64+65+130,block=16", 64),
    ("heads=20,row=80,value=64,scale=0.125,lens=130+0+61,tokens=2,block=61", 128),
    ("heads=16,row=80,value=64,scale=0.125,lens=70+5,tokens=4,causal=false,block=64,lse_base=2", 64),
    ("heads=5,row=64,value=48,scale=0.125,lens=200,block=64,inputs=peaked", 64),
    ("heads=5,row=64,value=48,scale=0.125,lens=200,block=64,inputs=rising", 64),
)
BOXES = (  # rows of whole boxes, for wgmma
    ("heads=20,row=192,value=128,scale=0.0625,lens=0+1+63+64+65+300,tokens=2,block=61", 192),
    ("heads=64,row=128,value=128,scale=0.0625,lens=130+5,block=64,inputs=rising,lse_base=2", 512),
)
ODD = "heads=3,row=33,value=17,scale=0.125,lens=70+1,tokens=2,block=16"  # for the scalar kernels alone
SPOILED = "heads=5,row=48,value=32,scale=0.125,lens=33+150,tokens=2,block=16"  # with numbers that are not finite
SPOILED_BOXES = "heads=5,row=192,value=128,scale=0.0625,lens=33+150,tokens=2,block=16"
LARGE_SHAPES = (
    ("geometry=deepseek-v3,lens=1+63+64+65+1000+4096", 512),
    ("geometry=glm-5.2,lens=8192+777,inputs=peaked", 1024),
    ("geometry=glm-5.3-flash,lens=511+512+513,tokens=2", 128),
    ("geometry=minicpm3,lens=1000x4,inputs=tailed", 512),
    ("geometry=deepseek-v3,heads=4,lens=16384,tokens=4", 4096),
    ("geometry=deepseek-v2-lite,lens=1024x8", 512),
)
LARGE_BOXES = tuple(LARGE_SHAPES[i] for i in (0, 1, 2, 4, 5))  # minicpm3's rows are none
DENSE = (
    "heads=1,nope=1,rope=2,value=1,rank=1,cached=1",
    "heads=3,nope=13,rope=6,value=9,rank=33,queries=3,cached=70",
    "heads=4,nope=24,rope=8,value=32,rank=64,queries=5,cached=40",
)
EVEN = (  # for tensor cores
    "heads=4,nope=24,rope=16,value=32,rank=64,queries=5,cached=70",
    "heads=2,nope=32,rope=16,value=24,rank=80,cached=3",
)
LARGE_DENSE = ("geometry=deepseek-v2-lite,cached=1000,queries=2", "geometry=glm-5.2,heads=8,cached=700")
OTHERS = (
    "merge:states=1,rows=3,heads=2,value=5", "merge:states=7,rows=5,heads=8,value=130,lse_base=2",
    "rope:heads=3,rope=8,pairing=interleaved,base=10000", "rope:geometry=deepseek-v3,heads=4",
    "rope:heads=3,rope=64,pairing=neox,base=10000,angles=power",
    "append:rank=150,rope=3", "append:geometry=deepseek-v3,tokens=30",
)  # fmt: skip
KINDS = {"naive": (None, ("f32",)), "absorbed": ("scalar", ("f32", "bf16"))}  # the kernel, and dtypes


@dataclass(frozen=True)
class Trial:
    """A case, the kernel that runs where it is not the form's own, and for paged cases the keys of a split and a number
    that is put into a visible row."""

    id: str
    kernel: str | None = None
    split_keys: int = 512
    number: float | None = None

    def __str__(self) -> str:
        if self.kernel is None or not self.id.startswith("paged"):
            return f"{self.id} ({self.kernel})" if self.kernel else self.id
        number = "" if self.number is None else f", {self.number} in a row"
        return f"{self.id} ({self.kernel}, splits of {self.split_keys}{number})"

    def case(self) -> Case:
        """The number is in the row in the middle of the last request, where every query is positive."""
        case = generate(self.id)
        if self.number is None or not isinstance(case, PagedCase):
            return case
        block, offset = divmod(int(case.seq_lens[-1]) // 2, case.kv_cache.shape[1])
        q, kv_cache = case.q.copy(), case.kv_cache.copy()
        q[..., 3] = np.abs(q[..., 3]) + 1
        kv_cache[case.block_table[-1, block], offset, 3] = self.number
        return replace(case, q=q, kv_cache=kv_cache)


def trials(small: bool, arch: str) -> list[Trial]:
    """Those of kernels that there are for `arch`; `small`: that the interpreter does in seconds."""
    kinds = [(dtype, kernel) for dtype in ("f32", "f16", "bf16") for kernel in ("scalar", "mma")]
    kinds.remove(("f32", "mma"))
    chosen = [Trial(f"paged:{shape},dtype={kind[0]}", kind[1], split) for shape, split in SHAPES for kind in kinds]
    for number in (np.nan, np.inf, -np.inf):
        chosen += [Trial(f"paged:{SPOILED},dtype={dtype}", kernel, 64, number) for dtype, kernel in kinds]
    chosen += [Trial(f"paged:{ODD},dtype={dtype}", "scalar", 32) for dtype in ("f32", "f16", "bf16")]
    dense = DENSE if small else DENSE + LARGE_DENSE
    for kind, (kernel, stored) in KINDS.items():
        chosen += [Trial(f"{kind}:{shape},dtype={dtype}", kernel) for dtype in stored for shape in dense]
    even = EVEN if small else EVEN + LARGE_DENSE
    chosen += [Trial(f"absorbed:{shape},dtype={dtype}", "mma") for dtype in ("f16", "bf16") for shape in even]
    chosen += [Trial(f"{other},dtype={dtype}") for other in OTHERS for dtype in ("f32", "f16", "bf16")]
    if not small:
        kinds = [("bf16", "mma"), ("bf16", "scalar"), ("f16", "mma")]
        for shape, split in LARGE_SHAPES:
            chosen += [Trial(f"paged:{shape},dtype={dtype}", kernel, split) for dtype, kernel in kinds]
    if arch == paged_wgmma.ARCH:
        whole = BOXES if small else BOXES + LARGE_BOXES
        for dtype in ("f16", "bf16"):
            chosen += [Trial(f"paged:{shape},dtype={dtype}", "wgmma", split) for shape, split in whole]
            spoiled = f"paged:{SPOILED_BOXES},dtype={dtype}"
            chosen += [Trial(spoiled, "wgmma", 64, number) for number in (np.nan, np.inf, -np.inf)]
    return chosen


def findings(bench: Bench) -> Iterator[Finding]:
    for trial in trials(bench.small, bench.machine.arch):
        try:
            yield judge(bench, trial)
        except OracleError as error:
            yield {"name": str(trial), "ok": False, "reason": str(error)}
            if isinstance(error, DriverError):  # nothing runs in this process any more
                raise
    for dtype in ("f16", "bf16"):
        for end in ("query", "project"):
            yield judge_end(bench, end, dtype, (3, 2, 40, 24, 16, 72) if bench.small else (130, 16, 128, 128, 64, 512))


def judge(bench: Bench, trial: Trial) -> Finding:
    case = trial.case()
    truth = oracle.expected(case, precision="f64")
    results = run(bench, case, trial)
    again = run(bench, case, trial)
    numerics = None if trial.kernel in ("mma", "wgmma") else NUMERICS.get(type(case))
    verdict = compare.check(case, results, truth, numerics=numerics)
    same = all(results[name].tobytes() == again[name].tobytes() for name in results)
    reason = "" if verdict.passed else verdict.reason
    if not same:
        reason = f"two runs differ in their bits{'; ' if reason else ''}{reason}"
    found: Finding = {"name": str(trial), "ok": verdict.passed and same, **({"reason": reason} if reason else {})}
    if figures := verdict.figures.get(case.results[0]):  # none of what is not finite where it should be
        found |= {"units": figures.units, "max_abs_error": figures.max_abs_error}
    return found


def run(bench: Bench, case: Case, trial: Trial) -> dict[str, Array]:
    """The results of the case from the machine."""
    require_plain(case, "gpu.check")
    if not isinstance(case, PagedCase):
        return oracle.expected(case, precision="f32", backend=bench.backend, kernel=trial.kernel)
    q = case.q if case.q.ndim == 4 else case.q[:, None]
    out, lse = np.empty((*q.shape[:3], case.head_dim_v), np.float32), np.empty(q.shape[:3], np.float32)
    forms.fill(
        forms.decode_paged, bench.machine, q, case.kv_cache, case.block_table, case.seq_lens, case.softmax_scale,
        case.causal, 1.0 if case.lse_base == "e" else LOG2E, case.empty_lse, outputs=(out, lse),
        split_keys=trial.split_keys, kernel=trial.kernel,
    )  # fmt: skip
    return {"out": out.reshape(*case.q.shape[:-1], case.head_dim_v), "lse": lse.reshape(case.q.shape[:-1])}


def judge_end(bench: Bench, end: str, dtype: str, sizes: tuple[int, ...]) -> Finding:
    """An end of the absorbed form on tensor cores, within the bound of gpu.absorbed_mma."""
    T, H, P, V, R, L = sizes
    machine, rng, stored = bench.machine, np.random.default_rng(0), dtypes.dtype(dtype)
    step = 2.0**-8 if dtype == "bf16" else 2.0**-11
    depth, width = (P, L) if end == "query" else (L, V)
    x = rng.standard_normal((T, H, depth)).astype(stored if end == "query" else np.float32)
    weight = rng.standard_normal((H, P, L) if end == "query" else (H, V, L)).astype(stored)
    product = "thp,hpl->thl" if end == "query" else "thl,hvl->thv"
    wide = [array.astype(np.float64) for array in (x, weight)]
    truth, size = np.einsum(product, *wide), np.einsum(product, *map(np.abs, wide))
    there = [forms.put(machine, array) for array in (x, weight)]
    if end == "query":
        q_pe = rng.standard_normal((T, H, R)).astype(stored)
        out = machine.empty((T, H, L + R), stored)
        absorbed_mma.absorb_query(machine, there[0], forms.put(machine, q_pe), there[1], out)
        whole: Any = machine.download(out)
        copied = whole[..., L:].tobytes() == q_pe.tobytes()
        got, allowed = whole[..., :L].astype(np.float64), 1.1 * P * EPS * size + step * np.abs(truth) + 2.0**-24
    else:
        out = machine.empty((T, H, width), np.float32)
        absorbed_mma.up_project(machine, there[0], there[1], out)
        copied = True
        got, allowed = machine.download(out).astype(np.float64), (1.1 * L * EPS + step) * size + L * 2.0**-24
    units = float((np.abs(got - truth) / allowed).max())
    found: Finding = {"name": f"absorbed {end} mma {dtype} {sizes}", "ok": bool(units <= 1) and copied, "units": units}
    if not found["ok"]:
        found["reason"] = f"off by {units:.2f} of its bound" if copied else "q_pe is not copied as it is"
    return found
