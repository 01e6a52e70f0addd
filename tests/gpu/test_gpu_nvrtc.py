# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_oracle.errors import InputError, MissingError, UnsupportedError
from mla_oracle.gpu import nvrtc, sources
from mla_oracle.gpu.arguments import signatures

pathfinder = pytest.importorskip("cuda.pathfinder", reason="the extra cuda is not installed")

TINY = 'extern "C" __global__ void tiny(float *x) { x[threadIdx.x] *= 2; }\n'
HALVES = '#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n' + TINY


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is known of the library is forgotten, before and after."""
    nvrtc._library.cache_clear()
    yield
    nvrtc._library.cache_clear()


def test_one_compile_gives_ptx_cubin_and_the_compilers_report() -> None:
    compiled = nvrtc.compile(TINY, "sm_90", name="tiny.cu")
    assert signatures(compiled.ptx) == {"tiny": (8,)}
    assert ".target sm_90" in compiled.ptx
    assert compiled.cubin.startswith(b"\x7fELF")
    assert "Used" in compiled.log and "registers" in compiled.log
    assert compiled.build.startswith(".".join(map(str, nvrtc.version())) + ".")


def test_ptx_names_source_files_without_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = nvrtc.compile(sources.flatten("merge.cu"), "sm_80", name="merge.cu")
    monkeypatch.chdir(tmp_path)
    there = nvrtc.compile(sources.flatten("merge.cu"), "sm_80", name="merge.cu")
    assert here.ptx == there.ptx
    assert '"cuda/merge.cu"' in here.ptx


def test_cuda_headers_are_found() -> None:
    nvrtc.compile(HALVES, "sm_80", name="halves.cu")


def test_damaged_headers_of_cuda_are_laid_out_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if nvrtc.version() < nvrtc.BUNDLES_HEADERS:
        pytest.skip("this NVRTC brings no headers along")
    monkeypatch.setenv("MLA_ORACLE_CACHE", str(tmp_path))
    nvrtc.compile(HALVES, "sm_80", name="halves.cu")
    (header,) = tmp_path.rglob("cuda_fp16.h")
    header.write_text(header.read_text()[:100])
    nvrtc.compile(HALVES, "sm_80", name="halves.cu")
    header.unlink()
    nvrtc.compile(HALVES, "sm_80", name="halves.cu")
    with pytest.raises(InputError, match=r"unheard_of\.h"):
        nvrtc.compile("#include <unheard_of.h>\n" + TINY, "sm_80", name="halves.cu")


def test_an_older_nvrtc_takes_the_headers_of_its_own_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "BUNDLES_HEADERS", (99, 0))
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: str(tmp_path / "wheel"))
    major = nvrtc.version()[0]
    for folder, version in (("wheel", 1000 * (major - 1)), ("toolkit/include", 1000 * major + 10)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
        (tmp_path / folder / "which.h").write_text(f"#define WHICH {version}\n")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    source = f"#include <which.h>\nstatic_assert(WHICH / 1000 == {major});\n" + TINY
    with pytest.raises(MissingError, match=rf"none of version {major} were found \(.*wheel is another version's\)"):
        nvrtc.compile(source, "sm_80", name="tiny.cu")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    nvrtc.compile(source, "sm_80", name="tiny.cu")
    nvrtc.compile(TINY, "sm_80", name="tiny.cu")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__device__ int f() {\n  return x;\n}\n", r't\.cu does not compile for sm_80: t\.cu:2: identifier "x" is un'),
        ('#line 7 "cuda/b.cuh"\nnonsense;\n', r"cuda/b\.cuh:7: .*"),
        ("#include <no_such_header.h>\n", r"t\.cu:1: .*no_such_header.*"),
        ('extern "C" __global__ void k() { asm("mystery.b32;"); }\n', r"ptxas .*"),
        ('extern "C" __global__ void k(int *x) { __shared__ int s[20000]; s[*x] = 1; *x = s[1]; }\n', r".*shared dat"),
    ],
)
def test_what_does_not_compile_is_one_line_with_the_first_error(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        nvrtc.compile(source, "sm_80", name="t.cu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "error", "message"),
    [
        ("90", InputError, "arch is '90', expected sm_80"),
        ("compute_90", InputError, "arch is 'compute_90', expected sm_80"),
        ("sm_75", UnsupportedError, "arch is sm_75, the kernels need sm_80 or newer"),
        ("sm_999", UnsupportedError, r"arch is sm_999, NVRTC [\d.]+ compiles for .*sm_90, "),
    ],
)
def test_an_architecture_that_cannot_be_is_one_line(arch: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nvrtc.compile(TINY, arch, name="tiny.cu")


def test_an_nvrtc_that_is_too_old_is_missing(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as binding

    monkeypatch.setattr(binding, "nvrtcVersion", lambda: (binding.nvrtcResult.NVRTC_SUCCESS, 12, 2))
    with pytest.raises(MissingError, match=r"NVRTC 12\.2 is too old, expected 12\.9 or newer: pip install"):
        nvrtc.compile(TINY, "sm_80", name="tiny.cu")


def test_a_missing_library_is_missing_every_time_it_is_asked_for(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", absent)
    for _ in range(2):
        with pytest.raises(MissingError, match=r"NVRTC \(libnvrtc\.so\) was not found: pip install"):
            nvrtc.compile(TINY, "sm_80", name="tiny.cu")


@pytest.mark.parametrize("module", ["cuda", "cuda.bindings", "cuda.pathfinder"])
def test_without_the_extra_it_is_missing(module: str) -> None:
    script = f"""
import sys
sys.modules[{module!r}] = None
from mla_oracle.errors import MissingError
from mla_oracle.gpu import nvrtc
try:
    nvrtc.version()
except MissingError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("the CUDA compiler is not installed"), done.stderr
    assert done.stdout.endswith("pip install 'mla-oracle[cuda]'\n")
