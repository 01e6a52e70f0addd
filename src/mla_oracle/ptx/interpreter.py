# SPDX-License-Identifier: Apache-2.0
"""Interpreter: a gpu.machine.Machine that runs NVRTC's PTX on the CPU, and checks what a GPU hides.

    machine = Interpreter("sm_90")
    kernel = machine.kernel("paged.cu", "paged_decode_bf16")
    machine.launch(kernel, (8, 1, 1), (256, 1, 1), smem, x, y, np.int32(n))

Blocks run on all cores; what they compute and which fault is reported do not depend on how many. Tensor-core
products are exact and summed in f32 in ascending order; approximate functions are rounded correctly.
"""

from __future__ import annotations

import importlib
import platform
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mla_oracle.arrays import Array
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.fast import threads as pool
from mla_oracle.gpu.arguments import Argument, check_shape, dynamic_smem, pack
from mla_oracle.gpu.layout import most_smem
from mla_oracle.gpu.machine import Buffer, Dim, Kernel
from mla_oracle.ptx.assembler import assemble
from mla_oracle.ptx.faults import Fault, Found, describe, position
from mla_oracle.ptx.memory import Allocation, Memory
from mla_oracle.ptx.parser import parse
from mla_oracle.ptx.program import Program
from mla_oracle.ptx.syntax import Module

AT_ONCE = 2  # as in _machine.pyx


@dataclass(eq=False)
class InterpretedKernel:
    """A kernel of one Interpreter; `warnings` collects what its launches met that is no fault."""

    file: str
    name: str
    module: Module
    program: Program
    variables: dict[str, Allocation]
    declared_smem: int | None  # the most dynamic shared memory it may be given, as DYNAMIC_SMEM says
    warnings: list[str] = field(default_factory=list)

    @property
    def widths(self) -> list[int]:
        """The bytes of each parameter."""
        return [size for _, size in self.program.params]

    def place(self, instruction: int) -> str:
        """Where an instruction comes from: cuda/x.cu:LINE, PTX line N, and where that was inlined."""
        source = self.program.sources[instruction]
        line = f"PTX line {self.program.code['line'][instruction]}"
        if not source.line:
            return f"{self.file}, {line}"
        caller = ""
        if source.caller:
            file = self.module.files.get(source.caller[0], self.file) if source.caller[0] != source.file else ""
            caller = f" (inlined at {file}:{source.caller[1]})"
        return f"{self.module.files.get(source.file, self.file)}:{source.line}{caller}, {line}"


