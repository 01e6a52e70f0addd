# SPDX-License-Identifier: Apache-2.0
"""Which build of the kernels runs: the best this machine has, or the one MLA_ORACLE_ISA names.

`available()` lists them, worst first; `chosen()` is the one in use; `kernels()` imports the module.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from types import ModuleType

from mla_oracle.errors import InputError, UnsupportedError

VARIABLE = "MLA_ORACLE_ISA"
KNOWN = ("generic", "v2", "v3", "v4", "amx")
_BF16 = 2  # reference._common.Stored


@lru_cache(maxsize=1)
def available() -> tuple[str, ...]:
    """What this machine can run, worst first: v2, v3, v4 (x86-64 levels) and amx, or generic.

    Asks the kernel to let this process use AMX: everything that loads kernels comes through here.
    """
    from mla_oracle.fast import _cpu

    levels = tuple(f"v{level}" for level in _cpu.levels())
    return (*levels, "amx") if levels and _cpu.amx() else levels or ("generic",)


def chosen(isa: str | None = None) -> str:
    """`isa` if given, else MLA_ORACLE_ISA if set, else the best there is.

    Raises InputError for a name that is none, UnsupportedError for one this machine lacks.
    """
    source, name = ("isa", isa) if isa is not None else (VARIABLE, os.environ.get(VARIABLE) or None)
    if name is None:
        return available()[-1]
    if name not in KNOWN:
        raise InputError(f"{source} is {name!r}, expected one of {', '.join(KNOWN)}")
    if name not in available():
        raise UnsupportedError(f"{source} is {name!r}, this machine has {', '.join(available())}")
    return name


@lru_cache(maxsize=32)
def _load(form: str, isa: str, precision: str) -> ModuleType:
    return importlib.import_module(f"mla_oracle.fast._{form}_{isa}_{precision}")


def kernels(form: str, precision: str, isa: str | None = None, kv_dtype: int | None = None) -> ModuleType:
    """The compiled kernels of `form` ("paged") for `precision` ("f32", "f64") and `isa` (see `chosen`).

    amx is for paged decode in f32 of a bf16 cache (`kv_dtype` 2, see `reference._common.Stored`); else it is v4.
    """
    name = chosen(isa)
    if name == "amx" and (form, precision, kv_dtype) != ("paged", "f32", _BF16):
        name = "v4"
    return _load(form, name, precision)
