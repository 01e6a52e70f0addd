# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ text to PTX and cubin, both from one NVRTC compile; no driver and no GPU is needed.

    compile(sources.flatten("paged.cu"), "sm_90", name="paged.cu").ptx

The package `cuda` is imported by the first call. NVRTC 13.3 and newer bring CUDA's headers along; for an older
one they come from the wheel nvidia-cuda-runtime, CUDA_HOME, CUDA_PATH or an installed toolkit.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_oracle.errors import InputError, MissingError, UnsupportedError

OLDEST = (12, 9)
BUNDLES_HEADERS = (13, 3)
OLDEST_ARCH = 80  # ldmatrix, cp.async and mma.sync of bf16
EXTRA = "pip install 'mla-oracle[cuda]'"

# Spills and registers are reported in the log, see gpu.resources.
OPTIONS = ("--std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of one source: `log` holds its warnings and what ptxas says of each kernel."""

    ptx: str
    cubin: bytes
    log: str

    @property
    def build(self) -> str:
        """The NVRTC that made it, "13.5.37"."""
        match = re.search(r"^// Cuda compilation tools.* V([\d.]+)", self.ptx, re.MULTILINE)
        return match[1] if match else ""


def compile(
    source: str, arch: str, *, name: str, lineinfo: bool = True, options: Sequence[str] = ()
) -> Compiled:
    """Compile `source`, which messages call `name` where it has no #line of its own, for `arch` ("sm_90").

    Raises InputError with the first error of the log, UnsupportedError for an arch that the kernels or NVRTC do
    not support, MissingError where NVRTC or CUDA's headers are missing or too old.
    """
    try:
        return _compile(source, arch, name, lineinfo, options)
    except InputError:
        if not _wants_headers(source) or version() < BUNDLES_HEADERS:
            raise
        shutil.rmtree(_bundle(), ignore_errors=True)  # a header may be damaged: they are laid out anew
        return _compile(source, arch, name, lineinfo, options)


def _compile(source: str, arch: str, name: str, lineinfo: bool, options: Sequence[str]) -> Compiled:
    nvrtc = _library()[0]
    check_arch(arch)
    flags = [f"--gpu-architecture={arch}", *OPTIONS, *(["-lineinfo"] if lineinfo else []), *options]
    flags += _header_options() if _wants_headers(source) else []
    program = _call(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        if int(status):
            raise InputError(f"{name} does not compile for {arch}: {_first_error(log, status)}")
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).decode()
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        _call(nvrtc.nvrtcDestroyProgram(program))
    # The same source gives the same text: NVRTC completes the names in #line by the working directory, and takes time.
    ptx = ptx.rstrip("\0").replace(f'"{os.getcwd()}/', '"')
    log = "".join(line for line in log.rstrip("\0 \n").splitlines(keepends=True) if "Compile time" not in line)
    return Compiled(ptx, cubin, log)


def version() -> tuple[int, int]:
    """NVRTC's version, (13, 5). Raises MissingError where there is none, or one older than 12.9."""
    return _library()[1]


def identity(source: str) -> str:
    """What else the outcome of compiling `source` depends on: this NVRTC, and where CUDA's headers come from."""
    _, numbers, size = _library()
    headers = _header_folder() if _wants_headers(source) and numbers < BUNDLES_HEADERS else ""
    return f"{_dotted(numbers)} {size} {headers}"


def check_arch(arch: str) -> None:
    """Raise InputError for a text that names no architecture, UnsupportedError for one nothing is compiled for."""
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise InputError(f"arch is {arch!r}, expected sm_80, sm_90, ...")
    if int(match[1]) < OLDEST_ARCH:
        raise UnsupportedError(f"arch is {arch}, the kernels need sm_{OLDEST_ARCH} or newer")
    known: Sequence[int] = _call(_library()[0].nvrtcGetSupportedArchs())
    if int(match[1]) not in known:
        raise UnsupportedError(
            f"arch is {arch}, NVRTC {_dotted(version())} compiles for sm_{', sm_'.join(str(n) for n in known)}"
        )


@lru_cache(maxsize=1)
def _library() -> tuple[ModuleType, tuple[int, int], int]:
    """cuda.bindings.nvrtc, its version and its library's size in bytes.

    The library is looked for first: a call into cuda.bindings that finds none can hang the next one.
    """
    try:
        import cuda.pathfinder as pathfinder
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingError(f"the CUDA compiler is not installed ({error}): {EXTRA}") from None
    try:
        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except RuntimeError as error:
        raise MissingError(f"NVRTC (libnvrtc.so) was not found: {EXTRA}") from error
    major, minor = _call(nvrtc.nvrtcVersion())
    if (major, minor) < OLDEST:
        raise MissingError(f"NVRTC {major}.{minor} is too old, expected {_dotted(OLDEST)} or newer: {EXTRA}")
    return nvrtc, (major, minor), os.path.getsize(path) if path and os.path.exists(path) else 0


def _wants_headers(source: str) -> bool:
    return re.search(r"^\s*#\s*include\s*<", source, re.MULTILINE) is not None


def _header_options() -> list[str]:
    if version() >= BUNDLES_HEADERS:
        return [f"--use-bundled-headers={_bundle()}"]
    return [f"--include-path={_header_folder()}"]


def _bundle() -> Path:
    """Where NVRTC lays out the headers it brings along."""
    from mla_oracle.gpu.cache import subfolder

    return subfolder("headers-" + _dotted(version()))


def _header_folder() -> Path:
    """CUDA's headers of NVRTC's own major version: the first folder that has them."""
    import cuda.pathfinder as pathfinder

    wanted = version()[0]
    seen = []
    toolkits = [os.path.join(os.environ[name], "include") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for candidate in filter(None, [pathfinder.find_nvidia_header_directory("cudart"), *toolkits]):
        try:
            text = Path(candidate, "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        if match and int(match[1]) // 1000 == wanted:
            return Path(candidate)
        seen.append(f"{candidate} is another version's")
    raise MissingError(
        f"NVRTC {_dotted(version())} brings no CUDA headers and none of version {wanted} were found"
        f"{' (' + ', '.join(seen) + ')' if seen else ''}: set CUDA_HOME or pip install nvidia-cuda-runtime-cu{wanted}"
    )


def _call(result: tuple[Any, ...]) -> Any:
    """The value of an NVRTC call, its status checked."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _text(size: Any, get: Any, program: Any) -> bytes:
    data = bytearray(_call(size(program)))
    _call(get(program, data))
    return bytes(data)


def _first_error(log: str, status: Any) -> str:
    for line in log.splitlines():
        if match := re.match(r"(.+)\((\d+)\): (?:catastrophic )?error(?: #\S+)?: (.*)", line):
            return f"{match[1]}:{match[2]}: {match[3]}"
    for line in log.splitlines():
        if "error" in line:
            return " ".join(line.split())
    return str(status.name)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)
