# SPDX-License-Identifier: Apache-2.0
"""read_manifest: folders in the form of vllm.cpp's parity goldens, with one thing wrong at a time."""
import json
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_oracle.dtypes import dtype
from mla_oracle.errors import InputError
from mla_oracle.files.tensorfile import Manifest, read_manifest

BITS = np.array([[0x3FC0, 0x7FC0, 0x8000]], np.uint16)


def manifest():
    return {
        "op": "mla_decode",
        "args": {"scale": 0.125, "note": None},
        "tensors": {
            "q": {"file": "q.npy", "dtype": "bf16", "shape": [1, 3], "sha256": "not read"},
            "seq_lens": {"file": "seq_lens.npy", "dtype": "i32", "shape": [2]},
            "out": {"file": "out.npy", "dtype": "f32", "shape": [2, 2]},
        },
        "inputs": ["q", "seq_lens"],
        "outputs": ["out"],
        "tol": {"atol": 1e-5, "rtol": 0},
        "oracle": {"provenance": "not read"},
    }


def npy(descr, shape, data, order=False, version=1):
    header = str({"descr": descr, "fortran_order": order, "shape": shape}).encode()
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest()))
    np.save(tmp_path / "q.npy", BITS)
    np.save(tmp_path / "seq_lens.npy", np.array([3, 0], np.int32))
    np.save(tmp_path / "out.npy", np.array([[1, 2], [3, 4]], np.float32))
    return tmp_path


def refused(folder, file="manifest.json"):
    with pytest.raises(InputError) as error:
        read_manifest(folder)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"cannot read {folder / file}: ")
    return message


def test_a_manifest_comes_back_with_its_tensors_in_their_own_dtypes(folder):
    read = read_manifest(folder)
    assert read.op == "mla_decode"
    assert read.args == {"scale": 0.125, "note": None}
    assert read.inputs == ("q", "seq_lens")
    assert read.outputs == ("out",)
    assert read.tol == {"atol": 1e-5, "rtol": 0.0}
    assert {name: (t.dtype, t.shape) for name, t in read.tensors.items()} == {
        "q": (dtype("bf16"), (1, 3)),
        "seq_lens": (np.int32, (2,)),
        "out": (np.float32, (2, 2)),
    }
    assert str(read.tensors["q"].astype(np.float32).tolist()) == "[[1.5, nan, -0.0]]"
    assert read.tensors["seq_lens"].tolist() == [3, 0]
    assert read.tensors["out"].tolist() == [[1, 2], [3, 4]]
    for tensor in read.tensors.values():
        assert tensor.flags.aligned
        assert not tensor.flags.writeable


