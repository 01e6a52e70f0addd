# SPDX-License-Identifier: Apache-2.0
"""What `mla-oracle suite` and `mla-oracle suite run` do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..cases import Case
from ..errors import InputError, UnsupportedError
from .choose import Suite, choose
from .engines import Command
from .extended import extended, names_of
from .junit import junit
from .outcome import Outcome, Report
from .page import page
from .probes import KINDS, probes
from .run import run_suite
from .workers import workers

JSON = dict[str, Any]
Say = Callable[[str], None]
INDEX = "suite.json"


def sizes_of(geometry: str, dtype: str) -> str:
    """The sizes of ids: of a preset's name, or heads=...,row=...,value=...,scale=... as they stand."""
    return f"{geometry if '=' in geometry else f'geometry={geometry}'},dtype={dtype}"


def make_suite(
    geometry: str,
    *,
    dtype: str = "bf16",
    block: int = 64,
    max_tokens: int = 4200,
    kinds: str = "paged",
    beyond: str | None = None,
    numerics: str | None = None,
    out: str | None = None,
    say: Say = lambda line: None,
) -> JSON:
    """Choose a suite, and write its cases and suite.json into the folder `out`, if given.

    `beyond`: names of extended.SETS joined by +; the cases are of these in the place of the plain ones.
    """
    from ..cases.inputs import generate
    from ..files.exchange import write_case
    from ..mutants import bank
    from ..mutants.lists import of_lists

    wanted = tuple(kinds.split("+"))
    for kind in wanted:
        if kind not in KINDS:
            raise InputError(f"kinds has {kind!r}, expected {', '.join(KINDS)} joined by +")
    if max_tokens < 8 or block < 1:
        raise InputError(f"max-tokens is {max_tokens} and block {block}, expected 8 or more and 1 or more")
    if out is not None and os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise InputError(f"{out} exists, expected a new folder or an empty one")
    if beyond is None:
        ids = probes(sizes_of(geometry, dtype), block=block, max_tokens=max_tokens, kinds=wanted)
    else:
        ids = extended(sizes_of(geometry, dtype), names_of(beyond), block=block)
    if not ids:
        raise InputError(f"there are no {kinds} cases of {geometry!r}, expected a geometry that has a name")
    asked = None if beyond is None else tuple(mutant for mutant in bank() if of_lists(mutant.name))
    suite = choose(ids, numerics, mutants=asked, progress=say)
    answer: JSON = {"geometry": geometry, **({} if beyond is None else {"with": beyond}), **suite.as_json()}
    say(coverage(suite))
    if out is not None:
        os.makedirs(out, exist_ok=True)
        for i, case_id in enumerate(suite.cases):
            answer["cases"][i]["file"] = name = f"{i:02}-{case_id.partition(':')[0]}.safetensors"
            write_case(os.path.join(out, name), generate(case_id))
        with open(os.path.join(out, INDEX), "w", encoding="utf-8") as file:
            json.dump(answer, file, indent=1)
        answer["folder"] = out
    return answer


def chosen_for(geometry: str) -> list[str]:
    """The ids of the suite that `make_suite` chooses with its defaults. Raises InputError."""
    return [str(entry["case"]) for entry in make_suite(geometry)["cases"]]


def coverage(suite: Suite) -> str:
    answer = suite.as_json()
    said = f"{len(suite.cases)} of {suite.candidates} cases see {answer['seen']} of {answer['applicable']} mutants"
    alike = f", {len(suite.alike)} groups of different classes stay alike" if suite.alike else ""
    return f"{said} that apply{alike}; {len(suite.never)} need what no case has"


def cases_of(source: str) -> list[str]:
    """Case files of a folder with suite.json or of safetensors files; a file or an id as it is. Raises InputError."""
    if not os.path.isdir(source):
        return [source]
    index = os.path.join(source, INDEX)
    if os.path.exists(index):
        try:
            with open(index, encoding="utf-8") as file:
                return [os.path.join(source, str(entry["file"])) for entry in json.load(file)["cases"]]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{index} cannot be read, expected what mla-oracle suite wrote") from None
    found = sorted(name for name in os.listdir(source) if name.endswith(".safetensors"))
    if not found:
        raise InputError(f"{source} holds no case, expected suite.json or case files")
    return [os.path.join(source, name) for name in found]


def _json(report: Report) -> str:
    return json.dumps(report.as_json(), indent=1, allow_nan=False) + "\n"


FORMS: dict[str, Callable[[Report], str]] = {"junit": junit, "html": page, "json": _json}


def write_text(path: str, text: str) -> None:
    """Write a file whole or not at all, but a device or a pipe as it is. Raises InputError."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return
        target = os.path.realpath(path)
        temporary = os.path.join(os.path.dirname(target), f".mla-oracle-{os.urandom(8).hex()}")
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, target)
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def run_command(
    sources: Sequence[str],
    line: str,
    *,
    jobs: int = 1,
    timeout: float | None = 300.0,
    numerics: str | None = None,
    files: dict[str, str | None] | None = None,
    dialect: str | None = None,
    say: Say = lambda line: None,
) -> tuple[Report, JSON]:
    """Run the command `line` over the cases; say the table, write junit, json and html files where they are named.

    With a `dialect`, over those that its call can say; the others are left out, and said.
    """
    if jobs < 1:
        raise InputError(f"jobs is {jobs}, expected 1 or more")
    if timeout is not None and not timeout > 0:
        raise InputError(f"timeout is {timeout}, expected a number of seconds above 0")
    engine = Command(line, timeout, dialect)
    wanted = {name: path for name, path in (files or {}).items() if path is not None}
    for path in wanted.values():
        folder = os.path.dirname(os.path.realpath(path))
        if os.path.isdir(path) or not os.path.isdir(folder):
            raise InputError(f"{path} cannot be written, expected the name of a file in a folder that exists")
    cases: list[Case | str] = [case for source in sources for case in cases_of(source)]
    left_out: list[JSON] = []
    if dialect is not None:
        cases, left_out = _spoken([str(case) for case in cases], dialect, say)

    def progress(outcome: Outcome, done: int, total: int) -> None:
        suspected = f", {outcome.suspected}" if outcome.suspected else ""
        say(f"[{done}/{total}] {outcome.verdict}: {outcome.case}{suspected}")

    with workers(jobs) as pool:
        report = run_suite(cases, engine, pool, numerics=numerics, progress=progress)
    for text in report.table().splitlines():
        say(text)
    unwritten = []
    for name, path in wanted.items():
        try:
            write_text(path, FORMS[name](report))
        except InputError as error:
            unwritten.append(error)
    if unwritten:
        raise unwritten[0]
    return report, report.as_json() | ({} if dialect is None else {"dialect": dialect, "left_out": left_out})


def _spoken(cases: list[str], dialect: str, say: Say) -> tuple[list[Case | str], list[JSON]]:
    """The cases of the calls that say `cases`, and which there is none for."""
    from ..dialects.files import load_call

    spoken: list[Case | str] = []
    left_out: list[JSON] = []
    for case in cases:
        try:
            spoken.append(load_call(case, dialect).case)
        except UnsupportedError as error:
            left_out.append({"case": case, "reason": str(error)})
            say(f"left out: {case}: {error}")
    if not spoken:
        raise UnsupportedError(f"none of {len(cases)} cases can be said in dialect {dialect!r}")
    return spoken, left_out
