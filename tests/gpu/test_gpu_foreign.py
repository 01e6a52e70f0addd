# SPDX-License-Identifier: Apache-2.0
"""Device arrays through DLPack and __cuda_array_interface__, on the fake driver: no copy, no wait of the host."""

import pytest
from scripts import HEAD, Script


def test_both_protocols_give_the_array_itself(on_fake: Script) -> None:
    script = """
device = Device(0)
base = np.arange(48, dtype=np.float32).reshape(4, 12)
for array in (base, base[1:, 2:6], base[:, ::3], base[0], base[:0]):
    for wrapped in (Interface(array), Dlpack(array), Dlpack(array, versioned=False), Dlpack(array, kind=13)):
        there = device.upload(wrapped)
        assert (there.shape, there.strides, there.dtype) == (array.shape, array.strides, array.dtype) or not array.size
        assert there.pointer == array.ctypes.data
        np.testing.assert_array_equal(device.download(there), array)
        assert there.owner is wrapped or there.owner.dtype == "f32"
contiguous = device.upload(Interface(base, strides=None))
print(contiguous.strides)
"""
    ran = on_fake(HEAD + script)
    assert ran.stdout == "(48, 4)\n", ran.stderr
    assert ran.named("cuMemAllocAsync") == [] and ran.named("cuMemcpyHtoDAsync") == []


@pytest.mark.parametrize(("stream", "told"), [(None, 1), (1, 1), (2, 2), (0x70, 0x70)])
def test_dlpack_producers_are_told_the_stream_that_must_wait(on_fake: Script, stream: object, told: int) -> None:
    script = f"""
x = Dlpack(np.ones(3, np.float32))
Device(0, {stream!r}).upload(x)
print(x.stream)
"""
    ran = on_fake(HEAD + script)
    assert ran.stdout == f"{told}\n", ran.stderr
    assert ran.named("cuStreamSynchronize") == ran.named("cuEventRecord") == []


def test_the_stream_of_an_array_interface_is_waited_for_by_ours_not_by_the_host(on_fake: Script) -> None:
    script = """
x = np.ones(3, np.float32)
Device(0, 0x70).upload(Interface(x, stream=0x80))
Device(0).upload(Interface(x, stream=2))
"""
    ran = on_fake(HEAD + script)
    calls = [call for call in ran.calls if "Event" in call[0] or "Synchronize" in call[0]]
    assert calls == [
        ["cuEventCreate", "2"], ["cuEventRecord", "0xe0", "0x80"], ["cuStreamWaitEvent", "0x70", "0xe0", "0"],
        ["cuEventDestroy", "0xe0"],
        ["cuEventCreate", "2"], ["cuEventRecord", "0xe0", "0x2"], ["cuStreamWaitEvent", "0x1", "0xe0", "0"],
        ["cuEventDestroy", "0xe0"],
    ], ran.stderr  # fmt: skip


def test_the_same_stream_and_no_stream_are_not_waited_for(on_fake: Script) -> None:
    script = """
x = np.ones(3, np.float32)
Device(0).upload(Interface(x, stream=1))
Device(0).upload(Interface(x, stream=None))
Device(0).upload(Interface(x))
Device(0, 0x70).upload(Interface(x, stream=0x70))
mine = Device(0, 0x70).empty((3,), np.float32)
assert Device(0, 0x70).upload(mine) is mine
"""
    ran = on_fake(HEAD + script)
    assert ran.stderr == ""
    assert [call for call in ran.calls if "Event" in call[0] or "Synchronize" in call[0]] == []