def test_op_args_tensors_and_tol_are_enough(tmp_path):
    minimal = {"op": "x", "args": {}, "tensors": {}, "tol": {"atol": 0, "rtol": 1}}
    (tmp_path / "manifest.json").write_text(json.dumps(minimal))
    assert read_manifest(tmp_path) == Manifest("x", {}, {}, (), (), {"atol": 0.0, "rtol": 1.0})


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 1, 2)])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize(
    ("of", "stored"), [("f32", "<f4"), ("f16", "<u2"), ("bf16", "<u2"), ("i32", "<i4"), ("i64", "<i8")]
)
def test_every_dtype_shape_and_npy_version_is_read(tmp_path, of, stored, version, shape):
    array = np.arange(int(np.prod(shape))).astype(stored).reshape(shape)
    (tmp_path / "sub").mkdir()
    with open(tmp_path / "sub" / "x.npy", "wb") as file:
        np.lib.format.write_array(file, array, version)
    one = manifest() | {"inputs": ["x"], "outputs": []}
    one["tensors"] = {"x": {"file": "sub/x.npy", "dtype": of, "shape": list(shape)}}
    (tmp_path / "manifest.json").write_text(json.dumps(one))
    read = read_manifest(tmp_path).tensors["x"]
    assert read.dtype == dtype(of)
    assert read.shape == shape
    assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["op"], None, "op is None, expected a string"),
        (["op"], "\ud800", "op is '\\ud800', expected Unicode text"),
        (["args"], [], "args is [], expected an object"),
        (["tensors"], [], "tensors is [], expected an object"),
        (["tensors", "\udfff"], 3, "tensor '\\udfff' has a name that is not Unicode text"),
        (["tensors", "q"], 3, "tensor 'q' is 3, expected file, dtype and shape"),
        (["tensors", "q"], {"file": "q.npy"}, "expected file, dtype and shape"),
        (["tensors", "q", "file"], 3, "tensor 'q' has file 3, expected a name inside the folder"),
        (["tensors", "q", "file"], "", "expected a name inside the folder"),
        (["tensors", "q", "file"], "/etc/hostname", "expected a name inside the folder"),
        (["tensors", "q", "file"], "../q.npy", "expected a name inside the folder"),
        (["tensors", "q", "file"], "a/../../q.npy", "expected a name inside the folder"),
        (["tensors", "q", "file"], "..", "expected a name inside the folder"),
        (["tensors", "q", "dtype"], "float32", "'float32', expected one of f32 f16 bf16 i32 i64"),
        (["tensors", "q", "dtype"], "e4m3", "tensor 'q' has dtype 'e4m3', expected one of"),
        (["tensors", "q", "dtype"], ["f32"], "tensor 'q' has dtype ['f32'], expected one of"),
        (["tensors", "q", "shape"], [1, -3], "tensor 'q' has shape [1, -3], expected"),
        (["tensors", "q", "shape"], [True, 3], "tensor 'q' has shape [True, 3], expected"),
        (["tensors", "q", "shape"], [2**62, 3], "[4611686018427387904, 3], expected less than 2^63"),
        (["inputs"], "q", "inputs is 'q', expected a list"),
        (["inputs"], None, "inputs is None, expected a list"),
        (["outputs"], ["out", "lse"], "outputs[1] is 'lse', expected the name of a tensor"),
        (["inputs"], [["q"]], "inputs[0] is ['q'], expected the name of a tensor"),
        (["tol"], None, "tol is None, expected an object"),
        (["tol"], {"atol": 1}, "tol.rtol is None, expected a number"),
        (["tol", "atol"], -1e-9, "tol.atol is -1e-09, expected a number, 0 or more"),
        (["tol", "rtol"], float("nan"), "tol.rtol is nan, expected a number"),
        (["tol", "rtol"], float("inf"), "tol.rtol is inf, expected a number"),
        (["tol", "rtol"], 10**400, "tol.rtol is 1000"),
        (["tol", "rtol"], True, "tol.rtol is True, expected a number"),
        (["tol", "rtol"], "1e-5", "tol.rtol is '1e-5', expected a number"),
    ],
)  # fmt: skip
def test_a_manifest_that_breaks_a_rule_is_refused(folder, path, value, expected):
    wrong = manifest()
    at = wrong
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(wrong))
    message = refused(folder)
    assert expected in message, message


@pytest.mark.parametrize("key", ["op", "args", "tensors", "tol"])
def test_a_manifest_without_a_member_it_must_have_is_refused(folder, key):
    wrong = manifest()
    del wrong[key]
    (folder / "manifest.json").write_text(json.dumps(wrong))
    assert f"{key} is None, expected" in refused(folder)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 200_000, b'{"op": "", "op": ""}', b"1e5", b"\xef\xbb\xbf{}"]
)
def test_a_manifest_that_is_no_json_object_is_refused(folder, content):
    (folder / "manifest.json").write_bytes(content)
    refused(folder)


def test_a_huge_manifest_is_refused_unread(folder):
    os.truncate(folder / "manifest.json", 100_000_001)
    assert "it has 100000001 bytes, expected at most 100000000" in refused(folder)


def test_missing_files_and_folders_are_named(folder):
    (folder / "out.npy").unlink()
    assert "No such file or directory" in refused(folder, "out.npy")
    (folder / "out.npy").mkdir()
    assert "expected a regular file" in refused(folder, "out.npy")
    (folder / "manifest.json").unlink()
    assert "No such file or directory" in refused(folder)
    (folder / "manifest.json").mkdir()
    assert "expected a regular file" in refused(folder)
    (folder / "manifest.json").rmdir()
    wrong = manifest()
    for name in ["q\0.npy", "\ud800"]:
        wrong["tensors"]["q"]["file"] = name
        (folder / "manifest.json").write_text(json.dumps(wrong))
        with pytest.raises(InputError, match="expected a name that a file can have"):
            read_manifest(folder)
    with pytest.raises(InputError, match=r"^cannot read none/manifest.json: No such file or directory$"):
        read_manifest("none")


