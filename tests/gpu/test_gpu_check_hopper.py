# SPDX-License-Identifier: Apache-2.0
"""The check's probes of sm_90a, wgmma and what waits for others: right words, and that a wrong one is told."""

import itertools
import re

import numpy as np
import pytest

from mla_oracle import dtypes
from mla_oracle.gpu import nvrtc, sources
from mla_oracle.gpu.arguments import signatures
from mla_oracle.gpu.check import accumulation, barriers, instructions, products
from mla_oracle.gpu.check.part import Bench
from mla_oracle.ptx import Interpreter

pytest.importorskip("cuda.bindings", reason="the extra cuda is not installed")

ARCH = "sm_90a"
NAMES = [instruction.name for instruction in barriers.INSTRUCTIONS]
PROBES = list(products.probes())


class Flipped(Interpreter):
    """One bit of everything that is downloaded is wrong."""

    def download(self, buffer):
        words = super().download(buffer).copy()
        words.reshape(-1)[1000] ^= 1
        return words


@pytest.mark.parametrize("part", [products, barriers])
def test_another_architecture_is_told_as_not_applicable(part):
    bench = Bench("ptx")
    bench.__dict__["machine"] = Interpreter("sm_90")
    (found,) = part.findings(bench)
    assert (found["ok"], found["reason"]) == (None, "not applicable, arch is sm_90, expected sm_90a")


def test_every_kernel_of_both_files_has_a_probe():
    held = {f"wgmma_m64n8k16_{dtype}_held" for dtype in ("f16", "bf16")}
    for file, known in ((barriers.FILE, set(NAMES)), (products.FILE, held | {probe.kernel for probe in PROBES})):
        assert set(signatures(nvrtc.compile(sources.flatten(file), ARCH, name=file).ptx)) == known


# --- what waits for others


def words_of(name, n=2048):
    """(a, b, c, d) [n] of the instruction on the interpreter."""
    instruction = barriers.INSTRUCTIONS[NAMES.index(name)]
    words = instruction.operands(np.random.default_rng(0), n)
    return *(word.astype(np.int64) for word in words), instructions.run(Interpreter(ARCH), instruction, words)


def some(b, n):
    return np.where(b % 4 == 0, n, 1 + b % n)


def ended_by(parity, phases):
    """Whether the phase of this parity, the current one or the one before it, has ended after so many."""
    return phases % 2 != parity


def over(b):
    """Whether no bytes are to come."""
    return (b % 4 == 0) | (b >> 13 == 0)


def run_of(b):
    """rows, from, to of each block [n / 128, 1]."""
    b = b.reshape(-1, 128)[:, :1]
    rows = 1 + b % 32
    return rows, (b >> 8) % (33 - rows), (b >> 16) % (33 - rows)