class Interpreter:
    """`checks`: look for everything but bounds, too; `threads`: as in fast.threads.count; `patience`: how many
    instructions a block may run before it counts as a loop that never ends."""

    def __init__(
        self, arch: str = "sm_80", checks: bool = True, threads: int | None = None, *, patience: int = 1 << 26
    ):
        self.arch, self.checks, self.threads, self.patience = arch, checks, threads, patience
        self.memory = Memory()
        self._texts: dict[tuple[object, ...], str] = {}
        self._modules: dict[str, tuple[Module, dict[str, Allocation]]] = {}
        self._kernels: dict[tuple[str, str], InterpretedKernel] = {}

    @property
    def warnings(self) -> list[str]:
        """What the launches of all its kernels met that is no fault."""
        return [warning for kernel in self._kernels.values() for warning in kernel.warnings]

    def upload(self, array: Array) -> Buffer:
        return self.memory.upload(array)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
        return self.memory.empty(shape, dtype)

    def download(self, buffer: Buffer) -> Array:
        return self.memory.download(buffer)

    def kernel(self, file: str, name: str, **defines: int) -> InterpretedKernel:
        """The kernel `name` of cuda/`file`, compiled once with these macros and kept."""
        from mla_oracle.gpu import cache, sources

        text = (file, *defines.items())
        if text not in self._texts:
            options = [f"-D{macro}={value}" for macro, value in defines.items()]
            self._texts[text] = cache.compile(sources.flatten(file), self.arch, name=file, options=options).ptx
        return self.load(self._texts[text], name, file=file)

    def load(self, ptx: str, name: str, *, file: str = "") -> InterpretedKernel:
        """The kernel `name` of a PTX text. `file` is what messages call its source where .loc does not say."""
        if ptx not in self._modules:
            module = parse(ptx)
            variables = {}
            for variable in module.memory:
                host = np.frombuffer(bytearray(variable.initial or bytes(variable.size)), np.uint8)
                variables[variable.name] = self.memory.allocate(host, None, read_only=variable.constant)
            self._modules[ptx] = module, variables
        module, variables = self._modules[ptx]
        if (ptx, name) not in self._kernels:
            kernel = InterpretedKernel(
                file or "kernel", name, module, assemble(module, name), variables, dynamic_smem(ptx).get(name)
            )
            self._kernels[ptx, name] = kernel
        return self._kernels[ptx, name]

    def launch(self, kernel: Kernel, grid: Dim, block: Dim, smem: int, *args: Argument) -> None:
        """Run `kernel`; see `Machine.launch`. Raises Fault for the first thing found wrong in the lowest block,
        InputError for a launch that could not be."""
        if not isinstance(kernel, InterpretedKernel):
            raise InputError(f"{kernel.name} is another machine's kernel, expected one of this interpreter's")
        program = kernel.program
        self._check(kernel, grid, block, smem)
        values = bytearray(sum(program.params[-1]) if program.params else 0)
        for data, (offset, size) in zip(pack(kernel.name, kernel.widths, args), program.params, strict=True):
            values[offset : offset + size] = data
        shared_size = program.static_shared + smem
        table, kept = self.memory.table()
        n_threads = pool.count(self.threads)
        shape = [*grid, *block, program.rows, program.constant_rows, program.granule, int(self.checks)]
        shape += [int(program.asynchronous)]
        constants = self._constants(kernel, values, grid, block, smem)
        state = np.zeros(2, np.int64)
        results: list[tuple[Any, set[int]]] = []
        machine = _machine()

        def work(kept: object = kept) -> None:  # a thread that an interrupt leaves behind still has its memory
            results.append(
                machine.run(
                    program.code.view(np.uint8), program.targets, constants, table.view(np.uint8),
                    np.array(shape, np.int32), self.patience, shared_size, program.local, state,
                )
            )  # fmt: skip

        try:
            pool.run(work, min(n_threads, grid[0] * grid[1] * grid[2]))
        except BaseException:
            state[1] = AT_ONCE
            raise
        for instruction in sorted(set().union(*(warned for _, warned in results))):
            text = f"some threads had exited before a barrier that others reach, {kernel.place(instruction)}"
            if text not in kernel.warnings:
                kernel.warnings.append(text)
        found = [Found(*fault) for fault, _ in results if fault]
        if found:
            raise self._fault(kernel, min(found), grid, block, shared_size)

    def _fault(self, kernel: InterpretedKernel, found: Found, grid: Dim, block: Dim, shared_size: int) -> Fault:
        opcode = kernel.program.opcodes[found.instruction]
        what = describe(found, opcode, block, self.memory, shared_size, kernel.place)
        where, thread = position(found.block, grid), position(found.lane, block)
        return Fault(f"{what}, {kernel.place(found.instruction)}, block {where}, thread {thread}", what)

    def _check(self, kernel: InterpretedKernel, grid: Dim, block: Dim, smem: int) -> None:
        check_shape(kernel.name, grid, block, smem, kernel.declared_smem)
        n_threads, limit = block[0] * block[1] * block[2], kernel.program.max_threads
        if limit and n_threads > limit:
            raise InputError(f"block of {kernel.name} is {block}, expected the {limit} threads it declares or fewer")
        most = most_smem(self.arch)
        if kernel.program.static_shared + smem > most:
            needs = f"{kernel.program.static_shared} + {smem} bytes of shared memory"
            raise UnsupportedError(f"{kernel.name} needs {needs}, {self.arch} has {most}")

    def _constants(self, kernel: InterpretedKernel, values: bytearray, grid: Dim, block: Dim, smem: int) -> Array:
        """[n][4] of row, bytes per lane, special register or -1, value."""
        launched = {f"%ntid.{axis}": size for axis, size in zip("xyz", block, strict=True)}
        launched |= {f"%nctaid.{axis}": size for axis, size in zip("xyz", grid, strict=True)}
        launched["%nwarpid"] = -(-block[0] * block[1] * block[2] // 32)
        launched["%dynamic_smem_size"], launched["%total_smem_size"] = smem, smem + kernel.program.static_shared
        rows = []
        for constant, row in kernel.program.constants.items():
            special, value = -1, 0
            match constant.kind:
                case "value":
                    value = constant.value
                case "special":
                    special = constant.value
                case "param":
                    value = int.from_bytes(values[constant.value : constant.value + constant.size], "little")
                case "launch":
                    value = launched.get(constant.value, 0)
                case "dynamic":
                    value = kernel.program.static_shared
                case "memory":
                    value = kernel.variables[constant.value].low
            rows.append((row, constant.width, special, value - (1 << 64) if value >= 1 << 63 else value))
        return np.array(rows, np.int64).reshape(-1, 4)


@lru_cache(maxsize=1)
def _machine() -> ModuleType:
    """The build for this processor."""
    name = "_machine"
    if platform.machine() in ("x86_64", "AMD64"):
        from mla_oracle.fast import isa

        name = "_machine_v3" if "v3" in isa.available() else name
    return importlib.import_module(f"mla_oracle.ptx.{name}")
