# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: cases as a fixture, and a fixture that asserts a verdict. Loaded in every run: it imports nothing.

    def test_my_kernel(mla_case, mla_oracle):
        out, lse = my_kernel(mla_case.q, mla_case.kv_cache, ...)
        mla_oracle.check(mla_case, out, lse)

`mla_case` runs over the ids given by --mla-case, or by `@pytest.mark.parametrize("mla_case", [...], indirect=True)`, or
over a few hostile paged cases; an id may ask for selections, windows, sinks, formats ("paged:...,topk=64"), and
mla_case.extensions() names what of a case is not plain. In the words of an engine (`mla-oracle dialects`):

    call = mla_oracle.call(mla_case, "flashmla-dense")
    out, lse = flash_mla_with_kvcache(**call.arguments)
    call.check(out=out, lse=lse)

A whole layer, of which a layer case says the inputs and where the weights are:

    mla_oracle.layer("layer.safetensors").check(q_a=..., k_pe=..., out=...)

`mla_suite` is the same over the cases of a whole suite, which
--mla-suite names.
"""

from __future__ import annotations

from typing import Any

import pytest

HOSTILE = [
    f"paged:seed={{seed}},heads=16,row=576,value=512,lens=1+63+64+65+200,scale=0.0625,inputs={inputs}"
    for inputs in ("normal", "peaked", "flat", "position", "onehot", "tailed", "rising")
]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mla-oracle", "MLA decode oracle")
    group.addoption("--mla-case", action="append", metavar="ID", help="a case id or file for mla_case (repeatable)")
    group.addoption("--mla-suite", metavar="S", help="cases of mla_suite: a folder of mla-oracle suite, or a geometry")
    group.addoption("--mla-seed", type=int, default=1, metavar="N", help="seed of the default cases (default: 1)")
    group.addoption("--mla-numerics", metavar="SPEC", help="what the kernel rounds: a preset, FIELD=VALUE,... or both")
    group.addoption("--mla-rules", metavar="NAMES", help="other projects' rules, told beside: all, or joined by +")


def pytest_report_header(config: pytest.Config) -> str:
    from . import __version__

    given = {
        option: value
        for option in ("case", "suite", "seed", "numerics", "rules")
        if (value := config.getoption(f"mla_{option}")) is not None
    }
    return f"mla-oracle: {__version__}, " + ", ".join(f"{option} {value}" for option, value in given.items())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, cases in (("mla_case", _default_cases), ("mla_suite", _suite_cases)):
        if fixture in metafunc.fixturenames and not _parametrised(metafunc, fixture):
            ids = cases(metafunc.config)
            metafunc.parametrize(fixture, ids, indirect=True, ids=[case_id.rpartition("/")[2] for case_id in ids])


def _parametrised(metafunc: pytest.Metafunc, fixture: str) -> bool:
    """Whether the test itself says what the fixture runs over."""
    for marker in metafunc.definition.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs.get("argnames", ())
        if fixture in (names.replace(" ", "").split(",") if isinstance(names, str) else names):
            return True
    return False


def _default_cases(config: pytest.Config) -> list[str]:
    given: list[str] | None = config.getoption("mla_case")
    return given or [case_id.format(seed=config.getoption("mla_seed")) for case_id in HOSTILE]


CHOSEN: pytest.StashKey[list[str]] = pytest.StashKey()


def _suite_cases(config: pytest.Config) -> list[str]:
    """The cases of --mla-suite; those of a geometry are chosen once."""
    source = config.getoption("mla_suite")
    if source is None:
        raise pytest.UsageError("a test takes mla_suite, expected --mla-suite with a folder or a geometry")
    if CHOSEN not in config.stash:
        import os

        from .errors import InputError
        from .suites import command

        try:
            folder = os.path.isdir(source)
            config.stash[CHOSEN] = command.cases_of(source) if folder else command.chosen_for(source)
        except InputError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[CHOSEN]


@pytest.fixture
def mla_suite(request: pytest.FixtureRequest) -> Any:
    """A case (mla_oracle.cases.Case) of the suite."""
    from .files.exchange import load_case

    return load_case(request.param)


@pytest.fixture
def mla_case(request: pytest.FixtureRequest) -> Any:
    """The case (mla_oracle.cases.Case) that the parameter, an id or a file, stands for."""
    from .files.exchange import load_case

    return load_case(request.param)


class Call:
    """A case as the call of a dialect: its arguments by name, and an assertion on what it returned."""

    def __init__(self, oracle: Oracle, case: Any, dialect: str) -> None:
        from dataclasses import replace

        from .dialects import get

        self.oracle, self.dialect = oracle, get(dialect)
        self.arguments = self.dialect.from_case(case)
        self.case = replace(self.dialect.to_case(**self.arguments), id=case.id)

    def expected(self, *, precision: str = "f64") -> dict[str, Any]:
        """What the call returns, by name."""
        return self.dialect.of_case(self.case, self.oracle.expected(self.case, precision=precision))

    def check(self, *, numerics: Any = None, **results: Any) -> Any:
        """Assert that the call's results, by their own names, are right; the verdict."""
        __tracebackhide__ = True
        return self.oracle.check(self.case, numerics=numerics, **self.dialect.read(self.case, results))