F4 = struct.pack("<4f", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (npy(">f4", (2, 2), F4), "tensor 'out' is >f4 [2, 2] in C order, expected <f4 [2, 2] in C order"),
        (npy("<f8", (2, 2), F4 * 2), "tensor 'out' is float64 [2, 2]"),
        (npy("<i4", (2, 2), F4), "tensor 'out' is int32 [2, 2]"),
        (npy("<f4", (4,), F4), "tensor 'out' is float32 [4] in C order, expected <f4 [2, 2]"),
        (npy("<f4", (), F4[:4]), "tensor 'out' is float32 [] in C order, expected <f4 [2, 2]"),
        (npy("<f4", (2**40, 2**40), F4), "tensor 'out' is float32 [1099511627776, 1099511627776]"),
        (npy("<f4", (-2, -2), F4), "tensor 'out' is float32 [-2, -2]"),
        (npy("<f4", (2, 2), F4, order=True), "tensor 'out' is float32 [2, 2] in Fortran order"),
        (npy("<f4", (2, 2), F4 + b"\0"), "tensor 'out' has 17 bytes of data, expected 16"),
        (npy("<f4", (2, 2), F4[:-1]), "tensor 'out' has 15 bytes of data, expected 16"),
        (npy("<f4", (2, 2), F4, version=3), "expected an npy header of version 1 or 2"),
        (npy("|O", (2, 2), F4), "tensor 'out' is object [2, 2]"),
        (npy([("a\n", "<f4")], (2, 2), F4), "tensor 'out' is [('a\\n', '<f4')] [2, 2]"),
        (npy("no", (2, 2), F4), "expected an npy header"),
        (npy("<f4", 4, F4), "expected an npy header"),
        (b"PK\x03\x04", "expected an npy header"),
        (b"", "expected an npy header"),
    ],
)  # fmt: skip
def test_an_npy_file_other_than_the_manifest_says_is_refused(folder, content, expected):
    (folder / "out.npy").write_bytes(content)
    message = refused(folder, "out.npy")
    assert expected in message, message


def test_an_npy_file_cut_anywhere_is_refused(folder):
    content = (folder / "out.npy").read_bytes()
    for length in range(len(content)):
        (folder / "out.npy").write_bytes(content[:length])
        refused(folder, "out.npy")


def test_a_pickle_is_never_loaded(folder):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(folder / "loaded"),)

    (folder / "out.npy").write_bytes(npy("|O", (2, 2), pickle.dumps(Bomb())))
    refused(folder, "out.npy")
    (folder / "out.npy").write_bytes(pickle.dumps(Bomb()))
    refused(folder, "out.npy")
    assert not (folder / "loaded").exists()


@pytest.mark.parametrize(
    "text",
    [b"(" * 9000, b"[" * 150, b"-" * 9000 + b"1", b"{1:" * 3000, b"1+" * 4000 + b"1", b"'" * 3, b"0x" * 40],
)
def test_an_npy_header_made_to_break_its_parser_is_refused(folder, text):
    (folder / "out.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + F4)
    assert "expected an npy header" in refused(folder, "out.npy")


GOOD = npy("<f4", (2, 2), F4)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scratch")
    one = manifest() | {"inputs": [], "outputs": ["out"]}
    one["tensors"] = {"out": one["tensors"]["out"]}
    (folder / "manifest.json").write_text(json.dumps(one))
    return folder


def reads_or_refuses(folder):
    try:
        read = read_manifest(folder)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(read, Manifest)


@given(position=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_an_npy_file_with_one_wrong_byte_is_read_or_refused(scratch, position, byte):
    (scratch / "out.npy").write_bytes(GOOD[:position] + bytes([byte]) + GOOD[position + 1 :])
    reads_or_refuses(scratch)


@given(header=st.text("{}()[]',:<f4descrshape fortan_orderTueFls20\n\0-", max_size=60).map(str.encode))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_a_random_npy_header_is_read_or_refused(scratch, header):
    (scratch / "out.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + F4)
    reads_or_refuses(scratch)
