# SPDX-License-Identifier: Apache-2.0
"""The absorbed form on tensor cores against strict f64, within the bound of mla_oracle.gpu.absorbed_mma."""

import kernel_cases
import numpy as np
import pytest
from kernel_cases import EPS, TINY, assert_within
from problems import DTYPES

from mla_oracle import Geometry, attend_absorbed
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.gpu import absorbed_mma, forms
from mla_oracle.gpu.machine import Buffer
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


def truth_and_bound(arrays, dtype, scale=SCALE):
    """[t_q, H, V] each: strict f64, and the docstring of absorbed_mma.attend in numpy."""
    u, step = (2.0**-8, TINY) if dtype == "bf16" else (2.0**-11, 2.0**-24)
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (x.astype(np.float64) for x in arrays)
    (t_q, H, P), (t_kv, L), D = q_nope.shape, c_kv.shape, c_kv.shape[1] + k_pe.shape[1]
    out = np.empty((t_q, H, w_uv.shape[1]))
    _absorbed.attend(q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, scale, out)
    q_lat = np.einsum("thp,hpl->thl", q_nope, w_uk)
    score = (q_lat @ c_kv.T + q_pe @ k_pe.T) * scale
    n = t_kv - t_q + np.arange(t_q) + 1
    seen = (np.arange(t_kv) < n[:, None])[:, None]
    size = np.einsum("thp,hpl->thl", np.abs(q_nope), np.abs(w_uk)) @ np.abs(c_kv).T + np.abs(q_pe) @ np.abs(k_pe).T
    size = np.where(seen, size * scale, 0).max(-1)[..., None]
    p = np.where(seen, np.exp(score - score.max(-1, keepdims=True)), 0)
    mean = p / p.sum(-1, keepdims=True) @ np.abs(c_kv)
    relative = EPS * ((1.1 * D + 16) * size + 1.6 * n[:, None, None] + 32) + 2 * D * TINY * scale
    latent = (relative + u) * mean + n[:, None, None] * step * (1 + np.abs(c_kv).max())
    least = 0 if dtype == "bf16" else 2.0**-25
    shift = (u + 1.1 * P * EPS) * size + least * np.abs(c_kv).sum(1).max() * scale
    o_lat = latent + (np.expm1(2 * shift) + u + 1.1 * L * EPS) * mean + least
    return out, np.einsum("thl,hvl->thv", o_lat, np.abs(w_uv))


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


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_queries_below_the_normal_numbers_of_f16_stay_within_the_bound(machine, dtype):
    arrays, scale = problem(2, 3, 24, 16, 32, 64, 40, dtype), 1024.0
    for i, factor in ((0, 2.0**-15), (1, 0), (2, 2.0**13), (4, 2.0**-8)):
        arrays[i] = (arrays[i].astype(np.float64) * factor).astype(arrays[i].dtype)
    arrays[5][:] = np.eye(32, 64)
    truth, bound = truth_and_bound(arrays, dtype, scale)
    out = np.full(truth.shape, 77, np.float32)
    forms.fill(absorbed_mma.attend, machine, *arrays, scale, outputs=(out,))
    assert_within(out, truth, bound)


def test_nan_beyond_a_querys_horizon_does_not_reach_it_and_a_score_of_minus_infinity_has_weight_zero(machine):
    arrays = problem(3, 2, 24, 16, 32, 64, 40, "bf16")

    def attend():
        out = np.full((3, 2, 32), 77, np.float32)
        forms.fill(absorbed_mma.attend, machine, *arrays, SCALE, outputs=(out,))
        return out

    clean = attend()
    arrays[2][39, 3] = np.nan
    out = attend()
    assert out[:2].tobytes() == clean[:2].tobytes() and np.isnan(out[2]).all()
    for i, x in enumerate(arrays):
        arrays[i] = np.abs(x)
    arrays[2][39, 3] = 1
    arrays[2][[0, 7, 33]] = -np.inf
    without = [x if x.ndim == 3 else np.delete(x, [0, 7, 33], axis=0) for x in arrays]
    truth, bound = truth_and_bound(without, "bf16")
    assert_within(attend(), truth, bound)
    arrays[2][:] = -np.inf
    assert (attend() == 0).all()


# --- who attends


GEOMETRY = Geometry(num_heads=3, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=6, kv_lora_rank=32)


def public(arrays, backend="ptx", geometry=GEOMETRY, **how):
    return attend_absorbed(geometry, *arrays, softmax_scale=SCALE, backend=backend, **how)


