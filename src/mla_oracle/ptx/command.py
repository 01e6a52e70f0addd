# SPDX-License-Identifier: Apache-2.0
"""`mla-oracle ptx run`: one kernel of a .cu or .ptx file, launched once on the interpreter.

The answer names the fault, if there is one, the warnings and, with a case whose main result the kernel was given, the
verdict on what it computed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mla_oracle.errors import InputError
from mla_oracle.ptx.convention import arguments, default
from mla_oracle.ptx.faults import Fault
from mla_oracle.ptx.interpreter import Interpreter


def run(
    file: str,
    kernel: str,
    grid: str,
    block: str,
    smem: int = 0,
    case: str | None = None,
    *,
    args: str | None = None,
    arch: str = "sm_90",
    checks: bool = True,
    threads: int | None = None,
    numerics: str | None = None,
) -> dict[str, Any]:
    """Launch `kernel` with the arguments the words of `args` name (convention.py). Raises InputError.

    Returns a JSON object: verdict "pass", "fail" or, where nothing was compared, "clean"; fault, warnings, comparison.
    """
    machine = Interpreter(arch, checks=checks, threads=threads)
    loaded = machine.load(_ptx(Path(file), arch), kernel, file=Path(file).name)
    problem, shapes = None, {}
    if case is not None:
        from mla_oracle.files.exchange import load_case
        from mla_oracle.meaning import result_shapes

        problem = load_case(case)
        shapes = {name: tuple(shape) for name, shape in result_shapes(problem).items()}
    words = args if args is not None else default(problem) if problem else ""
    values, filled = arguments(machine, words.split(), problem, shapes)
    answer: dict[str, Any] = {"file": file, "kernel": kernel, "arch": arch, "case": problem.name if problem else None}
    start, fault = time.perf_counter(), None
    try:
        machine.launch(loaded, shape_of("--grid", grid), shape_of("--block", block), smem, *values)
    except Fault as error:
        fault = str(error)
    answer |= {"seconds": round(time.perf_counter() - start, 6), "fault": fault, "warnings": loaded.warnings}
    if fault is not None or problem is None or problem.results[0] not in filled:
        return {"verdict": "fail" if fault else "clean", **answer, "comparison": None}
    from mla_oracle.commands import compare_with_truth

    actual = {name: machine.download(buffer) for name, buffer in filled.items()}
    comparison = compare_with_truth(problem, actual, numerics=numerics)
    return {"verdict": comparison["verdict"], **answer, "comparison": comparison}


def shape_of(option: str, text: str) -> tuple[int, int, int]:
    """ "X", "X,Y" or "X,Y,Z"."""
    parts = text.split(",")
    numbers = all(part.isascii() and part.strip().isdigit() and int(part) > 0 for part in parts)
    if not 1 <= len(parts) <= 3 or not numbers:
        raise InputError(f"{option} is {text!r}, expected X, X,Y or X,Y,Z, each 1 or more")
    x, y, z = (*map(int, parts), 1, 1)[:3]
    return x, y, z


def _ptx(file: Path, arch: str) -> str:
    """The PTX in `file`, or what NVRTC makes of it; headers of our own lie beside it."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if file.suffix == ".ptx":
        return text
    from mla_oracle.gpu import cache, sources

    def read(name: str) -> str:
        try:
            return file.with_name(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file.with_name(name)} cannot be read: {error}") from None

    return cache.compile(sources.flatten(file.name, read, ""), arch, name=file.name).ptx
