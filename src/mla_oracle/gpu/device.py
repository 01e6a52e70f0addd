# SPDX-License-Identifier: Apache-2.0
"""A GPU as the Machine that kernels run on.

    device = Device(0, stream=torch.cuda.current_stream())
    device.launch(device.kernel("paged.cu", "paged_decode_f32"), grid, block, smem, q, cache, np.int32(n), ...)

Everything is queued on one stream of the device's primary context, which torch and cupy share; memory is taken and
given back in that stream's order. Only `download` waits for the GPU.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mla_oracle import dtypes
from mla_oracle.arrays import Array
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.gpu import cache, driver, foreign, sources
from mla_oracle.gpu.arguments import Argument, check_shape, dynamic_smem, pack, signatures
from mla_oracle.gpu.foreign import DeviceArray
from mla_oracle.gpu.machine import Buffer, Dim, Kernel, contiguous, span
from mla_oracle.gpu.nvrtc import Compiled

LEGACY = 1  # the legacy default stream by its own handle: 0 is another one where CUDA_PYTHON_* variables say so
FREE_SMEM = 48 * 1024  # dynamic shared memory that needs no asking


@dataclass(eq=False)
class Function:
    """A kernel loaded into a device's primary context."""

    file: str
    name: str
    arch: str
    handle: Any
    widths: tuple[int, ...]
    static_smem: int
    declared_smem: int | None
    allowed_smem: int = FREE_SMEM

    def __str__(self) -> str:
        return f"{self.name} of {self.file} for {self.arch}"


