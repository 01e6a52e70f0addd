# SPDX-License-Identifier: Apache-2.0
"""Several sequences in one layer case, each of them a layer of its own: what goes in apart, what comes out together.

    qo_indptr [B + 1]      sequence b has the tokens qo_indptr[b] to qo_indptr[b + 1] - 1 of hidden_states
    past_indptr [B + 1]    and these rows of past_c_kv and its like; left out where nothing was cached

A stage with tokens, rows or keys first has those of the sequences in a row: kv_cache the cached and then the new rows
of the first, of the second, and so on. Columns of scores are the rows of the query's own sequence, and so are the
tokens that it chose; there are as many columns as the longest has, and what lies beyond a sequence's own is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, as_array
from ..errors import InputError
from ..spellings.entries import counts_of
from .config import LayerConfig
from .indexer import width_of
from .state import INPUTS, State, prepare
from .weights import Weights

BEYOND = {"p": 0.0, "topk": -1}  # what a column beyond a sequence's own holds; -inf of scores


class Sizes(NamedTuple):
    """Of one sequence, or of all: counts of tokens, rows and keys, and of columns for them."""

    tokens: int
    rows: int
    keys: int
    row_columns: int
    key_columns: int
    chosen: int


class Sequence(NamedTuple):
    """One among some, and where its part of a stage begins, by the stage's first axis."""

    number: int
    among: int
    state: State
    sizes: Sizes
    first: dict[str, int]

    def of(self, name: str, axes: str, stage: Array) -> Array:
        """Its part of a stage of all."""
        letters = axes.split()
        begin, own = self.first[letters[0]], _counts(self.sizes)
        part: Array = stage[begin : begin + own[letters[0]]]
        return part[..., : own[letters[-1]]] if letters[-1] in ("N", "keys") and len(letters) > 1 else part


def sequences(
    config: LayerConfig, weights: Weights, inputs: Mapping[str, object], **how: Any
) -> list[Sequence]:
    """The sequences of `inputs`, checked; one where no qo_indptr is given. `how` as of `prepare`. Raises InputError."""
    parts = _apart(inputs) if "qo_indptr" in inputs or "past_indptr" in inputs else [dict(inputs)]
    found: list[Sequence] = []
    first = {"T": 0, "N": 0, "keys": 0}
    for b, part in enumerate(parts):
        try:
            state = prepare(config, weights, part, **how)
        except InputError as error:
            raise InputError(f"sequence {b}: {error}" if len(parts) > 1 else str(error)) from None
        sizes = _sizes(config, state)
        found.append(Sequence(b, len(parts), state, sizes, dict(first)))
        for letter, count in _counts(sizes).items():
            first[letter] += count
    _check_blocks(found)
    return found


def together(all_of: list[Sequence]) -> Sizes:
    """The sizes of stages of all sequences."""
    sizes = [sequence.sizes for sequence in all_of]
    tokens, rows, keys = (sum(counts) for counts in list(zip(*sizes, strict=True))[:3])
    return Sizes(tokens, rows, keys, *(max(counts) for counts in list(zip(*sizes, strict=True))[3:]))


def joined(name: str, axes: str, parts: list[Array]) -> Array:
    """A stage of all sequences, of its parts; columns that a part has not are filled."""
    if axes.split()[-1] not in ("N", "keys", "k") or len(axes.split()) == 1:
        return np.concatenate(parts)
    width = max(part.shape[-1] for part in parts)
    fill = BEYOND.get(name, -np.inf)
    return np.concatenate(
        [
            np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])], constant_values=fill)
            for part in parts
        ]
    )


def _apart(inputs: Mapping[str, object]) -> list[dict[str, object]]:
    arrays = {name: as_array(name, value) for name, value in inputs.items()}
    starts = {}
    for name, of in (("qo_indptr", "hidden_states"), ("past_indptr", "past_c_kv")):
        if name not in arrays:
            if name == "past_indptr" and "past_c_kv" not in arrays:
                continue
            raise InputError(f"{name} is missing, expected [B + 1]: {of} has the rows of several sequences")
        if of not in arrays or not arrays[of].ndim:
            raise InputError(f"{name} is given and {of} is not, expected both")
        counts = counts_of(name, arrays[name], len(arrays[of]), of)
        starts[name] = np.concatenate([[0], np.cumsum(counts)])
        if name == "qo_indptr":
            for b in np.flatnonzero(counts == 0)[:1]:
                raise InputError(f"qo_indptr gives sequence {b} no token, expected 1 or more")
    count = len(starts["qo_indptr"]) - 1
    if not count:
        raise InputError("qo_indptr is [1], expected [B + 1] of 1 sequence or more")
    if "past_indptr" in starts and len(starts["past_indptr"]) != count + 1:
        raise InputError(f"past_indptr is [{len(starts['past_indptr'])}], expected [{count + 1}] as qo_indptr")
    parts: list[dict[str, object]] = [{} for _ in range(count)]
    table = arrays.pop("block_table", None)
    if table is not None:
        if table.ndim != 2 or len(table) != count:
            raise InputError(f"block_table is {list(table.shape)}, expected [{count}, blocks]: a row a sequence")
        parts = [{"block_table": table[b : b + 1]} for b in range(count)]
    for name, array in arrays.items():
        if name in starts:
            continue
        by = "past_indptr" if INPUTS.get(name, "T").split()[0] == "S" else "qo_indptr"
        at = starts.get(by)
        if at is None:
            raise InputError(f"{name} is given, expected past_c_kv and past_indptr with it")
        if not array.ndim or len(array) != at[-1]:
            raise InputError(f"{name} is {list(array.shape)}, expected {at[-1]} rows as {by} has")
        for b, part in enumerate(parts):
            part[name] = array[at[b] : at[b + 1]]
    return parts


def _check_blocks(every: list[Sequence]) -> None:
    """Raise InputError where two sequences of the paged form share a block."""
    owner: dict[int, str] = {}
    for sequence in every:
        if sequence.state.store is None:
            return
        for i in range(sequence.state.places.table.size):
            block, said = int(sequence.state["block_table"][0, i]), f"block_table[{sequence.number}, {i}]"
            if block in owner:
                raise InputError(f"{said} is {block}, as {owner[block]} is: rows of two sequences")
            owner[block] = said


def _sizes(config: LayerConfig, state: State) -> Sizes:
    tokens = len(state["hidden_states"])
    rows = len(state["past_c_kv"]) + tokens
    if config.indexer is None:
        return Sizes(tokens, rows, 0, rows, 0, 0)
    keys = rows // (config.indexer.kpool or 1)
    return Sizes(tokens, rows, keys, rows, keys, width_of(config.indexer, keys))


def _counts(sizes: Sizes) -> dict[str, int]:
    return {"T": sizes.tokens, "N": sizes.rows, "keys": sizes.keys}
