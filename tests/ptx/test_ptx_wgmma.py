# SPDX-License-Identifier: Apache-2.0
"""wgmma.mma_async (PTX ISA 9.7.15.5): every layout of shared memory, who holds what, and what it adds up."""

from fractions import Fraction

import numpy as np
import pytest
from wgmma import COMMIT, DTYPES, FENCE, WAIT, descriptor, instruction, lay, run

from mla_oracle.errors import UnsupportedError
from mla_oracle.ptx import Fault

WIDTHS = [16, 32, 64, 128]


def strides(rows, width, turned):
    """(leading, stride, bytes in all) of `rows` along M or N and 16 numbers along K, with gaps between the parts."""
    chunks, gap = width // 16, 8 * width if width > 16 else 128
    if turned and width == 16:
        stride = 128 + 128
        return stride * (rows // 8) + 384, stride, 2 * (stride * (rows // 8) + 384)
    if turned:
        parts = -(-(rows // 8) // chunks)
        leading = 8 * width + gap
        return leading, leading * parts + gap, 2 * (leading * parts + gap)
    stride = 8 * width + gap
    if width == 16:
        return stride * (rows // 8) + 256, stride, 2 * (stride * (rows // 8) + 256)
    return 16, stride, stride * (rows // 8)


def placed(image, matrix, start, width, turned):
    leading, stride, _ = strides(len(matrix), width, turned)
    lay(image, matrix, start=start, leading=leading, stride=stride, width=width, turned=turned)
    return descriptor(start, leading, stride, width)


def problem(n, kind, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-8, 9, shape).astype(DTYPES[kind]) for shape in ((64, 16), (n, 16)))
    return a, b, rng.integers(-1000, 1000, (64, n)).astype(np.float32)


def exact(a, b, c):
    return a.astype(np.float32) @ b.astype(np.float32).T + c


def room(*sizes):
    return np.zeros(sum(-(-size // 1024) * 1024 for size in sizes), np.uint8)


@pytest.mark.parametrize("n", [8, 24, 64, 136, 256])
@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_b_in_every_layout(width, turned, n):
    kind = "bf16" if n % 16 else "f16"
    a, b, c = problem(n, kind)
    image = room(strides(n, width, turned)[2])
    place = placed(image, b, 0, width, turned)
    body = FENCE + instruction(n, kind, None, place, turned=(0, turned)) + COMMIT + WAIT
    assert np.array_equal(run(body, image, n, a=a, c=c), exact(a, b, c))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_in_every_layout(width, turned, kind):
    a, b, c = problem(16, kind)
    far = -(-strides(64, width, turned)[2] // 1024) * 1024
    image = room(far, strides(16, 64, 0)[2])
    place = placed(image, a, 0, width, turned)
    other = placed(image, b, far, 64, 0)
    body = FENCE + instruction(16, kind, place, other, turned=(turned, 0)) + COMMIT + WAIT
    assert np.array_equal(run(body, image, 16, c=c), exact(a, b, c))


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_n(n):
    a, b, c = problem(n, "bf16", n)
    image = room(strides(n, 128, 1)[2])
    place = placed(image, b, 0, 128, 1)
    body = FENCE + instruction(n, "bf16", None, place, turned=(0, 1)) + COMMIT + WAIT
    assert np.array_equal(run(body, image, n, a=a, c=c), exact(a, b, c))


def test_steps_along_k_within_a_swizzled_row_add_32_bytes_to_the_start():
    # rows of 64 numbers: one atom of 128 bytes wide, four products of 16
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, shape).astype(np.float16) for shape in ((64, 64), (32, 64)))
    image = room(64 * 128, 32 * 128)
    for matrix, start in ((a, 0), (b, 8192)):
        lay(image, matrix, start=start, leading=16, stride=1024, width=128, turned=0)
    steps = [[descriptor(start + 32 * k, 16, 1024, 128) for start in (0, 8192)] for k in range(4)]
    body = FENCE + "".join(instruction(32, "f16", *step) for step in steps) + COMMIT + WAIT
    assert np.array_equal(run(body, image, 32), exact(a, b, 0))


# Bytes worked out by hand: where one element lies -> which. K-major, rows of 16 along K; rows are of M or N.
BYTES = [
    # 128 bytes: row 3's chunk 1 is in column 1 ^ 3 = 2: 3 * 128 + 2 * 16
    (128, 0, 16, 1024, 3, 8, 416),
    # row 9 is row 1 of the next eight: 1024 + 128 + (0 ^ 1) * 16, element 2
    (128, 0, 16, 1024, 9, 2, 1024 + 128 + 16 + 4),
    # 64 bytes: row 5's chunk 1 in column 1 ^ 5 / 2 = 3: 5 * 64 + 3 * 16
    (64, 0, 16, 512, 5, 8, 368),
    # 32 bytes: row 6's chunk 0 in column 0 ^ 6 / 4 = 1
    (32, 0, 16, 256, 6, 7, 6 * 32 + 16 + 14),
    # none: row 10's chunk 1: one stride (8 rows), one leading offset (a chunk), row 2 of 16 bytes
    (16, 0, 512, 128, 10, 11, 128 + 512 + 2 * 16 + 6),
    # MN-major. 128 bytes: number 70 is the second 64's chunk 0, element 6; k = 5 is row 5: column 0 ^ 5
    (128, 1, 2048, 1024, 70, 5, 2048 + 5 * 128 + 5 * 16 + 12),
    # k = 13: the next eight rows of the same; number 17 is chunk 2, in column 2 ^ 5 = 7
    (128, 1, 2048, 1024, 17, 13, 1024 + 5 * 128 + 7 * 16 + 2),
    # 64 bytes: number 40 is the second 32's chunk 1, k = 7: column 1 ^ 7 / 2 = 2
    (64, 1, 1024, 512, 40, 7, 1024 + 7 * 64 + 2 * 16),
    # 32 bytes: number 24 is the second 16's chunk 1, k = 12: the next eight rows' row 4: column 1 ^ 4 / 4 = 0
    (32, 1, 1024, 512, 24, 12, 1024 + 512 + 4 * 32),
    # none: number 11 is chunk 1 (a stride), element 3; k = 9 is one leading offset and row 1
    (16, 1, 1024, 128, 11, 9, 128 + 1024 + 16 + 6),
]


@pytest.mark.parametrize(("width", "turned", "leading", "stride", "row", "k", "byte"), BYTES)
def test_an_element_lies_at_the_byte_the_isa_gives(width, turned, leading, stride, row, k, byte):
    image = room(4096)
    image[byte : byte + 2] = np.frombuffer(np.float16(3).tobytes(), np.uint8)
    a, expected = np.zeros((64, 16), np.float16), np.zeros((64, 80), np.float32)
    a[:, k] = np.arange(64)
    expected[:, row] = 3 * np.arange(64)
    place = descriptor(0, leading, stride, width)
    body = FENCE + instruction(80, "f16", None, place, turned=(0, turned)) + COMMIT + WAIT
    assert np.array_equal(run(body, np.pad(image, (0, 16384)), 80, a=a), expected)


def test_the_base_offset_is_the_row_of_the_pattern_the_matrix_starts_in():
    # "(pattern start address >> 7) & 7" for a pattern that begins 384 bytes after a multiple of 1024
    a, b, c = problem(16, "f16")
    image = room(4096)
    lay(image, b, start=384, leading=16, stride=1024, width=128, turned=0)
    place = descriptor(384, 16, 1024, 128, base=3)
    body = FENCE + instruction(16, "f16", None, place) + COMMIT + WAIT
    assert np.array_equal(run(body, image, 16, a=a, c=c), exact(a, b, c))


def test_scales_and_what_is_added():
    a, b, c = problem(16, "f16")
    image = room(4096)
    place = placed(image, b, 0, 32, 0)
    product = exact(a, b, 0)
    for scales, sign in (((1, 1), 1), ((-1, 1), -1), ((1, -1), -1), ((-1, -1), 1)):
        for adds in (0, 1, "p1"):
            start = "setp.lt.u32 p1, r0, 0;" if adds == "p1" else ""
            body = start + FENCE + instruction(16, "f16", None, place, adds=adds, scales=scales) + COMMIT + WAIT
            expected = sign * product + (c if adds == 1 else 0)
            assert np.array_equal(run(body, image, 16, a=a, c=np.where(adds == 1, c, np.nan)), expected)


def test_products_are_exact_and_summed_in_f32_in_ascending_order():
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(shape).astype(DTYPES["bf16"]) for shape in ((64, 16), (8, 16)))
    c = rng.standard_normal((64, 8)).astype(np.float32)
    image = room(1024)
    place = placed(image, b, 0, 128, 0)
    expected = c.copy()
    for r in range(64):
        for n in range(8):
            for k in range(16):
                whole = Fraction(float(a[r, k])) * Fraction(float(b[n, k])) + Fraction(float(expected[r, n]))
                expected[r, n] = np.float32(float(whole))  # 53 bits hold these sums, so one rounding it is
    got = run(FENCE + instruction(8, "bf16", None, place) + COMMIT + WAIT, image, 8, a=a, c=c)
    assert np.array_equal(got, expected)


def test_two_warpgroups_each_do_their_own():
    a, b, _ = problem(16, "bf16")
    image = room(2048)
    place = placed(image, b, 0, 64, 0)
    rng = np.random.default_rng(5)
    c = rng.integers(-9, 9, (128, 16)).astype(np.float32)
    body = FENCE + instruction(16, "bf16", None, place) + COMMIT + WAIT
    got = run(body, image, 16, a=a, c=c, threads=256)
    assert np.array_equal(got[:64], exact(a, b, c[:64])) and np.array_equal(got[64:], exact(a, b, c[64:]))


PLACE = descriptor(0, 16, 256, 32)


def test_a_matrix_past_shared_memory_or_never_written_is_a_fault():
    body = FENCE + "{}" + COMMIT + WAIT
    with pytest.raises(Fault, match=r"out of bounds: wgmma\S* of 16 bytes at shared 0x400, the block has 1024"):
        run(body.format(instruction(64, "f16", None, PLACE)), room(1024), 64)
    with pytest.raises(Fault, match=r"never written: wgmma\S* of 16 bytes at shared 0x100 reads"):
        run(body.format(instruction(16, "f16", None, PLACE)), room(1024), 16, filled=256)


def test_all_four_warps_take_part():
    body = "setp.lt.u32 p1, r0, 96; @p1 bra MULTIPLY; ret; MULTIPLY:" + FENCE + instruction(16, "f16", None, PLACE)
    with pytest.raises(Fault, match=r"divergent warp: wgmma\S* without thread .96, 0, 0. of the same four warps"):
        run(body, room(1024), 16)


@pytest.mark.parametrize(
    "wrong", ["m64n20k16.f32.f16.f16", "m64n16k16.f16.f16.f16", "m64n16k8.f32.tf32.tf32", "m64n16k16.f32.f16.bf16"]
)
def test_another_shape_or_type_is_unsupported(wrong):
    body = instruction(16, "f16", None, PLACE).replace("m64n16k16.f32.f16.f16", wrong)
    with pytest.raises(UnsupportedError, match=rf"PTX line \d+: wgmma.mma_async.sync.aligned.{wrong} is not supported"):
        run(body, room(1024), 16)
