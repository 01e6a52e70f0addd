# SPDX-License-Identifier: Apache-2.0
"""Rope against known bits (of the defining program, of a C program), exact angles, long doubles, and the laws
of rotations. `turned` rotates (1, 0) pairs: the outcome is the cosine and the sine of every angle.
"""

import hashlib
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from mla_oracle.errors import InputError
from mla_oracle.geometry import Geometry
from mla_oracle.rope import ANGLES, interleaved_to_neox, rope_interleaved, rope_neox, to_interleaved, to_neox

ROPES = {"interleaved": rope_interleaved, "neox": rope_neox}
F32 = 2.0**-24  # half an ulp of 1
DEEPSEEK = {
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def yarn(**changed):
    return SimpleNamespace(**{**DEEPSEEK, **changed})


def uniform(state):
    """The documents' generator: xorshift 13/7/17, a multiplier, the top 24 bits, [-1, 1)."""
    mask = 2**64 - 1
    while True:
        state ^= state << 13 & mask
        state ^= state >> 7
        state ^= state << 17 & mask
        yield ((state * 0x2545F4914F6CDD1D & mask) >> 40) / 2**24 * 2 - 1


def draw(rng, *shape):
    return np.array([next(rng) for _ in range(math.prod(shape))], np.float32).reshape(shape)


def seed_rows():
    """position -> x [2, 64]: the two rows that the documents' test draws for it."""
    rng = uniform(99)
    return {position: draw(rng, 2, 64) for position in (0, 1, 17, 4096, 1_000_000)}


def at(position, rows=1):
    return np.full(rows, position, np.int64)


def turned(position, *, n=64, precision="f32", **conventions):
    """e^(i theta) [n/2], times the amplitude."""
    unit = np.zeros((1, n), np.float32)
    unit[:, 0::2] = 1
    out = rope_interleaved(unit, at(position), precision=precision, **conventions)[0].astype(np.float64)
    return out[0 : n - 1 : 2] + 1j * out[1::2]


def sha16(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def words(array):
    return [f"{word:08x}" for word in array.view(np.uint32)]


# Known bits


@pytest.mark.parametrize(
    ("base", "bits"),
    [(8e6, 0x3F1BC84C), (1e4, 0x3F3FF911), (401, 0x3F544582)],  # pow(401) in f64 would round to ...81
)
def test_theta_scale_has_the_documents_bits(base, bits):
    theta_scale = float(np.uint32(bits).view(np.float32))
    seen = turned(2**20, base=base)[1]  # one ulp of theta_scale would turn this by 2^20 * 2^-24
    angle = 2**20 * theta_scale
    assert abs(seen - complex(math.cos(angle), math.sin(angle))) < 2 * F32


def test_cosine_and_sine_are_those_of_f32_and_not_rounded_from_f64():
    # cosf(96) and sinf(34), each one ulp away from the rounded f64 value
    unit = np.array([[1, 0]], np.float32)
    assert words(rope_neox(unit, at(96), base=1e4)[0])[0] == "be38c2c3"
    assert words(rope_neox(unit, at(34), base=1e4)[0])[1] == "3f0771f6"
    assert words(rope_neox(unit, at(96), base=1e4, angles="table")[0])[0] == "be38c2c2"
    assert words(rope_neox(unit, at(34), base=1e4, angles="table")[0])[1] == "3f0771f7"


@pytest.mark.parametrize(
    ("pairing", "position", "sha", "first", "last"),
    [
        ("interleaved", 0, "c80d9dfde9bf94ea", "bd9d5fe0 bf15b030", "3f4e2d76 bf2f07cc"),
        ("neox", 0, "c80d9dfde9bf94ea", "bd9d5fe0 bf15b030", "3f4e2d76 bf2f07cc"),
        ("interleaved", 1, "4ac0c077be543aae", "be4a521e 3f612a91", "bda0ef57 3e718c17"),
        ("neox", 1, "b0895871db89df00", "3f801221 3e888485", "bda0ef4f 3e718c17"),
        ("interleaved", 17, "1460e6304ca59702", "bed81ef3 be2a8941", "bf335f4e 3e0cac34"),
        ("neox", 17, "63035655f1ac3ede", "be1091ad bef63ee8", "bf335f31 3e0cac7d"),
        ("interleaved", 4096, "9d47391e90262b27", "bf20995a 3f133039", "3db2ca3c be1be2a2"),
        ("neox", 4096, "c834f388527d6498", "bf99ea31 be0a22fc", "3db4b43d be1b1ac6"),
        ("interleaved", 1_000_000, "6b65126ba047d755", "becc8f26 bf218c61", "3e8df860 3f3052bb"),
        ("neox", 1_000_000, "95eac40cfe4e3db1", "3e077d32 3f40fe0e", "3f0fd4cc 3f1f35ed"),
    ],
)
def test_recurrence_gives_the_bits_of_the_defining_program(pairing, position, sha, first, last):
    out = ROPES[pairing](seed_rows()[position][:1], at(position), base=8e6)[0]
    assert words(out)[:2] == first.split()
    assert words(out)[-2:] == last.split()
    assert sha16(out) == sha


@pytest.mark.parametrize(
    ("pairing", "bits"),
    [
        ("interleaved", "3f2018ef be071552 bf405bb6 3f3770ae bf411480 3e99cece 3d3ed2e0 bec8fdc8 3f1c8a0a"),
        ("neox", "3f7ba8ca 3f49fcc1 beeb0cfb bcd5f090 bf001a7f 3e9db8d8 3d3ed2e0 bec8fdc8 3f1c8a0a"),
    ],
)
def test_an_odd_rotary_dim_gives_the_bits_of_the_defining_program(pairing, bits):
    x = draw(uniform(5), 1, 9)
    out = ROPES[pairing](x, at(5), base=1e4, rotary_dim=7)[0]
    assert words(out) == bits.split()
    assert words(out)[6:] == words(x[0])[6:]


@pytest.mark.parametrize(
    ("angles", "position", "sha"),
    [
        ("power", 17, "f5cdfa4f1942390e"),
        ("power", 4096, "4c4f70fd7f1238a9"),
        ("power", 1_000_000, "c119b1d9c19df4c1"),
        ("closed", 17, "787b1e8c65b83778"),
        ("closed", 4096, "ad15fe5134534974"),
        ("closed", 1_000_000, "075d4e6023ec5508"),
    ],
)
def test_power_and_closed_give_the_bits_of_a_c_program(angles, position, sha):
    unit = np.zeros((1, 64), np.float32)
    unit[:, 0::2] = 1
    assert sha16(rope_interleaved(unit, at(position), base=8e6, angles=angles)) == sha


# Angles


@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("position", [0, 1, -3, 4095, 2**23 + 1])
def test_halving_angles_are_exact_in_every_mode(angles, precision, position):
    # base 2^32 and n = 64 make theta_scale 1/2: no mode rounds anything but the cosine and the sine
    seen = turned(position, base=2.0**32, angles=angles, precision=precision)
    angle = [position / 2**j for j in range(32)]
    want = np.array([complex(math.cos(a), math.sin(a)) for a in angle])
    assert np.abs(seen - want).max() < (2 * F32 if precision == "f32" else 2 * 2.0**-53)


@pytest.mark.parametrize("position", [1, 4096, 1_000_000])
def test_the_table_is_the_long_double_one_to_half_an_ulp(position):
    theta = position * np.longdouble(8e6) ** (np.arange(32) * np.longdouble(-2) / 64)
    want = np.cos(theta) + 1j * np.sin(theta)
    assert np.abs(turned(position, base=8e6, angles="table") - want).max() < 0.71 * F32  # sqrt(2) / 2
    wide = turned(position, base=8e6, angles="table", precision="f64")
    assert np.abs(wide - want).max() < 4 * position * 2.0**-53


def test_recurrence_rounds_after_every_step():
    theta, scale = np.float32(1_000_000), np.uint32(0x3F1BC84C).view(np.float32)
    want = []
    for _ in range(32):
        want.append(complex(math.cos(theta), math.sin(theta)))
        theta = theta * scale
    assert np.abs(turned(1_000_000, base=8e6) - np.array(want)).max() < 2 * F32


@pytest.mark.parametrize(
    ("one", "other", "position", "least", "most"),
    [
        ("recurrence", "table", 1, 1e-8, 1e-7),
        ("recurrence", "table", 4096, 5e-5, 1.2e-4),
        ("recurrence", "closed", 4096, 4e-5, 9e-5),
        ("recurrence", "table", 1_000_000, 4e-2, 7e-2),
        ("power", "table", 1_000_000, 3e-2, 6e-2),
        ("closed", "table", 1_000_000, 3e-2, 6e-2),
        ("recurrence", "closed", 1_000_000, 3e-2, 7e-2),
        ("power", "closed", 1_000_000, 1e-2, 3e-2),
    ],
)
def test_right_engines_differ_by_their_angle_mode(one, other, position, least, most):
    apart = np.abs(turned(position, base=8e6, angles=one) - turned(position, base=8e6, angles=other)).max()
    assert least < apart < most


def test_in_f64_the_modes_agree_and_table_is_closed():
    seen = {mode: turned(1_000_000, base=8e6, angles=mode, precision="f64") for mode in ANGLES}
    assert max(np.abs(a - seen["table"]).max() for a in seen.values()) < 1e-9
    assert np.array_equal(seen["table"], seen["closed"])
    assert not np.array_equal(seen["table"], seen["power"])


def test_f32_rounds_the_position_and_the_table_does_not():
    odd = 2**24 + 1
    assert np.array_equal(turned(odd, base=8e6), turned(2**24, base=8e6))
    assert abs(turned(odd, base=8e6, angles="table")[0] - complex(math.cos(odd), math.sin(odd))) < 2 * F32


# Rotations


@pytest.mark.parametrize("pairing", ROPES)
@pytest.mark.parametrize("angles", ANGLES)
def test_rotation_keeps_every_pairs_norm(pairing, angles):
    x = np.random.default_rng(1).standard_normal((5, 3, 16))
    out = ROPES[pairing](x, np.array([0, 1, 77, -5, 123456]), base=1e4, angles=angles, precision="f64")
    if pairing == "neox":
        x, out = to_interleaved(x), to_interleaved(out)
    before, after = x[..., 0::2] ** 2 + x[..., 1::2] ** 2, out[..., 0::2] ** 2 + out[..., 1::2] ** 2
    assert np.abs(after / before - 1).max() < 1e-14


@pytest.mark.parametrize("pairing", ROPES)
def test_dot_products_depend_on_the_distance_only(pairing):
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, 64))
    rope = ROPES[pairing]

    def dot(q_position, k_position):
        arguments = {"base": 1e4, "angles": "closed", "precision": "f64"}
        return float((rope(q, at(q_position), **arguments) * rope(k, at(k_position), **arguments)).sum())

    assert dot(1000, 993) == pytest.approx(dot(7, 0), abs=1e-10)
    assert dot(1000, 993) != pytest.approx(dot(8, 0), abs=1e-2)


