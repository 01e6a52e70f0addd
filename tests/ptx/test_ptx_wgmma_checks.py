# SPDX-License-Identifier: Apache-2.0
"""What must not happen while a wgmma is in flight, before it begins, and to the shared memory it reads."""

import numpy as np
import pytest
from wgmma import COMMIT, FENCE, WAIT, descriptor, instruction, lay, run

from mla_oracle.ptx import Fault, Interpreter

RNG = np.random.default_rng(0)
A, B = (RNG.integers(-8, 9, shape).astype(np.float16) for shape in ((64, 16), (8, 16)))
IMAGE = np.zeros(4096, np.uint8)
lay(IMAGE, B, start=0, leading=16, stride=1024, width=128, turned=0)
PLACE = descriptor(0, 16, 1024, 128)
PRODUCT = A.astype(np.float32) @ B.astype(np.float32).T
MULTIPLY = instruction(8, "f16", None, PLACE)  # f0 .. f3
SECOND = MULTIPLY.replace("{f0, f1, f2, f3}", "{f4, f5, f6, f7}")
LATER = WAIT.replace(" 0;", " 1;")
FRESH = "mov.f32 f4, f0; mov.f32 f5, f1; mov.f32 f6, f2; mov.f32 f7, f3;"
USE = "add.f32 f0, f0, f0;"


def launch(body, **options):
    return run(body, IMAGE, 8, a=A, **options)