class Layer:
    """A layer case: its stages, and an assertion on those that an engine dumped."""

    def __init__(self, path: Any) -> None:
        from .layer import read_layer_case

        self.case = read_layer_case(path)

    def expected(self, *, precision: str = "f64") -> dict[str, Any]:
        """Every stage by name."""
        from .layer import command

        return command.stages(self.case, precision=precision)

    def check(self, *, numerics: Any = None, **stages: Any) -> Any:
        """Assert that the stages, any of them, are within their budgets; the verdict."""
        __tracebackhide__ = True
        from .layer import command

        verdict = command.verdict(self.case, stages, numerics=numerics)
        if not verdict.passed:
            pytest.fail(verdict.reason, pytrace=False)
        return verdict


class Oracle:
    """What the fixture `mla_oracle` gives: expected results, and an assertion on actual ones."""

    def __init__(self, numerics: str | None, rules: str | None) -> None:
        self.numerics, self.rules = numerics, rules

    def expected(self, case: Any, *, precision: str = "f64") -> dict[str, Any]:
        """The results of `case` by name."""
        from .oracle import expected

        return expected(case, precision=precision)

    def call(self, case: Any, dialect: str) -> Call:
        """`case` as an engine calls for it. Raises UnsupportedError where the dialect cannot say it."""
        return Call(self, case, dialect)

    def layer(self, path: Any) -> Layer:
        """The layer case in the file `path`. Raises InputError."""
        return Layer(path)

    def check(self, case: Any, out: Any, lse: Any = None, *, numerics: Any = None, **others: Any) -> Any:
        """Assert that `out` (and `lse`, and other results by name) are right; the verdict.

        `numerics`: what the kernel rounds (numerics.resolve), for the kinds of case that have numerics.
        """
        __tracebackhide__ = True
        from .arrays import as_array
        from .verdict import compare
        from .verdict.rules import in_words

        given = {case.results[0]: out, "lse": lse, **others}
        actual = {name: as_array(name, value) for name, value in given.items() if value is not None}
        if numerics is None and case.kind == "paged":
            numerics = self.numerics
        verdict = compare.check(case, actual, self.expected(case), numerics=numerics, rules=self.rules)
        if not verdict.passed:
            lines = [verdict.reason, *_suspected(case, actual, numerics), *in_words(verdict.rules)]
            if case.id:
                lines.append(f"the case again: mla-oracle case {case.id} -o FILE")
            pytest.fail("\n".join(lines), pytrace=False)
        return verdict


def _suspected(case: Any, actual: dict[str, Any], numerics: Any) -> list[str]:
    """A line that says what was computed instead; none where the results have not the form of any."""
    from .commands import untold
    from .diagnosis import diagnose
    from .errors import InputError, UnsupportedError
    from .verdict.locate import in_row_axes

    main = case.results[0]
    case, actual = in_row_axes(case, actual)
    others = {name: array for name, array in actual.items() if name not in (main, "lse")}
    try:
        found = diagnose(case, actual[main], actual.get("lse"), numerics=numerics, others=others)
    except UnsupportedError as error:
        return [untold(error)]
    except InputError:
        return []
    return [found.summary] if found.facts else []


@pytest.fixture
def mla_oracle(pytestconfig: pytest.Config) -> Oracle:
    """The oracle: `check(case, out, lse)` and `expected(case)`, as the command line says."""
    return Oracle(pytestconfig.getoption("mla_numerics"), pytestconfig.getoption("mla_rules"))
