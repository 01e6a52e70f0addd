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
    "generate": "inputs",
    "expected": "oracle",
    "check": "compare",
    "Verdict": "compare",
    "Numerics": "numerics",
    "load_case": "exchange",
    "read_case": "exchange",
    "read_result": "exchange",
    "write_case": "exchange",
    "write_result": "exchange",
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
    from .compare import Verdict as Verdict
    from .compare import check as check
    from .dense import absorb_query as absorb_query
    from .dense import attend_absorbed as attend_absorbed
    from .dense import attend_naive as attend_naive
    from .dense import up_project as up_project
    from .errors import InputError as InputError
    from .errors import MissingError as MissingError
    from .errors import OracleError as OracleError
    from .errors import UnsupportedError as UnsupportedError
    from .exchange import load_case as load_case
    from .exchange import read_case as read_case
    from .exchange import read_result as read_result
    from .exchange import write_case as write_case
    from .exchange import write_result as write_result
    from .geometry import Geometry as Geometry
    from .geometry import Yarn as Yarn
    from .inputs import generate as generate
    from .numerics import Numerics as Numerics
    from .oracle import expected as expected
    from .paged import Attention as Attention
    from .paged import decode_paged as decode_paged
    from .rope import rope_interleaved as rope_interleaved
    from .rope import rope_neox as rope_neox
    from .states import merge_states as merge_states


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
