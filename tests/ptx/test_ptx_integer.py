# SPDX-License-Identifier: Apache-2.0
"""Integer instructions against Python's integers, with the words of PTX ISA 9.7.1 (arithmetic), 9.7.6 (comparison),
9.7.8 (logic) and 9.7.9 (mov, prmt)."""

import itertools

import numpy as np
import pytest
from snippets import evaluate, one

EDGES = [0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
EDGES += [0x1234_5678_9ABC_DEF0, 1 << 63, (1 << 64) - 1, (1 << 63) - 1, 0xDEADBEEF]


def edges(bits, signed=False):
    values = sorted({value % (1 << bits) for value in EDGES})
    return [value - (1 << bits) if signed and value >> (bits - 1) else value for value in values]


def dtype(kind):
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


def pairs(kind):
    values = edges(int(kind[1:]), kind[0] == "s")
    chosen = list(itertools.product(values, values))[:1024]
    return [np.array(side, dtype(kind)) for side in zip(*chosen, strict=True)]


def wrap(value, kind):
    bits = int(kind[1:])
    value %= 1 << bits
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def truncated(a, b):
    """C's division: towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


WIDTHS = ["s16", "u16", "s32", "u32", "s64", "u64"]
BINARY = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
    "div": lambda a, b, bits: truncated(a, b) if b else -1,
    "rem": lambda a, b, bits: a - truncated(a, b) * b if b else a,
}


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("name", BINARY)
def test_arithmetic(name, kind):
    a, b = pairs(kind)
    x = one(f"{name}.{kind} x, a, b;", dtype(kind), a=a, b=b)
    assert x.tolist() == [
        wrap(BINARY[name](p, q, int(kind[1:])), kind) for p, q in zip(a.tolist(), b.tolist(), strict=True)
    ]


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products(kind):
    a, b = pairs(kind)
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    c = np.resize(np.array(edges(int(wide[1:]), wide[0] == "s"), dtype(wide)), len(a))
    got = evaluate(
        f"mul.wide.{kind} x, a, b; mad.wide.{kind} y, a, b, c;", out={"x": dtype(wide), "y": dtype(wide)}, a=a, b=b, c=c
    )
    products = [p * q for p, q in zip(a.tolist(), b.tolist(), strict=True)]
    assert got["x"].tolist() == [wrap(p, wide) for p in products]
    assert got["y"].tolist() == [wrap(p + q, wide) for p, q in zip(products, c.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_mad(half, kind):
    a, b = pairs(kind)
    c = b[::-1].copy()
    shift = int(kind[1:]) if half == "hi" else 0
    x = one(f"mad.{half}.{kind} x, a, b, c;", dtype(kind), a=a, b=b, c=c)
    expected = [wrap((p * q >> shift) + r, kind) for p, q, r in zip(*(v.tolist() for v in (a, b, c)), strict=True)]
    assert x.tolist() == expected


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_abs_and_neg_wrap_at_the_smallest(kind):
    a = np.array(edges(int(kind[1:]), True), dtype(kind))
    for name, function in (("abs", abs), ("neg", lambda v: -v)):
        assert one(f"{name}.{kind} x, a;", dtype(kind), a=a).tolist() == [wrap(function(v), kind) for v in a.tolist()]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic(bits):
    kind = f"u{bits}"
    a, b = pairs(kind)
    for name, function in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        x = one(f"{name}.b{bits} x, a, b;", dtype(kind), a=a, b=b)
        assert x.tolist() == [function(p, q) for p, q in zip(a.tolist(), b.tolist(), strict=True)]
    assert one(f"not.b{bits} x, a;", dtype(kind), a=a).tolist() == [wrap(~p, kind) for p in a.tolist()]


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_shifts_clamp_the_amount_to_the_width(kind):
    # 9.7.8: "Shift amounts greater than the register width N are clamped to N."
    bits = int(kind[1:])
    values = edges(bits, kind[0] == "s")
    a, b = zip(*itertools.product(values, [0, 1, 7, bits - 1, bits, bits + 1, 1000, 0xFFFFFFFF]), strict=True)
    a, b = np.array(a[:1024], dtype(kind)), np.array(b[:1024], np.uint32)
    x = one(f"shr.{kind} x, a, b;", dtype(kind), a=a, b=b)
    assert x.tolist() == [wrap(p >> min(q, bits), kind) for p, q in zip(a.tolist(), b.tolist(), strict=True)]
    x = one(f"shl.b{bits} x, a, b;", dtype(kind), a=a, b=b)
    assert x.tolist() == [wrap(p << min(q, bits), kind) for p, q in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode):
    # 9.7.8.7: shf.l: d = b << n | a >> (32 - n); shf.r: d = b << (32 - n) | a >> n; n = c & 31, or min(c, 32).
    low, high = pairs("u32")
    c = np.resize(np.array([0, 1, 15, 31, 32, 33, 63, 64, 200], np.uint32), len(low))
    left = one(f"shf.l.{mode}.b32 x, a, b, c;", np.uint32, a=low, b=high, c=c).tolist()
    right = one(f"shf.r.{mode}.b32 x, a, b, c;", np.uint32, a=low, b=high, c=c).tolist()
    for k, (p, q, r) in enumerate(zip(low.tolist(), high.tolist(), c.tolist(), strict=True)):
        n = r & 31 if mode == "wrap" else min(r, 32)
        assert left[k] == (q << n | p >> (32 - n)) % (1 << 32)
        assert right[k] == (q << (32 - n) | p >> n) % (1 << 32)


@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0xCA, 0x1B, 0xFF, 0x3C])
def test_lop3_is_a_table_of_three_bits(table):
    # 9.7.8.6: immLut = F(0xF0, 0xCC, 0xAA) for d = F(a, b, c)
    a, b, c = (np.array([value], np.uint32) for value in (0xF0, 0xCC, 0xAA))
    assert one(f"lop3.b32 x, a, b, c, {table};", np.uint32, a=a, b=b, c=c)[0] & 0xFF == table


def test_prmt_picks_bytes_and_signs():
    # 9.7.9.7: {b, a} = {b7 .. b0}; a selector's fourth bit replicates the sign.
    a, b = np.array([0x80828486], np.uint32), np.array([0x11133557], np.uint32)
    assert one("prmt.b32 x, a, b, 0x3210;", np.uint32, a=a, b=b)[0] == 0x80828486
    assert one("prmt.b32 x, a, b, 0x7654;", np.uint32, a=a, b=b)[0] == 0x11133557
    assert one("prmt.b32 x, a, b, 0x5410;", np.uint32, a=a, b=b)[0] == 0x35578486
    assert one("prmt.b32 x, a, b, 0xF8C0;", np.uint32, a=a, b=b)[0] == 0x00FF0086
    table = {
        "f4e": [0x3210, 0x4321, 0x5432, 0x6543],
        "b4e": [0x5670, 0x6701, 0x7012, 0x0123],
        "rc8": [0x0000, 0x1111, 0x2222, 0x3333],
        "ecl": [0x3210, 0x3211, 0x3222, 0x3333],
        "ecr": [0x0000, 0x1110, 0x2210, 0x3210],
        "rc16": [0x1010, 0x3232, 0x1010, 0x3232],
    }
    both = (0x11133557 << 32) | 0x80828486
    for mode, selectors in table.items():
        for c, selector in enumerate(selectors):
            expected = sum((both >> 8 * (selector >> 4 * k & 7) & 0xFF) << 8 * k for k in range(4))
            assert one(f"prmt.b32.{mode} x, a, b, {c};", np.uint32, a=a, b=b)[0] == expected, (mode, c)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe(kind):
    # 9.7.1.19: msb = bits - 1; pos, len = b & 0xFF, c & 0xFF; sbit = sign of the field or of the number;
    # d[i] = a[pos + i] if i < len and pos + i <= msb else sbit
    bits = int(kind[1:])
    values, positions, lengths = edges(bits)[:12], [0, 3, bits - 1, bits, 200], [0, 1, 8, bits - 3, bits, 255]
    a, b, c = zip(*itertools.product(values, positions, lengths), strict=True)
    x = one(
        f"bfe.{kind} x, a, b, c;",
        np.dtype(f"u{bits // 8}"),
        a=np.array(a, f"u{bits // 8}"),
        b=np.array(b, np.uint32),
        c=np.array(c, np.uint32),
    )
    for k, (value, pos, length) in enumerate(zip(a, b, c, strict=True)):
        msb = bits - 1
        sbit = 0 if kind[0] == "u" or length == 0 else value >> min(pos + length - 1, msb) & 1
        field = [value >> (pos + i) & 1 if i < length and pos + i <= msb else sbit for i in range(bits)]
        assert int(x[k]) == sum(bit << i for i, bit in enumerate(field)), (hex(value), pos, length)


@pytest.mark.parametrize("bits", [32, 64])
def test_bfi(bits):
    # 9.7.1.20: f = b; for i < len and pos + i <= msb: f[pos + i] = a[i]
    a, b = pairs(f"u{bits}")
    pos = np.resize(np.array([0, 1, 5, 31, 32, 40, 63, 64, 255], np.uint32), len(a))
    length = np.resize(np.array([0, 1, 8, 31, 32, 33, 64], np.uint32), len(a))
    x = one(f"bfi.b{bits} x, a, b, c, e;", a.dtype, a=a, b=b, c=pos, e=length).tolist()
    for k in range(len(a)):
        f = int(b[k])
        for i in range(int(length[k])):
            if int(pos[k]) + i < bits:
                f = f & ~(1 << int(pos[k]) + i) | (int(a[k]) >> i & 1) << int(pos[k]) + i
        assert x[k] == f


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits):
    a = np.array(edges(bits), f"u{bits // 8}")
    assert one(f"popc.b{bits} x, a;", np.uint32, a=a).tolist() == [v.bit_count() for v in a.tolist()]
    assert one(f"clz.b{bits} x, a;", np.uint32, a=a).tolist() == [bits - v.bit_length() for v in a.tolist()]
    assert one(f"brev.b{bits} x, a;", a.dtype, a=a).tolist() == [int(f"{v:0{bits}b}"[::-1], 2) for v in a.tolist()]


def test_bfind():
    # 9.7.1.16: the most significant bit that is not the sign; 0xFFFFFFFF if there is none
    a = np.array(edges(32), np.uint32)
    assert one("bfind.u32 x, a;", np.int32, a=a).tolist() == [v.bit_length() - 1 for v in a.tolist()]
    signed = one("bfind.s32 x, a;", np.int32, a=a).tolist()
    assert signed == [(v ^ 0xFFFFFFFF if v >> 31 else v).bit_length() - 1 for v in a.tolist()]


@pytest.mark.parametrize("kind", WIDTHS)
def test_comparisons(kind):
    relations = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    if kind[0] == "u":
        relations |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
    a, b = pairs(kind)
    for name, sign in relations.items():
        x = one(f"setp.{name}.{kind} p1, a, b; selp.u32 x, 1, 0, p1;", np.uint32, a=a, b=b)
        assert x.tolist() == [
            int(eval(f"p {sign} q", {"p": p, "q": q})) for p, q in zip(a.tolist(), b.tolist(), strict=True)
        ]


def test_setp_combines_with_a_predicate_and_gives_the_complement():
    # 9.7.6.2: p = (a cmp b) op c, q = !(a cmp b) op c
    a, b, c = (np.array(v, np.int32) for v in zip(*itertools.product([0, 1], [0, 1], [0, 1]), strict=True))
    for op, function in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        body = f"setp.ne.s32 p1, c, 0; setp.lt.{op}.s32 p2|p3, a, b, p1; selp.u32 x, 1, 0, p2; selp.u32 y, 1, 0, p3;"
        got = evaluate(body, out={"x": np.uint32, "y": np.uint32}, a=a, b=b, c=c)
        for k in range(8):
            less = int(a[k] < b[k])
            assert (got["x"][k], got["y"][k]) == (function(less, int(c[k])), function(1 - less, int(c[k])))


def test_predicate_logic_and_negation():
    a = np.array([0, 1], np.int32)
    body = "setp.ne.s32 p1, a, 0; not.pred p2, p1; and.pred p3, p1, p2; xor.pred p4, p1, p3; selp.u32 x, 1, 0, p4;"
    assert one(body + "@!p1 mov.u32 x, 7;", np.uint32, a=a).tolist() == [7, 1]


def test_slct_takes_a_where_c_is_not_negative():
    c = np.array([0, 5, -1, -(1 << 31)], np.int32)
    assert one("slct.s32.s32 x, 1, 2, c;", np.int32, c=c).tolist() == [1, 1, 2, 2]


def test_packing_puts_element_0_lowest():
    # 9.7.9.4: mov.b32 d, {a.lo, a.hi}
    a = np.array([0x1122334455667788], np.uint64)
    body = "mov.b64 {r1, r2}, a; mov.b32 {h1, h2}, r2; mov.b32 r3, {h2, h1}; mov.b64 x, {r1, r3};"
    assert one(body, np.uint64, a=a)[0] == 0x3344112255667788
    assert one("mov.b64 {h1, h2, h3, h4}, a; mov.b64 x, {h4, h3, h2, h1};", np.uint64, a=a)[0] == 0x7788556633441122
    assert one("mov.b64 {_, x}, a;", np.uint32, a=a)[0] == 0x11223344


def test_special_registers_of_a_block():
    machine_words = "%tid.x %ntid.x %laneid %warpid %nwarpid %lanemask_lt %lanemask_ge %lanemask_eq".split()
    got = [one(f"mov.u32 x, {word};", np.uint32, a=np.zeros(70, np.uint32)).tolist() for word in machine_words]
    assert got[0] == list(range(70)) and set(got[1]) == {70} and got[2] == [t % 32 for t in range(70)]
    assert got[3] == [t // 32 for t in range(70)] and set(got[4]) == {3}
    for t in range(70):
        lane = t % 32
        assert got[5][t] == (1 << lane) - 1 and got[6][t] == (0xFFFFFFFF << lane) % (1 << 32) and got[7][t] == 1 << lane


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_selp_takes_one_of_two(bits):
    # 9.7.6.3: d = (c == 1) ? a : b
    dtype = np.dtype(f"u{bits // 8}")
    a, b = np.arange(1, 9, dtype=dtype), np.arange(1, 9, dtype=dtype) << dtype.type(bits - 4)
    x = one(f"setp.gt.u32 p1, tid_, 4; selp.b{bits} x, a, b, p1;", dtype, a=a, b=b)
    assert x.tolist() == [*b[:5].tolist(), *a[5:].tolist()]


def test_what_orders_memory_or_is_a_hint_changes_no_number():
    # membar and fence (9.7.13.4): memory is seen in the order of the program by every thread here
    body = "membar.cta; fence.acq_rel.gpu; fence.sc.sys; nanosleep.u32 100; mov.u32 x, a;"
    assert one(body, np.uint32, a=np.arange(9, dtype=np.uint32)).tolist() == list(range(9))
