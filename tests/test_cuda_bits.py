# SPDX-License-Identifier: Apache-2.0
"""The paged kernels: the same bits for a row whatever it stands among; lengths and ids checked where they lie."""

from dataclasses import replace

import kernel_cases
import numpy as np
import pytest
from fast_cases import make
from kernel_cases import MACHINES, decode

from mla_oracle.gpu import forms


@pytest.fixture(params=MACHINES)
def machine(request):
    yield from kernel_cases.machine(request.param)


def bits(results):
    return [x.tobytes() for x in results]


def test_the_same_bits_twice_alone_in_a_batch_and_wherever_the_pages_lie(machine):
    case = make(4, 2, 3, 24, 17, [70, 0, 129, 200], 16)
    out, lse = decode(machine, case, split_keys=64)
    assert bits(decode(machine, case, split_keys=64)) == bits((out, lse))
    order = np.random.default_rng(0).permutation(len(case.kv_cache))
    moved = np.empty_like(case.kv_cache)
    moved[order] = case.kv_cache
    for b, n in enumerate(case.seq_lens):
        used = -(-n // 16)
        table = np.full((1, max(used, 1)), -1, np.int32)
        table[0, :used] = order[case.block_table[b, :used]]
        alone = case.but(
            q=case.q[b : b + 1], kv_cache=moved, block_table=table, seq_lens=case.seq_lens[b : b + 1]
        )
        assert bits(decode(machine, alone, split_keys=64, longest=int(n))) == bits((out[b], lse[b]))


def test_the_same_bits_for_any_block_size_and_whatever_the_longest_length_is_said_to_be(machine):
    case = make(1, 1, 2, 24, 17, [150], 64)
    expected = bits(decode(machine, case, split_keys=64))
    assert bits(decode(machine, case, split_keys=64, longest=1000)) == expected
    for block_size in (1, 61):
        pages = -(-150 // block_size)
        cache = np.full((pages * block_size, 24), np.nan, np.float32)
        cache[:150] = case.keys(0)
        table = np.arange(pages, dtype=np.int32)[None]
        repaged = case.but(kv_cache=cache.reshape(pages, block_size, 24), block_table=table)
        assert bits(decode(machine, repaged, split_keys=64)) == expected


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
def test_the_same_bits_for_any_number_of_the_interpreters_threads():
    case = make(4, 2, 3, 24, 17, [70, 0, 129, 200], 16)
    expected = bits(decode(kernel_cases.interpreter("sm_80", 1), case, split_keys=64))
    for threads in (2, 3, 7):
        assert bits(decode(kernel_cases.interpreter("sm_80", threads), case, split_keys=64)) == expected


# --- ids and lengths, checked where they lie


def check(machine, table, lens, num_blocks, block_size):
    arrays = [forms.put(machine, np.asarray(array, np.int32)) for array in (table, lens)]
    return forms.check_ids(machine, *arrays, num_blocks, block_size)


def test_lengths_and_tables_whose_products_pass_32_bits_are_checked(machine):
    assert check(machine, [[0, 1, -1]], [5], 2, 2**30) == (-1, -1)  # room for 3 * 2^30 keys
    assert check(machine, [[0, 1, -1]], [2**31 - 1], 2, 2**30) == (-1, -1)  # block 2 would begin at key 2^31
    assert check(machine, [[0, 1, -1]], [2**31 - 1], 1, 2**30) == (0, 1)
    near = forms.put(machine, np.zeros((3, 1), np.int32))
    wide = replace(near, shape=(3, 2**31 - 1))  # a fault of request 2 has number 2^32
    lens = forms.put(machine, np.int32([1, 1, -1]))
    assert forms.check_ids(machine, wide, lens, 1, 1) == (2, -1)


def test_the_first_fault_in_lengths_and_ids_is_found_on_the_machine(machine):
    table = [[0, 4, 2147480000], [3, 1, 2], [-1, -1, -1]]
    assert check(machine, table, [32, 48, 0], 5, 16) == (-1, -1)
    assert check(machine, table, [32, 49, 1], 5, 16) == (1, -1)
    assert check(machine, table, [32, -1, -5], 5, 16) == (1, -1)
    assert check(machine, table, [32, 48, 1], 4, 16) == (0, 1)
    assert check(machine, table, [33, 48, 1], 5, 16) == (0, 2)
    assert check(machine, table, [16, 17, 1], 5, 16) == (2, 0)
    assert check(machine, np.zeros((0, 3)), [], 5, 16) == (-1, -1)
    many = np.zeros((300, 2))
    many[[299, 257, 258], [0, 1, 0]] = 1
    assert check(machine, many, [2] * 300, 1, 1) == (257, 1)
