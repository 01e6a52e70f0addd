# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the kernels of cuda/ by changing their text: every one is reported."""

import ml_dtypes
import numpy as np
import pytest

from mla_oracle.gpu import cache, forms, sources
from mla_oracle.ptx import Fault, Interpreter

pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")

SYNC = "__syncthreads();\n"


class Mutated(Interpreter):
    """Kernels of `file` come from a changed text: the `number`-th `old` is `new`."""

    def __init__(self, arch, file, old, new, number=0):
        super().__init__(arch)
        source = sources.flatten(file)
        parts = source.split(old)
        assert len(parts) > number + 1, f"{old!r} is there {len(parts) - 1} times"
        source = old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :])
        self.ptx = cache.compile(source, arch, name=file).ptx

    def kernel(self, file, name):
        return self.load(self.ptx, name, file=file)


def decode(machine):
    """A small paged decode: ragged rows, ids out of reach past their lengths, NaN in what nothing may read."""
    rng = np.random.default_rng(3)
    B, H, D, V, block = 3, 3, 64, 48, 16
    lens = np.array([70, 33, 5], np.int32)
    q, kv = rng.standard_normal((B, 1, H, D), np.float32), np.full((9, block, D), np.nan, np.float32)
    table = np.full((B, 5), 2147480000, np.int32)
    ids = iter(rng.permutation(9))
    for b in range(B):
        for slot in range(-(-lens[b] // block)):
            table[b, slot] = page = next(ids)
            kv[page, : min(block, lens[b] - slot * block)] = rng.standard_normal(
                (min(block, lens[b] - slot * block), D)
            )
    out, lse = np.empty((B, 1, H, V), np.float32), np.empty((B, 1, H), np.float32)
    forms.fill(forms.decode_paged, machine, q, kv, table, lens, 0.125, True, 1.0, -np.inf, outputs=(out, lse))
    return out, lse


PAGED = {
    "no barrier after the query is loaded": (SYNC, "\n", 0, "(race|never written): ld.shared"),
    "no barrier before scores are used": (SYNC, "\n", 1, "(race|never written): ld.shared"),
    "no barrier before weights are used": (SYNC, "\n", 2, "(race|never written): ld.shared"),
    "no barrier before a tile is reused": (SYNC, "\n", 3, "race: st.shared"),
    "a barrier in one warp": (
        SYNC,
        "if (threadIdx.x < WARP) __syncthreads();\n",
        1,
        "divergent barrier|race|never written",
    ),
    "another barrier in one warp": (
        SYNC,
        "__syncthreads(); if (threadIdx.x < WARP) __syncthreads();\n",
        2,
        "divergent barrier",
    ),
    "an output past V": (
        "partial_out[state * V + d] = acc[d];",
        "partial_out[(state + 1) * V + d] = acc[d];",
        0,
        "out of bounds: st.global",
    ),
    "a sum past V": (
        "d < V; d += THREADS) partial_out",
        "d <= V; d += THREADS) partial_out",
        0,
        "out of bounds: ld.shared",
    ),
    "a sum not begun": (
        "d < V; d += THREADS) acc[d] = 0;",
        "d < V - 1; d += THREADS) acc[d] = 0;",
        0,
        "never written: ld.shared",
    ),
    "table entry -1": ("j / block_size];", "j / block_size - 1];", 0, "out of bounds: ld.global"),
    "tokens past the length": (
        "int end = begin + min(keys, visible - begin);",
        "int end = begin + keys + 64;",
        0,
        "out of bounds",
    ),
    "scores past the tile": (
        "float s = lane < n ? score[lane] : -INF;",
        "float s = score[lane];",
        0,
        "never written: ld.shared",
    ),
    "half a warp in a shuffle": (
        "x += __shfl_xor_sync(~0u, x, away);",
        "if (threadIdx.x % 32 < 16) x += __shfl_xor_sync(~0u, x, away);",
        0,
        "divergent warp: shfl.sync",
    ),
    "addresses in 32 bits": (
        "kv_cache + begins, D",
        "(const Row *)(unsigned)(size_t)(kv_cache + begins), D",
        0,
        "out of bounds: ld",
    ),
    "misaligned rows": ("load(q, q_dtype, ", "load((const char *)q + 2, q_dtype, ", 0, "misaligned: ld.global"),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("name", PAGED)
def test_a_bug_in_paged_decode_is_reported(name, arch):
    old, new, number, report = PAGED[name]
    with pytest.raises(Fault, match=f"({report}).* cuda/(paged.cu|common.cuh):") as caught:
        decode(Mutated(arch, "paged.cu", old, new, number))
    assert "\n" not in str(caught.value)


def test_the_kernels_themselves_are_clean():
    machine = Interpreter("sm_80")
    out, lse = decode(machine)
    assert np.isfinite(out).all() and np.isfinite(lse).all() and machine.warnings == []


MICRO = {
    "no wait": ("    wait_for_groups();\n", "\n", "cp.async not waited for: ldmatrix"),
    "a commit on half the lanes": (
        'asm volatile("cp.async.commit_group;"',
        'if (threadIdx.x < 16) asm volatile("cp.async.commit_group;"',
        "cp.async not waited for",
    ),
    "no __syncwarp": ("__syncwarp();\n", "\n", "race: ldmatrix.* reads what thread"),
    "past shared memory": (
        "lane % 16 * 16 + lane / 16 * 8",
        "lane % 16 * 16 + lane / 16 * 8 + 256",
        "out of bounds|never written",
    ),
    "half the copies": ("if (lane < 16) copy_async", "if (lane < 8) copy_async", "never written: ldmatrix"),
}


def micro(machine, dtype=ml_dtypes.bfloat16):
    """(d, what it should be): integers, so that every sum is exact."""
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((16, 16), (8, 16)))
    c, d = rng.integers(-9, 9, (16, 8)).astype(np.float32), machine.empty((16, 8), np.float32)
    kernel = machine.kernel("micro.cu", f"micro_qk_{'bf16' if dtype is ml_dtypes.bfloat16 else 'f16'}")
    machine.launch(kernel, (1, 1, 1), (32, 1, 1), 0, *(machine.upload(x) for x in (a, b, c)), d)
    return machine.download(d), c + a.astype(np.float32) @ b.astype(np.float32).T


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_the_micro_kernel_is_right(arch, dtype):
    d, expected = micro(Interpreter(arch), dtype)
    assert np.array_equal(d, expected)


@pytest.mark.parametrize("name", MICRO)
def test_a_bug_in_the_micro_kernel_is_reported(name):
    old, new, report = MICRO[name]
    with pytest.raises(Fault, match=report):
        micro(Mutated("sm_90", "micro.cu", old, new))


@pytest.mark.parametrize(("old", "new"), [("{%8, %9}", "{%9, %8}"), ("{%4, %5, %6, %7}", "{%4, %6, %5, %7}")])
def test_swapped_operands_show_in_the_numbers(old, new):
    d, expected = micro(Mutated("sm_90", "micro.cu", old, new))
    assert not np.array_equal(d, expected)
