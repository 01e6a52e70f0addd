# SPDX-License-Identifier: Apache-2.0
"""What each kernel takes of each architecture, read from the compiler's own report; no driver and no GPU is needed.

    python -m mla_oracle.gpu.resources > tests/gpu/resources.json

rewrites the committed table, which holds for the one NVRTC it names: another one allots registers differently.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from mla_oracle.errors import OracleError
from mla_oracle.gpu import cache, paged_mma, sources
from mla_oracle.gpu.arguments import dynamic_smem, signatures
from mla_oracle.gpu.nvrtc import Compiled

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
LARGEST = 576  # numbers of a row in paged_mma.cu, where nothing is said
# The architectures of files that are not for all.
ONLY = dict.fromkeys(("paged_wgmma.cu", "check/products.cu", "check/barriers.cu"), ("sm_90a",))

COLUMNS = ("registers", "stack", "spill_stores", "spill_loads", "static_smem", "dynamic_smem")

_FUNCTION = re.compile(
    r"Function properties for (\w+)\n"
    r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*?Used (\d+) registers(.*)"
)

Row = dict[str, int]


def of(compiled: Compiled) -> dict[str, Row]:
    """The columns of each kernel in `compiled`, in bytes and registers a thread.

    Dynamic shared memory is the most that a launch may ask for, as the kernel declares it (DYNAMIC_SMEM).
    """
    declared = dynamic_smem(compiled.ptx)
    rows = {}
    for name, stack, stores, loads, registers, rest in _FUNCTION.findall(compiled.log):
        smem = re.search(r"(\d+) bytes smem", rest)
        values = (registers, stack, stores, loads, smem[1] if smem else 0, declared.get(name, 0))
        rows[name] = dict(zip(COLUMNS, map(int, values), strict=True))
    kernels = signatures(compiled.ptx)
    if missing := set(kernels) - set(rows):
        raise ValueError(f"the compiler's log says nothing of {', '.join(sorted(missing))}:\n{compiled.log}")
    return {name: rows[name] for name in kernels}


def table() -> dict[str, Any]:
    """{"nvrtc": build, "kernels": {file: {kernel: {arch: row}}}} of every kernel and every arch."""
    kernels: dict[str, dict[str, dict[str, Row]]] = {}
    build = ""
    for file in sources.names():
        for variant in variants(file):
            for arch in ONLY.get(file, ARCHS):
                wanted = options(file, arch, variant)
                compiled = cache.compile(sources.flatten(file), arch, name=file, options=wanted)
                build = compiled.build
                for name, row in of(compiled).items():
                    kernels.setdefault(file, {}).setdefault(" ".join((name, *variant)), {})[arch] = row
    return {"nvrtc": build, "kernels": kernels}


def options(file: str, arch: str, variant: tuple[str, ...]) -> list[str]:
    """What `file` is compiled with for a row of the table: the macros of the largest problem, and its variant's."""
    if file != "paged_mma.cu":
        return []
    packed = next((int(macro.removeprefix("PACKED=")) for macro in variant if macro.startswith("PACKED=")), 0)
    tile = paged_mma.tile(LARGEST, arch, packed)
    assert tile is not None
    return [f"-D{macro}" for macro in (f"ROWS={tile[0]}", f"KEYS={tile[1]}", *variant)]


def variants(file: str) -> list[tuple[str, ...]]:
    """The macros that make other kernels of `file`, besides its sizes: the plain ones first."""
    if file != "paged_mma.cu":
        return [()]
    packed = [(f"PACKED={code}",) for code in (0, *paged_mma.PACKED.values())]
    return [(), *((*one, "LISTED=1") for one in packed), *packed[1:]]


def text(table: dict[str, Any]) -> str:
    """The table as JSON, a line for each kernel and arch, so that a change reads as what it is."""
    lines = [f'{{"nvrtc": {json.dumps(table["nvrtc"])}, "kernels": {{']
    files = table["kernels"]
    for file, kernels in files.items():
        lines.append(f"{json.dumps(file)}: {{")
        for name, archs in kernels.items():
            lines.append(f" {json.dumps(name)}: {{")
            lines += [f"  {json.dumps(arch)}: {json.dumps(row)}{_comma(arch, archs)}" for arch, row in archs.items()]
            lines.append(f" }}{_comma(name, kernels)}")
        lines.append(f"}}{_comma(file, files)}")
    return "\n".join([*lines, "}}", ""])


def _comma(key: str, of: dict[str, Any]) -> str:
    return "" if key == next(reversed(of)) else ","


if __name__ == "__main__":
    try:
        sys.stdout.write(text(table()))
    except OracleError as error:
        print(f"mla_oracle.gpu.resources: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
