# SPDX-License-Identifier: Apache-2.0
"""f32 stays within its rounding bound of f64, and the forms within theirs of one another, on any shape."""

import bounds
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import dense, paged, queries_of, rows_of, same, visible

from mla_oracle import attend_absorbed, attend_naive, decode_paged

sizes = st.integers(1, 24)


@st.composite
def paged_problems(draw):
    D = draw(sizes)
    return paged(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.lists(st.integers(0, 40), max_size=4)),
        T=draw(st.none() | st.integers(1, 5)),
        H=draw(st.integers(1, 3)),
        D=D,
        V=draw(st.integers(1, D)),
        block=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(["f32", "f16", "bf16"])),
        amplitude=draw(st.sampled_from([0.05, 1.0, 6.0])),
        scale=draw(st.sampled_from([2.0**-4, 0.5, 3.0])),
    )


@settings(deadline=None, max_examples=150, derandomize=True)
@given(paged_problems(), st.booleans())
def test_paged_f32_is_within_its_rounding_bound_of_f64(problem, causal):
    out, lse = decode_paged(**problem, causal=causal)
    true_out, true_lse = decode_paged(**problem, causal=causal, precision="f64")
    assert (out.dtype, lse.dtype, true_out.dtype, true_lse.dtype) == (np.float32,) * 2 + (np.float64,) * 2
    if problem["q"].ndim == 3:
        out, lse, true_out, true_lse = (x[:, None] for x in (out, lse, true_out, true_lse))
    how = problem["head_dim_v"], problem["softmax_scale"]
    for b, t, h in np.ndindex(lse.shape):
        n = visible(problem, b, t, causal)
        if n == 0:
            assert not out[b, t, h].any() and not true_out[b, t, h].any()
            assert lse[b, t, h] == true_lse[b, t, h] == -np.inf
            continue
        row = queries_of(problem)[b, t, h], rows_of(problem, b)[:n]
        (bound, lse_bound), (own, lse_own) = (bounds.paged_row(*row, *how, p) for p in ("f32", "f64"))
        assert np.all(np.abs(out[b, t, h] - true_out[b, t, h]) <= bound + own)
        assert abs(lse[b, t, h] - true_lse[b, t, h]) <= lse_bound + lse_own


@st.composite
def dense_problems(draw):
    t_q = draw(st.integers(0, 4))
    return dense(
        draw(st.integers(0, 2**32 - 1)),
        t_q=t_q,
        t_kv=t_q + draw(st.integers(0, 12)),
        H=draw(st.integers(1, 3)),
        P=draw(sizes),
        R=2 * draw(st.integers(0, 6)),
        V=draw(sizes),
        L=draw(sizes),
        dtype=draw(st.sampled_from(["f32", "f16", "bf16"])),
    )


@settings(deadline=None, max_examples=150, derandomize=True)
@given(dense_problems())
def test_naive_and_absorbed_agree_within_their_rounding_bounds(problem):
    scale = (problem["q_nope"].shape[2] + problem["q_pe"].shape[2]) ** -0.5
    outs = {
        (attend.__name__, p): attend(**problem, precision=p)
        for attend in (attend_naive, attend_absorbed)
        for p in ("f32", "f64")
    }
    allowed = {p: bounds.dense_rows(problem, scale, p) for p in ("f32", "f64")}
    truth = outs["attend_naive", "f64"]
    for (_, precision), out in outs.items():
        assert out.shape == truth.shape
        assert np.all(np.abs(out - truth) <= allowed[precision] + allowed["f64"])


@settings(deadline=None, max_examples=80, derandomize=True)
@given(paged_problems(), st.booleans(), st.sampled_from(["f32", "f64"]))
def test_a_request_alone_gives_the_bits_it_gives_in_a_batch(problem, causal, precision):
    out, lse = decode_paged(**problem, causal=causal, precision=precision)
    for b in range(len(out)):
        one = problem | {name: problem[name][b : b + 1] for name in ("q", "block_table", "seq_lens")}
        alone = decode_paged(**one, causal=causal, precision=precision)
        assert same(alone.out, out[b : b + 1]) and same(alone.lse, lse[b : b + 1])


def test_the_bounds_are_tight_enough_to_notice_a_missing_key():
    """Without its last key, a row of unit normals at 40 tokens is a hundred times further off than f32 may be."""
    problem = paged(11, [40], D=24, V=16, scale=24**-0.5)
    out, lse = decode_paged(**problem, precision="f64")
    fewer = decode_paged(**problem | {"seq_lens": problem["seq_lens"] - 1}, precision="f64")
    for h in range(2):
        row = queries_of(problem)[0, 0, h], rows_of(problem, 0)
        bound, lse_bound = bounds.paged_row(*row, 16, problem["softmax_scale"], "f32")
        assert np.max(np.abs(fewer.out - out)[0, h] / bound) > 100
        assert abs(fewer.lse - lse)[0, h] > 100 * lse_bound
