# SPDX-License-Identifier: Apache-2.0
"""Every instruction that matters to the kernels, on the machine and on the interpreter, with the same bits.

    exact     bit for bit; where both are NaN, other bits of it are counted and let pass
    near      the approximations: a table of differences in ulp, and beyond what the ISA promises it is a difference
    mma       products: see accumulation.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mla_oracle.arrays import Array
from mla_oracle.gpu.check import accumulation
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Finding
from mla_oracle.gpu.check.table import INSTRUCTIONS, Instruction
from mla_oracle.gpu.machine import Machine

MANY, FEW = 1 << 16, 1 << 11  # words; 1 << 16 of halves are all of them
HISTOGRAM = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3 to 4", 3, 4), ("5 to 16", 5, 16), ("more", 17, 1 << 62))
DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}


def findings(bench: Bench) -> Iterator[Finding]:
    from mla_oracle.ptx import Interpreter

    reference = Interpreter(bench.machine.arch)
    yield from conformance(bench.machine, reference, FEW if bench.small else MANY)
    yield from accumulation.findings(bench.machine, reference, "mma.m16n8k16", accumulation.multiply_warp)


def conformance(
    machine: Machine, reference: Machine, n: int, instructions: Sequence[Instruction] = INSTRUCTIONS
) -> Iterator[Finding]:
    """A finding for each instruction that the architecture has, on `n` words."""
    architecture = int("".join(filter(str.isdigit, machine.arch)))
    for instruction in instructions:
        if instruction.arch <= architecture:
            words = instruction.operands(np.random.default_rng(0), n)
            got, expected = (run(where, instruction, words) for where in (machine, reference))
            yield compare(instruction, words, got, expected)


def run(machine: Machine, instruction: Instruction, words: tuple[Array, ...]) -> Array:
    """The words that the instruction makes of a, b and c [n] u32, n a multiple of a block."""
    n = len(words[0])
    out = machine.empty((n,), np.uint32)
    kernel = machine.kernel(instruction.file, instruction.name)
    grid = (n // (instruction.threads * instruction.words), 1, 1)
    machine.launch(kernel, grid, (instruction.threads, 1, 1), 0, *map(machine.upload, words), out)
    return machine.download(out)


def compare(instruction: Instruction, words: tuple[Array, ...], got: Array, expected: Array) -> Finding:
    """The finding, with the operands of the first or the worst difference."""
    numbers = [_numbers(instruction.result, bits) for bits in (got, expected)]
    both_nan = np.isnan(numbers[0]) & np.isnan(numbers[1])
    parts = [_parts(instruction.result, bits) for bits in (got, expected)]
    differ = (parts[0] != parts[1]) & ~both_nan
    finding: Finding = {
        "name": str(instruction),
        "ok": not differ.any(),
        "n": int(differ.size),
        "differ": int(differ.sum()),
        "other_nan": int(((parts[0] != parts[1]) & both_nan).sum()),
    }
    wrong = differ
    if instruction.allowed is not None:
        ulp = np.where(differ, np.abs(_order(parts[0]) - _order(parts[1])), 0)
        a, b = (_numbers(instruction.result, word) for word in words[:2])
        with np.errstate(all="ignore"):
            allowed = instruction.allowed(a, b, np.where(np.isfinite(numbers[1]), numbers[1], 0))
            wrong = differ & ~(np.abs(numbers[0] - numbers[1]) <= allowed)
        free = np.isinf(allowed)
        wrong &= ~free
        counted = ulp[~free]
        finding |= {"ok": not wrong.any(), "ulp": _histogram(counted), "max_ulp": int(counted.max(initial=0))}
        right = f"{int((counted == 0).sum())} of {counted.size} as rounded once"
        finding["told"] = f"{finding['max_ulp']} ulp at most, {right}"
    if wrong.any():
        first = int(np.argmax(wrong)) * len(words[0]) // wrong.size
        shown = [f"{int(word[first]):#010x}" for word in (*words, got, expected)]
        bits = f"first of {', '.join(shown[:3])}: {shown[3]}, expected {shown[4]}"
        finding["reason"] = f"{int(wrong.sum())} of {wrong.size} differ, {bits}"
    return finding


def _parts(result: str, words: Array) -> Array:
    """The numbers of the words as integers: the words themselves, or their halves."""
    return words.view(np.uint16) if result in ("f16", "bf16") else words


def _numbers(result: str, words: Array) -> Array:
    """The same as f64; bits are numbers that are no NaN."""
    parts = _parts(result, words)
    if result == "bf16":
        parts, result = parts.astype(np.uint32) << 16, "f32"
    with np.errstate(invalid="ignore"):
        return (parts.view(DTYPES[result]) if result else parts).astype(np.float64)


def _order(parts: Array) -> Array:
    """Integers in the order of the numbers, a step for each number."""
    top = 8 * parts.itemsize - 1
    size = (parts & ((1 << top) - 1)).astype(np.int64)
    return np.where(parts >> top, -size, size)


def _histogram(ulp: Array) -> dict[str, int]:
    counts = {name: int(((ulp >= low) & (ulp <= high)).sum()) for name, low, high in HISTOGRAM}
    return {name: count for name, count in counts.items() if count}
