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


_TOPK = "no case has top-k indices yet"
_QUANTISED = "no case has a quantised cache with scales yet"
_SINK = "no case has sinks yet"
_RACE = "not a function of the kernel's inputs: run-to-run differences are found by running twice"
ABSENT = (
    _absent("rope pairing → wrong top-k set", _TOPK, "vllm-project/vllm#28968 sgl-project/sglang#13531"),
    _absent("-1 treated as valid", _TOPK, "vllm-project/vllm#45324"),
    _absent("-1 gather", _TOPK, "radixark/miles#2079"),
    _absent("lane prefix", _TOPK, "vllm-project/vllm#55692"),
    _absent("OOB index", _TOPK, "deepseek-ai/FlashMLA#184"),
    _absent("lanes beyond length", _TOPK, "vllm-project/vllm#36616 flashinfer-ai/flashinfer#5095"),
    _absent("empty list", _TOPK, "vllm-project/vllm#52512"),
    _absent("top-k set", _TOPK, "sgl-project/sglang#36807 vllm-project/vllm#51782 vllm-project/vllm#55314"),
    _absent("dense instead of sparse", _TOPK, "vllm-project/vllm-gaudi#1777"),
    _absent("-1 treated as zero key", _TOPK, "hw-native-sys/pypto-lib#1014"),
    _absent("duplicates", "concerns the backward pass; the forward result is exact", "NVIDIA/cudnn-frontend#385"),
    _absent("sink multiplicity", _SINK, "ROCm/rocm-libraries#12227 vllm-project/vllm#54568"),
    _absent("sink range", _SINK, "flashinfer-ai/flashinfer#5119"),
    _absent(
        "scale misuse",
        f"{_QUANTISED}; with constant scales it is value.factor and value.row-factor",
        "vllm-project/vllm#37054",
    ),
    _absent("scale rounded to 2^k", _QUANTISED, "deepseek-ai/FlashMLA#184 vllm-project/vllm#54563"),
    _absent("record layout", _QUANTISED, "vllm-project/vllm#48611"),
    _absent("mask scaled", "no case has an additive mask", "tenstorrent/tt-metal#55333 tenstorrent/tt-metal#43239"),
    _absent(
        "mask overflow", "no case has an additive mask; rows that see nothing: empty.nan", "NVIDIA-NeMo/Automodel#2658"
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
