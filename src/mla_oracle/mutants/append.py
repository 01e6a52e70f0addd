# SPDX-License-Identifier: Apache-2.0
"""Wrong writers: where and what of the new rows an append case's cache gets. The log's class "writer corruption"."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from ..cases import AppendCase
from .mutant import Mutant

FAMILY = "writer corruption"


def write(
    case: AppendCase, slots: Array, c_kv: Array | None = None, k_pe: Array | None = None, *, swap: bool = False
) -> Array:
    """The cache with row i at slots[i]; -1 and what lies outside are not written."""
    cache = case.kv_cache.copy()
    flat = cache.reshape(-1, cache.shape[-1])
    parts = [case.c_kv if c_kv is None else c_kv, case.k_pe if k_pe is None else k_pe]
    rows = np.concatenate(parts[::-1] if swap else parts, -1)
    for i, slot in enumerate(slots):
        if 0 <= slot < len(flat):
            flat[slot] = rows[i]
    return cache


def _shape(case: AppendCase) -> tuple[int, int]:
    return case.kv_cache.shape[0], case.kv_cache.shape[1]


def _page_slot_swapped(case: AppendCase) -> Array:
    pages, block = _shape(case)
    slots = case.slot_mapping
    page, slot = slots // block, slots % block
    return np.where(slots < 0, -1, slot * pages + page)


def _kept_slots(slots: Array) -> Array:
    """The slot before where there is none."""
    at = np.maximum.accumulate(np.where(slots < 0, -1, np.arange(len(slots))))
    return np.where(at < 0, -1, slots[at])


def _kept(case: AppendCase, columns: slice) -> Array:
    """The rows written, but for these columns of the cache, which stay."""
    cache = write(case, case.slot_mapping)
    cache[..., columns] = case.kv_cache[..., columns]
    return cache


def _mutant(name: str, formula: str, act: Callable[[AppendCase], Array], refs: str = "") -> Mutant:
    return Mutant(name=f"append.{name}", family=FAMILY, formula=formula, references=tuple(refs.split()), write=act)


MUTANTS = (
    _mutant(
        "skipped-to-slot-0",
        "slot -1 written to slot 0",
        lambda c: write(c, np.maximum(c.slot_mapping, 0)),
        "sgl-project/sglang#36207",
    ),
    _mutant(
        "skipped-to-last-slot",
        "slot -1 written to the last slot of the cache",
        lambda c: write(c, np.where(c.slot_mapping < 0, c.kv_cache.shape[0] * c.kv_cache.shape[1] - 1, c.slot_mapping)),
    ),
    _mutant(
        "padding-written",
        "slots of padding rows keep those of the rows before",
        lambda c: write(c, _kept_slots(c.slot_mapping)),
        "vllm-project/vllm-ascend#3482",
    ),
    _mutant("next-slot", "row i at slot + 1", lambda c: write(c, np.where(c.slot_mapping < 0, -1, c.slot_mapping + 1))),
    _mutant(
        "first-slots", "row i at slot i: the mapping is not read", lambda c: write(c, np.arange(len(c.slot_mapping)))
    ),
    _mutant("page-slot-swapped", "page and slot within it exchanged", lambda c: write(c, _page_slot_swapped(c))),
    _mutant("last-lost", "the last row is not written", lambda c: write(c, c.slot_mapping[:-1])),
    _mutant("nothing", "no row is written", lambda c: c.kv_cache.copy(), "EfficientMoE/MoE-Infinity#195"),
    _mutant(
        "next-row",
        "slot i gets row i + 1",
        lambda c: write(c, c.slot_mapping, np.roll(c.c_kv, -1, 0), np.roll(c.k_pe, -1, 0)),
    ),
    _mutant(
        "row-before",
        "slot i gets row i - 1",
        lambda c: write(c, c.slot_mapping, np.roll(c.c_kv, 1, 0), np.roll(c.k_pe, 1, 0)),
    ),
    _mutant(
        "rope-first",
        "[k_pe | c_kv] in the place of [c_kv | k_pe]",
        lambda c: write(c, c.slot_mapping, swap=True),
        "ggml-org/llama.cpp#18986",
    ),
    _mutant("rope-lost", "k_pe is not written", lambda c: _kept(c, slice(c.c_kv.shape[1], None))),
    _mutant("latent-lost", "c_kv is not written", lambda c: _kept(c, slice(0, c.c_kv.shape[1]))),
    _mutant(
        "rope-of-row-0",
        "k_pe of row 0 for every row",
        lambda c: write(c, c.slot_mapping, k_pe=np.broadcast_to(c.k_pe[:1], c.k_pe.shape)),
    ),
)
