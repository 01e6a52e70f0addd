# SPDX-License-Identifier: Apache-2.0
"""A cache by byte addresses: stored pages, gaps, what is not stored, what is outside."""

import mmap

import numpy as np
import pytest
from loops import Kernel

from mla_oracle.cases.inputs import generate
from mla_oracle.cases.placement import sparse_cache
from mla_oracle.mutants import Problem
from mla_oracle.mutants.memory import ZERO, Memory, Rows


def rows(pages=3, block=4, width=5, dtype=np.float32):
    return np.arange(1, pages * block * width + 1).reshape(pages, block, width).astype(dtype)


def test_a_dense_cache_reads_across_pages_and_is_unknown_outside():
    memory = Memory(rows())
    flat = rows().reshape(-1)
    assert np.array_equal(memory.read(np.array([0, 20, 4 * 19])), [flat[:5], flat[5:10], flat[19:24]])
    outside = memory.read(np.array([-4, 4 * 57, 4 * 60, -(1 << 40)]))
    assert np.isnan(outside[0, 0]) and np.array_equal(outside[0, 1:], flat[:4])
    assert np.array_equal(outside[1, :3], flat[57:]) and np.isnan(outside[1, 3:]).all()
    assert np.isnan(outside[2:]).all()


def test_the_address_of_zeros_is_a_row_of_zeros():
    assert np.array_equal(Memory(rows()).read(np.array([ZERO, 0]))[0], np.zeros(5))


def test_an_address_between_two_elements_reads_their_bytes():
    memory = Memory(rows())
    want = np.frombuffer(rows().tobytes()[3 : 3 + 20], np.float32)
    assert np.array_equal(memory.read(np.array([3]))[0], want.astype(float))


def test_pages_that_are_not_stored_and_gaps_are_zeros():
    """The same bytes as a sparse cache of that many blocks."""
    case = generate("paged:heads=1,row=5,value=3,lens=7,block=4,scale=0.5,pages=huge")
    memory = Problem(case).memory
    sparse = sparse_cache(case)
    buffer = sparse.base
    while not isinstance(buffer, mmap.mmap):
        buffer = buffer.base if isinstance(buffer, np.ndarray) else buffer.obj
    last = int(case.page_ids.max())
    for address in (0, last * case.block_stride, last * case.block_stride + 40, last * case.block_stride - 12,
                    (last - 1) * case.block_stride + 64, last * case.block_stride + case.kv_cache[0].nbytes - 8):
        want = np.frombuffer(bytes(buffer[address : address + 20]), np.float32).astype(float)
        assert np.array_equal(memory.read(np.array([address]))[0], want, equal_nan=True), address


def test_rows_of_a_request_are_found_again_wherever_their_lane_is():
    case = generate("paged:heads=1,row=5,value=3,lens=9,block=4,scale=0.5")
    problem = Problem(case)
    plan = problem.plan(0)
    addresses = plan.address(plan, np.arange(9))
    own = Rows(problem.memory, addresses)
    assert own.lanes(addresses[::-1]).tolist() == list(range(9))[::-1]
    assert own.lanes(np.array([-8])).tolist() == [-1]
    read, finite = own.read(addresses[[8, 2, 2]])
    kernel = Kernel(case)
    assert np.array_equal(read, [kernel.row(0, 8), kernel.row(0, 2), kernel.row(0, 2)]) and finite
    assert np.shares_memory(own.read(addresses[:4])[0], own.data)
    assert not own.read(np.array([-400]))[1]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_elements_have_the_size_of_their_dtype(dtype):
    memory = Memory(rows(dtype=dtype), stride=4096, num_blocks=2, ids=np.array([1, 0, 7]))
    assert np.array_equal(memory.read(np.array([4096]))[0], rows()[0, 0])
    assert np.array_equal(memory.read(np.array([0]))[0], rows()[1, 0])
