# SPDX-License-Identifier: Apache-2.0
"""The dense forms and rope on a GPU's arrays, on the fake driver: see test_gpu_calls.py."""

import numpy as np
import pytest
from scripts import HEAD, Ran, Script

WAITS = {"cuStreamSynchronize", "cuMemcpyDtoHAsync", "cuCtxSynchronize"}

# `show` prints addresses as the log of a launch does.
SHOW = """
import mla_oracle
def show(*arrays):
    for array in arrays:
        pointer = array.pointer if isinstance(array, Buffer) else array.ctypes.data
        print(pointer.to_bytes(8, "little").hex(), end=" ")
"""

DENSE = SHOW + """
geometry = mla_oracle.Geometry(num_heads=3, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, kv_lora_rank=7)
case = {
    "q_nope": np.ones((2, 3, 9), np.float32)[..., :6], "q_pe": np.ones((2, 3, 4), np.float32),
    "c_kv": np.ones((8, 7), np.float32), "k_pe": np.ones((8, 4), np.float32),
    "w_uk": np.ones((3, 6, 7), np.float32), "w_uv": np.ones((3, 5, 7), np.float32),
}
there = {name: Dlpack(array) for name, array in case.items()}
how = {"backend": "cuda", "stream": 0x70}
def naive(**changed):
    return mla_oracle.attend_naive(geometry, **there | how | changed)
def absorbed(**changed):
    return mla_oracle.attend_absorbed(geometry, **there | how | changed)
def absorb(q_nope=there["q_nope"], w_uk=there["w_uk"], **options):
    return mla_oracle.absorb_query(q_nope, w_uk, **how | options)
def project(o_lat=Dlpack(np.ones((2, 3, 7), np.float32)), w_uv=there["w_uv"], **options):
    return mla_oracle.up_project(o_lat, w_uv, **how | options)
"""


def assert_queued(ran: Ran, launches: list[str], copies: list[str]) -> None:
    """These launches, copies of so many bytes to the GPU, and no wait; scratch goes back in the order of the stream."""
    assert [call[0] for call in ran.named("cuLaunchKernel")] == launches, ran.stderr
    assert [call[0] for call in ran.named("cuMemcpyHtoDAsync")] == copies
    assert not WAITS & {call[0] for call in ran.calls}
    assert all("0x70" in call for call in ran.calls if "Async" in call[0] or "Launch" in call[0])
    names = [call[0] for call in ran.calls]
    assert "cuMemFreeAsync" not in names[: len(names) - names[::-1].index("cuLaunchKernel")]


def test_naive_is_queued_on_the_arrays_themselves(on_fake: Script) -> None:
    script = """
out = naive()
show(*case.values(), out)
print(type(out).__name__, out.shape, out.strides, out.dtype, out.__cuda_array_interface__["stream"])
"""
    ran = on_fake(HEAD + DENSE + script, PARAMS="8,8,8,8,8,4,8")
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, out, *words = ran.stdout.split()
    assert " ".join(words) == "DeviceArray (2, 3, 5) (60, 20, 4) float32 112"
    assert_queued(ran, ["naive_decompress_f32", "naive_decompress_f32", "naive_attend_f32"], [])
    keys, values, attend = (call[call.index("params") + 1 :] for call in ran.named("cuLaunchKernel"))
    assert keys[:2] == [c_kv, w_uk] and values[:2] == [c_kv, w_uv]
    assert attend == [q_nope, q_pe, keys[2], k_pe, values[2], np.float32(10**-0.5).tobytes().hex(), out]


def test_absorbed_is_queued_on_the_arrays_themselves(on_fake: Script) -> None:
    script = """
out = absorbed(softmax_scale=0.5)
show(*case.values(), out)
print(out.shape, out.strides, out.dtype)
"""
    ran = on_fake(HEAD + DENSE + script, PARAMS="8,8,8,8,4,8")
    q_nope, q_pe, c_kv, k_pe, w_uk, w_uv, out, *words = ran.stdout.split()
    assert " ".join(words) == "(2, 3, 5) (60, 20, 4) float32"
    assert_queued(ran, ["absorbed_query_f32", "absorbed_attend_f32", "absorbed_project_f32"], [])
    query, attend, project = (call[call.index("params") + 1 :] for call in ran.named("cuLaunchKernel"))
    assert query[:2] == [q_nope, w_uk] and project[1:3] == [w_uv, out]
    assert attend == [query[2], q_pe, c_kv, k_pe, "0000003f", project[0]]


