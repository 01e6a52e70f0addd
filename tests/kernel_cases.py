# SPDX-License-Identifier: Apache-2.0
"""What the tests of the CUDA kernels share: the machines they run on, and the bounds their docstrings publish.

A file of tests makes its fixture of BACKENDS and `machine`. Each bound takes the arrays of its form and returns what
the kernel may miss strict f64 by, element by element.
"""

from functools import cache

import ml_dtypes
import numpy as np
import pytest
from fast_cases import strict64

from mla_oracle import backends
from mla_oracle.errors import MissingError
from mla_oracle.gpu import forms, paged_mma
from mla_oracle.gpu.machine import Buffer
from mla_oracle.ptx import Interpreter

BACKENDS = ("ptx", "cuda")
ARCHS = ("sm_80", "sm_90", "sm_100")  # what the interpreter runs, from two code generators of NVRTC
# The tile that tests of the tensor-core kernel give an architecture, so that small problems are run with each of them.
TILE_OF = {"ptx sm_80": (64, 32), "ptx sm_86": (16, 32), "ptx sm_90": (64, 64), "ptx sm_100": (32, 32)}
MACHINES = (*(f"ptx {arch}" for arch in ARCHS), "cuda")
EPS, TINY = 2.0**-23, 2.0**-126


@cache
def missing(backend):
    """Why nothing runs on `backend` here, or None."""
    if backend == "cuda":
        from mla_oracle.gpu import driver

        probe, reason = driver.load, "no CUDA device"
    else:
        from mla_oracle.gpu import nvrtc

        probe, reason = nvrtc.version, "the extra cuda is not installed"
    try:
        probe()
    except MissingError:
        return reason
    return None


@cache
def interpreter(arch, threads=None):
    return Interpreter(arch, threads=threads)


class Planted(Interpreter):
    """An interpreter of the tensor-core kernel with `old` replaced by `new` in its text."""

    def __init__(self, arch, old, new):
        super().__init__(arch)
        self.change = old, new

    def kernel(self, file, name, **defines):
        from mla_oracle.gpu import cache, sources

        text = sources.flatten(file)
        if name.startswith(("paged_mma", "paged_wgmma")):
            assert text.count(self.change[0]) == 1, self.change[0]
            text = text.replace(*self.change)
            text = text.replace("\nKERNEL(f16)\n" if name.endswith("_bf16") else "\nKERNEL(bf16)\n", "\n")
        options = [f"-D{macro}={value}" for macro, value in defines.items()]
        return self.load(cache.compile(text, self.arch, name=file, options=options).ptx, name, file=file)


def machine(name):
    """The machine of one of MACHINES or BACKENDS, for a fixture; the test is skipped where it is missing.

    No kernel may have met what the interpreter warns of.
    """
    backend, _, arch = name.partition(" ")
    if reason := missing(backend):
        pytest.skip(reason)
    machine = interpreter(arch) if arch else backends.machine(backend)
    yield machine
    for kernel in getattr(machine, "_kernels", {}).values():
        assert not kernel.warnings, (kernel.name, kernel.warnings)


def stored(case, dtype=ml_dtypes.bfloat16):
    return case.but(q=case.q.astype(dtype), kv_cache=case.kv_cache.astype(dtype))


def bits(results):
    return [x.tobytes() for x in results]


def tiled(name, monkeypatch):
    """`machine`, with the tile of TILE_OF alone where it is there."""
    if name in TILE_OF:
        monkeypatch.setattr(paged_mma, "TILES", (TILE_OF[name],))
    yield from machine(name)


def paged(case, lse_unit=1.0, kernel="scalar"):
    """(out [B, T, H, V], lse [B, T, H]) of a fast_cases.Case: the docstring of gpu.paged.decode in numpy."""
    mma = kernel != "scalar"
    u, step = (0.0, TINY) if not mma else (2.0**-11, 2.0**-24) if case.q.dtype == np.float16 else (2.0**-8, TINY)
    B, T, H, D = case.q.shape
    out, lse = np.zeros((B, T, H, case.V)), np.zeros((B, T, H))
    for b in range(B):
        rows = case.keys(b)
        finite = np.isfinite(rows).all(1)
        rows = np.where(finite[:, None], rows, 0)
        for t in range(T):
            n = case.visible(b, t)
            if not finite[:n].any():
                continue
            q, k = np.nan_to_num(case.q[b, t].astype(np.float64)), rows[:n]
            score = np.where(finite[:n], q @ k.T * case.scale, -np.inf)
            size = (np.abs(q) @ np.abs(k).T).max(1) * abs(case.scale)
            top = score.max(1, keepdims=True)
            p = np.exp(score - top)
            relative = EPS * ((1.1 * D + 16) * size + 1.6 * n + 32 if mma else (D / 32 + 12) * size + n + 32)
            relative += 2 * D * TINY * abs(case.scale)
            mean = p @ np.abs(k[:, : case.V]) / p.sum(1, keepdims=True)
            out[b, t] = (relative[:, None] + u) * mean + n * step * (1 + np.abs(k[:, : case.V]).max())
            lse[b, t] = (relative + 2 * EPS * (np.abs(top[:, 0]) + 2 * np.log(n))) * lse_unit
    return out, lse


