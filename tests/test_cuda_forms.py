# SPDX-License-Identifier: Apache-2.0
"""The other kernels against strict f64, within the bounds of mla_oracle.gpu, interpreted and on a GPU."""

import kernel_cases
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import EPS, MACHINES, TINY, assert_within
from problems import DTYPES

from mla_oracle import Yarn, append_kv, merge_states, rope
from mla_oracle.gpu import forms
from mla_oracle.gpu.machine import Buffer
from mla_oracle.reference import _absorbed, _naive, _rope

SCALE = 0.0625
STRICT = {"naive": _naive.attend, "absorbed": _absorbed.attend}
KERNELS = [("naive", "f32"), ("absorbed", "f32"), ("absorbed", "bf16")]
SHAPES = {  # t_q, H, P, R, V, L, t_kv
    "one number": (1, 1, 1, 1, 1, 1, 1),
    "odd sizes": (3, 3, 13, 5, 9, 33, 70),
    "rows around a tile": (3, 2, 12, 4, 7, 20, 33),
    "all of the cache": (5, 2, 8, 2, 6, 16, 5),
    "glm-5.2": (1, 8, 24, 8, 32, 64, 40),
    "glm-5.3-flash": (2, 8, 32, 0, 32, 64, 33),
    "deepseek": (1, 16, 16, 8, 16, 64, 33),
    "minicpm3": (1, 5, 8, 4, 8, 32, 65),
    "many heads": (1, 128, 4, 2, 4, 8, 33),
    "wide": (1, 1, 192, 64, 256, 512, 5),
}


@pytest.fixture(params=MACHINES)
def machine(request):
    yield from kernel_cases.machine(request.param)


# --- naive and absorbed


def dense(t_q, H, P, R, V, L, t_kv, dtype="f32", seed=0):
    """Normal inputs, weights of 1/sqrt(L): q_nope, q_pe, c_kv, k_pe, w_uk, w_uv."""
    rng = np.random.default_rng(seed)
    shapes = [(t_q, H, P), (t_q, H, R), (t_kv, L), (t_kv, R), (H, P, L), (H, V, L)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    return [(x / np.sqrt(L) if i > 3 else x).astype(DTYPES[dtype]) for i, x in enumerate(arrays)]


def attend(machine, form, arrays):
    out = np.full((*arrays[0].shape[:2], arrays[5].shape[1]), 77, np.float32)
    kernels = {"naive": forms.attend_naive, "absorbed": forms.attend_absorbed}[form]
    forms.fill(kernels, machine, *arrays, SCALE, outputs=(out,))
    return out


def strict(form, arrays):
    out = np.empty((*arrays[0].shape[:2], arrays[5].shape[1]))
    STRICT[form](*(x.astype(np.float64) for x in arrays), SCALE, out)
    return out


@pytest.mark.parametrize(("form", "dtype"), KERNELS, ids=map("-".join, KERNELS))
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_forms_within_the_bound_of_strict_f64(machine, form, dtype, shape):
    arrays = dense(*SHAPES[shape], dtype)
    out = attend(machine, form, arrays)
    assert_within(out, strict(form, arrays), kernel_cases.dense(form, *arrays, SCALE))
    assert attend(machine, form, arrays).tobytes() == out.tobytes()


@pytest.mark.parametrize(("form", "dtype"), KERNELS, ids=map("-".join, KERNELS))
def test_dense_forms_follow_strides(machine, form, dtype):
    """The halves of a query, of a cache row and of kv_b_proj, as engines keep them."""
    arrays = dense(2, 3, 12, 4, 9, 20, 40, dtype)
    q = np.concatenate(arrays[:2], axis=2)
    row = np.concatenate(arrays[2:4], axis=1)
    w = np.concatenate(arrays[4:], axis=1)
    views = [q[..., :12], q[..., 12:], row[:, :20], row[:, 20:], w[:, :12], w[:, 12:]]
    assert attend(machine, form, views).tobytes() == attend(machine, form, arrays).tobytes()
    turned = [np.asfortranarray(x) for x in arrays]
    assert attend(machine, form, turned).tobytes() == attend(machine, form, arrays).tobytes()


@pytest.mark.parametrize(("form", "dtype"), KERNELS, ids=map("-".join, KERNELS))
def test_nan_beyond_a_querys_horizon_does_not_reach_it(machine, form, dtype):
    arrays = dense(3, 2, 12, 4, 9, 20, 40, dtype)
    clean = attend(machine, form, arrays)
    arrays[2][39, 3] = np.nan
    out = attend(machine, form, arrays)
    assert out[:2].tobytes() == clean[:2].tobytes() and np.isnan(out[2]).all()


@pytest.mark.parametrize(("form", "dtype"), KERNELS, ids=map("-".join, KERNELS))
def test_a_score_of_minus_infinity_has_weight_zero_and_rows_of_nothing_else_are_zero(machine, form, dtype):
    arrays = [np.abs(x) for x in dense(2, 2, 12, 4, 9, 20, 70, dtype)]
    arrays[2][[0, 7, 33]] = -np.inf
    out, expected = attend(machine, form, arrays), strict(form, arrays)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, rtol=1e-4)
    arrays[2][:] = -np.inf
    assert (attend(machine, form, arrays) == 0).all()