CLEAN = {
    "one after the other on the same registers": FENCE + MULTIPLY + MULTIPLY + COMMIT + MULTIPLY + COMMIT + WAIT + USE,
    "a group of two may stay in flight": FRESH + FENCE + MULTIPLY + COMMIT + SECOND + COMMIT + LATER + USE + WAIT,
    "a fence after the registers changed": FENCE + MULTIPLY + COMMIT + WAIT + USE + FENCE + MULTIPLY + COMMIT + WAIT,
    "moves of accumulators are the compiler's": FENCE
    + MULTIPLY
    + "mov.f32 f4, f0; mov.f32 f0, f4;"
    + MULTIPLY
    + COMMIT
    + WAIT,
    "other registers": FENCE + MULTIPLY + COMMIT + "mov.u32 r5, 3; add.u32 r6, r5, r0;" + WAIT,
    "in a loop": "mov.u32 r5, 0; LOOP:"
    + FENCE
    + MULTIPLY
    + COMMIT
    + WAIT
    + USE
    + "add.u32 r5, r5, 1; setp.lt.u32 p1, r5, 3; @p1 bra LOOP;",
    "registers of another path": "setp.lt.u32 p1, r0, 128; @!p1 bra OVER;"
    + FENCE
    + MULTIPLY
    + COMMIT
    + "@!p1 bra OVER;"
    + WAIT
    + "OVER:"
    + USE,
}
IN_USE = r"wgmma not waited for: {} touches a register that a wgmma in flight still uses, product.ptx, PTX line \d+"
UNFENCED = r"no wgmma.fence: wgmma.mma_async\S* uses registers that may have been written after the last wgmma.fence, "
FAULTS = {
    "read before the wait": (FENCE + MULTIPLY + COMMIT + USE + WAIT, IN_USE.format("add.f32")),
    "stored before the wait": (
        FENCE + MULTIPLY + COMMIT + "st.shared.f32 [r1], f1;" + WAIT,
        IN_USE.format("st.shared.f32"),
    ),
    "read through a move": (
        FENCE + MULTIPLY + COMMIT + "mov.f32 f4, f0; add.f32 f5, f4, f4;" + WAIT,
        IN_USE.format("add.f32"),
    ),
    "written before the wait": (
        FENCE + MULTIPLY + COMMIT + "mov.f32 f2, 0f00000000;" + WAIT,
        IN_USE.format("mov.f32"),
    ),
    "no commit": (FENCE + MULTIPLY + WAIT + USE, IN_USE.format("add.f32")),
    "a wait for one group too few": (
        FRESH + FENCE + MULTIPLY + COMMIT + SECOND + COMMIT + LATER + USE.replace("f0", "f4") + WAIT,
        IN_USE.format("add.f32"),
    ),
    "no wait in a loop": (
        "mov.u32 r5, 0; LOOP:"
        + FENCE
        + MULTIPLY
        + COMMIT
        + "setp.eq.u32 p1, r5, 1; @p1 "
        + USE
        + "add.u32 r5, r5, 1; setp.lt.u32 p1, r5, 2; @p1 bra LOOP;"
        + WAIT,
        IN_USE.format("add.f32"),
    ),
    "A written before the wait": (FENCE + MULTIPLY + COMMIT + "add.u32 a3, a3, 1;" + WAIT, IN_USE.format("add.u32")),
    "A read before the wait": (FENCE + MULTIPLY + COMMIT + "add.u32 r5, a0, 1;" + WAIT, IN_USE.format("add.u32")),
    "another shape on the same registers": (
        "mov.f32 f4, f0; mov.f32 f5, f0; mov.f32 f6, f0; mov.f32 f7, f0;"
        + FENCE
        + MULTIPLY
        + instruction(16, "f16", None, PLACE)
        + COMMIT
        + WAIT,
        IN_USE.format(r"wgmma.mma_async\S*"),
    ),
    "never fenced": (MULTIPLY + COMMIT + WAIT, UNFENCED + "product.ptx, PTX line"),
    "written after the fence": (FENCE + USE + MULTIPLY + COMMIT + WAIT, UNFENCED),
    "A written after the fence": (FENCE + "add.u32 a0, a0, 0;" + MULTIPLY + COMMIT + WAIT, UNFENCED),
    "written in a loop": (
        "mov.u32 r5, 0;"
        + FENCE
        + "LOOP:"
        + MULTIPLY
        + COMMIT
        + WAIT
        + USE
        + "add.u32 r5, r5, 1; setp.lt.u32 p1, r5, 3; @p1 bra LOOP;",
        UNFENCED,
    ),
    "a descriptor of one warp's own": (
        f"mov.u64 d2, {PLACE:#x}; setp.eq.u32 p1, r0, 70; @p1 add.u64 d2, d2, 64;"
        + FENCE
        + MULTIPLY.replace(f"{PLACE:#x}", "d2")
        + COMMIT
        + WAIT,
        r"divergent warp: wgmma\S* with another matrix descriptor than thread .0, 0, 0. of the same four warps, .*"
        r"thread .70, 0, 0.",
    ),
    "never waited for": (FENCE + MULTIPLY + COMMIT + "ret;", "wgmma not waited for: thread exits with products"),
}
GUARDED = {  # of shared memory: (fence, barrier, body, report)
    "no proxy fence": (
        "", "bar.sync 0;", "",
        r"no proxy fence: wgmma\S* of 16 bytes at shared 0x0 reads what thread .0, 0, 0. wrote, no fence.proxy.async",
    ),
    "a fence by half of the threads": (
        "setp.lt.u32 p1, r0, 4; @p1 fence.proxy.async.shared::cta;", "bar.sync 0;", "",
        r"no proxy fence: wgmma\S* .* reads what thread .\d+, 0, 0. wrote",
    ),
    "a fence of another space": ("fence.proxy.async.global;", "bar.sync 0;", "", "no proxy fence: wgmma"),
    "a fence before the writes": (
        "fence.proxy.async;", "bar.sync 0;", "setp.eq.u32 p1, r0, 5; @p1 st.shared.u32 [r1], r0; bar.sync 0;",
        r"no proxy fence: wgmma\S* .* reads what thread .5, 0, 0. wrote",
    ),
    "no barrier": ("fence.proxy.async;", "", "", r"race: wgmma\S* of 16 bytes .* reads what thread .* wrote"),
    "a barrier of each warp": (
        "fence.proxy.async;", "bar.warp.sync -1;", "", r"race: wgmma\S* of 16 bytes .* reads what thread .* wrote",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_registers_may_be_used_behind_fence_and_wait(name):
    launch(CLEAN[name])


@pytest.mark.parametrize("name", FAULTS)
def test_registers_in_flight_or_not_fenced_are_a_fault(name):
    body, report = FAULTS[name]
    with pytest.raises(Fault, match=report):
        launch(body)
    launch(body, machine=Interpreter("sm_90a", checks=False))


@pytest.mark.parametrize("name", GUARDED)
def test_shared_memory_that_a_wgmma_does_not_see_is_a_fault(name):
    fence, barrier, body, report = GUARDED[name]
    with pytest.raises(Fault, match=report):
        launch(body + FENCE + MULTIPLY + COMMIT + WAIT, fence=fence, barrier=barrier)


@pytest.mark.parametrize("barrier", ["bar.sync 0; fence.proxy.async;", "bar.sync 3, 128; fence.proxy.async;"])
def test_a_fence_behind_the_barrier_is_as_good(barrier):
    assert np.array_equal(launch(FENCE + MULTIPLY + COMMIT + WAIT, fence="", barrier=barrier), PRODUCT)


OVERWRITE = "setp.eq.u32 p1, r0, 0; @p1 st.shared.u32 [r1+16], r0;"
AGAIN = "setp.lt.u32 p1, r0, 128; @p1 bra MULTIPLY; bar.sync 2, 256; setp.eq.u32 p1, r0, 130;"
AGAIN += "@p1 st.shared.u32 [r1+16], r0; ret;"


def test_shared_memory_is_not_overwritten_before_the_wait():
    report = r"race: st.shared.u32 of 4 bytes .* overwrites what wgmma of thread .0, 0, 0. may still read, product.ptx"
    launch(FENCE + MULTIPLY + COMMIT + WAIT + OVERWRITE)
    with pytest.raises(Fault, match=report):
        launch(FENCE + MULTIPLY + COMMIT + OVERWRITE + WAIT)
    with pytest.raises(Fault, match=report):  # the second group may be in flight
        launch(FENCE + MULTIPLY + COMMIT + MULTIPLY + COMMIT + LATER + OVERWRITE + WAIT)
    # another warpgroup writes: only behind a barrier that this one comes to after its wait
    body = AGAIN + "MULTIPLY:" + FENCE + MULTIPLY + COMMIT
    launch(body + WAIT + "bar.arrive 2, 256;", threads=256)
    with pytest.raises(Fault, match=report):
        launch(body + "bar.arrive 2, 256;" + WAIT, threads=256)


# One warp copies B, an mbarrier tells the warpgroup: r4 the copy's target, r9 the mbarrier, at 2048.
COPIED = """
    add.u32 r9, r1, 2048; setp.eq.u32 p1, r0, 0; @p1 mbarrier.init.shared.b64 [r9], {count};
    @p1 fence.mbarrier_init.release.cluster; bar.sync 0;
    shl.b32 r3, r0, 4; add.u32 r4, r1, r3; ld.param.u64 d3, [image_p]; cvt.u64.u32 d4, r3; add.u64 d4, d4, d3;
    setp.ge.u32 p2, r0, 64; {copy}
    W: mbarrier.try_wait.parity.shared.b64 p3, [r9], 0; @!p3 bra W; {after}
"""
CP_ASYNC = "@!p2 cp.async.cg.shared.global [r4], [d4], 16;"
NOINC = "@!p2 cp.async.mbarrier.arrive.noinc.shared.b64 [r9];"
WAITED = "@!p2 cp.async.wait_all; {} @!p2 mbarrier.arrive.shared.b64 _, [r9];"
BULK = """@p1 mbarrier.arrive.expect_tx.shared.b64 _, [r9], 1024;
    @p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r1], [d3], 1024, [r9];"""
PROXY = "fence.proxy.async.shared::cta;"


def copied(copy, count=64, after="", **options):
    body = COPIED.format(copy=copy, count=count, after=after) + FENCE + MULTIPLY + COMMIT + WAIT
    return run(body, IMAGE, 8, a=A, fence="", barrier="bar.sync 0;", **options)


def test_copies_that_a_wgmma_reads_behind_an_mbarrier():
    for got in (
        copied(CP_ASYNC + WAITED.format(PROXY)),
        copied(CP_ASYNC + NOINC, after=PROXY),
        copied(BULK, count=1),  # of the same proxy
        copied(BULK, count=1, blocks=3),
    ):
        assert np.array_equal(got, PRODUCT)


def test_copies_by_threads_need_a_proxy_fence():
    report = r"no proxy fence: wgmma\S* of 16 bytes at shared 0x0 reads what thread .0, 0, 0. wrote"
    for copy in (WAITED.format(""), PROXY + WAITED.format(""), NOINC, PROXY + NOINC):
        with pytest.raises(Fault, match=report):
            copied(CP_ASYNC + copy)


def test_copies_that_have_not_arrived_are_not_read():
    with pytest.raises(Fault, match=r"cp.async not waited for: wgmma\S* of 16 bytes .* still copying"):
        copied(CP_ASYNC + "@!p2 mbarrier.arrive.shared.b64 _, [r9];", after=PROXY)
