# SPDX-License-Identifier: Apache-2.0
"""What known kernels round: presets of Numerics, by name.

    resolve("flashmla", case, results)

A field that a preset does not name is inferred from the case (numerics.infer): a cache of bf16 means weights of bf16.
To add a kernel, name the file in which the roundings can be read.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """The fields of Numerics that a kernel fixes, and where they can be read."""

    source: str
    rounds: dict[str, Any]


F32_LOOPS = {
    "query": "f32", "cache": "f32", "score_accumulator": "f32", "p": "f32", "p_base": "max", "row_sum": "f32",
    "value_accumulator": "f32", "exp": "exp",
}

KERNELS = {
    "flashmla": Kernel(
        "FlashMLA csrc/kernels/sm90/decode/dense/splitkv_mla.cuh: exp2f, weights summed in f32 before they are rounded "
        "to the input's dtype, f32 partial outputs",
        {"p_base": "max", "row_sum": "f32", "exp": "exp2", "partials": "f32", "tile": 64},
    ),
}
