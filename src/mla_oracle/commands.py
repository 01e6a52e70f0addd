# SPDX-License-Identifier: Apache-2.0
"""What the commands do; the command line and `serve` only parse and print. Each returns one JSON object."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

from .cases import Case
from .errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from .dialects.files import Call

JSON = dict[str, Any]


def make_case(case_id: str, out: str, *, dialect: str | None = None) -> JSON:
    """Generate the case `case_id` into the file `out`: a case, or the call of `dialect` that asks the same."""
    from .cases.inputs import generate
    from .files.exchange import write_case

    case = generate(case_id)
    answer: JSON = {"case": case.name, "kind": case.kind, "file": str(out)}
    if dialect is None:
        write_case(out, case)
        return {**answer, "tensors": describe(case.tensors())}
    from .dialects import files, get

    spoken = get(dialect)
    arguments = files.write_call(out, spoken, case)
    tensors = {name: value for name, value in arguments.items() if spoken.arguments[name].is_tensor}
    values = {name: value for name, value in arguments.items() if name not in tensors}
    return {**answer, "dialect": dialect, "call": spoken.call, "tensors": describe(tensors), "values": _plain(values)}


def dialects() -> JSON:
    """Every dialect: what its call takes and returns."""
    from .dialects import table

    return table.describe()


def dialects_table() -> str:
    """`dialects` as a table of markdown."""
    from .dialects import table

    return table.table()


def _load(source: str, dialect: str | None) -> tuple[Case, Call | None]:
    """The case of a file or an id, and the call it is in a dialect."""
    from .files.exchange import load_case

    if dialect is None:
        return load_case(source), None
    from .dialects.files import load_call

    call = load_call(source, dialect)
    return call.case, call


def _results(call: Call | None, actual: str) -> dict[str, Any]:
    """The results in a file, as the case has them."""
    from .files.exchange import read_result

    return read_result(actual) if call is None else call.results(actual)


def run(
    source: str,
    out: str | None = None,
    *,
    precision: str | None = None,
    backend: str = "auto",
    out_dtype: str | None = None,
    kernel: str | None = None,
    isa: str | None = None,
    threads: int | None = None,
    dialect: str | None = None,
) -> JSON:
    """Compute the expected results of a case (file or id), and write them to `out` if given; in a dialect, as its call
    returns them; of a layer case, every stage.
    """
    from .files.exchange import is_layer_case

    if dialect is None and is_layer_case(source):
        from .layer import command

        for name, value in (("out_dtype", out_dtype), ("kernel", kernel), ("isa", isa), ("threads", threads)):
            if value is not None:
                raise InputError(f"{name} is {value!r}, expected none for a layer case")
        return command.compute(source, out, precision=precision or "f64", backend=backend)
    from .backends import KERNELS
    from .checks import choice
    from .dtypes import STORED, round_to
    from .fast.isa import chosen
    from .files.exchange import write_result
    from .oracle import backend_of, expected, kernel_of

    if out_dtype is not None:
        choice("out_dtype", out_dtype, STORED)
    if precision is None:
        precision = "f32" if backend in KERNELS else "f64"
    case, call = _load(source, dialect)
    if out is not None and os.path.exists(out) and os.path.exists(source) and os.path.samefile(source, out):
        raise InputError(f"the result file {out} is the case file, expected another name")
    start = time.perf_counter()
    results = expected(case, precision=precision, backend=backend, threads=threads, isa=isa, kernel=kernel)
    seconds = time.perf_counter() - start
    used = backend_of(case, backend, isa)
    if out_dtype is not None:
        results = {name: round_to(r, out_dtype) if name.endswith("out") else r for name, r in results.items()}
    if call is not None:
        results = call.dialect.of_case(case, results)
    answer = {
        "case": case.name,
        "kind": case.kind,
        "precision": precision,
        "backend": used,
        "isa": chosen(isa) if used == "fast" else None,
        "kernel": kernel_of(case, used, kernel),
        "seconds": round(seconds, 6),
        "result": None if out is None else str(out),
        "tensors": describe(results, digest=True),
    }
    if out is not None:
        about = {"case": case.name, "precision": precision, "backend": used}
        about |= {} if dialect is None else {"dialect": dialect}
        write_result(out, results, about)
    return answer


def check(
    source: str,
    actual: str,
    *,
    tol: float | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    numerics: str | None = None,
    rules: str | None = None,
    diagnose: bool = False,
    blind: bool = False,
    complete: bool = False,
    stages: bool = False,
    dialect: str | None = None,
) -> JSON:
    """The verdict on the results in the file `actual` against the f64 truth of the case.

    `rules`, `tol`, `atol`, `rtol`: say what they would have said; none decides.
    `diagnose`: say what a failing kernel computed instead; `blind`: say which wrong functions the case cannot tell;
    `complete`: a result that is missing fails; `stages`: the case is a layer case, the results its stages; `dialect`:
    case and results are a call's and what it returned.
    """
    if stages:
        from .layer import command

        given = {"tol": tol, "atol": atol, "rtol": rtol, "rules": rules, "dialect": dialect}
        for name, value in (given | {"diagnose": diagnose, "blind": blind, "complete": complete}).items():
            if value not in (None, False):
                raise InputError(f"{name} is given with stages, expected numerics alone")
        verdict: JSON = _plain(command.check(source, actual, numerics=numerics))
        return verdict
    case, call = _load(source, dialect)
    how: JSON = {"tol": tol, "atol": atol, "rtol": rtol, "numerics": numerics, "rules": rules, "complete": complete}
    return compare_with_truth(case, _results(call, actual), diagnose=diagnose, blind=blind, **how)


def compare_with_truth(
    case: Case, actual: dict[str, Any], *, diagnose: bool = False, blind: bool = False, **how: Any
) -> JSON:
    """The verdict on `actual` against the f64 truth of `case`."""
    from .oracle import expected
    from .verdict import compare
    from .verdict.locate import in_row_axes

    truth = expected(case, precision="f64")
    verdict: JSON = _plain(compare.check(case, actual, truth, **how).as_json())
    numerics = how.get("numerics")
    if diagnose and verdict["verdict"] == "fail":
        try:
            verdict["diagnosis"] = _diagnosis(case, actual, truth, numerics)
        except UnsupportedError as error:
            empty = {"named": False, "facts": [], "classes": [], "tested": 0}
            verdict["diagnosis"] = {"case": case.name, "summary": untold(error), **empty}
    if blind:
        from .diagnosis import discrimination
        from .dtypes import name_of

        case, truth = in_row_axes(case, truth)
        kinds = {name: name_of(array.dtype) for name, array in actual.items()}
        try:
            found = discrimination(case, numerics, kinds=kinds, truth=truth).as_json()
        except UnsupportedError as error:
            found = {"case": case.name, "sentences": [untold(error)]}
        verdict["discrimination"] = found
    return verdict


def untold(error: UnsupportedError) -> str:
    """What stands in the place of a suspicion that this case cannot have."""
    return f"nothing is suspected: {error}"


def diagnose(source: str, actual: str, *, numerics: str | None = None, dialect: str | None = None) -> JSON:
    """What the kernel that wrote the results in the file `actual` computed instead, whatever a verdict would say."""
    from .oracle import expected

    case, call = _load(source, dialect)
    return _diagnosis(case, _results(call, actual), expected(case, precision="f64"), numerics)


def _diagnosis(case: Case, given: JSON, truth: JSON, numerics: str | None) -> JSON:
    from .diagnosis import diagnose
    from .verdict.locate import in_row_axes

    main = case.results[0]
    if main not in given:
        raise InputError(f"the actual results hold no {main}, expected {', '.join(truth)}")
    _, given = in_row_axes(case, given)
    case, truth = in_row_axes(case, truth)
    others = {name: array for name, array in given.items() if name not in (main, "lse")}
    found = diagnose(case, given[main], given.get("lse"), numerics=numerics, truth=truth, others=others)
    answer: JSON = _plain(found.as_json())
    return answer


def explain(
    source: str, *, blind: bool = False, numerics: str | None = None, dialect: str | None = None
) -> JSON:
    """What a case is and how it would be computed; nothing is computed, but for what it is `blind` to.

    Of a layer case: its conventions, and its stages.
    """
    from .files.exchange import is_layer_case

    if dialect is None and is_layer_case(source):
        from .layer import command

        if blind or numerics is not None:
            raise InputError("blind or numerics is given for a layer case, expected neither")
        return command.explain(source)
    from .meaning import meaning, result_shapes
    from .oracle import backend_of, check_shapes

    case, call = _load(source, dialect)
    check_shapes(case)
    answer = {
        "case": case.name,
        "kind": case.kind,
        "tensors": describe(case.tensors()),
        "conventions": _plain(case.conventions()),
        "results": result_shapes(case) if call is None else call.dialect.shapes(case),
        "meaning": meaning(case),
        "backend": backend_of(case),
    }
    if blind:
        from .diagnosis import discrimination

        answer["discrimination"] = _plain(discrimination(case, numerics).as_json())
    return answer


def mutants(source: str | None = None) -> JSON:
    """The catalogue of wrong functions, or what the case in `source` shows of each."""
    from .files.exchange import load_case
    from .mutants import catalogue

    answer: JSON = _plain(catalogue.describe() if source is None else catalogue.shown(load_case(source)))
    return answer


def mutants_table(source: str | None = None) -> str:
    """`mutants` as lines of text."""
    from .files.exchange import load_case
    from .mutants import catalogue

    return catalogue.table(catalogue.describe() if source is None else catalogue.shown(load_case(source)))


def info(*, cuda: bool = False) -> JSON:
    """The installation: versions, file schemas, where the C++ header is; with `cuda`, the driver and its devices."""
    import platform

    import ml_dtypes
    import numpy
    import safetensors

    from . import __version__
    from .backends import BACKENDS
    from .dialects.files import CALL_SCHEMA
    from .fast import isa
    from .files.exchange import CASE_SCHEMA, LAYER_SCHEMA, RESULT_SCHEMA
    from .gpu import installed

    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "numpy": numpy.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "safetensors": safetensors.__version__,
        "backends": list(BACKENDS[1:]),
        "isa": {"used": isa.chosen(), "available": list(isa.available())},
        "cuda": installed.packages() | (installed.machine() if cuda else {}),
        "schemas": [CASE_SCHEMA, RESULT_SCHEMA, CALL_SCHEMA, LAYER_SCHEMA],
        "include_dir": include_dir(),
    }


def include_dir() -> str:
    """The folder of mla_oracle.hpp."""
    from importlib.resources import files

    with_header = files("mla_oracle") / "include" / "mla_oracle.hpp"
    return str(with_header)[: -len("/mla_oracle.hpp")]


def describe(tensors: dict[str, Any], *, digest: bool = False) -> JSON:
    """Dtype and shape of tensors by name, and with `digest` the first half of the SHA-256 of their bytes."""
    from . import dtypes

    described = {}
    for name, tensor in tensors.items():
        described[name] = {"dtype": dtypes.name_of(tensor.dtype), "shape": list(tensor.shape)}
        if digest:
            import hashlib

            described[name]["sha256"] = hashlib.sha256(tensor.tobytes()).hexdigest()[:16]
    return described


def _plain(value: Any) -> Any:
    """`value` for JSON, which lacks infinities and NaN: they become text."""
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value
