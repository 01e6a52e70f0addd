# SPDX-License-Identifier: Apache-2.0
"""YaRN: which pairs it divides, by how much, and its amplitude; worked out by hand for DeepSeek."""

import math

import numpy as np
import pytest
from ropes import F32, at, turned, yarn

from mla_oracle.geometry import Geometry
from mla_oracle.rope import ANGLES, rope_neox


def kept_by_deepseek():
    """By hand: 64 ln(4096 / (32 2pi)) / (2 ln 1e4) = 10.47 and 64 ln(4096 / 2pi) / (2 ln 1e4) = 22.51."""
    return np.clip(1 - (np.arange(32) - 10) / (23 - 10), 0, 1)


@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("position", [1, 4096, 163840])
def test_yarn_divides_the_slow_pairs_of_deepseek_and_keeps_the_fast_ones(position, angles):
    frequency = 1e4 ** (-np.arange(32) / 32)
    theta = position * frequency * (kept_by_deepseek() + (1 - kept_by_deepseek()) / 40)
    seen = turned(position, base=1e4, angles=angles, precision="f64", yarn=yarn())
    assert np.abs(seen - np.exp(1j * theta)).max() < 1e-10
    first, last = np.angle(turned(1, base=1e4, angles=angles, precision="f64", yarn=yarn())[[1, -1]])
    assert (first, last) == (pytest.approx(frequency[1]), pytest.approx(frequency[-1] / 40))


@pytest.mark.parametrize("factor", [40, 1.25])
@pytest.mark.parametrize("position", [4096, 163840, 1_000_003])
def test_yarn_in_f32_mixes_the_rounded_angle_in_f32(position, factor):
    f32 = np.float32
    theta, scale = f32(position), np.uint32(0x3F3FF911).view(f32)
    kept = f32(1) - np.clip((np.arange(32, dtype=f32) - f32(10)) / f32(13), f32(0), f32(1))
    want = []
    for j in range(32):
        mixed = theta / f32(factor) * (f32(1) - kept[j]) + theta * kept[j]
        want.append(complex(math.cos(mixed), math.sin(mixed)))
        theta = theta * scale
    assert np.abs(turned(position, base=1e4, yarn=yarn(factor=factor)) - np.array(want)).max() < 2 * F32


def test_yarn_of_a_geometry_is_taken_as_it_is():
    preset = Geometry.preset("deepseek-v3")
    seen = turned(4096, base=preset.rope_theta, yarn=preset.yarn)
    assert np.array_equal(seen, turned(4096, base=1e4, yarn=yarn()))


@pytest.mark.parametrize("angles", ANGLES)
def test_yarn_by_factor_1_is_the_identity(angles):
    conventions = {"base": 1e4, "angles": angles, "precision": "f64"}
    plain = turned(4096, **conventions)
    assert np.abs(turned(4096, yarn=yarn(factor=1, mscale=0.7), **conventions) - plain).max() < 1e-11


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "amplitude"),
    [(1.0, 1.0, 1.0), (0.707, 0.707, 1.0), (1.0, 0.0, 1.3688879454113936), (1.0, 0.5, 1.155721990196261)],
)
def test_yarn_amplitude_is_the_ratio_of_the_mscales(mscale, mscale_all_dim, amplitude, precision):
    for angles in ANGLES:
        scaling = yarn(mscale=mscale, mscale_all_dim=mscale_all_dim)
        seen = np.abs(turned(77, base=1e4, angles=angles, precision=precision, yarn=scaling))
        assert np.abs(seen - amplitude).max() < (4 * F32 if precision == "f32" else 1e-14)


def test_yarn_leaves_what_is_beyond_rotary_dim_at_its_own_size():
    out = rope_neox(np.ones((1, 6), np.float32), at(9), base=1e4, rotary_dim=4, yarn=yarn(mscale_all_dim=0.0))
    assert out[0, 4:].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("original", "kept"),
    [
        (6, [1, 0, 0, 0]),  # ln(6 / 2pi) is just below 0: from pair 0 to pair 0
        (2 * 10**9, [1, 1, 1, 1]),  # from pair 7 to pair 7, the clamp at n - 1
    ],
)
def test_a_yarn_range_of_one_pair_is_a_step(original, kept):
    kept = np.array(kept)
    theta = 100 * 1e4 ** (-np.arange(4) / 4) * (kept + (1 - kept) / 40)
    scaling = yarn(original_max_position_embeddings=original)
    seen = turned(100, n=8, base=1e4, precision="f64", yarn=scaling)
    assert np.abs(seen - np.exp(1j * theta)).max() < 1e-12