def test_results_are_handed_on_with_the_stream_they_are_written_on(on_fake: Script) -> None:
    script = """
for stream in (None, 0x70):
    made = Device(0, stream).empty((2, 3), np.float32)
    fields = made.__cuda_array_interface__
    print(fields["version"], fields["shape"], fields["typestr"], fields["strides"], fields["stream"])
    assert fields["data"] == (made.pointer, False)
other = Device(0, 0x80)
other.upload(made)
"""
    ran = on_fake(HEAD + script)
    assert ran.stdout.splitlines() == ["3 (2, 3) <f4 (12, 4) 1", "3 (2, 3) <f4 (12, 4) 112"], ran.stderr
    assert ran.named("cuEventRecord") == [["0xe0", "0x70"]]
    assert ran.named("cuStreamWaitEvent") == [["0x80", "0xe0", "0"]]


def test_arrays_on_two_devices_are_refused(on_fake: Script) -> None:
    script = """
x = np.ones(3, np.float32)
print(foreign.device_of({"q": x, "kv_cache": Dlpack(x, 1), "seq_lens": x}), foreign.device_of({"q": x}))
refused(lambda: foreign.device_of({"q": Dlpack(x, 1), "table": x, "kv_cache": Dlpack(x, 0)}))
refused(lambda: foreign.device_of({"q": Dlpack(x, 0), "kv_cache": Interface(x)}))
refused(lambda: Device(0).upload(Dlpack(x, 1)))
refused(lambda: Device(0).upload(Interface(x)))
refused(lambda: Device(0).upload(Device(1).empty((1,), np.float32)))
"""
    ran = on_fake(HEAD + script, DEVICES=2, OWNER=1)
    assert ran.stdout.splitlines() == [
        "1 None",
        "InputError kv_cache is on CUDA device 0, expected device 1 like q",
        "InputError kv_cache is on CUDA device 1, expected device 0 like q",
        *["InputError array is on CUDA device 1, expected device 0"] * 3,
    ], ran.stderr


def test_arrays_that_no_kernel_could_read_are_refused(on_fake: Script) -> None:
    script = """
x = np.ones((2, 4), np.float32)
def taken(array):
    return lambda: foreign.take("q", array)
class Guarded(Dlpack):
    def __dlpack__(self, **keywords):
        raise BufferError("Can't export tensors\\\\nthat require gradient")
class Negative(Dlpack):
    def is_neg(self):
        return True
refused(taken(Interface(x, strides=(18, 4))))
refused(taken(Interface(x, data=(x.ctypes.data + 2, False))))
refused(taken(Interface(x, data=(100, False))))
refused(taken(Interface(x, typestr=">f4")))
refused(taken(Interface(x, typestr="<c8")))
refused(taken(Interface(x, typestr="nonsense")))
refused(taken(Interface(x, mask=x)))
refused(taken(Interface(x, stream=0)))
refused(taken(Interface(x, shape=None)))
refused(taken(Guarded(x)))
refused(taken(Negative(x)))
refused(lambda: Device(0).upload(Dlpack(x, kind=10)))
"""
    ran = on_fake(HEAD + script)
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["InputError"] * 12, ran.stdout + ran.stderr
    for line, words in zip(lines, [
        "stride 0 of q is 18 bytes, expected a multiple of 4", "q begins at address ",
        "q is at address 0x64, which is not CUDA memory", "q: dtype is >f4, expected one of",
        "q: dtype is complex64, expected one of", "q cannot be read through __cuda_array_interface__: TypeError",
        "q is a masked array", "q names stream 0 in __cuda_array_interface__, expected 1, 2 or",
        "q cannot be read through __cuda_array_interface__: TypeError",
        "q cannot be read through DLPack: Can't export tensors", "q cannot be read through DLPack: torch exports",
        "cannot upload a Dlpack, expected a numpy array or one on a CUDA device",
    ], strict=True):  # fmt: skip
        assert words in line


def test_a_read_only_array_says_so(on_fake: Script) -> None:
    script = """
x = np.ones(3, np.float32)
print(foreign.take("q", Interface(x)).readonly, foreign.take("q", Interface(x, data=(x.ctypes.data, True))).readonly)
"""
    assert on_fake(HEAD + script).stdout == "False True\n"
