# SPDX-License-Identifier: Apache-2.0
"""Builds what the tests of the C++ headers put their questions through.

`engine` is engine.cpp as an engine would build it. `probe` is probe.cpp and engine.cpp in one program, under the
address and undefined-behaviour sanitizers: a crash of ours is an exit code no test expects.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes import Fake, Run

from mla_oracle.commands import include_dir

CPP = Path(__file__).parent
WARNINGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="session")
def compiler() -> str:
    found = [c for c in (os.environ.get("CXX"), "c++", "g++") if c and shutil.which(c)]
    if not found:
        pytest.skip("no C++ compiler")
    return found[0]


@pytest.fixture(scope="session")
def include() -> Path:
    return Path(include_dir())


@pytest.fixture(scope="session")
def engine(compiler: str, include: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("engine") / "engine"
    subprocess.run([compiler, *WARNINGS, "-O2", f"-I{include}", CPP / "engine.cpp", "-o", program], check=True)
    return program


@pytest.fixture(scope="session")
def probe(compiler: str, include: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("probe")
    build = [compiler, *WARNINGS, *SANITIZERS, f"-I{include}"]
    subprocess.run([*build, "-Dmain=engine_main", "-c", CPP / "engine.cpp", "-o", folder / "engine.o"], check=True)
    subprocess.run([*build, CPP / "probe.cpp", folder / "engine.o", "-pthread", "-o", folder / "probe"], check=True)

    def run(*arguments: object, code: int = 0, **kwargs) -> subprocess.CompletedProcess[str]:
        words = [folder / "probe", *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", **kwargs)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    def script(body: str, name: str = "fake oracle") -> Path:
        path = tmp_path / name
        path.write_text(body if body.startswith("#!") else f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return script
