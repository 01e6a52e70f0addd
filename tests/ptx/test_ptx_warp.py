# SPDX-License-Identifier: Apache-2.0
"""What the lanes of a warp do together (PTX ISA 9.7.9.6, 9.7.13), divergence, and what they may not do."""

import numpy as np
import pytest
from snippets import evaluate, one

from mla_oracle.ptx import Fault

LANE = np.arange(32, dtype=np.uint32)
VALUE = LANE * 10 + 7


def shuffled(mode, lane, b, c):
    """The ISA's pseudocode: (source lane, predicate)."""
    bval, cval, mask = b & 31, c & 31, c >> 8 & 31
    top = (lane & mask) | (cval & ~mask)
    bottom = lane & mask
    if mode == "up":
        j, inside = lane - bval, lane - bval >= top
    elif mode == "down":
        j, inside = lane + bval, lane + bval <= top
    elif mode == "bfly":
        j, inside = lane ^ bval, lane ^ bval <= top
        inside = (lane ^ bval) <= top
    else:
        j = bottom | (bval & ~mask & 31)
        inside = j <= top
    return (j if inside else lane), inside


@pytest.mark.parametrize("c", [0x1F, 0x00, 0x181F, 0x1C1F, 0x1800, 0x0F])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode, c):
    for b in (0, 1, 2, 5, 16, 31):
        body = f"shfl.sync.{mode}.b32 x|p1, a, {b}, {c}, -1; selp.u32 y, 1, 0, p1;"
        got = evaluate(body, out={"x": np.uint32, "y": np.uint32}, a=VALUE)
        for lane in range(32):
            j, inside = shuffled(mode, lane, b, c)
            assert (got["x"][lane], got["y"][lane]) == (VALUE[j], int(inside)), (mode, b, hex(c), lane)


def test_votes():
    a = (LANE % 3 == 0).astype(np.uint32)
    start = "setp.ne.u32 p1, a, 0;"
    ballot = sum(1 << lane for lane in range(0, 32, 3))
    assert set(one(start + "vote.sync.ballot.b32 x, p1, -1;", np.uint32, a=a).tolist()) == {ballot}
    assert set(one(start + "vote.sync.ballot.b32 x, !p1, -1;", np.uint32, a=a).tolist()) == {ballot ^ 0xFFFFFFFF}
    for mode, some, every, none in (("any", 1, 1, 0), ("all", 0, 1, 0), ("uni", 0, 1, 1)):
        for values, expected in ((a, some), (np.ones_like(a), every), (np.zeros_like(a), none)):
            x = one(start + f"vote.sync.{mode}.pred p2, p1, -1; selp.u32 x, 1, 0, p2;", np.uint32, a=values)
            assert set(x.tolist()) == {expected}, mode


def test_redux():
    a = (LANE * 2654435761 % 1000 - 400).astype(np.uint32)
    signed = a.view(np.int32)
    for name, expected in (
        ("add.s32", int(signed.sum()) % (1 << 32)),
        ("min.s32", int(signed.min()) % (1 << 32)),
        ("max.s32", int(signed.max())),
        ("min.u32", int(a.min())),
        ("max.u32", int(a.max())),
        ("and.b32", int(np.bitwise_and.reduce(a))),
        ("or.b32", int(np.bitwise_or.reduce(a))),
        ("xor.b32", int(np.bitwise_xor.reduce(a))),
    ):
        assert set(one(f"redux.sync.{name} x, a, -1;", np.uint32, a=a).tolist()) == {expected}, name


def test_activemask_elect_and_match():
    got = evaluate("elect.sync x|p1, -1; selp.u32 y, 1, 0, p1;", out={"x": np.uint32, "y": np.uint32}, a=LANE)
    assert set(got["x"].tolist()) == {0} and got["y"].tolist() == [1] + [0] * 31
    body = "mov.u32 x, 0; setp.lt.u32 p1, a, 5; @p1 activemask.b32 x;"
    assert one(body, np.uint32, a=LANE).tolist() == [31] * 5 + [0] * 27
    x = one("match.any.sync.b32 x, a, -1;", np.uint32, a=LANE % 4)
    assert x.tolist() == [0x11111111 << lane % 4 for lane in range(32)]
    # 9.7.13.10: d is the member mask and p true if all members have the same value, else 0 and false
    body = "match.all.sync.b32 x|p1, {}, -1; selp.u32 y, 1, 0, p1;"
    for value, expected in (("5", (0xFFFFFFFF, 1)), ("a", (0, 0))):
        got = evaluate(body.format(value), out={"x": np.uint32, "y": np.uint32}, a=LANE)
        assert set(zip(got["x"].tolist(), got["y"].tolist(), strict=True)) == {expected}


