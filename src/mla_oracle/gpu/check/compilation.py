# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for the machine's own architecture: registers, spills and shared memory of each."""

from __future__ import annotations

import time
from collections.abc import Iterator

from mla_oracle.errors import InputError, UnsupportedError
from mla_oracle.gpu import cache, resources, sources
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Finding

OURS = ("check/bench.cu", "check/instructions.cu", "check/products.cu", "check/barriers.cu")


def findings(bench: Bench) -> Iterator[Finding]:
    """A kernel that spills is told as a difference."""
    arch = bench.machine.arch
    files = [file for file in (*sources.names(), *OURS) if arch in resources.ONLY.get(file, (arch,))]
    for file, variant in [(name, variant) for name in files for variant in resources.variants(name)]:
        began = time.monotonic()
        options = resources.options(file, arch, variant)
        try:
            compiled = cache.compile(sources.flatten(file), arch, name=file, options=options)
        except (InputError, UnsupportedError) as error:
            yield {"name": " ".join((file, *variant, "for", arch)), "ok": False, "reason": str(error)}
            continue
        seconds = round(time.monotonic() - began, 2)
        rows = resources.of(compiled)
        if file in OURS:  # a kernel for every instruction: one line tells enough
            most = {column: max(row[column] for row in rows.values()) for column in resources.COLUMNS}
            rows = {f"{len(rows)} kernels": most}
        for name, row in rows.items():
            spills = row["spill_stores"] + row["spill_loads"]
            yield {
                "name": " ".join((name, *variant, "of", file, "for", arch)),
                "ok": spills == 0,
                **({"reason": f"{spills} bytes of spills"} if spills else {}),
                **row,
                "seconds": seconds,
                "nvrtc": compiled.build,
            }
