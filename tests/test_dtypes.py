# SPDX-License-Identifier: Apache-2.0
"""dtypes: the names, and rounding checked against values decoded here from bits, field by field.

Every format is small enough to test whole: each pair of neighbours, the tie between them, and the two numbers
next to the tie.
"""
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_oracle import dtypes
from mla_oracle.dtypes import LARGEST, TAGS, dtype, name_of, round_to
from mla_oracle.errors import InputError

FLOATS = ["f64", "f32", "f16", "bf16", "e4m3", "e4m3fnuz", "e5m2", "e8m0", "e2m1"]
NAMES = [*FLOATS, "i64", "i32", "i16", "i8", "u8", "u16", "u32", "u64", "bool"]

# mantissa bits, bias, code of the largest finite value
FIELDS = {
    "f16": (10, 15, 0x7BFF),
    "bf16": (7, 127, 0x7F7F),
    "e4m3": (3, 7, 0x7E),
    "e5m2": (2, 15, 0x7B),
    "e2m1": (1, 1, 0x7),
}
HAS_INFINITY = {"f16", "bf16", "e5m2"}


def bits_type(name):
    return np.dtype(f"u{dtype(name).itemsize}")


def decode(name, code):
    # The value of a non-negative code: fraction * 2^exponent, no implied bit at exponent 0.
    if name == "e8m0":
        return np.ldexp(1.0, code - 127)
    mantissa, bias, _ = FIELDS[name]
    exponent, fraction = code >> mantissa, code & (1 << mantissa) - 1
    if exponent:
        fraction |= 1 << mantissa
    return np.ldexp(float(fraction), max(exponent, 1) - bias - mantissa)


def finite(name):
    """codes [n], values [n] in f64: every non-negative finite value, ascending."""
    last = 254 if name == "e8m0" else FIELDS[name][2]
    codes = np.arange(last + 1)
    return codes, np.array([decode(name, int(code)) for code in codes])


def codes_of(array):
    return array.view(f"u{array.dtype.itemsize}").astype(int)


SMALL = [*FIELDS, "e8m0"]

# As e4m3 with a bias of 8; the code of negative zero is the only NaN, and the largest code is 0x7F.
FNUZ = "e4m3fnuz"
FNUZ_VALUES = [np.ldexp(float((code & 7) | (8 if code >> 3 else 0)), max(code >> 3, 1) - 8 - 3) for code in range(128)]


@pytest.mark.parametrize("name", NAMES)
def test_name_and_dtype_name_each_other(name):
    assert name_of(dtype(name)) == name


@pytest.mark.parametrize(
    ("name", "itemsize", "bits", "value"),
    [
        ("f64", 8, 0x3FF8000000000000, 1.5),
        ("f32", 4, 0x3FC00000, 1.5),
        ("f16", 2, 0x3E00, 1.5),
        ("bf16", 2, 0x3FC0, 1.5),
        ("e4m3", 1, 0x3C, 1.5),
        ("e4m3fnuz", 1, 0x44, 1.5),
        ("e5m2", 1, 0x3E, 1.5),
        ("e8m0", 1, 0x80, 2.0),
        ("e2m1", 1, 0x3, 1.5),
        ("i8", 1, 0xFF, -1),
        ("u8", 1, 0xFF, 255),
    ],
)
def test_dtype_decodes_the_bits_of_its_format(name, itemsize, bits, value):
    assert dtype(name).itemsize == itemsize
    assert float(np.array([bits], bits_type(name)).view(dtype(name))[0]) == value


def test_tags_are_those_of_the_safetensors_format():
    assert {name: TAGS.get(name) for name in NAMES} == {
        "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "e4m3": "F8_E4M3", "e5m2": "F8_E5M2",
        "e4m3fnuz": "F8_E4M3FNUZ", "e8m0": "F8_E8M0", "e2m1": None,
        "i64": "I64", "i32": "I32", "i16": "I16", "i8": "I8", "u8": "U8",
        "u16": "U16", "u32": "U32", "u64": "U64", "bool": "BOOL",
    }  # fmt: skip


