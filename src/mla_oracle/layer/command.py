# SPDX-License-Identifier: Apache-2.0
"""What `mla-oracle check --stages` and `mla-oracle run` do with a layer case."""

from __future__ import annotations

import os
import time
from typing import Any

from ..errors import InputError
from ..exchange import read_result, write_result
from .case_file import read_layer_case
from .check import check_stages
from .stages import run

JSON = dict[str, Any]


def check(source: str, dump: str, *, numerics: str | None = None) -> JSON:
    """The verdict on the stages in the file `dump`, in the order of the layer."""
    case = read_layer_case(source)
    how: JSON = {"angles": case.angles, "numerics": numerics, **case.how}
    verdict = check_stages(case.config, case.weights, case.inputs, read_result(dump), **how)
    return {"case": case.name, **verdict.as_json()}


def compute(source: str, out: str | None, *, precision: str = "f64", backend: str = "auto") -> JSON:
    """Every stage of the layer case `source`, written to `out` if given."""
    from ..commands import describe

    case = read_layer_case(source)
    if out is not None and os.path.exists(out) and os.path.samefile(source, out):
        raise InputError(f"the result file {out} is the case file, expected another name")
    start = time.perf_counter()
    angles = "closed" if case.angles == "any" else case.angles
    how: JSON = {"precision": precision, "backend": backend, "rope_layout": case.how.get("rope_layout")}
    stages = run(case.config, case.weights, case.inputs, angles=angles, **how)
    seconds = time.perf_counter() - start
    if out is not None:
        write_result(out, stages, {"case": case.name, "precision": precision})
    return {
        "case": case.name,
        "kind": "layer",
        "precision": precision,
        "seconds": round(seconds, 6),
        "result": None if out is None else str(out),
        "tensors": describe(stages, digest=True),
    }
