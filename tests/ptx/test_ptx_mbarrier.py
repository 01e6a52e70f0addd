# SPDX-License-Identifier: Apache-2.0
"""mbarrier objects (PTX ISA 9.7.13.15): phases, who waits for whom, what that orders, and what they may not do."""

import numpy as np
import pytest
from snippets import evaluate, one

from mla_oracle.errors import UnsupportedError
from mla_oracle.ptx import Fault, Interpreter

LANE = np.arange(64, dtype=np.uint32)
SHARED = ".shared .align 16 .b8 tile[2048]; .shared .align 8 .b64 bars[4];"
# r1: the thread's own place, r3: its neighbour's, r4: the same lane's in the other warp; p7: thread 0
START = """
    mov.u32 r10, tile; shl.b32 r1, tid_, 2; xor.b32 r3, r1, 4; xor.b32 r4, r1, 128; mov.u32 r9, bars;
    add.s32 r1, r1, r10; add.s32 r3, r3, r10; add.s32 r4, r4, r10; mov.u32 x, 0; setp.eq.u32 p7, tid_, 0;
"""


def init(*counts):
    """The first objects of bars, by thread 0, seen by all."""
    each = "".join(f"@p7 mbarrier.init.shared.b64 [r9+{8 * i}], {count};" for i, count in enumerate(counts))
    return each + "bar.sync 0;"


def wait(at, parity, name):
    return f"{name}: mbarrier.try_wait.parity.shared::cta.b64 p6, [r9+{at}], {parity}; @!p6 bra {name};"


def run(body, **options):
    return one(START + body, np.uint32, a=LANE, shared=SHARED, **options)


def test_a_phase_is_complete_when_all_have_arrived():
    body = init(64) + "mbarrier.arrive.shared.b64 d1, [r9];" + wait(0, 0, "W") + "mov.u32 x, 7;"
    assert run(body).tolist() == [7] * 64


def test_parity_one_is_complete_before_the_first_phase():
    body = init(1) + "mbarrier.test_wait.parity.shared.b64 p1, [r9], 1; selp.u32 x, 1, 0, p1;"
    assert run(body).tolist() == [1] * 64


def test_a_wait_that_fails_says_so_when_nobody_else_can_run():
    body = init(1) + "mbarrier.test_wait.parity.shared.b64 p1, [r9], 0; selp.u32 x, 1, 0, p1;"
    assert run(body).tolist() == [0] * 64
    # it then may do itself what it waited for
    alone = "AGAIN: mbarrier.test_wait.parity.shared.b64 p1, [r9], 0; @p1 bra OVER;"
    alone += "@p7 mbarrier.arrive.shared.b64 _, [r9];"
    assert run(init(1) + alone + "add.u32 x, x, 1; bra AGAIN; OVER:").tolist() == [1] * 64


def test_states_of_the_current_and_the_last_phase():
    body = init(64) + "mbarrier.arrive.shared.b64 d1, [r9];"
    body += "W: mbarrier.test_wait.shared.b64 p6, [r9], d1; @!p6 bra W; mbarrier.pending_count.b64 x, d1;"
    assert sorted(run(body).tolist()) == list(range(1, 65))
    late = body.replace("x, d1;", "x, d1; bar.sync 0;") + "mbarrier.arrive.shared.b64 d2, [r9];" + wait(0, 1, "V")
    with pytest.raises(Fault, match=r"bad mbarrier: mbarrier.test_wait\S* at shared 0x\w+ with the state of phase 0"):
        run(late + "bar.sync 0; mbarrier.test_wait.shared.b64 p6, [r9], d1;")


def test_counts_of_arrivals_and_of_bytes():
    counted = init(3) + "@p7 mbarrier.arrive.release.cta.shared::cta.b64 d1, [r9], 2;"
    run(counted + "@p7 mbarrier.arrive.shared.b64 _, [r9];" + wait(0, 0, "W"))
    bytes_ = init(1) + "@p7 mbarrier.arrive.expect_tx.shared.b64 _, [r9], 96;"
    bytes_ += "@p7 mbarrier.complete_tx.shared.b64 [r9], 64;"
    run(bytes_ + "@p7 mbarrier.complete_tx.shared.b64 [r9], 32;" + wait(0, 0, "W"))
    with pytest.raises(Fault, match=r"deadlock: mbarrier.try_wait\S* .* waits for 0 arrivals and 32 bytes"):
        run(bytes_ + wait(0, 0, "W"))
    apart = init(1) + "@p7 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [r9], 8;"
    run(apart + "@p7 mbarrier.arrive.shared.b64 _, [r9];@p7 mbarrier.complete_tx.shared.b64 [r9], 8;" + wait(0, 0, "W"))