def test_c_long_and_long_long_have_the_same_name():
    assert name_of(np.dtype("l")) == name_of(np.dtype("q")) == "i64"


@pytest.mark.parametrize("unknown", ["c8", ">f4", "V2", "U3", "O", "M8[ns]", "g", [("a", "f4")]])
def test_a_dtype_without_a_name_is_named_in_the_error(unknown):
    unknown = np.dtype(unknown)
    with pytest.raises(InputError, match="expected one of f64 f32") as error:
        name_of(unknown)
    assert str(unknown) in str(error.value)
    assert "\n" not in str(error.value)


def test_float8_e4m3_with_infinity_is_not_e4m3():
    import ml_dtypes

    with pytest.raises(InputError, match="float8_e4m3"):
        name_of(np.dtype(ml_dtypes.float8_e4m3))


@pytest.mark.parametrize("unknown", ["float32", "F32", "", "fp8", "\n"])
def test_an_unknown_name_is_named_in_the_error(unknown):
    with pytest.raises(InputError) as error:
        dtype(unknown)
    assert repr(unknown) in str(error.value)
    assert "\n" not in str(error.value)


def test_ml_dtypes_is_imported_only_for_its_own_formats():
    code = """
import sys
from mla_oracle import dtypes
dtypes.name_of(dtypes.dtype("f32")), dtypes.round_to([1.0], "f16")
assert "ml_dtypes" not in sys.modules
dtypes.dtype("bf16")
assert "ml_dtypes" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stored_lists_the_formats_in_the_order_the_kernels_number_them():
    assert dtypes.STORED == ("f32", "f16", "bf16", "f64")


@pytest.mark.parametrize("name", SMALL)
def test_largest_is_the_last_finite_code(name):
    assert LARGEST[name] == finite(name)[1][-1]


def test_largest_of_f32_and_f64_are_the_bits_below_infinity():
    assert np.float32(LARGEST["f32"]).view(np.uint32) == 0x7F7FFFFF
    assert np.float64(LARGEST["f64"]).view(np.uint64) == 0x7FEFFFFFFFFFFFFF


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("name", SMALL)
def test_every_finite_value_rounds_to_itself(name, source):
    codes, values = finite(name)
    rounded = round_to(values.astype(source), name)
    assert rounded.dtype == dtype(name)
    np.testing.assert_array_equal(codes_of(rounded), codes)
    if name != "e8m0":
        sign = 1 << (3 if name == "e2m1" else 8 * dtype(name).itemsize - 1)
        np.testing.assert_array_equal(codes_of(round_to(-values.astype(source), name)), codes | sign)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_all_65536_codes_survive_widening_and_rounding(name):
    stored = np.arange(65536).astype(np.uint16).view(dtype(name))
    nan = codes_of(stored) % 0x8000 > FIELDS[name][2] + 1
    for wide in (np.float32, np.float64):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            widened = stored.astype(wide)
        rounded = round_to(widened, name)
        np.testing.assert_array_equal(codes_of(rounded)[~nan], codes_of(stored)[~nan])
        assert np.isnan(rounded[nan]).all()


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_ties_go_to_even_and_their_neighbours_to_the_nearer_value(name, saturate):
    codes, values = finite(name)
    below, above = codes[:-1], codes[1:]
    tie = (values[:-1] + values[1:]) / 2
    assert (tie.astype(np.float32) == tie).all()
    even = above if name == "e8m0" else np.where(below % 2 == 0, below, above)
    for source in (np.float64, np.float32):
        exact = tie.astype(source)
        less, more = np.nextafter(exact, source(0)), np.nextafter(exact, source(np.inf))
        for asked, expected in ((exact, even), (less, below), (more, above)):
            np.testing.assert_array_equal(codes_of(round_to(asked, name, saturate=saturate)), expected)
            if name != "e8m0":
                negative = codes_of(round_to(-asked, name, saturate=saturate))
                sign = 1 << (3 if name == "e2m1" else 8 * dtype(name).itemsize - 1)
                np.testing.assert_array_equal(negative, expected | sign)


@pytest.mark.parametrize("name", SMALL)
def test_between_zero_and_the_smallest_value_the_tie_is_exact_in_f64(name):
    smallest = finite(name)[1][0 if name == "e8m0" else 1]
    tie = smallest / 2
    tiny = np.array([5e-324, 1e-300, np.nextafter(tie, 0), tie, np.nextafter(tie, 1)])
    first = 0 if name == "e8m0" else 1
    assert codes_of(round_to(tiny, name)).tolist() == [0, 0, 0, 0, first]


def test_f64_is_rounded_once_where_numpy_casts_round_twice():
    # 1 + 2^-8 is the tie between 0x3F80 and 0x3F81; the last bit of 2^-40 puts the value above it.
    above_tie = np.array([1 + 2**-8 + 2**-40])
    assert codes_of(above_tie.astype(dtype("bf16"))) == [0x3F80]
    assert codes_of(round_to(above_tie, "bf16")) == [0x3F81]


def test_f64_to_f32_goes_to_even_at_a_tie():
    tie = 1 + 2**-24
    asked = np.array([tie, np.nextafter(tie, 0), np.nextafter(tie, 2), 1 + 3 * 2**-24, -tie])
    one = 0x3F800000
    assert codes_of(round_to(asked, "f32")).tolist() == [one, one, one + 1, one + 2, 0x80000000 + one]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_overflow_begins_at_the_tie_above_the_largest_value(name, source):
    codes, values = finite(name)
    last = int(codes[-1])
    # What the next value would be if the exponent went on; e2m1 has no code for it, e4m3 spends it on NaN.
    step = values[-1] if name == "e8m0" else values[-1] - values[-2]
    tie = source(values[-1] + step / 2)
    asked = np.array([np.nextafter(tie, source(0)), tie, np.nextafter(tie, source(np.inf)), np.inf], source)
    beyond = [False, name != "e4m3", True, True]  # 448 is even, the other largest values are odd
    plain = round_to(asked, name)
    if name == "e2m1":
        assert codes_of(plain).tolist() == [last] * 4
    elif name in HAS_INFINITY:
        assert codes_of(plain).tolist() == [last + 1 if over else last for over in beyond]
        assert np.isneginf(round_to(-asked, name).astype(np.float64)).tolist() == beyond
    else:
        assert np.isnan(plain).tolist() == beyond
        assert float(plain[0]) == LARGEST[name]
    assert codes_of(round_to(asked, name, saturate=True)).tolist() == [last] * 4
    if name != "e8m0":
        saturated = round_to(-asked, name, saturate=True).astype(np.float64)
        assert (saturated == -LARGEST[name]).all()


def test_e4m3fnuz_has_another_bias_one_nan_and_one_zero():
    values = np.array(FNUZ_VALUES)
    assert LARGEST[FNUZ] == values[-1] == 240
    for source in (np.float32, np.float64):
        np.testing.assert_array_equal(codes_of(round_to(values.astype(source), FNUZ)), range(128))
        np.testing.assert_array_equal(codes_of(round_to(-values[1:].astype(source), FNUZ)), range(129, 256))
        tie = ((values[:-1] + values[1:]) / 2).astype(source)
        even = [code + code % 2 for code in range(127)]
        np.testing.assert_array_equal(codes_of(round_to(tie, FNUZ)), even)
        np.testing.assert_array_equal(codes_of(round_to(np.nextafter(tie, source(0)), FNUZ)), range(127))
        np.testing.assert_array_equal(codes_of(round_to(np.nextafter(tie, source(np.inf)), FNUZ)), range(1, 128))
    asked = np.array([-0.0, -(2.0**-12), np.nan, np.inf, 248.0, -300.0])
    assert codes_of(round_to(asked, FNUZ)).tolist() == [0, 0, 0x80, 0x80, 0x80, 0x80]
    assert codes_of(round_to(asked, FNUZ, saturate=True)).tolist() == [0, 0, 0x80, 0x7F, 0x7F, 0xFF]


def test_500_is_nan_in_e4m3_and_448_when_saturated():
    assert codes_of(round_to([500.0], "e4m3")) == [0x7F]
    assert codes_of(round_to([500.0, -500.0], "e4m3", saturate=True)).tolist() == [0x7E, 0xFE]


def test_huge_f64_overflows_like_any_other_value():
    huge = np.array([1e300, LARGEST["f64"], -1e300])
    assert codes_of(round_to(huge, "bf16")).tolist() == [0x7F80, 0x7F80, 0xFF80]
    assert codes_of(round_to(huge, "f32")).tolist() == [0x7F800000, 0x7F800000, 0xFF800000]
    assert codes_of(round_to(huge, "f32", saturate=True)).tolist() == [0x7F7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF]


def test_f64_saturates_at_its_own_largest_value():
    infinite = np.array([np.inf, -np.inf], np.float32)
    assert round_to(infinite, "f64", saturate=True).tolist() == [LARGEST["f64"], -LARGEST["f64"]]
    assert round_to(infinite, "f64").tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16", "e4m3", "e5m2", "e8m0"])
def test_nan_stays_nan_whatever_its_payload(name, saturate):
    single = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    double = np.array([0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1], np.uint64).view(np.float64)
    for nan in (single, double):
        assert np.isnan(round_to(nan, name, saturate=saturate)).all()


@pytest.mark.parametrize("name", ["f64", "f32", *FIELDS])
def test_zeros_keep_their_sign(name):
    rounded = round_to(np.array([0.0, -0.0, -1e-320]), name).astype(np.float64)
    assert np.signbit(rounded).tolist() == [False, True, True]
    assert (rounded[:2] == 0).all()


def test_what_a_format_cannot_hold_is_an_input_error_with_its_index():
    with pytest.raises(InputError, match=r"^value at \[1, 0\] is nan, expected a number: e2m1 has no NaN$"):
        round_to(np.array([[1.0], [np.nan]]), "e2m1")
    for bad in (0.0, -0.0, -2.0, -np.inf):
        with pytest.raises(InputError, match=rf"^value at \[2\] is {bad}, expected greater than 0"):
            round_to([1.0, np.nan, bad], "e8m0")


@pytest.mark.parametrize("source", [np.float16, np.int32, np.dtype(">f8"), bool, complex])
def test_only_f32_and_f64_are_rounded(source):
    with pytest.raises(InputError, match="expected f32 or f64"):
        round_to(np.ones(2, source), "bf16")


@pytest.mark.parametrize("name", ["i32", "bool", "float16", ""])
def test_only_floats_are_rounded_to(name):
    with pytest.raises(InputError, match=f"^dtype to round to is '{name}', expected one of f64 f32 f16 bf16"):
        round_to([1.0], name)


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("saturate", [False, True])
def test_the_result_is_a_new_array_of_the_same_shape(name, saturate):
    base = np.ones((4, 6))
    for asked in (base[::2, ::3], base[:0], base[0, 0], base.T):
        rounded = round_to(asked, name, saturate=saturate)
        assert isinstance(rounded, np.ndarray)
        assert rounded.shape == asked.shape
        assert not np.shares_memory(rounded, base)
    assert (base == 1).all()


TABLES = {name: finite(name) for name in FIELDS}


@pytest.mark.parametrize("name", FIELDS)
@given(data=st.data())
@settings(deadline=None, derandomize=True)
def test_any_f64_goes_to_the_nearest_value_in_exact_arithmetic(name, data):
    codes, values = TABLES[name]
    below = data.draw(st.integers(0, len(codes) - 2))
    value = data.draw(st.floats(values[below], values[below + 1]))
    down, up = Fraction(value) - Fraction(values[below]), Fraction(values[below + 1]) - Fraction(value)
    nearest = [below] * (down <= up) + [below + 1] * (up <= down)
    expected = min(nearest, key=lambda code: code % 2)
    assert codes_of(round_to([value], name)) == [codes[expected]]
