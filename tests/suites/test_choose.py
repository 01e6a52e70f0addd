# SPDX-License-Identifier: Apache-2.0
"""Suites are chosen by what they see: folders, coverage, the pytest parametrisation."""

import json
from importlib import import_module

import numpy as np
import pytest

from mla_oracle.cases.inputs import generate
from mla_oracle.cases.recipes import parse_id
from mla_oracle.cli import main
from mla_oracle.diagnosis import made
from mla_oracle.diagnosis.discrimination import SURE, discrimination, largest
from mla_oracle.files.exchange import load_case
from mla_oracle.mutants import find, temperature
from mla_oracle.suites import choose, probes

pytest_plugins = ["pytester"]

choose_module = import_module("mla_oracle.suites.choose")
SIZES = "heads=3,row=20,value=12,scale=0.3,dtype=f32"


def test_a_case_that_adds_nothing_is_not_chosen():
    first = probes(SIZES, block=4, max_tokens=60)[0]
    suite = choose([first, first.replace("tokens=3", "seed=2,tokens=3")], mutants=[find("causal.none")])
    assert suite.cases == [first]
    assert suite.seen == {first: ["causal.none"]}


def test_a_case_that_sees_what_others_do_not_is_chosen_and_the_rest_is_said():
    ids = [f"paged:{SIZES},lens=5+9", f"paged:{SIZES},lens=4+9,tokens=2"]
    asked = [find(name) for name in ("temperature.half", "causal.none", "window.4096")]
    suite = choose(ids, mutants=asked)
    assert suite.cases == ids
    assert (suite.unseen, suite.never) == ([], ["window.4096"])


def test_a_mutant_within_what_rounding_makes_is_not_seen_by_a_case_that_is_chosen_for_another():
    ids = [f"paged:{SIZES},lens=5+9", f"paged:{SIZES},lens=4+9,tokens=2"]
    slight = temperature.factor(1 + 3e-6)
    suite = choose(ids, mutants=[find("causal.none"), slight])
    assert suite.seen == {ids[0]: [], ids[1]: ["causal.none"]}
    assert suite.unseen == [slight.name]
    for case_id in ids:
        assert 0 < discrimination(generate(case_id), mutants=(slight,)).units[slight.name] < SURE


def test_probes_keep_to_the_limit():
    for case_id in probes("geometry=deepseek-v2-lite,dtype=bf16", max_tokens=300):
        assert sum(parse_id(case_id).lens) <= 300, case_id


