# SPDX-License-Identifier: Apache-2.0
"""Arrays as callers hand them over: taken without a copy where they can be, refused in one line where they cannot.

`Exporter` offers one protocol of an array and hides the others; `Capsule` builds a DLPack tensor by hand.
"""

import ctypes
import gc
import warnings
import weakref
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from problems import paged, same

from mla_oracle import InputError, append_kv, decode_paged
from mla_oracle.arrays import as_array


class Exporter:
    """What `array` exports by DLPack: "versioned", or "legacy" as before DLPack 1.0; or by the "interface"."""

    def __init__(self, array, protocol):
        if protocol == "interface":
            self.__array_interface__ = array.__array_interface__
        else:
            self.__dlpack__ = array.__dlpack__ if protocol == "versioned" else lambda: array.__dlpack__()
            self.__dlpack_device__ = array.__dlpack_device__
        self.array = array


PROTOCOLS = ["versioned", "legacy", "interface"]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Capsule:
    """Exports the memory of a numpy array as any DLPack type; counts how often it is released."""

    exported: ClassVar = []  # kept for good: what is exported outlives every view of it

    def __init__(self, array, code, bits, *, lanes=1, major=None, flags=0, offset=0, strides=None, device=1):
        self.array, self.released, self.device = array, 0, device
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = None if strides is None else (ctypes.c_int64 * array.ndim)(*strides)
        tensor = DLTensor(array.ctypes.data, device, 0, array.ndim, code, bits, lanes, self.shape, self.strides, offset)

        def release(_):
            self.released += 1

        self.deleter = DELETER(release)
        fields = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]
        if major is not None:
            versions = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]
            fields = [*versions, *fields[1:], ("flags", ctypes.c_uint64), fields[0]]
        self.managed = type("Managed", (ctypes.Structure,), {"_fields_": fields})()
        self.managed.tensor, self.managed.deleter = tensor, self.deleter
        self.name = b"dltensor"
        if major is not None:
            self.managed.major, self.managed.flags, self.name = major, flags, b"dltensor_versioned"

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, *, max_version=None):
        self.exported.append(self)
        return new_capsule(ctypes.addressof(self.managed), self.name, None)