def test_the_ends_of_the_absorbed_form_are_queued_one_by_one(on_fake: Script) -> None:
    script = """
q_lat, out = absorb(), project()
show(case["q_nope"], case["w_uk"], q_lat, case["w_uv"], out)
print(q_lat.shape, out.shape, q_lat.dtype, out.dtype)
"""
    ran = on_fake(HEAD + DENSE + script, PARAMS="8,8,8")
    q_nope, w_uk, q_lat, w_uv, out, *words = ran.stdout.split()
    assert " ".join(words) == "(2, 3, 7) (2, 3, 5) float32 float32"
    assert_queued(ran, ["absorbed_query_f32", "absorbed_project_f32"], [])
    query, project = (call[call.index("params") + 1 :] for call in ran.named("cuLaunchKernel"))
    assert query == [q_nope, w_uk, q_lat] and project[1:] == [w_uv, out]


def test_the_stream_that_an_array_is_written_on_is_waited_for_by_ours(on_fake: Script) -> None:
    ran = on_fake(HEAD + DENSE + "naive(c_kv=Interface(case['c_kv'], stream=0x80))")
    assert ran.named("cuEventRecord") == [["0xe0", "0x80"]], ran.stderr
    assert ran.named("cuStreamWaitEvent") == [["0x70", "0xe0", "0"]]
    names = [call[0] for call in ran.calls]
    assert names.index("cuStreamWaitEvent") < names.index("cuLaunchKernel")


def test_bf16_is_taken_as_it_is_where_kernels_read_it(on_fake: Script) -> None:
    script = """
device = Device(0, 0x70)
there = {name: device.upload(array.astype(ml_dtypes.bfloat16)) for name, array in case.items()}
absorbed(**there), absorb(there["q_nope"], there["w_uk"]), project(w_uv=there["w_uv"])
refused(lambda: naive(**there))
"""
    ran = on_fake(HEAD + DENSE + script)
    assert ran.stdout == "InputError q_nope is bf16, expected f32\n", ran.stderr
    ends = "absorbed_query_bf16", "absorbed_project_bf16"
    launches = [call[0] for call in ran.named("cuLaunchKernel")]
    assert launches == [ends[0], "absorbed_attend_bf16", ends[1], *ends]


def test_dense_arrays_that_do_not_fit_or_lie_elsewhere_are_refused(on_fake: Script) -> None:
    script = """
def half(name):
    return Dlpack(case[name].astype(np.float16))
for form in (naive, absorbed):
    refused(lambda: form(w_uk=case["w_uk"]))
    refused(lambda: form(k_pe=Dlpack(case["k_pe"], 1)))
    refused(lambda: form(c_kv=Dlpack(case["c_kv"][:, :6])))
    refused(lambda: form(q_nope=Dlpack(np.ones((2, 3, 12), np.float32)[..., ::2])))
    refused(lambda: form(precision="f64"))
    refused(lambda: form(isa="v3"))
    refused(lambda: form(backend="strict"))
refused(lambda: absorb(w_uk=case["w_uk"]))
refused(lambda: absorb(w_uk=half("w_uk")))
refused(lambda: absorb(half("q_nope"), half("w_uk")))
refused(lambda: absorb(precision="f64"))
refused(lambda: project(w_uv=Dlpack(case["w_uv"], 1)))
refused(lambda: project(w_uv=half("w_uv")))
refused(lambda: project(Dlpack(np.ones((2, 3, 8), np.float32)[..., :7])))
refused(lambda: mla_oracle.attend_naive(geometry, **case, stream=0x70))
refused(lambda: mla_oracle.up_project(np.ones((2, 3, 7), np.float32), case["w_uv"], stream=0x70))
"""
    ran = on_fake(HEAD + DENSE + script, DEVICES=2)
    here = "is on the host, other arrays on a GPU, expected it there too"
    no_stream = "InputError stream is 112, expected None without arrays on a GPU and backend 'cuda'"
    both = [
        f"InputError w_uk {here}",
        "InputError k_pe is on CUDA device 1, expected device 0 like q_nope",
        "InputError c_kv is [8, 6], expected [t_kv, L] with L = 7 on axis 1",
        "InputError q_nope has an innermost stride of 8 bytes, expected 4 (contiguous)",
        "UnsupportedError arrays on a GPU are computed in precision 'f32'",
        "InputError isa is 'v3', expected None with backend 'cuda'",
        no_stream,
    ]
    assert ran.stdout.splitlines() == [
        *both, *both,
        f"InputError w_uk {here}",
        "InputError w_uk is f16, expected f32",
        "InputError q_nope is f16, expected f32 or bf16",
        "UnsupportedError arrays on a GPU are computed in precision 'f32'",
        "InputError w_uv is on CUDA device 1, expected device 0 like o_lat",
        "InputError w_uv is f16, expected f32 or bf16",
        "InputError o_lat has a stride of 96 bytes on axis 0, expected 84 (contiguous)",
        no_stream, no_stream,
    ], ran.stderr  # fmt: skip
    assert ran.named("cuLaunchKernel") == []


ROPE = SHOW + """
x, positions = np.ones((5, 3, 8), np.float16)[..., :6], np.arange(5)
yarn = mla_oracle.Yarn(factor=4.0, original_max_position_embeddings=4096)
def rope(x=Dlpack(x), positions=Dlpack(positions), turn=mla_oracle.rope_interleaved, **options):
    return turn(x, positions, **{"base": 100.0, "backend": "cuda", "stream": 0x70} | options)
"""
TURN = "8,4,4,4,8,4,4,8,8"


