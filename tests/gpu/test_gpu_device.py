# SPDX-License-Identifier: Apache-2.0
"""Device on the fake driver: what reaches the driver, and what is refused before it does."""

from scripts import HEAD, Script

PARAMS = "8,8,4,8,4,8"


def test_a_launch_is_packed_as_the_kernel_declares_it(on_fake: Script) -> None:
    script = """
device = Device(0, stream=0x70)
x = device.empty((5,), np.float32)
device.launch(load(device), (7, 6, 5), (32, 2, 1), 1024, x, None, np.int32(-2), np.int64(1 << 40), np.float32(1),
              np.float64(-1))
print(x.pointer.to_bytes(8, "little").hex())
"""
    ran = on_fake(HEAD + script, PARAMS=PARAMS)
    (call,) = ran.named("cuLaunchKernel")
    shape = "grid 7 6 5 block 32 2 1 smem 1024 stream 0x70 extra (nil)"
    assert " ".join(call[:-6]) == f"tiny {shape} params", ran.stderr
    assert call[-6:] == [
        ran.stdout.strip(), "0" * 16, "feffffff", "0000000000010000", "0000803f", "000000000000f0bf",
    ]  # fmt: skip
    assert ran.named("cuFuncSetAttribute") == []


def test_a_kernel_without_parameters_is_launched_without_any(on_fake: Script) -> None:
    ran = on_fake(HEAD + "device = Device(0); device.launch(load(device, 'none'), (1, 1, 1), (1, 1, 1), 0)")
    ((*_, last),) = ran.named("cuLaunchKernel")
    assert last == "params", ran.stderr


def test_more_shared_memory_than_48_kib_is_asked_for_once(on_fake: Script) -> None:
    script = """
device = Device(0)
kernel = load(device, "none")
for smem in (49152, 49153, 60000, 100000):
    device.launch(kernel, (1, 1, 1), (1, 1, 1), smem)
refused(lambda: device.launch(kernel, (1, 1, 1), (1, 1, 1), 101376 - 512 + 1))
"""
    ran = on_fake(HEAD + script, SMEM=101376, ARCH=86)
    # The kernel has 512 bytes of its own.
    assert ran.named("cuFuncSetAttribute") == [["none", "8", str(101376 - 512)]]
    assert [call[10] for call in ran.named("cuLaunchKernel")] == ["49152", "49153", "60000", "100000"]
    expected = "none of tiny.cu for sm_86 needs 100865 bytes of dynamic shared memory, the device has 100864"
    assert ran.stdout == f"UnsupportedError {expected}\n"
    order = [call[0] for call in ran.calls if call[0] in ("cuFuncSetAttribute", "cuLaunchKernel")]
    assert order.index("cuFuncSetAttribute") == 1


def test_kernels_of_the_package_are_compiled_for_the_device_and_loaded_once(on_fake: Script) -> None:
    script = """
device = Device(0)
first = device.kernel("merge.cu", "merge_states_f32")
print(first, first is device.kernel("merge.cu", "merge_states_f32"), first is Device(0).kernel(first.file, first.name))
refused(lambda: device.kernel("merge.cu", "merge"))
refused(lambda: device.kernel("gone.cu", "merge"))
"""
    ran = on_fake(HEAD + script, ARCH=89)
    first, unknown, gone = ran.stdout.splitlines()
    assert first == "merge_states_f32 of merge.cu for sm_89 True True"
    assert unknown.startswith("InputError kernel of merge.cu is 'merge', expected merge_states_f32, ")
    assert gone.startswith("InputError kernel file is 'gone.cu', expected one of ")
    assert ran.named("cuModuleLoadData") == [["ELF"]]
    assert ran.named("cuDevicePrimaryCtxRetain") == [["0"]]


def test_an_architecture_that_the_kernels_do_not_support_is_refused(on_fake: Script) -> None:
    ran = on_fake(HEAD + "refused(lambda: Device(0).kernel('merge.cu', 'merge_states_f32'))", ARCH=75)
    assert ran.stdout == "UnsupportedError arch is sm_75, the kernels need sm_80 or newer\n"


def test_another_machines_kernel_and_another_number_of_arguments_are_refused(on_fake: Script) -> None:
    script = """
class Other:
    file, name = "tiny.cu", "tiny"
device = Device(0)
refused(lambda: device.launch(Other(), (1, 1, 1), (1, 1, 1), 0))
refused(lambda: device.launch(load(device), (1, 1, 1), (1, 1, 1), 0))
refused(lambda: device.launch(load(device), (0, 1, 1), (1, 1, 1), 0))
"""
    ran = on_fake(HEAD + script)
    assert ran.stdout.splitlines() == [
        "InputError tiny is another machine's kernel, expected one of this device's",
        "InputError tiny takes 6 arguments, 0 given",
        "InputError grid.x of tiny is 0, expected 1 to 2147483647",
    ]
    assert ran.named("cuLaunchKernel") == []


def test_arrays_come_back_as_they_went_with_their_strides(on_fake: Script) -> None:
    script = """
device = Device(0)
whole = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
for array in (whole, whole[::-1, 1:3, ::2], whole[:, ::-2].T, whole[0, 0, 0], whole[:, :0],
              whole.astype(ml_dtypes.bfloat16), np.broadcast_to(np.int64([1, 2]), (3, 2)), np.array([True, False])):
    array = np.asarray(array)
    there = device.upload(array)
    back = device.download(there)
    assert (there.shape, there.dtype, there.strides) == (array.shape, array.dtype, array.strides)
    assert back.strides == array.strides and back.dtype == array.dtype and back.tobytes() == array.tobytes()
e = device.empty((2, 3), ml_dtypes.bfloat16)
print(e.shape, e.strides, hasattr(e, "__cuda_array_interface__"), np.isnan(device.download(e).astype(float)).all())
del there, e
"""
    ran = on_fake(HEAD + script)
    assert ran.stdout == "(2, 3) (6, 2) False True\n", ran.stderr
    assert len(ran.named("cuMemAllocAsync")) == len(ran.named("cuMemFreeAsync")) == 9


