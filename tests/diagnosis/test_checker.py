# SPDX-License-Identifier: Apache-2.0
"""The checker itself: what is no result of a kernel is rejected, with the words that say what it is."""

import json

import numpy as np
import pytest
from buggy import Judged

from mla_oracle.cases.inputs import generate
from mla_oracle.cli import main
from mla_oracle.files.exchange import write_result
from mla_oracle.mutants import find
from mla_oracle.oracle import expected
from mla_oracle.serve import answer
from mla_oracle.verdict.compare import check

pytest_plugins = ["pytester"]

ID = "paged:heads=4,row=20,value=4,lens=9+5+13,tokens=4,block=4,scale=0.3"
CASE = generate(ID)
TRUTH = expected(CASE, precision="f64")
OUT, LSE = (TRUTH[name].astype(np.float32) for name in ("out", "lse"))


def verdict(out, lse=LSE):
    given = {"out": out} if lse is None else {"out": out, "lse": lse}
    return check(CASE, given, TRUTH, complete=True)


WRONG = {
    "zeros": (np.zeros_like(OUT), LSE, "times the budget", "rows not computed"),
    "ones": (np.ones_like(OUT), LSE, "times the budget", "rows not computed"),
    "NaN": (np.full_like(OUT, np.nan), LSE, "192 NaN for a number", "0·NaN tail"),
    "one NaN": (np.where(np.arange(4) == OUT.argmax() % 4, np.nan, OUT), LSE, "NaN for a number", None),
    "stored [T, H] for [H, T]": (
        OUT.swapaxes(1, 2).copy(),
        LSE.swapaxes(1, 2).copy(),
        "times the budget",
        "query row mapping",
    ),
    "stored [V, H] for [H, V]": (OUT.swapaxes(2, 3).copy(), LSE, "times the budget", None),
    "one half": (np.full_like(OUT, 0.5), LSE, "times the budget", "rows not computed"),
    "the last request not written": (
        OUT * (np.arange(3) < 2)[:, None, None, None],
        LSE,
        "out is 0 where",
        "rows not computed",
    ),
    "infinite": (np.full_like(OUT, np.inf), LSE, "192 infinity for a number", None),
    "lse of zeros": (OUT, np.zeros_like(LSE), "lse is 0 where", "LSE value"),
    "lse of NaN": (OUT, np.full_like(LSE, np.nan), "48 NaN for a number", None),
    "lse of base 2": (OUT, LSE / np.log(2), "lse is ", "LSE base"),
    "negative": (-OUT, LSE, "times the budget", "missing V descale"),
    "half of the columns": (np.where(np.arange(4) < 2, OUT, 0), LSE, "times the budget", "columns not computed"),
    "lse of ones": (OUT, np.ones_like(LSE), "lse is 1 where", "rows not computed"),
}


@pytest.fixture(scope="module")
def judged():
    return Judged(CASE, {"out": "f32", "lse": "f32"})


@pytest.mark.parametrize("name", WRONG)
def test_what_no_kernel_means_is_rejected_in_words(name, judged):
    out, lse, words, family = WRONG[name]
    found = verdict(out.astype(np.float32), lse)
    assert not found.passed and words in found.reason, found.reason
    if family is not None:
        diagnosis = judged.diagnose({"out": out.astype(np.float32), "lse": lse})
        families = [suspicion.family for suspicion in diagnosis.classes]
        assert family in families[:1] or not diagnosis.named, diagnosis.summary


@pytest.mark.parametrize(
    "out, lse, words",
    [
        (OUT[:2], LSE, r"out is [2, 4, 4, 4], expected [3, 4, 4, 4]"),
        (OUT[..., :3], LSE, r"out is [3, 4, 4, 3], expected [3, 4, 4, 4]"),
        (OUT, LSE[..., :2], r"lse is [3, 4, 2], expected [3, 4, 4]"),
        (OUT.astype(np.int32), LSE, "out is i32, expected f64 or f32 or bf16 or f16"),
        (OUT.astype(np.float16).view(np.uint16), LSE, "out is u16, expected f64 or"),
        (OUT, None, "lse is missing"),
    ],
)
def test_results_of_the_wrong_form_are_rejected_in_words(out, lse, words):
    found = verdict(out, lse)
    assert not found.passed and words in found.reason, found.reason


def test_right_bits_taken_for_another_dtype_are_rejected():
    bits = OUT.astype(np.float16).view(np.uint16).astype(np.uint32) << 16
    misread = bits.view(np.float32)  # f16 read as bf16
    assert "times the budget" in verdict(misread).reason


