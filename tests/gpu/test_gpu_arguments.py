# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from mla_oracle.errors import InputError
from mla_oracle.gpu.arguments import check_shape, dynamic_smem, pack, signatures
from mla_oracle.gpu.machine import Buffer, contiguous, span

SOURCE = """
struct Wide { int a[3]; double b; };
extern "C" __device__ const unsigned first_smem = 70000;
extern "C" __device__ const unsigned second_smem = 0;
extern "C" __global__ void first(Wide w, char c, const float *x, bool b, double d, long long s, short h, float f) {
    if (b) asm volatile("trap;");
}
extern "C" __global__ void second() {}
extern "C" __global__ void third(int *x) { *x = first_smem; }
"""

BUFFER = Buffer(pointer=0x1122334455667788, shape=(2,), dtype=np.dtype(np.float32), strides=(4,))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_a_kernels_parameters_and_its_shared_memory_are_read_from_its_ptx(arch: str) -> None:
    pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")
    from mla_oracle.gpu import nvrtc

    ptx = nvrtc.compile(SOURCE, arch, name="three.cu").ptx
    assert signatures(ptx) == {"first": (24, 1, 8, 1, 8, 8, 2, 4), "second": (), "third": (8,)}
    assert dynamic_smem(ptx) == {"first": 70000, "second": 0}


def test_arguments_are_packed_in_their_own_widths() -> None:
    args = (BUFFER, None, np.int32(-2), np.int64(1 << 40), np.float32(1), np.int8(7))
    assert [data.hex() for data in pack("k", (8, 8, 4, 8, 4, 1), args)] == [
        "8877665544332211",
        "0000000000000000",
        "feffffff",
        "0000000000010000",
        "0000803f",
        "07",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((BUFFER,), "k takes 2 arguments, 1 given"),
        ((BUFFER, np.int32(1), np.int32(1)), "k takes 2 arguments, 3 given"),
        ((BUFFER, np.int64(1)), "argument 1 of k is 8 bytes, expected 4"),
        ((np.int32(1), np.int32(1)), "argument 0 of k is 4 bytes, expected 8"),
        ((BUFFER, 1), "argument 1 of k is a int, expected a Buffer, a numpy scalar or None"),
        ((np.zeros(2), np.int32(1)), "argument 0 of k is a ndarray"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack("k", (8, 4), args)


@pytest.mark.parametrize(
    ("grid", "block", "smem", "message"),
    [
        ((0, 1, 1), (32, 1, 1), 0, r"grid\.x of k is 0, expected 1 to 2147483647"),
        ((1, 65536, 1), (32, 1, 1), 0, r"grid\.y of k is 65536, expected 1 to 65535"),
        ((1, 1, 1), (1, 1, 65), 0, r"block\.z of k is 65, expected 1 to 64"),
        ((1, 1, 1), (32, 33, 1), 0, r"block of k is \(32, 33, 1\), expected 1024 threads or fewer"),
        ((1, 1, 1), (32, 1, 1), -1, "dynamic shared memory of k is -1 bytes, expected 0 or more"),
    ],
)
def test_launches_that_no_device_takes_are_refused(grid: tuple, block: tuple, smem: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_shape("k", grid, block, smem)


def test_a_launch_asks_for_no_more_shared_memory_than_its_kernel_declares() -> None:
    check_shape("k", (1, 1, 1), (1, 1, 1), 100, 100)
    with pytest.raises(InputError, match="dynamic shared memory of k is 101 bytes, it declares 100 at most"):
        check_shape("k", (1, 1, 1), (1, 1, 1), 101, 100)


def test_a_span_holds_every_byte_of_an_array() -> None:
    whole = np.zeros((4, 6), np.float32)
    for view in (whole, whole[::-1, ::2], whole[:, ::-1], whole[1:3, 5:], whole[:0], np.broadcast_to(whole[0], (9, 6))):
        low, high = span(view.shape, view.strides, 4)
        first, last = np.lib.array_utils.byte_bounds(view) if view.size else (view.ctypes.data, view.ctypes.data)
        assert (view.ctypes.data + low, view.ctypes.data + high) == (first, last)
    assert contiguous((2, 5, 3), 4) == (60, 12, 4)
    assert contiguous((), 4) == ()