@pytest.mark.parametrize(("form", "dtype"), KERNELS, ids=map("-".join, KERNELS))
def test_zero_queries_give_the_mean_value(machine, form, dtype):
    arrays = dense(1, 2, 12, 4, 9, 20, 70, dtype)
    arrays[0][:], arrays[1][:] = 0, 0
    mean = np.einsum("hvl,l->hv", arrays[5].astype(np.float64), arrays[2].astype(np.float64).mean(0))
    np.testing.assert_allclose(attend(machine, form, arrays)[0], mean, atol=70 * EPS)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_absorb_query_and_up_project_within_their_bounds(machine, dtype):
    q_nope, _, _, _, w_uk, w_uv = dense(3, 4, 13, 2, 9, 150, 3, dtype)
    q_lat, true_lat = np.empty((3, 4, 150), np.float32), np.empty((3, 4, 150))
    forms.fill(forms.absorb_query, machine, q_nope, w_uk, outputs=(q_lat,))
    _absorbed.absorb_query(q_nope.astype(np.float64), w_uk.astype(np.float64), true_lat)
    size = np.einsum("thp,hpl->thl", *(np.abs(x.astype(np.float64)) for x in (q_nope, w_uk)))
    assert_within(q_lat, true_lat, 13 * EPS * size + 13 * TINY)

    out, true_out = np.empty((3, 4, 9), np.float32), np.empty((3, 4, 9))
    forms.fill(forms.up_project, machine, q_lat, w_uv, outputs=(out,))
    _absorbed.up_project(q_lat.astype(np.float64), w_uv.astype(np.float64), true_out)
    size = np.einsum("thl,hvl->thv", *(np.abs(x.astype(np.float64)) for x in (q_lat, w_uv)))
    assert_within(out, true_out, (150 / 32 + 6) * EPS * size + 150 * TINY)


# --- rope


POSITIONS = np.array([0, 1, 17, 4096, 131072, -5, 1000003, 2**33 + 5, -(2**31)])


