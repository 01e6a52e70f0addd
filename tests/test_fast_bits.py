# SPDX-License-Identifier: Apache-2.0
"""The fast tier's bits depend on nothing but the request: not on threads, batch, page placement or a fork."""

import multiprocessing
import os
from threading import Barrier, current_thread, main_thread

import numpy as np
import pytest
from fast_cases import BUILDS, fast, make
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_oracle.fast import paged, threads

DTYPES = st.sampled_from([np.float32, np.float64])


def bits(results):
    return [x.tobytes() for x in results]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    isa=st.sampled_from(BUILDS),
    dtype=DTYPES,
    lens=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    T=st.integers(1, 3),
    H=st.sampled_from([1, 5, 16, 60, 130]),
    block_size=st.sampled_from([1, 16, 61, 64]),
)
def test_the_same_bits_for_any_number_of_threads(isa, dtype, lens, T, H, block_size):
    case = make(len(lens), T, H, 24, 17, lens, block_size)
    one = bits(fast(case, dtype, threads=1, isa=isa))
    for count in (2, 3, 7):
        assert bits(fast(case, dtype, threads=count, isa=isa)) == one


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    isa=st.sampled_from(BUILDS),
    dtype=DTYPES,
    lens=st.lists(st.integers(0, 2500), min_size=2, max_size=5),
    H=st.sampled_from([3, 16, 70]),
    seed=st.integers(0, 9),
)
def test_the_same_bits_alone_and_in_a_batch_wherever_the_pages_lie(isa, dtype, lens, H, seed):
    case = make(len(lens), 2, H, 24, 17, lens, 16, seed=seed)
    out, lse = fast(case, dtype, isa=isa)
    order = np.random.default_rng(seed).permutation(len(case.kv_cache))
    for b in range(len(lens)):
        used = -(-lens[b] // 16)
        table = np.full((1, used), -1, np.int32)
        table[0] = order[case.block_table[b, :used]]
        moved = np.empty_like(case.kv_cache)
        moved[order] = case.kv_cache
        alone = case.but(
            q=case.q[b : b + 1], kv_cache=moved, block_table=table, seq_lens=case.seq_lens[b : b + 1]
        )
        assert bits(fast(alone, dtype, isa=isa)) == bits((out[b], lse[b]))


@pytest.mark.parametrize("isa", BUILDS)
@pytest.mark.parametrize("block_size", [1, 2, 61, 576])
def test_the_same_bits_for_any_block_size(isa, block_size):
    case = make(1, 2, 20, 24, 17, [1500], 64)
    pages = -(-1500 // block_size)
    cache = np.full((pages * block_size, 24), np.nan, np.float32)
    cache[:1500] = case.keys(0)
    repaged = case.but(
        kv_cache=cache.reshape(pages, block_size, 24), block_table=np.arange(pages, dtype=np.int32)[None]
    )
    assert bits(fast(repaged, isa=isa)) == bits(fast(case, isa=isa))


@pytest.mark.parametrize("isa", BUILDS[-2:])
def test_groups_that_share_a_pool_do_not_disturb_each_other(isa):
    # Split and whole requests in turn, so that a pool's next user is not always the one that waits for it.
    case = make(9, 1, 130, 8, 8, [2500, 10, 1100, 3000, 0, 2049, 1500, 1200, 5000], 16)
    one = bits(fast(case, threads=1, isa=isa))
    for _ in range(60):
        assert bits(fast(case, threads=3, isa=isa)) == one


def _in_child(case, isa, connection):
    connection.send(bits(fast(case, threads=3, isa=isa)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("isa", BUILDS[-2:])
def test_the_same_bits_before_and_after_a_fork(isa):
    case = make(3, 1, 20, 24, 17, [1500, 2300, 40], 16)
    before = bits(fast(case, threads=3, isa=isa))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(case, isa, theirs))
    child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv() == before
    child.join(60)
    assert child.exitcode == 0
    assert bits(fast(case, threads=3, isa=isa)) == before


def test_threads_are_the_argument_or_the_setting_or_the_affinity():
    try:
        assert threads.count() == len(os.sched_getaffinity(0))
        threads.set_threads(3)
        assert threads.count() == 3 and threads.count(2) == 2
    finally:
        threads.set_threads(None)
    assert threads.count() == len(os.sched_getaffinity(0))


def test_an_affinity_mask_of_one_means_one_thread():
    whole = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(whole)})
        assert threads.count() == 1
    finally:
        os.sched_setaffinity(0, whole)


def test_a_call_goes_on_without_the_threads_that_cannot_start(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_idle", [])
    monkeypatch.setattr(threads.Thread, "start", start)
    ran = []
    threads.run(lambda: ran.append(current_thread()), 7)
    assert ran == [current_thread()]


def test_an_error_in_any_thread_reaches_the_caller():
    def work():
        raise MemoryError("no scratch")

    with pytest.raises(MemoryError, match="no scratch"):
        threads.run(work, 3)
    assert paged.decode is not None


def test_an_error_on_any_thread_reaches_the_caller_and_the_threads_live_on():
    met = Barrier(3, timeout=60)

    def work():
        met.wait()
        if current_thread() is not main_thread():
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            threads.run(work, 3)
