# SPDX-License-Identifier: Apache-2.0
"""An oracle for MLA (multi-head latent attention) decode kernels: is the kernel right, and if not, what did it compute?

The names below are loaded on first use: importing the package costs almost nothing.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Attention": "paged",
    "absorb_query": "dense",
    "append_kv": "append",
    "attend_absorbed": "dense",
    "attend_naive": "dense",
    "decode": "canonical",
    "decode_paged": "paged",
    "merge_states": "states",
    "up_project": "dense",
    "rope_interleaved": "rope",
    "rope_neox": "rope",
    "Geometry": "geometry",
    "Yarn": "geometry",
    "Case": "cases",
    "generate": "cases.inputs",
    "expected": "oracle",
    "check": "verdict.compare",
    "Verdict": "verdict.compare",
    "Numerics": "verdict.numerics",
    "load_case": "files.exchange",
    "read_case": "files.exchange",
    "read_result": "files.exchange",
    "write_case": "files.exchange",
    "write_result": "files.exchange",
    "InputError": "errors",
    "MissingError": "errors",
    "OracleError": "errors",
    "UnsupportedError": "errors",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from .append import append_kv as append_kv
    from .canonical import decode as decode
    from .cases import Case as Case
    from .cases.inputs import generate as generate
    from .dense import absorb_query as absorb_query
    from .dense import attend_absorbed as attend_absorbed
    from .dense import attend_naive as attend_naive
    from .dense import up_project as up_project
    from .errors import InputError as InputError
    from .errors import MissingError as MissingError
    from .errors import OracleError as OracleError
    from .errors import UnsupportedError as UnsupportedError
    from .files.exchange import load_case as load_case
    from .files.exchange import read_case as read_case
    from .files.exchange import read_result as read_result
    from .files.exchange import write_case as write_case
    from .files.exchange import write_result as write_result
    from .geometry import Geometry as Geometry
    from .geometry import Yarn as Yarn
    from .oracle import expected as expected
    from .paged import Attention as Attention
    from .paged import decode_paged as decode_paged
    from .rope import rope_interleaved as rope_interleaved
    from .rope import rope_neox as rope_neox
    from .states import merge_states as merge_states
    from .verdict.compare import Verdict as Verdict
    from .verdict.compare import check as check
    from .verdict.numerics import Numerics as Numerics


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
