# SPDX-License-Identifier: Apache-2.0
"""The public functions on a GPU's arrays, on the fake driver: where they go, what is checked, that nobody waits."""

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
refused(lambda: mla_oracle.decode_paged(**there | {"seq_lens": np.int32([16, 0])}, **options))
refused(lambda: mla_oracle.decode_paged(**there | {"kv_cache": Dlpack(case["kv_cache"][:, :0])}, **options))
"""
    ran = on_fake(HEAD + CASE + script)
    assert ran.stdout.startswith("InputError block_table[1, 2] is 9, expected 0 to 6: seq_lens[1] is 15"), ran.stderr
    assert "InputError seq_lens[0] is 16, expected at most 15" in ran.stdout
    assert "InputError kv_cache has block_size 0" in ran.stdout
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
refuse({"q": case["q"]})
refuse({"kv_cache": case["kv_cache"]})
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
        "InputError q is on the host, other arrays on a GPU, expected it there too",
        "InputError kv_cache is on the host, other arrays on a GPU, expected it there too",
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


ROWS = """
import mla_oracle
rows = {
    "kv_cache": np.zeros((7, 5, 24), np.float16),
    "c_kv": np.ones((4, 16), np.float16),
    "k_pe": np.ones((4, 8), np.float16),
    "slot_mapping": np.int64([34, -1, 0]),
}
there = {name: Dlpack(array) for name, array in rows.items()}
def append(**changed):
    return mla_oracle.append_kv(**there | changed, backend="cuda", stream=0x70)
print(" ".join(rows[n].ctypes.data.to_bytes(8, "little").hex() for n in ("c_kv", "k_pe", "slot_mapping", "kv_cache")))
"""


def test_a_cache_on_the_gpu_is_written_where_it_lies(on_fake: Script) -> None:
    ran = on_fake(HEAD + ROWS + "append()", PARAMS="8,8,8,8,4,4,4")
    (call,) = ran.named("cuLaunchKernel")
    assert call[0] == "append_rows_f16" and "0x70" in call, ran.stderr
    assert " ".join(call[-7:-3]) == ran.stdout.strip()
    assert call[-3:] == ["10000000", "08000000", "05000000"]
    assert ran.named("cuMemAllocAsync") == [] and not WAITS & {call[0] for call in ran.calls}


def test_slots_on_the_host_are_checked_and_a_cache_must_be_there_to_write(on_fake: Script) -> None:
    script = """
append(slot_mapping=rows["slot_mapping"])
refused(lambda: append(slot_mapping=np.int64([35])))
refused(lambda: append(slot_mapping=np.int64([3, 3])))
refused(lambda: append(k_pe=Dlpack(rows["k_pe"][:, :7])))
refused(lambda: append(kv_cache=rows["kv_cache"]))
refused(lambda: append(kv_cache=Interface(rows["kv_cache"], data=(rows["kv_cache"].ctypes.data, True))))
refused(lambda: mla_oracle.append_kv(**rows, stream=0x70))
"""
    ran = on_fake(HEAD + ROWS + script)
    assert ran.stdout.splitlines()[1:] == [
        "InputError slot_mapping[0] is 35, expected below 35, the slots of kv_cache",
        "InputError slot_mapping[1] is 3, which slot_mapping[0] already is",
        "InputError kv_cache rows are 24 wide, expected c_kv's 16 + k_pe's 7 elements",
        "InputError kv_cache is on the host, other arrays on a GPU, expected it there too",
        "InputError kv_cache is read-only, expected an array to write into",
        "InputError stream is 112, expected None without arrays on a GPU and backend 'cuda'",
    ], ran.stderr


STATES = """
import mla_oracle
partial_out, partial_lse = np.ones((3, 2, 5, 16), ml_dtypes.bfloat16).view(np.float16), np.ones((3, 2, 5), np.float32)
def merge(out=partial_out, lse=partial_lse, **options):
    return mla_oracle.merge_states(Dlpack(out), Dlpack(lse), backend="cuda", stream=0x70, **options)
"""


def test_states_on_the_gpu_are_merged_there(on_fake: Script) -> None:
    script = """
out, lse = merge(lse_base="2", empty_lse=-7)
print(out.shape, out.strides, lse.shape, lse.strides, out.dtype)
print(*(array.pointer.to_bytes(8, "little").hex() for array in (out, lse)))
"""
    ran = on_fake(HEAD + STATES + script, PARAMS="8,8,4,4,4,8,8,4,4")
    shapes, results = ran.stdout.splitlines()
    assert shapes == "(2, 5, 16) (320, 64, 4) (2, 5) (20, 4) float32", ran.stderr
    (call,) = ran.named("cuLaunchKernel")
    assert call[0] == "merge_states_f16" and call[2] == "10"
    # ln 2, -7, -7; out, lse; S, V
    assert call[-7:-4] == ["1872313f", "0000e0c0", "0000e0c0"]
    assert call[-4:] == [*results.split(), "03000000", "10000000"]
    assert ran.named("cuMemcpyHtoDAsync") == [] and not WAITS & {call[0] for call in ran.calls}


def test_states_that_no_kernel_merges_are_refused(on_fake: Script) -> None:
    script = """
refused(lambda: merge(lse=partial_lse[:, :1]))
refused(lambda: merge(lse=partial_lse.astype(np.float16)))
refused(lambda: merge(out=partial_out[..., ::2]))
refused(lambda: merge(lse=np.ones((3, 2, 10), np.float32)[..., ::2]))
refused(lambda: merge(precision="f64"))
refused(lambda: mla_oracle.merge_states(Dlpack(partial_out), partial_lse, backend="cuda"))
refused(lambda: mla_oracle.merge_states(partial_out, partial_lse, stream=0x70))
"""
    ran = on_fake(HEAD + STATES + script)
    assert ran.stdout.splitlines() == [
        "InputError partial_lse is [3, 1, 5], expected [S, ...] with partial_out [S, ..., V], which is [3, 2, 5, 16]",
        "InputError partial_lse is f16, expected f32",
        "InputError partial_out has a stride of 320 bytes on axis 0, expected 160 (contiguous)",
        "InputError partial_lse has a stride of 80 bytes on axis 0, expected 40 (contiguous)",
        "UnsupportedError arrays on a GPU are computed in precision 'f32'",
        "InputError partial_lse is on the host, other arrays on a GPU, expected it there too",
        "InputError stream is 112, expected None without arrays on a GPU and backend 'cuda'",
    ], ran.stderr
