# SPDX-License-Identifier: Apache-2.0
"""cp.async.bulk (PTX ISA 9.7.9.25.4) both ways, and what may not happen while its bytes are under way."""

import numpy as np
import pytest
from snippets import evaluate

from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.ptx import Fault, Interpreter

SHARED = ".shared .align 128 .b8 tile[2048]; .shared .align 8 .b64 bars[2];"
# d1: 1 KiB of numbers, d2: 1 KiB to write; p7: thread 0; r1: the thread's own place
START = """
    mov.u32 r10, tile; mov.u32 r9, bars; setp.eq.u32 p7, tid_, 0; mov.u64 d1, a; mov.u64 d2, b; mov.u32 x, 0;
    shl.b32 r1, tid_, 2; add.s32 r1, r1, r10;
"""
INIT = "@p7 mbarrier.init.shared.b64 [r9], 1; @p7 fence.mbarrier_init.release.cluster; bar.sync 0;"
EXPECT = "@p7 mbarrier.arrive.expect_tx.shared.b64 _, [r9], {0};"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r10], [d1], {0}, [r9];"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 p6, [r9], 0; @!p6 bra W;"
READ = "ld.shared.u32 x, [r1];"
FENCE = "fence.proxy.async.shared::cta;"
STORE = "@p7 cp.async.bulk.global.shared::cta.bulk_group [d2], [r10], 256;"
GROUP, DONE = "@p7 cp.async.bulk.commit_group;", "@p7 cp.async.bulk.wait_group.read 0;"
WRITE = "st.shared.u32 [r1], tid_;"


def run(body, **options):
    """(x of each of 64 threads, the 256 numbers at d2) after `body`."""
    machine = Interpreter("sm_90", threads=1, **options)
    source = machine.upload(np.arange(256, dtype=np.uint32) + 5)
    target = machine.upload(np.zeros(256, np.uint32))
    pointers = {"a": np.full(64, source.pointer, np.uint64), "b": np.full(64, target.pointer, np.uint64)}
    x = evaluate(START + body, out={"x": np.uint32}, shared=SHARED, machine=machine, **pointers)["x"]
    return x, machine.download(target)


def loading(size=256, load=LOAD):
    return INIT + EXPECT.format(size) + "@p7 " + load.format(size) + WAIT + READ


@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_bytes_that_were_waited_for_are_there(space):
    x, _ = run(loading(load=LOAD.replace("shared::cluster", space)))
    assert x.tolist() == [lane + 5 for lane in range(64)]
    run(loading(load=LOAD.replace("bytes [", "bytes.L2::cache_hint [").replace("[r9];", "[r9], d3;")))


def test_offsets_of_addresses():
    x, _ = run(loading(load=LOAD.replace("[d1]", "[d1+128]")))
    assert x.tolist() == [lane + 37 for lane in range(64)]
    x, _ = run(loading(load=LOAD.replace("[r10]", "[r10+16]")).replace("[r1]", "[r1+16]"))
    assert x.tolist() == [lane + 5 for lane in range(64)]


def test_bytes_copied_out():
    for wait in (DONE, DONE.replace(".read", "")):
        _, got = run(WRITE + FENCE + "bar.sync 0;" + STORE + GROUP + wait)
        assert got.tolist() == [*range(64), *[0] * 192]


def test_a_group_of_bulk_copies_may_stay_in_flight():
    two = WRITE + FENCE + "bar.sync 0;" + STORE + GROUP + STORE.replace("[r10]", "[r10+128]").replace("256", "128")
    two += GROUP + "@p7 cp.async.bulk.wait_group.read 1;"
    run(two + "@p7 st.shared.u32 [r10], 0;" + DONE)
    with pytest.raises(Fault, match=r"race: st.shared.u32 .* overwrites what cp.async.bulk may still read"):
        run(two + "@p7 st.shared.u32 [r10+128], 0;" + DONE)


