# SPDX-License-Identifier: Apache-2.0
"""wgmma of sm_90a on the machine and on the interpreter: a probe is a kernel of cuda/check/products.cu and a layout of
its matrices in shared memory.

    layouts   all of shared memory is random numbers, which a descriptor makes a matrix of; they are such that every sum
              is exact, in whatever order, so that every element must be right, bit for bit
    adding    see accumulation.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mla_oracle import dtypes
from mla_oracle.arrays import Array
from mla_oracle.gpu import paged_wgmma
from mla_oracle.gpu.check import accumulation
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Finding
from mla_oracle.gpu.machine import Machine

FILE = "check/products.cu"
ROWS, THREADS = 64, 128  # rows of a, threads of a warpgroup
FEW, MANY = 2, 32  # products of a probe, as many again with nothing added
MODES = {16: 0, 128: 1, 64: 2, 32: 3}  # bytes of a row that is swizzled, 16: none -> bits 62 and 63 of a descriptor
# dtype: the bits of whole numbers, the least and the largest power of 2 that they are times; bf16 has 8 bits alone.
WHOLE = {"f16": {8: (-24, 8), 11: (-24, 5)}, "bf16": {8: (-133, 119)}}
ADDED = 20  # bits of what is added


@dataclass(frozen=True)
class Layout:
    """A matrix of 16 along K in shared memory, as PTX ISA 9.7.15.5.1 has it: rows of `width` bytes, K-major or not
    (`turned`), in a pattern of eight that begins `base` times 128 bytes after a place where such begin. Between the
    patterns there are gaps."""

    width: int
    turned: bool = False
    base: int = 0

    def offsets(self, rows: int) -> tuple[int, int, int]:
        """(leading, stride, all) bytes of `rows` along M or N."""
        pattern = 8 * self.width
        if self.width == 16:
            far = 2 * pattern * (rows // 8) + pattern
            return far, 2 * pattern, 2 * far
        if self.turned:
            stride = 2 * pattern * -(-2 * rows // self.width)
            return 2 * pattern, stride, 2 * stride
        return 16, 2 * pattern, 2 * pattern * (rows // 8)

    def size(self, rows: int) -> int:
        """Bytes up to where another pattern may begin."""
        return -(-(self.offsets(rows)[2] + 128 * self.base) // 1024) * 1024

    def descriptor(self, first: int, rows: int) -> np.uint64:
        leading, stride, _ = self.offsets(rows)
        start = first + 128 * self.base
        fields = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | self.base << 49 | MODES[self.width] << 62
        return np.uint64(fields)

    def __str__(self) -> str:
        base = f" at base offset {self.base}" if self.base else ""
        return f"{'MN' if self.turned else 'K'}-major in rows of {self.width}{base}"


@dataclass(frozen=True)
class Probe:
    """`a`: None where the kernel takes it from registers."""

    kernel: str
    n: int
    dtype: str
    a: Layout | None
    b: Layout

    def __str__(self) -> str:
        a = "in registers" if self.a is None else str(self.a)
        return f"wgmma.m64n{self.n}k16.{self.dtype} a {a}, b {self.b}"


KERNELS = (  # name, N, dtype, whether a and b are turned; None: a is in registers
    ("wgmma_m64n64k16_bf16_stored", 64, "bf16", False, False),
    ("wgmma_m64n64k16_f16_stored_turned_both", 64, "f16", True, True),
    ("wgmma_m64n256k16_bf16_stored_turned_b", 256, "bf16", False, True),
    ("wgmma_m64n8k16_f16_stored_turned_a", 8, "f16", True, False),
    ("wgmma_m64n8k16_f16_held", 8, "f16", None, False),
    ("wgmma_m64n8k16_bf16_held", 8, "bf16", None, False),
    ("wgmma_m64n64k16_f16_held", 64, "f16", None, False),
    ("wgmma_m64n256k16_f16_held_turned_b", 256, "f16", None, True),
)
WIDTHS = ((128, 128), (64, 32), (32, 16), (16, 64))  # of a and b
BASES = ((128, 3), (64, 1), (32, 1))  # a width, and a base offset of both


def probes() -> Iterator[Probe]:
    for kernel, n, dtype, turned_a, turned_b in KERNELS:
        layouts = [*((a, b, 0) for a, b in WIDTHS), *((width, width, base) for width, base in BASES)]
        for width_a, width_b, base in layouts:
            a = None if turned_a is None else Layout(width_a, turned_a, base)
            yield Probe(kernel, n, dtype, a, Layout(width_b, turned_b, base))


def findings(bench: Bench) -> Iterator[Finding]:
    from mla_oracle.ptx import Interpreter

    machine = bench.machine
    if reason := paged_wgmma.not_for(machine.arch):
        yield {"name": "wgmma", "ok": None, "reason": f"not applicable, {reason}"}
        return
    reference = Interpreter(machine.arch)
    for probe in probes():
        yield judge(machine, reference, probe, FEW if bench.small else MANY)
    yield from accumulation.findings(machine, reference, "wgmma.m64n8k16", multiply_group)


def judge(machine: Machine, reference: Machine, probe: Probe, T: int) -> Finding:
    """`T` products with something added, and as many with any bits where it would be, on both machines."""
    image, a, c = draw(np.random.default_rng(0), probe, T)
    any_bits = np.random.default_rng(1).integers(0, 1 << 32, c.shape, np.uint32)
    runs = ((True, c), (False, any_bits))
    got, expected = (
        np.concatenate([run(where, probe, image, a, x, more) for more, x in runs]) for where in (machine, reference)
    )
    differ = got != expected
    found: Finding = {"name": str(probe), "ok": not differ.any(), "n": int(got.size), "differ": int(differ.sum())}
    if differ.any():
        product, thread, j = np.unravel_index(int(np.argmax(differ)), got.shape)
        row, column = thread // 32 * 16 + thread % 32 // 4 + j // 2 % 2 * 8, j // 4 * 8 + thread % 4 * 2 + j % 2
        bits = f"{got[product, thread, j]:#010x}, expected {expected[product, thread, j]:#010x}"
        added = "with" if product < T else "without"
        found["reason"] = f"{found['differ']} of {got.size} differ, first [{row}, {column}] {added} d added: {bits}"
    return found


def draw(rng: np.random.Generator, probe: Probe, T: int) -> tuple[Array, Array, Array]:
    """image [T, words] u32, b's part before a's; a [T, 128, 4] u32 for registers; c [T, 128, n / 2] u32.

    The numbers of a product are whole ones times one power of 2 for each matrix: the sums stay normal, below 2^24 times
    the last bit.
    """
    kinds, bits = WHOLE[probe.dtype], [int(x) for x in rng.permutation(list(WHOLE[probe.dtype]))]
    low, high = kinds[bits[0]]
    power_a = rng.integers(low, high + 1, T)
    low, high = kinds[bits[-1]]
    power_b = rng.integers(np.maximum(low, -126 - power_a), np.minimum(high, 102 - power_a) + 1)

    def numbers(n: int, bits: int, power: Array, dtype: str = probe.dtype) -> Array:
        """[T, words] u32 of n numbers."""
        whole = rng.integers(-(1 << bits - 1), 1 << bits - 1, (T, n)).astype(np.float64)
        return np.ldexp(whole, power[:, None]).astype(dtypes.dtype(dtype)).view(np.uint32)

    parts = [numbers(probe.b.size(probe.n) // 2, bits[-1], power_b)]
    if probe.a is not None:
        parts.append(numbers(probe.a.size(ROWS) // 2, bits[0], power_a))
    a = numbers(THREADS * 8, bits[0], power_a).reshape(T, THREADS, 4)
    c = numbers(THREADS * probe.n // 2, ADDED, power_a + power_b, "f32").reshape(T, THREADS, probe.n // 2)
    return np.concatenate(parts, axis=1), a, c


def run(machine: Machine, probe: Probe, image: Array, a: Array, c: Array, more: bool) -> Array:
    """d [T, 128, n / 2] u32."""
    right, left = probe.b.descriptor(0, probe.n), np.uint64(0)
    if probe.a is not None:
        left = probe.a.descriptor(probe.b.size(probe.n), ROWS)
    return launch(machine, probe.kernel, image, left, right, a, c, more)


def launch(
    machine: Machine, kernel: str, image: Array, left: np.uint64, right: np.uint64, a: Array, c: Array, more: bool
) -> Array:
    d = machine.empty(c.shape, np.uint32)
    words = [machine.upload(np.ascontiguousarray(x)) for x in (image, a, c)]
    size = np.int32(image.shape[1])
    machine.launch(
        machine.kernel(FILE, kernel), (len(c), 1, 1), (THREADS, 1, 1), 4 * int(size),
        words[0], size, left, right, np.int32(more), *words[1:], d,
    )  # fmt: skip
    return machine.download(d)


def multiply_group(machine: Machine, dtype: str, a: Array, b: Array, c: Array) -> Array:
    """An accumulation.Multiply of wgmma, in the first warp of a warpgroup; it holds a, c and d as mma's does."""
    T = len(a)
    chunks = b.astype(dtypes.dtype(dtype)).transpose(0, 2, 1).reshape(T, 8, 2, 8).transpose(0, 2, 1, 3)
    image = np.ascontiguousarray(chunks).reshape(T, 128).view(np.uint32)  # [K / 8][n][8], rows of 16 bytes
    right = np.uint64(128 >> 4 << 16 | 128 >> 4 << 32)
    held, added = np.zeros((2, T, THREADS, 4), np.uint32)
    held[:, :32], added[:, :32] = accumulation.factor_words(a, dtype), accumulation.sum_words(c)
    d = launch(machine, f"wgmma_m64n8k16_{dtype}_held", image, np.uint64(0), right, held, added, True)
    return accumulation.sums(np.ascontiguousarray(d[:, :32]))
