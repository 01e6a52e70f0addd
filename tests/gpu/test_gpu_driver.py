# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys

import pytest
from scripts import Script

# Everything a Device asks of a driver: what is there, a kernel with much shared memory, copies, foreign arrays.
EVERYTHING = """
import sys
import numpy as np
from mla_oracle.errors import OracleError
from mla_oracle.gpu import driver, foreign, nvrtc
from mla_oracle.gpu.device import Device
from producers import Interface

def everything():
    driver.describe()
    device = Device(0, stream=0x70)
    source = 'extern "C" __global__ void tiny(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }'
    tiny = device.load(nvrtc.compile(source, device.arch, name="tiny.cu"), "tiny.cu", "tiny")
    x = device.upload(np.ones(8, np.float32))
    theirs = device.upload(Interface(np.ones(8, np.float32), stream=0x80))
    device.launch(tiny, (1, 2, 3), (8, 1, 1), 60000, x, np.int32(8))
    device.download(x)

def unraisable(hook):
    error = hook.exc_value
    print(type(error).__name__, getattr(error, "exit_code", None), error)

sys.unraisablehook = unraisable
try:
    everything()
except OracleError as error:
    print(type(error).__name__, error.exit_code, error)
"""

CALLS = [
    "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem",
    "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuModuleLoadData",
    "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute", "cuMemAllocAsync", "cuMemFreeAsync",
    "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuStreamWaitEvent", "cuEventCreate",
    "cuEventRecord", "cuEventDestroy", "cuPointerGetAttribute", "cuLaunchKernel",
]  # fmt: skip


def test_a_sound_driver_is_asked_for_all_of_it(on_fake: Script) -> None:
    ran = on_fake(EVERYTHING)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert {call[0] for call in ran.calls} == {*CALLS, "cuInit"}


@pytest.mark.parametrize("call", CALLS)
def test_every_status_is_checked(on_fake: Script, call: str) -> None:
    # The second count is the first that is not a probe.
    ran = on_fake(EVERYTHING, FAIL=f"{call}=719" if call != "cuDeviceGetCount" else "cuDeviceGetCount=719@2")
    assert ran.stderr == ""
    first, *others = ran.stdout.splitlines()
    assert first.startswith(f"DriverError 70 {call}: CUDA_ERROR_LAUNCH_FAILED while "), ran.stdout
    assert others == []


@pytest.mark.parametrize(("call", "works"), [("cuMemAlloc", True), ("cuMemFree", True)])
def test_a_device_without_memory_pools_is_checked_as_well(on_fake: Script, call: str, works: bool) -> None:
    assert on_fake(EVERYTHING, POOLS=0).stdout == ""
    ran = on_fake(EVERYTHING, POOLS=0, FAIL=f"{call}=719")
    assert ran.stdout.startswith(f"DriverError 70 {call}: CUDA_ERROR_LAUNCH_FAILED while "), ran.stdout


def test_an_error_names_the_kernel_the_architecture_and_the_launch(on_fake: Script) -> None:
    launch = "tiny of tiny.cu for sm_90a, grid (1, 2, 3), block (8, 1, 1), 60000 bytes of dynamic shared memory"
    ran = on_fake(EVERYTHING, FAIL="cuLaunchKernel=1")
    assert ran.stdout == f"DriverError 70 cuLaunchKernel: CUDA_ERROR_INVALID_VALUE while launching {launch}\n"
    ran = on_fake(EVERYTHING, FAIL="cuStreamSynchronize=700")
    expected = f"cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS while waiting for device 0; launched last: {launch}"
    assert ran.stdout == f"DriverError 70 {expected}\n"
    ran = on_fake(EVERYTHING, FAIL="cuModuleLoadData=209")
    assert "loading tiny of tiny.cu for sm_90a (made by NVRTC " in ran.stdout
    assert "; the driver is for CUDA 13.0)" in ran.stdout


def test_too_little_memory_is_missing(on_fake: Script) -> None:
    ran = on_fake(EVERYTHING, FAIL="cuMemAllocAsync=2")
    expected = "MissingError 4 cuMemAllocAsync: CUDA_ERROR_OUT_OF_MEMORY while taking 32 bytes on device 0: "
    assert ran.stdout == f"{expected}the GPU's memory is not enough\n"