FAULTS = {
    "size": (loading(40), r"misaligned: cp.async.bulk\S* of 40 bytes, expected a multiple of 16"),
    "shared address": (loading().replace("[r10], [d1]", "[r10+8], [d1]"), r"misaligned: cp.async.bulk\S* .*shared 0x8"),
    "global address": (loading().replace("[d1]", "[d1+8]"), r"misaligned: cp.async.bulk\S* of 256 bytes at global"),
    "past global memory": (loading(1040), r"out of bounds: cp.async.bulk\S* of 1040 bytes at global"),
    "past shared memory": (loading().replace("[r10], [d1]", "[r10+1936], [d1]"), r"out of bounds: cp.async.bulk\S* of"),
    "no mbarrier": ("@p7 " + LOAD.format(256), "no mbarrier: cp.async.bulk"),
    "fewer bytes than expected": (
        loading().replace("_, [r9], 256", "_, [r9], 272"),
        "deadlock: mbarrier.try_wait.* waits for 0 arrivals and 16 bytes",
    ),
    "not waited for": (
        loading().replace(WAIT, "bar.sync 0;"),
        "cp.async not waited for: ld.shared.u32 .* still copying",
    ),
    "waited for by another": (
        loading().replace(WAIT, "setp.ge.u32 p1, tid_, 32; @p1 bra W; bra LATE;" + WAIT + "LATE:"),
        "cp.async not waited for: ld.shared.u32",
    ),
    "over what is being read": (
        INIT + WRITE + "bar.sync 0;" + READ + EXPECT.format(256) + "@p7 " + LOAD.format(256) + WAIT,
        r"race: cp.async.bulk\S* of 16 bytes .* overwrites what thread .* read",
    ),
    "copied out, no fence": (
        WRITE + "bar.sync 0;" + STORE + GROUP + DONE,
        r"no proxy fence: cp.async.bulk\S* of 16 bytes .* reads what thread .0, 0, 0. wrote, no fence.proxy.async",
    ),
    "copied out, fenced by one": (
        WRITE + "@p7 " + FENCE + "bar.sync 0;" + STORE + GROUP + DONE,
        r"no proxy fence: cp.async.bulk\S* .* reads what thread .1, 0, 0. wrote",
    ),
    "copied out, no barrier": (WRITE + FENCE + STORE + GROUP + DONE, r"race: cp.async.bulk\S* .* reads what thread"),
    "copied out, never written": (STORE + GROUP + DONE, r"never written: cp.async.bulk"),
    "copied out, written over": (
        WRITE + FENCE + "bar.sync 0;" + STORE + GROUP + "bar.sync 0;" + WRITE + DONE,
        "race: st.shared.u32 .* overwrites what cp.async.bulk may still read",
    ),
    "copied out, no group": (WRITE + FENCE + "bar.sync 0;" + STORE + DONE, "bulk not waited for: thread exits"),
    "copied out, no wait": (WRITE + FENCE + "bar.sync 0;" + STORE + GROUP, "bulk not waited for: thread exits"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_bulk_copy_may_not_do_is_a_fault(name):
    body, report = FAULTS[name]
    with pytest.raises(Fault, match=report):
        run(body)


def test_a_fence_by_who_waited_is_as_good():
    # on the path from the writes to the copy, after the barrier
    run(WRITE + "bar.sync 0;" + FENCE + STORE + GROUP + DONE)


def test_another_form_is_unsupported():
    with pytest.raises(UnsupportedError, match=r"cp.async.bulk.tensor\S* is not supported"):
        run("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [r10], [d1], [r9];")


def test_elect_and_setmaxnreg():
    body = "elect.sync _|p1, -1; @p1 mov.u32 x, 1; {}"
    x, _ = run(body.format(""))
    assert x.tolist() == ([1] + [0] * 31) * 2
    with pytest.raises(InputError, match=r"setmaxnreg.dec.sync.aligned.u32 of 20, expected a multiple of 8 from 24"):
        run(body.format("setmaxnreg.dec.sync.aligned.u32 20;"))
    with pytest.raises(Fault, match=r"divergent warp: setmaxnreg.* without the last of the same four warps"):
        run(body.format("setmaxnreg.dec.sync.aligned.u32 40;"))
