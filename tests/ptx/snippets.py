# SPDX-License-Identifier: Apache-2.0
"""A few lines of PTX on arrays, one number per thread.

evaluate("add.s32 x, a, b;", out={"x": np.int32}, a=..., b=...) -> {"x": array}
"""

import numpy as np

from mla_oracle.ptx import Interpreter

KERNEL = """
.version 8.5
.target sm_90
.address_size 64
{module}
.visible .entry snippet({params})
{{
    .reg .pred p<8>;
    .reg .b16 h<16>;
    .reg .b32 r<32>;
    .reg .b64 d<32>;
    .reg .b32 tid_;
    .reg .b64 at_, base_;
    {registers}
    {shared}
    mov.u32 tid_, %tid.x;
    {loads}
    {body}
DONE:
    {stores}
    ret;
}}
"""


def text(body, out, inputs, shared="", module=""):
    """PTX of a kernel with a parameter per input, then per output."""
    sizes = {name: array.dtype.itemsize for name, array in inputs.items()}
    sizes |= {name: np.dtype(dtype).itemsize for name, dtype in out.items()}
    params = ", ".join(f".param .u64 {name}_p" for name in sizes)
    registers = "\n".join(f".reg .b{8 * max(size, 2)} {name};" for name, size in sizes.items())
    at = "ld.param.u64 base_, [{0}_p]; mul.wide.u32 at_, tid_, {1}; add.s64 at_, at_, base_;"
    loads = [at.format(n, sizes[n]) + f" ld.global.b{8 * sizes[n]} {n}, [at_];" for n in inputs]
    stores = [at.format(n, sizes[n]) + f" st.global.b{8 * sizes[n]} [at_], {n};" for n in out]
    return KERNEL.format(
        module=module,
        params=params,
        registers=registers,
        shared=shared,
        loads="\n".join(loads),
        body=body,
        stores="\n".join(stores),
    )


def evaluate(body, *, out, threads=None, shared="", module="", smem=0, machine=None, blocks=1, **inputs):
    """{name: [threads]} of the registers `out` names, after `body` has run with each input in a register."""
    inputs = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    threads = threads or len(next(iter(inputs.values())))
    machine = machine or Interpreter("sm_90", threads=1)
    kernel = machine.load(text(body, out, inputs, shared, module), "snippet", file="snippet.ptx")
    results = {name: machine.empty((threads,), dtype) for name, dtype in out.items()}
    args = [machine.upload(array) for array in inputs.values()]
    machine.launch(kernel, (blocks, 1, 1), (threads, 1, 1), smem, *args, *results.values())
    return {name: machine.download(buffer) for name, buffer in results.items()}


def one(body, dtype, **inputs):
    """The array of register x."""
    return evaluate(body, out={"x": dtype}, **inputs)["x"]
