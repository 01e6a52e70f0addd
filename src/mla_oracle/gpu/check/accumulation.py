# SPDX-License-Identifier: Apache-2.0
"""How mma.sync m16n8k16 and wgmma m64n8k16 add, found out by products made for it.

    whole numbers       every sum is exact, so that every element must be right, bit for bit
    bound               random products: within what the kernels' bounds take, 18 cuts of 2^-23 of all that is added
    last bits           a sum between two f32: to the nearest one, or cut off; how many further bits an addend keeps
    order               large numbers cancel, and which of sixteen small ones outlive them tells who is added when
    model               the block width, further bits and rounding that give the most bits of random products
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mla_oracle import dtypes
from mla_oracle.arrays import Array
from mla_oracle.gpu.check.report import Finding
from mla_oracle.gpu.machine import Machine

FILE = "check/instructions.cu"
K = 16
EPS = 2.0**-23
CUTS = 18  # 16 products, c, and the sum: what gpu.paged counts
SMALL = 2.0**-20  # beside LARGE it is lost in any accumulator
LARGE = 2.0**30


# d [T, 16, 8] f32 = c + a b of (machine, dtype, a [T, 16, 16], b [T, 16, 8], c [T, 16, 8]).
Multiply = Callable[[Machine, str, Array, Array, Array], Array]


def findings(machine: Machine, reference: Machine, instruction: str, multiply: Multiply) -> Iterator[Finding]:
    for dtype in ("f16", "bf16"):
        name = f"{instruction}.{dtype}"
        yield whole_numbers(multiply, machine, dtype, f"{name} whole numbers")
        yield random_products(multiply, machine, reference, dtype, f"{name} bound")
        yield {"name": f"{name} last bits", "ok": None, **last_bits(multiply, machine, dtype)}
        yield {"name": f"{name} order", "ok": None, **order(multiply, machine, dtype)}
        yield {"name": f"{name} model", "ok": None, **model(multiply, machine, dtype)}


def multiply_warp(machine: Machine, dtype: str, a: Array, b: Array, c: Array) -> Array:
    """A Multiply of mma, a product to a warp.

    PTX ISA, "Warp-level matrix instructions": lane 4 g + t holds of b the pairs at rows 2t and 2t + 8 of column g.
    """
    T = len(a)
    b = np.ascontiguousarray(b.astype(dtypes.dtype(dtype)).transpose(0, 2, 1)).view(np.uint32).reshape(T, 8, 2, 4)
    b = np.concatenate([b.transpose(0, 1, 3, 2), np.zeros((T, 8, 4, 2), np.uint32)], axis=3)
    d = machine.empty((T, 32, 4), np.uint32)
    words = [machine.upload(x) for x in (factor_words(a, dtype), b.reshape(T, 32, 4), sum_words(c))]
    machine.launch(machine.kernel(FILE, f"mma_m16n8k16_{dtype}"), (T, 1, 1), (32, 1, 1), 0, *words, d)
    return sums(machine.download(d))


def factor_words(a: Array, dtype: str) -> Array:
    """[T, 32, 4] u32 of a [T, 16, 16]: lane 4 g + t has the pairs at column 2t and 2t + 8 of rows g and g + 8."""
    words = np.ascontiguousarray(a.astype(dtypes.dtype(dtype))).view(np.uint32).reshape(-1, 2, 8, 2, 4)
    return np.ascontiguousarray(words.transpose(0, 2, 4, 3, 1)).reshape(-1, 32, 4)


def sum_words(c: Array) -> Array:
    """[T, 32, 4] u32 of c [T, 16, 8]: lane 4 g + t has the pairs at column 2t of rows g and g + 8."""
    words = np.ascontiguousarray(c, np.float32).view(np.uint32).reshape(-1, 2, 8, 4, 2)
    return np.ascontiguousarray(words.transpose(0, 2, 3, 1, 4)).reshape(-1, 32, 4)


def sums(words: Array) -> Array:
    """The d [T, 16, 8] f32 whose `sum_words` these are."""
    whole = words.reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(whole).reshape(-1, 16, 8).view(np.float32)


def dot(multiply: Multiply, machine: Machine, dtype: str, c: Any, pairs: Any) -> Array:
    """[T] f32: c [T] plus the products of pairs [T, 16, 2], each alone in its product."""
    pairs = np.asarray(pairs, np.float64)
    a, b = np.zeros((len(pairs), 16, K)), np.zeros((len(pairs), K, 8))
    a[:, 0], b[:, :, 0] = pairs[..., 0], pairs[..., 1]
    first = np.zeros((len(pairs), 16, 8), np.float32)
    first[:, 0, 0] = c
    return multiply(machine, dtype, a, b, first)[:, 0, 0]


def whole_numbers(multiply: Multiply, machine: Machine, dtype: str, name: str) -> Finding:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (64, 16, K)), rng.integers(-128, 128, (64, K, 8))
    c = rng.integers(-(1 << 20), 1 << 20, (64, 16, 8)).astype(np.float32)
    differ = int((multiply(machine, dtype, a, b, c) != c + a @ b).sum())
    found: Finding = {"name": name, "ok": differ == 0, "n": c.size, "differ": differ}
    return found | ({"reason": f"{differ} of {c.size} elements are wrong"} if differ else {})


def samples(dtype: str, T: int = 32) -> tuple[Array, Array, Array]:
    """a, b, c as stored, f64: normal products, some of them much larger than others, under sums of many sizes."""
    rng = np.random.default_rng(1)
    stored = dtypes.dtype(dtype)
    powers = ((6, (T, 16, K)), (2, (T, K, 8)), (8, (T, 16, 8)))
    a, b, c = (rng.standard_normal(shape) * 2.0 ** rng.integers(-most, most + 1, shape) for most, shape in powers)
    a, b = a.astype(stored).astype(np.float64), b.astype(stored).astype(np.float64)
    return a, b, c.astype(np.float32).astype(np.float64)


def random_products(
    multiply: Multiply, machine: Machine, reference: Machine, dtype: str, name: str
) -> Finding:
    """Errors in units of 2^-23 of what is added, and how far from the interpreter's fused additions in turn."""
    a, b, c = samples(dtype)
    got, model = (multiply(where, dtype, a, b, c).astype(np.float64) for where in (machine, reference))
    added = np.abs(c) + np.abs(a) @ np.abs(b)
    units = np.abs(got - (c + a @ b)) / (EPS * added)
    worst = float(units.max())
    reason = f"an element is off by {worst:.1f} units of 2^-23, expected at most {CUTS}"
    return {
        "name": name,
        "ok": worst <= CUTS,
        "n": got.size,
        "differ": int((got != model).sum()),
        "told": f"{worst:.2f} units of 2^-23 at most, of {CUTS}",
        "worst_cuts": round(worst, 3),
        "mean_cuts": round(float(units.mean()), 4),
        "towards_zero": round(float((np.abs(got) < np.abs(c + a @ b)).mean()), 3),
        **({"reason": reason} if worst > CUTS else {}),
    }


