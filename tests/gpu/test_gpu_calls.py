# SPDX-License-Identifier: Apache-2.0
"""decode_paged of arrays on a GPU, on the fake driver: where they go, what is checked, and that nobody waits."""

from scripts import HEAD, Script

CASE = """
import mla_oracle
B, T, H, D, V = 2, 3, 4, 24, 16
case = {
    "q": np.ones((B, T, H, D), np.float32),
    "kv_cache": np.ones((7, 5, D), np.float16),
    "block_table": np.int32([[0, 6, 2], [1, 3, 9]]),
    "seq_lens": np.int32([12, 7]),
}
options = {"softmax_scale": 0.5, "head_dim_v": V, "backend": "cuda"}
def on_gpu(**changed):
    return {name: Dlpack(array) for name, array in (case | changed).items()}
def address(array):
    return array.ctypes.data.to_bytes(8, "little").hex()
"""

WAITS = {"cuStreamSynchronize", "cuMemcpyDtoHAsync", "cuCtxSynchronize"}


def test_arrays_on_the_gpu_are_neither_copied_nor_waited_for(on_fake: Script) -> None:
    script = """
out, lse = mla_oracle.decode_paged(**on_gpu(), **options, stream=0x70)
print(out.shape, out.strides, out.dtype, lse.shape, out.__cuda_array_interface__["stream"])
print(address(case["q"]), address(case["kv_cache"]), address(case["block_table"]))
"""
    ran = on_fake(HEAD + CASE + script, PARAMS="8,4,8,8")
    shapes, addresses = ran.stdout.splitlines()
    assert shapes == "(2, 3, 4, 16) (768, 256, 64, 4) float32 (2, 3, 4) 112"
    decode, combine = ran.named("cuLaunchKernel")
    assert decode[0] == "paged_decode_f16" and combine[0] == "paged_combine_f32"
    q, stored, cache, table = decode[-4:]
    assert f"{q} {cache} {table}" == addresses and stored == "00000000"
    assert ran.named("cuMemcpyHtoDAsync") == []
    assert not WAITS & {call[0] for call in ran.calls}
    assert all("0x70" in call for call in ran.calls if "Async" in call[0] or "Launch" in call[0])


def test_tables_on_the_host_are_checked_there_and_copied(on_fake: Script) -> None:
    script = """
there = on_gpu()
tables = {name: case[name] for name in ("block_table", "seq_lens")}
out, lse = mla_oracle.decode_paged(**there | tables, **options)
refused(lambda: mla_oracle.decode_paged(**there | tables | {"seq_lens": np.int32([12, 15])}, **options))
"""
    ran = on_fake(HEAD + CASE + script)
    assert ran.stdout.startswith("InputError block_table[1, 2] is 9, expected 0 to 6: seq_lens[1] is 15"), ran.stderr
    assert [call[0] for call in ran.named("cuMemcpyHtoDAsync")] == ["24", "8"]
    assert not WAITS & {call[0] for call in ran.calls}


def test_one_token_without_an_axis_of_its_own_comes_back_without_one(on_fake: Script) -> None:
    script = """
out, lse = mla_oracle.decode_paged(**on_gpu(q=case["q"][:, 1]), **options)
print(out.shape, out.strides, lse.shape, lse.strides)
"""
    ran = on_fake(HEAD + CASE + script)
    assert ran.stdout == "(2, 4, 16) (256, 64, 4) (2, 4) (16, 4)\n", ran.stderr


def test_ids_on_the_gpu_are_checked_when_asked_for(on_fake: Script) -> None:
    script = """
from mla_oracle.gpu import forms
mla_oracle.decode_paged(**on_gpu(), **options, check_ids=True)
forms.check_ids = lambda *args: (0, 1)  # a kernel of the fake driver finds nothing
refused(lambda: mla_oracle.decode_paged(**on_gpu(seq_lens=np.int32([12, 15])), **options, check_ids=True))
mla_oracle.decode_paged(**on_gpu(seq_lens=np.int32([12, 15])), **options)
"""
    ran = on_fake(HEAD + CASE + script)
    assert ran.stdout.startswith("InputError block_table[1, 2] is 9, expected 0 to 6: seq_lens[1] is 15"), ran.stderr
    assert ran.stderr == ""
    names = [call[0] for call in ran.named("cuLaunchKernel")]
    assert names == ["paged_check_ids", *["paged_decode_f16", "paged_combine_f32"] * 2]


def test_arrays_on_two_devices_and_what_does_not_fit_is_refused(on_fake: Script) -> None:
    script = """
def refuse(changed={}, **more):
    refused(lambda: mla_oracle.decode_paged(**on_gpu() | changed, **options | more))
refuse({"kv_cache": Dlpack(case["kv_cache"], 1)})
refuse({"q": Dlpack(case["q"][..., :23])})
refuse({"seq_lens": Dlpack(np.int64([1, 2]))})
refuse({"q": Dlpack(case["q"][..., ::2]), "kv_cache": Dlpack(case["kv_cache"][..., :12])}, head_dim_v=12)
refuse({"q": [1.0]})
refuse(head_dim_v=25)
refuse(softmax_scale=-1)
refuse(precision="f64")
refuse(out_dtype="bf16")
refuse(isa="v3")
refuse(stream="s")
refuse(case, stream=0x70)
refuse(backend="strict")
"""
    ran = on_fake(HEAD + CASE + script, DEVICES=2)
    assert ran.stderr == ""
    for line, words in zip(ran.stdout.splitlines(), [
        "InputError kv_cache is on CUDA device 1, expected device 0 like q",
        "InputError kv_cache is [7, 5, 24], expected [num_blocks, block_size, D] with D = 23 on axis 2",
        "InputError seq_lens is i64, expected i32",
        "InputError q has an innermost stride of 8 bytes, expected 4 (contiguous)",
        "InputError q is a list, expected an array",
        "InputError head_dim_v is 25, expected",
        "InputError softmax_scale is -1, expected",
        "UnsupportedError arrays on a GPU are computed in precision 'f32'",
        "UnsupportedError arrays on a GPU are computed in precision 'f32'",
        "InputError isa is 'v3', expected None with backend 'cuda'",
        "InputError stream is 's', expected a handle",
        "InputError stream is 112, expected None without arrays on a GPU and backend 'cuda'",
        "InputError q is on DLPack device type 2, expected the CPU (1)",
    ], strict=True):  # fmt: skip
        assert line.startswith(words), (line, words)


def test_numpy_arrays_are_copied_there_and_back(on_fake: Script) -> None:
    script = """
out, lse = mla_oracle.decode_paged(**case, **options)
print(type(out).__name__, out.shape, np.isnan(out).all())  # what nobody wrote is NaN
"""
    ran = on_fake(HEAD + CASE + script)
    assert ran.stdout == "ndarray (2, 3, 4, 16) True\n", ran.stderr


def test_without_a_device_it_is_missing(on_fake: Script) -> None:
    ran = on_fake(HEAD + CASE + "refused(lambda: mla_oracle.decode_paged(**on_gpu(), **options))", DEVICES=0)
    assert ran.stdout == "MissingError the NVIDIA driver finds no CUDA device\n", ran.stderr
