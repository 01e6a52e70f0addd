# SPDX-License-Identifier: Apache-2.0
"""Engines' own reference loops as peers: seeds.cpp, compiled here, called through ctypes.

`paged` is compiled as such code usually is (g++ -O3); the dense forms, which stand for Rust at its release
settings for this machine, with -O3 -march=native -ffp-contract=off.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from calibration import Contestant
from problems import BLOCK, SCALE, D, Dense, Paged, V

FLAGS = {"paged": ["-O3"], "dense": ["-O3", "-march=native", "-ffp-contract=off"]}


class Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int))


@functools.cache
def compiled(kind: str) -> ctypes.CDLL | str:
    """The library of "paged" or "dense", or why not."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "seeds: no g++ found"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seeds.so"
        source = Path(__file__).with_name("seeds.cpp")
        build = [compiler, "-std=c++17", *FLAGS[kind], "-shared", "-fPIC", "-o", path, source]
        done = subprocess.run(build, capture_output=True, text=True)
        if done.returncode:
            return f"seeds: {done.stderr.strip().splitlines()[0]}"
        return ctypes.CDLL(str(path))


def paged_seed(case: Paged) -> Contestant:
    B, H, _ = case.sizes
    dtype = {"f32": 0, "bf16": 2}[case.dtype]
    out = np.empty((B, H, V), np.float32)
    tensors = [Tensor(x.ctypes.data, dtype) for x in (case.q, case.cache)]
    arrays = [ctypes.c_void_p(x.ctypes.data) for x in (case.table, case.lens)]
    sizes = [ctypes.c_int64(n) for n in (B, H, D, V, BLOCK, case.table.shape[1])]
    call = functools.partial(
        compiled("paged").paged, *map(ctypes.byref, tensors), *arrays, ctypes.c_float(SCALE),
        ctypes.c_void_p(out.ctypes.data), *sizes,
    )  # fmt: skip
    return Contestant("seed", call, lambda: out.astype(np.float64), case.flops, slow=True)


def dense_seed(case: Dense) -> Contestant:
    H, T, P, R, L, W = case.shape
    out = np.empty((1, H, W), np.float32)
    call = functools.partial(
        getattr(compiled("dense"), case.form), *(ctypes.c_void_p(x.ctypes.data) for x in case.arrays),
        ctypes.c_float(SCALE), ctypes.c_void_p(out.ctypes.data), *map(ctypes.c_size_t, (H, T, P, R, L, W)),
    )  # fmt: skip
    return Contestant("seed", call, lambda: out.astype(np.float64), case.flops, slow=True)
