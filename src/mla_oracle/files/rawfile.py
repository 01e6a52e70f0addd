# SPDX-License-Identifier: Apache-2.0
"""A regular file as bytes, as a JSON object, as the shape of a tensor; what is wrong with it in one line.

    with naming(path, "read"), open_regular(path) as file:
        header = json_object(read_bytes(file, 100).tobytes(), "header")

Inside `naming`, an InputError need not name the file, and an OSError becomes an InputError.
"""

import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Path = str | os.PathLike[str]

_RANK_LIMIT = 64  # as in numpy

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = 8
short = _REPR.repr  # of anything a file may hold: one line, and not a long one


@contextmanager
def naming(path: Path, verb: str) -> Iterator[None]:
    text = os.fspath(path)
    shown = text if text and text.isprintable() else repr(text)
    try:
        _check_name(text)
        yield
    except InputError as error:
        raise InputError(f"cannot {verb} {shown}: {error}") from None
    except OSError as error:
        raise InputError(f"cannot {verb} {shown}: {error.strerror or error}") from None


def _check_name(text: str) -> None:
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise InputError("expected a name that a file can have")


def open_regular(path: Path) -> BufferedReader:
    """The file, open for reading. A folder, a pipe or a device is an InputError, and never waited for."""
    check_regular(os.stat(path).st_mode, "a regular file")
    return open(path, "rb")


def check_regular(mode: int, expected: str) -> None:
    if not stat.S_ISREG(mode):
        found = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}.get(stat.S_IFMT(mode), "a device or a pipe")
        raise InputError(f"it is {found}, expected {expected}")


def read_bytes(file: BufferedReader, count: int) -> NDArray[Any]:
    """The next `count` bytes, [count] u8, read-only."""
    try:
        data = np.empty(count, np.uint8)
    except MemoryError:
        raise InputError(f"{count} bytes do not fit in memory") from None
    got = file.readinto(data.data)
    if got != count:
        raise InputError(f"it ended {count - got} bytes early: it was cut while being read")
    data.flags.writeable = False
    return data


def json_object(data: bytes, subject: str) -> dict[str, Any]:
    """The JSON object in `data`: UTF-8, no name twice in any object."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{subject} is not JSON with distinct names: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{subject} is {short(value)}, expected a JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{short(name)} appears twice")
        members[name] = value
    return members


def is_text(value: object) -> bool:
    """Whether `value` is a string that UTF-8 can hold: JSON's escapes can spell half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def shape_of(value: object, itemsize: int, subject: str) -> tuple[int, ...]:
    """A shape from JSON, such that an array of it with items of `itemsize` bytes can exist."""
    if (
        not isinstance(value, list)
        or len(value) > _RANK_LIMIT
        or any(type(n) is not int or n < 0 for n in value)
    ):
        raise InputError(f"{subject} has shape {short(value)}, expected at most {_RANK_LIMIT} integers >= 0")
    if math.prod(n or 1 for n in value) * itemsize >= 2**63:
        raise InputError(f"{subject} has shape {short(value)}, expected less than 2^63 bytes")
    return tuple(value)
