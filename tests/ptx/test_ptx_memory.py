# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and atomics in every space, and what the interpreter says of accesses that must not be."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from snippets import evaluate, one, text

from mla_oracle.ptx import Fault, Interpreter

LANE = np.arange(64, dtype=np.uint32)
SHARED = ".shared .align 16 .b8 tile[1024];"
OWN = "mov.u32 r1, tile; shl.b32 r2, tid_, 4; add.s32 r1, r1, r2;"  # 16 bytes of the tile for each thread


def launch(body, arrays, *, threads=32, machine=None, shared="", checks=True):
    """Run `body` with the arrays' addresses in d0, d1 ...; their contents afterwards."""
    machine = machine or Interpreter("sm_90", threads=1, checks=checks)
    buffers = [machine.empty(a.shape, a.dtype) if a is EMPTY else machine.upload(a) for a in arrays]
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    loads = "".join(f"ld.param.u64 d{i}, [p{i}];" for i in range(len(arrays)))
    ptx = f""".version 8.5\n.target sm_90\n.address_size 64
    .visible .entry k({params}) {{ .reg .pred p<8>;
    .reg .b16 h<8>; .reg .b32 r<32>; .reg .b64 d<32>; .reg .b32 tid_; {shared}
    {loads} mov.u32 tid_, %tid.x;
    {body}
    DONE: ret; }}"""
    machine.launch(machine.load(ptx, "k", file="k.ptx"), (1, 1, 1), (threads, 1, 1), 0, *buffers)
    return [machine.download(b) for b in buffers]


EMPTY = np.zeros(64, np.float32)


def test_every_width_with_sign_and_zeros():
    a = np.arange(256, dtype=np.uint8)[::-1].copy()
    out = np.zeros(32, np.uint64)
    for load, view in (("s8", np.int8), ("u8", np.uint8), ("s16", np.int16), ("u16", np.uint16), ("s32", np.int32)):
        size = np.dtype(view).itemsize
        body = f"mul.wide.u32 d2, tid_, {size}; add.s64 d2, d2, d0; ld.global.{load} d3, [d2];"
        body += "mul.wide.u32 d4, tid_, 8; add.s64 d4, d4, d1; st.global.u64 [d4], d3;"
        _, got = launch(body, [a, out])
        assert got.view(np.int64).tolist() == a.view(view)[:32].astype(np.int64).tolist()


@pytest.mark.parametrize("n", [2, 4])
def test_vectors_are_neighbours(n):
    a = np.arange(32 * n, dtype=np.uint32)
    names = ", ".join(f"r{10 + i}" for i in range(n))
    back = ", ".join(f"r{10 + n - 1 - i}" for i in range(n))
    body = f"mul.wide.u32 d2, tid_, {4 * n}; add.s64 d3, d2, d0; ld.global.v{n}.b32 {{{names}}}, [d3];"
    body += f"add.s64 d3, d2, d1; st.global.v{n}.b32 [d3], {{{back}}};"
    _, got = launch(body, [a, np.zeros_like(a)])
    assert got.reshape(32, n)[:, ::-1].ravel().tolist() == a.tolist()


def test_generic_addresses_reach_shared_and_local_memory():
    body = (
        OWN
        + """
        cvt.u64.u32 d10, r1; cvta.shared.u64 d11, d10; st.u32 [d11+4], a; cvta.to.shared.u64 d12, d11;
        cvt.u32.u64 r3, d12; ld.shared.u32 r4, [r3+4];
        mov.u64 d1, stack; cvta.local.u64 d2, d1; st.u32 [d2+8], r4; ld.local.u32 x, [stack+8];
    """
    )
    assert one(body, np.uint32, a=LANE, shared=SHARED + ".local .align 8 .b8 stack[16];").tolist() == LANE.tolist()


def test_constant_and_global_variables_of_the_module():
    module = (
        ".const .align 4 .b8 table[8] = {1, 0, 0, 0, 255, 255, 255, 255};\n.global .align 4 .u32 seen[2] = {40, 50};"
    )
    body = "mov.u64 d1, table; ld.const.u32 r1, [d1+4]; ld.global.u32 r2, [seen+4]; add.s32 x, r1, r2;"
    assert set(one(body, np.uint32, a=LANE, module=module).tolist()) == {49}
    with pytest.raises(Fault, match=r"out of bounds: ld.const.u32 of 4 bytes .* 8 bytes into an array of 8"):
        one("mov.u64 d1, table; ld.const.u32 x, [d1+8];", np.uint32, a=LANE, module=module)


