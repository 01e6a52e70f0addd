# SPDX-License-Identifier: Apache-2.0
"""Right pages at wrong bytes: strides not used, offsets that wrap at 32 bits.

A case with page_ids, num_blocks and block_stride lies where a 32-bit offset does not reach; pages that are not stored
are zeros there. A signed offset that wraps below 0 leaves the cache: unknown, NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Maker, Mutant
from .needs import Need, one_key, paged, two_keys
from .plan import Plan, table_entry
from .problem import Problem

WRAP, STRIDE = "32-bit offset wrap", "stride ignored"
gap = Need(
    "pages farther apart than their rows need, and a page id above 0",
    lambda p: p.memory.stride > p.memory.page_bytes and bool(np.any(ids(p) > 0)),
)
page_above_0 = Need("a page id above 0", lambda p: bool(np.any(ids(p) > 0)))


def ids(problem: Problem) -> Array:
    """The page ids in use."""
    used = [problem.table[b, : problem.used(b)] for b in range(problem.B)]
    return np.concatenate(used) if used else np.zeros(0, np.int64)


def bases(of: Callable[[Problem, Array], Array]) -> Callable[[Problem, Plan], Plan]:
    """Page id -> the byte its first row starts at."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        def address(own: Plan, j: Array) -> Array:
            start = table_entry(own, j // own.block, lambda page: of(problem, page))
            row: Array = start + j % own.block * own.row_stride
            return row

        return replace(plan, address=address)

    return edit


def wrap(offset: Array, bits: int, signed: bool) -> Array:
    """`offset` as an integer of so many bits."""
    low = offset & ((1 << bits) - 1)
    return np.where(low >= 1 << (bits - 1), low - (1 << bits), low) if signed else low


def offset_wrap(unit: str, signed: bool) -> Mutant:
    """page id x stride, in elements or bytes, in 32 bits."""

    def of(problem: Problem, page: Array) -> Array:
        step = problem.memory.item if unit == "elements" else 1
        return wrap(page * (problem.memory.stride // step), 32, signed) * step

    word = "int32" if signed else "uint32"
    return _mutant(
        f"wrap.{word}-{unit}",
        WRAP,
        f"offset <- {word}(page stride in {unit})",
        _reaches(of),
        edit=bases(of),
        refs="flashinfer-ai/flashinfer#3130 flashinfer-ai/flashinfer#3136"
        " flashinfer-ai/flashinfer#3219 vllm-project/vllm#47671 ROCm/aiter#4452 local-inference-lab/b12x#45",
        unit=unit,
        word=word,
    )


def _reaches(of: Callable[[Problem, Array], Array]) -> Need:
    return Need(
        "a page whose offset does not fit",
        lambda p: p.paged and bool(np.any(of(p, ids(p)) != ids(p) * p.memory.stride)),
    )


def id_wrap(word: str, act: Callable[[Array], Array]) -> Mutant:
    """The page id itself in a narrower type."""

    def of(problem: Problem, page: Array) -> Array:
        return act(page) * problem.memory.stride

    return _mutant(f"wrap.id-{word}", WRAP, f"page <- {word}(page)", _reaches(of), edit=bases(of), word=word)


def _whole_wrap(problem: Problem, plan: Plan) -> Plan:
    """The whole byte offset of a row in uint32."""
    address = plan.address
    return replace(plan, address=lambda own, j: np.where((at := address(own, j)) < 0, at, wrap(at, 32, False)))


def row_stride(name: str, formula: str, elements: Callable[[Problem], int], *needs: Need, pages: bool) -> Mutant:
    """Rows of so many elements; with `pages`, pages of P such rows."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        step = elements(problem) * problem.memory.item
        return replace(plan, row_stride=step, page_stride=step * plan.block if pages else plan.page_stride)

    return _mutant(f"stride.{name}", STRIDE, formula, two_keys, *needs, edit=edit)


_mutant = Maker(conditions=(paged, one_key))


narrow = Need("a value narrower than the row", lambda p: p.V < p.D)
unpadded = Need("rows of no multiple of 128 elements", lambda p: p.D % 128 != 0)
MUTANTS = (
    _mutant(
        "stride.pages",
        STRIDE,
        "page at id P row bytes, the block's stride not used",
        gap,
        edit=lambda problem, plan: replace(plan, page_stride=problem.memory.page_bytes),
        refs="ROCm/aiter#3498 vllm-project/vllm#47493 flashinfer-ai/flashinfer#3856",
    ),
    _mutant(
        "stride.pages-doubled",
        STRIDE,
        "page at 2 id P row bytes, K and V taken for interleaved",
        page_above_0,
        edit=lambda problem, plan: replace(plan, page_stride=2 * problem.memory.page_bytes),
    ),
    _mutant(
        "stride.value-width-of-pages",
        STRIDE,
        "page at id P V elements, rows within it where they are",
        narrow,
        page_above_0,
        edit=lambda problem, plan: replace(plan, page_stride=plan.block * problem.V * problem.memory.item),
    ),
    row_stride("value-width", "rows V elements apart, pages too", lambda p: p.V, narrow, pages=True),
    row_stride(
        "value-width-in-page",
        "rows V elements apart within right pages",
        lambda p: p.V,
        narrow,
        Need("pages of two rows or more", lambda p: p.block >= 2),
        pages=False,
    ),
    row_stride(
        "padded-rows",
        "rows padded to a multiple of 128 elements, pages too",
        lambda p: -(-p.D // 128) * 128,
        unpadded,
        pages=True,
    ),
    offset_wrap("elements", False),
    offset_wrap("elements", True),
    offset_wrap("bytes", False),
    offset_wrap("bytes", True),
    _mutant(
        "wrap.uint32-whole",
        WRAP,
        "offset <- uint32(page stride + slot row bytes)",
        Need("a page whose offset does not fit", lambda p: bool(np.any(ids(p) * p.memory.stride >= 1 << 32))),
        edit=_whole_wrap,
        refs="ROCm/aiter#4452",
    ),
    id_wrap("int16", lambda page: wrap(page, 16, True)),
    id_wrap("uint16", lambda page: wrap(page, 16, False)),
    id_wrap("float32", lambda page: page.astype(np.float32).astype(np.int64)),
)