def test_many_phases_between_a_producer_and_a_consumer():
    # warp 0 writes numbers, warp 1 adds them up: full (0) and free (8), one lane of each arriving for its warp
    body = (
        init(1, 1)
        + """
        and.b32 r1, tid_, 31; shl.b32 r1, r1, 2; add.s32 r1, r1, r10; mov.u32 r5, 0; mov.u32 r6, 0;
        and.b32 r8, tid_, 31; setp.eq.u32 p5, r8, 0; setp.ge.u32 p1, tid_, 32; @p1 bra CONSUME;
    PRODUCE:
        xor.b32 r7, r6, 1;
    FREE: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p6, [r9+8], r7, 1000; @!p6 bra FREE;
        add.u32 r12, r5, tid_; st.shared.u32 [r1], r12; bar.warp.sync -1;
        @p5 mbarrier.arrive.shared.b64 _, [r9];
        xor.b32 r6, r6, 1; add.u32 r5, r5, 1; setp.lt.u32 p2, r5, 9; @p2 bra PRODUCE; bra DONE;
    CONSUME:
    FULL: mbarrier.try_wait.parity.shared::cta.b64 p6, [r9], r6; @!p6 bra FULL;
        ld.shared.u32 r12, [r1]; add.u32 x, x, r12; {0}
        @p5 mbarrier.arrive.shared.b64 _, [r9+8];
        xor.b32 r6, r6, 1; add.u32 r5, r5, 1; setp.lt.u32 p2, r5, 9; @p2 bra CONSUME;
    """
    )
    assert run(body.format("bar.warp.sync -1;")).tolist() == [0] * 32 + [36 + 9 * lane for lane in range(32)]
    with pytest.raises(Fault, match=r"race: st.shared.u32 .* overwrites what thread .* read"):
        run(body.format(""))


def test_lanes_of_a_warp_wait_for_the_one_that_waits():
    # thread 0 waits at an mbarrier that warp 1 arrives at later; its warp meets again at a barrier of the block
    body = init(1) + "mov.u32 r12, 1; setp.ge.u32 p1, tid_, 32; @p1 bra OTHER; @!p7 bra JOIN;" + wait(0, 0, "W")
    body += "mov.u32 r12, 2; JOIN: bar.sync 1; mov.u32 x, r12; bra DONE;"
    body += "OTHER: setp.eq.u32 p2, tid_, 40; @p2 mbarrier.arrive.shared.b64 _, [r9]; bar.sync 1;"
    with pytest.raises(Fault, match=r"divergent barrier: bar.sync 1 meets"):  # two instructions, so named
        run(body)
    same = body.replace("bar.sync 1;", "bar.sync 1, 64;")
    assert run(same).tolist() == [2] + [1] * 31 + [0] * 32


