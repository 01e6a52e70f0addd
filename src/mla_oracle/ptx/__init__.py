# SPDX-License-Identifier: Apache-2.0
"""Runs compiled CUDA kernels (PTX) without a GPU, and reports what they do wrong.

Interpreter(arch, checks, threads)   a gpu.machine.Machine
Fault                                what it raises: one line with the kernel's source line, block and thread
"""

from mla_oracle.ptx.faults import Fault
from mla_oracle.ptx.interpreter import Interpreter

__all__ = ["Fault", "Interpreter"]
