# SPDX-License-Identifier: Apache-2.0
"""Classes of the log that have no executable mutant, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Absent:
    family: str
    reason: str
    references: tuple[str, ...]


def _absent(family: str, reason: str, refs: str) -> Absent:
    return Absent(family, reason, tuple(refs.split()))


_RACE = "not a function of the kernel's inputs: run-to-run differences are found by running twice"
ABSENT = (
    _absent(
        "rope pairing → wrong top-k set",
        "the scores of an indexer are no part of an attention case",
        "vllm-project/vllm#28968 sgl-project/sglang#13531",
    ),
    _absent(
        "mask overflow",
        "a sum of two masks is none of an attention case; rows that see nothing: empty.nan",
        "NVIDIA-NeMo/Automodel#2658",
    ),
    _absent(
        "head-count-specific", "the cause is not public; rows not computed: query.tail-heads", "vllm-project/vllm#46952"
    ),
    _absent(
        "port scramble",
        "ten faults at once, all NaN; single permutations: score.tile-transposed, value.fragments",
        "flashinfer-ai/flashinfer#2689",
    ),
    _absent(
        "upstream query", "the query that reached the kernel is not a function of the case", "NVIDIA/TensorRT-LLM#14480"
    ),
    _absent("race", _RACE, "ggml-org/llama.cpp#13438 ROCm/aiter#4420 ROCm/aiter#4350"),
    _absent(
        "race / workspace",
        f"{_RACE}; a merge of some of the states: merge.first-two",
        "flashinfer-ai/flashinfer#3474 flashinfer-ai/flashinfer#4002",
    ),
)
