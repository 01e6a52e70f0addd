# SPDX-License-Identifier: Apache-2.0
"""Floating-point instructions against exact arithmetic, with the words of PTX ISA 9.7.3, 9.7.4 and 9.7.9.21 (cvt)."""

import importlib
import itertools
import math
import platform
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from snippets import one

INF, NAN = float("inf"), float("nan")
TINY, SUB, MAX = 2.0**-126, 2.0**-149, float(np.finfo(np.float32).max)
EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1.5,
    3.0,
    0.1,
    -0.3,
    1e30,
    -1e30,
    TINY,
    SUB,
    -SUB * 3,
    TINY / 4,
    MAX,
    -MAX,
    INF,
    -INF,
    NAN,
]
EDGES += [1 + 2.0**-23, 1 - 2.0**-24, 2.0**-100, 123456.789, 16777215.0]
CANONICAL = 0x7FFFFFFF


def floats(values):
    return np.array(values, np.float32)


def pairs(values=EDGES):
    return [floats(side) for side in zip(*itertools.product(values, values), strict=True)]


def rounded(x: Fraction, mode="rn", digits=24, lowest=-126, top=127):
    """An exact number as binary floating point of `digits` bits; the exact zero is +0."""
    if x == 0:
        return 0.0
    sign, x = (-1, -x) if x < 0 else (1, x)
    e = max(x.numerator.bit_length() - x.denominator.bit_length() - 1, lowest - 1)
    while Fraction(2) ** (e + 1) <= x:
        e += 1
    e = max(e, lowest)
    unit = Fraction(2) ** (e - digits + 1)
    n, rest = divmod(x, unit)
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and n % 2),
        "rz": False,
        "rm": sign < 0 and rest,
        "rp": sign > 0 and rest,
    }
    n += bool(up[mode])
    if n * unit >= Fraction(2) ** (top + 1):
        biggest = float((2**digits - 1) * Fraction(2) ** (top - digits + 1))
        return sign * (INF if mode in ("rn", "rp" if sign > 0 else "rm") else biggest)
    return sign * float(n * unit)


def same(got, expected):
    """Bit for bit, every NaN the canonical one."""
    bits = np.asarray(got, np.float32).view(np.uint32)
    expected = np.asarray(expected, np.float32)
    wanted = np.where(np.isnan(expected), np.uint32(CANONICAL), expected.view(np.uint32))
    assert bits.tolist() == wanted.tolist()


def ieee(function, *args):
    with np.errstate(all="ignore"):
        return function(*args)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div.rn"])
def test_arithmetic_rounds_to_nearest_and_gives_canonical_nan(name):
    a, b = pairs()
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div.rn": np.divide}[name]
    same(one(f"{name}.f32 x, a, b;", np.float32, a=a, b=b), ieee(function, a, b))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_rounds_once_in_every_mode(mode):
    a, b = pairs([1 + 2.0**-23, -1 - 2.0**-22, 3.0, 0.1, 2.0**-80, TINY, 1e25, -7.3])
    for c in (0.3, -1.0, SUB, -(1 + 2.0**-21), 1e38):
        x = one(f"fma.{mode}.f32 x, a, b, 0f{floats([c]).view(np.uint32)[0]:08X};", np.float32, a=a, b=b)
        exact = [
            Fraction(float(p)) * Fraction(float(q)) + Fraction(float(np.float32(c))) for p, q in zip(a, b, strict=True)
        ]
        keep = np.array([value != 0 for value in exact])
        same(x[keep], floats([rounded(value, mode) for value in exact])[keep])


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "mul"])
def test_directed_rounding(name, mode):
    a, b = pairs([1.0, -1.0, 0.1, 3.3, 2.0**-30, -(2.0**-30), 1e20, MAX, SUB])
    x = one(f"{name}.{mode}.f32 x, a, b;", np.float32, a=a, b=b)
    function = {"add": Fraction.__add__, "mul": Fraction.__mul__}[name]
    exact = [function(Fraction(float(p)), Fraction(float(q))) for p, q in zip(a, b, strict=True)]
    keep = np.array([value != 0 for value in exact])
    same(x[keep], floats([rounded(value, mode) for value in exact])[keep])
    # the next instruction rounds to nearest again
    same(one(f"{name}.{mode}.f32 r1, a, b; add.f32 x, a, b;", np.float32, a=a, b=b), ieee(np.add, a, b))


