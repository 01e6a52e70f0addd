# SPDX-License-Identifier: Apache-2.0
"""Random numbers: the two published streams bit for bit, and the counter-based generator of everything else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import same

from mla_oracle import generate
from mla_oracle._generators import lcg, words, xorshift
from mla_oracle._generators import normal as fill_normal
from mla_oracle.cases.draws import normal, permutation


def bits(array):
    return [f"{word:08x}" for word in np.asarray(array, np.float32).view(np.uint32).ravel()]


def test_the_first_draws_of_the_xorshift_stream():
    out = np.empty(6, np.float32)
    xorshift(7, 1.0, out)
    assert bits(out) == ["bf4648aa", "bd5d85a0", "be97a4d8", "3f567208", "be0c6ad0", "3f3e4ac0"]


@pytest.mark.parametrize(
    ("H", "P", "R", "V", "L", "t_q", "t_kv", "seed", "state"),
    [
        (4, 24, 8, 32, 64, 1, 17, 7, 0xC8D4A27021FD06B8),
        (3, 12, 4, 20, 48, 1, 17, 9, 0x02DB0158EDCB6762),
        (4, 24, 8, 32, 64, 5, 9, 42, 0x5CCCCEA03248628B),
        (2, 16, 16, 16, 32, 3, 11, 44, 0xC202A1395398C088),
        (64, 192, 64, 256, 512, 1, 8, 20260801, 0xDBF7E3EF01F7D5CE),
        (3, 16, 0, 24, 48, 5, 5, 24309, 0x8B8227949D986B89),
        (64, 256, 0, 256, 512, 1, 8, 20260827, 0xDA040E6876C8149F),
    ],
)
def test_the_xorshift_stream_of_a_dense_case_ends_in_the_published_state(H, P, R, V, L, t_q, t_kv, seed, state):
    case = generate(
        f"naive:heads={H},nope={P},rope={R},value={V},rank={L},queries={t_q},cached={t_kv},inputs=xorshift,seed={seed}"
    )
    drawn = np.concatenate([x.ravel() for x in case.tensors().values()])
    again, weights = np.empty(drawn.size, np.float32), H * (P + V) * L
    end = xorshift(seed | 1, 1.0, again)
    again[-weights:] *= np.float32(1) / np.sqrt(np.float32(L))
    assert end == state and same(drawn, again)


def test_even_and_odd_neighbours_share_an_xorshift_stream():
    one, other = (generate(f"naive:geometry=minicpm3,cached=2,inputs=xorshift,seed={seed}") for seed in (42, 43))
    assert same(one.c_kv, other.c_kv)


def test_the_lcg_by_hand():
    out = np.empty(2, np.float32)
    state = (11 * 1664525 + 1013904223) % 2**32
    after = (state * 1664525 + 1013904223) % 2**32
    assert lcg(11, out) == after
    assert out.tolist() == [(s >> 8) / 2**24 * 2 - 1 for s in (state, after)]


def test_words_are_splitmix64():
    """The first outputs of SplitMix64 for seeds 1234567 and 0, as published with its C source and elsewhere."""
    out = np.empty(5, np.uint64)
    words(1234567, 0, out)
    assert out.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    words(0, 0, out[:3])
    assert out[:3].tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_a_word_depends_on_its_index_alone():
    whole, part = np.empty(100, np.uint64), np.empty(10, np.uint64)
    words(2**64 - 1, 0, whole)
    words(2**64 - 1, 37, part)
    assert np.array_equal(part, whole[37:47])


def test_a_normal_is_the_sum_of_the_twelve_16_bit_parts_of_three_words():
    out, parts = np.empty(50, np.float32), np.empty(150, np.uint64)
    fill_normal(99, out)
    words(99, 0, parts)
    total = parts.view("<u2").astype(np.int64).reshape(50, 12).sum(1)
    assert out.tolist() == ((total - 6 * 65535) / 65536).tolist()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.integers(0, 2**64 - 1), st.integers(1, 40), st.integers(1, 40))
def test_an_element_is_the_same_whatever_the_size(seed, few, more):
    short, long = normal(seed, "q", few), normal(seed, "q", few + more)
    assert same(short, long[:few])
    assert same(normal(seed, "q", 2, few).ravel(), normal(seed, "q", 2 * few))


def test_normals_have_the_moments_of_a_sum_of_twelve_uniforms():
    x = normal(3, "x", 1 << 20).astype(np.float64)
    # Standard errors at 2^20 draws: mean 2^-10, variance sqrt(1.8) 2^-10, fourth moment sqrt(60) 2^-10; five of each.
    assert abs(x.mean()) < 5 * 2.0**-10
    assert abs((x**2).mean() - 1) < 5 * 1.4 * 2.0**-10
    assert abs((x**4).mean() - (3 - 1.2 / 12)) < 5 * 7.8 * 2.0**-10
    assert np.abs(x).max() <= 6
    for lag in (1, 2, 3, 64):
        assert abs((x[lag:] * x[:-lag]).mean()) < 5 * 2.0**-10


def test_tensors_and_seeds_have_streams_of_their_own():
    streams = [normal(seed, name, 1000) for seed in (1, 2) for name in ("q", "kv_cache")]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert abs(np.mean(one * other)) < 5 / np.sqrt(1000)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_a_permutation_holds_every_index_once(seed, n):
    assert sorted(permutation(seed, "pages", n).tolist()) == list(range(n))


def test_permutations_differ_between_seeds_and_are_not_the_identity():
    orders = {tuple(permutation(seed, "pages", 20)) for seed in range(50)}
    assert len(orders) == 50 and tuple(range(20)) not in orders