def test_members_may_be_a_part_of_the_warp():
    body = "setp.lt.u32 p1, tid_, 16; mov.u32 x, 99; @!p1 bra DONE; redux.sync.add.s32 x, a, 0xFFFF;"
    assert one(body, np.uint32, a=LANE).tolist() == [120] * 16 + [99] * 16
    both = "setp.lt.u32 p1, tid_, 16; selp.b32 r1, 0xFFFF, 0xFFFF0000, p1; redux.sync.add.s32 x, a, r1;"
    assert one(both, np.uint32, a=LANE).tolist() == [120] * 16 + [376] * 16


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ("setp.lt.u32 p1, tid_, 16; @!p1 bra DONE; shfl.sync.bfly.b32 x, a, 1, 31, -1;", "shfl.* never come"),
        ("setp.lt.u32 p1, tid_, 16; @p1 shfl.sync.bfly.b32 x, a, 1, 31, -1;", "shfl.* never come"),
        (
            "setp.lt.u32 p1, tid_, 16; @!p1 ret; vote.sync.ballot.b32 x, p1, -1;",
            "names lanes that have exited .0xffff0000.",
        ),
        ("shfl.sync.bfly.b32 x, a, 1, 31, 0xFFFE;", "member mask 0xfffe without its own lane"),
        (
            "setp.lt.u32 p1, tid_, 16; @!p1 bra DONE; shfl.sync.bfly.b32 x, a, 16, 31, 0xFFFF;",
            "without thread .16, 0, 0., which it",
        ),
        (
            "setp.lt.u32 p1, tid_, 16; selp.b32 r1, -1, 0xFFFF0000, p1; redux.sync.add.s32 x, a, r1;",
            "other lanes in it have another",
        ),
        ("setp.lt.u32 p1, tid_, 3; @p1 bra DONE; bar.warp.sync -1;", "bar.warp.sync.* never come"),
    ],
)
def test_a_collective_without_its_lanes_is_a_fault(body, report):
    with pytest.raises(Fault, match="divergent warp: .*" + report):
        one(body, np.uint32, a=LANE)


def test_lanes_that_part_meet_again_at_the_first_common_instruction():
    body = """
        setp.lt.u32 p1, a, 7; @p1 bra LOW;
        mul.lo.u32 r1, a, 3; bra.uni JOIN;
    LOW: mov.u32 r1, 1000; setp.lt.u32 p2, a, 3; @p2 bra LOWER; add.u32 r1, r1, a; bra.uni JOIN;
    LOWER: add.u32 r1, r1, 500;
    JOIN: redux.sync.add.u32 x, r1, -1;
    """
    each = [1500] * 3 + [1000 + lane for lane in range(3, 7)] + [3 * lane for lane in range(7, 32)]
    assert set(one(body, np.uint32, a=LANE).tolist()) == {sum(each)}


def test_a_loop_runs_as_often_as_each_lane_asks():
    body = (
        "mov.u32 x, 0; mov.u32 r1, a; LOOP: setp.eq.u32 p1, r1, 0; @p1 bra DONE; add.u32 x, x, r1; "
        "sub.u32 r1, r1, 1; bra LOOP;"
    )
    a = np.arange(200, dtype=np.uint32) % 37
    assert one(body, np.uint32, a=a).tolist() == (a * (a + 1) // 2).tolist()


def test_brx_idx_jumps_by_a_table():
    body = """
        rem.u32 r1, a, 3;
    TABLE: .branchtargets ONE, TWO, THREE;
        brx.idx r1, TABLE;
    ONE: mov.u32 x, 10; bra DONE;
    TWO: mov.u32 x, 20; bra DONE;
    THREE: mov.u32 x, 30;
    """
    assert one(body, np.uint32, a=LANE).tolist() == [[10, 20, 30][lane % 3] for lane in range(32)]


def test_calls_of_device_functions():
    module = """
    .func (.param .b32 result) helper (.param .b32 first, .param .align 8 .b8 second[16])
    {
        .reg .pred p; .reg .b32 r<4>;
        ld.param.u32 r0, [first]; ld.param.u32 r1, [second+8];
        setp.gt.u32 p, r0, 5; @p bra BIG;
        add.u32 r2, r0, r1; st.param.b32 [result], r2; ret;
    BIG: mul.lo.u32 r2, r0, r1; st.param.b32 [result], r2; ret;
    }
    """
    call = """{{ .param .b32 p0; .param .align 8 .b8 p9[16]; .param .b32 back;
        st.param.b32 [p0], {0}; st.param.b32 [p9+8], 3;
        call.uni (back), helper, (p0, p9); ld.param.b32 {1}, [back]; }}"""
    body = call.format("a", "r9") + call.format("r9", "x")
    first = [v * 3 if v > 5 else v + 3 for v in LANE.tolist()]
    assert one(body, np.uint32, a=LANE, module=module).tolist() == [v * 3 if v > 5 else v + 3 for v in first]
