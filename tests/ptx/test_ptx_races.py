# SPDX-License-Identifier: Apache-2.0
"""Which accesses to shared memory race, and which barriers order them; cp.async and its groups."""

import numpy as np
import pytest
from snippets import evaluate, one

from mla_oracle.ptx import Fault, Interpreter

LANE = np.arange(64, dtype=np.uint32)
SHARED = ".shared .align 16 .b8 tile[2048];"
# r1: the thread's own place; r3: its neighbour's in the same warp; r4: the same lane's in the other warp
PLACES = """
    mov.u32 r10, tile; shl.b32 r1, tid_, 2; xor.b32 r3, r1, 4; xor.b32 r4, r1, 128;
    add.s32 r1, r1, r10; add.s32 r3, r3, r10; add.s32 r4, r4, r10; mov.u32 x, 0;
"""


def run(body, **options):
    return one(PLACES + body, np.uint32, a=LANE, shared=SHARED, **options)


WRITE, READ_NEXT, READ_OTHER = "st.shared.u32 [r1], a;", "ld.shared.u32 x, [r3];", "ld.shared.u32 x, [r4];"
CLEAN = {
    "a barrier": WRITE + "bar.sync 0;" + READ_OTHER,
    "a barrier, in the same warp": WRITE + "bar.sync 0;" + READ_NEXT,
    "bar.warp.sync": WRITE + "bar.warp.sync -1;" + READ_NEXT,
    "its own": WRITE + "ld.shared.u32 x, [r1];" + WRITE,
    "reads do not race": WRITE + "bar.sync 0;" + READ_OTHER + READ_NEXT + "bar.sync 0;" + WRITE,
    "neighbouring bytes": "mov.u32 r10, tile; add.s32 r10, r10, tid_; st.shared.u8 [r10], a; ld.shared.u8 x, [r10];",
    "the same value": "st.shared.u32 [tile], 5; bar.sync 0; ld.shared.u32 x, [tile];",
    "atomics": (
        "setp.eq.u32 p1, tid_, 0; @p1 st.shared.u32 [tile], 0; bar.sync 0;"
        "red.shared.add.u32 [tile], 1; bar.sync 0; ld.shared.u32 x, [tile];"
    ),
    "a barrier of two warps by number": WRITE + "bar.sync 3, 64;" + READ_OTHER,
    "a part of the warp": "setp.ge.u32 p1, tid_, 32; @p1 bra DONE;"
    + WRITE
    + "and.b32 r5, a, 16; setp.eq.u32 p2, r5, 0; selp.b32 r6, 0xFFFF, 0xFFFF0000, p2; bar.warp.sync r6;"
    + READ_NEXT,
}
RACES = {
    "no barrier": (
        WRITE + READ_OTHER.replace("ld", "@p1 ld").replace("@p1", "setp.lt.u32 p1, tid_, 32; @p1"),
        "never written|reads what",
    ),
    "no bar.warp.sync": (WRITE + READ_NEXT, "reads what thread"),
    "a shuffle orders no memory": (WRITE + "shfl.sync.bfly.b32 r9, a, 1, 31, -1;" + READ_NEXT, "reads what thread"),
    "bar.warp.sync orders one warp alone": (WRITE + "bar.warp.sync -1;" + READ_OTHER, "reads what thread"),
    "written over what was read": (WRITE + "bar.sync 0;" + READ_OTHER + WRITE, "overwrites what thread .* read"),
    "written over what the warp read": (WRITE + "bar.sync 0;" + READ_NEXT + WRITE, "overwrites what thread .* read"),
    "written by two": ("st.shared.u32 [tile], a;", "overwrites what thread .* wrote"),
    "an atomic and a store": (
        "setp.eq.u32 p1, tid_, 0; @p1 st.shared.u32 [tile], 0; bar.sync 0; red.shared.add.u32 [tile], 1;"
        "@p1 st.shared.u32 [tile], 7;",
        "overwrites what thread",
    ),
    "a barrier of other warps": (
        WRITE + "setp.lt.u32 p1, tid_, 32; @p1 bar.sync 3, 32;" + READ_OTHER,
        "reads what thread",
    ),
    "a barrier one lane is not in": (
        WRITE
        + "and.b32 r5, a, 31; setp.ne.u32 p1, r5, 5; @p1 bar.warp.sync 0xFFFFFFDF; @p1 ld.shared.u32 x, [tile+20];",
        "reads what thread .5, 0, 0. wrote",
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_ordered_accesses_are_no_race(name):
    run(CLEAN[name])


@pytest.mark.parametrize("name", RACES)
def test_unordered_accesses_are_a_race(name):
    body, report = RACES[name]
    with pytest.raises(Fault, match=report):
        run(body)
    run(body, machine=Interpreter("sm_90", checks=False))


def test_a_producer_and_consumers_with_named_barriers():
    # warp 0 writes, warps 1 and 2 read, each by a pair of barriers of its own: full (1, 3) and free (2, 4)
    body = """
        mov.u32 r10, tile; and.b32 r1, tid_, 31; shl.b32 r1, r1, 2; add.s32 r1, r1, r10; mov.u32 x, 0; mov.u32 r5, 0;
        setp.ge.u32 p1, tid_, 64; @p1 bra SECOND; setp.ge.u32 p1, tid_, 32; @p1 bra FIRST;
    PRODUCE:
        st.shared.u32 [r1], r5; bar.arrive 1, 64; bar.arrive 3, 64; bar.sync 2, 64; {0}
        add.u32 r5, r5, 1; setp.lt.u32 p2, r5, 4; @p2 bra PRODUCE; bra DONE;
    FIRST:
        bar.sync 1, 64; ld.shared.u32 r6, [r1]; add.u32 x, x, r6; bar.arrive 2, 64;
        add.u32 r5, r5, 1; setp.lt.u32 p2, r5, 4; @p2 bra FIRST; bra DONE;
    SECOND:
        bar.sync 3, 64; ld.shared.u32 r6, [r1]; add.u32 x, x, r6; bar.arrive 4, 64;
        add.u32 r5, r5, 1; setp.lt.u32 p2, r5, 4; @p2 bra SECOND; bra DONE;
    """
    a = np.arange(96, dtype=np.uint32)
    x = one(body.format("bar.sync 4, 64;"), np.uint32, a=a, shared=SHARED)
    assert x.tolist() == [0] * 32 + [6] * 64
    with pytest.raises(Fault, match=r"race: st.shared.u32 .* overwrites what thread .* read|bad barrier|divergent"):
        one(body.format(""), np.uint32, a=a, shared=SHARED)


def test_reductions_at_a_barrier():
    body = "setp.lt.u32 p1, a, 10; bar.red.popc.u32 x, 0, p1; bar.red.and.pred p2, 0, p1; bar.red.or.pred p3, 0, p1;"
    got = evaluate(body + "selp.u32 y, 1, 0, p2; selp.u32 z, 1, 0, p3;", out=dict.fromkeys("xyz", np.uint32), a=LANE)
    assert set(got["x"].tolist()) == {10} and set(got["y"].tolist()) == {0} and set(got["z"].tolist()) == {1}


BARRIERS = {
    "half a warp": (
        "setp.lt.u32 p1, tid_, 16; @p1 bar.sync 0;",
        "divergent barrier: bar.sync without thread .16, 0, 0.",
    ),
    "one warp of two": (
        "setp.lt.u32 p1, tid_, 32; @p1 bra FIRST; bar.sync 0; bra DONE; FIRST: bar.sync 0;",
        "divergent barrier: bar.sync 0 meets threads",
    ),
    "one warp waits for ever": (
        "setp.lt.u32 p1, tid_, 32; @p1 bar.sync 1, 64; bar.sync 2;",
        "divergent barrier: bar.sync . is reached by 32",
    ),
    "a number of threads that is none of warps": ("bar.sync 1, 40;", "bad barrier"),
    "too high a number": ("bar.sync 16;", "bad barrier"),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_a_barrier_not_all_come_to_is_a_fault(name):
    body, report = BARRIERS[name]
    with pytest.raises(Fault, match=report):
        one("mov.u32 x, 0;" + body, np.uint32, a=LANE)


def test_threads_that_exit_before_a_barrier_are_a_warning():
    from snippets import text

    machine = Interpreter("sm_90", threads=1)
    kernel = machine.load(
        text("setp.lt.u32 p1, tid_, 32; @p1 ret; bar.sync 0;", {}, {"a": LANE}), "snippet", file="x.ptx"
    )
    machine.launch(kernel, (3, 1, 1), (64, 1, 1), 0, machine.upload(LANE))
    assert len(kernel.warnings) == 1
    assert "exited before a barrier that others reach, x.ptx, PTX line" in kernel.warnings[0]


COPY = "mov.u32 r1, tile; shl.b32 r2, tid_, 4; add.s32 r1, r1, r2; mov.u32 x, 0; mov.u64 d1, a;"


def copies(body, **options):
    """`a` is the address of 16 bytes of `source` for each thread."""
    machine = Interpreter("sm_90", threads=1, **options)
    source = machine.upload(np.arange(256, dtype=np.uint32))
    pointers = np.arange(64, dtype=np.uint64) * 16 + source.pointer
    return evaluate(COPY + body, out={"x": np.uint32}, a=pointers, shared=SHARED, machine=machine)["x"]


ISSUE = "cp.async.cg.shared.global [r1], [d1], 16;"


def test_a_copy_is_there_after_its_wait():
    for wait in ("cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 0;"):
        assert copies(ISSUE + wait + "ld.shared.u32 x, [r1+4];").tolist() == [4 * t + 1 for t in range(64)]
    others = ISSUE + "cp.async.wait_all; bar.sync 0; xor.b32 r3, r2, 512; ld.shared.u32 x, [r3+8];"
    assert copies(others).tolist() == [4 * (t ^ 32) + 2 for t in range(64)]


@pytest.mark.parametrize("size", [4, 8, 16])
def test_every_size_and_the_zeros_behind_the_source(size):
    start = "st.shared.v4.b32 [r1], {1, 1, 1, 1}; bar.sync 0;"
    for n in range(0, size + 1, 4):
        body = start + f"cp.async.ca.shared.global [r1], [d1], {size}, {n}; cp.async.wait_all; ld.shared.u32 x, [r1+"
        for at in range(0, 16, 4):
            expected = [4 * t + at // 4 if at < n else 0 if at < size else 1 for t in range(64)]
            assert copies(body + f"{at}];").tolist() == expected
    # with nothing to read the source is not looked at
    copies(f"mov.u64 d1, 64; cp.async.ca.shared.global [r1], [d1], {size}, 0; cp.async.wait_all;")


def test_groups_complete_in_order():
    two = ISSUE + "cp.async.commit_group; cp.async.cg.shared.global [r1+1024], [d1], 16; cp.async.commit_group;"
    copies(two + "cp.async.wait_group 1; ld.shared.u32 x, [r1]; cp.async.wait_group 0; ld.shared.u32 x, [r1+1024];")
    with pytest.raises(Fault, match=r"cp.async not waited for: ld.shared.u32 of 4 bytes at shared 0x400 reads"):
        copies(two + "cp.async.wait_group 1; ld.shared.u32 x, [r1+1024]; cp.async.wait_all;")


IN_FLIGHT = {
    "read before the wait": (
        ISSUE + "ld.shared.u32 x, [r1]; cp.async.wait_all;",
        "ld.shared.u32 .* reads what thread .0, 0, 0. is still",
    ),
    "the wait without a commit": (
        ISSUE + "cp.async.wait_group 0; ld.shared.u32 x, [r1]; cp.async.wait_all;",
        "still copying",
    ),
    "overwritten in flight": (
        ISSUE + "st.shared.u32 [r1], 1; cp.async.wait_all;",
        "st.shared.u32 .* overwrites what thread",
    ),
    "copied over a copy": (ISSUE + ISSUE + "cp.async.wait_all;", "cp.async.cg.* overwrites what thread"),
    "never waited for": (ISSUE, "thread exits with 16 bytes to shared"),
    "waited for by its own thread alone": (
        ISSUE + "cp.async.wait_all; xor.b32 r3, r2, 512; ld.shared.u32 x, [r3];",
        "race: ld.shared.u32 .* reads what thread .32, 0, 0. wrote",
    ),
    "waited for by half the threads": (
        ISSUE + "setp.lt.u32 p1, tid_, 32; @p1 cp.async.wait_all; bar.sync 0; ld.shared.u32 x, [r1];",
        "still copying",
    ),
    "over what is being read": (
        "st.shared.u32 [r1], 1; bar.sync 0; xor.b32 r3, r2, 16; ld.shared.u32 x, [r3];" + ISSUE + "cp.async.wait_all;",
        "race: cp.async.cg.* overwrites what thread .* read",
    ),
    "misaligned": ("cp.async.cg.shared.global [r1], [d1+8], 16; cp.async.wait_all;", "misaligned: cp.async"),
    "out of bounds": (
        "cp.async.cg.shared.global [r1], [d1+16], 16; cp.async.wait_all;",
        "out of bounds: cp.async.*1024 bytes into",
    ),
}


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_a_copy_that_was_not_waited_for_is_a_fault(name):
    body, report = IN_FLIGHT[name]
    with pytest.raises(Fault, match=report):
        copies(body)


def test_clocks_start_again_before_they_run_out():
    # more synchronisations than a stamp has room for, and races are still found
    for sync in ("bar.sync 0;", "bar.warp.sync -1;", "bar.sync 3, 64;"):
        times = (1 << 20) + 100 if sync == "bar.sync 0;" else (1 << 21) // (2 if "warp" in sync else 1)
        body = f"""
            mov.u32 r5, 0;
        AGAIN: {sync} add.u32 r5, r5, 1; setp.lt.u32 p1, r5, {times}; @p1 bra AGAIN;
        """
        run(body + WRITE + "bar.sync 0;" + READ_OTHER)
        with pytest.raises(Fault, match="race"):
            run(body + WRITE + READ_NEXT)


def test_what_is_in_flight_stays_so_when_clocks_start_again():
    again = "mov.u32 r5, 0; AGAIN: bar.sync 0; add.u32 r5, r5, 1; setp.lt.u32 p1, r5, 1048676; @p1 bra AGAIN;"
    with pytest.raises(Fault, match="still copying"):
        copies(ISSUE + again + "ld.shared.u32 x, [r1]; cp.async.wait_all;")
    copies(ISSUE + again + "cp.async.wait_all; ld.shared.u32 x, [r1];")


def test_a_loop_without_an_end_is_given_up():
    spin = "st.shared.u32 [tile], 0; bar.sync 0;"
    spin += "WAIT: ld.volatile.shared.u32 r5, [tile]; setp.eq.u32 p1, r5, 0; @p1 bra WAIT;"
    with pytest.raises(Fault, match=r"runaway: .*thread"):
        run(spin, machine=Interpreter("sm_90", patience=10_000))
