# SPDX-License-Identifier: Apache-2.0
"""The arguments of an engine's call: what a dialect declares of each, and the check of what is given.

    "q": tensor("b s_q h d", "bf16 f16")           a letter is one size everywhere; a number is that size
    "kv_indptr": tensor("b+1", "i32")               one more than b
    "query": tensor("b q h d | t h d", "bf16")      either
    "k_cache": tensor("n 64 h_k d", "=q")           the dtype of q
    "softmax_scale": value(float, None, "1/sqrt(d)")    a number that may be left out, and its default in words
    "page_size": value(int, 1, size="page")         a number that must be the size of that letter
    "bmm1_scale": value(float, 1.0, device=True)    a number, or a tensor f32 of one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array, as_array, dtype_name
from ..checks import number
from ..errors import InputError
from ..geometry import check_integer, show

REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()
Limits = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Argument:
    """One argument: a tensor if it has `axes`, else a number, a truth value or a word of `kind`."""

    axes: tuple[tuple[str, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    kind: type = float
    default: Any = REQUIRED
    words: str = ""  # the default, where it is not the value
    size: str | None = None
    choices: tuple[str, ...] = ()
    device: bool = False  # a number that may lie in a tensor

    @property
    def is_tensor(self) -> bool:
        return bool(self.axes)

    @property
    def spelling(self) -> str:
        """Its axes, or its default."""
        if self.is_tensor:
            shapes = " or ".join(f"[{','.join(axes)}]" for axes in self.axes)
            return f"{shapes}{'' if self.default is REQUIRED else ' or none'}"
        return "" if self.default is REQUIRED else f"={self.words or self.default}"


def tensor(axes: str, dtypes: str, default: Any = REQUIRED) -> Argument:
    shapes = tuple(tuple(shape.split()) for shape in axes.split("|"))
    return Argument(axes=shapes, dtypes=tuple(dtypes.split()), default=default)


def value(
    kind: type,
    default: Any = REQUIRED,
    words: str = "",
    *,
    size: str | None = None,
    choices: tuple[str, ...] = (),
    device: bool = False,
) -> Argument:
    return Argument(kind=kind, default=default, words=words, size=size, choices=choices, device=device)


class Given(dict[str, Any]):
    """The arguments of one call by name, absent ones with their defaults; `sizes` are those of the letters."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def take(call: str, declared: Mapping[str, Argument], limits: Limits, given: Mapping[str, Any]) -> Given:
    """What `call` was given, each tensor an array. Raises InputError that names the argument.

    `limits` are the sizes a letter may have; a single negative one is a number it must be a multiple of.
    """
    for name in given:
        if name not in declared:
            raise InputError(f"{name} is given, expected one of {', '.join(declared)} in a call of {call}")
    taken = Given()
    for name, argument in declared.items():
        value = given.get(name)
        if value is None and argument.default is REQUIRED:
            raise InputError(f"{name} is missing, expected it in a call of {call}")
        if value is None:
            taken[name] = argument.default
        elif argument.is_tensor:
            taken[name] = _tensor(name, argument, value, taken)
        else:
            taken[name] = _value(name, argument, value)
    _check_sizes(declared, limits, taken)
    return taken


def _tensor(name: str, argument: Argument, value: object, taken: Given) -> Array:
    array = as_array(name, value)
    shapes = [f"[{', '.join(axes)}]" for axes in argument.axes]
    fitting = [axes for axes in argument.axes if len(axes) == array.ndim]
    if not fitting:
        raise InputError(f"{name} has {array.ndim} axes {list(array.shape)}, expected {' or '.join(shapes)}")
    allowed = argument.dtypes
    if allowed[0].startswith("="):
        allowed = (dtype_name(allowed[0][1:], taken[allowed[0][1:]]),)
    if (kind := dtype_name(name, array)) not in allowed:
        raise InputError(f"{name} is {kind}, expected {' or '.join(allowed)}")
    for axes in fitting:  # the first whose numbers agree, else the last, which says what is wrong
        if all(not letter.isdigit() or int(letter) == size for letter, size in zip(axes, array.shape, strict=True)):
            break
    for axis, (letter, size) in enumerate(zip(axes, array.shape, strict=True)):
        count, whole = (size - 1, letter[:-2]) if letter.endswith("+1") else (size, letter)
        wanted = int(whole) if whole.isdigit() else taken.sizes.setdefault(whole, count)
        if count != wanted:
            named = wanted if whole.isdigit() else f"{letter} = {wanted + size - count}"
            raise InputError(f"{name} is {list(array.shape)}, expected {named} on axis {axis} of [{', '.join(axes)}]")
    return array


def _value(name: str, argument: Argument, value: object) -> Any:
    if argument.kind is bool:
        if not isinstance(value, (bool, np.bool_)):
            raise InputError(f"{name} is {show(value)}, expected True or False")
        return bool(value)
    if argument.kind is str:
        if not isinstance(value, str) or value not in argument.choices:
            raise InputError(f"{name} is {show(value)}, expected {' or '.join(argument.choices)}")
        return value
    if argument.kind is int:
        return check_integer(name, value, least=-(2**63))
    if argument.device and not isinstance(value, (float, int, np.number)):
        array = as_array(name, value)
        kind = dtype_name(name, array)
        if array.size != 1 or kind != "f32":
            raise InputError(f"{name} is {kind} {list(array.shape)}, expected a number, or one in a tensor of f32")
        return number(name, float(array.reshape(())))
    return number(name, value)


def _check_sizes(declared: Mapping[str, Argument], limits: Limits, taken: Given) -> None:
    for letter, allowed in limits.items():
        size = taken.sizes.get(letter)
        multiple = -allowed[0] if len(allowed) == 1 and allowed[0] < 0 else 0
        if size is None or (size % multiple == 0 if multiple else size in allowed):
            continue
        name, axis = next(
            (name, axes.index(letter))
            for name, argument in declared.items()
            if isinstance(taken[name], np.ndarray)
            for axes in argument.axes
            if letter in axes and len(axes) == taken[name].ndim
        )
        words = f"a multiple of {multiple}" if multiple else " or ".join(map(str, allowed))
        raise InputError(f"{name} is {list(taken[name].shape)}, expected {words} on axis {axis}, {letter}")
    for name, argument in declared.items():
        if argument.size in taken.sizes and taken[name] not in (None, taken.sizes[argument.size]):
            wanted = taken.sizes[argument.size]
            raise InputError(f"{name} is {taken[name]}, expected {wanted}, the tensors' {argument.size}")