class Device:
    """CUDA device `ordinal`, used on `stream`: a handle, or anything with __cuda_stream__ or cuda_stream.

    Without one it is the legacy default stream. Raises MissingError where there is no such device.
    """

    def __init__(self, ordinal: int = 0, stream: object = None) -> None:
        self._primary = _primary(ordinal)
        self.ordinal = ordinal
        self.stream = _stream_handle(stream)
        self.arch = self._primary.arch
        self._last = ""

    def upload(self, array: Array | Buffer | object) -> DeviceArray:
        """A copy of a numpy array with its strides; an array on this device is taken as it is.

        The copy is queued: it has left `array` when this returns. Raises InputError for an array on another
        device, or with strides that are no multiple of its element.
        """
        if foreign.is_foreign(array):
            return self._borrow(foreign.take("array", array, self.stream))
        if not isinstance(array, np.ndarray):
            raise InputError(f"cannot upload a {type(array).__name__}, expected a numpy array or one on a CUDA device")
        dtypes.name_of(array.dtype)
        foreign.check_strides("array", 0, array.strides, array.dtype.itemsize)
        low, high = span(array.shape, array.strides, array.dtype.itemsize)
        buffer = self._allocate(array.shape, array.dtype, array.strides, low, high)
        size = high - low
        if size:
            with self._current():
                doing = f"copying {size} bytes to device {self.ordinal}"
                self._call(doing, "cuMemcpyHtoDAsync", buffer.pointer + low, array.ctypes.data + low, size, self.stream)
        return buffer

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Contiguous memory that nothing has been written to."""
        dtype = np.dtype(dtype)
        return self._allocate(shape, dtype, contiguous(shape, dtype.itemsize), 0, math.prod(shape) * dtype.itemsize)

    def download(self, buffer: Buffer) -> Array:
        """A copy of `buffer` with its strides, once everything queued before is done."""
        low, high = span(buffer.shape, buffer.strides, buffer.dtype.itemsize)
        size = high - low
        data = np.empty(size, np.uint8)
        with self._current():
            if size:
                doing = f"copying {size} bytes from device {self.ordinal}"
                self._call(doing, "cuMemcpyDtoHAsync", data.ctypes.data, buffer.pointer + low, size, self.stream)
            self.synchronize()
        return np.ndarray(buffer.shape, buffer.dtype, data, -low, buffer.strides)

    def kernel(self, file: str, name: str, **defines: int) -> Function:
        """The kernel `name` of cuda/`file`, compiled for this device once with these macros and kept."""
        kept, key = self._primary.functions, (file, name, *defines.items())
        if key not in kept:
            options = [f"-D{macro}={value}" for macro, value in defines.items()]
            compiled = cache.compile(sources.flatten(file), self.arch, name=file, options=options)
            kept[key] = self.load(compiled, file, name)
        return kept[key]

    def load(self, compiled: Compiled, file: str, name: str) -> Function:
        """The kernel `name` of what was compiled from `file`."""
        widths = signatures(compiled.ptx).get(name)
        if widths is None:
            known = ", ".join(signatures(compiled.ptx))
            raise InputError(f"kernel of {file} is {name!r}, expected {known or 'a file with kernels'}")
        what = f"{name} of {file} for {self.arch}"
        made = f"(made by NVRTC {compiled.build}; the driver is for CUDA {driver.version()})"
        static = driver.load().CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        with self._current():
            module = self._call(f"loading {what} {made}", "cuModuleLoadData", compiled.cubin)
            handle = self._call(f"loading {what}", "cuModuleGetFunction", module, name.encode())
            smem = self._call(f"asking the shared memory of {what}", "cuFuncGetAttribute", static, handle)
        return Function(file, name, self.arch, handle, widths, int(smem), dynamic_smem(compiled.ptx).get(name))

    def launch(self, kernel: Kernel, grid: Dim, block: Dim, smem: int, *args: Argument) -> None:
        """Queue `kernel`; see `Machine.launch`. Raises InputError, UnsupportedError where the device is too small."""
        if not isinstance(kernel, Function):
            raise InputError(f"{kernel.name} is another machine's kernel, expected one of this device's")
        check_shape(kernel.name, grid, block, smem, kernel.declared_smem)
        data = [ctypes.create_string_buffer(value, len(value)) for value in pack(kernel.name, kernel.widths, args)]
        pointers = (ctypes.c_void_p * len(data))(*(ctypes.addressof(value) for value in data))
        where = f"{kernel}, grid {grid}, block {block}, {smem} bytes of dynamic shared memory"
        with self._current():
            self._allow(kernel, smem)
            shape = (*grid, *block, smem, self.stream)
            self._call(f"launching {where}", "cuLaunchKernel", kernel.handle, *shape, ctypes.addressof(pointers), 0)
        self._last = where

    def synchronize(self) -> None:
        """Wait until everything queued is done. Raises DriverError if a kernel faulted."""
        with self._current():
            self._call(f"waiting for device {self.ordinal}", "cuStreamSynchronize", self.stream)

    def record(self) -> Event:
        """What happens once everything queued so far is done; see `milliseconds`."""
        with self._current():
            event = Event(self, self._call("making an event", "cuEventCreate", 0))
            self._call("recording an event", "cuEventRecord", event.handle, self.stream)
        return event

    def milliseconds(self, begin: Event, end: Event) -> float:
        """The time from one event to a later one, which is waited for."""
        with self._current():
            self._call(f"waiting for an event of device {self.ordinal}", "cuEventSynchronize", end.handle)
            return float(self._call("timing two events", "cuEventElapsedTime", begin.handle, end.handle))

    def attribute(self, name: str) -> int:
        """The device attribute CU_DEVICE_ATTRIBUTE_`name`, as "MULTIPROCESSOR_COUNT"."""
        return driver.attribute(driver.call(f"asking {name}", "cuDeviceGet", self.ordinal), name)

    def _allow(self, kernel: Function, smem: int) -> None:
        most = self._primary.most_smem - kernel.static_smem
        if smem > most:
            raise UnsupportedError(f"{kernel} needs {smem} bytes of dynamic shared memory, the device has {most}")
        if smem > kernel.allowed_smem:
            which = driver.load().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            doing = f"allowing {kernel} {most} bytes of dynamic shared memory"
            self._call(doing, "cuFuncSetAttribute", kernel.handle, which, most)
            kernel.allowed_smem = most

    def _allocate(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...], low: int, high: int
    ) -> DeviceArray:
        size = max(high - low, 1)
        name, where = ("cuMemAllocAsync", (self.stream,)) if self._primary.pools else ("cuMemAlloc", ())
        with self._current():
            base = int(self._call(f"taking {size} bytes on device {self.ordinal}", name, size, *where))
        return DeviceArray(
            base - low, shape, dtype, strides, _Memory(self, base), ordinal=self.ordinal, after=self.stream
        )

    def _free(self, base: int) -> None:
        name, where = ("cuMemFreeAsync", (self.stream,)) if self._primary.pools else ("cuMemFree", ())
        with self._current():
            self._call(f"giving memory back to device {self.ordinal}", name, base, *where)

    def _destroy(self, event: Any) -> None:
        with self._current():
            self._call("giving an event back", "cuEventDestroy", event)

    def _borrow(self, array: DeviceArray) -> DeviceArray:
        if array.ordinal != self.ordinal:
            raise InputError(f"array is on CUDA device {array.ordinal}, expected device {self.ordinal}")
        if array.after is not None and array.after != self.stream:
            doing = f"making stream {self.stream:#x} wait for stream {array.after:#x}"
            untimed = driver.load().CUevent_flags.CU_EVENT_DISABLE_TIMING
            with self._current():
                event = self._call(doing, "cuEventCreate", untimed)
                self._call(doing, "cuEventRecord", event, array.after)
                self._call(doing, "cuStreamWaitEvent", self.stream, event, 0)
                self._call(doing, "cuEventDestroy", event)
        return array

    @contextmanager
    def _current(self) -> Iterator[None]:
        """This device's context is current within, the caller's again afterwards."""
        self._call(f"making device {self.ordinal} current", "cuCtxPushCurrent", self._primary.context)
        try:
            yield
        except BaseException:
            driver.load().cuCtxPopCurrent()
            raise
        self._call(f"leaving device {self.ordinal}", "cuCtxPopCurrent")

    def _call(self, doing: str, name: str, *args: Any) -> Any:
        """`driver.call`. A kernel's fault shows in any later call, so that errors name the last launch as well."""
        try:
            return driver.call(doing, name, *args)
        except driver.DriverError as error:
            self._primary.failed = True
            raise driver.DriverError(f"{error}{f'; launched last: {self._last}' if self._last else ''}") from None


