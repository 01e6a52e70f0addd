# SPDX-License-Identifier: Apache-2.0
"""The one line that each bad input of the kernels gets."""

import re

import kernel_cases
import numpy as np
import pytest
from kernel_cases import BACKENDS
from problems import dense, paged

import mla_oracle
from mla_oracle import InputError, UnsupportedError
from mla_oracle.gpu import forms, layout, sources
from mla_oracle.gpu import paged as paged_form
from mla_oracle.gpu.machine import Buffer


@pytest.fixture(params=BACKENDS)
def machine(request):
    yield from kernel_cases.machine(request.param)


@pytest.fixture(params=BACKENDS)
def backend(request):
    for _ in kernel_cases.machine(request.param):
        yield request.param


def decode(machine, **changes):
    """A good call of decode_paged, but for `changes`: buffers by name, or functions of the good ones."""
    problem = paged(3, [5, 9], T=2, H=3)
    arrays = {name: forms.put(machine, problem[name]) for name in ("q", "kv_cache", "block_table", "seq_lens")}
    outputs = {"out": machine.empty((2, 2, 3, 4), np.float32), "lse": machine.empty((2, 2, 3), np.float32)}
    for name, change in changes.items():
        for group in (arrays, outputs):
            if name in group:
                group[name] = change(group[name])
    forms.decode_paged(machine, *arrays.values(), 0.5, True, 1.0, -np.inf, *outputs.values())


def but(**fields):
    return lambda old: Buffer(**{name: getattr(old, name) for name in Buffer.__dataclass_fields__} | fields)


BAD = {
    "dtype of q": ({"q": but(dtype=np.dtype(np.float64))}, "q is f64, expected f32 or f16 or bf16"),
    "dtype of the cache": ({"kv_cache": but(dtype=np.dtype(np.int32))}, "kv_cache is i32, expected f32 or f16 or bf16"),
    "dtype of the table": ({"block_table": but(dtype=np.dtype(np.int64))}, "block_table is i64, expected i32"),
    "dtype of out": ({"out": but(dtype=np.dtype(np.float16))}, "out is f16, expected f32"),
    "width of the cache": (
        {"kv_cache": but(shape=(5, 4, 5))},
        "kv_cache is [5, 4, 5], expected rows of 6: q has 6 elements, out 4 at most that",
    ),
    "inner stride": (
        {"q": but(strides=(144, 72, 24, 8))},
        "q has an innermost stride of 8 bytes, expected 4 (contiguous)",
    ),
    "outer stride": (
        {"kv_cache": but(strides=(98, 24, 4))},
        "kv_cache has a stride of 98 bytes on axis 0, expected a multiple of 4",
    ),
    "address": (
        {"kv_cache": lambda old: but(pointer=old.pointer // 4 * 4 + 2)(old)},
        ", expected a multiple of 4",
    ),
    "shape of lse": ({"lse": but(shape=(2, 3, 2))}, "lse is [2, 3, 2], expected [2, 2, 3]"),
    "strides of out": (
        {"out": but(strides=(96, 48, 20, 4))},
        "out has a stride of 20 bytes on axis 2, expected 16 (contiguous)",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_buffers_no_kernel_can_take(machine, what):
    changes, message = BAD[what]
    with pytest.raises(InputError) as caught:
        decode(machine, **changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(kernel_cases.missing("ptx") is not None, reason="the extra cuda is not installed")
@pytest.mark.parametrize(
    ("arch", "error", "message"),
    [
        ("sm_75", UnsupportedError, "arch is sm_75, the kernels need sm_80 or newer"),
        ("sm_999", UnsupportedError, "arch is sm_999, NVRTC .* compiles for "),
        ("ampere", InputError, "arch is 'ampere', expected sm_80, sm_90, ..."),
    ],
)
def test_architectures_that_are_none(arch, error, message):
    with pytest.raises(error, match=message):
        decode(kernel_cases.interpreter(arch))


def test_limits_are_what_the_kernels_are_compiled_with():
    kernels = sources.read("common.cuh") + sources.read("splits.cuh")
    limits = {"THREADS": layout.THREADS, "WIDEST": layout.WIDEST, "MOST_SPLITS": paged_form.MOST_SPLITS}
    for name, value in limits.items():
        assert re.search(rf"constexpr int {name} = (\d+);", kernels)[1] == str(value)


def test_sizes_beyond_the_kernels(backend):
    wide = paged(3, [1], D=4097, V=4096)
    with pytest.raises(UnsupportedError, match="D is 4097, the CUDA kernels take at most 4096"):
        mla_oracle.decode_paged(**wide, backend=backend)
    heads = paged(3, [1], H=65536, D=1, V=1)
    with pytest.raises(UnsupportedError, match="H is 65536, the CUDA kernels take at most 65535"):
        mla_oracle.decode_paged(**heads, backend=backend)
    for attend, sizes, name in (
        (mla_oracle.attend_naive, {"P": 4095}, "qk_head_dim"),
        (mla_oracle.attend_naive, {"V": 4097}, "v_head_dim"),
        (mla_oracle.attend_absorbed, {"L": 4095}, "latent_dim"),
    ):
        with pytest.raises(UnsupportedError, match=f"{name} is 4097, the CUDA kernels take at most 4096"):
            attend(**dense(3, **sizes), backend=backend)


def test_ids_are_checked_before_anything_is_sent(backend):
    problem = paged(3, [5, 9])
    problem["block_table"][1, 2] = 7
    with pytest.raises(InputError, match=r"block_table\[1, 2\] is 7, expected 0 to 6"):
        mla_oracle.decode_paged(**problem, backend=backend)
    with pytest.raises(InputError, match=r"slot_mapping\[0\] is 8, expected below 8"):
        rows = np.zeros((1, 4), np.float32)
        mla_oracle.append_kv(np.zeros((2, 4, 5), "f4"), rows, rows[:, :1], np.array([8]), backend=backend)
