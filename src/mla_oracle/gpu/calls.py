# SPDX-License-Identifier: Apache-2.0
"""Forms of arrays that lie on a GPU: they are not copied, and the host does not wait.

Lengths, ids and slots may be on the host: there they are checked, then copied. Results are on the device:
DeviceArrays, which cupy.asarray and torch.as_tensor take as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mla_oracle import states
from mla_oracle.append import check_shapes, check_slots
from mla_oracle.arrays import FLOATS, Axes, aligned, as_array
from mla_oracle.checks import value_width
from mla_oracle.errors import InputError
from mla_oracle.gpu import foreign, forms, layout
from mla_oracle.gpu.device import Device
from mla_oracle.gpu.foreign import DeviceArray
from mla_oracle.gpu.machine import contiguous
from mla_oracle.paged import count_tokens


def any_foreign(*arrays: object) -> bool:
    """Whether one of `arrays` lies on a GPU."""
    return any(map(foreign.is_foreign, arrays))


def place(
    arrays: Mapping[str, object], movable: tuple[str, ...], stream: object
) -> tuple[Device, dict[str, Any]]:
    """The device that those on a GPU share, and DeviceArrays there; those in `movable` may be on the host, numpy's.

    Raises InputError for arrays on two devices, or one on the host that may not be there.
    """
    device = Device(foreign.device_of(arrays) or 0, stream)
    taken: dict[str, Any] = {}
    for name, array in arrays.items():
        if foreign.is_foreign(array):
            taken[name] = device.upload(foreign.take(name, array, device.stream))
        elif name in movable:
            taken[name] = aligned(as_array(name, array))
        else:
            as_array(name, array)
            raise InputError(f"{name} is on the host, other arrays on a GPU, expected it there too")
    return device, taken


def decode_paged(
    arrays: Mapping[str, object],
    *,
    softmax_scale: float,
    head_dim_v: object,
    causal: bool,
    lse_unit: float,
    empty_lse: float,
    stream: object,
    check_ids: bool,
    kernel: str | None = None,
) -> tuple[Any, Any]:
    """out and lse of `mla_oracle.decode_paged` for its four arrays by name, on the device that those on a GPU share.

    Lengths and ids on the host are checked there. On the device they are checked if `check_ids`, which waits for it;
    otherwise they are taken as they are. With seq_lens on the device, there is scratch for the longest row that the
    block table can hold.
    """
    device, taken = place(arrays, ("block_table", "seq_lens"), stream)
    axes = Axes()
    has_tokens = taken["q"].ndim != 3
    axes.check("q", taken["q"], "B T H D" if has_tokens else "B H D", FLOATS)
    axes.check("kv_cache", taken["kv_cache"], "num_blocks block_size D", FLOATS)
    axes.check("block_table", taken["block_table"], "B max_blocks", ("i32",))
    axes.check("seq_lens", taken["seq_lens"], "B", ("i32",))
    width = value_width(head_dim_v, axes["D"])
    blocks = axes["num_blocks"], axes["block_size"]

    tables = taken["block_table"], taken["seq_lens"]
    on_host = [isinstance(array, np.ndarray) for array in tables]
    # What is on the host is checked there; zeros stand for what is not.
    known = [array if host else np.zeros(array.shape, np.int32) for array, host in zip(tables, on_host, strict=True)]
    count_tokens(known[0], known[1], *blocks)
    longest = int(tables[1].max(initial=0)) if on_host[1] else None
    q, cache, table, lengths = _put(device, taken)
    if check_ids and not all(on_host) and forms.check_ids(device, table, lengths, *blocks)[0] >= 0:
        count_tokens(device.download(table), device.download(lengths), *blocks)
    if not has_tokens:
        q = replace(q, shape=(q.shape[0], 1, *q.shape[1:]), strides=(q.strides[0], 0, *q.strides[1:]))
    out = device.empty((*q.shape[:3], width), np.float32)
    lse = device.empty(q.shape[:3], np.float32)
    problem = q, cache, table, lengths, softmax_scale, causal, lse_unit, empty_lse, out, lse
    forms.decode_paged(device, *problem, longest=longest, kernel=kernel)
    if has_tokens:
        return out, lse
    return _reshape(out, (*lse.shape[::2], width)), _reshape(lse, lse.shape[::2])


def append_kv(arrays: Mapping[str, object], stream: object) -> None:
    """`mla_oracle.append_kv` of its four arrays by name, on the device that kv_cache lies on."""
    device, taken = place(arrays, ("slot_mapping",), stream)
    axes = Axes()
    check_shapes(axes, *taken.values())
    if taken["kv_cache"].readonly:
        raise InputError("kv_cache is read-only, expected an array to write into")
    if isinstance(slots := taken["slot_mapping"], np.ndarray):
        check_slots(slots, axes["num_blocks"] * axes["block_size"])
    forms.append(device, *_put(device, taken))


def merge_states(
    arrays: Mapping[str, object], lse_unit: float, empty_lse: float, stream: object
) -> tuple[Any, Any]:
    """out and lse of `mla_oracle.merge_states` for its two arrays by name, on the device that those on a GPU share."""
    device, taken = place(arrays, (), stream)
    partial_out, partial_lse = taken.values()
    states.check_shapes(partial_out, partial_lse)
    layout.packed("partial_out", partial_out, partial_out.shape, *FLOATS)
    layout.packed("partial_lse", partial_lse, partial_lse.shape, "f32")
    S, *rows, V = partial_out.shape
    N = math.prod(rows)
    out, lse = device.empty((*rows, V), np.float32), device.empty(tuple(rows), np.float32)
    with np.errstate(over="ignore"):
        marker = float(np.float32(empty_lse))
    partial = _reshape(partial_out, (S, N, V)), _reshape(partial_lse, (S, N))
    forms.merge(device, *partial, lse_unit, marker, empty_lse, _reshape(out, (N, V)), _reshape(lse, (N,)))
    return out, lse


def _reshape(array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
    """A contiguous array in another shape."""
    return replace(array, shape=shape, strides=contiguous(shape, array.dtype.itemsize))


def _put(device: Device, taken: Mapping[str, Any]) -> list[Any]:
    """Buffers of what was taken: a copy of a numpy array, the array itself where it is on the device."""
    return [
        layout.put(device, np.ascontiguousarray(array) if array.ndim == 1 else array)
        if isinstance(array, np.ndarray)
        else array
        for array in taken.values()
    ]
