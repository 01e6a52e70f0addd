# SPDX-License-Identifier: Apache-2.0
"""What every adapter must be: thin, documented, without arithmetic, and listed as it is in the README."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from mla_oracle import cli
from mla_oracle.dialects import NAMES, get, table

README = (Path(__file__).parents[2] / "README.md").read_text()
MODULES = sorted({inspect.getmodule(get(name)) for name in NAMES}, key=lambda module: module.__name__)
# What numpy may be asked for: to make arrays, to move them, and to find an entry that is wrong.
MOVES = set(
    "arange array ascontiguousarray broadcast_to concatenate diff flatnonzero full nan ones pad repeat zeros"
    " float16 float32 float64 int32 int64 uint8".split()
)


def test_the_table_in_the_readme_is_the_adapters(capsys):
    listed = README[README.index("| dialect | call |") :].partition("\n\n")[0]
    assert listed == table.table(), "mla-oracle dialects prints the table"
    assert cli.main(["dialects"]) == 0 and capsys.readouterr().out == table.table() + "\n"


def test_the_list_for_programs_has_every_argument(capsys):
    import json

    assert cli.main(["dialects", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["dialect"] for entry in listed["dialects"]] == list(NAMES) and listed["count"] == len(NAMES)
    for entry in listed["dialects"]:
        assert {*entry["tensors"], *entry["values"]} == set(get(entry["dialect"]).arguments)
    dense = listed["dialects"][0]
    assert dense["tensors"]["k_cache"] == {
        "axes": [["num_blocks", "64", "h_k", "d"]], "dtypes": ["as q"], "required": True
    }  # fmt: skip
    assert dense["values"]["softmax_scale"] == {"type": "float", "default": "1/sqrt(d)"}
    assert dense["results"]["lse"] == {
        "name": "lse", "axes": ["b", "h", "s_q"], "base": "e", "empty": "+inf", "sink": False
    }  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_adapter_computes(module):
    """No division, power or product of arrays, no function of numpy but those that make or move arrays."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        assert not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Div, ast.Pow, ast.MatMult)), node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np":
            assert node.attr in MOVES, f"np.{node.attr} in line {node.lineno}"


@pytest.mark.parametrize("name", NAMES)
def test_every_adapter_says_where_its_contract_was_read(name):
    dialect = get(name)
    module = inspect.getmodule(dialect)
    assert dialect.source and dialect.call and dialect.masks
    project = re.split(r"[/ ]", dialect.source)[1 if "/" in dialect.source.split(" ")[0] else 0]
    read = re.search(r"Read from (.*?)\.\s", module.__doc__, re.S)
    assert read is not None or "; " in module.__doc__
    said = " ".join(module.__doc__.split())
    assert project in said and re.search(r"one stored version|[0-9a-f]{7}|\d\.\d\.\d", said)
    assert len(inspect.getsource(type(dialect)).splitlines()) <= 85


@pytest.mark.parametrize("name", NAMES)
def test_the_letters_of_results_are_those_of_arguments(name):
    dialect = get(name)
    letters = {letter for argument in dialect.arguments.values() for axes in argument.axes for letter in axes}
    known = letters | set(dialect.arguments) | {part for letter in letters for part in letter.split("*")}
    for axis in (*dialect.out_axes.split(), *dialect.lse_axes.split()):
        assert all(part.isdigit() or part in known for part in axis.split("*")), axis
