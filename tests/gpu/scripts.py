# SPDX-License-Identifier: Apache-2.0
"""Scripts that ran on the fake driver."""

import subprocess
from collections.abc import Callable
from pathlib import Path

# How scripts begin: `load` compiles one of two kernels that do nothing, `refused` prints an error of ours.
HEAD = """
import ml_dtypes
import numpy as np
from mla_oracle.errors import OracleError
from mla_oracle.gpu import foreign, nvrtc
from mla_oracle.gpu.device import Device
from mla_oracle.gpu.machine import Buffer
from producers import Dlpack, Interface

SOURCE = '''extern "C" __global__ void tiny(float *x, const void *p, int n, long long s, float f, double d) {}
            extern "C" __global__ void none() {}'''

def load(device, name="tiny"):
    return device.load(nvrtc.compile(SOURCE, device.arch, name="tiny.cu"), "tiny.cu", name)

def refused(call):
    try:
        print("accepted:", call())
    except OracleError as error:
        print(type(error).__name__, error)
"""

# What runs a script, see `on_fake` in conftest.py.
Script = Callable[..., "Ran"]


class Ran:
    """What a script printed, and what it asked of the driver."""

    def __init__(self, done: subprocess.CompletedProcess[str], log: Path) -> None:
        self.returncode = done.returncode
        self.stdout = done.stdout
        self.stderr = done.stderr
        self.calls = [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def named(self, name: str) -> list[list[str]]:
        """The calls of one function, without its name."""
        return [call[1:] for call in self.calls if call[0] == name]
