# SPDX-License-Identifier: Apache-2.0
"""The catalogue, and `mla-oracle mutants`."""

import json
import re

import numpy as np
import pytest

from mla_oracle import InputError, cli, commands
from mla_oracle.cases.inputs import generate
from mla_oracle.files.exchange import write_case
from mla_oracle.mutants import Problem, applicable, bank, compose, equivalences, find
from mla_oracle.mutants.absent import ABSENT
from mla_oracle.oracle import expected

CASE = "paged:heads=2,row=20,value=12,scale=0.3,lens=7+9,block=4"


def test_names_are_unique_and_say_their_class_in_short():
    names = [m.name for m in (*bank(), *equivalences())]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z]+\.[a-z0-9.+-]+( \+ [a-z]+\.[a-z0-9.+-]+)?", name) for name in names)


def test_every_mutant_says_what_it_computes_and_what_it_needs():
    for mutant in (*bank(), *equivalences()):
        assert mutant.formula and mutant.family and mutant.kinds, mutant.name
        assert mutant.needs or set(mutant.kinds) <= {"rope", "append"}, mutant.name
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", reference) for reference in mutant.references), mutant.name


# The classes of wrong functions that the public bugs of such kernels fall into.
CLASSES = """
    uniform temperature
    composition of two
    rope pairing → wrong top-k set
    equivalence (must pass)
    rope pairing
    position off by one
    row-indexing in rope
    double rotation
    missing rotation
    double rotation, tail heads
    wrong V slice
    K/V step mismatch
    query row mapping
    head-count-specific
    port scramble
    output permutation
    output basis
    row width
    upstream GEMM
    32-bit offset wrap
    stride ignored
    page-size semantics
    length metadata
    request start offset
    truncated table
    writer corruption
    0·NaN tail
    NaN through additive mask
    pad lanes in denominator
    phantom state
    missing V descale
    scale misuse
    inverted scale
    scale rounded to 2^k
    record layout
    upstream query
    empty row
    empty row untouched
    0/0
    -inf merge
    LSE overflow
    LSE base
    combine coverage
    phantom split
    0·NaN split
    LSE slot
    sink multiplicity
    merge precision
    no causal bound
    unwanted causal bound
    mask scaled
    window
    -1 treated as valid
    -1 gather
    lane prefix
    OOB index
    lanes beyond length
    empty list
    top-k set
    duplicates
    sink range
    dense instead of sparse
    -1 treated as zero key
    lazy rescale
    mask overflow
    low-precision scores
    race
    race / workspace
"""


def test_every_class_of_public_bugs_has_a_mutant_or_a_reason():
    known = {m.family for m in (*bank(), *equivalences())} | {a.family for a in ABSENT}
    assert {line.strip() for line in CLASSES.strip().splitlines()} <= known


def test_no_class_is_both_executable_and_absent():
    assert not {m.family for m in bank()} & {a.family for a in ABSENT}
    assert all(a.reason and a.references for a in ABSENT)


def test_numbers_in_names_are_their_parameters():
    for mutant in bank():
        number = re.search(r"-(\d+(\.\d+)?)$", mutant.name)
        if number and set(mutant.parameters) & {"factor", "tile", "limit", "width", "cap", "slope", "base", "value"}:
            assert float(number[1]) in [abs(v) for v in mutant.parameters.values() if isinstance(v, (int, float))]


def test_the_catalogue_is_one_json_object(capsys):
    assert cli.main(["mutants", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["count"] == len(answer["mutants"]) == sum(answer["families"].values()) == len(bank())
    entry = next(m for m in answer["mutants"] if m["name"] == "temperature.row-width")
    assert entry["family"] == "uniform temperature" and "ollama/ollama#13893" in entry["references"]
    absent, known = {a["family"] for a in answer["absent"]}, set(answer["families"])
    assert absent >= {"race", "upstream query"} and not absent & {"sink multiplicity", "record layout"}
    assert known >= {"sink multiplicity", "record layout", "lanes beyond length", "quantised cache"}


def test_the_catalogue_is_a_table_of_one_line_each(capsys):
    assert cli.main(["mutants"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(bank()) + len(equivalences()) + len(ABSENT) + 1
    assert lines[-1].startswith(f"{len(bank())} mutants of ")


def test_a_case_says_which_apply_and_by_how_much_they_differ(capsys, tmp_path):
    path = tmp_path / "case"
    write_case(path, generate(CASE))
    assert cli.main(["mutants", "--json", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    by_name = {m["name"]: m for m in answer["mutants"]}
    assert answer["applicable"] == len(applicable(generate(CASE))) == sum(m["applies"] for m in answer["mutants"])
    half = by_name["value.factor-0.75"]
    assert (half["out"], half["lse"], half["rows"], half["nonfinite"]) == (0.25, 0.0, 0.5, 0)
    assert by_name["shard.rest-lost"] == {"name": "shard.rest-lost", "family": "shard ownership", "applies": False,
                                          "reason": "needs shards"}
    assert by_name["tail.nan-value"]["nonfinite"] == 4  # both heads of both requests
    assert not any(m.get("differs") for m in answer["controls"])


@pytest.mark.parametrize("case", [CASE, "merge:states=3", "append:rank=8,rope=4", "rope:rope=8,pairing=neox,base=1e4",
                                  "naive:heads=2,nope=8,rope=4,value=6,rank=8"])
def test_every_kind_of_case_has_a_table(capsys, case):
    assert cli.main(["mutants", case]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and lines[-1].endswith(generate(case).name)


def test_a_bad_case_is_one_line(capsys):
    assert cli.main(["mutants", "paged:heads=0"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == 2
    with pytest.raises(InputError, match=r"mutant 'rope\.nothing' is not known"):
        find("rope.nothing")


def test_a_bad_table_is_refused_as_the_oracle_refuses_it():
    case = generate(CASE)
    case.block_table[1, 0] = 99
    with pytest.raises(InputError, match=r"block_table\[1, 0\] is 99"):
        find("rope.dropped").run(case)


def test_figures_have_three_digits():
    for entry in commands.mutants(CASE)["mutants"]:
        for name in ("rows", "out", "lse"):
            value = entry.get(name, 0.0)
            assert value in ("inf", float(f"{float(value):.3g}"))


def test_results_have_the_shapes_of_the_truth():
    for text in (CASE, f"{CASE},tokens=2", f"{CASE},shards=2", f"{CASE},tokens=2,shards=3,shard_layout=interleaved",
                 "absorbed:heads=2,nope=8,rope=4,value=6,rank=8,queries=2"):
        case = generate(text)
        truth = expected(case)
        got = find("temperature.half").run(case)
        assert {name: value.shape for name, value in got.items()} == {name: x.shape for name, x in truth.items()}
        right = compose().run(case)
        for name, want in truth.items():
            assert np.allclose(right[name], want, rtol=0, atol=1e-12), name


def test_a_problem_computes_the_right_state_once():
    problem = Problem(generate(CASE))
    first = problem.plan(1)
    find("temperature.half").solve(problem)
    assert problem.plan(1) is first


def test_without_room_for_states_the_results_are_the_same(monkeypatch):
    case = generate(f"{CASE},tokens=2")
    roomy = Problem(case)
    monkeypatch.setattr("mla_oracle.mutants.problem.KEPT_BYTES", 0)
    tight = Problem(case)
    for name in ("temperature.half", "paging.next-table-row", "state.carried", "merge.states-transposed"):
        assert np.array_equal(find(name).solve(roomy)["out"], find(name).solve(tight)["out"], equal_nan=True)
