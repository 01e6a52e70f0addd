# SPDX-License-Identifier: Apache-2.0
"""mma, ldmatrix, stmatrix and movmatrix: who holds what, by the index formulas of PTX ISA 9.7.14.5."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from snippets import evaluate

from mla_oracle.errors import UnsupportedError
from mla_oracle.ptx import Fault

LANES = range(32)
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def group(lane):
    return lane >> 2


def in_group(lane):
    return lane % 4


# "Matrix Fragments for mma.m16n8k16 with floating point type": element i of the lane's fragment -> (row, column)
def a_place(lane, i):
    row = group(lane) if 0 <= i < 2 or 4 <= i < 6 else group(lane) + 8
    return row, in_group(lane) * 2 + (i & 1) + (0 if i < 4 else 8)


def b_place(lane, i):
    return in_group(lane) * 2 + (i & 1) + (0 if i < 2 else 8), group(lane)


def c_place(lane, i):
    return group(lane) if i < 2 else group(lane) + 8, in_group(lane) * 2 + (i & 1)


def fragments(matrix, place, n):
    """[32][n] of a matrix's elements; 16-bit ones two to a register, the first in the lower half."""
    return np.array([[matrix[place(lane, i)] for i in range(n)] for lane in LANES], matrix.dtype)


def multiply(a, b, c, kind):
    registers = {}
    for name, matrix, place, n in (("a", a, a_place, 8), ("b", b, b_place, 4)):
        packed = fragments(matrix, place, n).view(np.uint16).view(np.uint32)
        registers |= {f"{name}{i}": packed[:, i].copy() for i in range(n // 2)}
    registers |= {f"c{i}": part for i, part in enumerate(fragments(c, c_place, 4).T.copy())}
    got = evaluate(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{x0, x1, x2, x3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3};",
        out={f"x{i}": np.float32 for i in range(4)},
        **registers,
    )
    d = np.full((16, 8), np.nan, np.float32)
    for lane in LANES:
        for i in range(4):
            d[c_place(lane, i)] = got[f"x{i}"][lane]
    return d


@pytest.mark.parametrize("kind", DTYPES)
def test_every_element_of_a_mma_lies_where_the_isa_says(kind):
    for r, k in [(0, 0), (3, 5), (7, 15), (8, 1), (15, 8), (12, 14)]:
        for n in (0, 1, 5, 7):
            a, b = np.zeros((16, 16), DTYPES[kind]), np.zeros((16, 8), DTYPES[kind])
            a[r, k], b[k, n] = 3, 5
            c = np.arange(128, dtype=np.float32).reshape(16, 8)
            expected = c.copy()
            expected[r, n] += 15
            assert np.array_equal(multiply(a, b, c, kind), expected)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_mma_of_small_integers_is_exact(kind):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, shape).astype(DTYPES[kind]) for shape in ((16, 16), (16, 8)))
    c = rng.integers(-1000, 1000, (16, 8)).astype(np.float32)
    assert np.array_equal(multiply(a, b, c, kind), a.astype(np.float32) @ b.astype(np.float32) + c)


@pytest.mark.parametrize("kind", DTYPES)
def test_products_are_exact_and_summed_in_f32_in_ascending_order(kind):
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(shape).astype(DTYPES[kind]) for shape in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    expected = c.copy()
    for r in range(16):
        for n in range(8):
            for k in range(16):
                exact = Fraction(float(a[r, k])) * Fraction(float(b[k, n])) + Fraction(float(expected[r, n]))
                expected[r, n] = np.float32(float(exact))  # 53 bits hold these sums, so one rounding it is
    assert np.array_equal(multiply(a, b, c, kind), expected)


def test_halves_of_a_mma_may_be_subnormal_infinite_or_nan():
    a, b, c = np.zeros((16, 16), np.float16), np.zeros((16, 8), np.float16), np.zeros((16, 8), np.float32)
    a[0, 0], a[1, 0], a[2, 0], b[0, 0], b[0, 1] = 2.0**-24, np.inf, np.nan, 1, -2
    d = multiply(a, b, c, "f16")
    assert d[0, 0] == 2.0**-24 and d[0, 1] == -(2.0**-23) and d[1, 0] == np.inf and d[1, 1] == -np.inf
    assert d[2].view(np.uint32).tolist() == [0x7FFFFFFF] * 8 and np.isnan(d[1, 2])


