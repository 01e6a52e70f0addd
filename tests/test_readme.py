# SPDX-License-Identifier: Apache-2.0
"""What the README lists is what there is."""

import dataclasses
import re
from pathlib import Path

import pytest

from mla_oracle.cases.extensions import Extensions
from mla_oracle.cases.recipes import RECIPES, Recipe

README = (Path(__file__).parents[1] / "README.md").read_text()
EVERYWHERE = {field.name for field in dataclasses.fields(Recipe)}


def keys_by_kind() -> dict[str, set[str]]:
    """The keys in the table of ids, by kind."""
    table = README.split("| kind | keys")[1].split("\n\n")[0].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in table]
    return {
        kind: set(re.findall("`([a-z_]+)`", keys)) for kinds, keys in rows for kind in re.findall("`([a-z]+)`", kinds)
    }


@pytest.mark.parametrize("kind", RECIPES)
def test_the_keys_of_an_id_are_the_ones_listed(kind: str) -> None:
    fields = {field.name for field in dataclasses.fields(RECIPES[kind])}
    assert keys_by_kind()[kind] == fields - EVERYWHERE


def test_the_fields_of_a_case_that_is_not_plain_are_the_ones_listed() -> None:
    table = README.split("Beyond the plain problem a paged case may have")[1].split("\n\n")[1]
    fields = {field.name for field in dataclasses.fields(Extensions)}
    assert set(re.findall("`([a-z_]+)`", table)) - {"q", "kv_cache"} == fields