def moved(source, target, b):
    """[n] words: runs of rows of `source` over `target`."""
    (rows, first, to), place = run_of(b), np.arange(128)[None]
    inside = (place // 4 >= to) & (place // 4 < to + rows)
    taken = np.take_along_axis(source.reshape(-1, 128), np.where(inside, place + 4 * (first - to), 0), axis=1)
    return np.where(inside, taken, target.reshape(-1, 128)).reshape(-1)


def picked(rows, b):
    """Four words a lane: row b % 32 of its block, b the lane's first word."""
    chosen = b.reshape(-1, 32, 4)[:, :, :1] % 32
    return np.take_along_axis(rows.reshape(-1, 32, 4), chosen, axis=1).reshape(-1)


def halves(a, reduce):
    """[n]: of each half of a block of 128 threads."""
    return np.repeat(reduce(a.reshape(-1, 64)), 64)


def swapped(b, c):
    return np.take_along_axis(c.reshape(-1, 64), (np.arange(64) + b.reshape(-1, 64)) % 64, axis=1).reshape(-1)


def handed(b, c):
    """The second half of a block reads what the first one wrote."""
    b, c = b.reshape(-1, 128), c.reshape(-1, 128)
    return np.where(np.arange(128) < 64, c, np.take_along_axis(c, b % 64, axis=1)).reshape(-1)


def elected(a, b, c):
    lanes = np.repeat((b & (c | a))[::32], 32)
    first = np.log2(lanes & -lanes).astype(np.int64)
    lane = np.arange(len(b)) % 32
    return np.where(lanes >> lane & 1, first << 1 | (lane == first), 0)


def folded(a, b, c):
    d = 0 * a
    for j in range(20):
        d = (d * 31 + (((a ^ b * (2 * j + 1) & 0xFFFFFFFF) + c) & 0xFFFFFFFF)) & 0xFFFFFFFF
    return d


def expecting(a, b):
    n, none = 1 + a % 2, over(b)
    return n << 4 | (none & (n == 1)) | (n == 1) << 1 | 4


def no_complete(a, b):
    n = 2 + a % 999
    return n << 12 | (n - (1 + b % (n - 1))) << 2 | 2


def arrived(a, b):
    n = 1 + a % 1000
    return n << 1 | (some(b, n) == n)


def of_bytes(b, c):
    """Ended when it began; after a part of the bytes; after all: a part is less than all."""
    return np.where(over(b), 1, 4)


RIGHT = {
    "elect_sync": elected,
    "mbarrier_arrive_b64": lambda a, b, c: arrived(a, b),
    "mbarrier_arrive_noComplete_b64": lambda a, b, c: no_complete(a, b),
    "mbarrier_test_wait_parity_b64": lambda a, b, c: ended_by(0, a % 4) | ended_by(1, a % 4) << 1,
    "mbarrier_expect_tx_b64": lambda a, b, c: of_bytes(b, c),
    "mbarrier_arrive_expect_tx_b64": lambda a, b, c: expecting(a, b),
    "mbarrier_try_wait_b64": lambda a, b, c: some(b, 1 + a % 4) == 1 + a % 4,
    "mbarrier_try_wait_parity_b64": lambda a, b, c: ended_by(0, a % 4) | ended_by(1, a % 4) << 1,
    "cp_async_mbarrier_arrive_noinc_b64": lambda a, b, c: picked(a, b),
    "cp_async_mbarrier_arrive_b64": lambda a, b, c: picked(a, b),
    "cp_async_bulk_shared_cluster_global": lambda a, b, c: moved(a, c, b),
    "cp_async_bulk_global_shared_cta": lambda a, b, c: moved(a, c, b),
    "cp_async_bulk_global_shared_cta_wait_read": lambda a, b, c: moved(a, c, b),
    "bar_sync": lambda a, b, c: swapped(b, c),
    "bar_arrive": lambda a, b, c: handed(b, c),
    "bar_red_popc_u32": lambda a, b, c: halves(a < b, lambda x: x.sum(1)),
    "bar_red_and_pred": lambda a, b, c: halves(a % 64 != 0, lambda x: x.all(1)),
    "bar_red_or_pred": lambda a, b, c: halves(a % 64 == 0, lambda x: x.any(1)),
    "setmaxnreg_sync_aligned_u32": folded,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_probe_are_what_its_instruction_says(name):
    a, b, c, d = words_of(name)
    right = RIGHT[name](a, b, c).astype(np.int64)
    assert np.array_equal(d, right) and len(set(d.tolist())) > 1


def test_a_wrong_word_of_every_probe_is_told():
    found = list(instructions.conformance(Flipped(ARCH), Interpreter(ARCH), 2048, barriers.INSTRUCTIONS))
    assert len(found) == len(NAMES) and {(finding["ok"], finding["differ"]) for finding in found} == {(False, 1)}
    assert "mbarrier.test_wait.parity.b64" in {finding["name"] for finding in found}


def test_a_wait_that_never_ends_gives_up_and_makes_wrong_words():
    text = sources.flatten(barriers.FILE).replace("TRIES = 1 << 20", "TRIES = 4")
    assert "begin(barrier, WARP);" in text
    late = text.replace("begin(barrier, WARP);", "begin(barrier, WARP + 1);")
    machine, name = Interpreter(ARCH), "cp_async_mbarrier_arrive_noinc_b64"
    kernel = machine.load(nvrtc.compile(late, ARCH, name=barriers.FILE).ptx, name, file=barriers.FILE)
    machine.kernel = lambda file, name: kernel
    machine.checks = False  # its words are read while they are still copied
    (found,) = instructions.conformance(
        machine, Interpreter(ARCH), 2048, [barriers.INSTRUCTIONS[NAMES.index(name)]]
    )  # fmt: skip
    assert (found["ok"], found["differ"]) == (False, 2048)


# --- wgmma


def test_the_probes_cover_every_swizzle_major_and_source():
    for matrix in ("a", "b"):
        layouts = [getattr(probe, matrix) for probe in PROBES]
        covered = {(x.width, x.turned, bool(x.base)) for x in layouts if x is not None}
        swizzled = itertools.product((32, 64, 128), (False, True), (False, True))
        assert covered == {*swizzled, (16, False, False), (16, True, False)}
        assert (None in layouts) == (matrix == "a")
    assert {probe.n for probe in PROBES} == {8, 64, 256}
    text = sources.read(products.FILE)
    assert all(scales in text for scales in ('"1, 1"', '"-1, 1"', '"1, -1"', '"-1, -1"'))


def test_layouts_by_hand():
    # N = 16 unswizzled: 256 bytes from eight rows to eight rows, the other chunk along K behind both and a gap of 128
    assert products.Layout(16).descriptor(1024, 16) == 1024 >> 4 | (640 >> 4) << 16 | (256 >> 4) << 32
    # 128 columns MN-major in rows of 128: two parts of 64 columns, 2048 bytes apart, eight rows down 4096
    wanted = 384 >> 4 | (2048 >> 4) << 16 | (4096 >> 4) << 32 | 3 << 49 | 1 << 62
    assert products.Layout(128, True, 3).descriptor(0, 128) == wanted
    assert products.Layout(64).descriptor(0, 8) == 1 << 16 | (1024 >> 4) << 32 | 2 << 62


@pytest.mark.parametrize("kernel", ["wgmma_m64n64k16_f16_held", "wgmma_m64n8k16_bf16_held"])
def test_sums_of_a_probe_are_exact_and_right(kernel):
    probe = next(probe for probe in PROBES if probe.kernel == kernel and probe.b.width == 16)
    T, n, stored = 8, probe.n, dtypes.dtype(probe.dtype)
    image, words, c = products.draw(np.random.default_rng(0), probe, T)
    leading, stride, _ = probe.b.offsets(n)
    rows, k = np.arange(n)[:, None], np.arange(16)
    at = (k // 8 * leading + rows // 8 * stride + rows % 8 * 16) // 2 + k % 8
    b = image.view(stored)[:, at].astype(np.float64)
    thread, j = np.arange(128)[:, None], np.arange(8)
    a = np.zeros((T, 64, 16))
    a_rows, d_at = thread // 32 * 16 + thread % 32 // 4, np.arange(n // 2)
    a[:, a_rows + j // 2 % 2 * 8, j // 4 * 8 + thread % 4 * 2 + j % 2] = words.view(stored).astype(np.float64)
    products_of = a[:, :, None] * b[:, None]  # [T, 64, n, 16]
    row, column = a_rows + d_at // 2 % 2 * 8, d_at // 4 * 8 + thread % 4 * 2 + d_at % 2
    added = c.view(np.float32).astype(np.float64)
    for more, before in ((True, added), (False, 0 * added)):
        got = products.run(Interpreter(ARCH), probe, image, words, c, more).view(np.float32)
        assert np.array_equal(got, before + products_of.sum(-1)[:, row, column])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_order_of_a_probe_s_sums_is_exact(dtype):
    probe = next(probe for probe in PROBES if probe.kernel == f"wgmma_m64n8k16_{dtype}_held")
    image, a, c = products.draw(np.random.default_rng(0), probe, 500)
    a, b = (words.reshape(500, -1).view(dtypes.dtype(dtype)).astype(np.float64) for words in (a, image))
    c = c.reshape(500, -1).view(np.float32).astype(np.float64)
    units = [np.array([_last_bits(row) for row in x]) for x in (a, b, c)]
    assert np.array_equal(units[2], units[0] + units[1])
    most = 16 * np.abs(a).max(1) * np.abs(b).max(1) + np.abs(c).max(1)
    assert (most < np.ldexp(1.0, 24 + units[2])).all()
    assert units[2].min() >= -126 and units[2].max() + 24 <= 127 and len(set(units[2])) > 20
    assert units[0].min() == min(low for low, _ in products.WHOLE[dtype].values())  # subnormal numbers


def _last_bits(x):
    """The power of 2 that all of x are whole multiples of."""
    fractions, powers = np.frexp(x[x != 0])
    whole = (fractions * 2.0**53).astype(np.int64)
    return int((powers - 53 + np.log2(whole & -whole)).min())


def test_the_two_machines_agree_and_a_wrong_element_is_told():
    for probe in PROBES:
        assert products.judge(Interpreter(ARCH), Interpreter(ARCH), probe, 1)["ok"], str(probe)
    found = products.judge(Flipped(ARCH), Interpreter(ARCH), PROBES[0], 1)
    assert (found["ok"], found["differ"]) == (False, 2)
    bits = "0x[0-9a-f]{8}"
    # word 1000 of 128 x 32: thread 31, register 8, that is row 7 and column 2 * 8 + 3 * 2
    reason = rf"2 of 8192 differ, first \[7, 22\] with d added: {bits}, expected {bits}"
    assert re.fullmatch(reason, found["reason"])


@pytest.mark.parametrize("change", ["width", "turned", "base", "scale"])
def test_a_machine_that_reads_otherwise_is_told(change):
    machine = Interpreter(ARCH)
    launch = machine.launch

    def other(kernel, grid, block, smem, image, size, left, right, *rest):
        if change == "width":
            right = np.uint64(int(right) ^ 3 << 62)
        elif change == "base":
            right = np.uint64(int(right) & ~(7 << 49))
        launch(kernel, grid, block, smem, image, size, left, right, *rest)

    machine.launch = other
    wanted = {"base": lambda probe: probe.b.base, "width": lambda probe: probe.b.width == 128}
    probe = next(probe for probe in PROBES if wanted.get(change, lambda probe: True)(probe))
    if change in ("turned", "scale"):
        text = sources.flatten(products.FILE)
        one = {"turned": ('bf16, "1, 1", "0, 0"', 'bf16, "1, 1", "0, 1"'), "scale": ('bf16, "1, 1"', 'bf16, "-1, 1"')}
        assert one[change][0] in text
        ptx = nvrtc.compile(text.replace(*one[change]), ARCH, name=products.FILE).ptx
        machine.kernel = lambda file, name: machine.load(ptx, name, file=file)
    assert not products.judge(machine, Interpreter(ARCH), probe, 1)["ok"]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_product_of_wgmma_made_for_its_adder_is_mma_s(dtype):
    a, b, c = accumulation.samples(dtype, 4)
    machine = Interpreter(ARCH)
    both = [multiply(machine, dtype, a, b, c) for multiply in (accumulation.multiply_warp, products.multiply_group)]
    expected = accumulation.emulate(a, b, c, 1, None, "value", False)
    assert np.array_equal(both[0], expected) and np.array_equal(both[1], expected)
