# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: two pairings, four ways to compute the angle, YaRN.

    rope_interleaved   rotates the pairs (2j, 2j + 1)     "NORM", GPT-J style, what MLA checkpoints use
    rope_neox          rotates the pairs (j, j + n/2)     "NEOX", half-split

Pair j of n/2 turns by theta[j] = position * base^(-2j/n), and engines round that differently (`angles`):

    recurrence   theta[j] = theta[j-1] * theta_scale, theta_scale = base^(-2/n)
    power        theta[j] = position * theta_scale^j
    closed       theta[j] = position * base^(-2j/n)
    table        as closed, its cosines and sines computed in f64 and stored in the precision

All four are right, and in f32 they differ: with n = 64 and base 8e6, e^(i theta) by recurrence and by closed
are up to 6e-5 apart at position 4096 and 5e-2 at position 1e6. So the mode is part of every answer.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import InputError

Array = NDArray[Any]

ANGLES = ("recurrence", "power", "closed", "table")


class YarnParameters(Protocol):
    """What YaRN needs to know; `geometry.Yarn` is one."""

    @property
    def factor(self) -> float: ...
    @property
    def original_max_position_embeddings(self) -> int: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def mscale(self) -> float: ...
    @property
    def mscale_all_dim(self) -> float: ...


def rope_interleaved(
    x: Array,
    positions: Array,
    *,
    base: float,
    rotary_dim: int | None = None,
    angles: str = "recurrence",
    yarn: YarnParameters | None = None,
    precision: str = "f32",
) -> Array:
    """Rotate the pairs (2j, 2j + 1) of the first `rotary_dim` elements of each row; a new array.

    x [T, H, R] or [T, R], f32, f16 or bf16, and f64 in precision "f64"; positions [T], integers of any sign.
    `rotary_dim` n is 0 to R (None: R). What lies beyond it stays as it is, and so does the last element of an
    odd n; 0 rotates nothing. `angles` is one of ANGLES: see the top of this module.

    With a = x[2j] and b = x[2j + 1]: out[2j] = a cos - b sin, out[2j + 1] = a sin + b cos, of theta[j].

    `yarn` keeps the fast frequencies, divides the slow ones by `factor`, and goes linearly from one to the
    other between the pairs that turn `beta_fast` and `beta_slow` times in the original context:
    theta' = theta/factor (1 - kept) + theta kept. The two are rounded outwards and clamped to 0 .. n - 1,
    as transformers and vLLM do. Cosines and sines are multiplied by mscale(mscale) / mscale(mscale_all_dim),
    mscale(m) = 0.1 m ln(factor) + 1: 1 where the fields are equal, and not the mscale^2 of the softmax scale.

    Precision "f32" rounds everything but the table to f32, the position too (exact up to 2^24); in "f64" all
    is f64, and table is closed.

    Returns the shape of x, f32 or f64. Raises InputError.
    """
    return _rope_of(x, positions, False, base, rotary_dim, angles, yarn, precision)


def rope_neox(
    x: Array,
    positions: Array,
    *,
    base: float,
    rotary_dim: int | None = None,
    angles: str = "recurrence",
    yarn: YarnParameters | None = None,
    precision: str = "f32",
) -> Array:
    """Rotate the pairs (j, j + n//2) of the first n = `rotary_dim` elements, else as `rope_interleaved`."""
    return _rope_of(x, positions, True, base, rotary_dim, angles, yarn, precision)


def interleaved_to_neox(n: int) -> NDArray[np.int64]:
    """Where each element of an interleaved row goes in a NEOX row: p[2j] = j, p[2j + 1] = j + n//2.

    p maps source to destination, so there are two ways to apply it, and they are not the same expression:

        scatter   y[p[source]] = x[source]                   y[p] = x
        gather    y[destination] = x[inverse[destination]]   y = x[np.argsort(p)]

    x[p] is neither: it goes from NEOX to interleaved. (n = 2 and 4 hide that: there p is its own inverse.)

    rope_neox(to_neox(x)) = to_neox(rope_interleaved(x)), bit for bit. A permuted row is another row, though:
    the permutation is valid for dot-product consumers only, applied to both q and k. An odd n keeps its last
    element.
    """
    n = _integer("n", n)
    if n < 0:
        raise InputError(f"n is {n}, expected 0 or more")
    p = np.arange(n)
    pairs = n // 2
    p[0 : 2 * pairs : 2] = np.arange(pairs)
    p[1 : 2 * pairs : 2] = np.arange(pairs) + pairs
    return p


def to_neox(x: Array, *, rotary_dim: int | None = None) -> Array:
    """Scatter the first `rotary_dim` (None: all R) elements of x [..., R] by `interleaved_to_neox`."""
    p = _permutation(x, rotary_dim)
    y = np.empty_like(x)
    y[..., p] = x
    return y


def to_interleaved(x: Array, *, rotary_dim: int | None = None) -> Array:
    """The inverse of `to_neox`."""
    return x[..., _permutation(x, rotary_dim)]


