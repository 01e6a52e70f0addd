# SPDX-License-Identifier: Apache-2.0
"""Wrong columns of the output: not computed, in another order, times a constant. The lse is exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Array
from .mutant import Maker, Mutant
from .needs import Need, one_key
from .permutations import hadamard, transposed_tiles
from .plan import Plan
from .problem import Problem, Results

tile = Need("values of 64 elements or more", lambda p: p.V >= 64)


power_of_two = Need("values of a power of two elements", lambda p: p.paged and p.V & (p.V - 1) == 0 and p.V > 1)


narrower_value = Need("a value narrower than the row", lambda p: p.paged and p.V < p.D)


eight_heads = Need("8 heads and values of 8 elements", lambda p: p.H >= 8 and p.V >= 8)


two_columns = Need("values of two elements", lambda p: p.V >= 2)


def out(act: Callable[[Problem, Array], Array]) -> Callable[[Problem, Results], Results]:
    """The output [B, T, H, V] changed, the lse not."""
    return lambda problem, results: {**results, "out": act(problem, results["out"])}


def _row_stride(problem: Problem, x: Array) -> Array:
    """Rows of V elements stored D apart in a buffer of zeros that has them V apart; what is past it is lost."""
    rows = x.reshape(-1, x.shape[-1])
    flat = np.zeros(x.size)
    for r, row in enumerate(rows):
        at = r * problem.D
        flat[at : at + len(row)] = row[: max(len(flat) - at, 0)]
    return flat.reshape(x.shape)


def factor(value: float) -> Mutant:
    return _mutant(
        f"factor-{value:g}",
        "missing V descale",
        f"o <- {value:g} o",
        one_key,
        finish=out(lambda _, x: x * value),
        factor=value,
        refs="sgl-project/sglang#34765 vllm-project/vllm#37054 vllm-project/vllm#36297",
    )


def row_factor(value: float) -> Mutant:
    """Rows stored times a constant: temperature and output factor at once."""

    def edit(problem: Problem, plan: Plan) -> Plan:
        return replace(plan, scale=plan.scale * value)

    return _mutant(
        f"row-factor-{value:g}",
        "inverted scale",
        f"row <- {value:g} row: s <- {value:g} s, o <- {value:g} o",
        one_key,
        edit=edit,
        finish=out(lambda _, x: x * value),
        factor=value,
        refs="vllm-project/vllm-xpu-kernels#475 vllm-project/vllm#37054",
    )


def _fragments(problem: Problem, x: Array) -> Array:
    """Every whole 8 heads x 8 columns stored transposed."""
    B, T, H, V = x.shape
    h, v = H // 8 * 8, V // 8 * 8
    blocks = x[:, :, :h, :v].reshape(B, T, h // 8, 8, v // 8, 8)
    y = x.copy()
    y[:, :, :h, :v] = blocks.swapaxes(3, 5).reshape(B, T, h, v)
    return y


def _packed(problem: Problem, x: Array) -> Array:
    """What a reader of rows D apart finds of rows that were stored V apart."""
    rows = x.reshape(-1, x.shape[-1])
    buffer = np.zeros((len(rows), problem.D))
    buffer.reshape(-1)[: rows.size] = rows.ravel()
    return buffer[:, : x.shape[-1]].reshape(x.shape)


def _halved(problem: Problem, x: Array, second: Callable[[Array], Array]) -> Array:
    half = x.shape[-1] // 2
    y = x.copy()
    y[..., half : 2 * half] = second(x[..., :half])
    return y


def repeated(period: int) -> Mutant:
    """The last column of every `period` is the one before it again."""

    def act(problem: Problem, x: Array) -> Array:
        y = x.copy()
        last = np.arange(period - 1, x.shape[-1], period)
        y[..., last] = x[..., last - 1]
        return y

    return _mutant(
        f"repeated-{period}",
        "columns not computed",
        f"o[c] <- o[c - 1] for c = {period - 1} mod {period}",
        Need(f"values of {period} elements or more", lambda p: period <= p.V),
        one_key,
        finish=out(act),
        period=period,
    )


_mutant = Maker("value.")


MUTANTS = (
    _mutant(
        "output-stride",
        "stride ignored",
        "rows of out stored D elements apart, not V",
        narrower_value,
        one_key,
        Need("two rows", lambda p: p.B * p.T * p.H >= 2),
        finish=out(_row_stride),
    ),
    _mutant(
        "output-packed",
        "stride ignored",
        "rows of out stored V elements apart in a buffer of rows of D",
        narrower_value,
        one_key,
        Need("two rows", lambda p: p.B * p.T * p.H >= 2),
        finish=out(_packed),
        refs="vllm-project/vllm#18807",
    ),
    _mutant(
        "first-half",
        "columns not computed",
        "the second half of the columns is 0",
        two_columns,
        one_key,
        finish=out(lambda p, x: _halved(p, x, np.zeros_like)),
    ),
    _mutant(
        "half-repeated",
        "columns not computed",
        "the second half of the columns is the first again",
        two_columns,
        one_key,
        finish=out(lambda p, x: _halved(p, x, np.copy)),
    ),
    repeated(2),
    repeated(8),
    repeated(16),
    _mutant(
        "halves-swapped",
        "output permutation",
        "the halves of the columns exchanged",
        two_columns,
        one_key,
        finish=out(lambda p, x: np.roll(x, x.shape[-1] // 2, -1)),
    ),
    _mutant(
        "tile-transposed",
        "output permutation",
        "8 x 8 of each 64 columns transposed",
        tile,
        one_key,
        finish=out(lambda p, x: x[..., transposed_tiles(x.shape[-1])]),
        refs="Dao-AILab/flash-attention#2553",
    ),
    _mutant(
        "fragments",
        "output permutation",
        "each 8 heads x 8 columns transposed",
        eight_heads,
        one_key,
        finish=out(_fragments),
        refs="Dao-AILab/flash-attention#2553",
    ),
    _mutant(
        "basis",
        "output basis",
        "o <- H o, a Hadamard matrix of the value's width",
        power_of_two,
        one_key,
        finish=out(lambda p, x: hadamard(x)),
        refs="ggml-org/llama.cpp#25382 ggml-org/llama.cpp#25391",
    ),
    factor(0.75),
    factor(2.0),
    factor(1.02),
    row_factor(1.21),
)
