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

from .arrays import FLOATS, Array, Axes, as_array
from .backends import choose_kernels, empty, machine, place
from .errors import InputError, UnsupportedError
from .geometry import check_integer, check_number, show, yarn_mscale

ANGLES = ("recurrence", "power", "closed", "table")
INTEGERS = ("i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8")
LEAST_BASE = 1e-6  # up to 2^53, like every number: no angle overflows


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
    x: object,
    positions: object,
    *,
    base: float,
    rotary_dim: int | None = None,
    angles: str = "recurrence",
    yarn: YarnParameters | None = None,
    precision: str = "f32",
    backend: str = "auto",
    stream: object = None,
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
    is f64, and table is closed. `backend` is auto or strict, or cuda or ptx as in `decode_paged`: these turn the
    angles too, but for the table, which is made here.

    Backend "cuda" takes x on a GPU, on `stream`, as `decode_paged` does, and returns a DeviceArray there. Positions
    are i64 there, and taken as they are; on the host they are checked, and a table is made of those alone.

    Returns the shape of x, f32 or f64. Raises InputError; cuda and ptx, UnsupportedError and MissingError too.
    """
    return _rope_of(x, positions, False, base, rotary_dim, angles, yarn, precision, backend, stream)


def rope_neox(
    x: object,
    positions: object,
    *,
    base: float,
    rotary_dim: int | None = None,
    angles: str = "recurrence",
    yarn: YarnParameters | None = None,
    precision: str = "f32",
    backend: str = "auto",
    stream: object = None,
) -> Array:
    """Rotate the pairs (j, j + n//2) of the first n = `rotary_dim` elements, else as `rope_interleaved`."""
    return _rope_of(x, positions, True, base, rotary_dim, angles, yarn, precision, backend, stream)


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
    n = check_integer("n", n, least=0)
    p = np.arange(n)
    pairs = n // 2
    p[0 : 2 * pairs : 2] = np.arange(pairs)
    p[1 : 2 * pairs : 2] = np.arange(pairs) + pairs
    return p


def to_neox(x: object, *, rotary_dim: int | None = None) -> Array:
    """Scatter the first `rotary_dim` (None: all R) elements of x [..., R] by `interleaved_to_neox`."""
    array, p = _permutation(x, rotary_dim)
    y = np.empty_like(array)
    y[..., p] = array
    return y


def to_interleaved(x: object, *, rotary_dim: int | None = None) -> Array:
    """The inverse of `to_neox`."""
    array, p = _permutation(x, rotary_dim)
    return array[..., p]


def _permutation(x: object, rotary_dim: int | None) -> tuple[Array, NDArray[np.int64]]:
    array = as_array("x", x)
    if array.ndim == 0:
        raise InputError("x has 0 axes [], expected 1 or more: [..., R]")
    width = array.shape[-1]
    n = _rotary_dim(rotary_dim, width)
    return array, np.concatenate([interleaved_to_neox(n), np.arange(n, width)])


def _rope_of(
    x: object,
    positions: object,
    neox: bool,
    base: float,
    rotary_dim: int | None,
    angles: str,
    yarn: YarnParameters | None,
    precision: str,
    backend: str,
    stream: object,
) -> Array:
    kernels = choose_kernels(backend)
    _check_choice("precision", precision, ("f32", "f64"))
    _check_choice("angles", angles, ANGLES)
    stored = np.float32 if precision == "f32" else np.float64
    real = np.float64 if angles == "table" else stored
    device, taken = place(backend, precision, stream, {"x": x, "positions": positions}, "positions")
    axes, (array, turns) = Axes(), taken.values()
    axes.check("x", array, "T R" if array.ndim == 2 else "T H R", FLOATS if precision == "f32" else (*FLOATS, "f64"))
    axes.check("positions", turns, "T", INTEGERS)
    if isinstance(turns, np.ndarray):
        for t in np.flatnonzero(turns > np.iinfo(np.int64).max)[:1]:
            raise InputError(f"positions[{t}] is {turns[t]}, expected below 2^63")
        turns = np.array(turns, np.int64)
    elif angles == "table":
        raise UnsupportedError("angles is 'table', made on the host, and positions lie on a GPU")
    n = _rotary_dim(rotary_dim, axes["R"])
    base = float(real(check_number("base", base, least=LEAST_BASE)))

    kept, factor, amplitude = np.ones(n // 2, real), 1.0, 1.0
    if yarn is not None:
        kept, factor, amplitude = _yarn(yarn, base, n, real)
    mode = ANGLES.index("closed" if angles == "table" else angles)
    how = turns, n, base, mode, kept, factor, amplitude
    if kernels is None or angles == "table":
        from .reference import _rope

        cosine = np.empty((axes["T"], n // 2), real)
        sine = np.empty((axes["T"], n // 2), real)
        _rope.turn(*how, cosine, sine)
        cosine, sine = cosine.astype(stored, copy=False), sine.astype(stored, copy=False)
    if kernels:
        from .gpu import forms

        out: Array = empty(device, array.shape, stored)
        on = device or machine(kernels, precision)
        form, args = (forms.rotate, (cosine, sine)) if angles == "table" else (forms.rope, how)
        forms.fill(form, on, array, *args, neox, outputs=(out,))
        return out
    with np.errstate(invalid="ignore"):  # a signalling NaN
        out = np.array(array, stored, order="C")
    _rope.rotate(out if out.ndim == 3 else out[:, None], cosine, sine, neox)
    return out


def _yarn(
    yarn: YarnParameters, base: float, n: int, real: type[np.floating[Any]]
) -> tuple[Array, float, float]:
    """How far each pair keeps its frequency [n/2], the factor, and the amplitude of the rotation."""

    def field(name: str, least: float) -> float:
        return check_number(f"yarn.{name}", getattr(yarn, name, None), least=least)

    factor = field("factor", 1)
    original = field("original_max_position_embeddings", 1)
    if base <= 1:
        raise InputError(f"base is {base:g}, expected above 1 with yarn")

    def pair_of(turns: float) -> float:
        return n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low: float = max(math.floor(pair_of(field("beta_fast", 1e-6))), 0)
    high: float = min(math.ceil(pair_of(field("beta_slow", 1e-6))), n - 1)
    if low > high and n // 2:
        raise InputError(f"yarn goes from pair {low} to {high}, expected a range: engines differ without one")
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(n // 2, dtype=real) - low) / (high - low), 0, 1)
    amplitude = yarn_mscale(factor, field("mscale", 0)) / yarn_mscale(factor, field("mscale_all_dim", 0))
    return 1 - ramp, factor, amplitude


def _rotary_dim(rotary_dim: int | None, width: int) -> int:
    if rotary_dim is None:
        return width
    if not isinstance(rotary_dim, numbers.Integral) or isinstance(rotary_dim, bool):
        raise InputError(f"rotary_dim is {show(rotary_dim)}, expected an integer")
    if not 0 <= rotary_dim <= width:
        raise InputError(f"rotary_dim is {show(rotary_dim)}, expected 0 to {width}, the width of x")
    return int(rotary_dim)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} is {show(value)}, expected {' or '.join(choices)}")