def test_what_cannot_be_uploaded_is_refused(on_fake: Script) -> None:
    script = """
device = Device(0)
refused(lambda: device.upload([1.0]))
refused(lambda: device.upload(np.array(["a"])))
refused(lambda: device.upload(np.zeros((2, 6), np.uint8)[:, 1:5].view(np.float32)))
refused(lambda: device.upload(np.zeros(2, [("x", "f4"), ("y", "i2")])["x"]))
"""
    ran = on_fake(HEAD + script)
    kind, dtype, *strides = ran.stdout.splitlines()
    assert kind == "InputError cannot upload a list, expected a numpy array or one on a CUDA device"
    assert dtype.startswith("InputError dtype is <U1, expected one of f64 f32 ")
    assert strides == ["InputError stride 0 of array is 6 bytes, expected a multiple of 4"] * 2
    assert ran.named("cuMemAllocAsync") == []


def test_everything_is_queued_on_the_callers_stream_and_only_download_waits(on_fake: Script) -> None:
    script = """
class Theirs:
    def __cuda_stream__(self):
        return 0, 0x70
class Torch:
    cuda_stream = 0x70
for stream in (0x70, Theirs(), Torch()):
    device = Device(0, stream)
    x = device.upload(np.ones(4, np.float32))
    y = device.upload(Dlpack(np.ones(4, np.float32)))
    z = device.upload(Interface(np.ones(4, np.float32), stream=0x70))
    device.launch(load(device, "none"), (1, 1, 1), (1, 1, 1), 0)
    del x
"""
    ran = on_fake(HEAD + script)
    assert (ran.stdout, ran.stderr) == ("", "")
    queued = [call for call in ran.calls if any(word in call[0] for word in ("Async", "Stream", "Launch", "Event"))]
    assert {call[0] for call in queued} == {"cuMemAllocAsync", "cuMemFreeAsync", "cuMemcpyHtoDAsync", "cuLaunchKernel"}
    assert len(queued) == 12 and all("0x70" in call for call in queued)


def test_streams_are_handles_or_objects_that_name_one(on_fake: Script) -> None:
    script = """
print([Device(0, stream).stream for stream in (None, 0, 1, 2, 0x70)])
for stream in ("s", True, -1, 0.5):
    refused(lambda: Device(0, stream))
"""
    first, *others = on_fake(HEAD + script).stdout.splitlines()
    assert first == "[1, 1, 1, 2, 112]"
    assert len(others) == 4
    assert all(" expected a handle or an object with __cuda_stream__" in line for line in others)


def test_the_callers_context_is_current_again_afterwards(on_fake: Script) -> None:
    script = """
device = Device(0)
try:
    device.download(device.empty((4,), np.float32))
except OracleError:
    print("failed")
device.upload(np.ones(3))
"""
    for variables in ({}, {"FAIL": "cuMemcpyDtoHAsync=1", "DEVICES": 2}):
        ran = on_fake(HEAD + script, **variables)
        assert ("failed" in ran.stdout) == bool(variables)
        assert len(ran.named("cuCtxPushCurrent")) == len(ran.named("cuCtxPopCurrent")) > 0


def test_after_a_fault_memory_is_given_up_without_a_word(on_fake: Script) -> None:
    script = """
device = Device(0)
x = device.empty((4,), np.float32)
refused(lambda: device.download(x))
del x
"""
    ran = on_fake(HEAD + script, FAIL="cuStreamSynchronize=700,cuMemFreeAsync=700")
    assert ran.stdout.startswith("DriverError cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")
    assert ran.stderr == ""


def test_a_device_that_is_not_there_is_refused(on_fake: Script) -> None:
    ran = on_fake(HEAD + "refused(lambda: Device(2)); refused(lambda: Device(-1)); print(Device(1).arch)", DEVICES=2)
    assert ran.stdout.splitlines() == [
        "InputError device is 2, expected 0 to 1",
        "InputError device is -1, expected 0 to 1",
        "sm_90a",
    ]


def test_events_are_recorded_on_the_devices_stream_timed_and_given_back(on_fake: Script) -> None:
    script = """
device = Device(0, stream=0x70)
begin, end = device.record(), device.record()
print(device.milliseconds(begin, end))
del begin, end
"""
    ran = on_fake(HEAD + script)
    assert ran.stdout == "1.5\n", ran.stderr
    assert [call for call in ran.calls if call[0].startswith("cuEvent")] == [
        ["cuEventCreate", "0"],
        ["cuEventRecord", "0xe0", "0x70"],
        ["cuEventCreate", "0"],
        ["cuEventRecord", "0xe0", "0x70"],
        ["cuEventSynchronize", "0xe0"],
        ["cuEventElapsedTime", "0xe0", "0xe0"],
        ["cuEventDestroy", "0xe0"],
        ["cuEventDestroy", "0xe0"],
    ]


def test_a_fault_before_an_event_shows_where_it_is_waited_for(on_fake: Script) -> None:
    script = """
device = Device(0)
begin, end = device.record(), device.record()
refused(lambda: device.milliseconds(begin, end))
"""
    ran = on_fake(HEAD + script, FAIL="cuEventSynchronize=700")
    assert ran.stdout.startswith("DriverError cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS while waiting"), ran.stderr