@pytest.mark.parametrize("neox", [False, True])
def test_rope_is_queued_on_the_arrays_themselves(on_fake: Script, neox: bool) -> None:
    script = f"""
out = rope(turn=mla_oracle.rope_{'neox' if neox else 'interleaved'}, rotary_dim=4, angles="closed")
show(x, positions, out)
print(type(out).__name__, out.shape, out.strides, out.dtype, out.__cuda_array_interface__["stream"])
"""
    ran = on_fake(HEAD + ROPE + script, PARAMS=TURN)
    x, positions, out, *words = ran.stdout.split()
    assert " ".join(words) == "DeviceArray (5, 3, 6) (72, 24, 4) float32 112"
    assert_queued(ran, ["rope_turn_f32", "rope_rotate_f16"], ["8"])  # kept
    turn, rotate = (call[call.index("params") + 1 :] for call in ran.named("cuLaunchKernel"))
    assert turn[:4] == [positions, "04000000", "0000c842", "02000000"]
    assert rotate[0] == x and rotate[1:3] == [turn[7][:8], turn[8][:8]]
    assert rotate[3] == f"0{neox:d}000000" and rotate[4] == out
    assert rotate[5:] == ["02000000", "06000000", "1800000000000000", "0800000000000000"]


def test_rope_of_one_head_has_no_axis_for_it(on_fake: Script) -> None:
    script = """
out = rope(Dlpack(x[:, 1]))
print(out.shape, out.strides)
"""
    ran = on_fake(HEAD + ROPE + script, PARAMS=TURN)
    assert ran.stdout == "(5, 6) (24, 4)\n", ran.stderr
    launch = ran.named("cuLaunchKernel")[1]
    assert " ".join(launch[:5]) == "rope_rotate_f16 grid 5 1 1"
    assert launch[-3:] == ["06000000", "1800000000000000", "0000000000000000"]


def test_positions_on_the_host_are_checked_there_and_a_table_is_made_of_them(on_fake: Script) -> None:
    script = """
rope(positions=np.int16([3, 1, 4, 1, 5]), yarn=yarn)
rope(positions=positions, angles="table")
refused(lambda: rope(positions=np.uint64([3, 1, 4, 1, 2**63])))
refused(lambda: rope(positions=positions[:4]))
"""
    ran = on_fake(HEAD + ROPE + script)
    assert ran.stdout.splitlines() == [
        "InputError positions[4] is 9223372036854775808, expected below 2^63",
        "InputError positions is [4], expected [T] with T = 5 on axis 0",
    ], ran.stderr
    assert [call[0] for call in ran.named("cuLaunchKernel")] == ["rope_turn_f32", *["rope_rotate_f16"] * 2]
    # positions and kept; cosines and sines
    assert [call[0] for call in ran.named("cuMemcpyHtoDAsync")] == ["40", "12", "60", "60"]
    assert not WAITS & {call[0] for call in ran.calls}


def test_rope_of_what_no_kernel_turns_is_refused(on_fake: Script) -> None:
    script = """
refused(lambda: rope(x))
refused(lambda: rope(Dlpack(x, 1)))
refused(lambda: rope(positions=Dlpack(np.int32([1, 2, 3, 4, 5]))))
refused(lambda: rope(positions=Dlpack(np.arange(10)[::2])))
refused(lambda: rope(Dlpack(np.ones((5, 3, 12), np.float16)[..., ::2])))
refused(lambda: rope(Dlpack(np.ones((5, 3, 6)))))
refused(lambda: rope(angles="table"))
refused(lambda: rope(precision="f64"))
refused(lambda: rope(rotary_dim=7))
refused(lambda: rope(x, positions))
refused(lambda: rope(backend="strict", stream=None))
"""
    ran = on_fake(HEAD + ROPE + script, DEVICES=2)
    assert ran.stdout.splitlines() == [
        "InputError x is on the host, other arrays on a GPU, expected it there too",
        "InputError positions is on CUDA device 0, expected device 1 like x",
        "InputError positions is i32, expected i64",
        "InputError positions has a stride of 16 bytes on axis 0, expected 8 (contiguous)",
        "InputError x has an innermost stride of 4 bytes, expected 2 (contiguous)",
        "InputError x is f64, expected f32 or f16 or bf16",
        "UnsupportedError angles is 'table', made on the host, and positions lie on a GPU",
        "UnsupportedError arrays on a GPU are computed in precision 'f32'",
        "InputError rotary_dim is 7, expected 0 to 6, the width of x",
        "InputError stream is 112, expected None without arrays on a GPU and backend 'cuda'",
        "InputError x is on DLPack device type 2, expected the CPU (1)",
    ], ran.stderr