@pytest.mark.parametrize("yarn", [None, Yarn(factor=4, original_max_position_embeddings=4096, mscale=0.7)], ids=str)
@pytest.mark.parametrize("base", [8e6, 1e4])
@pytest.mark.parametrize("mode", rope.ANGLES[:3])
def test_angles_within_the_bound_of_strict_f64(machine, mode, base, yarn):
    n = 64
    kept, factor, amplitude = (np.ones(n // 2), 1.0, 1.0) if yarn is None else rope._yarn(yarn, base, n, np.float64)
    how = base, rope.ANGLES.index(mode)
    turned = [np.empty((len(POSITIONS), n // 2), np.float32) for _ in range(2)]
    forms.fill(
        forms.turn, machine, POSITIONS, n, *how, kept.astype(np.float32), factor, amplitude, outputs=tuple(turned)
    )
    truth = [np.empty((len(POSITIONS), n // 2)) for _ in range(2)]
    _rope.turn(POSITIONS, n, *how, kept, factor, amplitude, *truth)
    theta = POSITIONS[:, None] * base ** (-2 * np.arange(n // 2) / n)
    allowed = kernel_cases.angles(theta / factor * (1 - kept) + theta * kept, base, amplitude)
    for got, expected in zip(turned, truth, strict=True):
        assert_within(got, expected, allowed)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("R", "pairs"), [(8, 4), (11, 4), (9, 4), (1, 0), (300, 140)], ids=str)
def test_pairs_are_turned_and_what_lies_beyond_them_is_copied(machine, neox, dtype, R, pairs):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, R)).astype(DTYPES[dtype])
    theta = rng.uniform(-3, 3, (3, pairs))
    cosine, sine = np.cos(theta).astype(np.float32), np.sin(theta).astype(np.float32)
    out = np.empty(x.shape, np.float32)
    forms.fill(forms.rotate, machine, x, cosine, sine, neox, outputs=(out,))
    expected = x.astype(np.float64)
    _rope.rotate(expected, cosine.astype(np.float64), sine.astype(np.float64), neox)
    assert_within(out, expected, kernel_cases.rope(x, np.zeros((3, pairs)), 1.0, pairs, neox))
    view = np.concatenate([x, x], axis=2)[:, ::-1, R:]
    forms.fill(forms.rotate, machine, view, cosine, sine, neox, outputs=(out[:, ::-1],))
    assert_within(out, expected, kernel_cases.rope(x, np.zeros((3, pairs)), 1.0, pairs, neox))


# --- append


@pytest.mark.parametrize("R", [0, 3])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_rows_are_appended_bit_for_bit_and_nothing_else_is_touched(machine, dtype, R):
    rng = np.random.default_rng(0)
    number = np.dtype(DTYPES[dtype])

    def noise(*shape):  # every bit pattern, NaN payloads among them
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * number.itemsize), np.uint8).view(number)

    room = noise(7, 2, 4, 155 + R)
    c_kv, k_pe = noise(6, 160)[:, 5:155], noise(6, 9)[:, :R]
    cache = room[:, 0, :, : 150 + R]
    slots = np.array([27, -1, 0, 14, -9])
    wanted = room.copy()
    append_kv(wanted[:, 0, :, : 150 + R], c_kv, k_pe, slots, backend="strict")
    cache_there = forms.put(machine, cache)
    forms.append(machine, cache_there, *(forms.put(machine, x) for x in (c_kv, k_pe, slots)))
    assert machine.download(cache_there).tobytes() == wanted[:, 0, :, : 150 + R].tobytes()


def test_slots_beyond_32_bits_reach_their_block(machine):
    cache = forms.put(machine, np.zeros((2, 4, 9), np.float32))
    first = 2**40
    far = Buffer((cache.pointer - first * cache.strides[0]) % 2**64, (2**62, 4, 9), cache.dtype, cache.strides, cache)
    rows = np.arange(18, dtype=np.float32).reshape(2, 9)
    slots = np.array([first * 4 + 6, first * 4 + 1])
    forms.append(machine, far, *(forms.put(machine, x) for x in (rows[:, :7], rows[:, 7:], slots)))
    written = machine.download(cache).reshape(8, 9)
    assert (written[[6, 1]] == rows).all() and not written[[0, 2, 3, 4, 5, 7]].any()


# --- merge


@pytest.mark.parametrize("unit", [1.0, np.log(2)], ids=["e", "2"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_states_are_merged_within_the_bound_of_strict_f64(machine, dtype, unit):
    rng = np.random.default_rng(0)
    for S, N, V in [(1, 3, 5), (2, 4, 130), (7, 5, 33)]:
        partial_out = rng.standard_normal((S, N, V)).astype(DTYPES[dtype])
        partial_lse = (30 * rng.standard_normal((S, N))).astype(np.float32)
        out, lse = np.empty((N, V), np.float32), np.empty(N, np.float32)
        forms.fill(forms.merge, machine, partial_out, partial_lse, unit, -np.inf, 0.0, outputs=(out, lse))
        truth = merge_states(partial_out, partial_lse, precision="f64", lse_base="e" if unit == 1 else "2")
        bounds = kernel_cases.merge(partial_out, partial_lse, unit, np.zeros((S, N), bool))
        assert_within(out, truth.out, bounds[0])
        assert_within(lse, truth.lse, bounds[1])


@pytest.mark.parametrize("marker", [-np.inf, np.inf, np.nan, 5.0])
def test_empty_states_are_not_touched_and_rows_of_them_are_zero(machine, marker):
    rng = np.random.default_rng(0)
    partial_out = rng.standard_normal((4, 3, 6)).astype(np.float32)
    partial_lse = rng.standard_normal((4, 3)).astype(np.float32)
    for s, n, lse in [(0, 0, marker), (2, 0, np.inf), (1, 1, -np.inf), *((s, 2, marker) for s in range(4))]:
        partial_lse[s, n], partial_out[s, n] = lse, np.nan
    out, lse = np.empty((3, 6), np.float32), np.empty(3, np.float32)
    forms.fill(forms.merge, machine, partial_out, partial_lse, 1.0, marker, 9.0, outputs=(out, lse))
    truth = merge_states(partial_out, partial_lse, precision="f64", empty_lse=marker)
    np.testing.assert_allclose(out, truth.out, rtol=20 * EPS)
    np.testing.assert_allclose(lse[:2], truth.lse[:2], rtol=20 * EPS)
    assert lse[2] == 9 and (out[2] == 0).all()


def test_a_state_of_nan_spoils_its_row_alone(machine):
    partial_lse = np.array([[1, np.nan, np.nan], [2, 1, np.nan]], np.float32)
    out, lse = np.empty((3, 4), np.float32), np.empty(3, np.float32)
    arguments = np.ones((2, 3, 4), np.float32), partial_lse, 1.0, -np.inf, -np.inf
    forms.fill(forms.merge, machine, *arguments, outputs=(out, lse))
    assert np.isnan(lse).tolist() == [False, True, True] and np.isnan(out).all(1).tolist() == [False, True, True]


# --- one product on tensor cores


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["qk", "pv"])
def test_a_product_of_fragments(machine, name, dtype):
    """Whole numbers that tell every element from every other: each sum is exact, however it is rounded."""

    def product(a, b, c):
        buffers = [forms.put(machine, x) for x in (a.astype(DTYPES[dtype]), b.astype(DTYPES[dtype]), c)]
        d = machine.empty((16, 8), np.float32)
        machine.launch(machine.kernel("micro.cu", f"micro_{name}_{dtype}"), (1, 1, 1), (32, 1, 1), 0, *buffers, d)
        return machine.download(d)

    rng = np.random.default_rng(0)
    b_shape = (8, 16) if name == "qk" else (16, 8)
    c = np.arange(128, dtype=np.float32).reshape(16, 8) * 1000
    for _ in range(3):
        a, b = rng.integers(-128, 128, (16, 16)), rng.integers(-128, 128, b_shape)
        assert (product(a, b, c) == c + a @ (b.T if name == "qk" else b)).all()

    # Accumulation may cut off: 16 products and c are each cut to 2^-23 of the largest, and the sum once more.
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32) for shape in ((16, 16), b_shape))
    a, b = (x.astype(DTYPES[dtype]).astype(np.float64) for x in (a, b))
    turned = b.T if name == "qk" else b
    assert_within(product(a, b, c), c + a @ turned, 18 * EPS * (np.abs(c) + np.abs(a) @ np.abs(turned)))