def refusal(value):
    with pytest.raises(InputError) as error:
        as_array("x", value)
    assert str(error.value).isprintable()
    return str(error.value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_exported_arrays_decode_to_the_bits_of_numpy_ones(protocol):
    problem = paged(1, [5, 0, 9], T=2)
    names = ("q", "kv_cache", "block_table", "seq_lens")
    result = decode_paged(**problem | {name: Exporter(problem[name], protocol) for name in names})
    truth = decode_paged(**problem)
    assert same(result.out, truth.out) and same(result.lse, truth.lse)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_exported_memory_is_shared_not_copied(protocol):
    cache = np.zeros((2, 2, 3), np.float32)
    append_kv(Exporter(cache, protocol), np.ones((1, 2), np.float32), np.ones((1, 1), np.float32), np.array([2]))
    assert cache[1, 0].tolist() == [1, 1, 1] and cache.sum() == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_exported_strides_are_kept(protocol):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for view in (array, array.transpose(2, 0, 1), array[::-1, ::2], array[:, 1:2], array[:, :0]):
        taken = as_array("x", Exporter(view, protocol))
        assert np.array_equal(taken, view) and (taken.strides == view.strides or not view.size)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_taken_array_keeps_its_owner_alive(protocol):
    array = np.arange(5.0)
    exporter = Exporter(array, protocol)
    alive = weakref.ref(array)
    taken = as_array("x", exporter)
    del array, exporter
    gc.collect()
    assert alive() is not None and taken.tolist() == [0, 1, 2, 3, 4]
    del taken
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("protocol", ["versioned", "interface"])
def test_a_read_only_export_is_accepted_to_read_and_refused_to_write(protocol):
    cache = np.zeros((1, 1, 2), np.float32)
    cache.flags.writeable = False
    row = np.ones((1, 1), np.float32)
    assert as_array("x", Exporter(cache, protocol)).shape == (1, 1, 2)
    with pytest.raises(InputError, match="kv_cache is read-only"):
        append_kv(Exporter(cache, protocol), row, row, np.array([0]))


@pytest.mark.parametrize("major", [None, 1])
def test_bf16_and_fp8_come_through_dlpack(major):
    for code, bits, dtype in [
        (4, 16, ml_dtypes.bfloat16),
        (10, 8, ml_dtypes.float8_e4m3fn),
        (11, 8, ml_dtypes.float8_e4m3fnuz),
        (12, 8, ml_dtypes.float8_e5m2),
        (14, 8, ml_dtypes.float8_e8m0fnu),
    ]:
        array = np.array([[1, 2, 0.5], [4, 8, 0.25]], dtype)
        taken = as_array("x", Capsule(array, code, bits, major=major))
        assert taken.dtype == dtype and np.array_equal(taken, array) and np.shares_memory(taken, array)


def test_a_byte_offset_and_strides_in_elements_are_honoured():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    capsule = Capsule(array, 2, 32, offset=4, strides=(1, 4))
    capsule.shape[:] = [2, 3]
    assert as_array("x", capsule).tolist() == [[1, 5, 9], [2, 6, 10]]


@pytest.mark.parametrize("major", [None, 1])
def test_a_capsule_is_released_once_and_only_after_the_last_view(major):
    capsule = Capsule(np.ones(4, np.float32), 2, 32, major=major)
    view = as_array("x", capsule)[1:]
    gc.collect()
    assert capsule.released == 0
    del view
    gc.collect()
    assert capsule.released == 1


@pytest.mark.parametrize(
    ("capsule", "text"),
    [
        ({"code": 5, "bits": 64}, "x cannot be read through DLPack: DLPack type code 5 of 64 bits, 1 lanes"),
        (
            {"code": 2, "bits": 32, "lanes": 2},
            "x cannot be read through DLPack: DLPack type code 2 of 32 bits, 2 lanes",
        ),
        ({"code": 2, "bits": 32, "major": 2}, "x cannot be read through DLPack: DLPack version 2, expected 1"),
        ({"code": 2, "bits": 32, "device": 2}, "x is on DLPack device type 2, expected the CPU (1)"),
    ],
)
def test_a_capsule_that_cannot_be_read_is_refused_and_not_consumed(capsule, text):
    exporter = Capsule(np.ones(4, np.float32), **capsule)
    assert refusal(exporter) == text
    assert exporter.released == 0


def test_a_used_capsule_is_refused():
    array = np.ones(3)
    used = array.__dlpack__()
    exporter = Exporter(array, "legacy")
    exporter.__dlpack__ = lambda: used
    as_array("x", exporter)
    assert refusal(exporter) == "x cannot be read through DLPack: not a fresh DLPack capsule"


@pytest.mark.parametrize(
    "error", [TypeError(), BufferError("no\nway"), ValueError("meta"), KeyError("k"), AttributeError()]
)
def test_whatever_an_exporter_raises_is_an_input_error_of_one_line(error):
    def fail(*_, **__):
        raise error

    exporter = Exporter(np.ones(3), "versioned")
    exporter.__dlpack__ = fail
    assert refusal(exporter).startswith("x cannot be read through DLPack: ")
    exporter.__dlpack_device__ = fail
    assert refusal(exporter).startswith("x cannot be read through DLPack: ")


@pytest.mark.parametrize(
    "interface",
    [None, {}, {"shape": (1,), "typestr": "zz", "data": (0, False), "version": 3}, {"shape": 3, "typestr": "<f4"}],
)
def test_a_broken_array_interface_is_refused(interface):
    exporter = Exporter(np.ones(3), "interface")
    exporter.__array_interface__ = interface
    assert refusal(exporter).startswith("x ")


@pytest.mark.parametrize(
    "value", [None, 1, 1.0, "f32", b"f32", [1.0], (1.0,), {}, range(3), memoryview(b"1234"), object()]
)
def test_what_is_not_an_array_is_refused(value):
    expected = "expected an array (numpy, DLPack or the array interface)"
    assert refusal(value) == f"x is a {type(value).__name__}, {expected}"


def test_subclasses_are_taken_as_plain_arrays(tmp_path):
    problem = paged(2, [5, 9])
    truth = decode_paged(**problem)
    mapped = np.memmap(tmp_path / "cache", np.float32, "w+", shape=problem["kv_cache"].shape)
    mapped[:] = problem["kv_cache"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        table = np.matrix(problem["block_table"])
    result = decode_paged(**problem | {"kv_cache": mapped, "block_table": table})
    assert same(result.out, truth.out) and type(result.out) is np.ndarray


def test_a_masked_array_is_refused_because_its_mask_would_be_lost():
    assert refusal(np.ma.masked_invalid([1.0, np.nan])).startswith("x is a masked array, expected")
