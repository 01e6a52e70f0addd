# SPDX-License-Identifier: Apache-2.0
"""What page tables have in common, whatever their spelling: which entries are in use, and entries of all requests in a
row and apart. The spellings stand in tables.py and selections.py.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array, Axes
from ..errors import InputError
from ..geometry import check_integer

INTEGERS = ("i32", "i64", "u32")
MAX_ENTRIES = 2**28  # of a table
I32_MAX = 2**31 - 1


def csr(indptr: object, indices: object) -> tuple[Array, Array]:
    """How many indices each request has [B] i64, and the indices."""
    entries = Axes().take("indices", indices, "entries", INTEGERS)
    return counts_of("indptr", indptr, len(entries), "indices"), entries


def counts_of(name: str, indptr: object, total: int, of: str) -> Array:
    """How many of the `total` rows of `of` each request has [B] i64, by the starts indptr [B + 1]."""
    starts = Axes().take(name, indptr, "B+1", INTEGERS).astype(np.int64)
    if len(starts) == 0:
        raise InputError(f"{name} is empty, expected [B + 1]")
    if starts[0] != 0:
        raise InputError(f"{name}[0] is {starts[0]}, expected 0")
    counts = np.diff(starts)
    for b in np.flatnonzero(counts < 0)[:1]:
        raise InputError(f"{name}[{b + 1}] is {starts[b + 1]}, expected at least {starts[b]}, {name}[{b}]")
    if starts[-1] != total:
        raise InputError(f"{name}[{len(counts)}] is {starts[-1]}, expected {total}, the length of {of}")
    return counts


def canonical(block_table: object, seq_lens: object, block_size: int) -> tuple[Array, Array, Array]:
    """block_table, seq_lens in i64, and which entries are in use [B, max_blocks] bool."""
    axes = Axes()
    table = axes.take("block_table", block_table, "B max_blocks", ("i32",))
    lens = axes.take("seq_lens", seq_lens, "B", ("i32",))
    used = in_use("seq_lens", "block_table", table, lens, block_size)
    check_ids("block_table", table, used, None)
    return table, lens.astype(np.int64), used


def token_slots(block_table: object, seq_lens: object, block_size: int) -> tuple[Array, Array]:
    """The slots of all tokens in a row [tokens] i32, and the lengths in i64."""
    table, lens, _ = canonical(block_table, seq_lens, block_size)
    owner, token = rows_of(lens)
    slots = table[owner, token // block_size].astype(np.int64) * block_size + token % block_size
    for k in np.flatnonzero(slots > I32_MAX)[:1]:
        b, j = owner[k], token[k] // block_size
        raise InputError(f"block_table[{b}, {j}] is {table[b, j]}, expected a block whose slots are below 2^31")
    return slots.astype(np.int32), lens


def in_use(lens_name: str, table_name: str, table: Array, lens: Array, block_size: int) -> Array:
    """Which entries of a table are in use [B, max_blocks] bool; the lengths must be in its reach."""
    block_size = check_integer("block_size", block_size, least=1)
    reach = table.shape[1] * block_size
    wide = lens.astype(np.int64)
    for b in np.flatnonzero((wide < 0) | (wide > reach))[:1]:
        raise InputError(
            f"{lens_name}[{b}] is {lens[b]}, expected 0 to {reach}:"
            f" {table_name} has {table.shape[1]} blocks of {block_size} a request"
        )
    check_lens(lens_name, wide, block_size)
    used: Array = np.arange(table.shape[1]) < -(-wide // block_size)[:, None]
    return used


def check_lens(name: str, lens: Array, block_size: int) -> None:
    for b in np.flatnonzero(lens > I32_MAX)[:1]:
        raise InputError(f"{name} gives request {b} {lens[b]} tokens in blocks of {block_size}, expected below 2^31")


def check_ids(name: str, ids: Array, used: Array, size: int | None, rows: Array | None = None) -> None:
    """Every id in use is one of a cache of `size` blocks; `rows` are the rows that those of `ids` were taken from."""
    last = I32_MAX if size is None else size - 1
    for at in np.argwhere(used & ((ids < 0) | (ids > last)))[:1]:
        value = ids[tuple(at)]
        if rows is not None:
            at[0] = rows[at[0]]
        raise InputError(f"{name}{at.tolist()} is {value}, expected 0 to {last}")


def empty_table(counts: Array) -> Array:
    """A table [B, max(counts)] i32 of -1; of one column at least."""
    width = max(1, int(counts.max(initial=0)))
    if len(counts) * width > MAX_ENTRIES:
        raise InputError(f"the lengths need a table of {len(counts)} x {width}, expected at most {MAX_ENTRIES} entries")
    return np.full((len(counts), width), -1, np.int32)


def rows_of(counts: Array) -> tuple[Array, Array]:
    """For sum(counts) entries in a row: whose each is, and which of its owner's."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]


def indptr_of(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
