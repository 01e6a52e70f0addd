# SPDX-License-Identifier: Apache-2.0
"""Calls in files: through the command line, serve, pytest and Python."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import ENGINES
from test_bad_calls import IDS
from test_conventions import DECODE, MLA, said
from test_dialect_bugs import rounded

from mla_oracle import cli, commands, generate, write_case, write_result
from mla_oracle.dialects import NAMES, files, get
from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.files.tensorfile import read_tensors, write_tensors
from mla_oracle.serve import serve
from mla_oracle.suites.command import run_command

pytest_plugins = ["pytester"]
TWO = f"{DECODE},tokens=2"


def run(capsys, *arguments):
    """(exit code, the JSON on stdout, stderr)"""
    code = cli.main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return code, json.loads(out) if out.startswith("{") else out, err


@pytest.mark.parametrize("name", NAMES)
def test_a_call_in_a_file_is_the_call_it_was(tmp_path, name):
    dialect, case = get(name), generate(IDS[name])
    arguments = files.write_call(tmp_path / "call", dialect, case)
    call = files.load_call(tmp_path / "call", name)
    assert call.dialect is dialect and call.case.id == case.id
    again = dialect.from_case(call.case)
    assert again.keys() == arguments.keys()
    for argument, value in arguments.items():
        assert np.asarray(again[argument]).tobytes() == np.asarray(value).tobytes(), argument
    tensors, metadata = read_tensors(tmp_path / "call")
    assert tensors.keys() | metadata.keys() == {*arguments, "schema", "dialect", "case"}
    assert metadata["schema"] == "mla-oracle-call/1" and metadata["dialect"] == name


SPOKEN = ("flashmla-dense", "flashinfer", "flashinfer-cute-dsl", "vllm-triton", "sglang-cpu", "sglang-cpu-flashmla",
          "tensorrt-llm", "tensorrt-llm-fp8", "llama.cpp")  # fmt: skip


@pytest.mark.parametrize("name", SPOKEN)
def test_the_command_line_speaks_a_dialect_from_case_to_verdict(tmp_path, capsys, name):
    call, actual, expected = (tmp_path / part for part in ("call", "actual", "expected"))
    code, made, _ = run(capsys, "case", IDS[name], "--dialect", name, "-o", call)
    assert code == 0 and made["dialect"] == name and made["call"] == get(name).call
    arguments = get(name).from_case(generate(IDS[name]))
    assert made["tensors"].keys() | made["values"].keys() == arguments.keys()
    results = ENGINES[name](arguments)
    write_result(actual, rounded(name, results), {})
    code, verdict, words = run(capsys, "check", "--dialect", name, call, actual)
    assert code == 0 and verdict["verdict"] == "pass" and words.startswith("pass: ")
    results[get(name).out] = results[get(name).out] * 1.5
    write_result(actual, rounded(name, results), {})
    code, verdict, _ = run(capsys, "check", "--dialect", name, call, actual)
    assert code == 1 and verdict["verdict"] == "fail"
    code, answer, _ = run(capsys, "run", "--dialect", name, call, "-o", expected)
    assert code == 0 and answer["tensors"].keys() == results.keys()
    assert run(capsys, "check", "--dialect", name, call, expected)[0] == 0
    code, plan, words = run(capsys, "explain", "--dialect", name, call)
    assert code == 0 and plan["results"] == {n: list(x.shape) for n, x in read_tensors(expected)[0].items()}
    assert "score = (q . key)" in words


def test_a_result_is_rounded_to_the_dtype_that_is_asked_for_and_stays_in_it(tmp_path, capsys):
    for name in ("vllm-triton", "flashmla-dense"):
        case = f"{DECODE},block={16 if name == 'vllm-triton' else 64}"
        asked = ("run", "--dialect", name, case, "-o", tmp_path / "result", "--out-dtype", "bf16")
        code, answer, _ = run(capsys, *asked)
        assert code == 0 and answer["tensors"][get(name).out]["dtype"] == "bf16"
        assert run(capsys, "check", "--dialect", name, case, tmp_path / "result")[0] == 0


def test_a_scale_may_be_a_tensor_of_the_file_as_it_may_be_of_the_call(tmp_path, capsys):
    run(capsys, "case", IDS["flashinfer-trtllm"], "--dialect", "flashinfer-trtllm", "-o", tmp_path / "call")
    tensors, metadata = read_tensors(tmp_path / "call")
    scale = np.array([metadata.pop("bmm1_scale")], np.float32)
    write_tensors(tmp_path / "other", tensors | {"bmm1_scale": scale}, metadata)
    one, other = (files.load_call(tmp_path / name, "flashinfer-trtllm").case for name in ("call", "other"))
    assert one.softmax_scale == other.softmax_scale == 0.0625


def test_an_id_or_a_case_file_is_spoken_where_a_dialect_is_named(tmp_path, capsys):
    write_case(tmp_path / "case", generate(TWO))
    dense = get("flashmla-dense")
    write_result(tmp_path / "actual", dense.run(**said("flashmla-dense", TWO)), {})
    for source in (TWO, tmp_path / "case"):
        code, verdict, _ = run(capsys, "check", "--dialect", "flashmla-dense", source, tmp_path / "actual")
        assert code == 0 and verdict["case"] == generate(TWO).id
    code, verdict, _ = run(capsys, "check", TWO, tmp_path / "actual")
    assert code == 1 and "lse is [3, 4, 2], expected [3, 2, 4]" in verdict["reason"]


def test_a_wrong_kernel_is_diagnosed_in_its_dialect(tmp_path, capsys):
    case = f"{TWO},unread=numbers"
    run(capsys, "case", case, "--dialect", "flashmla-dense", "-o", tmp_path / "call")
    arguments = get("flashmla-dense").from_case(generate(case))
    wrong = ENGINES["flashmla-dense"]({**arguments, "causal": False})
    write_result(tmp_path / "actual", rounded("flashmla-dense", wrong), {})
    both = ("--dialect", "flashmla-dense", tmp_path / "call", tmp_path / "actual")
    code, verdict, words = run(capsys, "check", "--diagnose", *both)
    assert code == 1 and "no causal bound" in verdict["diagnosis"]["summary"] and "no causal bound" in words
    code, found, _ = run(capsys, "diagnose", *both)
    assert code == 0 and "no causal bound" in found["summary"]


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda t, m: m.update(dialect="flashinfer"), 2, "dialect is 'flashinfer', expected 'flashmla-dense'"),
        (lambda t, m: m.update(schema="call/2"), 2, "schema is 'call/2', expected 'mla-oracle-call/1'"),
        (lambda t, m: m.pop("dialect"), 2, "dialect is None, expected 'flashmla-dense'"),
        (lambda t, m: m.update(softmax_scale="x"), 2, "metadata softmax_scale is 'x', expected a number"),
        (lambda t, m: m.update(causal="1"), 2, "metadata causal is '1', expected true or false"),
        (lambda t, m: m.update(head_dim_v="5.5"), 2, "metadata head_dim_v is '5.5', expected an integer"),
        (lambda t, m: m.update(q="1"), 2, "q is a tensor and in the metadata, expected one of them"),
        (lambda t, m: (t.pop("q"), m.update(q="1")), 2, "metadata q is '1', expected a tensor of that name"),
        (lambda t, m: t.pop("block_table"), 2, "block_table is missing, expected it in a call of"),
        (lambda t, m: m.update(scale="1"), 2, "scale is given, expected one of q, k_cache"),
        (lambda t, m: m.update(is_fp8_kvcache="true"), 2, "is_fp8_kvcache is True, expected False"),
        (lambda t, m: m.update(case="a\nb"), 2, "metadata case is 'a\\nb', expected printable characters"),
        (lambda t, m: t.update(lse=np.zeros(1, np.float32)), 2, "lse is given, expected one of q"),
    ],
)
def test_a_file_that_is_no_call_is_told_in_one_line(tmp_path, capsys, change, code, message):
    files.write_call(tmp_path / "call", get("flashmla-dense"), generate(TWO))
    tensors, metadata = read_tensors(tmp_path / "call")
    tensors, metadata = dict(tensors), dict(metadata)
    change(tensors, metadata)
    write_tensors(tmp_path / "bad", tensors, metadata)
    found, answer, words = run(capsys, "run", "--dialect", "flashmla-dense", tmp_path / "bad")
    assert found == code and message in answer["error"]["message"] and words.count("\n") == 1
    assert f"{tmp_path / 'bad'}: " in words


def test_what_cannot_be_said_ends_with_exit_code_3_and_leaves_no_file(tmp_path, capsys):
    code, answer, _ = run(capsys, "case", f"{TWO},softcap=30", "--dialect", "flashmla-dense", "-o", tmp_path / "call")
    assert code == 3 and answer["error"]["message"] == (
        "the case cannot be said in dialect 'flashmla-dense': softcap is 30.0, it has None"
    )
    assert not (tmp_path / "call").exists()
    code, answer, _ = run(capsys, "case", TWO, "--dialect", "flash", "-o", tmp_path / "call")
    assert code == 2 and answer["error"]["message"].startswith("dialect is 'flash', expected one of flashmla-dense ")


def test_a_file_without_its_dialect_named_is_no_case(tmp_path):
    files.write_call(tmp_path / "call", get("flashmla-dense"), generate(TWO))
    with pytest.raises(InputError, match=r"schema is 'mla-oracle-call/1', expected 'mla-oracle-case/1'"):
        commands.run(str(tmp_path / "call"))


def test_results_may_hold_what_is_not_judged(tmp_path):
    case_id = IDS["flashmla-prefill"]
    results = get("flashmla-prefill").run(**said("flashmla-prefill", case_id))
    write_result(tmp_path / "actual", {**results, "max_logits": np.zeros((1, 64), np.float32)}, {})
    assert commands.check(case_id, str(tmp_path / "actual"), dialect="flashmla-prefill")["verdict"] == "pass"


def test_serve_speaks_dialects(tmp_path):
    call, actual = str(tmp_path / "call"), str(tmp_path / "actual")
    asked = [
        {"id": 1, "op": "case", "case": TWO, "out": call, "dialect": "flashmla-dense"},
        {"id": 2, "op": "run", "case": call, "out": actual, "dialect": "flashmla-dense"},
        {"id": 3, "op": "check", "case": call, "actual": actual, "dialect": "flashmla-dense"},
        {"id": 4, "op": "explain", "case": call, "dialect": "flashmla-dense"},
        {"id": 5, "op": "check", "case": call, "actual": actual, "dialect": "vllm.cpp"},
        {"id": 6, "op": "dialects"},
    ]
    answers = io.StringIO()
    assert serve(io.BytesIO("\n".join(map(json.dumps, asked)).encode()), answers) == 0
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [answer["ok"] for answer in found] == [True, True, True, True, False, True]
    assert found[2]["result"]["verdict"] == "pass" and found[3]["result"]["results"]["lse"] == [3, 4, 2]
    assert found[4]["error"]["message"].endswith("dialect is 'flashmla-dense', expected 'vllm.cpp'")
    assert found[5]["result"]["count"] == len(NAMES)


def test_pytest_calls_a_kernel_in_its_own_words(pytester):
    pytester.makepyfile(f"""
        import numpy as np
        import pytest

        CASE = "{DECODE},block=16"

        @pytest.mark.parametrize("mla_case", [CASE], indirect=True)
        @pytest.mark.parametrize("wrong", [False, True])
        def test_kernel(mla_case, mla_oracle, wrong):
            call = mla_oracle.call(mla_case, "vllm-triton")
            assert call.arguments["k_buffer"].shape == (12, 16, 1, 576)
            results = call.expected(precision="f32")
            assert np.isnan(results["o"][1]).all()
            if wrong:
                results["lse"] = results["lse"] * np.float32(1.4427)
            call.check(**results)
    """)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*lse*request*", "*the case again: mla-oracle case paged:*"])


def test_a_plain_call_is_still_a_plain_case():
    """Mutants and diagnosis know it: the parts of a split query and cache are joined."""
    for name in ("flashinfer", "sglang-triton", "tvm", "lmdeploy", "vllm.cpp"):
        case = get(name).to_case(**said(name, IDS[name]))
        assert set(case.extensions()) <= {"qo_indptr"}, name


def test_a_selection_of_a_request_by_position_becomes_slots():
    case_id = f"paged:heads=64,{MLA},scale=0.0625,dtype=bf16,lens=70+64,block=16,topk=64,format=fp8_ds_mla"
    arguments = said("flashmla-sparse", case_id)
    case = generate(case_id)
    position = case.topk_indices[0]
    slots = np.where(position < 0, -1, case.block_table[0, position // 16] * 16 + position % 16)
    assert (arguments["indices"][0, 0] == slots).all()


def test_a_harness_in_cpp_speaks_a_dialect_through_its_tensor_maps(tmp_path):
    compiler = next((found for name in ("c++", "g++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = Path(__file__).parent / "call.cpp", tmp_path / "call"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{commands.include_dir()}"]
    subprocess.run([compiler, *flags, source, "-o", program], check=True)
    oracle = tmp_path / "oracle"
    oracle.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mla_oracle "$@"\n')
    oracle.chmod(0o755)
    environment = os.environ | {"MLA_ORACLE": str(oracle)}
    done = subprocess.run([program, TWO, tmp_path], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "10\n10\n"), done.stderr


def test_a_suite_runs_a_command_that_speaks_a_dialect(tmp_path, capsys):
    """Right in f32; a case that the call cannot say is left out by name, and one that it gets wrong is found."""
    oracle = f"{sys.executable} -m mla_oracle run {{case}} -o {{out}} --precision f32 --dialect"
    cases = [TWO, f"{TWO},softcap=9", f"{DECODE},inputs=peaked"]
    asked = ("suite", "run", *cases, "--dialect", "flashmla-dense")
    code, answer, words = run(capsys, *asked, "--exec", f"{oracle} flashmla-dense")
    assert code == 0 and answer["dialect"] == "flashmla-dense" and "softcap is 9.0, it has None" in words
    assert [left["case"] for left in answer["left_out"]] == [cases[1]]
    triton = ("suite", "run", f"{DECODE},block=16", "--dialect", "vllm-triton", "--exec", f"{oracle} vllm-triton")
    assert run(capsys, *triton)[0] == 0
    script = tmp_path / "engine.py"
    script.write_text(
        "import sys\n"
        "from mla_oracle import write_result\n"
        "from mla_oracle.dialects import files\n"
        "call = files.load_call(sys.argv[1], 'flashmla-dense')\n"
        "arguments = call.dialect.from_case(call.case)\n"
        "results = call.dialect.run(**arguments | {'causal': False})\n"
        "write_result(sys.argv[2], results, {})\n"
    )
    code, answer, words = run(capsys, *asked, "--exec", f"{sys.executable} {script} {{case}} {{out}}")
    assert code == 1 and "fail: " in words and "pass: " in words
    with pytest.raises(UnsupportedError, match=r"^none of 1 cases can be said in dialect 'flashmla-dense'$"):
        run_command([cases[1]], "engine {case} {out}", dialect="flashmla-dense")