def test_a_folder_is_written_and_read_back(tmp_path, capsys):
    folder = tmp_path / "suite"
    how = ["--geometry", "heads=3,row=20,value=12,scale=0.3", "--dtype", "f32", "--block", "4", "--max-tokens", "40"]
    assert main(["suite", *how, "-o", str(folder)]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["unseen"] == [] and answer["seen"] == answer["applicable"] > 250
    assert f"see {answer['seen']} of {answer['applicable']} mutants that apply" in err
    assert json.loads((folder / "suite.json").read_text())["cases"] == answer["cases"]
    for entry in answer["cases"]:
        assert load_case(str(folder / entry["file"])).id == entry["case"]
    assert main(["suite", *how, "-o", str(folder)]) == 2
    assert "expected a new folder or an empty one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["suite"], "suite needs --geometry"),
        (["suite", "--geometry", "nothing"], "geometry is 'nothing', expected"),
        (["suite", "--geometry", "glm-5.2", "--kinds", "paged+sparse"], "kinds has 'sparse', expected paged"),
        (["suite", "run", "x", "--exec", "k {case} {out}", "--jobs", "0"], "jobs is 0, expected 1 or more"),
        (["suite", "run", "x", "--exec", "k {case} {out}", "--timeout", "0"], "timeout is 0.0, expected"),
        (["suite", "run", ".", "--exec", "k {out}"], "expected one with {case}"),
        (["suite", "run", ".", "--exec", "k '{case} {out}"], "expected words as in a shell: No closing quotation"),
        (["suite", "run", ".", "--exec", "k {case} {out}", "--html", "/"], "/ cannot be written, expected the name of"),
        (["suite", "run", ".", "--exec", "k {case} {out}", "--json", "no/x"], "no/x cannot be written, expected the"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert main(words) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]


def test_numbers_in_what_is_not_read_change_nothing_that_is():
    for more in ("", ",pages=huge", ",pages=strided", ",pages=descending"):
        with_nan, with_numbers = (generate(f"paged:{SIZES},lens=9+0+70{more}{x}") for x in ("", ",unread=numbers"))
        for b, length in enumerate(with_nan.seq_lens):
            used = -(-length // with_nan.kv_cache.shape[1])
            assert np.array_equal(with_nan.block_table[b, :used], with_numbers.block_table[b, :used])
        held = np.isfinite(with_nan.kv_cache)
        assert np.array_equal(with_nan.kv_cache[held], with_numbers.kv_cache[held])
        assert np.isfinite(with_numbers.kv_cache).all()
        ids = np.arange(len(with_numbers.kv_cache)) if with_numbers.page_ids is None else with_numbers.page_ids
        assert np.isin(with_numbers.block_table, ids).all()


def test_strided_pages_have_a_gap_of_their_size():
    case = generate(f"paged:{SIZES},lens=70+9,pages=strided")
    assert case.block_stride == 2 * case.kv_cache[0].nbytes
    assert find("stride.pages").applies(case) is None


def test_a_suite_is_a_parametrisation(pytester, tmp_path):
    main(
        [
            "suite",
            "--geometry",
            "heads=2,row=12,value=8,scale=0.3",
            "--dtype",
            "f32",
            "--block",
            "4",
            "--max-tokens",
            "12",
            "-o",
            str(tmp_path / "s"),
        ]
    )
    count = len(list((tmp_path / "s").glob("*.safetensors")))
    pytester.makepyfile("""
        def test_kernel(mla_suite, mla_oracle):
            mla_oracle.check(mla_suite, *list(mla_oracle.expected(mla_suite, precision="f32").values())[:2])
    """)
    pytester.runpytest_subprocess("--mla-suite", str(tmp_path / "s")).assert_outcomes(passed=count)
    missing = pytester.runpytest_subprocess()
    assert missing.ret != 0
    missing.stdout.fnmatch_lines(["*expected --mla-suite with a folder or a geometry*"])


def test_what_some_heads_show_is_seen_and_what_they_do_not_is_looked_for_in_all(monkeypatch):
    ids = [f"paged:heads=24,row=20,value=12,scale=0.3,lens=9+{n}" for n in (5, 70)]
    asked = [find(name) for name in ("temperature.half", "query.tail-heads", "lse.base-2")]
    of_head_1 = made.rows_held(np.array([[0, 0, 1]]), 0.0, ("out",))
    measured = []
    monkeypatch.setattr(choose_module, "largest", lambda *given: measured.append(given[2].name) or largest(*given))
    few = choose(ids, mutants=[*asked, of_head_1])
    assert set(measured) == {of_head_1.name}
    assert few.unseen == [] and len(few.seen[ids[0]]) == 4
    monkeypatch.setattr(choose_module, "HEADS", 1 << 10)
    assert choose(ids, mutants=[*asked, of_head_1]) == few


def test_it_is_said_how_far_the_choice_is(monkeypatch):
    monkeypatch.setattr(choose_module, "SILENT", 0.0)
    ids = [f"paged:{SIZES},lens=5+9", f"paged:{SIZES},lens=4+9,tokens=2"]
    said = []
    choose(ids, mutants=[find(name) for name in ("temperature.half", "causal.none")], progress=said.append)
    assert said[0] == "2 candidates, 2 mutants"
    assert "2 of 2 candidates looked at" in said
    assert f"{ids[0]}: 1 of 2 mutants" in said
