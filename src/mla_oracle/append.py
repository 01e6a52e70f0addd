# SPDX-License-Identifier: Apache-2.0
"""New rows into a paged cache."""

from __future__ import annotations

import itertools

import numpy as np

from . import dtypes
from .arrays import FLOATS, Array, Axes, Shaped, as_array
from .backends import choose_kernels, machine, refuse_stream
from .errors import InputError


def append_kv(
    kv_cache: object,
    c_kv: object,
    k_pe: object,
    slot_mapping: object,
    *,
    backend: str = "auto",
    stream: object = None,
) -> None:
    """Write new rows [c_kv | k_pe] into `kv_cache`, in place, bit for bit.

    kv_cache [num_blocks, block_size, L + R]; c_kv [T, L] and k_pe [T, R] of the same dtype, R may be 0;
    slot_mapping [n] i64 with n <= T: row t goes to slot block * block_size + offset, a negative slot skips the row,
    rows beyond n are padding and are not written. Nothing is written unless everything is valid.
    `backend` is auto or strict, or cuda or ptx as in `decode_paged`: the cache goes to the machine and back. A cache
    that lies on a GPU, with the rows, is written there, on `stream`, without a wait; slots that lie there too are taken
    as they are.
    """
    kernels = choose_kernels(backend)
    if kernels == "cuda":
        from .gpu import calls

        arrays = {"kv_cache": kv_cache, "c_kv": c_kv, "k_pe": k_pe, "slot_mapping": slot_mapping}
        if calls.any_foreign(*arrays.values()):
            return calls.append_kv(arrays, stream)
    refuse_stream(stream)
    axes = Axes()
    kv_cache = as_array("kv_cache", kv_cache)
    c_kv, k_pe, slots = as_array("c_kv", c_kv), as_array("k_pe", k_pe), as_array("slot_mapping", slot_mapping)
    check_shapes(axes, kv_cache, c_kv, k_pe, slots)
    if not kv_cache.flags.writeable:
        raise InputError("kv_cache is read-only, expected an array to write into")
    rows = check_slots(slots, axes["num_blocks"] * axes["block_size"])
    if kernels:
        from .gpu import forms
        from .gpu.layout import put

        on = machine(kernels)
        buffers = [put(on, array) for array in (kv_cache, c_kv, k_pe, np.ascontiguousarray(slots))]
        forms.append(on, *buffers)
        kv_cache[...] = on.download(buffers[0])
        return
    block, offset = np.divmod(slots[rows], axes["block_size"] or 1)
    kv_cache[block, offset] = np.concatenate([c_kv[rows], k_pe[rows]], axis=1)


def check_shapes(axes: Axes, kv_cache: Shaped, c_kv: Shaped, k_pe: Shaped, slots: Shaped) -> None:
    """Raise InputError unless the four fit together; binds their axes."""
    axes.check("kv_cache", kv_cache, "num_blocks block_size D", FLOATS)
    same = (dtypes.name_of(kv_cache.dtype),)
    axes.check("c_kv", c_kv, "T L", same)
    axes.check("k_pe", k_pe, "T R", same)
    axes.check("slot_mapping", slots, "n", ("i64",))
    if axes["L"] + axes["R"] != axes["D"]:
        raise InputError(
            f"kv_cache rows are {axes['D']} wide, expected c_kv's {axes['L']} + k_pe's {axes['R']} elements"
        )
    if axes["n"] > axes["T"]:
        raise InputError(f"slot_mapping has {axes['n']} entries, expected at most c_kv's {axes['T']} rows")


def check_slots(slots: Array, capacity: int) -> Array:
    """The rows that are written. Raises InputError for a slot that is not there, or is written twice."""
    (rows,) = np.nonzero(slots >= 0)
    for t in rows[slots[rows] >= capacity][:1]:
        raise InputError(f"slot_mapping[{t}] is {slots[t]}, expected below {capacity}, the slots of kv_cache")
    order = rows[np.argsort(slots[rows], kind="stable")]
    for t, u in itertools.pairwise(order):
        if slots[t] == slots[u]:
            raise InputError(f"slot_mapping[{u}] is {slots[u]}, which slot_mapping[{t}] already is")
    return rows