def test_ftz_makes_subnormal_arguments_and_results_signed_zeros():
    a = floats([SUB, -SUB, TINY / 2, TINY, -TINY, 1.0])
    same(one("add.ftz.f32 x, a, a;", np.float32, a=a), [0.0, -0.0, 0.0, 2 * TINY, -2 * TINY, 2.0])
    half = np.full(6, 0.5, np.float32)
    same(one("mul.ftz.f32 x, a, b;", np.float32, a=a, b=half), [0.0, -0.0, 0.0, 0.0, -0.0, 0.5])
    same(one("mul.f32 x, a, b;", np.float32, a=a, b=half), a * half)
    assert one("setp.eq.ftz.f32 p1, a, 0f00000000; selp.u32 x, 1, 0, p1;", np.uint32, a=a).tolist() == [
        1,
        1,
        1,
        0,
        0,
        0,
    ]


def test_sat_clamps_and_makes_nan_zero():
    a = floats([-1.0, -0.0, 0.25, 1.0, 7.0, INF, -INF, NAN])
    same(one("add.sat.f32 x, a, 0f00000000;", np.float32, a=a), [0.0, 0.0, 0.25, 1.0, 1.0, 1.0, 0.0, 0.0])
    same(one("cvt.sat.f32.f32 x, a;", np.float32, a=a), [0.0, 0.0, 0.25, 1.0, 1.0, 1.0, 0.0, 0.0])


def test_min_and_max():
    # 9.7.3.11: a number wins against NaN, both NaN: canonical NaN; +0.0 > -0.0; .NaN: NaN wins.
    a, b = pairs()
    least = [
        p if math.isnan(q) else q if math.isnan(p) else min(p, q, key=lambda v: (v, math.copysign(1, v)))
        for p, q in zip(a.tolist(), b.tolist(), strict=True)
    ]
    same(one("min.f32 x, a, b;", np.float32, a=a, b=b), least)
    most = [
        p if math.isnan(q) else q if math.isnan(p) else max(p, q, key=lambda v: (v, math.copysign(1, v)))
        for p, q in zip(a.tolist(), b.tolist(), strict=True)
    ]
    same(one("max.f32 x, a, b;", np.float32, a=a, b=b), most)
    nan = np.isnan(a) | np.isnan(b)
    same(one("max.NaN.f32 x, a, b;", np.float32, a=a, b=b), np.where(nan, np.float32(NAN), floats(most)))


def test_abs_neg_copysign_touch_the_sign_alone():
    a = floats(EDGES)
    bits = a.view(np.uint32)
    assert one("abs.f32 x, a;", np.uint32, a=bits).tolist() == (bits & 0x7FFFFFFF).tolist()
    assert one("neg.f32 x, a;", np.uint32, a=bits).tolist() == (bits ^ 0x80000000).tolist()
    same(one("copysign.f32 x, a, b;", np.float32, a=floats([-2.0, 3.0]), b=floats([5.0, -5.0])), [-5.0, 5.0])


def test_square_root_and_reciprocal_round_once():
    a = floats([*EDGES, 2.0, 7.0, 1e-40])
    same(one("sqrt.rn.f32 x, a;", np.float32, a=a), ieee(np.sqrt, a))
    same(one("rcp.rn.f32 x, a;", np.float32, a=a), ieee(np.divide, np.float32(1), a))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ex2.approx.ftz", np.exp2),
        ("lg2.approx", np.log2),
        ("rsqrt.approx", lambda v: 1 / np.sqrt(v)),
        ("sin.approx", np.sin),
        ("cos.approx", np.cos),
        ("tanh.approx", np.tanh),
        ("rcp.approx", lambda v: 1 / v),
        ("sqrt.approx", np.sqrt),
    ],
)
def test_approximate_functions_are_the_nearest_numbers(name, function):
    a = floats([0.5, 1.0, -1.25, 3.7, 10.0, 0.001, 100.0, -0.0, 0.0, INF, -INF, NAN, -200.0])
    with np.errstate(all="ignore"):
        expected = function(a.astype(np.float64)).astype(np.float32)
    if "ftz" in name:
        expected = np.where(np.abs(expected) < TINY, np.float32(0), expected)
    same(one(f"{name}.f32 x, a;", np.float32, a=a), expected)


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_comparisons_know_ordered_from_unordered(kind, dtype):
    # 9.7.6: eq ne lt le gt ge are false for NaN, equ neu ltu leu gtu geu true; num: both are numbers, nan: not so
    a, b = (side.astype(dtype) for side in pairs([1.0, 2.0, -0.0, 0.0, INF, NAN]))

    def seen(name):
        return one(f"setp.{name}.{kind} p1, a, b; selp.u32 x, 1, 0, p1;", np.uint32, a=a, b=b).tolist()

    signs = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for name, sign in signs.items():
        for unordered in (False, True):
            x = seen(name + "u" * unordered)
            for k, (p, q) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
                nan = math.isnan(p) or math.isnan(q)
                assert x[k] == (unordered if nan else eval(f"p {sign} q")), (name, unordered, p, q)
    nan = np.isnan(a) | np.isnan(b)
    assert seen("nan") == nan.astype(int).tolist() and seen("num") == (~nan).astype(int).tolist()