def test_a_negative_position_undoes_the_positive_one():
    x = draw(uniform(3), 1, 64).astype(np.float64)
    there = rope_neox(x, at(12345), base=1e4, precision="f64")
    assert np.abs(rope_neox(there, at(-12345), base=1e4, precision="f64") - x).max() < 1e-14


def test_the_second_element_turns_with_the_opposite_sine():
    x = np.array([[0, 1, 0, 0]], np.float32)  # pair (0, 1) interleaved, pairs (0, 2) and (1, 3) NEOX
    want = np.float32([-math.sin(1), math.cos(1)])
    assert np.abs(rope_interleaved(x, at(1), base=1e4)[0, :2] - want).max() < 2 * F32
    x = np.array([[0, 0, 1, 0]], np.float32)
    assert np.abs(rope_neox(x, at(1), base=1e4)[0, [0, 2]] - want).max() < 2 * F32


# Rows


@pytest.mark.parametrize("pairing", ROPES)
def test_each_row_turns_by_its_own_position_and_all_its_heads_alike(pairing):
    x = draw(uniform(7), 4, 3, 8)
    positions = np.array([5, 0, 900, 5], np.int32)
    rope = ROPES[pairing]
    out = rope(x, positions, base=1e4)
    for t in range(4):
        for h in range(3):
            assert np.array_equal(out[t, h], rope(x[t : t + 1, h], positions[t : t + 1], base=1e4)[0])
    assert np.array_equal(out[1], x[1])


