# SPDX-License-Identifier: Apache-2.0
"""`round_to` against torch's casts, bit for bit (any NaN for a NaN).

torch rounds f64 to the short floats by way of f32, which is one rounding only where the first one is exact or does
not land on a tie of the second. Its casts to e4m3 saturate, infinity too (since pytorch pull request 178817).
e8m0 is compared off its ties, where the two follow different rules.
"""

import numpy as np
import pytest

from mla_oracle.dtypes import round_to

torch = pytest.importorskip("torch", reason="torch is not installed")

# name -> torch dtype, the integer of its width, bits of its significand with the leading one
SHORT = {
    "bf16": (torch.bfloat16, torch.int16, 8),
    "f16": (torch.float16, torch.int16, 11),
    "e4m3": (torch.float8_e4m3fn, torch.int8, 4),
    "e5m2": (torch.float8_e5m2, torch.int8, 3),
}


def f32_around_every_tie():
    """Every sign, exponent and leading 12 bits of the fraction, then zeros; the f32 below and the one above. [3 * 2^21]

    That holds every tie of the formats in SHORT, subnormal ones included, and both its neighbours.
    """
    ties = np.arange(2**21, dtype=np.uint32) << 11
    return np.concatenate([ties - np.uint32(1), ties, ties + np.uint32(1)]).view(np.float32)


def rounded(values, name):
    return round_to(values, name, saturate=name == "e4m3")


def same(ours, theirs, as_int):
    """Equal bits, or NaN on both sides."""
    bits = torch.from_numpy(np.ascontiguousarray(ours).view(str(as_int).removeprefix("torch.")))
    return (bits == theirs.view(as_int)) | (theirs.double().isnan() & torch.from_numpy(np.isnan(ours)))


@pytest.mark.parametrize("name", SHORT)
def test_f32_rounds_as_torch_casts_around_every_tie_of_the_format(name):
    short, as_int, _ = SHORT[name]
    values = f32_around_every_tie()
    assert same(rounded(values, name), torch.from_numpy(values).to(short), as_int).all()


@pytest.mark.parametrize("name", SHORT)
def test_f32_rounds_as_torch_casts_on_random_bits(name):
    short, as_int, _ = SHORT[name]
    values = np.random.default_rng(1).integers(0, 2**32, 2**21, np.uint32).view(np.float32)
    assert same(rounded(values, name), torch.from_numpy(values).to(short), as_int).all()


def f64_values():
    """Random f64 of every sign and fraction, of the exponents that f32 and less can hold, and a few beyond."""
    random = np.random.default_rng(2)
    fraction = random.integers(0, 2**52, 2**20, np.uint64)
    exponent = random.integers(1023 - 160, 1023 + 130, 2**20, np.uint64)
    sign = random.integers(0, 2, 2**20, np.uint64)
    return (sign << np.uint64(63) | exponent << np.uint64(52) | fraction).view(np.float64)


def test_f64_rounds_to_f32_as_torch_casts():
    below = f32_around_every_tie()[::16]
    below = below[np.abs(below) < 1e38]
    ties = (below.astype(np.float64) + np.nextafter(below, np.float32(np.inf))) / 2
    for values in (f64_values(), ties, ties * (1 - 2.0**-52), ties * (1 + 2.0**-52)):
        wanted = torch.from_numpy(values).to(torch.float32)
        assert same(round_to(values, "f32"), wanted, torch.int32).all()


@pytest.mark.parametrize("name", SHORT)
def test_f64_rounds_as_torch_casts_where_torch_rounds_once(name):
    short, as_int, precision = SHORT[name]
    values = f64_values()
    f32 = torch.from_numpy(values).float().numpy()
    # A tie of the format, subnormal or not, ends in zeros: at least as many as f32 has bits more, less one.
    on_tie = (f32.view(np.uint32) & np.uint32(2 ** (24 - precision - 1) - 1)) == 0
    once = ~on_tie | (f32.astype(np.float64) == values)
    assert once.mean() > 0.8
    assert same(rounded(values, name), torch.from_numpy(values).to(short), as_int)[torch.from_numpy(once)].all()


@pytest.mark.parametrize("name", SHORT)
def test_f64_just_above_a_tie_rounds_up_where_torch_rounds_twice(name):
    short, _, precision = SHORT[name]
    above_tie = np.array([1 + 2.0**-precision + 2.0**-40])
    assert round_to(above_tie, name).astype(np.float64) == 1 + 2.0 ** (1 - precision)
    assert torch.from_numpy(above_tie).to(short).double() == 1


def test_f32_rounds_to_e8m0_as_torch_casts_off_the_ties():
    values = np.abs(f32_around_every_tie())
    bits = values.view(np.uint32)
    values = values[(bits > 0) & (bits & 0x7FFFFF != 0x400000)]
    values = values[values >= 2.0**-126]
    assert same(round_to(values, "e8m0"), torch.from_numpy(values).to(torch.float8_e8m0fnu), torch.int8).all()
