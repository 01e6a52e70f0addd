# SPDX-License-Identifier: Apache-2.0
"""tensorfile: what is written, for other readers too, and that a write is whole or not at all."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from tensor_files import VALID, entry, refused

from mla_oracle.dtypes import TAGS, dtype
from mla_oracle.errors import InputError
from mla_oracle.files.tensorfile import read_tensors, write_tensors


@pytest.fixture
def file(tmp_path):
    return tmp_path / "case.safetensors"


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
from mla_oracle.files.tensorfile import write_tensors
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
from mla_oracle.files.tensorfile import write_tensors
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


def test_the_same_content_is_the_same_bytes_in_every_process(tmp_path):
    script = (
        "import sys, numpy as np; from mla_oracle.files.tensorfile import write_tensors\n"
        "names = {f'key{i}': '\\u00e9 \\x01 \\x7f \\U0001f600 \"' for i in range(20)}\n"
        "write_tensors(sys.argv[1], {'b': np.ones(3), 'a': np.zeros((0, 2))}, names)"
    )
    for name in ("one", "two", "three"):
        subprocess.run([sys.executable, "-c", script, tmp_path / name], check=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() == (tmp_path / "three").read_bytes()
    tensors, metadata = read_tensors(tmp_path / "one")
    assert list(metadata) == sorted(metadata) and metadata["key7"] == "\u00e9 \x01 \x7f \U0001f600 \""
    assert tensors["b"].tolist() == [1, 1, 1] and tensors["a"].shape == (0, 2)
