# SPDX-License-Identifier: Apache-2.0
"""The kernels as text: one string per .cu file, with our own headers pasted in and NVIDIA's left to NVRTC.

The package data in mla_oracle/cuda is read through importlib.resources: an editable install has no folder of it.
#line directives make every message name the file a line came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

from mla_oracle.errors import InputError

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


def names() -> tuple[str, ...]:
    """The .cu files, sorted."""
    return tuple(sorted(entry.name for entry in (files("mla_oracle") / "cuda").iterdir() if entry.name.endswith(".cu")))


def read(name: str) -> str:
    """The text of cuda/`name`. Raises InputError."""
    try:
        return (files("mla_oracle") / "cuda" / name).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"kernel file is {name!r}, expected one of {', '.join(names())}") from None


def flatten(name: str, read: Callable[[str], str] = read, prefix: str = "cuda/") -> str:
    """The file `name` with every `#include "header"` replaced by that header's text, once each.

    `read(name)` gives the text of a file; messages call it `prefix` + name.
    """
    return "".join(_lines(name, read, prefix, set()))


def _lines(name: str, read: Callable[[str], str], prefix: str, seen: set[str]) -> list[str]:
    seen.add(name)
    lines = [f'#line 1 "{prefix}{name}"\n']
    for number, line in enumerate(read(name).splitlines(), start=1):
        if match := _INCLUDE.match(line):
            if match[1] not in seen:
                lines += _lines(match[1], read, prefix, seen)
            lines.append(f'#line {number + 1} "{prefix}{name}"\n')
        else:
            lines.append("\n" if _ONCE.match(line) else f"{line}\n")
    return lines
