# SPDX-License-Identifier: Apache-2.0
"""python -m mla_oracle.gpu.check --report FILE [--machine cuda|ptx] [--seconds N] [--parts compile,trials,...]

On a GPU it needs a driver, cuda-bindings and cuda-pathfinder, and an NVRTC of 12.9 or newer wherever cuda-pathfinder
finds one: the wheel nvidia-cuda-nvrtc, which PyTorch for CUDA 13 brings along, or a toolkit. No kernel includes a
header of CUDA's. PyTorch since 2.10 depends on cuda-bindings; without network, where it is missing:

    pip download --only-binary=:all: -d wheelhouse 'cuda-bindings==13.0.*' ml_dtypes safetensors    # elsewhere
    pip install --no-index --find-links wheelhouse cuda-bindings ml_dtypes safetensors
    pip install --no-index --no-deps mla_oracle-*.whl

Exit codes: 0 all good; 1 something differs, or a part failed or ran out of its time; 2 usage; 4 no device, driver or
package. The budget of a part is its share of the time that is left, so that what one saves the next ones have.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from mla_oracle.errors import MissingError
from mla_oracle.gpu.check import supervisor
from mla_oracle.gpu.check.report import Report

# Module of a part, and its share of the time.
PARTS: Mapping[str, tuple[str, float]] = {
    "compile": ("mla_oracle.gpu.check.compilation", 40),
    "trials": ("mla_oracle.gpu.check.trials", 90),
    "instructions": ("mla_oracle.gpu.check.instructions", 50),
    "timing": ("mla_oracle.gpu.check.timing", 110),
    "peers": ("mla_oracle.gpu.check.peers", 50),
    "products": ("mla_oracle.gpu.check.products", 15),
    "barriers": ("mla_oracle.gpu.check.barriers", 15),  # the one that may hang where a machine differs
}
SECONDS = 340
PACKAGES = ("mla-oracle", "numpy", "cuda-bindings", "torch", "triton", "flashinfer-python", "flash-mla")


def main(argv: Sequence[str] | None = None, parts: Mapping[str, tuple[str, float]] = PARTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m mla_oracle.gpu.check", description="Check and time everything.")
    parser.add_argument("--report", required=True, type=Path, metavar="FILE", help="the JSON report")
    parser.add_argument("--machine", choices=("cuda", "ptx"), default="cuda", help="ptx: interpreted, tiny shapes")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="N", help="in all (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(parts), help="default: %(default)s")
    given = parser.parse_args(argv)
    chosen = given.parts.split(",")
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"--parts has {unknown[0]!r}, expected some of {','.join(parts)}")
    if not 0 < given.seconds < math.inf:
        parser.error(f"--seconds is {given.seconds}, expected a positive finite number")
    try:
        about = _about(given.machine)
    except MissingError as error:
        print(f"mla_oracle.gpu.check: {error}", file=sys.stderr)
        return error.exit_code
    try:
        report = Report(given.report, about)
    except OSError as error:
        parser.error(f"--report cannot be written: {error}")

    deadline = monotonic() + given.seconds
    for index, name in enumerate(chosen):
        module, share = parts[name]
        budget = max(deadline - monotonic(), 1) * share / sum(parts[other][1] for other in chosen[index:])
        try:
            supervisor.run(report, name, module, given.machine, budget)
        except KeyboardInterrupt:
            print(f"{name}: interrupted, {given.report} has what was found", file=sys.stderr)
            return 130
        ended = report.parts[name]
        print(f"{name}: {ended['status']} in {ended['seconds']} s {ended['note']}", file=sys.stderr, flush=True)
    print(report.table())
    return 0 if report.good else 1


def _about(machine: str) -> dict[str, Any]:
    """What the report says of the machine. Raises MissingError."""
    from importlib import metadata

    from mla_oracle.gpu import driver, nvrtc

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    about: dict[str, Any] = {
        "machine": machine,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "nvrtc": ".".join(map(str, nvrtc.version())),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return about | (driver.describe() if machine == "cuda" else {"driver": None, "devices": []})


if __name__ == "__main__":
    sys.exit(main())
