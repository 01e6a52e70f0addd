# SPDX-License-Identifier: Apache-2.0
"""A JSON object whose values know the name of their key in the file, and are checked as they are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, UnsupportedError
from . import check_bool, check_integer, check_number


@dataclass(frozen=True)
class Entry:
    """A value of the file, and the name of its key there."""

    name: str
    value: Any


class Section(dict[str, Entry]):
    """A part of the file: values by key, checked as they are taken."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        super().__init__({key: Entry(f"{prefix}{key}", value) for key, value in values.items()})
        self.prefix = prefix

    def take(self, key: str) -> Entry:
        if key not in self:
            raise InputError(f"{self.prefix}{key} is missing")
        return self[key]

    def given(self, key: str) -> bool:
        return key in self and self[key].value is not None

    def integer(self, key: str, *, least: int = 1) -> int:
        entry = self.take(key)
        return check_integer(entry.name, entry.value, least=least)

    def number(self, key: str, default: float | None = None, **bounds: float) -> float:
        if default is not None and key not in self:
            return default
        entry = self.take(key)
        return check_number(entry.name, entry.value, **bounds)

    def flag(self, key: str, default: bool) -> bool:
        return check_bool(self[key].name, self[key].value) if key in self else default

    def expect(self, key: str, expected: bool, model_type: str) -> None:
        """Refuse a value that `model_type` does not have, whether it reads the key or not."""
        if self.given(key) and self.flag(key, expected) != expected:
            name = self[key].name
            raise UnsupportedError(f"{name} is {not expected}, expected {expected} with {model_type}")
