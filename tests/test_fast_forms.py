# SPDX-License-Identifier: Apache-2.0
"""The fast naive and absorbed forms against strict f64, and their bits for any number of threads."""

import numpy as np
import pytest

from mla_oracle.fast import absorbed, naive
from mla_oracle.fast import isa as isas
from mla_oracle.reference import _absorbed, _naive

FORMS = {"naive": (naive.attend, _naive.attend), "absorbed": (absorbed.attend, _absorbed.attend)}
SHAPES = [  # t_q, H, P, R, V, L, t_kv
    (1, 1, 1, 1, 1, 1, 1),
    (1, 3, 12, 5, 7, 20, 50),
    (9, 2, 13, 4, 9, 33, 130),
    (9, 2, 13, 5, 9, 33, 130),  # pairs of numbers across the end of c_kv
    (2, 20, 24, 8, 16, 64, 1100),
    (70, 1, 16, 8, 24, 48, 70),
    (1, 5, 192, 64, 256, 512, 97),
]


@pytest.fixture(params=isas.available())
def isa(request):
    return request.param


@pytest.fixture(params=[np.float32, np.float64], ids=["f32", "f64"])
def dtype(request):
    return request.param


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def make(t_q, H, P, R, V, L, t_kv, seed=0):
    """Normal inputs: q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, as f32."""
    rng = np.random.default_rng(seed)
    shapes = [(t_q, H, P), (t_q, H, R), (t_kv, L), (t_kv, R), (H, P, L), (H, V, L)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def run(attend, arrays, dtype, scale=0.05, **options):
    out = np.full((*arrays[0].shape[:2], arrays[5].shape[1]), 77, dtype)
    attend(*[x.astype(dtype) for x in arrays], scale, out, **options)
    return out


def bound(arrays, dtype, scale=0.05):
    """[t_q, H, V]: every product and sum of either form, each number by its size, one eps per operation."""
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv = (x.astype(np.float64) for x in arrays)
    t_q, (_, P, L), R, t_kv = len(q_nope), w_uk.shape, q_pe.shape[2], len(c_kv)
    eps = float(np.finfo(dtype).eps)
    key = np.einsum("hpl,tl->htp", w_uk, c_kv)
    value = np.einsum("hvl,tl->htv", w_uv, c_kv)
    score = (np.einsum("qhp,htp->qht", q_nope, key) + np.einsum("qhr,tr->qht", q_pe, k_pe)) * scale
    size = np.einsum("qhp,hpl,tl->qht", np.abs(q_nope), np.abs(w_uk), np.abs(c_kv), optimize=True)
    size = (size + np.einsum("qhr,tr->qht", np.abs(q_pe), np.abs(k_pe))) * scale
    hidden = np.arange(t_kv)[None] > t_kv - t_q + np.arange(t_q)[:, None]
    p = np.exp(np.where(hidden[:, None], -np.inf, score) - score.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    relative = eps * ((P + L + R + 6) * np.where(hidden[:, None], 0, size).max(-1) + 2 * t_kv + 32)
    latent = np.einsum("hvl,tl->htv", np.abs(w_uv), np.abs(c_kv))
    return (relative + eps * L)[..., None] * np.einsum("qht,htv->qhv", p, np.maximum(latent, np.abs(value)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_the_bound_of_strict_f64(isa, dtype, form, shape):
    arrays = make(*shape)
    fast, strict = form
    error = np.abs(run(fast, arrays, dtype, isa=isa) - run(strict, arrays, np.float64))
    assert (error <= bound(arrays, dtype)).all()


@pytest.mark.parametrize("rise", [0.01, 1, 200])
def test_scores_that_rise_so_that_every_tile_rescales(isa, dtype, form, rise):
    """By up to 160 from key to key: a weight that is not of the largest score seen is infinite."""
    arrays = make(3, 9, 12, 4, 7, 20, 300)
    arrays[1][..., 0], arrays[3][:, 0] = 16, rise * np.arange(300)
    fast, strict = form
    error = np.abs(run(fast, arrays, dtype, isa=isa) - run(strict, arrays, np.float64))
    assert (error <= bound(arrays, dtype)).all()


@pytest.mark.parametrize("shape", [(3, 20, 12, 5, 7, 20, 2500), (2, 130, 8, 4, 8, 16, 1100)], ids=str)
def test_the_same_bits_for_any_number_of_threads(isa, dtype, form, shape):
    arrays = make(*shape)
    one = run(form[0], arrays, dtype, isa=isa, threads=1)
    for threads in (2, 3):
        assert run(form[0], arrays, dtype, isa=isa, threads=threads).tobytes() == one.tobytes()


def test_strided_views_and_rows_that_are_not_contiguous(isa, form):
    arrays = make(2, 3, 12, 5, 7, 20, 50)
    expected = run(form[0], arrays, np.float32, isa=isa)
    out = np.empty(expected.shape, np.float32)
    apart = [np.repeat(x, 2, axis=0)[::2] for x in arrays]
    form[0](*apart, 0.05, out, isa=isa)
    assert out.tobytes() == expected.tobytes()
    turned = [np.asfortranarray(x) for x in arrays]
    form[0](*turned, 0.05, out, isa=isa)
    assert out.tobytes() == expected.tobytes()


def test_nan_beside_the_numbers_of_a_row_is_not_read(isa, form):
    """Odd widths: kernels take numbers in pairs or registers."""
    arrays = make(3, 4, 13, 5, 7, 21, 50)
    room = []
    for x in arrays:
        wide = np.full((*x.shape[:-1], x.shape[-1] + 9), np.nan, np.float32)
        wide[..., 4 : 4 + x.shape[-1]] = x
        room.append(wide[..., 4 : 4 + x.shape[-1]])
    out = np.empty((3, 4, 7), np.float32)
    form[0](*room, 0.05, out, isa=isa)
    assert out.tobytes() == run(form[0], arrays, np.float32, isa=isa).tobytes()


def test_nan_beyond_a_querys_horizon_does_not_reach_it(isa, dtype, form):
    arrays = make(3, 4, 12, 5, 7, 20, 50)
    clean = run(form[0], arrays, dtype, isa=isa)
    arrays[2][49, 3] = np.nan
    out = run(form[0], arrays, dtype, isa=isa)
    assert out[:2].tobytes() == clean[:2].tobytes()
    assert np.isnan(out[2]).all()


def test_a_score_of_minus_infinity_has_weight_zero_and_its_value_is_not_touched(isa, dtype, form):
    arrays = [np.abs(x) for x in make(2, 4, 12, 5, 7, 20, 200)]
    arrays[2][[0, 7, 100]] = -np.inf
    out, expected = run(form[0], arrays, dtype, isa=isa), run(form[1], arrays, np.float64)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, rtol=1e-4)


def test_rows_that_see_only_minus_infinity_are_zero(isa, dtype, form):
    arrays = [np.abs(x) for x in make(1, 4, 12, 5, 7, 20, 100)]
    arrays[2][:] = -np.inf
    assert (run(form[0], arrays, dtype, isa=isa) == 0).all()


def test_zero_queries_give_the_mean_value(isa, dtype, form):
    arrays = make(1, 3, 12, 5, 7, 20, 1500)
    arrays[0][:], arrays[1][:] = 0, 0
    mean = np.einsum("hvl,l->hv", arrays[5].astype(np.float64), arrays[2].astype(np.float64).mean(0))
    np.testing.assert_allclose(run(form[0], arrays, dtype, isa=isa)[0], mean, atol=1500 * np.finfo(dtype).eps)