def last_bits(multiply: Multiply, machine: Machine, dtype: str) -> dict[str, Any]:
    """`rounding` of a sum, the further bits that an addend keeps beyond the 24 of the largest one, and the edges."""
    # All, half and three quarters of the last bit of 1.
    unit, half, quarters = (2.0**-11, 2.0**-12), (2.0**-11, 2.0**-13), (1.5 * 2.0**-11, 2.0**-13)

    def total(c: float, *pairs: tuple[float, float]) -> Any:
        return dot(multiply, machine, dtype, [c], [[*pairs, *[(0.0, 0.0)] * (K - len(pairs))]])[0]

    # 1 and 3/4 of its last bit, and -1 likewise.
    up, down = bool(total(1, quarters) > 1), bool(total(-1, (-quarters[0], quarters[1])) < -1)
    rounding = {(True, True): "to nearest", (False, False): "towards zero", (False, True): "down", (True, False): "up"}
    kept = 0
    for bits in range(1, 9):  # as many as a factor of bf16 has
        # 1 - 2^-bits and 2^-bits of the last bit of 1 make it only if both are kept whole. Where sums are rounded to
        # the nearest, it would come of the larger one alone: there, a half and 2^-bits of it lie beyond the tie.
        part = (unit[0] * 2.0**-bits, unit[1])
        most = (unit[0] * (1 - 2.0**-bits), unit[1]) if not up else half
        if not (total(1, most, part) > 1 and total(1, part, most) > 1):
            break
        kept = bits
    return {
        "told": f"rounded {rounding[up, down]}, {kept} further bits of an addend are kept",
        "rounding": rounding[up, down],
        "further_bits": kept,
        "last_bit_kept": bool(total(1, unit) > 1),
        "subnormal_c_kept": bool(total(2.0**-149) == 2.0**-149),
        "minus_zero": bool(np.signbit(total(-0.0, *[(-0.0, 1.0)] * K))),
        "nan": f"{int(total(np.inf, (-np.inf, 1.0)).view(np.uint32)):#010x}",
    }


