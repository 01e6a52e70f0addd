# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in a tensor-core decode by changing its text: every one is reported, the kernel itself runs clean."""

import numpy as np
import pytest
from decode import SOURCE, Problem

from mla_oracle.ptx import Fault, Interpreter

pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")

ARCHS = ["sm_80", "sm_90", "sm_100"]
RAGGED = {"lens": [100, 0, 200, 257, 1], "heads": 20}

BUGS = {
    "no barrier after the wait": (
        "        __syncthreads();  // the tile has arrived\n",
        "",
        "race: ldmatrix.* reads what thread .* wrote",
    ),
    "a weaker wait": ("wait_group 1;", "wait_group 2;", "cp.async not waited for: ldmatrix.* still copying"),
    "no barrier before maxima are used": (
        "        __syncthreads();  // maxima are there\n",
        "",
        "(race|never written): ld.shared.*",
    ),
    "no barrier before weights are used": (
        "        __syncthreads();  // weights are there\n",
        "",
        "(race|never written): ldmatrix.*",
    ),
    "no barrier before a stage is reused": (
        "        __syncthreads();  // the stage is free\n",
        "",
        "race: cp.async.* overwrites what thread .* read",
    ),
    "a barrier in one warp": (
        "__syncthreads();  // sums are there",
        "if (warp == 3) __syncthreads(); __syncthreads();",
        "divergent barrier.*meets",
    ),
    "a barrier in one warp alone": (
        "__syncthreads();  // sums are there",
        "if (warp == 3) __syncthreads();",
        "(divergent barrier|never written|race).*",
    ),
    "half a warp at a barrier": (
        "__syncthreads();  // sums are there",
        "if (lane < 16) __syncthreads();",
        "divergent barrier: bar.* without thread",
    ),
    "heads past H": ("if (row < H) {", "{", "out of bounds: st.global.* into an array of"),
    "the tail through table entry -1": (
        "bool there = token < len;",
        "bool there = true; if (token >= len) token = -block_size;",
        "out of bounds: ld.global.* of 4 bytes",
    ),
    "uninitialised shared memory": (
        "if (t == 0) sm.maxima[warp][g + 8 * half] = top;",
        "if (t == 0 && warp) sm.maxima[warp][g + 8 * half] = top;",
        "never written: ld.shared.*",
    ),
    "a shuffle under divergence": (
        "top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));",
        "if (t < 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));",
        "divergent warp: shfl.sync.*",
    ),
    "misaligned shared rows": ("PITCH = TILE + 8", "PITCH = TILE + 4", "misaligned: ldmatrix.*"),
    "misaligned global rows": (
        "(long long)(token % block_size) * D",
        "(long long)(token % block_size) * (D + 4)",
        "misaligned: cp.async.* of 16 bytes at global",
    ),
    "commit on half the threads": (
        'asm volatile("cp.async.commit_group;" ::: "memory");\n    }\n    float o',
        'if (warp < 4) asm volatile("cp.async.commit_group;" ::: "memory");\n    }\n    float o',
        "cp.async not waited for: ldmatrix.*",
    ),
    "a read past shared memory": (
        "key_chunk(keys, k * 16 + lane % 16,",
        "key_chunk(keys, k * 32 + lane % 16,",
        "(out of bounds|never written|cp.async).*",
    ),
    "ldmatrix far past shared memory": (
        "key_chunk(keys, k * 16 + lane % 16,",
        "key_chunk(keys, k * 160 + lane % 16,",
        "(out of bounds: ldmatrix|cp.async not).*",
    ),
    "no __syncwarp": ("    __syncwarp();\n", "", "(race|never written): ld.shared.*"),
    "copies in flight at exit": (
        "if (tile + 2 < tiles) fetch",
        "fetch",
        "cp.async not waited for: thread exits with 16 bytes",
    ),
    "queries not waited for": ("cp.async.wait_all;", "cp.async.commit_group;", "cp.async not waited for: ldmatrix.*"),
}

WRONG_NUMBERS = {
    "no tail mask": ("token < len ? s[i] * (scale * 1.44269504f) : -1e30f;", "s[i] * (scale * 1.44269504f);"),
    "operands swapped in inline assembly": ("{%8, %9}", "{%9, %8}"),
    "no .trans": ("x4.trans.shared", "x4.shared"),
    "no rescaling": ("o[n][2 * half] *= rescale, o[n][2 * half + 1] *= rescale;", ";"),
}


def mutated(old, new):
    assert SOURCE.count(old) == 1, f"{old!r} is there {SOURCE.count(old)} times"
    return SOURCE.replace(old, new)


def error(problem, actual):
    """The largest error of a row, relative to its largest element, and of the LSE."""
    out, lse = problem.expected()
    size = np.abs(out).max(-1, keepdims=True)
    off = np.abs(actual[0] - out) / np.where(size, size, 1)
    gone = np.isinf(lse)
    assert (actual[1][gone] == -np.inf).all()
    return np.nan_to_num(off, nan=np.inf).max(), np.abs(actual[1][~gone] - lse[~gone]).max()


# P rounded to bf16 (2^-9 of each weight, averaged), sums in f32.
TOLERANCE = 2**-8


@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernel_itself_is_clean_and_right(arch):
    problem, machine = Problem(**RAGGED), Interpreter(arch)
    out, lse = error(problem, problem.launch(machine))
    assert out < TOLERANCE and lse < 1e-5


def test_results_do_not_depend_on_threads_or_checks():
    problem = Problem(**RAGGED)
    first = problem.launch(Interpreter(threads=1))
    for machine in (Interpreter(threads=2), Interpreter(threads=5), Interpreter(checks=False)):
        assert all(np.array_equal(a, b) for a, b in zip(first, problem.launch(machine), strict=True))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug, arch):
    old, new, report = BUGS[bug]
    with pytest.raises(Fault, match=report) as caught:
        Problem(**RAGGED).launch(Interpreter(arch), mutated(old, new))
    assert "tensor_decode.cu:" in str(caught.value) and ", PTX line " in str(caught.value)
    assert ", block (" in str(caught.value) and ", thread (" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("bug", WRONG_NUMBERS)
def test_a_bug_in_the_arithmetic_shows_in_the_numbers(bug, arch):
    problem = Problem(**RAGGED)
    problem.q *= 8
    out, lse = error(problem, problem.launch(Interpreter(arch), mutated(*WRONG_NUMBERS[bug])))
    assert max(out, lse) > 10 * TOLERANCE


def test_the_same_fault_whatever_the_number_of_threads():
    source = mutated(*BUGS["heads past H"][:2])
    texts = set()
    for threads in (1, 2, 5):
        with pytest.raises(Fault) as caught:
            Problem([100] * 6, heads=20).launch(Interpreter(threads=threads), source)
        texts.add(str(caught.value))
    assert len(texts) == 1