def _permutation(x: Array, rotary_dim: int | None) -> NDArray[np.int64]:
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        raise InputError(f"x is {_shape(x)}, expected an array [..., R]")
    n = _rotary_dim(rotary_dim, x.shape[-1])
    return np.concatenate([interleaved_to_neox(n), np.arange(n, x.shape[-1])])


def _rope_of(
    x: Array,
    positions: Array,
    neox: bool,
    base: float,
    rotary_dim: int | None,
    angles: str,
    yarn: YarnParameters | None,
    precision: str,
) -> Array:
    from .reference import _rope

    if precision not in ("f32", "f64"):
        raise InputError(f"precision is {precision!r}, expected 'f32' or 'f64'")
    if angles not in ANGLES:
        raise InputError(f"angles is {angles!r}, expected {', '.join(ANGLES[:-1])} or {ANGLES[-1]}")
    stored = np.float32 if precision == "f32" else np.float64
    real = np.float64 if angles == "table" else stored
    rows = _rows(x, precision)
    positions = _positions(positions, len(rows))
    n = _rotary_dim(rotary_dim, rows.shape[-1])
    with np.errstate(over="ignore"):
        rounded = float(real(_number("base", base)))
    if not 0 < rounded < math.inf:
        raise InputError(f"base is {base}, expected a finite number above 0")

    kept, factor, amplitude = np.ones(n // 2, real), 1.0, 1.0
    if yarn is not None:
        kept, factor, amplitude = _yarn(yarn, rounded, n, real)
    cosine = np.empty((len(rows), n // 2), real)
    sine = np.empty((len(rows), n // 2), real)
    mode = ANGLES.index("closed" if angles == "table" else angles)
    _rope.turn(positions, n, rounded, mode, kept, factor, amplitude, cosine, sine)

    out = np.array(rows, stored, order="C")
    _rope.rotate(out, cosine.astype(stored, copy=False), sine.astype(stored, copy=False), neox)
    return out.reshape(x.shape)


def _yarn(yarn: YarnParameters, base: float, n: int, real: type) -> tuple[Array, float, float]:
    """How far each pair keeps its frequency [n/2], the factor, and the amplitude of the rotation."""
    factor = _field(yarn, "factor", 1)
    original = _field(yarn, "original_max_position_embeddings", 1)
    if base <= 1:
        raise InputError(f"base is {base}, expected above 1 with yarn")

    def pair_of(turns: float) -> float:
        return n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low: float = max(math.floor(pair_of(_field(yarn, "beta_fast", 1e-6))), 0)
    high: float = min(math.ceil(pair_of(_field(yarn, "beta_slow", 1e-6))), n - 1)
    if low > high and n // 2:
        raise InputError(f"yarn goes from pair {low} to {high}, expected a range: engines differ without one")
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(n // 2, dtype=real) - low) / (high - low), 0, 1)

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1

    amplitude = mscale(_field(yarn, "mscale", 0)) / mscale(_field(yarn, "mscale_all_dim", 0))
    return 1 - ramp, factor, amplitude


def _field(yarn: YarnParameters, name: str, least: float) -> float:
    value = _number(f"yarn.{name}", getattr(yarn, name, None))
    if not least <= value <= 2**53:
        raise InputError(f"yarn.{name} is {value:g}, expected {least:g} to 2^53")
    return value


def _rows(x: Array, precision: str) -> Array:
    """x as [T, H, R]."""
    if not isinstance(x, np.ndarray) or x.ndim not in (2, 3):
        raise InputError(f"x is {_shape(x)}, expected an array [T, H, R] or [T, R]")
    allowed = ("float32", "float16", "bfloat16") + ("float64",) * (precision == "f64")
    if x.dtype.name not in allowed:
        raise InputError(f"x is {x.dtype.name}, expected {' or '.join(allowed)} in precision {precision}")
    return x if x.ndim == 3 else x[:, None]


def _positions(positions: Array, count: int) -> NDArray[np.int64]:
    if not isinstance(positions, np.ndarray) or positions.shape != (count,):
        raise InputError(f"positions is {_shape(positions)}, expected [{count}], one for each row of x")
    if positions.dtype.kind not in "iu":
        raise InputError(f"positions is {positions.dtype.name}, expected integers")
    for t in np.flatnonzero(positions > np.iinfo(np.int64).max)[:1]:
        raise InputError(f"positions[{t}] is {positions[t]}, expected below 2^63")
    return np.array(positions, np.int64)


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _rotary_dim(rotary_dim: int | None, width: int) -> int:
    n = width if rotary_dim is None else _integer("rotary_dim", rotary_dim)
    if not 0 <= n <= width:
        raise InputError(f"rotary_dim is {n}, expected 0 to {width}, the width of x")
    return n


def _integer(name: str, value: object) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected an integer")
    return int(value)


def _number(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected a number")
    return float(value)