def order(multiply: Multiply, machine: Machine, dtype: str) -> dict[str, Any]:
    """The block width w at which products are added together, blocks in ascending order, c with the first; or None.

    Products i and j are LARGE and -LARGE, the rest are SMALL: in such an order the blocks after the later one of both
    outlive them. `outliving` has a count for each i < j, and for c and j, wherever no width explains them all.
    """
    cases = list(itertools.combinations(range(-1, K), 2))  # -1 is c
    large, small = (2.0**15, 2.0**15), (2.0**-10, 2.0**-10)
    pairs = np.array([[small] * K for _ in cases])
    c = np.zeros(len(cases))
    for index, (i, j) in enumerate(cases):
        pairs[index, j] = (-large[0], large[1])
        if i < 0:
            c[index] = LARGE
        else:
            pairs[index, i] = large
    counts = dot(multiply, machine, dtype, c, pairs).astype(np.float64) / SMALL
    for width in (1, 2, 4, 8, 16):
        if all(count == K - width * (j // width + 1) for (_, j), count in zip(cases, counts, strict=True)):
            return {"told": f"{width} products are added at once", "block_width": width}
    outliving = {f"{i},{j}": float(count) for (i, j), count in zip(cases, counts, strict=True)}
    return {"told": "no width of blocks explains it", "block_width": None, "outliving": outliving}


def model(multiply: Multiply, machine: Machine, dtype: str) -> dict[str, Any]:
    """The three models that give the most elements of random products bit for bit, and what share."""
    a, b, c = samples(dtype, 8)
    got = multiply(machine, dtype, a, b, c)
    shares = []
    aligned = [(bits, by) for bits in (0, 1, 2, 3) for by in ("value", "exponents")]
    for width, (bits, by), cut in itertools.product((1, 4, 8, 16), [*aligned, (None, "value")], (True, False)):
        share = float((emulate(a, b, c, width, bits, by, cut) == got).mean())
        end = "cut" if cut else "nearest"
        shares.append((share, {"width": width, "further_bits": bits, "aligned_by": by, "end": end}))
    shares.sort(key=lambda item: -item[0])
    share, best = shares[0]
    told = ", ".join(f"{name} {value}" for name, value in best.items())
    three = [{"share": round(share, 4), **what} for share, what in shares[:3]]
    return {"told": f"{share:.1%} of the elements bit for bit by {told}", "best": three}


def emulate(a: Array, b: Array, c: Array, width: int, bits: int | None, by: str, cut: bool) -> Array:
    """[T, 16, 8] f32: blocks of `width` products and the sum so far, each addend cut at `bits` beyond the 24 of the
    largest, by its value's or its factors' exponents; their sum cut to f32 or rounded to the nearest."""
    products = a[:, :, None, :] * b.transpose(0, 2, 1)[:, None]  # [T, 16, 8, 16]
    powers = np.frexp(a)[1][:, :, None, :] + np.frexp(b)[1].transpose(0, 2, 1)[:, None] - 1
    powers = np.where(products == 0, -1000, powers if by == "exponents" else np.frexp(products)[1])
    total = c
    for first in range(0, K, width):
        addends = np.concatenate([total[..., None], products[..., first : first + width]], axis=-1)
        if bits is not None:
            own = np.where(total == 0, -1000, np.frexp(total)[1])[..., None]
            power = np.concatenate([own, powers[..., first : first + width]], axis=-1).max(-1, keepdims=True)
            quantum = np.ldexp(1.0, power - 24 - bits)
            addends = np.trunc(addends / quantum) * quantum
        total = addends.sum(-1)
        if cut:
            quantum = np.ldexp(1.0, np.frexp(total)[1] - 24)
            total = np.trunc(total / quantum) * quantum
        total = total.astype(np.float32).astype(np.float64)
    return total.astype(np.float32)