@pytest.mark.parametrize("pairing", ROPES)
@pytest.mark.parametrize("rotary_dim", [0, 1, 6, 7, 10])
def test_what_is_beyond_rotary_dim_is_not_touched(pairing, rotary_dim):
    x, positions = draw(uniform(11), 2, 3, 10), np.array([3, 4])
    tail = slice(rotary_dim // 2 * 2, None)
    x[..., tail] = np.uint32(0x7FC12345).view(np.float32)  # a NaN that must keep its payload
    out = ROPES[pairing](x, positions, base=1e4, rotary_dim=rotary_dim).view(np.uint32)
    assert np.array_equal(out[..., tail], x.view(np.uint32)[..., tail])
    alone = ROPES[pairing](x[..., :rotary_dim], positions, base=1e4)
    assert np.array_equal(out[..., :rotary_dim], alone.view(np.uint32))


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0), (0, 8), (2, 0)])
def test_empty_arrays_keep_their_shape(shape):
    out = rope_interleaved(np.empty(shape, np.float32), np.zeros(shape[0], np.int64), base=1e4)
    assert out.shape == shape


def test_strided_and_read_only_input_is_taken_and_left_as_it_was():
    whole = draw(uniform(13), 4, 20, 6)
    x = whole[::-1, 1:17:2, ::2].transpose(2, 0, 1)  # [3, 4, 8], no axis contiguous
    positions = np.arange(12)[::-4]
    whole.flags.writeable = positions.flags.writeable = False
    before = whole.copy()
    out = rope_neox(x, positions, base=1e4)
    assert np.array_equal(out, rope_neox(x.copy(), positions.copy(), base=1e4))
    assert np.array_equal(whole, before)
    assert out.flags.writeable


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_narrow_input_is_widened_exactly(dtype, precision):
    x, positions = draw(uniform(17), 2, 8).astype(dtype), np.array([3, 4])
    out = rope_interleaved(x, positions, base=1e4, precision=precision)
    wide = np.float32 if precision == "f32" else np.float64
    assert out.dtype == wide
    assert np.array_equal(out, rope_interleaved(x.astype(wide), positions, base=1e4, precision=precision))


