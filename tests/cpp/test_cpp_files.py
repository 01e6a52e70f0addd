# SPDX-License-Identifier: Apache-2.0
"""Tensors, safetensors files and JSON in C++, against the safetensors library and Python's json."""

import json
import os
import random
import re
import resource
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fakes import COMMAND, Run
from safetensors import SafetensorError, safe_open


def test_the_command_line_names_the_folder_of_both_headers(include: Path) -> None:
    said = subprocess.run([COMMAND, "info", "--include-dir"], capture_output=True, text=True, check=True)
    assert Path(said.stdout.strip()) == include
    assert {path.name for path in include.iterdir()} == {"mla_oracle.hpp", "mla_oracle_tensors.hpp"}


def test_python_reads_every_dtype_that_cpp_writes(probe: Run, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    probe("write", path)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 64 == 0
    odd = {"e4m3": "F8_E4M3", "e4m3fnuz": "F8_E4M3FNUZ", "e5m2": "F8_E5M2", "e8m0": "F8_E8M0", "e2m1": "F4"}
    plain = {name: name.upper() for name in ("f64", "f32", "f16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8")}
    with safe_open(path, "np") as file:
        assert file.metadata() == {'quoted "\\\n\x01': "€", "schema": "any"}
        views = {name: file.get_slice(name) for name in header if name != "__metadata__"}
        described = {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()}
        assert described == {name: (tag, [2, 3]) for name, tag in (plain | odd).items()} | {
            "bool": ("BOOL", [3]),
            "bf16": ("BF16", [2]),
            "scalar": ("F64", []),
            "empty": ("I64", [0, 7]),
        }
        assert file.get_tensor("scalar") == 0.1
        assert file.get_tensor("bool").tolist() == [True, False, True]
        assert file.get_tensor("i16").tolist() == [[0x201, 0x403, 0x605], [0x807, 0, 0]]
    for name, entry in header.items():
        if name != "__metadata__" and name != "e2m1":
            width = max(1, (entry["data_offsets"][1] - entry["data_offsets"][0]) // max(1, np.prod(entry["shape"])))
            assert entry["data_offsets"][0] % width == 0, name


def test_a_tensor_is_read_as_its_own_type_or_as_its_bits(probe: Run, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    probe("write", path)
    before = path.read_bytes()
    assert probe("typed", path).stdout.splitlines() == [
        "49152",
        "49152",
        "BadInput: bf16 is bf16, read as i16",
        "BadInput: f32 is f32, read as f64",
        "1",
        "BadInput: there is no tensor lse",
        "BadInput: two tensors are called f32",
        "BadInput: x is a null pointer",
        "BadInput: x has the extent -1, expected 0 to 2^56 in all",
    ]
    assert path.read_bytes() == before


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(probe: Run, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_text("old")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    said = probe("write", path, preexec_fn=small_disk, restore_signals=False).stdout
    assert said.startswith("Environment: cannot write ") and said.strip().endswith("File too large")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.safetensors"]
    said = probe("write", tmp_path / "nowhere" / "file").stdout
    assert said.strip().endswith("No such file or directory")


def file_bytes(header: str, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str = '"F32"', shape: str = "[2]", offsets: str = "[0,8]") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


X = f'{{"x":{entry()}}}'
EIGHT = b"12345678"
LIES = {
    "empty file": (b"", "not a safetensors file"),
    "seven bytes": (b"1234567", "not a safetensors file"),
    "header beyond the file": (file_bytes("{}", length=3), "the header is longer than the file"),
    "header of 2^64 - 1": (file_bytes("{}", length=2**64 - 1), "the header is longer than the file"),
    "header of 2^63": (file_bytes("{}", length=2**63), "the header is longer than the file"),
    "header is an array": (file_bytes("[]"), "the header is not a JSON object"),
    "header is cut": (file_bytes(X[:-1], EIGHT), "malformed JSON"),
    "no data": (file_bytes(X), "x ends beyond the file"),
    "one byte short": (file_bytes(X, EIGHT[:7]), "x ends beyond the file"),
    "one byte more": (file_bytes(X, EIGHT + b"9"), "bytes at the end belong to no tensor"),
    "shape too small": (file_bytes(f'{{"x":{entry(shape="[1]")}}}', EIGHT), "data_offsets that do not fit"),
    "shape too large": (file_bytes(f'{{"x":{entry(shape="[3]")}}}', EIGHT), "x ends beyond the file"),
    "shape overflows": (file_bytes(f'{{"x":{entry(shape="[4294967296,4294967296,4]")}}}', EIGHT), "the extent"),
    "shape beyond i64": (file_bytes(f'{{"x":{entry(shape="[9223372036854775808]")}}}', EIGHT), "64-bit integer"),
    "shape negative": (file_bytes(f'{{"x":{entry(shape="[-2]")}}}', EIGHT), "the extent -2"),
    "shape fractional": (file_bytes(f'{{"x":{entry(shape="[2.0]")}}}', EIGHT), "not a 64-bit integer: 2.0"),
    "shape a string": (file_bytes(f'{{"x":{entry(shape=chr(34) + "2" + chr(34))}}}', EIGHT), '"shape"'),
    "offsets reversed": (file_bytes(f'{{"x":{entry(offsets="[8,0]")}}}', EIGHT), "leaves a gap"),
    "offsets negative": (file_bytes(f'{{"x":{entry(offsets="[-8,0]")}}}', EIGHT), "leaves a gap"),
    "offsets of one": (file_bytes(f'{{"x":{entry(offsets="[0]")}}}', EIGHT), "not two numbers"),
    "offsets huge": (file_bytes(f'{{"x":{entry(offsets="[0,9223372036854775807]")}}}', EIGHT), "do not fit"),
    "gap at the start": (file_bytes(f'{{"x":{entry(offsets="[4,12]")}}}', EIGHT + b"1234"), "leaves a gap"),
    "overlap": (file_bytes(f'{{"x":{entry()},"y":{entry(offsets="[4,12]")}}}', EIGHT + b"1234"), "y overlaps"),
    "same name twice": (file_bytes(f'{{"x":{entry()},"x":{entry(offsets="[8,16]")}}}', EIGHT * 2), "two tensors"),
    "unknown dtype": (file_bytes(f'{{"x":{entry(dtype=chr(34) + "F7" + chr(34))}}}', EIGHT), "unknown dtype F7"),
    "no dtype": (file_bytes('{"x":{"shape":[2],"data_offsets":[0,8]}}', EIGHT), '"dtype"'),
    "odd fours": (file_bytes(f'{{"x":{entry(dtype=chr(34) + "F4" + chr(34), shape="[3]")}}}', EIGHT), "odd count"),
    "a tensor that is a number": (file_bytes('{"x":1}', EIGHT), '"dtype"'),
    "a name of two lines": (file_bytes('{"x\\ny":{"dtype":"F7","shape":[],"data_offsets":[]}}'), "x y has the unknown"),
    "metadata not strings": (file_bytes('{"__metadata__":{"a":1}}'), '"a"'),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_bad_input(probe: Run, tmp_path: Path, lie: str) -> None:
    path = tmp_path / "file.safetensors"
    raw, words = LIES[lie]
    path.write_bytes(raw)
    said = probe("read", path).stdout
    assert said.startswith(f"BadInput: {path}: ") and words in said and said.count("\n") == 1


def test_what_is_not_a_file_is_bad_input(probe: Run, tmp_path: Path) -> None:
    assert "No such file" in probe("read", tmp_path / "nothing").stdout
    assert "not a safetensors file" in probe("read", tmp_path).stdout


def test_every_cut_of_a_good_file_is_bad_input(probe: Run, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    probe("write", whole)
    raw = whole.read_bytes()
    cuts = [tmp_path / f"{size}" for size in range(0, len(raw), 7)]
    for path in cuts:
        path.write_bytes(raw[: int(path.name)])
    lines = probe("read", *cuts, whole).stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["BadInput"] * len(cuts)
    assert lines[-1].startswith("ok ")


def judged_by_safetensors(path: Path) -> str:
    try:
        with safe_open(path, "np"):
            return "ok"
    except SafetensorError as error:
        return "either" if "invalid UTF-8" in str(error) else "BadInput"  # C++ leaves the encoding of text alone


def test_damaged_files_are_refused_where_safetensors_refuses_them(probe: Run, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    probe("write", whole)
    raw = whole.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    draw = random.Random(20261130)
    paths = [tmp_path / f"{i}" for i in range(1500)]
    for path in paths:
        damaged = bytearray(raw)
        for _ in range(draw.choice([1, 1, 2, 5])):
            at = draw.randrange(header)
            damaged[at] = draw.choice([draw.randrange(256), *b'0123456789-[]{},:"\\.e'])
            if draw.random() < 0.2:
                del damaged[at]
        path.write_bytes(damaged)
    lines = probe("read", *paths).stdout.removesuffix("\n").split("\n")
    assert len(lines) == len(paths)
    seen = [
        (re.match("ok|BadInput", line)[0], judged_by_safetensors(path)) for path, line in zip(paths, lines, strict=True)
    ]
    assert set(seen) == {("ok", "ok"), ("BadInput", "BadInput"), ("ok", "either"), ("BadInput", "either")}


GOOD_JSON = [
    "null", " true\n", "false", "0", "-0.5e+10", "1E5", "[]", "{}", '""', ' [ 1 , [ ] , { "a" : null } ]\r\n\t',
    r'"\"\\\/\b\f\n\r\t"', r'"\u0041\u00e9\u20AC\ud83d\uDE00"', '"é€😀\x7f"', '{"a":1,"b":{"c":[true,false]}}',
    "[" * 64 + "]" * 64, '{"":""}', r'{"\u0061":"\u0000"}', "12345678901234567890",
    r'"\u007f\u0080\u07ff\u0800\ud7ff\ue000\uffff\ud800\udc00\udbff\udfff"',
]  # fmt: skip
BAD_JSON = [
    "", " ", "nul", "tru", "nulll", "+1", "01", "1.", ".5", "1e", "-", "--1", "1 2", "[1,]", "[,1]", "[1", "1]", "{",
    '{"a"}', '{"a":}', '{"a":1,}', "{a:1}", "{1:1}", '{"a" 1}', '"', '"\\"', '"\\x41"', '"\\u12"', '"\\u12g4"', '"\n"',
    '"\t"', "'a'", "[1}", "NaN", "Infinity", "-Infinity", "\x00", "1\x00", "[1]\x00", "\ufeff1", "[" * 65 + "]" * 65,
    "[" * 100000, '{"a":' * 100000,
]  # fmt: skip


def test_json_means_to_cpp_what_it_means_to_python(probe: Run, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}" for i in range(len(GOOD_JSON))]
    for path, text in zip(paths, GOOD_JSON, strict=True):
        path.write_text(text, encoding="utf-8")
    lines = probe("json", *paths).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(text) for text in GOOD_JSON]


def test_half_a_surrogate_pair_becomes_a_replacement_character(probe: Run, tmp_path: Path) -> None:
    path = tmp_path / "json"
    path.write_text(r'["\ud800","\udc00\ud800","\ud800\u0041","\ud83dx","\ud800\ud83d\ude00"]')
    (line,) = probe("json", path).stdout.splitlines()
    assert json.loads(line) == ["\ufffd", "\ufffd\ufffd", "\ufffdA", "\ufffdx", "\ufffd😀"]


def test_malformed_json_is_bad_input(probe: Run, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}" for i in range(len(BAD_JSON))]
    for path, text in zip(paths, BAD_JSON, strict=True):
        path.write_bytes(text.encode())
    lines = probe("json", *paths).stdout.splitlines()
    accepted = [text for text, line in zip(BAD_JSON, lines, strict=True) if not line.startswith("BadInput: malformed")]
    assert accepted == []
