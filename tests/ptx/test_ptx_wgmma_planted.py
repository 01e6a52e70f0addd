# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in a warp-specialised product by changing its text: every one is reported, the kernel runs clean."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mla_oracle.gpu import cache
from mla_oracle.ptx import Fault, Interpreter

pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")

SOURCE = Path(__file__).with_name("wgmma_product.cu").read_text(encoding="utf-8")
TILES = 5
RNG = np.random.default_rng(0)
A, B = (RNG.integers(-8, 9, (64, 64 * TILES)).astype(ml_dtypes.bfloat16) for _ in range(2))

BUGS = {
    "the consumer does not wait": ("wait_for(full + 8 * s, turn);", "",
        "(never written|cp.async not waited for): wgmma"),
    "the consumer waits for the phase before": ("wait_for(full + 8 * s, turn);", "wait_for(full + 8 * s, turn + 1);",
        r"deadlock: mbarrier.try_wait\S* .* waits for 128 arrivals"),
    "the producer does not wait": ("wait_for(free + 8 * s, turn + 1);", "",
        "(race|cp.async not waited for): cp.async"),
    "one arrival too many is expected": ('"n"(CONSUMERS)', '"n"(CONSUMERS + 1)',
        r"deadlock: mbarrier.try_wait\S* .* waits for 1 arrivals and 0 bytes"),
    "copies that nobody counts": ("arrive.noinc", "arrive",
        r"deadlock: mbarrier.try_wait\S* .* waits for 128 arrivals"),
    "one thread too few copies": ("first; i < 64 * 8", "first + 1; i < 64 * 8", "never written: wgmma"),
    "no fence between proxies": ('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "",
        r"no proxy fence: wgmma\S* of 16 bytes .* reads what thread .\d+, 0, 0. wrote"),
    "no fence of registers": ('asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', "", "no wgmma.fence: wgmma"),
    "no commit": ('asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");', "",
        "wgmma not waited for: mul.f32|race: cp.async"),
    "one group is not waited for": ("wait_group.sync.aligned 0", "wait_group.sync.aligned 1",
        "wgmma not waited for: mul.f32|race: cp.async"),
    "the stage is free too early": ("        for (int k = 0; k < 4; k++) multiply", "        arrive(free + 8 * s);\n"
        "        for (int k = 0; k < 4; k++) multiply",
        "cp.async not waited for: wgmma|race: cp.async.* overwrites what wgmma of thread .0, 0, 0."),
    "no barrier behind mbarrier.init": ("    __syncthreads();  // the mbarriers are there\n", "",
        "race: mbarrier.try_wait.* initialised, no barrier between|no mbarrier"),
    "a stage past shared memory": ("STAGES = 2", "STAGES = 3", "out of bounds: cp.async"),
    "a warp leaves the warpgroup": ("    float d[32] = {};", "    if (thread / 32 == 3) return;\n    float d[32] = {};",
        r"divergent warp: wgmma\S* (without thread .96, 0, 0.|waits for lanes)"),
    "an operand past shared memory": ("right = matrix_at(first + s * STAGE + TILE)",
        "right = matrix_at(first + 2 * STAGE)", "out of bounds: wgmma"),
}  # fmt: skip
WRONG_NUMBERS = {
    "rows swizzled by another number": ("(chunk ^ row % 8)", "(chunk ^ (row + 1) % 8)"),
    "no swizzle in the descriptor": (" | 1ull << 62", ""),
    "steps of the wrong size along K": ("left + 2 * k", "left + k"),
    "another stride": ("(1024ull >> 4) << 32", "(512ull >> 4) << 32"),
}


def product(source=SOURCE, threads=1):
    ptx = cache.compile(source, "sm_90a", name="wgmma_product.cu").ptx
    machine = Interpreter("sm_90a", threads=threads)
    kernel = machine.load(ptx, "wgmma_product", file="wgmma_product.cu")
    arrays = [machine.upload(array.view(np.uint16)) for array in (A, B)]
    out = machine.empty((64, 64), np.float32)
    machine.launch(kernel, (1, 1, 1), (256, 1, 1), 4 * 8192, *arrays, out, np.int32(TILES))
    return machine.download(out)


def expected():
    a, b = (array.astype(np.float32).reshape(64, TILES, 64) for array in (A, B))
    total = np.zeros((64, 64), np.float32)
    for t in range(TILES):
        total = (total + a[:, t] @ b[:, t].T) / 2
    return total


def mutated(old, new):
    assert SOURCE.count(old) == 1, f"{old!r} is there {SOURCE.count(old)} times"
    return SOURCE.replace(old, new)


def test_the_kernel_itself_is_clean_and_right():
    assert np.array_equal(product(), expected())


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug):
    old, new, report = BUGS[bug]
    with pytest.raises(Fault, match=report) as caught:
        product(mutated(old, new))
    assert "wgmma_product.cu:" in str(caught.value) and ", PTX line " in str(caught.value)


@pytest.mark.parametrize("bug", WRONG_NUMBERS)
def test_a_bug_in_the_layout_shows_in_the_numbers(bug):
    assert not np.array_equal(product(mutated(*WRONG_NUMBERS[bug])), expected())
