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


def call(doing: str, name: str, *args: Any) -> Any:
    """The value of the driver function `name`; `doing` says in an error what it was called for.

    Raises DriverError, or MissingError for want of memory or for a driver without that function.
    """
    try:
        status, *values = getattr(load(), name)(*args)
    except RuntimeError as error:
        raise MissingError(f"the NVIDIA driver is too old: {_line(error)} while {doing}") from error
    except ValueError as error:  # a status that these bindings have no name for
        raise DriverError(f"{name}: {_line(error)} while {doing}") from error
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise MissingError(f"{name}: {status.name} while {doing}: the GPU's memory is not enough")
    if int(status):
        raise DriverError(f"{name}: {status.name} while {doing}")
    return values[0] if len(values) == 1 else tuple(values)


def describe() -> dict[str, Any]:
    """The driver's version and the devices, for `mla-oracle info --cuda`. Raises as `load` does."""
    devices = []
    for ordinal in range(count()):
        doing = f"describing device {ordinal}"
        device = call(doing, "cuDeviceGet", ordinal)
        name = call(doing, "cuDeviceGetName", 128, device).split(b"\0")[0].decode()
        memory = int(call(doing, "cuDeviceTotalMem", device))
        devices.append({"ordinal": ordinal, "name": name, "arch": arch(device), "memory": memory})
    return {"driver": version(), "devices": devices}


def count() -> int:
    """How many devices there are."""
    return int(call("counting devices", "cuDeviceGetCount"))


def version() -> str:
    """The CUDA version of the driver: "13.0"."""
    number = call("asking the driver's version", "cuDriverGetVersion")
    return f"{number // 1000}.{number % 1000 // 10}"


def attribute(device: Any, name: str) -> int:
    """The device attribute CU_DEVICE_ATTRIBUTE_`name`."""
    which = getattr(load().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call(f"asking {name} of device {int(device)}", "cuDeviceGetAttribute", which, device))


def arch(device: Any) -> str:
    """What kernels for `device` are compiled for: "sm_80", and on Hopper "sm_90a", whose wgmma no other has."""
    number = f"{attribute(device, 'COMPUTE_CAPABILITY_MAJOR')}{attribute(device, 'COMPUTE_CAPABILITY_MINOR')}"
    return "sm_90a" if number == "90" else f"sm_{number}"


def _probe() -> ModuleType | str:
    """cuda.bindings.driver, or why there is none to use."""
    try:
        import cuda.pathfinder as pathfinder
        from cuda.bindings import driver
    except ImportError as error:
        return f"the CUDA extra is not installed ({error}): {EXTRA}"
    try:
        pathfinder.load_nvidia_dynamic_lib("cuda")
    except RuntimeError:
        return "no NVIDIA driver: libcuda.so.1 was not found"
    try:
        (status,) = driver.cuInit(0)
        devices = 0
        if int(status) == 0:
            status, devices = driver.cuDeviceGetCount()
    except (RuntimeError, ValueError) as error:
        return f"the NVIDIA driver cannot be used: {_line(error)}"
    if status.name == "CUDA_ERROR_NO_DEVICE" or (int(status) == 0 and devices == 0):
        return "the NVIDIA driver finds no CUDA device"
    if int(status):
        return f"the NVIDIA driver does not start: {status.name}"
    module: ModuleType = driver
    return module


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