def test_double_precision():
    a, b = (np.array(side) for side in zip(*itertools.product([0.1, 3.0, -7.5, 1e300, 5e-324], repeat=2), strict=True))
    with np.errstate(all="ignore"):
        for name, function in {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "div.rn": np.divide,
            "min": np.minimum,
            "max": np.maximum,
        }.items():
            assert one(f"{name}.f64 x, a, b;", np.float64, a=a, b=b).tolist() == function(a, b).tolist()
    exact = [
        rounded(Fraction(p) * Fraction(q) + Fraction(0.3), "rn", 53, -1022, 1023)
        for p, q in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert one("fma.rn.f64 x, a, b, 0d3FD3333333333333;", np.float64, a=a, b=b).tolist() == exact


def test_double_precision_of_one_argument():
    a = np.array([0.1, 3.0, 7.5, 1e300, 2.0, 5e-324, INF, 0.0])
    for name, function in {
        "sqrt.rn": np.sqrt,
        "rcp.rn": lambda v: 1 / v,
        "rsqrt.approx": lambda v: 1 / np.sqrt(v),  # 9.7.3.17
    }.items():
        assert one(f"{name}.f64 x, a;", np.float64, a=a).tolist() == ieee(function, a).tolist(), name
    bits = np.array([0.1, -0.1, 0.0, -0.0, INF, -INF, NAN]).view(np.uint64)
    top = np.uint64(1 << 63)
    assert one("abs.f64 x, a;", np.uint64, a=bits).tolist() == (bits & ~top).tolist()
    assert one("neg.f64 x, a;", np.uint64, a=bits).tolist() == (bits ^ top).tolist()
    signs, sizes = np.array([-0.0, 3.0, -INF]), np.array([5.0, -5.0, 0.25])
    assert one("copysign.f64 x, a, b;", np.float64, a=signs, b=sizes).tolist() == [-5.0, 5.0, -0.25]


def test_not_a_number_loses_against_one_in_double_precision():
    # 9.7.3.11, 9.7.3.12: as in f32
    a, b = np.array([NAN, 1.0, NAN, -0.0, 0.0]), np.array([2.0, NAN, NAN, 0.0, -0.0])
    for name, zero in (("min", -1), ("max", 1)):
        x = one(f"{name}.f64 x, a, b;", np.float64, a=a, b=b)
        assert x[:2].tolist() == [2.0, 1.0] and np.isnan(x[2]) and np.copysign(1, x[3:]).tolist() == [zero, zero]


HALVES = {"f16": (np.float16, 11, -14, 15), "bf16": (ml_dtypes.bfloat16, 8, -126, 127)}


def halves(kind):
    """Codes that meet every exponent, and exact numbers."""
    rng = np.random.default_rng(5)
    codes = np.concatenate([rng.integers(0, 1 << 16, 900), [0, 0x8000, 1, 0x8001, 0x3C00, 0x3F80, 0x7BFF, 0x7F7F]])
    with np.errstate(invalid="ignore"):
        numbers = codes.astype(np.uint16).view(HALVES[kind][0]).astype(np.float64)
    keep = np.isfinite(numbers)
    return codes.astype(np.uint16)[keep], numbers[keep]


def as_half(value, kind):
    dtype, digits, lowest, top = HALVES[kind]
    return np.array(rounded(value, "rn", digits, lowest, top)).astype(dtype).view(np.uint16)


@pytest.mark.parametrize("kind", HALVES)
def test_half_arithmetic_rounds_once(kind):
    a, numbers = halves(kind)
    b, c = np.roll(a, 1), np.roll(a, 5)
    x, y, z = ([Fraction(v) for v in np.roll(numbers, n).tolist()] for n in (0, 1, 5))
    for body, exact in (
        (f"add.{kind} x, a, b;", [p + q for p, q in zip(x, y, strict=True)]),
        (f"sub.{kind} x, a, b;", [p - q for p, q in zip(x, y, strict=True)]),
        (f"mul.{kind} x, a, b;", [p * q for p, q in zip(x, y, strict=True)]),
        (f"fma.rn.{kind} x, a, b, c;", [p * q + r for p, q, r in zip(x, y, z, strict=True)]),
    ):
        got = one(body, np.uint16, a=a, b=b, c=c)
        for k, value in enumerate(exact):
            if value:
                assert got[k] == as_half(value, kind), (body, float(x[k]), float(y[k]), float(z[k]))


@pytest.mark.parametrize("kind", HALVES)
def test_half_functions_of_one_argument(kind):
    a, numbers = halves(kind)
    assert one(f"abs.{kind} x, a;", np.uint16, a=a).tolist() == (a & 0x7FFF).tolist()
    assert one(f"neg.{kind} x, a;", np.uint16, a=a).tolist() == (a ^ 0x8000).tolist()
    keep = (np.abs(numbers) < 14) & (numbers != 0)
    a, numbers = a[keep], numbers[keep]
    # 9.7.4.9, 9.7.4.10: approximations, here the nearest numbers
    for body, function in ((f"ex2.approx{'.ftz' * (kind == 'bf16')}", math.exp2), ("tanh.approx", math.tanh)):
        expected = [int(as_half(Fraction(function(v)), kind)) for v in numbers.tolist()]
        assert one(f"{body}.{kind} x, a;", np.uint16, a=a).tolist() == expected, body


def test_ex2_of_bf16_has_no_subnormal_results():
    # 9.7.4.10: ex2.approx.ftz.bf16 is the one there is
    a = np.array([-125, -126, -126.5, -127, -133, -140]).astype(ml_dtypes.bfloat16)
    x = one("ex2.approx.ftz.bf16 x, a;", np.uint16, a=a.view(np.uint16)).view(ml_dtypes.bfloat16)
    assert x.astype(float).tolist() == [2.0**-125, 2.0**-126, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", HALVES)
def test_packed_halves_are_two_at_once(kind):
    a, _ = halves(kind)
    a = a[: len(a) // 2 * 2]
    b = np.roll(a, 2)
    for name in ("add", "mul", "min", "max"):
        each = one(f"{name}.{kind} x, a, b;", np.uint16, a=a, b=b)
        both = one(f"{name}.{kind}x2 x, a, b;", np.uint32, a=a.view(np.uint32), b=b.view(np.uint32))
        assert both.view(np.uint16).tolist() == each.tolist()


@pytest.mark.parametrize("kind", HALVES)
def test_cvt_to_half_rounds_to_nearest_even(kind):
    rng = np.random.default_rng(7)
    a = rng.integers(0, 1 << 32, 900, np.uint32).view(np.float32)
    a = np.concatenate(
        [a[np.isfinite(a)][:800], floats([0.0, 1 + 2.0**-9, 1 + 2.0**-12, 65520.0, 65519.0, SUB, 6e-8, 3e-8])]
    )
    got = one(f"cvt.rn.{kind}.f32 x, a;", np.uint16, a=a)
    with np.errstate(over="ignore"):
        assert got.tolist() == a.astype(HALVES[kind][0]).view(np.uint16).tolist()
    # cvt.rn.bf16x2.f32 d, a, b: a becomes the upper half
    b = a[::-1].copy()
    both = one(f"cvt.rn.{kind}x2.f32 x, a, b;", np.uint32, a=a, b=b)
    assert (both >> 16).tolist() == got.tolist() and (both & 0xFFFF).tolist() == got[::-1].tolist()
    x = one(f"cvt.rz.{kind}.f32 x, a;", np.uint16, a=a)
    dtype, digits, lowest, top = HALVES[kind]
    exact = [rounded(Fraction(float(v)), "rz", digits, lowest, top) for v in a]
    keep = a != 0
    assert x.view(dtype).astype(np.float64)[keep].tolist() == np.array(exact)[keep].tolist()


def test_cvt_from_half_is_exact_for_every_code():
    codes = np.arange(1 << 16, dtype=np.uint16)
    for kind, (dtype, *_) in HALVES.items():
        for part in np.split(codes, 64):
            expected = part.view(dtype).astype(np.float32)
            same(one(f"cvt.f32.{kind} x, a;", np.float32, a=part), expected)


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_cvt_of_eight_bit_numbers(kind, dtype):
    codes = np.arange(256, dtype=np.uint16)
    got = one(f"cvt.rn.f16x2.{kind}x2 x, a;", np.uint32, a=codes << 8 | 0x38)
    expected = codes.astype(np.uint8).view(dtype).astype(np.float16)
    numbers = ~np.isnan(expected)
    assert (got >> 16).astype(np.uint16)[numbers].tolist() == expected.view(np.uint16)[numbers].tolist()
    assert np.isnan((got >> 16).astype(np.uint16).view(np.float16)[~numbers]).all()
    # to eight bits: to nearest even, too large becomes the largest, a is the upper one
    a = floats(
        [0.0, -0.0, 1.0, 1.0625, 1.1875, 1.125, 17.0, 18.0, 19.0, 448.0, 463.0, 1e6, -1e6, INF, 2.0**-9, 2.0**-10, 3e-3]
    )
    got = one(f"cvt.rn.satfinite.{kind}x2.f32 x, a, b;", np.uint16, a=a, b=a)
    largest = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(a, -largest, largest).astype(dtype).view(np.uint8)
    assert (got >> 8).tolist() == expected.tolist() and (got & 0xFF).tolist() == expected.tolist()
    nan = one(f"cvt.rn.satfinite.{kind}x2.f32 x, a, a;", np.uint16, a=floats([NAN]))
    assert nan[0] == 0x7F7F


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_cvt_to_integers_rounds_then_clamps_and_makes_nan_zero(mode):
    a = floats(
        [0.5, 1.5, 2.5, -0.5, -1.5, 0.0, 1e9, 2147483520.0, 2.0**31, -(2.0**31), 3e9, -3e9, 1e20, INF, -INF, NAN]
    )
    function = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for kind, low, high in (("s32", -(2**31), 2**31 - 1), ("u32", 0, 2**32 - 1), ("s64", -(2**63), 2**63 - 1)):
        expected = []
        for v in a.tolist():
            whole = 0 if math.isnan(v) else high if v == INF else low if v == -INF else function(v)
            expected.append(min(max(whole, low), high))
        dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
        assert one(f"cvt.{mode}.{kind}.f32 x, a;", dtype, a=a).tolist() == expected
    finite_a = a[np.isfinite(a)]
    same(
        one(f"cvt.{mode}.f32.f32 x, a;", np.float32, a=finite_a),
        [math.copysign(float(function(v)), v) for v in finite_a.tolist()],
    )


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_cvt_to_whole_numbers_of_double_precision(mode):
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    a = np.array([0.5, 1.5, -0.5, -2.5, 2.0**52 + 0.5, -(2.0**51) - 0.5, 1e300, -0.0, INF])
    x = one(f"cvt.{mode}.f64.f64 x, a;", np.float64, a=a)
    assert x.view(np.uint64).tolist() == function(a).view(np.uint64).tolist()


def test_cvt_from_half_to_double_is_exact():
    for kind, (dtype, *_) in HALVES.items():
        codes, numbers = halves(kind)
        x = one(f"cvt.f64.{kind} x, a;", np.float64, a=codes)
        assert x.view(np.uint64).tolist() == codes.view(dtype).astype(np.float64).view(np.uint64).tolist()
        assert x.tolist() == numbers.tolist()


def test_cvt_from_integers_rounds_once():
    a = np.array([0, 1, -1, 16777217, -16777219, 2**31 - 1, -(2**31), 123456789], np.int32)
    same(one("cvt.rn.f32.s32 x, a;", np.float32, a=a), a.astype(np.float32))
    same(one("cvt.rn.f32.u32 x, a;", np.float32, a=a), a.view(np.uint32).astype(np.float32))
    wide = np.array([0, (1 << 63) - 1, -(1 << 63), (1 << 60) + 1, 1 << 53 | 1], np.int64)
    same(one("cvt.rn.f32.s64 x, a;", np.float32, a=wide), wide.astype(np.float32))
    same(one("cvt.rn.f32.u64 x, a;", np.float32, a=wide), wide.view(np.uint64).astype(np.float32))
    assert one("cvt.rn.f64.s64 x, a;", np.float64, a=wide).tolist() == wide.astype(np.float64).tolist()
    assert one("cvt.rn.f16.s32 x, a;", np.uint16, a=np.array([2049, 7, -3], np.int32)).tolist() == [
        0x6800,
        0x4700,
        0xC200,
    ]


def test_cvt_between_integers_extends_by_the_source_and_saturates_if_asked():
    a = np.array([0, -1, 127, 128, -128, 255, 256, 65535, -65536, 2**31 - 1], np.int32)
    assert one("cvt.s64.s32 x, a;", np.int64, a=a).tolist() == a.tolist()
    assert one("cvt.u64.u32 x, a;", np.int64, a=a).tolist() == a.view(np.uint32).tolist()
    assert one("cvt.s32.s8 x, a;", np.int32, a=a).tolist() == a.astype(np.int8).tolist()
    assert one("cvt.u32.u16 x, a;", np.int32, a=a.astype(np.uint16)).tolist() == a.astype(np.uint16).tolist()
    assert one("cvt.u16.u32 x, a;", np.uint16, a=a).tolist() == a.astype(np.uint16).tolist()
    assert one("cvt.s16.s8 x, a;", np.int16, a=a.astype(np.int16)).tolist() == a.astype(np.int8).tolist()
    assert one("cvt.sat.s8.s32 r1, a; mov.b32 x, r1;", np.int32, a=a).tolist() == np.clip(a, -128, 127).tolist()
    assert one("cvt.sat.u16.s32 h1, a; mov.b16 x, h1;", np.uint16, a=a).tolist() == np.clip(a, 0, 65535).tolist()


def test_cvt_between_floats():
    a = np.array([0.1, 1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50, 1e300, 1e-46, -1e-320])
    with np.errstate(all="ignore"):
        same(one("cvt.rn.f32.f64 x, a;", np.float32, a=a), a.astype(np.float32))
    down = [rounded(Fraction(v), "rm") for v in a.tolist()]
    same(one("cvt.rm.f32.f64 x, a;", np.float32, a=a), down)
    assert one("cvt.f64.f32 x, a;", np.float64, a=floats([0.1])).tolist() == [float(np.float32(0.1))]


@pytest.mark.parametrize("build", ["_machine", "_machine_v3"])
def test_every_build_gives_the_same_bits(build, monkeypatch):
    """What rounds, in each direction, and an exponential: against the exact results."""
    from mla_oracle.ptx import interpreter

    if build == "_machine_v3" and platform.machine() != "x86_64":
        pytest.skip("no build for AVX2 on this machine")
    module = importlib.import_module(f"mla_oracle.ptx.{build}")
    monkeypatch.setattr(interpreter, "_machine", lambda: module)
    a, b = pairs([1.0, -1.0, 0.1, 3.3, 2.0**-30, 1e20, TINY, SUB])
    for mode in ("rn", "rz", "rm", "rp"):
        got = one(f"fma.{mode}.f32 x, a, b, 0f3E99999A;", np.float32, a=a, b=b)
        third = Fraction(float(np.float32(0.3)))
        same(got, [rounded(Fraction(float(p)) * Fraction(float(q)) + third, mode) for p, q in zip(a, b, strict=True)])
    same(one("cvt.rmi.f32.f32 x, a;", np.float32, a=a), np.floor(a))
    same(one("cvt.rpi.f32.f32 x, a;", np.float32, a=a), np.ceil(a))
    c = floats([0.5, -3.25, 20.0, -126.5])
    same(one("ex2.approx.f32 x, a;", np.float32, a=c), np.exp2(c.astype(np.float64)))