def dense(form, q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, scale):
    """[t_q, H, V]: the docstring of gpu.dense in numpy; `form` is "naive" or "absorbed"."""
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (x.astype(np.float64) for x in (q_nope, q_pe, c_kv, k_pe, w_uk, w_uv))
    (t_q, _, P), R, (t_kv, L) = q_nope.shape, q_pe.shape[2], c_kv.shape
    key = np.einsum("hpl,tl->htp", w_uk, c_kv)
    score = (np.einsum("qhp,htp->qht", q_nope, key) + np.einsum("qhr,tr->qht", q_pe, k_pe)) * scale
    key = np.einsum("hpl,tl->htp", np.abs(w_uk), np.abs(c_kv))
    size = np.einsum("qhp,htp->qht", np.abs(q_nope), key) + np.einsum("qhr,tr->qht", np.abs(q_pe), np.abs(k_pe))
    visible = t_kv - t_q + np.arange(t_q) + 1
    hidden = (np.arange(t_kv) >= visible[:, None])[:, None]
    size = np.where(hidden, 0, size).max(-1) * scale
    p = np.where(hidden, -np.inf, score)
    p = np.exp(p - p.max(-1, keepdims=True))
    steps = (L + P + R) / 32 + 24 if form == "naive" else P + (L + R) / 32 + 24
    relative = EPS * (steps * size + visible[:, None] + L / 32 + 40)
    v = np.einsum("hvl,tl->htv", np.abs(w_uv), np.abs(c_kv))
    mean = np.einsum("qht,htv->qhv", p / p.sum(-1, keepdims=True), v)
    lost = 1 + v.max() + (1 + np.abs(c_kv).max()) * np.abs(w_uv).sum(2)  # [H, V]
    return relative[..., None] * mean + t_kv * TINY * lost


def rope(x, cosine_error, amplitude, pairs, neox):
    """[T, H, R] of x [T, H, R] and the error [T, n/2] of its cosines and sines: gpu.forms.rotate in numpy."""
    first = np.arange(pairs) if neox else 2 * np.arange(pairs)
    second = first + pairs if neox else first + 1
    x = np.abs(x.astype(np.float64))
    bound = np.zeros(x.shape)
    one = (x[..., first] + x[..., second]) * (cosine_error + 2 * EPS * amplitude)[:, None] + TINY
    bound[..., first] = bound[..., second] = one
    return bound


def angles(theta, base, amplitude):
    """[T, n/2] of theta' [T, n/2]: gpu.forms.turn in numpy."""
    j = np.arange(theta.shape[1])
    return amplitude * (np.abs(theta) * EPS * (5 * (j + 3) + abs(np.log(base))) + 5 * EPS)


def merge(partial_out, partial_lse, unit, empty):
    """(out [N, V], lse [N]) of partial_out [S, N, V], partial_lse and `empty` [S, N]: gpu.forms.merge in numpy."""
    S = len(partial_out)
    o = np.where(empty[..., None], 0, np.abs(partial_out.astype(np.float64)))
    lse = np.where(empty, -np.inf, partial_lse.astype(np.float64))
    top = lse.max(0)
    away = np.where(empty, 0, unit * (top - lse)) if np.isfinite(top).any() else np.zeros(lse.shape)
    relative = EPS * (2 * np.minimum(away.max(0), 104) + S + 12)
    w = np.where(empty, 0, np.exp(-away))
    mean = np.einsum("sn,snv->nv", w, o) / np.maximum(w.sum(0), 1e-300)[:, None]
    out = relative[:, None] * mean + S * TINY * (1 + o.max(initial=0))
    return out, (relative + 3 * EPS * np.log(S)) / unit + 2 * EPS * np.abs(np.where(np.isfinite(top), top, 0))


def assert_within(got, expected, allowed):
    """Every element within its bound; infinities and NaN in the same places."""
    with np.errstate(invalid="ignore"):
        good = np.abs(got - expected) <= allowed
    good |= (got == expected) | (np.isnan(got) & np.isnan(expected))
    bad = [x[~good][0] for x in (got, expected, np.broadcast_to(allowed, got.shape))] if not good.all() else []
    assert good.all(), (np.argwhere(~good)[0], *bad)


def decode(machine, case, lse_unit=1.0, kernel="scalar", **options):
    """(out, lse) of a fast_cases.Case on `machine`, arrays made and taken by forms.fill."""
    rows = case.q.shape[:3]
    out, lse = np.full((*rows, case.V), 77, np.float32), np.full(rows, 77, np.float32)
    problem = case.q, case.kv_cache, case.block_table, case.seq_lens, case.scale, case.causal, lse_unit, case.empty_lse
    forms.fill(forms.decode_paged, machine, *problem, outputs=(out, lse), kernel=kernel, **options)
    return out, lse


def assert_right(machine, case, kernel="scalar", **options):
    """(out, lse), within their bound of strict f64."""
    out, lse = decode(machine, case, kernel=kernel, **options)
    expected_out, expected_lse = strict64(case)
    allowed_out, allowed_lse = paged(case, kernel=kernel)
    assert_within(out, expected_out, allowed_out)
    assert_within(lse, expected_lse, allowed_lse)
    return out, lse


def assert_far(machine, case, kernel):
    """The same bits when requests lie 2^32 elements apart in q and in the table; the first of two must be empty."""
    expected = decode(machine, case, kernel=kernel)
    arrays = [forms.put(machine, x) for x in (case.q, case.kv_cache, case.block_table, case.seq_lens)]
    for i in (0, 2):
        near, far = arrays[i], arrays[i].dtype.itemsize << 32
        pointer = (near.pointer + near.strides[0] - far) % 2**64
        arrays[i] = Buffer(pointer, near.shape, near.dtype, (far, *near.strides[1:]), near)
    out, lse = (machine.empty(x.shape, np.float32) for x in expected)
    longest = int(case.seq_lens.max())
    forms.decode_paged(machine, *arrays, case.scale, True, 1.0, -np.inf, out, lse, longest=longest, kernel=kernel)
    assert [machine.download(x).tobytes() for x in (out, lse)] == [x.tobytes() for x in expected]
