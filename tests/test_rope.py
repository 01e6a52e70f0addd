# SPDX-License-Identifier: Apache-2.0
"""Rope against known bits (of the defining program, of a C program), exact angles, long doubles, and the laws
of rotations.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from ropes import F32, ROPES, at, draw, seed_rows, sha16, turned, uniform, words, yarn

from mla_oracle.rope import ANGLES, interleaved_to_neox, rope_interleaved, rope_neox, to_interleaved, to_neox

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


@pytest.mark.parametrize("angles", ANGLES)
@pytest.mark.parametrize("position", [2**31, -(2**31) - 1, 2**32 + 1, 2**40 + 3, -(2**52) - 1])
def test_a_position_is_a_whole_number_of_64_bits(position, angles):
    seen = turned(position, base=1e4, angles=angles, precision="f64")[0]
    assert abs(seen - complex(math.cos(position), math.sin(position))) < 2**-52
    rounded = float(np.float32(position if angles != "table" else 0)) or position
    seen = turned(position, base=1e4, angles=angles)[0]
    assert abs(seen - complex(math.cos(rounded), math.sin(rounded))) < F32


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
