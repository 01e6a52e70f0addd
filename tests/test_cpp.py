# SPDX-License-Identifier: Apache-2.0
"""The C++ headers as an engine meets them: compiled, linked, and put in front of oracles that work, lie and die.

`engine` is tests/cpp/engine.cpp as an engine would build it. `probe` is tests/cpp/probe.cpp and engine.cpp in one
program, under the address and undefined-behaviour sanitizers: a crash of ours is an exit code these tests do not expect.
A fake oracle is a script; most fakes are `sh`.
"""

import importlib.resources
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

CPP = Path(__file__).parent / "cpp"
COMMAND = Path(sysconfig.get_path("scripts")) / "mla-oracle"
WARNINGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
PASS = '{"verdict": "pass", "reason": "as it should be"}'
FAIL = '{"verdict": "fail", "reason": "row 3 is off"}'
CLIENTS = pytest.mark.parametrize("client", ["oracle", "server"])

Fake = Callable[[str], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def compiler() -> str:
    found = [c for c in (os.environ.get("CXX"), "c++", "g++") if c and shutil.which(c)]
    if not found:
        pytest.skip("no C++ compiler")
    return found[0]


@pytest.fixture(scope="session")
def include() -> Path:
    return Path(str(importlib.resources.files("mla_oracle") / "include"))


@pytest.fixture(scope="session")
def engine(compiler: str, include: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("engine") / "engine"
    subprocess.run([compiler, *WARNINGS, "-O2", f"-I{include}", CPP / "engine.cpp", "-o", program], check=True)
    return program


@pytest.fixture(scope="session")
def probe(compiler: str, include: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("probe")
    build = [compiler, *WARNINGS, *SANITIZERS, f"-I{include}"]
    subprocess.run([*build, "-Dmain=engine_main", "-c", CPP / "engine.cpp", "-o", folder / "engine.o"], check=True)
    subprocess.run([*build, CPP / "probe.cpp", folder / "engine.o", "-pthread", "-o", folder / "probe"], check=True)

    def run(*arguments: object, code: int = 0, **kwargs) -> subprocess.CompletedProcess[str]:
        words = [folder / "probe", *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", **kwargs)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    def script(body: str, name: str = "fake oracle") -> Path:
        path = tmp_path / name
        path.write_text(body if body.startswith("#!") else f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return script


def python(body: str) -> str:
    return f"#!{sys.executable}\nimport json, os, signal, sys\n{body}\n"


def answering(result: str) -> str:
    """A fake that gives every check the same verdict, asked either way."""
    return f"""
if [ "$1" = serve ]; then
  while read -r line; do
    id=${{line#*:}}
    echo '{{"id": '${{id%%,*}}', "ok": true, "exit_code": 0, "result": {result}}}'
  done
else
  echo '{result}'
fi"""


# ---- files


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
    tags = "F64 F32 F16 F8_E4M3 F8_E5M2 F8_E8M0 F4 I64 I32 I16 I8 U64 U32 U16 U8".split()
    names = "f64 f32 f16 e4m3 e5m2 e8m0 e2m1 i64 i32 i16 i8 u64 u32 u16 u8".split()
    with safe_open(path, "np") as file:
        assert file.metadata() == {'quoted "\\\n\x01': "€", "schema": "any"}
        views = {name: file.get_slice(name) for name in file.keys()}
        described = {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()}
        assert described == {name: (tag, [2, 3]) for name, tag in zip(names, tags, strict=True)} | {
            "bool": ("BOOL", [3]), "bf16": ("BF16", [2]), "scalar": ("F64", []), "empty": ("I64", [0, 7])
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
    "metadata not strings": (file_bytes('{"__metadata__":{"a":1}}'), '"a"'),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_bad_input(probe: Run, tmp_path: Path, lie: str) -> None:
    path = tmp_path / "file.safetensors"
    raw, words = LIES[lie]
    path.write_bytes(raw)
    said = probe("read", path).stdout
    assert said.startswith(f"BadInput: {path}: ") and words in said


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


def test_damaged_files_are_read_or_refused_and_never_crash(probe: Run, tmp_path: Path) -> None:
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
    refused = [line.startswith("BadInput: ") for line in lines]
    assert all(line.startswith(("ok", "BadInput: ")) for line in lines)
    assert 500 < sum(refused) < len(paths)


GOOD_JSON = [
    "null", " true\n", "false", "0", "-0.5e+10", "1E5", "[]", "{}", '""', ' [ 1 , [ ] , { "a" : null } ]\r\n\t',
    r'"\"\\\/\b\f\n\r\t"', r'"\u0041\u00e9\u20AC\ud83d\uDE00"', '"é€😀\x7f"', '{"a":1,"b":{"c":[true,false]}}',
    "[" * 64 + "]" * 64, '{"":""}', r'{"\u0061":"\u0000"}', "12345678901234567890",
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


# ---- what the command answers, a process per question

CHECK = "check|case|actual"
DEATHS = {
    "exit 70": ("exit 70", "Crash: mla-oracle check gave no valid answer and ended with exit code 70"),
    "exit 70 with its line": (
        'echo "mla-oracle: internal error: boom" >&2; exit 70',
        "Crash: internal error: boom",
    ),
    "a segmentation fault": ("kill -SEGV $$", "Crash: mla-oracle check gave no valid answer and was killed by signal 11"),
    "killed": ("kill -9 $$", "Crash: mla-oracle check gave no valid answer and was killed by signal 9"),
    "killed after its verdict": (
        f"echo '{FAIL}'; kill -9 $$",
        "Crash: mla-oracle check gave no valid answer and was killed by signal 9",
    ),
    "nothing": ("exit 0", "Crash: mla-oracle check gave no valid answer and ended with exit code 0"),
    "garbage": ("echo garbage", "Crash: mla-oracle check gave no valid answer and ended with exit code 0"),
    "exit 1, no JSON": (
        "echo Traceback >&2; echo MemoryError >&2; exit 1",
        "Crash: mla-oracle check gave no valid answer and ended with exit code 1: MemoryError",
    ),
    "exit 1 after a pass": (f"echo '{PASS}'; exit 1", "Crash: "),
    "exit 0 after a fail": (f"echo '{FAIL}'; exit 0", "Crash: "),
    "exit 3 after a fail": (f"echo '{FAIL}'; echo no kernel >&2; exit 3", "Unsupported: no kernel"),
    "exit 1 and half a verdict": ("echo '{\"verdict\": \"fail\"'; exit 1", "Crash: "),
    "exit 1 and two verdicts": (f"echo '{FAIL}{FAIL}'; exit 1", "Crash: "),
    "exit 1 and a list": ("echo '[\"verdict\", \"fail\"]'; exit 1", "Crash: "),
    "exit 1 and a word": ("echo '\"fail\"'; exit 1", "Crash: "),
    "exit 1 and no verdict": ("echo '{\"reason\": \"fail\"}'; exit 1", "Crash: "),
    "exit 1 and another verdict": ("echo '{\"verdict\": \"failed\"}'; exit 1", "Crash: "),
    "exit 1 and an error": (
        'echo \'{"error": {"code": 2, "message": "q is bad"}}\'; exit 1',
        "Crash: mla-oracle check gave no valid answer and ended with exit code 1: q is bad",
    ),
    "bad input": (
        'echo \'{"error": {"code": 2, "message": "seq_lens[3] is -1"}}\'; echo "mla-oracle: seq_lens[3]" >&2; exit 2',
        "BadInput: seq_lens[3] is -1",
    ),
    "bad input, only words": ('echo note >&2; echo "mla-oracle: usage" >&2; exit 2', "BadInput: usage"),
    "bad input, no words": ("exit 2", "BadInput: mla-oracle check gave no valid answer and ended with exit code 2"),
    "unsupported": ('echo "mla-oracle: no fp4" >&2; exit 3', "Unsupported: no fp4"),
    "environment": ('echo "mla-oracle: no GPU" >&2; exit 4', "Environment: no GPU"),
    "a wrapper without its command": ("exec nothing-of-this-name", "Environment: "),
}


@pytest.mark.parametrize("death", DEATHS)
def test_only_a_verdict_is_a_verdict(probe: Run, fake: Fake, death: str) -> None:
    body, words = DEATHS[death]
    ready, said = probe("ask", "oracle", fake(body), CHECK).stdout.splitlines()
    assert ready == "ready" and said.startswith(words)


def test_a_verdict_needs_exit_code_and_json(probe: Run, fake: Fake) -> None:
    for verdict, code, line in [(PASS, 0, "pass as it should be"), (FAIL, 1, "fail row 3 is off")]:
        said = probe("ask", "oracle", fake(f"echo '{verdict}'; exit {code}"), CHECK).stdout.splitlines()
        assert said[1] == f"{line} | {verdict}"
        engine = probe("engine", "--oracle", fake(f"echo '{verdict}'; exit {code}"), code=code)
        assert engine.stdout.startswith(("pass: ", "mismatch: ")[code])


def test_an_engine_exits_with_the_code_of_the_error(probe: Run, fake: Fake) -> None:
    for code in (2, 3, 4, 70):
        done = probe("engine", "--oracle", fake(f'echo "mla-oracle: line {code}" >&2; exit {code}'), code=code)
        assert done.stderr == f"engine: line {code}\n"


def test_a_run_that_ends_well_without_its_file_is_a_crash(probe: Run, fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = probe("ask", "oracle", fake("echo '{}'"), f"run|case|{out}").stdout.splitlines()[1]
    assert said == f"Crash: mla-oracle run ended well, but {out}: cannot be read: No such file or directory"
    said = probe("ask", "oracle", fake(f"echo '{FAIL}'; exit 1"), f"run|case|{out}").stdout.splitlines()[1]
    assert said.startswith("Crash: mla-oracle run gave no valid answer and ended with exit code 1")


@CLIENTS
def test_a_command_that_cannot_start_is_the_environments_fault(
    probe: Run, fake: Fake, tmp_path: Path, client: str
) -> None:
    unreadable, stale = tmp_path / "not executable", fake("#!/nowhere/python\n", "stale")
    unreadable.write_text("#!/bin/sh\n")
    for command, why in [
        (tmp_path / "nothing", "No such file or directory"),
        (unreadable, "Permission denied"),
        (stale, "No such file or directory"),
        (tmp_path, "Permission denied"),
    ]:
        assert probe("ask", client, command, CHECK).stdout.splitlines()[-1] == f"Environment: cannot start {command}: {why}"


@CLIENTS
def test_the_command_is_the_argument_else_the_variable_else_on_path(
    probe: Run, fake: Fake, tmp_path: Path, client: str
) -> None:
    fakes = {name: fake(answering(f'{{"verdict": "pass", "reason": "{name}"}}'), name) for name in ("a", "b", "mla-oracle")}
    on_path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    on_path.pop("MLA_ORACLE", None)
    for command, environment, who in [
        (fakes["a"], {**on_path, "MLA_ORACLE": str(fakes["b"])}, "a"),
        ("", {**on_path, "MLA_ORACLE": str(fakes["b"])}, "b"),
        ("", {**on_path, "MLA_ORACLE": ""}, "mla-oracle"),
        ("", on_path, "mla-oracle"),
    ]:
        assert f"pass {who} |" in probe("ask", client, command, CHECK, env=environment).stdout


ECHO = python("""
if sys.argv[1] == "serve":
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"verdict": "pass", "reason": json.dumps(request)}
        print(json.dumps({"id": request["id"], "ok": True, "exit_code": 0, "result": answer}), flush=True)
else:
    print(json.dumps({"verdict": "pass", "reason": json.dumps(sys.argv[1:])}))
""")


def test_files_are_absolute_ids_are_verbatim_and_options_are_passed(probe: Run, fake: Fake, tmp_path: Path) -> None:
    odd = tmp_path / "-o $(touch oops)"
    odd.write_text("")
    asked = [
        f"check|{odd.name}|actual|tol=0.001|rtol=0",
        "check|paged:heads=2,lens=4|actual",
        "check|nowhere/x|actual|out_dtype=a b",
    ]
    absolute = f"{tmp_path}/actual"
    wanted = [
        (["check", str(odd), absolute, "--tol=0.001", "--rtol=0"], {"case": str(odd), "tol": 0.001, "rtol": 0}),
        (["check", "paged:heads=2,lens=4", absolute], {"case": "paged:heads=2,lens=4"}),
        (["check", "nowhere/x", absolute, "--out-dtype=a b"], {"case": "nowhere/x", "out_dtype": "a b"}),
    ]
    for client in ("oracle", "server"):
        lines = probe("ask", client, fake(ECHO), *asked, cwd=tmp_path).stdout
        for i, (line, (argv, request)) in enumerate(zip(lines.splitlines()[1:], wanted, strict=True)):
            told = json.loads(json.loads(line.split(" | ", 1)[1])["reason"])
            request = {"id": i + 1, "op": "check", "actual": absolute, **request}
            assert told == (argv if client == "oracle" else request)
    assert not (tmp_path / "oops").exists()


# ---- what the server answers

READ = "read -r line; "
ANSWER = f'{{"id": 1, "ok": true, "exit_code": 0, "result": {PASS}}}'
SERVER_DEATHS = {
    "it never starts": ("exit 70", "and ended with exit code 70"),
    "it reads and exits": (READ + "echo MemoryError >&2; exit 1", "and ended with exit code 1: MemoryError"),
    "it is killed": (READ + "kill -9 $$", "and was killed by signal 9"),
    "it is killed in the middle of its answer": (READ + "printf '{\"id\": 1'; kill -9 $$", "and was killed by signal 9"),
    "it ends in the middle of its answer": (READ + f"printf '{ANSWER}'", "and ended with exit code 0"),
    "it ends well, saying nothing": (READ + "exit 0", "and ended with exit code 0"),
    "it closes its stdin and stays": ("exec 0<&-; exec sleep 60", "and was killed by signal 9"),
    "it closes its stdout and stays": (READ + "exec 1>&-; exec sleep 60", "and was killed by signal 9"),
}


@pytest.mark.parametrize("death", SERVER_DEATHS)
def test_a_server_that_dies_is_a_crash_and_stays_one(probe: Run, fake: Fake, death: str) -> None:
    body, words = SERVER_DEATHS[death]
    ready, said, again = probe("ask", "server", fake(body), f"{CHECK}|backend=@1000000", CHECK).stdout.splitlines()
    assert (ready, said) == ("ready", f"Crash: mla-oracle serve gave no valid answer {words}")
    assert again == "Crash: mla-oracle serve is gone since its last crash"


LYING_ANSWERS = {
    "garbage": "garbage",
    "an empty line": "",
    "half an object": '{"id": 1',
    "a list": "[1]",
    "no ok": f'{{"id": 1, "exit_code": 0, "result": {PASS}}}',
    "ok is a word": ANSWER.replace("true", '"true"'),
    "no id": ANSWER.replace('"id": 1, ', ""),
    "another id": ANSWER.replace('"id": 1', '"id": 2'),
    "the id null": ANSWER.replace('"id": 1', '"id": null'),
    "no result": '{"id": 1, "ok": true, "exit_code": 0}',
    "no exit code": ANSWER.replace('"exit_code": 0, ', ""),
    "pass and exit code 1": ANSWER.replace('"exit_code": 0', '"exit_code": 1'),
    "fail and exit code 0": ANSWER.replace('"pass"', '"fail"'),
    "no verdict and exit code 1": '{"id": 1, "ok": true, "exit_code": 1, "result": {}}',
    "an error to another question": '{"id": 2, "ok": false, "error": {"code": 2, "message": "no"}}',
    "an error without a code": '{"id": 1, "ok": false, "error": {"message": "no"}}',
    "an error that is a word": '{"id": 1, "ok": false, "error": "no"}',
}


@pytest.mark.parametrize("lie", LYING_ANSWERS)
def test_an_answer_of_the_server_that_lies_is_a_crash(probe: Run, fake: Fake, lie: str) -> None:
    body = f"{READ}echo '{LYING_ANSWERS[lie]}'; exec sleep 60"
    _, said, again = probe("ask", "server", fake(body), CHECK, CHECK).stdout.splitlines()
    assert said.startswith("Crash: mla-oracle serve gave no valid answer: ")
    assert again == "Crash: mla-oracle serve is gone since its last crash"


def test_an_answered_error_is_its_class_and_the_server_goes_on(probe: Run, fake: Fake) -> None:
    errors = [(2, "BadInput"), (3, "Unsupported"), (4, "Environment"), (70, "Crash"), (1, "Crash"), (0, "Crash")]
    lines = [f'{{"id": {i}, "ok": false, "error": {{"code": {code}, "message": "line {i}"}}}}'
             for i, (code, _) in enumerate(errors, 1)]  # fmt: skip
    lines.append('{"id": null, "ok": false, "error": {"code": 2, "message": "not JSON"}}')
    lines.append(ANSWER.replace('"id": 1', '"id": 8'))
    body = "\n".join(f"{READ}echo '{line}'" for line in lines)
    said = probe("ask", "server", fake(body), *[CHECK] * len(lines)).stdout.splitlines()
    assert said[1:-2] == [f"{name}: line {i}" for i, (_, name) in enumerate(errors, 1)]
    assert said[-2:] == ["BadInput: not JSON", f"pass as it should be | {PASS}"]


def test_the_server_is_gone_when_its_owner_is_done(probe: Run, fake: Fake, tmp_path: Path) -> None:
    for name, body in [("heeds", "exec cat >/dev/null"), ("ignores", "exec sleep 60")]:
        pid_file = tmp_path / name
        command = fake(f"echo $$ > '{pid_file}'; {READ}echo '{ANSWER}'; {body}")
        assert probe("ask", "server", command, CHECK).stdout.splitlines()[1].startswith("pass")
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


# ---- streams, signals, descriptors, threads

FLOOD = "import sys; sys.{0}.write({1!r} * 2_000_000); sys.{0}.flush()"


@CLIENTS
def test_two_megabytes_on_stderr_are_no_deadlock(probe: Run, fake: Fake, client: str) -> None:
    command = fake(f'{sys.executable} -c "{FLOOD.format("stderr", "x")}"\n{answering(PASS)}')
    for question in (CHECK, f"{CHECK}|backend=@100000"):
        assert f"pass as it should be | {PASS}" in probe("ask", client, command, question).stdout


def test_a_server_that_writes_before_it_reads_is_no_deadlock(probe: Run, fake: Fake) -> None:
    command = fake(f'{sys.executable} -c "{FLOOD.format("stdout", " ")}"\necho \'{ANSWER}\'; {READ}exec cat >/dev/null')
    said = probe("ask", "server", command, f"{CHECK}|backend=@3000000").stdout.splitlines()
    assert said[1] == f"pass as it should be | {PASS}"


def test_an_endless_answer_is_a_crash(probe: Run, fake: Fake) -> None:
    for client, question in [("oracle", CHECK), ("server", CHECK)]:
        said = probe("ask", client, fake("exec tr '\\0' x </dev/zero"), question).stdout.splitlines()
        assert said[1] == "Crash: the oracle printed more than 64 MiB on stdout"


def test_the_log_keeps_the_end_of_stderr(probe: Run, fake: Fake) -> None:
    command = fake(f'{sys.executable} -c "{FLOOD.format("stderr", "x")}"; echo >&2; echo "the end" >&2; exit 70')
    assert probe("ask", "oracle", command, CHECK).stdout.splitlines()[1] == "Crash: the end"


def test_an_oracle_sees_no_blocked_signal_and_the_thread_keeps_its_own(probe: Run, fake: Fake) -> None:
    see = """
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
answer = {"verdict": "pass", "reason": str(len(blocked))}
if sys.argv[1] == "serve":
    sys.stdin.readline()
    answer = {"id": 1, "ok": True, "exit_code": 0, "result": answer}
print(json.dumps(answer), flush=True)
"""
    said = probe("blocked", fake(python(see))).stdout.splitlines()
    assert [line.split(" | ")[0] for line in said] == ["pass 0", "pass 0"]
    dead = probe("blocked", fake("exit 9")).stdout.splitlines()
    assert [line.split(":")[0] for line in dead] == ["Crash", "Crash"]


def test_threads_ask_at_once_and_no_child_inherits_anothers_pipes(probe: Run, fake: Fake) -> None:
    look = """
links = []
for fd in os.listdir("/proc/self/fd"):
    try:
        links.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    except FileNotFoundError:
        pass
clean = sorted(link for link in links if link in ("pipe", "socket")) == ["pipe", "pipe", "socket"]
answer = {"verdict": "pass" if clean else "fail"}
if sys.argv[1] == "serve":
    for line in sys.stdin:
        answered = {"id": json.loads(line)["id"], "ok": True, "exit_code": 0 if clean else 1, "result": answer}
        print(json.dumps(answered), flush=True)
else:
    print(json.dumps(answer))
    sys.exit(0 if clean else 1)
"""
    probe("threads", fake(python(look)))


@CLIENTS
def test_a_harness_without_standard_streams_gets_its_verdict(probe: Run, fake: Fake, client: str) -> None:
    command, flags = fake(answering(PASS)), ["--server"] if client == "server" else []

    def close_all() -> None:
        for fd in (0, 1, 2):
            os.close(fd)

    probe("engine", "--oracle", command, *flags, preexec_fn=close_all)


def test_an_exit_code_taken_by_another_wait_is_a_crash(probe: Run, fake: Fake) -> None:
    import signal

    def ignore_children() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    said = probe("ask", "oracle", fake(answering(PASS)), CHECK, preexec_fn=ignore_children).stdout.splitlines()[1]
    assert said == "Crash: mla-oracle check gave no valid answer and another wait took its exit code"


# ---- the real oracle

FLAGS = {"oracle": [], "server": ["--server"]}


@CLIENTS
@pytest.mark.parametrize("cache", ["f32", "bf16"])
@pytest.mark.parametrize("base", [[], ["--lse-base-2"]])
def test_a_right_engine_passes(probe: Run, client: str, cache: str, base: list[str]) -> None:
    probe("engine", "--oracle", COMMAND, *FLAGS[client], "--cache", cache, *base)


@CLIENTS
@pytest.mark.parametrize("bug", ["rope", "tail", "scale"])
def test_a_wrong_engine_is_a_mismatch(probe: Run, client: str, bug: str) -> None:
    done = probe("engine", "--oracle", COMMAND, *FLAGS[client], "--bug", bug, code=1)
    assert done.stdout.startswith("mismatch: ")


def test_a_glm_5_2_cache_of_4096_tokens_goes_through_a_cpp_engine(probe: Run, engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "case.safetensors"
    probe("ask", "oracle", COMMAND, f"generate|paged:geometry=glm-5.2,lens=4096,dtype=bf16|{path}")
    for bug, code in [([], 0), (["--bug", "rope"], 1), (["--bug", "tail"], 1)]:
        done = subprocess.run([engine, path, "--oracle", COMMAND, "--server", *bug], capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr


def test_both_clients_say_the_same(probe: Run, tmp_path: Path) -> None:
    case, out = tmp_path / "case", tmp_path / "out"
    (tmp_path / "short").write_bytes(b"1234")
    questions = [
        f"generate|paged:heads=0|{case}",
        f"generate|paged:heads=2,row=24,value=16,lens=0+5+33,block=16,scale=0.25|{case}",
        f"run|{case}|{out}|precision=f32",
        f"check|{case}|{out}",
        f"check|{case}|{out}|tol=0|atol=0",
        f"check|{case}|{out}|tol=nan",
        f"check|{case}|{tmp_path / 'short'}",
        f"check|{case}|{tmp_path / 'nothing'}",
        f"check|{out}|{out}",
        f"run|{case}|{out}|precision=f16",
        f"run|{case}|{tmp_path / 'no' / 'out'}",
        f"check|{case}|{out}",
    ]
    answers = [probe("ask", client, COMMAND, *questions).stdout.splitlines()[1:] for client in ("oracle", "server")]
    assert answers[0] == answers[1]
    assert [line.split()[0] for line in answers[0]] == [
        "BadInput:", "generated", "ran", "pass", "fail", *["BadInput:"] * 6, "pass"
    ]  # fmt: skip