def test_right_results_pass_and_what_is_missing_is_named():
    assert verdict(OUT).passed and verdict(OUT).missing == []
    found = check(CASE, {"out": OUT}, TRUTH)
    assert found.passed and found.missing == ["lse"] and found.reason.endswith("; not judged: lse is missing")
    assert not verdict(OUT, None).passed and verdict(OUT, None).reason.startswith("lse is missing")


OTHERS = (
    "naive:heads=2,nope=8,rope=4,value=6,rank=10,queries=3,cached=9",
    "absorbed:heads=2,nope=8,rope=4,value=6,rank=10,queries=3,cached=9",
    "merge:states=3,rows=4,heads=2,value=6",
    "rope:heads=2,rope=8,pairing=neox,base=10000",
    "append:rank=6,rope=2,tokens=9",
    f"{ID},shards=3",
)


@pytest.mark.parametrize("case_id", OTHERS)
def test_every_kind_of_case_rejects_what_is_no_result(case_id):
    case = generate(case_id)
    truth = expected(case, precision="f64")
    narrow = {n: x if case.kind == "append" else x.astype(np.float32) for n, x in truth.items()}
    assert check(case, narrow, truth, complete=True).passed
    main_one = case.results[0]
    for name, right in narrow.items():
        assert check(case, {n: x for n, x in narrow.items() if n != name or n == main_one}, truth).passed
        for wrong, words in (
            (np.zeros_like(right), f"{name} is 0"),
            (np.full_like(right, 0.5), f"{name} is 0.5 where "),
            (np.full_like(right, np.nan), "NaN for a number"),
            (right[..., :-1], f"{name} is {[*right.shape[:-1], right.shape[-1] - 1]}, expected {list(right.shape)}"),
            (right[None], f"{name} is {[1, *right.shape]}, expected {list(right.shape)}"),
            (np.where(np.isfinite(right.astype(float)), right, 0).astype(np.int64), f"{name} is i64, expected f"),
            (right[::-1].copy(), f"{name} is "),
        ):
            found = check(case, {**narrow, name: wrong}, truth)
            assert not found.passed and words in found.reason, (name, words, found.reason)


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "wrong.safetensors"
    results = find("causal.none").run(CASE)
    write_result(str(path), {name: array.astype(np.float32) for name, array in results.items()}, {})
    return str(path)


def test_check_diagnoses_and_says_what_the_case_is_blind_to(wrong, capsys):
    assert main(["check", ID, wrong, "--diagnose", "--blind"]) == 1
    out, err = capsys.readouterr()
    answered = json.loads(out)
    assert answered["diagnosis"]["classes"][0]["class"] == "no causal bound"
    assert answered["discrimination"]["applicable"] > 150
    assert "suspected: no causal bound (causal.none" in err
    assert "only queries 0-2 of 4 are wrong" in err


def test_diagnose_and_explain_on_the_command_line(wrong, capsys):
    assert main(["diagnose", ID, wrong]) == 0
    assert json.loads(capsys.readouterr().out)["summary"].startswith("suspected: no causal bound")
    assert main(["explain", ID, "--blind"]) == 0
    assert json.loads(capsys.readouterr().out)["discrimination"]["seen"] > 150
    assert main(["check", ID, wrong, "--complete"]) == 1


def test_serve_diagnoses(wrong):
    found = answer(json.dumps({"id": 1, "op": "diagnose", "case": ID, "actual": wrong}).encode())
    assert found["result"]["named"] and found["exit_code"] == 0
    found = answer(json.dumps({"op": "check", "case": ID, "actual": wrong, "diagnose": True}).encode())
    assert found["exit_code"] == 1 and "diagnosis" in found["result"]
    found = answer(json.dumps({"op": "check", "case": ID, "actual": wrong, "diagnose": "yes"}).encode())
    assert found["error"]["message"] == "diagnose is 'yes', expected true or false"


def test_the_pytest_fixture_says_what_is_suspected(pytester):
    pytester.makepyfile(f"""
        import pytest
        from mla_oracle.mutants import find
        @pytest.mark.parametrize("mla_case", ["{ID}"], indirect=True)
        def test_kernel(mla_case, mla_oracle):
            wrong = find("causal.none").run(mla_case)
            mla_oracle.check(mla_case, wrong["out"].astype("f4"), wrong["lse"].astype("f4"))
    """)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["suspected: no causal bound (causal.none*"])
