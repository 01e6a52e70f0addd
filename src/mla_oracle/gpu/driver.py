# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver: found first, then called, every status checked.

A call into cuda.bindings that finds no driver leaves its lock held, and the next call hangs for ever. So `load` looks
for libcuda before anything else, remembers what it found, and nothing else imports cuda.bindings.driver.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

from mla_oracle.errors import MissingError, OracleError
from mla_oracle.gpu.nvrtc import EXTRA


class DriverError(OracleError):
    """The driver refused a call, or a kernel ended in a fault."""


_lock = threading.Lock()
_found: ModuleType | str | None = None


def load() -> ModuleType:
    """cuda.bindings.driver, initialised, with a device. Raises MissingError: no extra, no driver, or no device."""
    global _found
    with _lock:
        if _found is None:
            _found = _probe()
    if isinstance(_found, str):
        raise MissingError(_found)
    return _found


def check(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call; `doing` says in an error what it was for. Raises DriverError or MissingError."""
    status, *values = result
    if int(status) == 0:
        return values[0] if len(values) == 1 else tuple(values)
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise MissingError(f"not enough GPU memory: {doing}")
    raise DriverError(f"{status.name} while {doing}")


def describe() -> dict[str, Any]:
    """The driver's version and the devices, for `mla-oracle info --cuda`. Raises as `load` does."""
    driver = load()
    devices = []
    for ordinal in range(check(driver.cuDeviceGetCount(), "counting devices")):
        device = check(driver.cuDeviceGet(ordinal), f"looking for device {ordinal}")
        name = check(driver.cuDeviceGetName(128, device), f"asking the name of device {ordinal}")
        memory = check(driver.cuDeviceTotalMem(device), f"asking the memory of device {ordinal}")
        devices.append(
            {"ordinal": ordinal, "name": name.split(b"\0")[0].decode(), "arch": arch(device), "memory": int(memory)}
        )
    return {"driver": version(), "devices": devices}


def version() -> str:
    """The CUDA version of the driver: "13.0"."""
    number = check(load().cuDriverGetVersion(), "asking the driver's version")
    return f"{number // 1000}.{number % 1000 // 10}"


def attribute(device: Any, name: str) -> int:
    """The device attribute CU_DEVICE_ATTRIBUTE_`name`."""
    driver = load()
    which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(driver.cuDeviceGetAttribute(which, device), f"asking {name} of device {int(device)}"))


def arch(device: Any) -> str:
    """What kernels for `device` are compiled for: "sm_90"."""
    return f"sm_{attribute(device, 'COMPUTE_CAPABILITY_MAJOR')}{attribute(device, 'COMPUTE_CAPABILITY_MINOR')}"


def _probe() -> ModuleType | str:
    """cuda.bindings.driver, or why there is none to use."""
    try:
        from cuda import pathfinder
        from cuda.bindings import driver
    except ImportError as error:
        return f"the CUDA extra is not installed ({error}): {EXTRA}"
    try:
        pathfinder.load_nvidia_dynamic_lib("cuda")
    except RuntimeError:
        return "no NVIDIA driver: libcuda.so.1 was not found"
    try:
        (status,) = driver.cuInit(0)
        count = 0
        if int(status) == 0:
            status, count = driver.cuDeviceGetCount()
    except RuntimeError as error:
        return f"the NVIDIA driver cannot be used: {' '.join(str(error).split())}"
    if status.name == "CUDA_ERROR_NO_DEVICE" or (int(status) == 0 and count == 0):
        return "the NVIDIA driver finds no CUDA device"
    if int(status):
        return f"the NVIDIA driver does not start: {status.name}"
    module: ModuleType = driver
    return module
