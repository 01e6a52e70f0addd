# SPDX-License-Identifier: Apache-2.0
"""The fast tier reads no byte beside an array, tile loads included: here nobody may touch the memory around each."""

import subprocess
import sys
from pathlib import Path

import pytest
from fast_cases import BUILDS

from mla_oracle.fast import isa as isas

FENCED = """
import ctypes, mmap, sys
import ml_dtypes
import numpy as np
from fast_cases import fast, make, stored
from mla_oracle.fast import absorbed, naive

protect = ctypes.CDLL(None, use_errno=True).mprotect
PAGE = mmap.PAGESIZE

def fenced(x, first):
    # A copy of x between two pages without access, next to the first or to the last.
    size = -(-x.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (start, start + PAGE + size):
        assert protect(ctypes.c_void_p(fence), ctypes.c_size_t(PAGE), 0) == 0
    copy = np.frombuffer(memory, np.uint8, x.nbytes, PAGE if first else PAGE + size - x.nbytes)
    copy[...] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return copy.view(x.dtype).reshape(x.shape)

def paged(build):
    for D, V, H in [(96, 96, 3), (96, 70, 40), (96, 64, 130), (88, 85, 5), (71, 65, 20), (1, 1, 1)]:
        for n in (1, 13, 33, 63, 64, 79, 130):
            case = stored(make(1, 1, H, D, V, [n], n), build)
            kinds = [case.kv_cache.dtype] if "amx" in build else [np.float32, np.float16, ml_dtypes.bfloat16]
            for kind in kinds:
                rows = case.keys(0).astype(kind)[None]
                for first in (True, False):
                    q, kv = fenced(case.q, first), fenced(rows, first)
                    table, lens = fenced(np.zeros((1, 1), np.int32), first), fenced(case.seq_lens, first)
                    for dtype in (np.float32, np.float64):
                        fast(case.but(q=q, kv_cache=kv, block_table=table, seq_lens=lens), dtype, build.split()[0])

def dense(build):
    for t_q, H, P, R, V, L, t_kv in [(1, 9, 17, 2, 9, 33, 65), (2, 1, 16, 6, 17, 64, 97), (1, 2, 1, 1, 1, 1, 1)]:
        for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
            for first in (True, False):
                shapes = [(t_q, H, P), (t_q, H, R), (t_kv, L), (t_kv, R), (H, P, L), (H, V, L)]
                arrays = [fenced(np.ones(shape, kind), first) for shape in shapes]
                for attend in (absorbed.attend, naive.attend):
                    for dtype in (np.float32, np.float64)[kind is np.float64:]:
                        attend(*arrays, 0.1, np.empty((t_q, H, V), dtype), isa=build)

globals()[sys.argv[1]](sys.argv[2])
"""


def in_fences(*arguments):
    command = [sys.executable, "-c", FENCED, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or f"ended by signal {-done.returncode}"


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of the C library")
@pytest.mark.parametrize("build", BUILDS)
def test_a_paged_decode_reads_nothing_beside_its_arrays(build):
    in_fences("paged", build)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of the C library")
@pytest.mark.parametrize("build", isas.available())
def test_a_dense_form_reads_nothing_beside_its_arrays(build):
    in_fences("dense", build)
