# SPDX-License-Identifier: Apache-2.0
"""A driver without a GPU: fake_driver/fake_cuda.c, built with the system's compiler and found as libcuda.so.1.

Whatever calls a driver runs in a process of its own, with a time-out: a hang is a failure.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import Ran, Script

HERE = Path(__file__).parent

@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests of one run share."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    source = HERE / "fake_driver" / "fake_cuda.c"
    subprocess.run([compiler, *flags, "-o", folder / "libcuda.so.1", source], check=True)
    return folder


@pytest.fixture
def on_fake(fake_driver: Path, compiled_kernels: Path, tmp_path: Path) -> Script:
    """Run a script with the fake driver: `on_fake(script, FAIL="cuInit=100", DEVICES=2)`; see fake_cuda.c."""
    log = tmp_path / "calls"

    def run(script: str, **variables: object) -> Ran:
        log.unlink(missing_ok=True)
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(fake_driver),
            "PYTHONPATH": str(HERE),
            "MLA_ORACLE_CACHE": str(compiled_kernels),
            "FAKE_CUDA_LOG": str(log),
            **{f"FAKE_CUDA_{name}": str(value) for name, value in variables.items()},
        }
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
        )
        return Ran(done, log)

    return run
