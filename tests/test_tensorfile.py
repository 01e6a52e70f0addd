# SPDX-License-Identifier: Apache-2.0
"""tensorfile: safetensors files built here byte by byte, and files written for other readers.

`packed` builds a file from any header, so a test can lie in it; `refused` asks for the one line that says so.
"""
import json
import os
import stat
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_oracle.dtypes import TAGS, dtype
from mla_oracle.errors import InputError
from mla_oracle.tensorfile import read_tensors, write_tensors


def packed(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(tag="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": tag, "shape": list(shape), "data_offsets": list(offsets)}


VALID = packed(
    {"__metadata__": {"kind": "paged"}, "q": entry(), "n": entry("I32", (1, 1), (8, 12))},
    struct.pack("<ffi", 1.5, -2.0, 7),
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "case.safetensors"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "fuzzed.safetensors"


def refused(path, call, *arguments):
    with pytest.raises(InputError) as error:
        call(path, *arguments)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(("cannot read ", "cannot write "))
    assert str(path) in message
    return message


def refuses(file, content, expected):
    file.write_bytes(content)
    message = refused(file, read_tensors)
    assert expected in message, message


def reads_or_refuses(file, content):
    """Every content is a valid file or one line; a valid file spends each byte of its data on a tensor."""
    file.write_bytes(content)
    try:
        tensors, metadata = read_tensors(file)
    except InputError as error:
        assert str(error).startswith(f"cannot read {file}: ")
        assert len(str(error).splitlines()) == 1
        return None
    length = struct.unpack("<Q", content[:8])[0]
    assert sum(tensor.nbytes for tensor in tensors.values()) == len(content) - 8 - length
    assert all(isinstance(text, str) for item in metadata.items() for text in item)
    return tensors


# What is written.


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 0, 4), (2, 3, 5), (1, 1, 1, 1, 2)])
@pytest.mark.parametrize("name", TAGS)
def test_every_dtype_and_shape_comes_back_bit_for_bit(file, name, shape):
    size = int(np.prod(shape)) * dtype(name).itemsize
    raw = (np.arange(size) * 37 + 11) % (2 if name == "bool" else 256)
    array = raw.astype(np.uint8).view(dtype(name)).reshape(shape)
    write_tensors(file, {"x": array}, {"schema": "1"})
    tensors, metadata = read_tensors(file)
    assert tensors["x"].dtype == dtype(name)
    assert tensors["x"].shape == shape
    assert tensors["x"].tobytes() == array.tobytes()
    assert metadata == {"schema": "1"}


def test_a_written_file_is_header_length_json_and_little_endian_data(file):
    write_tensors(file, {"q": np.array([1.0, -2.0], np.float32)}, {"kind": "paged"})
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert json.loads(content[8 : 8 + length]) == {"__metadata__": {"kind": "paged"}, "q": entry()}
    assert content[8 + length :] == bytes.fromhex("0000803f000000c0")


@pytest.mark.parametrize("tensors", [{}, {"x": np.zeros(1, np.uint8)}])
@pytest.mark.parametrize("metadata", [{}, {"a": "", "é\n": "日本"}])
def test_no_tensors_and_no_metadata_are_still_a_file(file, tensors, metadata):
    write_tensors(file, tensors, metadata)
    assert read_tensors(file) == (tensors, metadata)


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_strided_arrays_are_written_in_row_order(file, name):
    base = np.arange(24).reshape(4, 6).astype(dtype(name))
    views = {
        "transposed": base.T,
        "reversed": base[::-1, ::-1],
        "strided": base[::2, 1::3],
        "broadcast": np.broadcast_to(base[0], (3, 6)),
        "fortran": np.asfortranarray(base),
    }
    write_tensors(file, views, {})
    tensors, _ = read_tensors(file)
    for key, view in views.items():
        assert tensors[key].tolist() == view.tolist()


def test_the_safetensors_library_reads_what_is_written(file):
    arrays = {"a": np.arange(5), "b": np.array([[1.5]], dtype("bf16")), "c": np.zeros((0, 2), bool)}
    write_tensors(file, arrays, {"k": "v"})
    found = dict(safetensors.deserialize(file.read_bytes()))
    assert {name: (item["dtype"], item["shape"], bytes(item["data"])) for name, item in found.items()} == {
        "a": ("I64", [5], arrays["a"].tobytes()),
        "b": ("BF16", [1, 1], b"\xc0\x3f"),
        "c": ("BOOL", [0, 2], b""),
    }
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata() == {"k": "v"}


