# SPDX-License-Identifier: Apache-2.0
"""Both tensor-core kernels of paged decode: rows that are not finite, within the bound of mla_oracle.gpu.paged, and
the same bits twice, alone, in a batch and for any number of the interpreter's threads.
"""

from typing import Any, NamedTuple

import kernel_cases
import numpy as np
import pytest
from fast_cases import make, place
from kernel_cases import assert_right, bits, decode, stored


class Sizes(NamedTuple):
    """Of the problems a kernel is tried with; a tile has `tile` keys."""

    kernel: str
    D: int
    V: int
    tile: int
    split_keys: int
    arch: str
    machine: Any = None

    @property
    def how(self):
        return {"kernel": self.kernel, "split_keys": self.split_keys}


MMA = Sizes("mma", 32, 16, 32, 64, "sm_80")
WGMMA = Sizes("wgmma", 192, 128, 64, 192, "sm_90a")  # a split with an odd number of tiles


@pytest.fixture(
    params=[*((MMA, name) for name in (*kernel_cases.TILE_OF, "cuda")), (WGMMA, "ptx sm_90a"), (WGMMA, "cuda")],
    ids=lambda param: f"{param[0].kernel} {param[1]}",
)
def on(request, monkeypatch):
    sizes, name = request.param
    for machine in kernel_cases.tiled(name, monkeypatch):
        if sizes is WGMMA and machine.arch != "sm_90a":
            pytest.skip("the device is not of compute capability 9.0")
        yield sizes._replace(machine=machine)


def test_a_score_of_minus_infinity_has_weight_zero_and_its_value_is_not_touched(on):
    last = 6 * on.tile + 7
    case = make(2, 2, 3, on.D, on.V, [70, last + 1], 16)
    case.q[..., 3] = np.abs(case.q[..., 3]) + 1
    row = np.where(np.arange(on.D) == 3, -np.inf, 1).astype(np.float32)
    for b, position in [(0, 0), (0, 5), (1, on.tile), (1, 68), (1, last)]:
        place(case, b, position, row)
    out, lse = assert_right(on.machine, stored(case), **on.how)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("empty_lse", [-np.inf, -2.0**100])
def test_a_row_that_sees_only_minus_infinity_is_empty(on, empty_lse):
    length = 3 * on.tile + 8
    case = make(2, 1, 2, on.D, on.V, [length, 65], 16, empty_lse=empty_lse)
    case.q[..., 3] = 1
    row = np.where(np.arange(on.D) == 3, -np.inf, 1).astype(np.float32)
    for b, n in ((0, length), (1, 64)):  # all of one request, the first tiles of the other
        for position in range(n):
            place(case, b, position, row)
    out, lse = assert_right(on.machine, stored(case), kernel=on.kernel, split_keys=3 * on.tile)
    assert (out[0] == 0).all() and (lse[0] == np.float32(empty_lse)).all() and np.isfinite(lse[1]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["first", "rope", "latent"])
def test_a_visible_nan_or_plus_infinity_spoils_the_rows_that_see_it(on, bad, where):
    """And no other row of its block, whose weight for it is 0."""
    length = 3 * on.tile + 5
    column, position = {"first": (0, 0), "rope": (on.V + 4, length - 1), "latent": (12, length - 2)}[where]
    case = make(2, 3, 2, on.D, on.V, [length, length], 16)
    case.q[..., column] = np.abs(case.q[..., column]) + 1
    row = case.keys(1)[position].astype(np.float32)
    row[column] = bad
    place(case, 1, position, row)
    out, lse = assert_right(on.machine, stored(case), kernel=on.kernel, split_keys=2 * on.tile)
    sees = np.array([[False] * 3, [position < case.visible(1, t) for t in range(3)]])
    assert (np.isnan(lse) == sees[..., None]).all()
    assert (np.isnan(out) == sees[..., None, None]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_in_any_column_reach_no_row_that_does_not_see_them(on, bad):
    case = make(1, 3, 2, on.D, on.V, [101], 16)
    case.q[:] = np.abs(case.q) + 1
    place(case, 0, 100, np.full(on.D, bad, np.float32))
    out, lse = assert_right(on.machine, stored(case), kernel=on.kernel)
    assert np.isfinite(out[:, :2]).all() and np.isfinite(lse[:, :2]).all()


def test_a_query_with_nan_spoils_its_own_row_alone(on):
    case = make(2, 2, 3, on.D, on.V, [70, 33], 16)
    case.q[1, 0, 2, 5] = np.nan
    _, lse = assert_right(on.machine, stored(case), kernel=on.kernel)
    assert np.argwhere(np.isnan(lse)).tolist() == [[1, 0, 2]]


def batch(sizes):
    return stored(make(3, 2, 3, sizes.D, sizes.V, [70, 129, 6 * sizes.tile + 8], 16))


def test_the_same_bits_twice_alone_and_in_a_batch(on):
    case = batch(on)
    out, lse = decode(on.machine, case, **on.how)
    assert bits(decode(on.machine, case, **on.how)) == bits((out, lse))
    for b, n in enumerate(case.seq_lens):
        one = slice(b, b + 1)
        alone = case.but(q=case.q[one], block_table=case.block_table[one], seq_lens=case.seq_lens[one])
        assert bits(decode(on.machine, alone, **on.how, longest=int(n))) == bits((out[b], lse[b]))


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize("sizes", [MMA, WGMMA], ids=lambda sizes: sizes.kernel)
def test_the_same_bits_for_any_number_of_the_interpreters_threads(sizes):
    one, *others = (
        bits(decode(kernel_cases.interpreter(sizes.arch, threads), batch(sizes), **sizes.how))
        for threads in (1, 2, 3, 7)
    )
    assert others == [one] * 3