def test_constant_memory_is_not_written():
    module = ".const .align 4 .b8 table[8];"
    with pytest.raises(Fault, match=r"read-only: st.u32 of 4 bytes"):
        one("mov.u64 d1, table; st.u32 [d1], a; mov.u32 x, 0;", np.uint32, a=LANE, module=module)


ATOMICS = {
    "add.u32": lambda old, b: old + b,
    "min.s32": lambda old, b: min(old - (old >> 31 << 32), b) % (1 << 32),
    "max.u32": max,
    "and.b32": lambda old, b: old & b,
    "or.b32": lambda old, b: old | b,
    "xor.b32": lambda old, b: old ^ b,
    "exch.b32": lambda old, b: b,
    "inc.u32": lambda old, b: 0 if old >= b else old + 1,
    "dec.u32": lambda old, b: b if old == 0 or old > b else old - 1,
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_give_the_old_value_and_store_the_new(space, name):
    # 9.7.13.5; lanes one after the other, though in no promised order
    memory = np.array([0xFFFFFFF0, 7], np.uint32)
    body = "mul.wide.u32 d2, tid_, 4; add.s64 d2, d2, d1; ld.global.u32 r1, [d0];"
    if space == "shared":
        body += "setp.eq.u32 p1, tid_, 0; @p1 st.shared.u32 [tile], r1; bar.sync 0;"
        body += f"atom.shared.{name} r2, [tile], 5; bar.sync 0; ld.shared.u32 r3, [tile];"
        body += "@p1 st.global.u32 [d0], r3;"
    else:
        body += f"bar.sync 0; atom.global.{name} r2, [d0], 5;"
    got, old = launch(body + "st.global.u32 [d2], r2;", [memory, np.zeros(32, np.uint32)], shared=SHARED)
    chain = [0xFFFFFFF0]
    for _ in range(32):
        chain.append(ATOMICS[name](chain[-1], 5) % (1 << 32))
    assert sorted(old.tolist()) == sorted(chain[:-1]) and got.tolist() == [chain[-1], 7]


def test_compare_and_swap_and_float_addition():
    body = (
        "atom.global.cas.b32 r1, [d0], 3, tid_; red.global.add.f32 [d1], 0f3F000000; "
        "red.global.add.f64 [d2], 0d3FD0000000000000;"
    )
    got, single, double = launch(body, [np.array([3], np.uint32), np.zeros(1, np.float32), np.zeros(1)])
    assert got.tolist() == [0] and single.tolist() == [16.0] and double.tolist() == [8.0]


FAULTS = {
    "past the end": (
        "ld.global.u32 r1, [d0+64];",
        "out of bounds: ld.global.u32 of 4 bytes at global .*, 64 bytes into an array of 64",
    ),
    "across the end": ("ld.global.v2.u32 {r1, r2}, [d0+64];", "out of bounds"),
    "before the beginning": ("st.global.u32 [d0+-4], r1;", "out of bounds: st.global.u32"),
    "a null pointer": ("mov.u64 d5, 0; ld.global.u32 r1, [d5];", "out of bounds: .* a null pointer"),
    "address arithmetic in 32 bits": ("cvt.u32.u64 r1, d0; cvt.u64.u32 d5, r1; ld.u32 r1, [d5];", "out of bounds"),
    "misaligned": ("ld.global.u32 r1, [d0+2];", "misaligned: ld.global.u32 of 4 bytes"),
    "a misaligned vector": ("ld.global.v4.u32 {r1, r2, r3, r4}, [d0+8];", "misaligned: ld.global.v4.u32 of 16 bytes"),
    "past shared memory": (
        "ld.shared.u32 r1, [tile+1024];",
        "out of bounds: .* at shared 0x400, the block has 1024 bytes",
    ),
    "misaligned shared": ("st.shared.u64 [tile+4], d0;", "misaligned: st.shared.u64"),
    "past the stack": ("ld.local.u32 r1, [stack+16];", "out of bounds: .* beyond the thread's stack"),
    "unwritten shared": (
        "st.shared.u8 [tile+3], 1; ld.shared.u32 r1, [tile];",
        "never written: ld.shared.u32 of 4 bytes at shared 0x0",
    ),
    "an unwritten stack": ("ld.local.u32 r1, [stack];", "never written: ld.local.u32"),
    "unwritten global": (
        "ld.global.u32 r1, [d1+8];",
        "never written: ld.global.u32 .* .8 bytes into an array of 256. reads",
    ),
    "an atomic on unwritten shared": ("atom.shared.add.u32 r1, [tile], 1;", "never written: atom.shared"),
    "a trap": ("trap;", "trap: the kernel stopped itself"),
    "two spaces in one access": (
        "mov.u64 d5, tile; cvta.shared.u64 d5, d5; setp.eq.u32 p1, tid_, 3; selp.b64 d5, d5, d0, p1; ld.u32 r1, [d5];",
        "mixed spaces",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_access_is_a_fault_that_says_where(name):
    body, report = FAULTS[name]
    shared = SHARED + ".local .align 16 .b8 stack[16];"
    with pytest.raises(Fault, match=report + r".*k.ptx, PTX line \d+, block \(0, 0, 0\), thread \(\d+, 0, 0\)$"):
        launch(body, [np.zeros(16, np.uint32), EMPTY], shared=shared)


def test_only_lanes_that_execute_count():
    body = "setp.lt.u32 p1, tid_, 16; mul.wide.u32 d2, tid_, 4; add.s64 d2, d2, d0; @p1 ld.global.u32 r1, [d2];"
    launch(body, [np.zeros(16, np.uint32)])
    with pytest.raises(Fault, match=r"thread .16, 0, 0.$"):
        launch(body.replace("tid_, 16", "tid_, 17"), [np.zeros(16, np.uint32)])


def test_what_a_kernel_wrote_may_be_read_by_the_next():
    machine = Interpreter("sm_90", threads=1)
    buffer = machine.empty((32,), np.uint32)
    write = machine.load(
        text(
            "mul.wide.u32 d2, tid_, 4; add.s64 d2, d2, a; st.global.u32 [d2], tid_;", {}, {"a": np.zeros(1, np.uint64)}
        ),
        "snippet",
    )
    machine.launch(write, (1, 1, 1), (16, 1, 1), 0, machine.upload(np.full(32, buffer.pointer, np.uint64)))
    read = "mul.wide.u32 d2, tid_, 4; add.s64 d2, d2, a; ld.global.u32 x, [d2];"
    pointers = np.full(16, buffer.pointer, np.uint64)
    assert evaluate(read, out={"x": np.uint32}, machine=machine, a=pointers)["x"].tolist() == list(range(16))
    with pytest.raises(Fault, match="never written"):
        evaluate(read, out={"x": np.uint32}, machine=machine, a=np.full(17, buffer.pointer, np.uint64))


def test_what_a_strided_upload_leaves_out_was_never_written():
    a = np.arange(64, dtype=np.uint32)[::2]
    body = "mul.wide.u32 d2, tid_, 8; add.s64 d2, d2, d0; ld.global.u32 r1, [d2{}];"
    launch(body.format(""), [a])
    with pytest.raises(Fault, match="never written"):
        launch(body.format("+4"), [a], threads=8)


def test_strides_survive_an_upload_and_its_download():
    machine = Interpreter()
    base = np.arange(24.0).reshape(4, 6)
    for array in (base, base[::2, 1::2], base[::-1, ::-2], base.T, np.broadcast_to(base[0], (3, 6)), base[:0]):
        buffer = machine.upload(array)
        assert buffer.strides == array.strides and np.array_equal(machine.download(buffer), array)


def test_an_array_over_terabytes_is_uploaded_by_its_elements():
    memory = np.zeros(16, np.float32)
    machine = Interpreter()
    huge = as_strided(memory, (4,), (0,))
    assert machine.download(machine.upload(huge)).tolist() == [0.0] * 4


def test_without_checks_bounds_and_alignment_still_hold():
    for name in ("past the end", "misaligned", "past shared memory", "past the stack"):
        with pytest.raises(Fault):
            launch(
                FAULTS[name][0],
                [np.zeros(16, np.uint32), EMPTY],
                shared=SHARED + ".local .align 16 .b8 stack[16];",
                checks=False,
            )
    for name in ("unwritten shared", "an unwritten stack", "unwritten global"):
        launch(
            FAULTS[name][0],
            [np.zeros(16, np.uint32), EMPTY],
            shared=SHARED + ".local .align 16 .b8 stack[16];",
            checks=False,
        )
