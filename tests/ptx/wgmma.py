# SPDX-License-Identifier: Apache-2.0
"""One warpgroup, one or more wgmma on an image of shared memory: matrices laid out as the PTX ISA says, by swizzle.

`lay` writes a matrix chunk by chunk (16 bytes), from the tables and figures of 9.7.15.5.1.2 alone: an atom has eight
rows of W / 16 chunks, and chunk j of row r lies in column j ^ r (W = 128), j ^ r / 2 (64) or j ^ r / 4 (32).
"""

import ml_dtypes
import numpy as np

from mla_oracle.ptx import Interpreter

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
MODES = {16: 0, 128: 1, 64: 2, 32: 3}  # bytes of a swizzled row -> bits 62, 63 of the descriptor
LANES = range(128)


def descriptor(start, leading, stride, width, base=0):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | MODES[width] << 62


def swizzled(row, column, width):
    """Where in its atom of eight rows a chunk lies, in bytes."""
    shift = {16: 8, 32: 4, 64: 2, 128: 1}[width]
    return row * width + (column ^ row // shift % (width // 16)) * 16


def lay(image, matrix, *, start, leading, stride, width, turned):
    """Write `matrix` [rows][columns], columns along K, into the bytes of `image`."""
    rows, columns = matrix.shape
    chunks = width // 16
    for row in range(rows):
        for column in range(columns):
            # the number of the chunk along the contiguous dimension, the number of the row of chunks along the other
            chunk, line = (row // 8, column) if turned else (column // 8, row)
            if turned and width == 16:
                at = swizzled(line % 8, 0, 16) + chunk * stride + line // 8 * leading
            elif turned:
                at = swizzled(line % 8, chunk % chunks, width) + chunk // chunks * leading + line // 8 * stride
            elif width == 16:
                at = swizzled(line % 8, 0, 16) + chunk * leading + line // 8 * stride
            else:
                assert chunk < chunks
                at = swizzled(line % 8, chunk, width) + line // 8 * stride
            at += start + 2 * (row % 8 if turned else column % 8)
            image[at : at + 2] = np.frombuffer(matrix[row, column].tobytes(), np.uint8)


def d_place(lane, i):
    """Element i of the lane's part of D -> (row, column): figure "WGMMA .m64nNk16 accumulator D"."""
    return 16 * (lane // 32) + lane % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2


def a_place(lane, i):
    """Element i of the lane's part of A -> (row, column)."""
    return 16 * (lane // 32) + lane % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2


KERNEL = """
.version 8.5
.target sm_90a
.address_size 64
.visible .entry product(.param .u64 image_p, .param .u64 a_p, .param .u64 c_p, .param .u64 d_p)
{{
    .reg .pred p<8>;
    .reg .b32 r<16>;
    .reg .b32 a<4>;
    .reg .f32 f<{registers}>;
    .reg .b64 d<16>;
    .shared .align 1024 .b8 tile[{size}];
    mov.u32 r0, %tid.x;
    mov.u32 r1, tile;
    ld.param.u64 d0, [image_p];
    cvta.to.global.u64 d0, d0;
    mov.u32 r2, r0;
    shl.b32 r3, r0, 4;
FILL:
    setp.ge.u32 p0, r3, {filled};
    @p0 bra FILLED;
    cvt.u64.u32 d1, r3; add.u64 d1, d0, d1; add.u32 r4, r1, r3;
    ld.global.v4.b32 {{r5, r6, r7, r8}}, [d1];
    st.shared.v4.b32 [r4], {{r5, r6, r7, r8}};
    add.u32 r3, r3, {step};
    bra FILL;
FILLED:
    {fence}
    {barrier}
    ld.param.u64 d0, [a_p]; mul.wide.u32 d1, r0, 16; add.u64 d0, d0, d1;
    ld.global.v4.b32 {{a0, a1, a2, a3}}, [d0];
    ld.param.u64 d0, [c_p]; mul.wide.u32 d1, r0, {row}; add.u64 d0, d0, d1;
    {loads}
    {body}
    ld.param.u64 d0, [d_p]; add.u64 d0, d0, d1;
    {stores}
    ret;
}}
"""
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def instruction(n, kind, a, b, *, adds=1, scales=(1, 1), turned=(0, 0)):
    """`a`: None for registers, or a descriptor; `b`: a descriptor."""
    d = ", ".join(f"f{i}" for i in range(n // 2))
    left = "{a0, a1, a2, a3}" if a is None else f"{a:#x}"
    trans = turned[1:] if a is None else turned
    rest = ", ".join(map(str, (adds, *scales, *trans)))
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{d}}}, {left}, {b:#x}, {rest};"


def run(
    body, image, n, *, a=None, c=None, threads=128, machine=None, fence="fence.proxy.async;", barrier="bar.sync 0;",
    filled=None, blocks=1,
):  # fmt: skip
    """D [threads / 2][n] after `body`, with A [64][16] in registers a0..a3 and C in f0 ... as D lies."""
    words = np.zeros((threads, 4), np.uint32)
    held = np.zeros((threads, n // 2), np.float32)
    for lane in range(threads):
        if a is not None:
            part = np.array([a[a_place(lane % 128, i)] for i in range(8)], a.dtype)
            words[lane] = part.view(np.uint16).view(np.uint32)
        if c is not None:
            held[lane] = [c[d_place(lane, i)] for i in range(n // 2)]
    loads = "".join(f"ld.global.f32 f{i}, [d0+{4 * i}];" for i in range(n // 2))
    stores = "".join(f"st.global.f32 [d0+{4 * i}], f{i};" for i in range(n // 2))
    text = KERNEL.format(
        registers=n // 2 + 8, size=len(image), filled=filled or len(image), step=16 * threads, row=2 * n,
        loads=loads, stores=stores, body=body, fence=fence, barrier=barrier,
    )  # fmt: skip
    machine = machine or Interpreter("sm_90a", threads=1)
    kernel = machine.load(text, "product", file="product.ptx")
    out = machine.empty(held.shape, np.float32)
    arrays = [machine.upload(array) for array in (image, words, held)]
    machine.launch(kernel, (blocks, 1, 1), (threads, 1, 1), 0, *arrays, out)
    got, d = machine.download(out), np.full((threads // 2, n), np.nan, np.float32)
    for lane in range(threads):
        for i in range(n // 2):
            d[d_place(lane, i)] = got[lane, i]
    return d
