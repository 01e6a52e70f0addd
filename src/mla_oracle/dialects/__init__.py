# SPDX-License-Identifier: Apache-2.0
"""Dialects: how engines spell a case. One adapter for each call, named after its engine.

    dialect = get("flashmla-dense")
    case = dialect.to_case(q=q, k_cache=k_cache, block_table=table, cache_seqlens=lens, head_dim_v=512, causal=True)
    arguments = dialect.from_case(case)            # under the call's own names
    results = dialect.run(**arguments)             # what the call returns

dialect.py says what a dialect is, arguments.py what it declares, same.py when two cases ask the same, spelling.py what
adapters share, folded.py how fp8 scales become those of a call, files.py how calls are kept in files, table.py lists
them. The other files are the adapters, which are to be read as specifications: nothing is computed there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from .dialect import Dialect

_HOMES = {
    "flashmla-dense": "flashmla",
    "flashmla-sparse": "flashmla",
    "flashmla-prefill": "flashmla",
    "flashinfer": "flashinfer",
    "flashinfer-cutlass": "flashinfer",
    "flashinfer-trtllm": "flashinfer_trtllm",
    "flashinfer-trtllm-sparse": "flashinfer_trtllm",
    "flashinfer-cute-dsl": "flashinfer_backends",
    "flashinfer-xqa": "flashinfer_backends",
    "flashinfer-prims-ts": "flashinfer_backends",
    "flashinfer-dsv4": "flashinfer_dsv4",
    "flashinfer-sm120": "flashinfer_sm120",
    "vllm-triton": "vllm",
    "vllm-cpu": "vllm",
    "sglang-triton": "sglang",
    "sglang-cpu": "sglang",
    "sglang-cutlass": "sglang_mla",
    "sglang-cpu-flashmla": "sglang_mla",
    "tensorrt-llm": "tensorrt_llm",
    "tensorrt-llm-fp8": "tensorrt_llm",
    "aiter": "aiter",
    "lmdeploy": "lmdeploy",
    "tvm": "tvm",
    "tokenspeed": "tokenspeed",
    "llama.cpp": "llama_cpp",
    "ik_llama.cpp": "llama_cpp",
    "memra": "memra",
    "vllm.cpp": "vllm_cpp",
}
NAMES = tuple(_HOMES)


def get(name: str) -> Dialect:
    """The dialect `name`, one of NAMES. Raises InputError."""
    home = _HOMES.get(name) if isinstance(name, str) else None
    if home is None:
        raise InputError(f"dialect is {name!r}, expected one of {' '.join(NAMES)}")
    found: Dialect
    for found in import_module(f".{home}", __name__).DIALECTS:
        if found.name == name:
            return found
    raise AssertionError(name)