def matrices(n):
    return np.arange(n * 64, dtype=np.uint16).reshape(n, 8, 8) + 1000


STAGE = ".shared .align 16 .b8 tile[1024];"
# Each lane stores 16 bytes: row `lane % 8` of matrix `lane / 8`, at 16 * lane.
FILL = """
    mov.u32 r1, tile; shl.b32 r2, tid_, 4; add.s32 r1, r1, r2;
    st.shared.v4.b32 [r1], {m0, m1, m2, m3}; bar.sync 0;
"""


def rows(n):
    """m0..m3: the four registers of each lane's row."""
    words = np.zeros((32, 4), np.uint32)
    words[: 8 * n] = matrices(n).reshape(-1, 8).view(np.uint32)
    return {f"m{i}": part for i, part in enumerate(words.T.copy())}


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ldmatrix_gives_lane_l_row_l4_columns_2l4(n, trans):
    # 9.7.14.5.15: threads 8 m .. 8 m + 7 hold the addresses of matrix m's rows; the lane's register m holds two
    # elements of row laneid / 4, from column 2 (laneid % 4), of the matrix or (.trans) of its transpose.
    registers = ", ".join(f"x{i}" for i in range(n))
    got = evaluate(
        FILL + f"ldmatrix.sync.aligned.m8n8.x{n}{'.trans' if trans else ''}.shared.b16 {{{registers}}}, [r1];",
        out={f"x{i}": np.uint32 for i in range(n)},
        shared=STAGE,
        **rows(n),
    )
    for m, matrix in enumerate(matrices(n)):
        matrix = matrix.T if trans else matrix
        for lane in LANES:
            low, high = matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1]
            assert got[f"x{m}"][lane] == int(high) << 16 | int(low)


def test_ldmatrix_takes_the_address_from_the_lanes_that_count():
    # x2: lanes 0 - 15; what the others hold is ignored
    body = FILL + "setp.gt.u32 p1, tid_, 15; selp.b32 r1, 0x12345, r1, p1;"
    body += "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {x0, x1}, [r1];"
    got = evaluate(body, out={"x0": np.uint32, "x1": np.uint32}, shared=STAGE, **rows(2))
    assert got["x1"][5] == int(matrices(2)[1][1, 3]) << 16 | int(matrices(2)[1][1, 2])


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_is_the_inverse_of_ldmatrix(trans):
    body = (
        FILL
        + f"""
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{r4, r5, r6, r7}}, [r1];
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [r1 + 512], {{r4, r5, r6, r7}};
        bar.warp.sync -1;
        ld.shared.v4.b32 {{x0, x1, x2, x3}}, [r1 + 512];
    """
    )
    got = evaluate(body, out={f"x{i}": np.uint32 for i in range(4)}, shared=STAGE, **rows(4))
    for i in range(4):
        assert got[f"x{i}"].tolist() == rows(4)[f"m{i}"].tolist()


def test_movmatrix_transposes():
    words = matrices(1).reshape(-1).view(np.uint32)
    got = evaluate("movmatrix.sync.aligned.m8n8.trans.b16 x, a;", out={"x": np.uint32}, a=words)["x"]
    assert got.view(np.uint16).reshape(8, 8).tolist() == matrices(1)[0].T.tolist()


def test_every_lane_of_the_warp_takes_part():
    body = FILL + "setp.gt.u32 p1, tid_, 30; @p1 bra DONE;"
    body += "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {x0}, [r1];"
    with pytest.raises(Fault, match="divergent warp: ldmatrix"):
        evaluate(body, out={"x0": np.uint32}, shared=STAGE, **rows(4))


def test_another_shape_or_type_is_unsupported():
    for wrong in ("m16n8k8.row.col.f32.bf16.bf16.f32", "m16n8k16.row.col.f16.f16.f16.f16"):
        with pytest.raises(UnsupportedError, match=rf"PTX line \d+: mma.sync.aligned.{wrong} is not supported"):
            evaluate(
                f"mma.sync.aligned.{wrong} {{r0, r1, r2, r3}}, {{r0, r1, r2, r3}}, {{r0, r1}}, {{r0, r1, r2, r3}};",
                out={"x": np.uint32},
                a=np.zeros(32, np.uint32),
            )
