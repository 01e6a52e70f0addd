# SPDX-License-Identifier: Apache-2.0
"""The absorbed form on tensor cores against strict f64, within the bound of mla_oracle.gpu.absorbed_mma."""

import kernel_cases
import numpy as np
import pytest
from kernel_cases import EPS, TINY, assert_within
from problems import DTYPES

from mla_oracle.errors import UnsupportedError
from mla_oracle.gpu import absorbed_mma, forms
from mla_oracle.reference import _absorbed

SCALE = 0.0625
SHAPES = {  # t_q, H, P, R, V, L, t_kv
    "glm-5.2": (1, 8, 24, 16, 32, 64, 40),
    "glm-5.3-flash": (2, 8, 32, 0, 32, 64, 33),
    "minicpm3": (1, 5, 16, 16, 8, 32, 65),
    "more tokens than a block has, and a step and a half of depth": (70, 2, 96, 16, 24, 112, 70),
    "wide": (1, 1, 192, 64, 256, 512, 70),
}


@pytest.fixture(params=["ptx sm_80", "ptx sm_86", "ptx sm_90", "ptx sm_100", "cuda"])
def machine(request):
    yield from kernel_cases.machine(request.param)


def problem(t_q, H, P, R, V, L, t_kv, dtype):
    rng = np.random.default_rng(0)
    shapes = [(t_q, H, P), (t_q, H, R), (t_kv, L), (t_kv, R), (H, P, L), (H, V, L)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    return [(x / np.sqrt(L) if i > 3 else x).astype(DTYPES[dtype]) for i, x in enumerate(arrays)]


def truth_and_bound(arrays, dtype):
    """[t_q, H, V] each: strict f64, and the docstring of absorbed_mma.attend in numpy."""
    u, step = (2.0**-8, TINY) if dtype == "bf16" else (2.0**-11, 2.0**-24)
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (x.astype(np.float64) for x in arrays)
    (t_q, H, P), (t_kv, L), D = q_nope.shape, c_kv.shape, c_kv.shape[1] + k_pe.shape[1]
    out = np.empty((t_q, H, w_uv.shape[1]))
    _absorbed.attend(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, SCALE, out)
    q_lat = np.einsum("thp,hpl->thl", q_nope, w_uk)
    score = (q_lat @ c_kv.T + q_pe @ k_pe.T) * SCALE
    n = t_kv - t_q + np.arange(t_q) + 1
    seen = (np.arange(t_kv) < n[:, None])[:, None]
    size = np.einsum("thp,hpl->thl", np.abs(q_nope), np.abs(w_uk)) @ np.abs(c_kv).T + np.abs(q_pe) @ np.abs(k_pe).T
    size = np.where(seen, size * SCALE, 0).max(-1)[..., None]
    p = np.where(seen, np.exp(score - score.max(-1, keepdims=True)), 0)
    mean = p / p.sum(-1, keepdims=True) @ np.abs(c_kv)
    relative = EPS * ((1.1 * D + 16) * size + 1.6 * n[:, None, None] + 32) + 2 * D * TINY * SCALE
    o_lat = (relative + u) * mean + n[:, None, None] * step * (1 + np.abs(c_kv).max())
    factor = np.expm1(2 * (u + 1.1 * P * EPS) * size) + u + 1.1 * L * EPS
    return out, np.einsum("thl,hvl->thv", o_lat + factor * mean, np.abs(w_uv))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_whole_form(machine, name, dtype):
    arrays = problem(*SHAPES[name], dtype)
    truth, bound = truth_and_bound(arrays, dtype)
    out = np.full(truth.shape, 77, np.float32)
    forms.fill(absorbed_mma.attend, machine, *arrays, SCALE, outputs=(out,))
    assert_within(out, truth, bound)
    # That is of the worst case. Three roundings of any sign, u / sqrt(3) each: u in all, and twice that for the room.
    u = 2.0**-8 if dtype == "bf16" else 2.0**-11
    assert np.sqrt(np.mean((out - truth) ** 2)) <= 2 * u * np.sqrt(np.mean(truth**2))


def test_the_ends_of_strided_arrays(machine):
    q_nope, q_pe, _, _, w_uk, w_uv = problem(3, 4, 24, 8, 16, 40, 3, "bf16")
    heads_first = np.ascontiguousarray(q_nope.transpose(1, 0, 2)).transpose(1, 0, 2)
    room = np.full((4, 24, 64), np.nan, w_uk.dtype)
    room[..., 16:56] = w_uk
    q = np.full((3, 4, 48), 77, w_uk.dtype)
    forms.fill(absorbed_mma.absorb_query, machine, heads_first, q_pe, room[..., 16:56], outputs=(q,))
    want = np.einsum("thp,hpl->thl", q_nope.astype(np.float64), w_uk.astype(np.float64))
    assert q[..., 40:].tobytes() == q_pe.tobytes()
    assert_within(q[..., :40].astype(np.float32), want, 2.0**-8 * np.abs(want) + 1e-5)

    o_lat, out = want.astype(np.float32), np.full((3, 4, 16), 77, np.float32)
    forms.fill(absorbed_mma.up_project, machine, o_lat, w_uv, outputs=(out,))
    rounded = o_lat.astype(w_uv.dtype).astype(np.float64)
    assert_within(out, np.einsum("thl,hvl->thv", rounded, w_uv.astype(np.float64)), np.full(out.shape, 1e-4))


def test_widths_and_strides_that_copies_cannot_follow_are_refused(machine):
    q_nope, q_pe, _, _, w_uk, w_uv = problem(2, 2, 24, 8, 16, 40, 2, "bf16")
    q = np.empty((2, 2, 48), w_uk.dtype)
    for arrays, said in [
        ((q_nope[..., :20], q_pe, w_uk[:, :20]), "q_nope has a width of 20 elements, tensor cores take multiples of 8"),
        ((q_nope, q_pe, w_uk[..., :36]), "w_uk has a width of 36 elements"),
        ((np.pad(q_nope, ((0, 0), (0, 0), (0, 4)))[..., :24], q_pe, w_uk), r"q_nope has a stride of \d+ elements"),
    ]:
        out = q[..., : arrays[2].shape[2] + 8]
        with pytest.raises(UnsupportedError, match=said):
            forms.fill(absorbed_mma.absorb_query, machine, *arrays, outputs=(np.ascontiguousarray(out),))
    out = np.empty((2, 2, 15), np.float32)
    with pytest.raises(UnsupportedError, match="v_head_dim is 15, tensor cores take even ones"):
        o_lat = np.zeros((2, 2, 40), np.float32)
        forms.fill(absorbed_mma.up_project, machine, o_lat, w_uv[:, :15], outputs=(out,))