def test_what_the_safetensors_library_writes_is_read(file):
    safetensors.numpy.save_file({"x": np.eye(3, dtype=np.float16), "y": np.arange(3)}, file, {"k": "v"})
    tensors, metadata = read_tensors(file)
    np.testing.assert_array_equal(tensors["x"], np.eye(3, dtype=np.float16), strict=True)
    np.testing.assert_array_equal(tensors["y"], np.arange(3), strict=True)
    assert metadata == {"k": "v"}


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o000, 0o666)])
def test_the_mode_of_a_new_file_follows_the_umask(file, mask, mode):
    with umask(mask):
        write_tensors(file, {}, {})
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_writing_replaces_a_file_but_not_what_a_reader_has_open(file):
    write_tensors(file, {"x": np.zeros(4, np.float32)}, {})
    old = file.read_bytes()
    with open(file, "rb") as reader:
        write_tensors(file, {"x": np.ones(4, np.float32)}, {})
        assert reader.read() == old
    assert read_tensors(file)[0]["x"].tolist() == [1, 1, 1, 1]


def test_a_relative_name_is_written_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tensors("x.safetensors", {}, {"a": "b"})
    assert os.listdir() == ["x.safetensors"]
    assert read_tensors("x.safetensors") == ({}, {"a": "b"})


def test_a_name_that_is_not_unicode_is_written_and_named(tmp_path):
    path = os.path.join(tmp_path, os.fsdecode(b"\xff\n"))
    write_tensors(path, {}, {})
    assert read_tensors(path) == ({}, {})
    with open(path, "wb"), pytest.raises(InputError) as error:
        read_tensors(path)
    assert r"\udcff\n" in str(error.value)
    str(error.value).encode()


# What is not written: one line, and the folder as it was.


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("x", np.zeros(2, np.complex64), "tensor 'x' has dtype complex64, expected one of f64 f32"),
        ("x", np.zeros(2, ">f4"), "tensor 'x' has dtype >f4, expected"),
        ("x", np.zeros(2, object), "tensor 'x' has dtype object, expected"),
        ("x", np.zeros(2, dtype("e2m1")), "tensor 'x' has dtype float4_e2m1fn, expected"),
        ("__metadata__", np.zeros(2), "tensor name is '__metadata__', expected"),
        ("\ud800", np.zeros(2), r"tensor name is '\ud800', expected Unicode"),
        (3, np.zeros(2), "tensor name is 3, expected"),
    ],
)
def test_a_tensor_the_format_cannot_hold_is_refused(file, name, array, expected):
    file.write_bytes(VALID)
    assert expected in refused(file, write_tensors, {"good": np.zeros(1), name: array}, {})
    assert os.listdir(file.parent) == [file.name]
    assert file.read_bytes() == VALID


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, {1: "a"}, {"a": "\udfff"}, {"\ud800": ""}, []])
def test_metadata_other_than_strings_by_name_is_refused(file, metadata):
    assert "expected strings" in refused(file, write_tensors, {}, metadata)
    assert os.listdir(file.parent) == []


