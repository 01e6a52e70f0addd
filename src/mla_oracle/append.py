# SPDX-License-Identifier: Apache-2.0
"""New rows into a paged cache."""

from __future__ import annotations

import itertools

import numpy as np

from . import dtypes
from .arrays import FLOATS, Axes
from .backends import choose_kernels, machine
from .errors import InputError


def append_kv(
    kv_cache: object, c_kv: object, k_pe: object, slot_mapping: object, *, backend: str = "auto"
) -> None:
    """Write new rows [c_kv | k_pe] into `kv_cache`, in place, bit for bit.

    kv_cache [num_blocks, block_size, L + R]; c_kv [T, L] and k_pe [T, R] of the same dtype, R may be 0;
    slot_mapping [n] i64 with n <= T: row t goes to slot block * block_size + offset, a negative slot skips the row,
    rows beyond n are padding and are not written. Nothing is written unless everything is valid.
    `backend` is auto or strict, or cuda or ptx as in `decode_paged`: the cache goes to the machine and back.
    """
    kernels = choose_kernels(backend)
    axes = Axes()
    kv_cache = axes.take("kv_cache", kv_cache, "num_blocks block_size D", FLOATS)
    same = (dtypes.name_of(kv_cache.dtype),)
    c_kv = axes.take("c_kv", c_kv, "T L", same)
    k_pe = axes.take("k_pe", k_pe, "T R", same)
    slots = axes.take("slot_mapping", slot_mapping, "n", ("i64",))
    if axes["L"] + axes["R"] != axes["D"]:
        raise InputError(
            f"kv_cache rows are {axes['D']} wide, expected c_kv's {axes['L']} + k_pe's {axes['R']} elements"
        )
    if axes["n"] > axes["T"]:
        raise InputError(f"slot_mapping has {axes['n']} entries, expected at most c_kv's {axes['T']} rows")
    if not kv_cache.flags.writeable:
        raise InputError("kv_cache is read-only, expected an array to write into")
    capacity = axes["num_blocks"] * axes["block_size"]
    (rows,) = np.nonzero(slots >= 0)
    for t in rows[slots[rows] >= capacity][:1]:
        raise InputError(f"slot_mapping[{t}] is {slots[t]}, expected below {capacity}, the slots of kv_cache")
    order = rows[np.argsort(slots[rows], kind="stable")]
    for t, u in itertools.pairwise(order):
        if slots[t] == slots[u]:
            raise InputError(f"slot_mapping[{u}] is {slots[u]}, which slot_mapping[{t}] already is")
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
