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
# What an array may not be asked for.
SUMS = set("sum mean dot cumsum cumprod clip round std var".split())


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


def numbers_of(node):
    """The names in an expression whose numbers it is made of: not those it asks for a shape or a length."""
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim", "size", "dtype"):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
        return
    if isinstance(node, (ast.Attribute, ast.Name)):
        yield node.attr if isinstance(node, ast.Attribute) else node.id
    for child in ast.iter_child_nodes(node):
        yield from numbers_of(child)


def computed(source, tensors):
    """What a source computes that no adapter may: in words, by line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Pow, ast.MatMult)):
            yield f"{type(node.op).__name__} in line {node.lineno}"
        if isinstance(node, (ast.BinOp, ast.AugAssign, ast.UnaryOp)) and not isinstance(node.op, (ast.BitOr, ast.Not)):
            yield from (f"{name} is computed with in line {node.lineno}" for name in tensors & {*numbers_of(node)})
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np":
            if node.attr not in MOVES:
                yield f"np.{node.attr} in line {node.lineno}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SUMS:
            yield f".{node.func.attr}() in line {node.lineno}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_adapter_computes(module):
    """No division or power, no arithmetic on numbers of tensors but integers, which say where rows are."""
    of = [get(name).arguments for name in NAMES if inspect.getmodule(get(name)) is module]
    tensors = {"q", "kv_cache", "out", "lse"} | {
        name for arguments in of for name, argument in arguments.items() if {*argument.dtypes} - {"i32", "i64"}
    }
    assert not [*computed(inspect.getsource(module), tensors)]


@pytest.mark.parametrize(
    "line",
    [
        "given.q * 2", "x = -given.q[0]", "q += 1", "lse /= 2", "given.scale ** 2", "np.exp(lse)", "(x + q).T", "x @ y",
        "kv_cache.astype(np.float32).sum(axis=0)", "q.shape[0] * q", "~q",
    ],
)  # fmt: skip
def test_an_adapter_that_computes_is_told(line):
    assert [*computed(line, {"q", "kv_cache", "lse"})]
    assert not [*computed("q.shape[-1] - len(lse) * 2; {'q': q} | {'lse': lse}", {"q", "lse"})]


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
