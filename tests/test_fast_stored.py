# SPDX-License-Identifier: Apache-2.0
"""The fast naive and absorbed forms read arrays as they are stored: the bits of widened ones, no copy of the cache."""

import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import mla_oracle
from mla_oracle.fast import absorbed, naive
from mla_oracle.fast import isa as isas

FORMS = {"naive": naive.attend, "absorbed": absorbed.attend}
F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
STORED = {  # q_nope, q_pe, c_kv, k_pe, w_uk, w_uv
    "f16": (F16,) * 6,
    "bf16": (BF16,) * 6,
    "f32": (F32,) * 6,
    "mixed": (BF16, F32, F16, BF16, F32, F16),
    "mixed, c_kv f32": (F32, F16, F32, F16, BF16, F32),
    "mixed, k_pe f32": (F16, BF16, BF16, F32, F16, BF16),
}
SHAPES = [  # t_q, H, P, R, V, L, t_kv
    (1, 1, 1, 1, 1, 1, 1),
    (9, 2, 13, 5, 9, 33, 130),
    (1, 5, 24, 10, 12, 302, 97),  # a row in panels, where c_kv ends within one
    (2, 20, 24, 8, 16, 64, 1100),
    (3, 3, 12, 0, 7, 40, 300),
]


@pytest.fixture(params=isas.available())
def isa(request):
    return request.param


@pytest.fixture(params=[np.float32, np.float64], ids=["f32", "f64"])
def real(request):
    return request.param


@pytest.fixture(params=FORMS)
def attend(request):
    return FORMS[request.param]


def make(t_q, H, P, R, V, L, t_kv, stored):
    """Normal numbers, some of them below the normal range of f16, each array of its dtype in `stored`."""
    rng = np.random.default_rng(0)
    shapes = [(t_q, H, P), (t_q, H, R), (t_kv, L), (t_kv, R), (H, P, L), (H, V, L)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    for x in arrays:
        x[rng.random(x.shape) < 0.1] *= 1e-5
    return [x.astype(dtype) for x, dtype in zip(arrays, stored, strict=True)]


def run(attend, arrays, real, **options):
    out = np.full((*arrays[0].shape[:2], arrays[5].shape[1]), 77, real)
    attend(*arrays, 0.05, out, **options)
    return out


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_widened_arrays(isa, real, attend, shape, stored):
    arrays = make(*shape, STORED[stored])
    expected = run(attend, [x.astype(real) for x in arrays], real, isa=isa).tobytes()
    for threads in (1, 2):
        assert run(attend, arrays, real, isa=isa, threads=threads).tobytes() == expected


def unaligned(x):
    """`x` at an odd address, its rows apart, NaN between them."""
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    wide[..., : x.shape[-1]] = x
    memory = np.zeros(wide.nbytes + 1, np.uint8)
    memory[1:] = wide.reshape(-1).view(np.uint8)
    return memory[1:].view(x.dtype).reshape(wide.shape)[..., : x.shape[-1]]


@pytest.mark.parametrize("stored", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("view", [unaligned, np.asfortranarray, lambda x: x[::-1].copy()[::-1]])
def test_any_view_has_the_same_bits(isa, attend, stored, view):
    arrays = make(3, 4, 13, 5, 7, 21, 150, STORED[stored])
    expected = run(attend, [x.astype(np.float32) for x in arrays], np.float32, isa=isa)
    assert run(attend, [view(x) for x in arrays], np.float32, isa=isa).tobytes() == expected.tobytes()


def test_infinities_and_nan_of_16_bits_are_kept(isa, attend):
    for dtype in (F16, BF16):
        arrays = make(3, 4, 12, 6, 8, 20, 50, (dtype,) * 6)
        arrays[2][49, 3] = np.nan
        arrays[5][1, 2, 4] = np.inf
        out = run(attend, arrays, np.float32, isa=isa)
        np.testing.assert_array_equal(out, run(attend, [x.astype(np.float32) for x in arrays], np.float32, isa=isa))
        assert np.isnan(out[2]).all()
        assert np.isfinite(out[:2, 0]).all()


H, P, R, V, L, ROWS = 2, 8, 8, 8, 96, 1 << 17
GEOMETRY = mla_oracle.Geometry(num_heads=H, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V, kv_lora_rank=L)


@pytest.mark.parametrize("form", [mla_oracle.attend_naive, mla_oracle.attend_absorbed])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
def test_no_array_of_a_caches_size_is_made(form, dtype):
    """Rows of any dtype, 27 MB of them or more: numpy's memory stays within what fast/absorbed.py says."""
    arrays = [np.ones(shape, dtype) for shape in [(1, H, P), (1, H, R), (ROWS, L), (ROWS, R), (H, P, L), (H, V, L)]]
    form(GEOMETRY, *arrays, backend="fast", threads=1)
    tracemalloc.start()
    try:
        form(GEOMETRY, *arrays, backend="fast", threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * (2 * 2048 * (L + 2) + H * (2 * L + R + 1)) + 65536


GROWTH = """
import sys
import ml_dtypes
import numpy as np
import mla_oracle

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

form, H, P, R, V, L, rows = getattr(mla_oracle, sys.argv[1]), *map(int, sys.argv[2:])
geometry = mla_oracle.Geometry(
    num_heads=H, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V, kv_lora_rank=L
)
def attend(rows):
    shapes = [(1, H, P), (1, H, R), (rows, L), (rows, R), (H, P, L), (H, V, L)]
    arrays = [np.ones(shape, ml_dtypes.bfloat16) for shape in shapes]
    before = peak()
    form(geometry, *arrays, backend="fast", threads=2)
    return peak() - before

attend(2048)
print(attend(rows))
"""


@pytest.mark.parametrize("form", ["attend_naive", "attend_absorbed"])
def test_the_whole_processs_memory_does_not_grow_with_the_cache(form):
    """KB above inputs of 27 MB, the kernels' own scratch included; widened, the rows are 54 MB more."""
    sizes = map(str, (H, P, R, V, L, ROWS))
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, form, *sizes], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 4096
