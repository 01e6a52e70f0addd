# SPDX-License-Identifier: Apache-2.0
"""Packed rows as the fast tier reads them, to the bit: every code times every kind of scale, every format's rows."""

import numpy as np
import pytest
from canonical_cases import make, packed

from mla_oracle import canonical, formats
from mla_oracle.canonical import packings
from mla_oracle.fast import isa
from mla_oracle.fast.listed import CODES, STORED_BF16, Packing
from mla_oracle.formats.codes import exponent_bits, exponents, rounded, table

F32 = np.float32
SCALES = np.array([1, 0, -0.0, 0.3, -2.5, 2.0**-127, 2.0**-149, 1.7e-38, 3e38, 2.0**120, np.inf, np.nan], F32)
SCALES = np.append(SCALES, np.array([0x7FFFFFFF, 0xFF800001, 0x00800000, 0x3F808000], np.uint32).view(F32))
PAIRS = table("e2m1")[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]


@pytest.fixture(params=isa.available())
def build(request):
    return request.param


def read(packing, rows, D, build, apart=()):
    """[n, D] f32 of rows at addresses [n]."""
    numbers = np.empty((len(rows), D), F32)
    kernels = isa.kernels("paged", "f32", build, STORED_BF16 if packing.exact_in_bf16 else None)
    kernels.numbers_of_rows(packing, np.asarray(rows, np.int64), np.asarray(apart, np.int64), numbers)
    return numbers


def same(got, expected):
    """Bits, but a NaN is a NaN."""
    assert got.shape == expected.shape
    expected = np.where(np.isnan(expected), F32(np.nan), expected)
    wrong = np.flatnonzero(np.where(np.isnan(got), F32(np.nan), got).view(np.uint32) != expected.view(np.uint32))
    assert not wrong.size, (got.flat[wrong[0]], expected.flat[wrong[0]])


def of_rule(scales, rule):
    """What the scales of one of the readers' rules are."""
    if rule == 2:
        return exponents(exponent_bits(scales), 2.0**-127, np.nan)
    return rounded(scales, "bf16") if rule == 1 else scales


@pytest.mark.parametrize(("rule", "to_bf16"), [(0, False), (0, True), (1, True), (2, True)])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 10])
@pytest.mark.parametrize("element", ["e4m3", "e4m3fnuz", "e5m2", "i8", "e2m1"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_every_code_times_every_scale(element, group, rule, to_bf16, build):
    """A row holds each byte once and more, in groups of one scale: [codes | scales | 32 codes of the rest]."""
    numbers = PAIRS if element == "e2m1" else table(element)[:, None]
    step = group // numbers.shape[1]
    groups = 2 * (-(-256 // (2 * step)))
    rows = np.empty((len(SCALES), groups * step + 4 * groups + 32), np.uint8)
    rows[:] = np.arange(rows.shape[1]) + 13 * np.arange(len(rows))[:, None]
    scales = SCALES[(np.arange(len(rows))[:, None] + np.arange(groups)) % len(SCALES)]
    rows[:, groups * step : -32] = scales.view(np.uint8)
    packing = Packing(
        np.ascontiguousarray(numbers),
        group=group,
        groups=groups,
        step=step,
        scale_bytes=4,
        scale_at=(groups * step + 4 * np.arange(groups)).astype(np.int32),
        rule=rule,
        to_bf16=to_bf16,
        rest=groups * step + 4 * groups,
        rest_dtype=CODES,
        rest_numbers=table("e5m2"),
        rest_factor=0.3,
        exact_in_bf16=to_bf16,
    )
    codes = numbers[rows[:, : groups * step]].reshape(len(rows), groups, group)
    expected = (codes * of_rule(scales, rule)[..., None]).reshape(len(rows), -1)
    of_rest = table("e5m2")[rows[:, -32:]] * F32(0.3)
    addresses = rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]
    for factor in (1.0, 0.7, np.nan):
        whole = np.concatenate([expected * F32(factor), of_rest], axis=1)
        got = read(packing._replace(factor=factor), addresses, whole.shape[1], build)
        same(got, rounded(whole, "bf16" if to_bf16 else "f32"))


FORMATS = [(name, reader) for name in formats.NAMES for reader in formats.get(name).readers if reader != "fold"]


@pytest.mark.parametrize(("name", "reader"), FORMATS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_rows_of_any_bytes_are_read_as_their_format_says(name, reader, build):
    case = packed(make(D=formats.get(name).width or 96, V=64, H=1, T=1, lens=(90, 33), block=7), name, reader)
    case.kv_cache.view(np.uint8)[...] = np.random.default_rng(5).integers(0, 256, case.kv_cache.shape, np.uint8)
    cache = canonical.checked(case, "f32").main
    places = packings.places_of(cache, 0)
    if places is None:  # test_canonical_fast lists these
        return
    slots = np.arange(cache.num_blocks * cache.block_size)
    at = places.regions() @ np.stack([np.ones_like(slots), *np.divmod(slots, cache.block_size)])
    same(read(places.packing, at[0], cache.width, build, *at[1:]), cache.read(slots)[0])
