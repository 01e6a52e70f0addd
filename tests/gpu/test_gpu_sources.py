# SPDX-License-Identifier: Apache-2.0
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_oracle.errors import InputError
from mla_oracle.gpu import sources

FILES = {
    "a.cu": '#include <cuda_fp16.h>\n#include "b.cuh"\n  #  include "c.cuh"\nint last;\n',
    "b.cuh": '#pragma once\n#include "c.cuh"\nint b;',
    "c.cuh": "int c;\n",
}


def test_a_header_is_pasted_in_once_and_every_line_keeps_its_number() -> None:
    flat = sources.flatten("a.cu", FILES.__getitem__)
    where = {}
    file, number = "", 0
    for line in flat.splitlines():
        if match := re.fullmatch(r'#line (\d+) "cuda/(.*)"', line):
            number, file = int(match[1]), match[2]
        else:
            if line:
                assert line not in where
                where[line] = f"{file}:{number}"
            number += 1
    assert where == {
        "#include <cuda_fp16.h>": "a.cu:1", "int b;": "b.cuh:3", "int c;": "c.cuh:1", "int last;": "a.cu:4",
    }  # fmt: skip


def test_every_kernel_file_is_flat() -> None:
    assert "paged.cu" in sources.names()
    for name in sources.names():
        assert '#include "' not in sources.flatten(name)


@pytest.mark.parametrize("name", ["nothing.cu", ".", "../gpu"])
def test_an_unknown_file_is_an_input_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(InputError, match=rf"kernel file is '{re.escape(name)}', expected one of .*paged\.cu"):
        sources.flatten(name)


def test_a_header_that_is_not_there_is_an_input_error() -> None:
    def read(name: str) -> str:
        return '#include "gone.cuh"\n' if name == "a.cu" else sources.read(name)

    with pytest.raises(InputError, match=r"kernel file is 'gone\.cuh'"):
        sources.flatten("a.cu", read)


def test_the_folder_of_kernels_does_not_hide_the_package_cuda() -> None:
    pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")
    root = Path(__file__).parents[2]
    assert not (root / "cuda" / "__init__.py").exists()
    done = subprocess.run([sys.executable, "-c", "import cuda.bindings"], cwd=root, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_and_every_module_of_gpu_imports_nothing_of_cuda() -> None:
    script = """
import pkgutil, sys, importlib
before = set(sys.modules)  # a .pth file of the bindings may have been at work
import mla_oracle.gpu
for module in pkgutil.iter_modules(mla_oracle.gpu.__path__):
    importlib.import_module(f"mla_oracle.gpu.{module.name}")
print(sorted(name for name in set(sys.modules) - before if name == "cuda" or name.startswith("cuda.")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
