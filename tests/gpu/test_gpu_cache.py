# SPDX-License-Identifier: Apache-2.0
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_oracle.gpu import cache, nvrtc

pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")

TINY = 'extern "C" __global__ void tiny(float *x) { x[threadIdx.x] *= 2; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kernels"))
    cache._said.clear()
    yield tmp_path / "kernels"
    cache._said.clear()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that were compiled for, in order."""
    done: list[str] = []
    compile: Callable[..., nvrtc.Compiled] = nvrtc.compile

    def counting(source: str, arch: str, **keywords: Any) -> nvrtc.Compiled:
        done.append(arch)
        return compile(source, arch, **keywords)

    monkeypatch.setattr(nvrtc, "compile", counting)
    return done


def test_a_kernel_is_compiled_once(folder: Path, compiles: list[str]) -> None:
    first = cache.compile(TINY, "sm_80", name="tiny.cu")
    assert cache.compile(TINY, "sm_80", name="tiny.cu") == first
    assert compiles == ["sm_80"]
    assert [path.suffix for path in folder.iterdir()] == [".kernel"]


def test_source_name_arch_options_and_nvrtc_each_have_files_of_their_own(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.compile(TINY, "sm_80", name="tiny.cu")
    cache.compile(TINY + "\n", "sm_80", name="tiny.cu")
    cache.compile(TINY, "sm_80", name="other.cu")
    cache.compile(TINY, "sm_90", name="tiny.cu")
    cache.compile(TINY, "sm_80", name="tiny.cu", lineinfo=False)
    cache.compile(TINY, "sm_80", name="tiny.cu", options=["--fmad=false"])
    monkeypatch.setattr(nvrtc, "identity", lambda source: "another NVRTC")
    cache.compile(TINY, "sm_80", name="tiny.cu")
    assert len(compiles) == 7


def test_files_are_those_of_the_packages_own_options(compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cache.compile(TINY, "sm_80", name="tiny.cu")
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--fmad=false"))
    cache.compile(TINY, "sm_80", name="tiny.cu")
    assert len(compiles) == 2


def test_files_are_those_of_one_library_and_its_headers(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An NVRTC of another version, a patched one of the same version, another toolkit's headers with an old one."""
    module, version, size = nvrtc._library()
    monkeypatch.setattr(nvrtc, "BUNDLES_HEADERS", (99, 1))
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: nvrtc.Compiled("", b"", ""))
    source = "#include <cuda_fp16.h>\n" + TINY
    for library in ((module, version, size), (module, (99, 0), size), (module, version, size + 1)):
        monkeypatch.setattr(nvrtc, "_library", lambda library=library: library)
        for headers in (tmp_path / "one", tmp_path / "other"):
            monkeypatch.setattr(nvrtc, "_header_folder", lambda headers=headers: headers)
            for _ in range(2):
                cache.compile(source, "sm_80", name="tiny.cu")
    assert len(compiles) == 6


def cut(data: bytes) -> bytes:
    return data[:-1]


def flip(data: bytes) -> bytes:
    return data[:-400] + bytes([data[-400] ^ 1]) + data[-399:]


@pytest.mark.parametrize("damage", [cut, flip, lambda data: b"", lambda data: data[:10], lambda data: data + b" "])
def test_a_damaged_file_is_compiled_again_and_mended(
    folder: Path, compiles: list[str], damage: Callable[[bytes], bytes]
) -> None:
    whole = cache.compile(TINY, "sm_80", name="tiny.cu")
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.compile(TINY, "sm_80", name="tiny.cu") == whole
    assert cache.compile(TINY, "sm_80", name="tiny.cu") == whole
    assert len(compiles) == 2


def test_a_file_under_another_kernels_name_is_not_taken_for_it(folder: Path, compiles: list[str]) -> None:
    cache.compile(TINY, "sm_80", name="tiny.cu")
    (first,) = folder.iterdir()
    cache.compile(TINY, "sm_90", name="tiny.cu")
    (second,) = set(folder.iterdir()) - {first}
    shutil.copy(first, second)
    assert ".target sm_90" in cache.compile(TINY, "sm_90", name="tiny.cu").ptx
    assert len(compiles) == 3


@pytest.mark.parametrize("source", [TINY, f"#include <cuda_fp16.h>\n{TINY}"])
def test_a_folder_that_cannot_be_written_is_said_once_and_done_without(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache.compile(source, "sm_80", name="tiny.cu")
    (record,) = caplog.records
    assert "compiled kernels are not kept" in record.getMessage() and "\n" not in record.getMessage()
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.compile(TINY, "sm_80", name="tiny.cu")
    assert list(folder.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_processes_compile_at_once(folder: Path) -> None:
    script = f"""
from mla_oracle.gpu import cache, sources
for arch in ("sm_80", "sm_90"):
    print(len(cache.compile("#include <cuda_fp16.h>\\n" + {TINY!r}, arch, name="tiny.cu").cubin))
"""
    started = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=120) for process in started]
    assert len({out for out, _ in answers}) == 1 and all(err == "" for _, err in answers), answers
    assert sorted(path.suffix for path in folder.iterdir() if path.is_file()) == [".kernel", ".kernel"]


def test_the_folder_is_where_the_user_or_the_system_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv(cache.VARIABLE, "/mine")
    assert cache.folder() == Path("/mine")
    monkeypatch.delenv(cache.VARIABLE)
    assert cache.folder() == Path("/caches/mla-oracle")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "mla-oracle"


def test_a_user_without_a_home_has_a_folder_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (cache.VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert cache.folder().is_dir()
