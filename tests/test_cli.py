# SPDX-License-Identifier: Apache-2.0
"""The command line as a harness meets it: a subprocess, its exit code, one JSON object on stdout, words on stderr."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mla_oracle import selftest
from mla_oracle.cases.inputs import generate
from mla_oracle.cli import main
from mla_oracle.files.exchange import read_case, read_result, write_case, write_result
from mla_oracle.oracle import expected

PAGED = "paged:heads=4,row=48,value=32,lens=0+1+17+40,block=16,tokens=2,scale=0.25,seed=3"
COMMAND = [sys.executable, "-m", "mla_oracle"]


def run(*args: object, stdin: str | None = None, **kwargs) -> tuple[int, dict, str]:
    done = subprocess.run([*COMMAND, *map(str, args)], input=stdin, capture_output=True, text=True, **kwargs)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def case_file(tmp_path: Path) -> Path:
    path = tmp_path / "case.safetensors"
    write_case(path, generate(PAGED))
    return path


@pytest.fixture
def result_file(tmp_path: Path, case_file: Path) -> Path:
    path = tmp_path / "out.safetensors"
    assert run("run", case_file, "--precision", "f32", "-o", path)[0] == 0
    return path


@pytest.mark.parametrize(
    "case_id",
    [
        PAGED,
        "naive:heads=2,nope=16,rope=8,value=12,rank=32,queries=3,cached=9",
        "absorbed:heads=2,nope=16,rope=0,value=12,rank=32,dtype=bf16",
        "merge:states=3,lse_base=2,empty_lse=inf",
        "rope:geometry=deepseek-v3,positions=0+17+4096,angles=table",
        "append:rank=32,rope=8,tokens=9",
        "paged:heads=2,row=40,value=32,lens=9+130,block=16,scale=0.5,pages=huge,shards=3,shard_layout=interleaved",
        "paged:geometry=glm-5.3-flash,lens=70,dtype=f16",
    ],
)
def test_case_run_check_agree_for_every_kind(tmp_path: Path, case_id: str) -> None:
    case, out = tmp_path / "case", tmp_path / "out"
    assert run("case", case_id, "-o", case)[0] == 0
    code, answer, _ = run("run", case, "--precision", "f32", "-o", out)
    assert code == 0 and answer["result"] == str(out)
    code, verdict, words = run("check", case, out)
    assert (code, verdict["verdict"]) == (0, "pass"), words
    assert run("explain", case)[1]["results"] == {
        name: list(array.shape) for name, array in read_result(out).items()
    }


def test_an_id_and_its_file_give_the_same_bits(case_file: Path) -> None:
    of_file, of_id = run("run", case_file)[1], run("run", PAGED)[1]
    assert of_file["tensors"] == of_id["tensors"]
    assert of_file["case"] == of_id["case"] == str(read_case(case_file).id)


def test_a_wrong_element_is_exit_1_and_named(tmp_path: Path, case_file: Path, result_file: Path) -> None:
    result = {name: array.copy() for name, array in read_result(result_file).items()}
    result["out"][2, 1, 3, 7] += 1
    write_result(tmp_path / "bad", result, {})
    code, verdict, words = run("check", case_file, tmp_path / "bad")
    worst = verdict["figures"]["out"]["worst"]
    table = read_case(case_file).block_table
    assert (code, verdict["verdict"]) == (1, "fail")
    assert {k: worst[k] for k in ("request", "query", "head", "column", "token", "page", "slot")} == {
        "request": 2, "query": 1, "head": 3, "column": 7, "token": 16, "page": int(table[2, 1]), "slot": 0,
    }  # fmt: skip
    assert "request 2, query 1, head 3, column 7, token 16" in words


def test_numerics_are_declared_and_rules_told(tmp_path: Path, case_file: Path, result_file: Path) -> None:
    result = dict(read_result(result_file))
    result["out"] = result["out"].astype(np.float16).astype(np.float32)
    write_result(tmp_path / "half", result, {})
    code, verdict, words = run("check", case_file, tmp_path / "half")
    assert code == 1 and "numerics inferred from the dtypes" in words
    code, verdict, words = run("check", case_file, tmp_path / "half", "--numerics", "memra,value_accumulator=mma-f16")
    assert code == 0 and verdict["numerics"]["origin"].startswith("preset memra, declared value_accumulator=mma-f16")
    code, verdict, words = run("check", case_file, tmp_path / "half", "--rules", "nmse+seed")
    assert code == 1 and verdict["rules"]["nmse"]["accepts"] and "rule nmse would accept: NMSE <= 5e-4" in words
    code, answer, _ = run("check", case_file, result_file, "--numerics", "memra2")
    assert code == 2 and answer["error"]["message"].startswith("numerics is 'memra2', expected field=value or one of")


def test_zeros_fail(tmp_path: Path, case_file: Path, result_file: Path) -> None:
    zeros = {"out": np.zeros_like(read_result(result_file)["out"])}
    write_result(tmp_path / "zeros", zeros, {})
    code, verdict, _ = run("check", case_file, tmp_path / "zeros")
    assert (code, verdict["verdict"], verdict["missing"]) == (1, "fail", ["lse"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no command given"),
        (("frobnicate",), "invalid choice"),
        (("run",), "required"),
        (("run", "missing.safetensors"), "missing.safetensors"),
        (("run", PAGED, "--precision", "f16"), "invalid choice"),
        (("run", PAGED, "--backend", "gpu"), "backend is 'gpu'"),
        (("run", PAGED, "--out-dtype", "f8"), "out_dtype is 'f8', expected f32"),
        (("run", PAGED, "--out-dtype", "e4m3"), "out_dtype is 'e4m3', expected f32"),
        (("run", PAGED.replace("scale=0.25,", "")), "neither scale nor geometry"),
        (("run", PAGED.replace("0.25", "nan")), "scale=nan, expected a positive finite number"),
        (("run", "paged:geometry=gpt-2"), "gpt-2"),
        (("run", "pagd:heads=4"), "pagd"),
        (("run", f"{PAGED},shards=5000"), "shards is 5000, expected at most 4096"),
        (("case", PAGED, "-o", "no/such/folder/case"), "no/such/folder"),
        (("case", PAGED, "-o", "."), "cannot write .: it is a folder, expected a regular file"),
        (("check", PAGED, "missing.safetensors"), "missing.safetensors"),
        (("check", PAGED, "missing.safetensors", "--tol", "x"), "invalid float"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    code, answer, words = run(*args, cwd=tmp_path)
    assert code == answer["error"]["code"] == 2
    assert said in answer["error"]["message"]
    assert words == f"mla-oracle: {answer['error']['message']}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_negative_tolerance_is_bad_input(case_file: Path, result_file: Path) -> None:
    assert run("check", case_file, result_file, "--tol=-1")[1]["error"]["message"].startswith("tol is -1")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_case_is_exit_2(tmp_path: Path, case_file: Path, size: int) -> None:
    (tmp_path / "cut").write_bytes(case_file.read_bytes()[:size])
    code, answer, _ = run("run", tmp_path / "cut", "-o", tmp_path / "never")
    assert code == 2 and "cut" in answer["error"]["message"]
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("redirect", [">&-", "> /dev/full"])
def test_a_stdout_that_cannot_be_written_is_exit_2_and_never_a_mismatch(
    tmp_path: Path, case_file: Path, result_file: Path, redirect: str
) -> None:
    command = f"'{sys.executable}' -m mla_oracle check {case_file} {result_file} {redirect}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "stdout" in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_exit_2(case_file: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, "run", case_file], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 2 and "stdout" in done.stderr and "Traceback" not in done.stderr


def test_a_defect_of_ours_is_exit_70(tmp_path: Path) -> None:
    script = (
        "import sys, mla_oracle.commands as c, mla_oracle.cli as cli\n"
        "c.run = lambda *a, **k: 1 / 0\n"
        "sys.exit(cli.main(['run', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == json.loads(done.stdout)["error"]["code"] == 70


def test_info_and_version() -> None:
    assert (Path(run("info")[1]["include_dir"]) / "mla_oracle.hpp").is_file()
    done = subprocess.run([*COMMAND, "info", "--include-dir"], capture_output=True, text=True)
    assert done.stdout.strip() == run("info")[1]["include_dir"]
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == run("info")[1]["version"]


def test_a_selftest_that_finds_a_wrong_bit_says_so(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    right = selftest.expected
    monkeypatch.setattr(
        selftest, "expected", lambda *args, **how: {k: np.nextafter(v, np.inf) for k, v in right(*args, **how).items()}
    )
    assert main(["selftest"]) == 70
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and len(report["failed"]) == report["proofs"] - 2


def test_what_was_not_among_the_results_is_said(tmp_path: Path, case_file: Path) -> None:
    out = {"out": expected(read_case(case_file))["out"]}
    write_result(tmp_path / "out", out, {})
    code, verdict, words = run("check", case_file, tmp_path / "out")
    assert (code, verdict["missing"]) == (0, ["lse"]) and words.endswith("; not judged: lse is missing\n")


def test_an_interrupt_is_one_line() -> None:
    with subprocess.Popen(
        [*COMMAND, "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as process:
        process.stdin.write('{"op": "info"}\n')
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == "mla-oracle: interrupted\n"


def test_the_selftest_passes() -> None:
    code, report, words = run("selftest")
    assert (code, report) == (0, {"passed": True, "proofs": 53, "failed": []})
    assert words.count("ok  ") == 53


def test_starting_imports_nothing_heavy() -> None:
    script = (
        "import sys, mla_oracle, mla_oracle.cli as c\n"
        "assert 'numpy' not in sys.modules, 'numpy'\n"
        f"c.main(['run', {PAGED!r}])\n"
        "heavy = {'cuda', 'torch', 'matplotlib', 'safetensors', 'pytest', 'ctypes.util'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_a_stderr_that_cannot_be_written_changes_no_exit_code(case_file: Path, result_file: Path) -> None:
    for args, code in ((f"check {case_file} {result_file}", 0), ("run nowhere", 2)):
        command = f"'{sys.executable}' -m mla_oracle {args} 2> /dev/full > /dev/null"
        assert subprocess.run(["sh", "-c", command]).returncode == code


@pytest.mark.parametrize("angles", ["recurrence", "power", "closed", "table"])
def test_an_f32_rope_passes_in_every_angle_mode_and_another_pairing_fails(tmp_path: Path, angles: str) -> None:
    case_id = f"rope:rope=64,base=8000000,pairing=interleaved,angles={angles}"
    assert run("run", case_id, "--precision", "f32", "-o", tmp_path / "out")[0] == 0
    assert run("check", case_id, tmp_path / "out")[0] == 0
    assert run("check", case_id.replace("interleaved", "neox"), tmp_path / "out")[0] == 1


def test_a_long_id_is_an_id_and_a_long_name_is_bad_input() -> None:
    lens = "+".join(str(100 + i) for i in range(60))
    assert run("explain", f"paged:heads=1,row=8,value=4,scale=0.5,lens={lens}")[0] == 0
    assert run("run", "x" * 300)[0] == 2


def test_explain_refuses_a_wrong_rank(tmp_path: Path) -> None:
    case = generate(PAGED)
    write_case(tmp_path / "flat", type(case)(**{**case.tensors(), **case.conventions(), "q": case.q.reshape(-1)}))
    assert "q has 1 axes" in run("explain", tmp_path / "flat")[1]["error"]["message"]


def test_the_options_of_run_and_check_arrive(tmp_path: Path, case_file: Path, result_file: Path) -> None:
    tensors = run("run", case_file, "--precision", "f32")[1]["tensors"]
    assert tensors["out"]["dtype"] == tensors["lse"]["dtype"] == "f32"
    tensors = run("run", case_file, "--out-dtype", "bf16")[1]["tensors"]
    assert (tensors["out"]["dtype"], tensors["lse"]["dtype"]) == ("bf16", "f64")
    answer = run("run", case_file, "--precision", "f32", "--isa", "v2", "--threads", "2")[1]
    assert (answer["backend"], answer["isa"]) == ("fast", "v2")
    assert run("run", case_file, "--backend", "strict")[1]["isa"] is None
    code, answer, words = run("check", case_file, result_file, "--rtol", "0", "--tol", "1")
    assert code == 0 and not answer["rules"]["allclose"]["accepts"] and answer["rules"]["tol"]["accepts"]
    assert "rule allclose would reject: |g - w| <= 0 + 0 |w|" in words


def test_a_case_is_not_replaced_by_its_result_and_no_kind_takes_an_unknown_backend(case_file: Path) -> None:
    before = case_file.read_bytes()
    assert run("run", case_file, "-o", case_file)[0] == 2 and case_file.read_bytes() == before
    assert run("run", "merge:", "--backend", "gpu")[0] == 2


@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        (PAGED, ("--isa", "v9"), "isa is 'v9', expected one of generic, v2"),
        (PAGED, ("--isa", "v2", "--backend", "strict"), "isa is 'v2', expected None with backend 'strict'"),
        (PAGED, ("--threads", "0"), "threads is 0, expected 1 to"),
        ("merge:", ("--isa", "v2"), "isa is 'v2', expected None for a merge case"),
    ],
)
def test_a_build_or_a_number_of_threads_that_cannot_be_is_exit_2(case: str, options: tuple, said: str) -> None:
    code, answer, _ = run("run", case, *options)
    assert code == 2 and said in answer["error"]["message"]