class Event:
    """A point in a device's stream."""

    def __init__(self, device: Device, handle: Any) -> None:
        self.device = device
        self.handle = handle

    def __del__(self) -> None:
        _give_back(self.device, lambda: self.device._destroy(self.handle))


class _Memory:
    """Device memory that is given back with its last buffer."""

    def __init__(self, device: Device, base: int) -> None:
        self.device = device
        self.base = base

    def __del__(self) -> None:
        _give_back(self.device, lambda: self.device._free(self.base))


def _give_back(device: Device, call: Callable[[], None]) -> None:
    failed = device._primary.failed
    try:
        if not sys.is_finalizing():
            call()
    except driver.DriverError:
        if not failed:  # after a fault the driver answers everything with that fault
            raise


@dataclass(eq=False)
class _Primary:
    """A device's primary context, and what is loaded into it."""

    context: Any
    arch: str
    most_smem: int
    pools: bool
    failed: bool = False
    functions: dict[tuple[Any, ...], Function] = field(default_factory=dict)


_lock = threading.Lock()


def _primary(ordinal: int) -> _Primary:
    with _lock:
        return _open(ordinal)


@lru_cache
def _open(ordinal: int) -> _Primary:
    count = driver.count()
    if not 0 <= ordinal < count:
        raise InputError(f"device is {ordinal}, expected 0 to {count - 1}")
    device = driver.call(f"opening device {ordinal}", "cuDeviceGet", ordinal)
    return _Primary(
        context=driver.call(f"opening device {ordinal}", "cuDevicePrimaryCtxRetain", device),
        arch=driver.arch(device),
        most_smem=driver.attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        pools=bool(driver.attribute(device, "MEMORY_POOLS_SUPPORTED")),
    )


def _stream_handle(stream: object) -> int:
    if hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    elif hasattr(stream, "cuda_stream"):
        stream = stream.cuda_stream
    if stream is None:
        return LEGACY
    if not isinstance(stream, int) or isinstance(stream, bool) or stream < 0:
        raise InputError(f"stream is {stream!r}, expected a handle or an object with __cuda_stream__")
    return stream or LEGACY