ARRIVE, WRITE, READ_OTHER = "mbarrier.arrive.shared.b64 _, [r9];", "st.shared.u32 [r1], a;", "ld.shared.u32 x, [r4];"
READ_NEXT = "ld.shared.u32 x, [r3];"
CLEAN = {
    "each arrives and waits": init(64) + WRITE + ARRIVE + wait(0, 0, "W") + READ_OTHER,
    "the same warp": init(64) + WRITE + ARRIVE + wait(0, 0, "W") + READ_NEXT,
    "on to a barrier": init(32)
    + WRITE
    + "setp.lt.u32 p1, tid_, 32; @p1 "
    + ARRIVE
    + "@p1 bra DONE;"
    + wait(0, 0, "W")
    + "bar.sync 2, 32;"
    + READ_OTHER,
    "written over what was read": init(64, 64)
    + WRITE
    + "bar.sync 0;"
    + READ_OTHER
    + ARRIVE
    + wait(0, 0, "W")
    + "st.shared.u32 [r1], 0;",
    "one lane for its warp": init(2)
    + WRITE
    + "bar.warp.sync -1; and.b32 r8, tid_, 31; setp.eq.u32 p1, r8, 3; @p1 "
    + ARRIVE
    + wait(0, 0, "W")
    + READ_OTHER,
    "through a third": init(1, 32)
    + "setp.ge.u32 p1, tid_, 32; @p1 bra LAST; st.shared.u32 [r1], a; @p7 "
    + ARRIVE
    + wait(0, 0, "W")
    + "mbarrier.arrive.shared.b64 _, [r9+8]; bra DONE; LAST:"
    + wait(8, 0, "V")
    + READ_OTHER,
}
RACES = {
    "relaxed": (CLEAN["each arrives and waits"].replace("arrive.", "arrive.relaxed.cta."), "reads what thread"),
    "a relaxed wait": (
        CLEAN["each arrives and waits"].replace("parity.", "parity.relaxed.cta."),
        "reads what thread",
    ),
    "one lane for its warp without bar.warp.sync": (
        CLEAN["one lane for its warp"].replace("bar.warp.sync -1;", ""),
        "reads what thread",
    ),
    "one lane waits for its warp": (
        init(64) + WRITE + ARRIVE + "and.b32 r8, tid_, 31; setp.ne.u32 p1, r8, 0; @p1 bra LATE;" + wait(0, 0, "W")
        # thread 0's arrival and wait say nothing to its neighbours
        + "LATE:" + READ_OTHER,
        "reads what thread",
    ),
    "written after the arrival": (init(64) + ARRIVE + WRITE + wait(0, 0, "W") + READ_OTHER, "reads what thread"),
    "read after the arrival": (
        init(64) + WRITE + "bar.sync 0;" + ARRIVE + READ_OTHER + wait(0, 0, "W") + WRITE.replace("a;", "1;"),
        "overwrites what thread .* read",
    ),
    "not waited for": (init(64) + WRITE + ARRIVE + READ_OTHER, "never written|reads what thread"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_arrivals_are_ordered_before_those_who_wait_for_them(name):
    run(CLEAN[name])


@pytest.mark.parametrize("name", RACES)
def test_what_no_phase_orders_is_a_race(name):
    body, report = RACES[name]
    with pytest.raises(Fault, match=report):
        run(body)
    run(body, machine=Interpreter("sm_90", checks=False))


FAULTS = {
    "never arrived at": (
        init(65) + ARRIVE + wait(0, 0, "W"),
        r"deadlock: mbarrier.try_wait\S* at shared 0x800 waits for 1 arrivals and 0 bytes, nobody else runs, snip",
    ),
    "the wrong parity": (init(64) + ARRIVE + wait(0, 0, "W") + wait(0, 1, "V"), "waits for 64 arrivals and 0 bytes"),
    "not initialised": (ARRIVE, r"no mbarrier: mbarrier.arrive\S* at shared 0x800, where none was initialised"),
    "no longer valid": (init(1) + "@p7 mbarrier.inval.shared.b64 [r9]; bar.sync 0;" + ARRIVE, "no mbarrier"),
    "initialised, no barrier": (
        init(1).replace("bar.sync 0;", "") + ARRIVE,
        r"race: mbarrier.arrive\S* at shared 0x800 uses what thread .0, 0, 0. initialised, no barrier between",
    ),
    "initialised twice": (init(1) + init(1), "bad mbarrier: mbarrier.init.* where one is in use"),
    "initialised with none": (init(0), "bad mbarrier: mbarrier.init.* with 0 arrivals"),
    "written over": (
        init(1) + "@p7 st.shared.u32 [r9+4], 0; bar.sync 0;" + wait(0, 1, "W"),
        "bad mbarrier: mbarrier.try_wait.* which was written over",
    ),
    "read as a number": (init(1) + "ld.shared.u64 d1, [r9];", "never written: ld.shared.u64"),
    "more arrivals than expected": (
        init(4) + "@p7 mbarrier.arrive.shared.b64 _, [r9], 5;",
        r"bad mbarrier: mbarrier.arrive\S* at shared 0x800 with 5 arrivals, 4 pending",
    ),
    "the last arrival must not be": (
        init(1) + "@p7 mbarrier.arrive.noComplete.shared.b64 d1, [r9], 1;",
        "with 1 arrivals, 1 pending",
    ),
    "too many bytes": (
        init(1) + "@p7 mbarrier.expect_tx.shared.b64 [r9], 1048575; @p7 mbarrier.expect_tx.shared.b64 [r9], 1;",
        r"bad mbarrier: mbarrier.expect_tx\S* at shared 0x800 makes it 1048576 bytes pending",
    ),
    "misaligned": ("mbarrier.init.shared.b64 [r9+4], 1;", "misaligned: mbarrier.init"),
    "past shared memory": ("mbarrier.init.shared.b64 [r9+65536], 1;", "out of bounds: mbarrier.init"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_an_mbarrier_may_not_do_is_a_fault(name):
    body, report = FAULTS[name]
    with pytest.raises(Fault, match=report):
        run(body)


def test_generic_addresses():
    body = "cvt.u64.u32 d3, r9; cvta.shared.u64 d3, d3; @p7 mbarrier.init.b64 [d3], 64; bar.sync 0;"
    run(body + "mbarrier.arrive.b64 d1, [d3]; W: mbarrier.test_wait.b64 p6, [d3], d1; @!p6 bra W;")
    with pytest.raises(Fault, match=r"mixed spaces: mbarrier.init"):
        run("mov.u64 d3, 64; mbarrier.init.b64 [d3], 64;")


COPY = "cvt.u64.u32 d3, tid_; shl.b64 d3, d3, 4; add.s64 d1, a, d3; shl.b32 r2, tid_, 4; add.s32 r1, r2, r10;"
ISSUE = "cp.async.cg.shared.global [r1], [d1], 16;"
NOINC = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [r9];"
FAR = "xor.b32 r4, r2, 512; add.s32 r4, r4, r10; ld.shared.u32 x, [r4+8];"


def copies(body, blocks=1, **options):
    machine = Interpreter("sm_90", threads=1, **options)
    source = machine.upload(np.arange(256, dtype=np.uint32))
    start = START + COPY + body
    pointer = np.full(64, source.pointer, np.uint64)
    return evaluate(start, out={"x": np.uint32}, a=pointer, shared=SHARED, machine=machine, blocks=blocks)["x"]


def test_copies_arrive_at_an_mbarrier():
    for arrival, count in ((NOINC, 64), (NOINC.replace(".noinc", "") + ARRIVE, 64)):
        got = copies(init(count) + ISSUE + arrival + wait(0, 0, "W") + FAR)
        assert got.tolist() == [4 * (lane ^ 32) + 2 for lane in range(64)]


def test_a_block_knows_nothing_of_the_one_before():
    body = init(64) + ISSUE + NOINC + wait(0, 0, "W") + FAR
    copies(body, blocks=3)
    copies("st.shared.u32 [r1], 1; st.shared.u32 [r1+4], 2; bar.sync 0;" + body, blocks=3)


COPIED = {
    "not waited for": init(64) + ISSUE + NOINC + "bar.sync 0;" + FAR,
    "an arrival of its own": init(64) + ISSUE + ARRIVE + wait(0, 0, "W") + FAR + "cp.async.wait_all;",
    "issued after": init(64) + NOINC + ISSUE + wait(0, 0, "W") + FAR + "cp.async.wait_all;",
    "overwritten before": init(64) + ISSUE + NOINC + "st.shared.u32 [r1], 1;",
}


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_whose_mbarrier_was_not_waited_for_is_a_fault(name):
    with pytest.raises(Fault, match=r"cp.async not waited for: (ld|st).shared.u32 .* still copying"):
        copies(COPIED[name])


def test_a_copy_over_what_is_being_read_is_a_race():
    body = init(64, 64) + ISSUE + NOINC + wait(0, 0, "W") + FAR + "{}" + ISSUE + NOINC + wait(0, 1, "V")
    free = "mbarrier.arrive.shared.b64 _, [r9+8];" + wait(8, 0, "U")
    copies(body.format(free))
    with pytest.raises(Fault, match=r"race: cp.async.cg\S* of 16 bytes .* overwrites what thread .* read"):
        copies(body.format(""))


def test_a_form_that_is_not_known_is_unsupported():
    for wrong in ("mbarrier.arrive_drop.shared.b64 d1, [r9];", "mbarrier.test_wait.sys.shared.b64 p1, [r9], d1;"):
        with pytest.raises(UnsupportedError, match=r"mbarrier\S* is not supported by the interpreter"):
            run(wrong)
