# SPDX-License-Identifier: Apache-2.0
"""What `mla-oracle check --stages`, `run` and `explain` do with a layer case."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from ..arrays import Array
from ..errors import InputError
from ..files.exchange import read_result, write_result
from .case_file import LayerCase, read_layer_case
from .check import check_stages
from .dump import shape_of
from .meaning import meaning
from .sequences import sequences, together
from .stages import run, stages_of
from .verdict import LayerVerdict

JSON = dict[str, Any]


def check(source: str, dump: str, *, numerics: str | None = None) -> JSON:
    """The verdict on the stages in the file `dump`, in the order of the layer."""
    case = read_layer_case(source)
    return {"case": case.name, **verdict(case, read_result(dump), numerics=numerics).as_json()}


def verdict(case: LayerCase, dump: Mapping[str, object], *, numerics: Any = None) -> LayerVerdict:
    """The verdict on the stages of `dump`, by the conventions of the case."""
    how: JSON = {"angles": case.angles, "numerics": numerics, "store": case.store, **case.how}
    return check_stages(case.config, case.weights, case.inputs, dump, **how)


def stages(case: LayerCase, *, precision: str = "f64", backend: str = "auto") -> dict[str, Array]:
    """Every stage of a layer case; in the mode closed where its angles are any."""
    angles = "closed" if case.angles == "any" else case.angles
    how: JSON = {"precision": precision, "backend": backend, "rope_layout": case.how.get("rope_layout")}
    return run(case.config, case.weights, case.inputs, **case.work | {"angles": angles}, **how)


def compute(source: str, out: str | None, *, precision: str = "f64", backend: str = "auto") -> JSON:
    """Every stage of the layer case `source`, written to `out` if given."""
    from ..commands import describe

    case = read_layer_case(source)
    if out is not None and os.path.exists(out):
        for called, path in case.files:
            if os.path.exists(path) and os.path.samefile(path, out):
                raise InputError(f"the result file {out} is {called}, expected another name")
    start = time.perf_counter()
    computed = stages(case, precision=precision, backend=backend)
    seconds = time.perf_counter() - start
    if out is not None:
        write_result(out, computed, {"case": case.name, "precision": precision})
    return {
        "case": case.name,
        "kind": "layer",
        "precision": precision,
        "seconds": round(seconds, 6),
        "result": None if out is None else str(out),
        "tensors": describe(computed, digest=True),
    }


def explain(source: str) -> JSON:
    """What the layer case `source` is and which stages it has; none is computed."""
    from ..commands import describe

    case = read_layer_case(source)
    sizes = together(sequences(case.config, case.weights, case.inputs, **case.work))
    return {
        "case": case.name,
        "kind": "layer",
        "tensors": describe(case.inputs),
        "weights": describe(dict(case.weights.arrays)),
        "conventions": case.conventions,
        "results": {name: list(shape_of(case.config, sizes, name)) for name in stages_of(case.config)},
        "meaning": meaning(case),
    }