def test_a_destination_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"kept")
    for path, expected in [
        (tmp_path / "none" / "x", "No such file or directory"),
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path, "it is a folder, expected a regular file or a new name"),
        (tmp_path / ("x" * 300), "File name too long"),
        (f"{tmp_path}/new/", "No such file or directory"),
        (f"{tmp_path}/x/", "o"),
    ]:
        assert expected in refused(path, write_tensors, {"x": np.zeros(3)}, {})
    for name in ["a\0b", "\ud800"]:
        for call in [read_tensors, lambda path: write_tensors(path, {}, {})]:
            with pytest.raises(InputError, match="expected a name that a file can have") as error:
                call(f"{tmp_path}/{name}")
            assert name not in str(error.value)
    with pytest.raises(InputError, match=r"^cannot write '': "):
        write_tensors("", {}, {})
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_pipes_and_links_to_devices_or_files_are_refused_and_kept(tmp_path):
    # The devices themselves stay out of reach of a check that is broken: renaming would replace them.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(VALID)
    links = {"full": "/dev/full", "stdout": "/dev/stdout", "link": "file", "dangling": "none"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    before = sorted(os.listdir(tmp_path))
    for name, found in [("pipe", "a device or a pipe"), *((link, "a link") for link in links)]:
        message = refused(tmp_path / name, write_tensors, {}, {})
        assert f"it is {found}, expected a regular file or a new name" in message
        assert not stat.S_ISREG((tmp_path / name).lstat().st_mode)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_bytes() == VALID


@contextmanager
def without_privilege():
    # Permissions do not bind root.
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_files_and_folders_without_permission_are_refused_and_kept():
    with without_privilege(), tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x")
        write_tensors(path, {}, {"kept": "yes"})
        os.chmod(path, 0o444)
        assert "read-only" in refused(path, write_tensors, {}, {})
        assert read_tensors(path) == ({}, {"kept": "yes"})
        os.chmod(path, 0o000)
        assert "Permission denied" in refused(path, read_tensors)
        os.chmod(folder, 0o555)
        assert "Permission denied" in refused(os.path.join(folder, "new"), write_tensors, {}, {})
        os.chmod(folder, 0o700)
        assert os.listdir(folder) == ["x"]


def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(file):
    file.write_bytes(VALID)
    code = """
import resource, sys
import numpy as np
from mla_oracle.errors import InputError
from mla_oracle.tensorfile import write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    write_tensors(sys.argv[1], {"x": np.zeros(100_000)}, {})
except InputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cannot write {file}: ")
    assert "File too large" in done.stdout
    assert done.stdout.count("\n") == 1
    assert os.listdir(file.parent) == [file.name]
    assert file.read_bytes() == VALID


def test_an_interrupted_write_leaves_nothing(file, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(file, {}, {})
    assert os.listdir(file.parent) == []


def test_every_read_between_two_writers_sees_one_whole_file(file):
    code = """
import sys
import numpy as np
from mla_oracle.tensorfile import write_tensors
for turn in range(150):
    write_tensors(sys.argv[1], {"x": np.full(30_000, 2.0)}, {"value": "2.0"})
    if turn == 0:
        print("ready", flush=True)
"""

    def value():
        tensors, metadata = read_tensors(file)
        value = float(metadata["value"])
        assert tensors["x"].shape == ({1.0: 50_000, 2.0: 30_000}[value],)
        assert (tensors["x"] == value).all()
        return value

    with subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"ready\n"
        assert value() == 2.0
        while other.poll() is None:
            write_tensors(file, {"x": np.full(50_000, 1.0)}, {"value": "1.0"})
            value(), value()
    assert other.returncode == 0
    write_tensors(file, {"x": np.full(50_000, 1.0)}, {"value": "1.0"})
    assert value() == 1.0
    assert os.listdir(file.parent) == [file.name]


# What is read.


def test_tensors_come_in_the_order_of_the_header_and_cannot_be_written_to(file):
    file.write_bytes(VALID)
    tensors, metadata = read_tensors(file)
    assert metadata == {"kind": "paged"}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"q": [1.5, -2.0], "n": [[7]]}
    assert list(tensors) == ["q", "n"]
    for tensor in tensors.values():
        with pytest.raises(ValueError, match="read-only"):
            tensor[...] = 0


def test_a_file_without_metadata_has_empty_metadata(file):
    file.write_bytes(packed({"x": entry()}, bytes(8)))
    assert read_tensors(file)[1] == {}


def test_aligned_tensors_share_one_buffer_and_unaligned_ones_are_copied(file):
    header = {
        "odd": entry("U8", (1,), (0, 1)),
        "f": entry("F32", (2,), (1, 9)),
        "b": entry("BF16", (1,), (9, 11)),
        "e": entry("F8_E4M3", (1,), (11, 12)),
        "d": entry("F32", (1,), (12, 16)),
    }
    file.write_bytes(packed(header, struct.pack("<BffHBf", 5, 1.5, -2.0, 0x3FC0, 0x3C, 3.0)))
    tensors = list(read_tensors(file)[0].values())
    assert [tensor.astype(float).tolist() for tensor in tensors] == [[5], [1.5, -2], [1.5], [1.5], [3]]
    for tensor in tensors:
        assert tensor.flags.aligned
        assert tensor.flags.c_contiguous
        assert not tensor.flags.writeable

    def buffer(tensor):
        return tensor if tensor.base is None else buffer(tensor.base)

    whole = buffer(tensors[0])
    assert [np.shares_memory(tensor, whole) for tensor in tensors] == [True, False, False, True, True]


def test_tensors_of_no_bytes_may_lie_anywhere_between_others(file):
    header = {
        "last": entry("F32", (0,), (8, 8)),
        "x": entry("F32", (2,), (0, 8)),
        "first": entry("I64", (3, 0), (0, 0)),
    }
    file.write_bytes(packed(header, struct.pack("<ff", 1, 2)))
    tensors, _ = read_tensors(file)
    assert [(name, tensor.shape) for name, tensor in tensors.items()] == [
        ("last", (0,)), ("x", (2,)), ("first", (3, 0))
    ]  # fmt: skip


def test_a_header_may_be_padded_with_spaces(file):
    file.write_bytes(packed(json.dumps({"x": entry()}).encode() + b"   ", bytes(8)))
    assert list(read_tensors(file)[0]) == ["x"]


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR)):  # so that a check that is broken does not wait either
        for path in [tmp_path, tmp_path / "pipe", "/dev/zero", "/dev/full"]:
            assert "expected a regular file" in refused(path, read_tensors)
    assert "No such file" in refused(tmp_path / "none", read_tensors)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "it has 0 bytes, expected at least 8"),
        (b"\0" * 7, "it has 7 bytes, expected at least 8"),
        (b"\0" * 8, "header is not JSON"),
        (b"\xff" * 16, "header length is 18446744073709551615, expected at most 8"),
        (struct.pack("<Q", 9) + b"{}      ", "header length is 9, expected at most 8"),
        (packed(b"[]"), "header is [], expected a JSON object"),
        (packed(b"null"), "header is None, expected a JSON object"),
        (packed(b"{"), "header is not JSON"),
        (packed(b'{"\xff": 1}'), "header is not JSON with distinct names: 'utf-8' codec"),
        (packed("{}".encode("utf-16")), "header is not JSON"),
        (packed("\ufeff{}".encode()), "header is not JSON"),
        (packed(b'{"x": {}, "x": {}}'), "header is not JSON with distinct names: 'x' appears twice"),
        (packed(b'{"x": {"dtype": "F32", "dtype": "F32"}}'), "'dtype' appears twice"),
        (packed(b'{"__metadata__": {"a": "b", "a": "b"}}'), "'a' appears twice"),
        (packed(b"[" * 200_000), "recursion"),
        (packed(b'{"a":' * 200_000), "recursion"),
        (packed(b'{"x": ' + b"9" * 5000 + b"}"), "4300 digits"),
        (packed({"__metadata__": []}), "metadata is [], expected strings by name"),
        (packed({"__metadata__": None}), "metadata is None"),
        (packed({"__metadata__": {"a": 1}}), "metadata 'a' is 1, expected strings"),
        (packed({"__metadata__": {"a": "\ud800"}}), r"metadata 'a' is '\ud800', expected strings"),
        (packed({"__metadata__": {"\ud800": "a"}}), r"metadata '\ud800' is 'a', expected strings"),
        (packed({"\udfff": entry()}, bytes(8)), r"tensor '\udfff' has a name that is not Unicode"),
        (packed({"x": 1}), "tensor 'x' is 1, expected dtype, shape and data_offsets"),
        (packed({"x": {"dtype": "F32", "shape": [0]}}), "expected dtype, shape and data_offsets"),
        (packed({"x": entry() | {"extra": 1}}, bytes(8)), "expected dtype, shape and data_offsets"),
        (packed({"x": entry("F4")}, bytes(8)), "tensor 'x' has dtype 'F4', expected one of F64 F32"),
        (packed({"x": entry("f32")}, bytes(8)), "tensor 'x' has dtype 'f32', expected one of"),
        (packed({"x": entry() | {"dtype": ["F32"]}}, bytes(8)), "tensor 'x' has dtype ['F32']"),
        (packed({"x": entry() | {"dtype": None}}, bytes(8)), "tensor 'x' has dtype None"),
        (packed({"x": entry(shape=[-2])}, bytes(8)), "tensor 'x' has shape [-2], expected"),
        (packed({"x": entry(shape=[-1, -2])}, bytes(8)), "tensor 'x' has shape [-1, -2], expected"),
        (packed({"x": entry(shape=[2, True])}, bytes(8)), "tensor 'x' has shape [2, True], expected"),
        (packed({"x": entry(shape=[2.0])}, bytes(8)), "tensor 'x' has shape [2.0], expected"),
        (packed({"x": entry() | {"shape": 2}}, bytes(8)), "tensor 'x' has shape 2, expected"),
        (packed({"x": entry(shape=[1] * 65, offsets=(0, 4))}, bytes(4)), "expected at most 64 integers"),
        (packed({"x": entry(shape=[2**61])}, bytes(8)), "expected less than 2^63 bytes"),
        (packed({"x": entry(shape=[2**32, 2**32])}, bytes(8)), "expected less than 2^63 bytes"),
        (packed({"x": entry(shape=[0, 2**62], offsets=(0, 0))}), "expected less than 2^63 bytes"),
        (packed({"x": entry(shape=[10**4000] * 64)}, bytes(8)), "expected less than 2^63 bytes"),
        (packed({"x": entry(shape=[3])}, bytes(8)), "[0, 8], expected 12 bytes: F32 of shape [3]"),
        (packed({"x": entry(shape=[])}, bytes(8)), "data_offsets [0, 8], expected 4 bytes: F32 of shape []"),
        (packed({"x": entry(offsets=[0, 8, 8])}, bytes(8)), "expected two integers"),
        (packed({"x": entry(offsets=[0, 8.0])}, bytes(8)), "expected two integers"),
        (packed({"x": entry("U8", [1], [False, True])}, bytes(1)), "expected two integers"),
        (packed({"x": entry() | {"data_offsets": {"0": 8}}}, bytes(8)), "expected two integers"),
        (packed({"x": entry(offsets=[8, 0])}, bytes(8)), "expected 8 bytes"),
        (packed({"x": entry(offsets=[-8, 0])}, bytes(8)), "'x' begins at byte -8 of the data, expected 0"),
        (packed({"x": entry(offsets=[4, 12])}, bytes(12)), "'x' begins at byte 4 of the data, expected 0"),
        (packed({"x": entry(offsets=[10**4299, 10**4299 + 8])}, bytes(8)), "begins at byte 1000"),
        (packed({"x": entry("U8", [0], [int("9" * 4300), -int("9" * 4300)])}), "expected 0 bytes"),
        (packed({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12)), "'y' begins at byte 4 of the data"),
        (packed({"x": entry(), "y": entry()}, bytes(8)), "'y' begins at byte 0 of the data, expected 8"),
        (packed({"x": entry(), "y": entry(offsets=(12, 20))}, bytes(20)), "'y' begins at byte 12"),
        (packed({"x": entry(shape=[0], offsets=(4, 4)), "y": entry()}, bytes(8)), "'x' begins at byte 4"),
        (packed({"x": entry()}, bytes(7)), "the data has 7 bytes, expected 8"),
        (packed({"x": entry()}, bytes(9)), "the data has 9 bytes, expected 8"),
        (packed({}, b" "), "the data has 1 bytes, expected 0"),
        (packed({"x": entry("BOOL", (2, 2), (0, 4))}, b"\0\1\2\3"), "tensor 'x' at [1, 0] is byte 2"),
        (packed({"x": entry("BOOL", (), (0, 1))}, b"\xff"), "tensor 'x' at [] is byte 255, expected 0 or 1"),
    ],
)  # fmt: skip
def test_a_file_that_breaks_a_rule_is_refused(file, content, expected):
    refuses(file, content, expected)


def test_a_message_stays_one_short_line_whatever_the_header_holds(file):
    deep = []
    for _ in range(200):
        deep = [deep]
    many = [1] * 10_000
    for bad in [{"x\n" * 10_000: 1}, {"x": many}, {"x": entry(shape=deep)}, {"x": entry("A" * 10_000)}]:
        file.write_bytes(packed(bad))
        assert len(refused(file, read_tensors)) < 600


def test_a_file_cut_while_it_is_read_is_refused(file, monkeypatch):
    file.write_bytes(VALID)
    real = os.fstat

    class Longer:
        def __init__(self, status):
            self.st_size = status.st_size + 4

    header = packed({"x": entry(shape=[3], offsets=(0, 12))}, bytes(8))
    file.write_bytes(header)
    monkeypatch.setattr(os, "fstat", lambda descriptor: Longer(real(descriptor)))
    assert "it ended 4 bytes early" in refused(file, read_tensors)


def test_a_header_beyond_the_limit_of_the_format_is_refused_unread(file):
    limit = 100_000_000
    with open(file, "wb") as sparse:
        sparse.write(struct.pack("<Q", limit + 1))
        sparse.truncate(8 + limit + 1)
    assert f"header length is {limit + 1}, expected at most {limit}" in refused(file, read_tensors)


def test_more_data_than_memory_is_refused(file, monkeypatch):
    def full(count, of):
        raise MemoryError

    file.write_bytes(VALID)
    monkeypatch.setattr(np, "empty", full)
    assert "8 bytes do not fit in memory" in refused(file, read_tensors)


# Fuzz: a valid read or an InputError, never anything else.


def test_a_file_cut_anywhere_is_refused(file):
    for length in range(len(VALID)):
        assert reads_or_refuses(file, VALID[:length]) is None


def test_a_flipped_byte_in_the_header_is_read_or_refused(file):
    header = len(VALID) - 12
    for position in range(header):
        for flip in (0x01, 0x02, 0x10, 0x20, 0x80, 0xFF):
            content = bytearray(VALID)
            content[position] ^= flip
            reads_or_refuses(file, bytes(content))


@given(content=st.binary(max_size=200))
@settings(deadline=None, derandomize=True)
def test_random_bytes_are_read_or_refused(scratch, content):
    reads_or_refuses(scratch, content)


@given(length=st.integers(0, 2**64 - 1) | st.integers(0, len(VALID)))
@settings(deadline=None, derandomize=True)
def test_a_lying_header_length_is_read_or_refused(scratch, length):
    reads_or_refuses(scratch, struct.pack("<Q", length) + VALID[8:])


@given(header=st.binary(max_size=80) | st.text(max_size=80).map(str.encode), data=st.binary(max_size=20))
@settings(deadline=None, derandomize=True)
def test_a_random_header_is_read_or_refused(scratch, header, data):
    reads_or_refuses(scratch, packed(header, data))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 20)
    | st.integers()
    | st.integers(2**60, 2**66)
    | st.floats()
    | st.sampled_from([*TAGS.values(), "F4", "C64", "q"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*TAGS.values()]) | values,
        "shape": st.lists(st.integers(-1, 4) | values, max_size=4) | values,
        "data_offsets": st.lists(st.integers(-1, 24), min_size=2, max_size=2) | values,
    },
    optional={"extra": values},
)
headers = st.dictionaries(
    st.sampled_from(["q", "kv_cache", "__metadata__"]) | st.text(max_size=5), entries | values, max_size=4
)


@given(header=headers, data=st.binary(max_size=24))
@settings(deadline=None, derandomize=True, max_examples=400)
def test_a_mutated_header_is_read_or_refused(scratch, header, data):
    reads_or_refuses(scratch, packed(header, data))


@st.composite
def written(draw):
    name = draw(st.sampled_from([*TAGS]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    size = int(np.prod(shape)) * dtype(name).itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return (raw & 1 if name == "bool" else raw).view(dtype(name)).reshape(shape)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    tensors=st.dictionaries(text.filter(lambda name: name != "__metadata__"), written(), max_size=5),
    metadata=st.dictionaries(text, text, max_size=5),
)
@settings(deadline=None, derandomize=True)
def test_any_tensors_and_metadata_come_back(scratch, tensors, metadata):
    write_tensors(scratch, tensors, metadata)
    found, found_metadata = read_tensors(scratch)
    assert found_metadata == metadata
    assert {name: (t.dtype, t.shape, t.tobytes()) for name, t in found.items()} == {
        name: (t.dtype, t.shape, t.tobytes()) for name, t in tensors.items()
    }


def test_the_same_content_is_the_same_bytes_in_every_process(tmp_path):
    script = (
        "import sys, numpy as np; from mla_oracle.tensorfile import write_tensors\n"
        "names = {f'key{i}': '\\u00e9 \\x01 \\x7f \\U0001f600 \"' for i in range(20)}\n"
        "write_tensors(sys.argv[1], {'b': np.ones(3), 'a': np.zeros((0, 2))}, names)"
    )
    for name in ("one", "two", "three"):
        subprocess.run([sys.executable, "-c", script, tmp_path / name], check=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() == (tmp_path / "three").read_bytes()
    tensors, metadata = read_tensors(tmp_path / "one")
    assert list(metadata) == sorted(metadata) and metadata["key7"] == "\u00e9 \x01 \x7f \U0001f600 \""
    assert tensors["b"].tolist() == [1, 1, 1] and tensors["a"].shape == (0, 2)