# The permutation


def test_the_permutation_is_the_documents():
    assert interleaved_to_neox(8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert interleaved_to_neox(7).tolist() == [0, 3, 1, 4, 2, 5, 6]
    assert interleaved_to_neox(0).tolist() == []


def test_to_neox_scatters_and_gathers_by_the_inverse_and_is_not_x_of_p():
    x, p = np.arange(8) * 10, interleaved_to_neox(8)
    assert to_neox(x).tolist() == [0, 20, 40, 60, 10, 30, 50, 70]
    assert to_neox(x).tolist() == x[np.argsort(p)].tolist()
    assert to_interleaved(x).tolist() == x[p].tolist() == [0, 40, 10, 50, 20, 60, 30, 70]
    assert to_interleaved(to_neox(x)).tolist() == x.tolist()


def test_to_neox_permutes_the_first_rotary_dim_elements():
    x = np.arange(14, dtype=ml_dtypes.bfloat16).reshape(2, 7)
    assert to_neox(x, rotary_dim=6).tolist() == [[0, 2, 4, 1, 3, 5, 6], [7, 9, 11, 8, 10, 12, 13]]
    assert np.array_equal(to_interleaved(to_neox(x, rotary_dim=6), rotary_dim=6), x)
    assert to_neox(x).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("scaling", [None, yarn(mscale_all_dim=0.5)])
@pytest.mark.parametrize("position", seed_rows())
def test_neox_of_permuted_rows_is_the_permuted_interleaved_to_the_bit(position, angles, scaling):
    rows, positions = seed_rows()[position], at(position, 2)
    conventions = {"base": 8e6, "angles": angles, "yarn": scaling}
    interleaved = rope_interleaved(rows, positions, **conventions)
    neox = rope_neox(to_neox(rows), positions, **conventions)
    assert np.array_equal(neox, to_neox(interleaved))
    x, y = interleaved.astype(np.float64)
    x_neox, y_neox = neox.astype(np.float64)
    assert x @ y == pytest.approx(x_neox @ y_neox, rel=1e-13)


def test_the_permutation_on_one_side_only_is_seen_by_the_dot_product():
    q, k = rope_interleaved(seed_rows()[17], at(17, 2), base=8e6).astype(np.float64)
    assert abs(to_neox(q) @ k - q @ k) > 0.1


@pytest.mark.parametrize("rotary_dim", [6, 7])
def test_the_permutation_holds_for_part_of_a_row(rotary_dim):
    x, positions = draw(uniform(19), 3, 2, 9), np.array([1, 50, 4000])
    interleaved = rope_interleaved(x, positions, base=1e4, rotary_dim=rotary_dim)
    neox = rope_neox(to_neox(x, rotary_dim=rotary_dim), positions, base=1e4, rotary_dim=rotary_dim)
    assert np.array_equal(neox, to_neox(interleaved, rotary_dim=rotary_dim))


# YaRN


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


# Refusals

X = np.ones((2, 3, 8), np.float32)
P = np.array([0, 1])


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"x": np.ones(8, np.float32)}, "x has 1 axes [8], expected 3: [T, H, R]"),
        ({"x": [[1.0]]}, "x is a list, expected an array (numpy, DLPack or the array interface)"),
        ({"x": X.astype(np.int32)}, "x is i32, expected f32 or f16 or bf16"),
        ({"x": X.astype(np.float64)}, "x is f64, expected f32 or f16 or bf16"),
        (
            {"positions": [0, 1]},
            "positions is a list, expected an array (numpy, DLPack or the array interface)",
        ),
        ({"positions": np.arange(3)}, "positions is [3], expected [T] with T = 2 on axis 0"),
        ({"positions": P[:, None]}, "positions has 2 axes [2, 1], expected 1: [T]"),
        (
            {"positions": P.astype(np.float32)},
            "positions is f32, expected i64 or i32 or i16 or i8 or u64 or u32 or u16 or u8",
        ),
        (
            {"positions": P.astype(bool)},
            "positions is bool, expected i64 or i32 or i16 or i8 or u64 or u32 or u16 or u8",
        ),
        ({"positions": np.uint64([0, 2**63])}, "positions[1] is 9223372036854775808, expected below 2^63"),
        ({"base": 0}, "base is 0, expected a number from 1e-06 to 2^53"),
        ({"base": -1e4}, "base is -10000.0, expected a number from 1e-06 to 2^53"),
        ({"base": math.nan}, "base is nan, expected a number from 1e-06 to 2^53"),
        ({"base": math.inf}, "base is inf, expected a number from 1e-06 to 2^53"),
        ({"base": "1e4"}, "base is '1e4', expected a number from 1e-06 to 2^53"),
        ({"base": None}, "base is None, expected a number from 1e-06 to 2^53"),
        ({"rotary_dim": 9}, "rotary_dim is 9, expected 0 to 8, the width of x"),
        ({"rotary_dim": -2}, "rotary_dim is -2, expected 0 to 8, the width of x"),
        ({"rotary_dim": 8.0}, "rotary_dim is 8.0, expected an integer"),
        ({"rotary_dim": True}, "rotary_dim is True, expected an integer"),
        ({"angles": "exact"}, "angles is 'exact', expected recurrence or power or closed or table"),
        ({"angles": np.ones(2)}, "angles is a ndarray, expected recurrence or power or closed or table"),
        ({"precision": "f16"}, "precision is 'f16', expected f32 or f64"),
        ({"yarn": {"factor": 40}}, "yarn.factor is None, expected a number from 1 to 2^53"),
        ({"yarn": yarn(factor=0.5)}, "yarn.factor is 0.5, expected a number from 1 to 2^53"),
        ({"yarn": yarn(factor=math.nan)}, "yarn.factor is nan, expected a number from 1 to 2^53"),
        (
            {"yarn": yarn(original_max_position_embeddings=1e300)},
            "yarn.original_max_position_embeddings is 1e+300, expected a number from 1 to 2^53",
        ),
        ({"yarn": yarn(beta_slow=0)}, "yarn.beta_slow is 0, expected a number from 1e-06 to 2^53"),
        ({"yarn": yarn(beta_fast=-1)}, "yarn.beta_fast is -1, expected a number from 1e-06 to 2^53"),
        ({"yarn": yarn(mscale=-1)}, "yarn.mscale is -1, expected a number from 0 to 2^53"),
        ({"yarn": yarn(mscale_all_dim=-1)}, "yarn.mscale_all_dim is -1, expected a number from 0 to 2^53"),
        ({"yarn": yarn(), "base": 1}, "base is 1, expected above 1 with yarn"),
        (
            {"yarn": yarn(original_max_position_embeddings=2, beta_slow=8)},
            "yarn goes from pair 0 to -1, expected a range: engines differ without one",
        ),
        (
            {"yarn": yarn(original_max_position_embeddings=2**50)},
            "yarn goes from pair 12 to 7, expected a range: engines differ without one",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(changed, line):
    arguments = {"x": X, "positions": P, "base": 1e4, **changed}
    with pytest.raises(InputError) as error:
        rope_interleaved(arguments.pop("x"), arguments.pop("positions"), **arguments)
    assert str(error.value) == line


@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("base", [1e-6, 2.0**53])
@pytest.mark.parametrize("position", [-(2**63), 2**63 - 1])
def test_no_angle_overflows(position, base, angles):
    assert np.abs(np.abs(turned(position, base=base, angles=angles)) - 1).max() < 4 * F32


def test_a_signalling_nan_is_widened_without_a_warning():
    x = np.uint16([[0x7D01, 0x3C00]]).view(np.float16)
    assert np.isnan(rope_interleaved(x, at(1), base=1e4)).all()


def test_the_permutation_needs_an_axis():
    with pytest.raises(InputError, match=r"^x has 0 axes \[\], expected 1 or more: \[\.\.\., R\]$"):
        to_neox(np.float32(1))


@pytest.mark.parametrize("n", [-1, 2.0, "8", None])
def test_the_permutation_refuses_what_is_not_a_size(n):
    with pytest.raises(InputError, match=r"^n is .*, expected an integer from 0 to 2147483647$"):
        interleaved_to_neox(n)