def test_a_status_that_the_bindings_do_not_know_is_still_an_error(on_fake: Script) -> None:
    ran = on_fake(EVERYTHING, FAIL="cuLaunchKernel=98765")
    assert ran.stdout.startswith("DriverError 70 cuLaunchKernel: 98765 is not a valid CUresult while launching tiny")


def test_a_driver_without_a_function_is_missing(on_fake: Script) -> None:
    ran = on_fake(EVERYTHING, LACKS="cuMemAllocAsync")
    assert ran.stdout.startswith("MissingError 4 the NVIDIA driver is too old: "), ran.stdout
    assert "cuMemAllocAsync" in ran.stdout


ASK_THRICE = """
from mla_oracle.errors import MissingError
from mla_oracle.gpu import driver, foreign
from mla_oracle.gpu.device import Device
for ask in (lambda: Device(0), driver.describe, driver.load):
    try:
        ask()
    except MissingError as error:
        print(error)
"""

NO_LIBRARY = """
import cuda.pathfinder
def absent(name):
    raise cuda.pathfinder.DynamicLibNotFoundError(name)
cuda.pathfinder.load_nvidia_dynamic_lib = absent
"""


@pytest.mark.parametrize(
    ("before", "variables", "message"),
    [
        (
            "import sys; sys.modules['cuda.bindings'] = None\n", {},
            "the CUDA extra is not installed (import of cuda.bindings halted; None in sys.modules): "
            "pip install 'mla-oracle[cuda]'",
        ),
        (NO_LIBRARY, {}, "no NVIDIA driver: libcuda.so.1 was not found"),
        ("", {"DEVICES": 0}, "the NVIDIA driver finds no CUDA device"),
        ("", {"FAIL": "cuInit=100"}, "the NVIDIA driver finds no CUDA device"),
        ("", {"FAIL": "cuInit=803"}, "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("", {"FAIL": "cuInit=98765"}, "the NVIDIA driver cannot be used: 98765 is not a valid CUresult"),
        ("", {"FAIL": "cuDeviceGetCount=3"}, "the NVIDIA driver does not start: CUDA_ERROR_NOT_INITIALIZED"),
    ],
)  # fmt: skip
def test_what_is_missing_has_a_message_of_its_own_however_often_it_is_asked_for(
    on_fake: Script, before: str, variables: dict[str, object], message: str
) -> None:
    ran = on_fake(before + ASK_THRICE, **variables)
    assert ran.stdout.splitlines() == [message] * 3, ran.stderr
    assert sum(call[0] == "cuInit" for call in ran.calls) <= 1


def test_a_machine_without_a_driver_is_answered_and_never_hangs() -> None:
    pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")
    if any(os.path.exists(f"{folder}/libcuda.so.1") for folder in ("/usr/lib64", "/usr/lib/x86_64-linux-gnu")):
        pytest.skip("this machine has a driver")
    done = subprocess.run([sys.executable, "-c", ASK_THRICE], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["no NVIDIA driver: libcuda.so.1 was not found"] * 3, done.stderr


def test_info_asks_the_driver_only_when_told_to(on_fake: Script) -> None:
    script = "import sys; from mla_oracle.cli import main; main(['info', *sys.argv[1:]])"
    ran = on_fake(script)
    cheap = json.loads(ran.stdout)["cuda"]
    assert set(cheap) == {"bindings", "nvrtc", "cache"} and ran.calls == []
    asked = json.loads(on_fake(script.replace("*sys.argv[1:]", "'--cuda'"), DEVICES=2, ARCH=120).stdout)["cuda"]
    assert asked["driver"] == "13.0" and asked["missing"] == []
    assert asked["devices"][1] == {"ordinal": 1, "name": "Fake 1", "arch": "sm_120", "memory": 1 << 30}
    none = json.loads(on_fake(script.replace("*sys.argv[1:]", "'--cuda'"), DEVICES=0).stdout)["cuda"]
    assert none["missing"] == ["the NVIDIA driver finds no CUDA device"] and none["devices"] == []
