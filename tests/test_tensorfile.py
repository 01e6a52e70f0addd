# SPDX-License-Identifier: Apache-2.0
"""tensorfile: what is read, and what is refused in one line."""

import json
import os
import struct

import numpy as np
import pytest
from tensor_files import VALID, entry, packed, refused, refuses

from mla_oracle.files.tensorfile import read_tensors


@pytest.fixture
def file(tmp_path):
    return tmp_path / "case.safetensors"


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