@pytest.fixture(params=kernel_cases.BACKENDS)
def backend(request):
    for _ in kernel_cases.machine(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_the_public_form_has_the_bits_of_the_kernel_that_is_named_or_chosen(backend, dtype):
    arrays, machine = problem(2, 3, 24, 16, 6, 32, 40, dtype), kernel_cases.backends.machine(backend)
    scalar, mma = np.empty((2, 3, 6), np.float32), np.empty((2, 3, 6), np.float32)
    widened = [x.astype(np.float32) for x in arrays] if dtype == "f16" else arrays
    forms.fill(forms.attend_absorbed, machine, *widened, SCALE, outputs=(scalar,))
    assert public(arrays, backend, kernel="scalar").tobytes() == scalar.tobytes()
    if dtype == "f32":
        assert public(arrays, backend).tobytes() == scalar.tobytes()
        return
    forms.fill(absorbed_mma.attend, machine, *arrays, SCALE, outputs=(mma,))
    assert mma.tobytes() != scalar.tobytes()
    assert {public(arrays, backend, kernel=kernel).tobytes() for kernel in (None, "mma")} == {mma.tobytes()}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"P": 20}, "q_nope has a width of 20 elements, tensor cores take multiples of 8"),
        ({"R": 8}, "qk_rope_head_dim is 8, expected a multiple of 16"),
        ({"L": 40}, "kv_lora_rank is 40, expected a multiple of 16"),
        ({"V": 5}, "v_head_dim is 5, tensor cores take even ones"),
        ({"L": 528}, "D is 544 and head_dim_v 528, expected at most 512"),
        ({"dtype": "f32"}, "q_nope is f32, expected all f16 or all bf16"),
    ],
    ids=str,
)
def test_it_is_chosen_where_it_takes_the_problem_and_refused_by_name_elsewhere(machine, sizes, said):
    sizes = {"t_q": 1, "H": 2, "P": 24, "R": 16, "V": 6, "L": 32, "t_kv": 3, "dtype": "bf16"} | sizes
    arrays, scalar = problem(*sizes.values()), f"absorbed_attend_{sizes['dtype']}"
    assert absorbed_mma.kernel_of(arrays, machine.arch) == scalar
    with pytest.raises(UnsupportedError, match=f"^kernel 'mma' does not take this problem: {said}"):
        absorbed_mma.kernel_of(arrays, machine.arch, "mma")


def test_arrays_of_several_dtypes_or_apart_by_no_whole_copies_are_the_scalar_kernels(machine):
    arrays = problem(2, 3, 24, 16, 6, 32, 40, "bf16")
    assert absorbed_mma.kernel_of(arrays, machine.arch) == "absorbed_mma_bf16"
    assert absorbed_mma.kernel_of(arrays, machine.arch, "scalar") == "absorbed_attend_bf16"
    others = [
        ({4: arrays[4].astype(np.float16)}, "q_nope is bf16 and w_uk f16", "f32"),
        ({5: np.zeros((3, 6, 36), arrays[5].dtype)[..., :32]}, "w_uv has a stride of 36 elements", "bf16"),
    ]
    for change, said, kind in others:
        changed = [change.get(i, x) for i, x in enumerate(arrays)]
        assert absorbed_mma.kernel_of(changed, machine.arch) == f"absorbed_attend_{kind}"
        with pytest.raises(UnsupportedError, match=f"does not take this problem: {said}"):
            absorbed_mma.kernel_of(changed, machine.arch, "mma")
    w_uk = forms.put(machine, arrays[4])
    arrays[4] = Buffer(w_uk.pointer + 2, w_uk.shape, w_uk.dtype, w_uk.strides, w_uk)
    with pytest.raises(UnsupportedError, match=r": w_uk begins at address 0x[0-9a-f]+, tensor cores take"):
        absorbed_mma.kernel_of(arrays, machine.arch, "mma")


def test_kernels_of_other_forms_and_backends_are_refused(backend):
    arrays = problem(2, 3, 24, 16, 6, 32, 40, "bf16")
    with pytest.raises(UnsupportedError, match=r"^kernel 'wgmma' does not take this problem: it is the paged"):
        public(arrays, backend, kernel="wgmma")
    with pytest.raises(InputError, match=r"^kernel is 'fast', expected scalar or mma or wgmma$"):
        public(arrays, backend, kernel="fast")
    with pytest.raises(InputError, match=r"^kernel is 'mma', expected None with backend 'strict'$"):
        public(arrays, "strict", kernel="mma")


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
